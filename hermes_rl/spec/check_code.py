"""Code that a spec names, checked before it is loaded: tools, state objects, rewards and their arguments.

Everything is read from syntax trees. A name that does not exist would otherwise show when the first rollout starts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from hermes_rl.plugins import closest, did_you_mean
from hermes_rl.shipped import published_rewards, shipped_rewards
from hermes_rl.spec.argument_types import BY_FUNCTION
from hermes_rl.spec.findings import Findings
from hermes_rl.spec.hints import parameters_of_rewards
from hermes_rl.spec.model import Spec
from hermes_rl.spec.nodes import NodePath
from hermes_rl.spec.reward_rules import require, unisolated, unplayable
from hermes_rl.spec.rules import ASKING
from hermes_rl.spec.schema import type_of
from hermes_rl.spec.section import is_template, to_plain
from hermes_rl.spec.sections.rewards import Reward
from hermes_rl.spec.signatures import CodeError, Function, defined, function, imported_names, names_in, parse
from hermes_rl.spec.suggest import choices
from hermes_rl.spec.templates import TemplateError, coerce, has_template

# ------------------------------------------------------------------------------------- Tools of the state object
# Without this check, a wrong name would only be reported when the first rollout starts.

_DYNAMIC = frozenset({"__getattr__", "__getattribute__", "__dict__", "__setattr__", "setattr", "vars", "exec"})
"""Names by which a class can have attributes that are written nowhere."""
_HARMLESS = frozenset({"object", "ABC", "Protocol", "Generic"})
_EXITS = frozenset({"exit", "quit", "sys.exit", "os._exit", "os.abort"})
_KNOWN_DECORATORS = frozenset({"dataclass", "final", "runtime_checkable"})


class _Members(NamedTuple):
    """The attributes that were found, and whether there can be no others."""

    names: frozenset[str]
    complete: bool


def check_state_tools(spec: Spec, findings: Findings) -> None:
    """Check that the class of the state exists and has every tool that the spec takes from it."""
    assert spec.state is not None
    file, _, class_name = spec.state.python.rpartition(":")
    try:
        names = defined(Path(file))
    except CodeError:
        names = {}
    node = names.get(class_name)  # None if the file does not define the class itself
    members = _class_members(node, names, (), Path(file).parent) if isinstance(node, ast.ClassDef) else None
    definitions = names_in(node.body) if isinstance(node, ast.ClassDef) else {}
    for path, name, by_model in _iter_state_references(spec):
        method = definitions.get(name) if by_model else None
        fault = uncallable(method, bound=True) if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) else None
        if fault is not None:
            findings.problem(path, f"tool `{name}` {fault}")
        if members is None:
            findings.warning(path, f"whether the state has `{name}` was not checked")
        elif name not in members.names:
            public = sorted(each for each in members.names if not each.startswith("_"))
            message = f"the state {class_name} has no `{name}`{choices(name, public)}"
            if members.complete:
                findings.problem(path, message)
            else:
                findings.warning(path, f"not certain without running the code: {message}")


def state_methods(spec: Spec) -> set[str]:
    """Return the names of the methods that the state's class defines itself; empty if its file cannot be parsed."""
    file, _, class_name = spec.state.python.rpartition(":") if spec.state is not None else ("", "", "")
    try:
        node = defined(Path(file)).get(class_name)
    except CodeError:
        return set()
    definitions = names_in(node.body) if isinstance(node, ast.ClassDef) else {}
    return {
        name
        for name, definition in definitions.items()
        if isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def _iter_state_references(spec: Spec) -> Iterator[tuple[NodePath, str, bool]]:
    """Yield each name of something that the state has, its place, and whether its signature is what a model calls."""
    user, state = spec.user, spec.state
    references: list[tuple[NodePath, str | None]] = []
    references += [(("user", key), getattr(user, key)) for key in ("state", "transform") if user is not None]
    references += [(("state", key), getattr(state, key)) for key in ("done", "before_user_turn", "close")]
    for name, reward in spec.rewards.items():
        compared = reward.args.get("compare") if reward.fn == "state_matches" else None
        compared_names = compared if isinstance(compared, tuple) else ()
        references += [(("rewards", name, "args", "compare", n), each) for n, each in enumerate(compared_names)]
    yield from ((path, name, False) for path, name in references if isinstance(name, str) and not is_template(name))
    for path, tool in spec.all_tools.items():
        if tool.state is not None:
            yield (*path, "state"), tool.state, tool.schemas is None
        if isinstance(tool.schemas, str) and not is_template(tool.schemas):
            yield (*path, "schemas"), tool.schemas, False


def _class_members(
    node: ast.ClassDef, definitions: dict[str, ast.AST], visited: tuple[str, ...], folder: Path
) -> _Members:
    """Return the members of a class; its bases are looked for in `definitions`, and in the files of `folder`."""
    inside = list(ast.walk(node))
    attributes = [subnode for subnode in inside if isinstance(subnode, ast.Attribute)]
    # Any method may give a value to further attributes.
    names = {*names_in(node.body), *(subnode.attr for subnode in attributes if isinstance(subnode.ctx, ast.Store))}
    used = {subnode.attr for subnode in attributes} | {
        subnode.id for subnode in inside if isinstance(subnode, ast.Name)
    }
    loops = any(isinstance(subnode, ast.For | ast.While | ast.With) for subnode in node.body)
    decorators = [subnode.func if isinstance(subnode, ast.Call) else subnode for subnode in node.decorator_list]
    has_known_decorators = _KNOWN_DECORATORS.issuperset(
        ast.unparse(subnode).rpartition(".")[2] for subnode in decorators
    )
    complete = has_known_decorators and not (node.keywords or loops or _DYNAMIC & (used | names_in(node.body).keys()))
    for base in node.bases:
        subnode = base.value if isinstance(base, ast.Subscript) else base
        base_name = ast.unparse(subnode).rpartition(".")[2]
        parent, around = (
            definitions.get(base_name) if isinstance(subnode, ast.Name) and base_name not in visited else None,
            definitions,
        )
        if isinstance(parent, ast.ImportFrom):
            parent, around = _follow_import(parent, base_name, folder)
        if isinstance(parent, ast.ClassDef):
            inherited = _class_members(parent, around, (*visited, node.name), folder)
            names |= inherited.names
            complete = complete and inherited.complete
        else:
            complete = complete and base_name in _HARMLESS
    return _Members(frozenset(names), complete)


def _follow_import(node: ast.ImportFrom, name: str, folder: Path) -> tuple[ast.AST | None, dict[str, ast.AST]]:
    """Return the definition in a file of `folder` that an import refers to, and all definitions of that file."""
    names = {alias.asname or alias.name: alias.name for alias in node.names}
    file = folder / f"{node.module}.py"
    try:
        definitions = defined(file) if file.is_file() else {}
    except CodeError:
        definitions = {}
    return definitions.get(names[name]), definitions


# ----------------------------------------------------------------------------------- Files and the names in them


def check_reference(path: NodePath, reference: str, kind: str, findings: Findings) -> bool:
    """Return True if `file.py:name` or `package.module:name` exists; report a missing one."""
    source, _, name = reference.rpartition(":")
    if not source.endswith(".py"):  # only the outermost package is looked for: to find one inside would import it
        installed = is_installed(source.partition(".")[0])
        if not installed:
            findings.warning(path, f"the package of {source} is not installed here, so this was not checked")
        return installed
    file = Path(source)
    if not file.exists():
        sibling_names = [entry.name for entry in file.parent.glob("*.py")] if file.parent.is_dir() else []
        findings.problem(path, f"there is no file {file}{did_you_mean(file.name, sibling_names)}")
        return False
    try:
        names = defined(file)
    except CodeError as error:
        findings.problem(path, f"cannot be read as Python: {error}")
        return False
    if name not in names and name != "*":
        # Nobody means an imported name in a spec.
        kinds = (ast.ClassDef,) if kind == "class" else (ast.FunctionDef, ast.AsyncFunctionDef)
        public_names = [each for each, node in names.items() if isinstance(node, kinds) and not each.startswith("_")]
        findings.problem(path, f"{file.name} has no {kind} `{name}`{choices(name, public_names)}")
        return False
    if (fault := _import_problem(file)) is not None:
        findings.problem(path, f"{file.name} {fault}")
        return False
    return True


_EXECUTING = re.compile(
    r"eval|exec|(subprocess|runpy|pty)\..*|(pickle|dill|cloudpickle|joblib|torch)\.(load|loads|Unpickler)"
    r"|os\.(system|popen|exec\w+|spawn\w+|posix_spawnp?)|asyncio\.create_subprocess_\w+"
    r"|(.*\.)?(parse_expr|sympify|read_pickle|unsafe_load)"
)
"""Functions that execute what they are given, or may let it execute code, by their dotted names."""


def recommend_sandboxes(spec: Spec, findings: Findings) -> None:
    """Recommend `isolate: sandbox` for states, tools and rewards that execute text, unless the spec says where."""
    references: list[tuple[NodePath, str]] = []
    if spec.state is not None:
        references.append((("state",), spec.state.python))
    references += [(path, tool.python) for path, tool in spec.all_tools.items() if tool.python is not None]
    for name, reward in spec.rewards.items():
        signature = signature_of(spec, name)
        if signature is not None and "in_runner" not in signature.decorators:
            takes_state = spec.state is not None and any(each.name == "state" for each in signature.parameters)
            references.append((("state",) if takes_state else ("rewards", name), reward.fn))
    for path, reference in references:
        source, _, name = reference.rpartition(":")
        if source.endswith(".py") and not spec.is_written((*path, "isolate")):
            with suppress(CodeError):  # reported elsewhere
                call = _executing_call(Path(source), name)
                if call is not None:
                    findings.warning(
                        path,
                        f"{Path(source).name} calls `{call[0]}` (line {call[1]}): if text of the agent can reach it, "
                        "write `isolate: sandbox`; otherwise write where it runs, such as `isolate: process`",
                    )


def _executing_call(file: Path, name: str) -> tuple[str, int] | None:
    """Return name and line of the first call in a definition that may execute its argument, or None.

    Definitions of the same file that it uses are searched too.
    """
    definitions, imported = defined(file), imported_names(file)
    remaining, searched = [name], set[str]()
    while remaining:
        if (each := remaining.pop()) in searched or each not in definitions:
            continue
        searched.add(each)
        for node in ast.walk(definitions[each]):
            if isinstance(node, ast.Call):
                first, dot, rest = ast.unparse(node.func).partition(".")
                if first not in definitions or first in imported or isinstance(definitions[first], ast.Import):
                    called = imported.get(first, first) + dot + rest
                    if _EXECUTING.fullmatch(called):
                        return called, node.lineno
            elif isinstance(node, ast.Name):
                remaining.append(node.id)
    return None


def _import_problem(file: Path) -> str | None:
    """Return the reason why a file certainly cannot be imported here, or None if that is uncertain, such as for
    imports inside `try`."""
    for node in parse(file).body:
        line = f"(line {node.lineno})"
        if isinstance(node, ast.Raise):
            return f"raises while it is imported {line}"
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in _EXITS:
            return f"ends the program while it is imported {line}"
        if isinstance(node, ast.ImportFrom) and node.level:
            return f"uses a relative import {line}, but is a single file: import without the leading dots"
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for package in (module.partition(".")[0] for module in modules):
                sibling_file = file.parent / f"{package}.py"
                is_local = (file.parent / package).is_dir() or sibling_file.is_file()
                if sibling_file.is_file() and (fault := _syntax_problem(sibling_file)) is not None:
                    return f"imports {sibling_file.name} {line}, which cannot be read as Python: {fault}"
                if not is_local and not is_installed(package):
                    return (
                        f"needs the package `{package}` {line}, which is not installed here: install it, or copy the "
                        f"module next to {file.name}"
                    )
    return None


def _syntax_problem(file: Path) -> str | None:
    """Return the syntax error of a file, or None if it is valid Python."""
    try:
        parse(file)
    except CodeError as error:
        return str(error)
    return None


def is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _find_definition(reference: str) -> tuple[Path, str, ast.AST | None]:
    """Return the file and name of a reference and the definition of that name; None as the definition for other
    modules."""
    file, _, name = reference.rpartition(":")
    return Path(file), name, defined(Path(file)).get(name) if file.endswith(".py") else None


def check_tool(path: NodePath, reference: str, findings: Findings) -> None:
    """Check that a model can call the function of a tool: it has a docstring, and every parameter has a type.

    The signature of a decorated function may differ from its source, so it is checked during the run.
    """
    _, name, node = _find_definition(reference)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
        return
    fault = uncallable(node)
    if fault is None and not ast.get_docstring(node):
        fault = "has no docstring; its first paragraph is the description that the model receives"
    if fault is not None:
        findings.problem(path, f"tool `{name}` {fault}")


def uncallable(node: ast.FunctionDef | ast.AsyncFunctionDef, *, bound: bool = False) -> str | None:
    """Return the reason why a model cannot call a function or method, or None. `bound` skips the `self` parameter."""
    if node.decorator_list:
        return None  # it may have other parameters than it shows
    arguments = node.args
    unnamed = [f"*{argument.arg}" for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    unnamed += [argument.arg for argument in arguments.posonlyargs][1 if bound else 0 :]
    if unnamed:
        return f"has a parameter that a model cannot give ({unnamed[0]}); name it and type it"
    parameters = [*arguments.args[1 if bound and not arguments.posonlyargs else 0 :], *arguments.kwonlyargs]
    untyped = [argument.arg for argument in parameters if argument.annotation is None]
    return f"has a parameter without a type: `{untyped[0]}`; the model receives the type" if untyped else None


GENERATOR = ("seed", "split")
"""What a generator of rows is given, by name."""


def check_generator(path: NodePath, reference: str, findings: Findings) -> None:
    """Check that a generator accepts its call: `fn(seed=…, split=…)`.

    The signature of a decorated function may differ from its source, so it is checked during the run.
    """
    file, name, node = _find_definition(reference)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
        return
    arguments = node.args
    accepted_names = {argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)}
    lacking = [
        f"`{required_name}`"
        for required_name in GENERATOR
        if required_name not in accepted_names and arguments.kwarg is None
    ]
    signature = function(file, name)
    parameters = signature.parameters if signature is not None else ()
    unfilled_names = [each.name for each in parameters if each.required and each.name not in GENERATOR]
    if isinstance(node, ast.AsyncFunctionDef):
        fault = "is `async`, and rows are read without awaiting: write `def`"
    elif lacking:
        fault = f"does not take {' and '.join(lacking)}"
    elif unfilled_names:
        fault = f"requires `{unfilled_names[0]}`, but generators are called only with seed and split"
    else:
        return
    findings.problem(path, f"generator `{name}` {fault}; it is called as {name}(seed=…, split=…)")


def check_constructor(path: NodePath, reference: str, findings: Findings) -> None:
    """Check that a class accepts one argument: a state class its row, a trainer class the spec."""
    _, name, node = _find_definition(reference)
    if not isinstance(node, ast.ClassDef) or node.keywords or node.decorator_list:
        return
    names = names_in(node.body)
    init = names.get("__init__")
    input_name = "row" if path[0] == "state" else "spec"
    if not node.bases and not {"__init__", "__new__"} & names.keys():
        findings.problem(
            path, f"`{name}` has no `__init__` that takes the {input_name}; it is called as {name}({input_name})"
        )
        return
    if not isinstance(init, ast.FunctionDef) or init.decorator_list:
        return
    arguments = init.args
    positional = [*arguments.posonlyargs, *arguments.args][1:]
    required_keywords = [
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    takes_one = bool(positional) or arguments.vararg is not None
    if not takes_one or len(positional) - len(arguments.defaults) > 1 or required_keywords:
        findings.problem(
            path, f"`{name}` cannot be made of the {input_name} alone; it is called as {name}({input_name})"
        )


# ----------------------------------------------------------------------------------- Rewards and their arguments

_ROLE_ARGUMENTS = ("server", "servers")
"""Arguments of shipped rewards that name server roles."""


def _source_of(spec: Spec, name: str) -> Path | None:
    """Return the file of a reward's function, or None if it is not available."""
    file, colon, function_name = spec.rewards[name].fn.rpartition(":")
    user_file = Path(file) if file.endswith(".py") else None
    source_file = user_file if colon else shipped_rewards().get(function_name)
    return source_file if source_file is not None and source_file.is_file() else None


def signature_of(spec: Spec, name: str) -> Function | None:
    """Return the signature of a reward's function, or None if its source is not available."""
    file = _source_of(spec, name)
    try:
        return None if file is None else function(file, spec.rewards[name].fn.rpartition(":")[2])
    except CodeError:
        return None


def looking(spec: Spec) -> list[str]:
    """Return the names of the rewards whose source is available and takes `ctx`, so that they may read the sandbox."""
    signatures = {name: signature_of(spec, name) for name in spec.rewards}
    return [
        name
        for name, signature in signatures.items()
        if signature and any(p.name == "ctx" for p in signature.parameters)
    ]


def check_rewards(spec: Spec, findings: Findings) -> None:
    """Check every reward of a spec."""
    if all(reward.weight == 0 and not reward.gate for reward in spec.rewards.values()):
        findings.warning(("rewards",), "every weight is 0, so every rollout scores the same", part="key")
    for name, reward in spec.rewards.items():
        if _check_reward_exists(name, reward, findings):
            signature = signature_of(spec, name)
            if signature is not None:
                _check_arguments(spec, name, reward, signature, findings)
                _check_playable(spec, name, reward, signature, findings)


def _check_reward_exists(name: str, reward: Reward, findings: Findings, node_path: NodePath | None = None) -> bool:
    """Return True if the function of a reward exists; report a missing one at `node_path`, or at the reward if None."""
    # `fn` names the function; without it, the reward's own name does.
    names_function = node_path is not None or findings.spec.is_written(("rewards", name, "fn"))
    path: NodePath = node_path or (("rewards", name, "fn") if names_function else ("rewards", name))
    fn = reward.fn
    if fn.startswith("atropos:"):
        return True  # the registry is atroposlib's, and importing that takes seconds
    if ":" in fn:
        return check_reference(path, fn, "function", findings)
    shipped = shipped_rewards()
    if fn in shipped:
        return True
    published = [point.name for point in published_rewards()]
    if published.count(fn) > 1:
        message = f"several installed packages publish a reward `{fn}`; name the one that is meant: package.module:{fn}"
        findings.problem(path, message, part="value" if names_function else "key")
    elif not published.count(fn):
        others = [other for other in findings.spec.rewards if other != name]
        reward_names = [*shipped, *published]
        message = f"there is no reward `{fn}`{did_you_mean(fn, [*others, *reward_names]) or choices(fn, reward_names)}"
        findings.problem(path, message, part="value" if names_function else "key")
    return published.count(fn) == 1


def _check_arguments(spec: Spec, name: str, reward: Reward, signature: Function, findings: Findings) -> None:
    argument_names = [argument.name for argument in signature.arguments() if argument.name not in spec.servers]
    path: NodePath = ("rewards", name, "args")
    unknown = [argument for argument in reward.args if argument not in argument_names and not signature.open]
    meant = {alike for argument in unknown if (alike := closest(argument, argument_names))}
    passed = {*reward.args, *spec.servers, *meant}
    missing = [argument.name for argument in signature.arguments() if argument.required and argument.name not in passed]
    needs, hint = _describe_missing(missing, spec, is_user_code=":" in reward.fn) if missing else ("", "")
    for argument in unknown:
        message = f"`{signature.name}` has no argument `{argument}`"
        choice = choices(argument, argument_names) if argument_names else "; it takes none"
        if len(unknown) == 1 and missing:  # the wrong argument is why another one is missing: one mistake, one line
            message, choice = f"{message} and needs {needs}", choice + hint
        findings.problem((*path, argument), message + choice, part="key")
    if missing and len(unknown) != 1:
        message = f"`{signature.name}` needs {needs}, as an argument or as a server role{hint}"
        findings.problem(("rewards", name), message, part="key")
    _check_values(spec, name, signature, findings)
    _check_roles(spec, path, reward, signature, findings)


def _check_playable(spec: Spec, name: str, reward: Reward, signature: Function, findings: Findings) -> None:
    """Report what a run would refuse once it has loaded the function; a decorated one may not be what it shows."""
    known_decorators = {"in_runner", "group_only_for", "takes_at_most", "value_range", "requires"}
    if not known_decorators.issuperset(signature.decorators):
        return
    takes = {parameter.name for parameter in signature.parameters}
    needed = signature.decorators.get("group_only_for")
    problem = unplayable(
        name,
        compares="group" in takes and (needed is None or reward.args.get(needed) is not None),
        looks="ctx" in takes and "group" in takes,
        of_steps=reward.per_step is not None,
        shares=isinstance(reward.seats, Mapping),
    )
    if problem is not None:
        findings.problem(("rewards", name), problem, part="key")
    movable = "in_runner" not in signature.decorators
    problem = unisolated(spec, name, reward, takes_state="state" in takes, movable=movable)
    if problem is not None:
        findings.problem(("rewards", name, "isolate"), problem)
    fallback = reward.args.get("fallback") if reward.fn == "llm_judge" else None
    if isinstance(fallback, str) and not is_template(fallback):
        instead = Reward.model_construct(fn=fallback)
        _check_reward_exists(name, instead, findings, ("rewards", name, "args", "fallback"))


def _describe_missing(missing: list[str], spec: Spec, *, is_user_code: bool) -> tuple[str, str]:
    """Return a description of the missing arguments and a hint at the probable intention.

    `is_user_code`: the function is user code, which may expect parameters that a run does not provide.
    """
    role = next((hint for name in missing if (hint := did_you_mean(name, spec.servers))), "")
    return ", ".join(f"`{name}`" for name in missing), role or (parameters_of_rewards(missing) if is_user_code else "")


def argument_types(spec: Spec, name: str) -> dict[str, Any]:
    """Return the types of a reward's arguments, if its source is available and declares them."""
    signature, file = signature_of(spec, name), _source_of(spec, name)
    if signature is None or file is None:
        return {}
    types = {each.name: type_of(each.annotation, defined(file)) for each in signature.arguments()}
    declared_types = {argument: kind for argument, kind in types.items() if kind is not None}
    return declared_types | dict(BY_FUNCTION.get(signature.name, {}))


def _check_values(spec: Spec, name: str, signature: Function, findings: Findings) -> None:
    """Check the types of argument values without templates; the others are checked when sample rows are rendered."""
    annotations = {each.name: each.annotation for each in signature.arguments()}
    for argument, kind in argument_types(spec, name).items():
        value = spec.rewards[name].args.get(argument, ...)
        if value is ... or has_template(value):
            continue
        try:
            coerce(to_plain(value), kind)
        except TemplateError as error:
            _, _, reason = error.message.partition("does not fit")
            message = f"`{signature.name}` takes {annotations[argument]} here{reason}"
            findings.problem(("rewards", name, "args", argument), message)
            return
    if not has_template(spec.rewards[name].args):
        try:
            require(signature.name, signature.requirements, {**signature.defaults(), **spec.rewards[name].args})
        except TemplateError as error:
            findings.problem(("rewards", name), error.message, part="key")


def _check_roles(spec: Spec, path: NodePath, reward: Reward, signature: Function, findings: Findings) -> None:
    for argument in _ROLE_ARGUMENTS if reward.fn not in ASKING else ():  # of which the spec's rules speak
        value = reward.args.get(argument)
        for role in (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ():
            if isinstance(role, str) and not is_template(role) and role not in spec.servers:
                message = f"there is no server role `{role}`{choices(role, spec.servers)}"
                findings.problem((*path, argument), message)
