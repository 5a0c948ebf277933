"""`hermes-rl init --from`: draft a spec from an environment of verifiers or a task of Inspect, by its syntax alone.

The file is parsed and never executed. What has no literal value, or no counterpart, is named in the draft and to the
user. Tools are copied; functions that grade become stubs with the old code as a comment.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from hermes_rl.errors import UserError
from hermes_rl.others_files import read_regular
from hermes_rl.spec.check_code import is_installed
from hermes_rl.values import replace_surrogates

MAX_DRAFT_BYTES = 1 << 20
"""Maximum bytes of a file."""
DEEPEST = 20
"""Maximum levels of a value."""
FRAMEWORKS = ("verifiers", "inspect_ai", "datasets")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Arguments = dict[str, ast.expr]
_NONE = ast.List(elts=[], ctx=ast.Load())


class RawText(str):
    """Text that YAML marks with `!raw`, as `{{` in it starts no template."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)
_Dumper.add_representer(RawText, lambda dumper, text: dumper.represent_scalar("!raw", str(text), style='"'))


class SpecDraft:
    """Draft of a spec and its code from one file, and the parts that could not be moved."""

    def __init__(self, path: Path) -> None:
        try:
            self.source = read_regular(path, MAX_DRAFT_BYTES).decode()
            self.tree = ast.parse(self.source)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from error
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise UserError(f"{path} cannot be parsed as Python: {error}") from error
        self.file, self.name = path.name, re.sub(r"[^a-z0-9_]+", "-", path.stem.lower()).strip("-_")[:60] or "draft"
        self.functions = {node.name: node for node in self.tree.body if isinstance(node, Function)}
        self.classes = {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}
        self.left: list[str] = []
        self.spec: dict[str, Any] = {"name": self.name}
        self._names: dict[str, list[ast.expr]] = {}
        self._code: dict[str, str] = {}
        """Definitions of the new file, in addition to the constants and helpers of the old one."""

    # ------------------------------------------------------------------ reading

    def enter(self, function: Function) -> None:
        """Collect the constants of the module, and the defaults and assignments of a function."""
        parameters = [*function.args.posonlyargs, *function.args.args]
        pairs = [*zip(parameters[len(parameters) - len(function.args.defaults) :], function.args.defaults, strict=True)]
        pairs += [
            (each, default)
            for each, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
            if default
        ]
        self._names = {argument.arg: [default] for argument, default in pairs}
        for node in (*self.tree.body, *ast.walk(function)):
            if isinstance(node, Function):
                self.functions.setdefault(node.name, node)
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self._names.setdefault(node.targets[0].id, []).append(node.value)

    def resolved(self, node: ast.expr) -> ast.expr:
        """Return the expression that a name stands for: the last one that was assigned before."""
        while isinstance(node, ast.Name):
            start = node.lineno, node.col_offset
            earlier = [each for each in self._names.get(node.id, ()) if _end_position(each) <= start]
            if not earlier:
                break
            node = max(earlier, key=_end_position)
        return node

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """Return the value of a literal with names of constants in it; raises ValueError if it is something else."""
        node = self.resolved(node)
        if depth > DEEPEST:
            raise ValueError("it is nested too deeply")
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(each, depth + 1) for each in node.elts]
        if isinstance(node, ast.Dict):
            keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
            if not all(isinstance(key, str) for key in keys):
                raise ValueError("a key is not text")
            return {key: self.value(each, depth + 1) for key, each in zip(keys, node.values, strict=True)}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "strip":
            return str(self.value(node.func.value, depth + 1)).strip()
        literal = ast.literal_eval(node)
        if not isinstance(literal, str | int | float | None):
            raise ValueError("YAML has no such value")
        return replace_surrogates(literal) if isinstance(literal, str) else literal

    def call(self, node: ast.expr | None, *names: str) -> tuple[str, Arguments] | None:
        """Return the name of the function that an expression calls, and its arguments, those by position by `names`.

        A position without a name is called `argument N`.
        """
        node = None if node is None else self.resolved(node)
        if not isinstance(node, ast.Call):
            return None
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        more = (f"argument {number}" for number in range(len(names) + 1, len(node.args) + 1))
        placed = dict(zip((*names, *more), node.args, strict=False))
        return name, {**placed, **{each.arg: each.value for each in node.keywords if each.arg is not None}}

    def items_of(self, node: ast.expr) -> list[ast.expr]:
        """Return the members of a list, or the one value that is not a list."""
        node = self.resolved(node)
        return node.elts if isinstance(node, ast.List | ast.Tuple) else [node]

    def leave(self, description: str, node: ast.AST | None = None) -> None:
        """Name a part that is not moved."""
        line = getattr(node, "lineno", None)
        self.left.append(" ".join(description.split()) + ("" if line is None else f" ({self.file}:{line})"))

    def take(self, arguments: Arguments, name: str, put: Callable[[Any], None]) -> None:
        """Move an argument if it is a literal; name it otherwise."""
        if (node := arguments.pop(name, None)) is None:
            return
        try:
            value = self.value(node)
        except (ValueError, TypeError, RecursionError):
            self.leave(f"{name}={shown(node)}", node)
        else:
            if value is not None:
                put(value)

    def leave_all(self, arguments: Arguments) -> None:
        """Name all arguments that are left."""
        for name, node in arguments.items():
            self.leave(f"{name}={shown(node)}", node)

    # ------------------------------------------------------------------ the parts of a spec

    def section(self, name: str) -> dict[str, Any]:
        """Return a section of the spec to fill."""
        section: dict[str, Any] = self.spec.setdefault(name, {})
        return section

    def set(self, section: str, key: str) -> Callable[[Any], None]:
        """Return a function that sets a key of a section."""
        return lambda value: self.section(section).update({key: value})

    def text(self, key: str) -> Callable[[Any], None]:
        """Return a function that sets a text of the prompt, in which nothing is a template."""
        return lambda value: self.section("prompt").update({key: raw(str(value))})

    def items(
        self, node: ast.expr, placeholder: Mapping[str, str], item: Callable[[ast.expr], Any] | None = None
    ) -> None:
        """Move rows that the file lists; without them a row to fill in is the dataset."""
        try:
            rows = [(item or self.value)(each) for each in self.items_of(node)]
            if not rows or not all(isinstance(row, dict) for row in rows):
                raise ValueError("no rows")
        except (ValueError, TypeError, RecursionError):
            self.leave(
                f"dataset: {shown(node)}; write the rows into dataset.items, name a file in dataset.path, or yield "
                "them from a function in dataset.generator",
                node,
            )
            rows = [dict(placeholder)]
        self.section("dataset")["items"] = rows

    def add_reward(self, name: str, reward: Mapping[str, Any], weight: float = 1.0) -> None:
        """Add a reward under its name, or with a number if the name is taken."""
        rewards = self.section("rewards")
        key = name if name not in rewards else f"{name}_{len(rewards) + 1}"
        fn = {} if "fn" in reward or key == name else {"fn": name}
        rewards[key] = {**fn, **reward, **({"weight": weight} if weight != 1.0 else {})}

    def add_tool(self, name: str, code: str) -> None:
        """Add a function of the new file as a tool."""
        self._code[name] = code
        self.spec.setdefault("tools", []).append({"python": f"{self.name}_code.py:{name}"})

    def stub(self, name: str, node: ast.AST, columns: Sequence[str]) -> dict[str, Any]:
        """Return a reward with an empty function, and the old code as a comment."""
        old = textwrap.indent(self.segment(node), "    # ", lambda line: True)
        old = "\n".join(line.rstrip() for line in old.splitlines())
        parameters = ", ".join(["result", *(["*", *columns] if columns else [])])
        self._code[name] = f'def {name}({parameters}):\n{old}\n    raise NotImplementedError("implement {name}")'
        self.leave(f"rewards.{name}: rewrite the function; result.final_response is the last reply", node)
        args = {"args": {column: f"{{{{ {column} }}}}" for column in columns}} if columns else {}
        return {"fn": f"{self.name}_code.py:{name}", **args}

    def segment(self, node: ast.AST) -> str:
        """Return the source of a statement without its indentation, with its decorators."""
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])  # type: ignore[attr-defined]
        return textwrap.dedent("\n".join(self.source.splitlines()[first - 1 : node.end_lineno]))  # type: ignore[attr-defined]

    # ------------------------------------------------------------------ the files

    def spec_text(self, origin: str) -> str:
        """Return the draft, with the parts that were not moved as comments."""
        order = (
            "name",
            "dataset",
            "prompt",
            "user",
            "toolsets",
            "tools",
            "sandbox",
            "agent",
            "rewards",
            "servers",
            "evaluate",
        )
        spec = {key: self.spec[key] for key in order if self.spec.get(key)}
        lines = [f"# A draft of {self.file}, {origin}."]
        lines += ["# It could not move:", *(f"#   - {each}" for each in self.left)] if self.left else []
        return "\n".join([*lines, yaml.dump(spec, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)])

    def code_text(self) -> str:
        """Return the code of the draft: constants and helpers of the file, its tools, and stubs; empty if unused."""
        if not self._code:
            return ""
        for node in self.tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom) and not (_packages(node) <= {*FRAMEWORKS} or _found(node)):
                self.leave(
                    f"`{shown(node)}`: copy the module next to the draft, install its package, or do without", node
                )
        foreign = set(_imported_names(self.tree))
        segments = []
        for node in self.tree.body:
            names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            is_framework = isinstance(node, ast.Import | ast.ImportFrom) and bool(
                foreign & {a.asname or a.name for a in node.names}
            )
            is_declaration = isinstance(
                node, ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign | Function | ast.ClassDef
            )
            if (
                is_declaration
                and not is_framework
                and not names & foreign
                and getattr(node, "name", "") not in (*self._code, "load_environment")
            ):
                segments.append(self.segment(node))
        return "\n\n\n".join(["\n".join(segments), *self._code.values()]).strip() + "\n"


def _end_position(node: ast.expr) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


def shown(node: ast.AST) -> str:
    """Return the start of an expression as text."""
    try:
        text = " ".join(ast.unparse(node).split())
    except RecursionError:
        return "a deeply nested expression"
    return text if len(text) <= 60 else f"{text[:59]}…"


def raw(text: str) -> str:
    """Return a text that is the same after rendering."""
    return RawText(text) if re.search(r"\{\{|\{%|\{#", text) else text


def _imported_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file has from the frameworks."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FRAMEWORKS:
            yield from (each.asname or each.name for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.asname or each.name for each in node.names if each.name.split(".")[0] in FRAMEWORKS)


def _packages(node: ast.Import | ast.ImportFrom) -> set[str]:
    """Return the first names of the imported modules."""
    modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
    return {module.partition(".")[0] for module in modules}


def _found(node: ast.Import | ast.ImportFrom) -> bool:
    """Return True if the import works in another directory too."""
    return not getattr(node, "level", 0) and all(map(is_installed, _packages(node)))


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions and classes in it."""
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop(0)
        yield node
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            pending[:0] = ast.iter_child_nodes(node)


def _returned(draft: SpecDraft, function: Function) -> ast.expr | None:
    """Return the expression that a function returns last."""
    returns = [node.value for node in _own_nodes(function) if isinstance(node, ast.Return) and node.value is not None]
    calls = [each for each in map(draft.resolved, returns) if isinstance(each, ast.Call)]
    return calls[-1] if calls else None


# ------------------------------------------------------------------------------------------------ verifiers


def from_verifiers(draft: SpecDraft) -> None:
    """Move a module with `load_environment`."""
    entry = draft.functions.get("load_environment")
    if entry is None:
        raise UserError(f"{draft.file} has no function load_environment, which environments of verifiers' hub have")
    draft.enter(entry)
    environment_call = draft.call(_returned(draft, entry), "dataset")
    if environment_call is None:
        raise UserError(f"{draft.file}: load_environment returns no environment that can be read from the code")
    kind, arguments = environment_call
    _move_dataset(draft, arguments.pop("dataset", None))
    draft.take(arguments, "system_prompt", draft.text("system"))
    draft.section("prompt")["user"] = "{{ question }}"
    draft.section("agent").update({"max_turns": 1} if kind == "SingleTurnEnv" else {})
    draft.take(arguments, "max_turns", draft.set("agent", "max_turns"))
    for node in draft.items_of(arguments.pop("tools", _NONE)):
        _move_tool(draft, node)
    arguments.pop("parser", None)  # its uses are in the rewards
    for node in [arguments.pop("rubric")] if "rubric" in arguments else []:
        _move_rubric(draft, node)
    for call in ast.walk(entry):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            _move_call(draft, call.func.attr, call)
    draft.leave_all(arguments)
    if kind in draft.classes:
        _environment_class(draft, draft.classes[kind])
    elif kind not in ("SingleTurnEnv", "ToolEnv"):
        draft.leave(f"{kind}: see docs/moving.md", entry)


def _move_call(draft: SpecDraft, method: str, node: ast.Call) -> None:
    """Move what a method of a rubric or an environment adds."""
    if method in ("add_reward_func", "add_metric") and node.args:
        weights = [each.value for each in node.keywords if each.arg == "weight"] + node.args[1:2]
        weight = _read_number(draft, weights[0]) if weights else 1.0
        _reward_function(draft, node.args[0], 0.0 if method == "add_metric" else weight)
    elif method == "add_tool" and node.args:
        _move_tool(draft, node.args[0])
        if len(node.args) > 1 or node.keywords:
            draft.leave(f"{shown(node)}: hidden arguments are attributes of a `state`", node)


def _move_tool(draft: SpecDraft, node: ast.expr) -> None:
    node = draft.resolved(node)
    function = draft.functions.get(node.id) if isinstance(node, ast.Name) else None
    if function is None:
        draft.leave(f"the tool {shown(node)}", node)
    else:
        draft.add_tool(function.name, draft.segment(function))


def _environment_class(draft: SpecDraft, class_node: ast.ClassDef) -> None:
    hints = {
        "env_response": "user: {state: method} replies",
        "setup_state": "a class of `state:` starts so",
        "update_tool_args": "tools are methods of a class of `state:`",
    }
    for node in class_node.body:
        if isinstance(node, Function) and node.name != "__init__":
            draft.leave(f"{class_node.name}.{node.name}: {hints.get(node.name, 'see docs/moving.md')}", node)
        for each in ast.walk(node):
            if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr == "add_tool":
                _move_call(draft, "add_tool", each)


EXAMPLES = {"gsm8k": {"path": "openai/gsm8k", "name": "main", "split": "train"}}
"""Datasets of `load_example_dataset`."""


def _move_dataset(draft: SpecDraft, node: ast.expr | None) -> None:
    node = _NONE if node is None else draft.resolved(node)
    if isinstance(node, ast.Name) and node.id in draft.functions:  # it makes the dataset when it is needed
        node = _returned(draft, draft.functions[node.id]) or node
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        receiver = draft.resolved(node.func.value)
        if not isinstance(receiver, ast.Call):
            break
        draft.leave(f"dataset: .{node.func.attr}(…); see dataset.columns, filter, limit and shuffle", node)
        node = receiver
    name, arguments = draft.call(node, "path", "name", "split") or ("", {})
    path = arguments.get("path", _NONE)
    example = EXAMPLES.get(path.value) if isinstance(path, ast.Constant) and isinstance(path.value, str) else None
    if name == "load_dataset" and "path" in arguments:
        for key in ("path", "name", "split"):
            draft.take(arguments, key, draft.set("dataset", key))
        draft.leave_all(arguments)
    elif name == "load_example_dataset" and example is not None:
        draft.section("dataset").update(example)
    else:
        draft.items(path if name == "from_list" else node, {"question": "…", "answer": "…"})


def _move_rubric(draft: SpecDraft, node: ast.expr) -> None:
    name, arguments = draft.call(node, "funcs", "weights") or ("", {})
    if name == "RubricGroup":
        for each in draft.items_of(arguments.get("rubrics", arguments.get("funcs", _NONE))):
            _move_rubric(draft, each)
    elif name == "Rubric":
        weights = draft.items_of(arguments.pop("weights", _NONE))
        for index, function in enumerate(draft.items_of(arguments.pop("funcs", _NONE))):
            _reward_function(draft, function, _read_number(draft, weights[index]) if index < len(weights) else 1.0)
    elif name == "JudgeRubric":
        judge = {"question": "{{ question }}", "reference": "{{ answer }}"}
        draft.add_reward("llm_judge", {"args": {"rubric": "The answer is the same as the reference.", **judge}})
        server = {"type": "openai", "base_url": "http://localhost:9002/v1", "model": "judge"}
        draft.spec.setdefault("servers", {})["judge"] = server
        draft.take(arguments, "judge_model", lambda model: server.update(model=str(model)))
        draft.leave_all(arguments)
    elif name == "MathRubric":
        draft.add_reward("math_equal", {"args": {"target": "{{ answer }}"}})
    else:
        draft.leave(f"rubric={shown(node)}", node)


def _reward_function(draft: SpecDraft, node: ast.expr, weight: float) -> None:
    node = draft.resolved(node)
    function = draft.functions.get(node.id) if isinstance(node, ast.Name) else None
    called = draft.call(node)
    if function is not None:
        parameter_names = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
        columns = [name for name in parameter_names if name in ("answer", "info", "task")]
        draft.add_reward(function.name, draft.stub(function.name, function, columns), weight)
    elif called is not None and called[0] == "get_format_reward_func" and isinstance(node, ast.Call):
        assert isinstance(node.func, ast.Attribute)
        _, arguments = draft.call(node.func.value, "fields") or ("", {})
        tags: list[Any] = []
        draft.take(arguments, "fields", tags.extend)
        names = [tag for tag in tags if isinstance(tag, str) and tag != "think"]
        if names:
            draft.add_reward("format_tags", {"args": {"tags": names}}, weight)
        draft.leave("format_tags accepts nothing besides the tags, and <think> is reasoning, not text", node)
    else:
        draft.leave(f"the reward {shown(node)}", node)


def _read_number(draft: SpecDraft, node: ast.expr) -> float:
    try:
        return float(draft.value(node))
    except (ValueError, TypeError, RecursionError):
        draft.leave(f"the weight {shown(node)}", node)
        return 1.0


# ------------------------------------------------------------------------------------------------ Inspect


def from_inspect(draft: SpecDraft) -> None:
    """Move the first task of a file."""
    tasks = [
        each
        for each in draft.functions.values()
        if any("task" in shown(decorator) for decorator in each.decorator_list)
    ]
    entry, task_call = next(
        ((task, call) for task in tasks if (call := draft.call(_returned(draft, task), "dataset", "setup", "solver"))),
        (None, None),
    )
    if entry is None or task_call is None:
        raise UserError(f"{draft.file} has no function with @task that returns a Task")
    for other in tasks:
        if other is not entry:
            draft.leave(f"the task {other.name}: write a separate spec for each task", other)
    draft.enter(entry)
    _, arguments = task_call
    _move_samples(draft, arguments.pop("dataset", None))
    draft.section("prompt")["user"] = "{{ input }}"
    if (solver := arguments.pop("solver", arguments.pop("plan", None))) is not None:
        _move_solvers(draft, solver)
    for node in draft.items_of(arguments.pop("scorer", _NONE)):
        _move_scorer(draft, node)
    if (epochs := arguments.pop("epochs", None)) is not None:
        _move_epochs(draft, epochs)
    messages = 2 if "system" in draft.section("prompt") else 1
    draft.take(
        arguments, "message_limit", lambda most: draft.set("agent", "max_turns")(max(1, (int(most) - messages) // 2))
    )
    for limit, key in (
        ("token_limit", "max_trajectory_tokens"),
        ("working_limit", "timeout"),
        ("time_limit", "deadline"),
    ):
        draft.take(arguments, limit, draft.set("agent", key))
    draft.leave_all(arguments)


def _move_samples(draft: SpecDraft, node: ast.expr | None) -> None:
    placeholder = {"input": "…", "target": "0"}
    name, arguments = draft.call(node, "samples", "sample_fields") or ("", {})
    if name == "hf_dataset":
        _, arguments = draft.call(node, "samples", "split", "name") or ("", {})
    if name in ("json_dataset", "csv_dataset", "hf_dataset") and "samples" in arguments:
        arguments["path"] = path = arguments.pop("samples")
        for key in ("path", "name", "split"):
            draft.take(arguments, key, draft.set("dataset", key))
        if name != "hf_dataset" and "path" in draft.section("dataset"):
            draft.leave("dataset.path: copy the file next to the draft, or write its absolute path", path)
        fields = draft.call(arguments.get("sample_fields"), "input", "target")
        if fields is not None and fields[0] == "FieldSpec":
            del arguments["sample_fields"]
            for key in ("input", "target"):
                draft.take(fields[1], key, partial(_move_column, draft, key))
            draft.leave_all(fields[1])
        elif (fields_node := arguments.pop("sample_fields", None)) is not None:
            draft.leave(f"sample_fields={shown(fields_node)}: define input and target in dataset.columns", fields_node)
        draft.leave_all(arguments)
    elif node is not None:
        draft.items(
            arguments.get("samples", node) if name == "MemoryDataset" else node,
            placeholder,
            lambda each: _read_sample(draft, each),
        )
    draft.section("dataset")["eval"] = "only"


def _move_column(draft: SpecDraft, key: str, column: Any) -> None:
    if column != key:
        draft.section("dataset").setdefault("columns", {})[key] = f"{{{{ row[{str(column)!r}] }}}}"


def _read_sample(draft: SpecDraft, node: ast.expr) -> dict[str, Any]:
    name, arguments = draft.call(node, "input", "choices", "target", "id", "metadata") or ("", {})
    if name != "Sample":
        raise ValueError("no Sample")
    return {key: draft.value(each) for key, each in arguments.items()}


CHOICES = (
    "{{ input }}\n{% for each in choices %}\n{{ 'ABCDEFGHIJKLMNOPQRSTUVWXYZ'[loop.index0] }}) {{ each }}{% endfor %}"
)


SOLVER_HINTS = {
    "chain_of_thought": ": add its text to prompt.user",
    "user_message": ": add its text to prompt.user",
    "self_critique": ": another message of the user, in user.turns",
}


def _move_solvers(draft: SpecDraft, solver: ast.expr) -> None:
    generated = False
    node = draft.resolved(solver)
    is_chain = isinstance(node, ast.Call) and (draft.call(node) or ("",))[0] == "chain"
    for each in node.args if isinstance(node, ast.Call) and is_chain else draft.items_of(solver):
        name, arguments = draft.call(each, "first") or ("", {})
        if name == "generate":
            generated = True
        elif name == "user_message" and generated:
            draft.take(arguments, "first", partial(_add_turn, draft))
        else:
            _move_solver(draft, each, name, arguments)


def _add_turn(draft: SpecDraft, text: Any) -> None:
    draft.section("user").setdefault("turns", []).append({"say": raw(str(text))})


def _move_solver(draft: SpecDraft, node: ast.expr, name: str, arguments: Arguments) -> None:
    if name == "system_message":
        draft.take(arguments, "first", draft.text("system"))
    elif name == "prompt_template" and "first" in arguments:
        draft.take(arguments, "first", partial(_set_template, draft))
    elif name == "use_tools" and isinstance(node, ast.Call):
        for each in [tool_node for argument in node.args for tool_node in draft.items_of(argument)]:
            _inspect_tool(draft, each)
    elif name in ("react", "basic_agent"):
        for each in draft.items_of(arguments.pop("tools", _NONE)):
            _inspect_tool(draft, each)
        draft.take(arguments, "prompt", draft.text("system"))
        draft.leave_all(arguments)
    elif name == "multiple_choice":
        draft.section("prompt")["user"] = CHOICES
    else:
        draft.leave(f"the solver {shown(node)}{SOLVER_HINTS.get(name, '')}", node)


def _set_template(draft: SpecDraft, text: Any) -> None:
    draft.section("prompt")["user"] = str(text).replace("{prompt}", "{{ input }}")


def _inspect_tool(draft: SpecDraft, node: ast.expr) -> None:
    name, arguments = draft.call(node) or ("", {})
    sets = {"bash": "terminal", "bash_session": "terminal", "python": "code_execution", "text_editor": "file"}
    factory = draft.functions.get(name)
    nested_functions = [each for each in factory.body if isinstance(each, Function)] if factory is not None else []
    if name in sets:
        toolsets = draft.spec.setdefault("toolsets", [])
        toolsets += [sets[name]] if sets[name] not in toolsets else []
        draft.leave_all(arguments)
    elif nested_functions:
        code = re.sub(
            rf"\bdef {nested_functions[0].name}\(", f"def {name}(", draft.segment(nested_functions[0]), count=1
        )
        draft.add_tool(name, code)
        foreign = sorted(
            {each.id for each in ast.walk(nested_functions[0]) if isinstance(each, ast.Name)}
            & set(_imported_names(draft.tree))
        )
        if foreign:
            draft.leave(
                f"the tool {name} uses {', '.join(foreign)}; a `state` holds data of a rollout", nested_functions[0]
            )
    else:
        draft.leave(f"the tool {shown(node)}", node)


def _move_scorer(draft: SpecDraft, node: ast.expr) -> None:
    name, arguments = draft.call(node, "first") or ("", {})
    target = {"args": {"target": "{{ target }}"}}
    shipped: Mapping[str, tuple[str, Mapping[str, Any]]] = {
        "exact": ("exact_match", target),
        "choice": ("multiple_choice", target),
        "includes": ("contains_all", {"args": {"values": ["{{ target }}"]}}),
        "model_graded_qa": (
            "llm_judge",
            {"args": {"rubric": "The answer is right.", "question": "{{ input }}", "reference": "{{ target }}"}},
        ),
    }
    shipped = {**shipped, "model_graded_fact": shipped["model_graded_qa"]}
    if name == "match":
        numeric = "numeric" in arguments and shown(arguments.pop("numeric")) == "True"
        draft.add_reward("numeric_close" if numeric else "exact_match", target)
    elif name == "pattern":
        draft.take(
            arguments, "first", lambda text: draft.add_reward("regex_match", {"args": {"pattern": raw(str(text))}})
        )
        draft.leave("regex_match compares no group with the target", node)
    elif name in shipped:
        draft.add_reward(*shipped[name])
        if shipped[name][0] == "llm_judge":
            draft.spec["servers"] = {
                "judge": {"type": "openai", "base_url": "http://localhost:9002/v1", "model": "judge"}
            }
    elif name in draft.functions:
        draft.add_reward(name, draft.stub(name, draft.functions[name], ["target"]))
        return
    else:
        draft.leave(f"the scorer {shown(node)}", node)
        return
    draft.leave_all(arguments)


def _move_epochs(draft: SpecDraft, node: ast.expr) -> None:
    _, arguments = draft.call(node, "epochs", "reducer") or ("", {"epochs": node})
    draft.take(arguments, "epochs", draft.set("evaluate", "rollouts"))
    reducers: list[Any] = []
    draft.take(arguments, "reducer", lambda names: reducers.extend(names if isinstance(names, list) else [names]))
    for reducer in reducers:
        if not re.fullmatch(r"mean|pass_at_\d+", str(reducer)):
            draft.leave(f"the reducer {reducer}; the mean, pass@k and pass^k are reported", node)


MOVERS: Mapping[str, Callable[[SpecDraft], None]] = {"verifiers": from_verifiers, "inspect": from_inspect}


def draft_files(path: Path, framework: str) -> tuple[str, dict[str, str], list[str]]:
    """Return the name of a draft, its files by name, and the parts that could not be moved.

    Raises:
        UserError: the file cannot be read or parsed, or holds no environment.
    """
    draft = SpecDraft(path)
    try:
        MOVERS[framework](draft)
    except RecursionError:
        raise UserError(f"{path}: its environment is nested too deeply to be read") from None
    if not draft.spec.get("rewards"):
        draft.leave("rewards: a spec needs at least one")
        draft.add_reward("exact_match", {"args": {"target": "…"}})
    draft.leave("solution: write the turns of a perfect agent, with which `validate --deep` checks the rewards")
    code = draft.code_text()
    files = {f"{draft.name}.yaml": draft.spec_text(framework), f"{draft.name}_code.py": code}
    return draft.name, {name: text for name, text in files.items() if text}, draft.left
