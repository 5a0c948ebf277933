"""Check a loaded spec without running it: templates, code files, rewards, names, files.

The checks render every template with sample rows, parse Python files without importing them, and use no network.
Anything that only a hub, an extra or an engine could confirm is a warning. The caller passes the rows
(`hermes_rl.data.check` reads them). `hermes_rl.spec.check_code` is imported only for a spec that names code.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hermes_rl.errors import Problem, SpecError
from hermes_rl.others_files import read_regular
from hermes_rl.spec.argument_types import ChatCalls, ChatMessages, CheckedToolSchemas, GoldTurn, Role, ToolSchemas
from hermes_rl.spec.findings import Findings, locating
from hermes_rl.spec.model import Spec
from hermes_rl.spec.nodes import NodePath
from hermes_rl.spec.paths import FILE_FORMATS
from hermes_rl.spec.prompts import messages_of
from hermes_rl.spec.reward_rules import require
from hermes_rl.spec.row_files import (
    LOCATED_ARGUMENTS,
    image_path,
    image_url,
    located_files,
    placed_files,
    require_in_home,
    require_offered,
)
from hermes_rl.spec.rules import asked_first
from hermes_rl.spec.section import EnvText, PathText, SystemText, is_template, to_plain
from hermes_rl.spec.sections.agent import PROGRAM_VALUES
from hermes_rl.spec.sections.common import File
from hermes_rl.spec.sections.prompt import Content, Prompt, User
from hermes_rl.spec.sections.sandbox import SandboxSection
from hermes_rl.spec.sections.tools import TextFile, ToolSection
from hermes_rl.spec.server_types import refused_part
from hermes_rl.spec.suggest import choices
from hermes_rl.spec.templates import TemplateError, coerce, has_template, render, render_section, render_text

# -------------------------------------------------------------------------- Templates, rendered with sample rows

RowColumns = Mapping[str, Any]
TEXT = object()
"""The type of a place that is text, whatever a template gives; the others are checked as their target."""
IMAGE = object()
"""The type of an image: an address, a path, or the bytes themselves."""
SAMPLING_SECONDS = 10.0
"""Processor time for rendering all templates with sample rows; see `hermes_rl.spec.template_limits` for that of one."""


class SampleRow(NamedTuple):
    """A row that templates are rendered with."""

    key: str
    columns: RowColumns


def check_samples(
    spec: Spec,
    samples: Sequence[RowColumns],
    findings: Findings,
    keys: Sequence[str] = (),
    failed: Iterable[NodePath] = (),
) -> None:
    """Render everything with each row; a template that fails is reported once.

    `keys` are the rows' names in messages; default: their numbers, from 1. `failed` are places that were reported.
    """
    failed = set(failed)
    for index, column in enumerate(spec.evaluate.group_by):
        lacking = next((row for row in samples if column not in row), None)
        if lacking is not None:
            findings.problem(
                ("evaluate", "group_by", index), f"there is no column `{column}`{choices(column, lacking)}"
            )
    cpu_start = time.process_time()
    for row_number, row in enumerate(samples, start=1):
        if time.process_time() - cpu_start > SAMPLING_SECONDS:
            message = f"templates take so long that only {row_number - 1} of {len(samples)} sample rows were rendered"
            findings.warning(("prompt",), message, part="key")
            return
        _check_row(spec, row, keys[row_number - 1] if keys else str(row_number), failed, findings)


def _check_row(spec: Spec, row: RowColumns, key: str, failed: set[NodePath], findings: Findings) -> None:
    _check_texts(spec, row, key, failed, findings)
    for prompt_path, prompt in _prompt_values(spec):
        if isinstance(prompt.messages, tuple) and not _has_failed(prompt_path, failed):
            with _report_row_errors(prompt_path, key, failed, findings):
                messages_of(prompt, SampleRow(key, row), spec.folder, ".".join(map(str, prompt_path)))
    for name, reward in spec.rewards.items():
        path: NodePath = ("rewards", name)
        if has_template(reward.args) and not _has_failed(path, failed):
            with _report_row_errors(path, key, failed, findings):
                _check_arguments(spec, name, row if reward.per_step is None else {**row, "step": 0}, key)
    for path, tool in spec.all_tools.items():
        if tool.state is not None and has_template(tool.names) and not _has_failed(path, failed):
            with _report_row_errors((*path, "names"), key, failed, findings):
                _check_chosen(spec, tool, row, key)
    if spec.sandbox.model_fields_set and not _has_failed(("sandbox",), failed):
        _check_section("sandbox", spec.sandbox, row, key, failed, findings)
    if spec.user is not None and spec.user.turns is not None and not _has_failed(("user",), failed):
        _check_section("user", spec.user, row, key, failed, findings)


def _has_failed(node_path: NodePath, failed: set[NodePath]) -> bool:
    """Return True if something at or below a place was reported for an earlier row."""
    return any(path[: len(node_path)] == node_path for path in failed)


@contextmanager
def _report_row_errors(node_path: NodePath, key: str, failed: set[NodePath], findings: Findings) -> Iterator[None]:
    """Report an error of a row with the message that a run would print."""
    try:
        with locating(findings.spec, key, node_path):
            yield
    except SpecError as error:
        failed.add(node_path)
        findings.extend(list(error.problems), [])


def _check_texts(spec: Spec, row: RowColumns, key: str, failed: set[NodePath], findings: Findings) -> None:
    """Check each value by itself, so that the place of one that fails is named."""
    of_program = {**row, **dict.fromkeys(PROGRAM_VALUES, ""), "context": 1}
    of_seat = {**row, "seat": next(iter(spec.agents), ""), "text": "words"}
    for path, text, kind in _rendered_values(spec):
        of_agent = path[2:] if path[0] == "agents" else path
        values = (
            of_program if of_agent[:2] == ("agent", "program") else of_seat if path[-1] == "message_template" else row
        )
        if path[0] == "rewards" and spec.rewards[str(path[1])].per_step is not None:
            values = {**row, "step": 0}
        if any(other[: len(path)] == path for other in failed):
            continue
        if not _check_template(path, text, kind, values, key, findings):
            failed.add(path)
        elif path[-1] == "messages":
            _check_carried(spec, path, text, row, key, failed, findings)


def _check_carried(
    spec: Spec, path: NodePath, messages: Any, row: RowColumns, key: str, failed: set[NodePath], findings: Findings
) -> None:
    """Check the messages that a row gives: the policy's server may not be sent all of their parts."""
    seat_config = spec.agents.get(str(path[1])) if path[0] == "agents" else None
    servers = spec.servers.get("policy" if seat_config is None else seat_config.server, ())
    for server in servers if is_template(messages) else ():
        sent = coerce(render(messages, row, key=key), ChatMessages)
        if (refused := refused_part(sent, server.kind.parts)) is not None:
            failed.add(path)
            findings.problem(path, f"{server.type}: {refused} (row {key})")
            return


def _rendered_values(spec: Spec) -> Iterator[tuple[NodePath, Any, Any]]:
    """Yield the path, value and declared type of every single value that is rendered."""
    for prompt_path, prompt in _prompt_values(spec):
        yield from _values_of_prompt(prompt_path, prompt)
    yield from (
        (("agents", seat, "message_template"), seat_config.message_template, TEXT)
        for seat, seat_config in spec.agents.items()
    )
    for path, tool in spec.all_tools.items():
        if isinstance(tool.schemas, str):
            kind = ToolSchemas if tool.arguments == "strict" else CheckedToolSchemas
            yield (*path, "schemas"), tool.schemas, kind
        yield from _walk_value((*path, "names"), tool.names, list[str] | None)
    if spec.user is not None:
        yield from _content_values(("user", "system"), spec.user.system)
        if spec.user.turns is not None:
            says = spec.user.model_dump(include={"turns"}, by_alias=True, exclude_unset=True)["turns"]
            yield from _templates_below(("user", "turns"), says, None)
    for name, artifact in spec.artifacts.items():
        yield ("artifacts", name, "path"), artifact.path, PathText
        yield ("artifacts", name, "command"), artifact.command, SystemText
    for path, program in spec.programs.items():
        yield from _templates_below(path, program.model_dump(by_alias=True, exclude_unset=True), EnvText)
    yield from _argument_values(spec)
    if spec.solution is not None:
        for name, value in spec.solution.model_dump(by_alias=True, exclude_unset=True).items():
            kinds = {"turns": list[GoldTurn], "patch": TEXT}
            yield from _walk_value(("solution", name), value, kinds.get(name))


def _prompt_values(spec: Spec) -> Iterator[tuple[NodePath, Prompt]]:
    yield ("prompt",), spec.prompt
    yield from (
        (("agents", seat, "prompt"), seat_config.prompt)
        for seat, seat_config in spec.agents.items()
        if seat_config.prompt is not None
    )


def _values_of_prompt(prompt_path: NodePath, prompt: Prompt) -> Iterator[tuple[NodePath, Any, Any]]:
    for name in ("system", "user"):
        yield from _content_values((*prompt_path, name), getattr(prompt, name))
    messages = prompt.messages
    if not isinstance(messages, tuple):
        yield (*prompt_path, "messages"), messages, ChatMessages
    for index, message in enumerate(messages if isinstance(messages, tuple) else ()):
        path = (*prompt_path, "messages", index)
        yield (*path, "role"), message.role, Role
        yield from _content_values((*path, "content"), message.content)
        for name in ("name", "reasoning_content", "tool_call_id"):
            yield (*path, name), getattr(message, name), str | None
        yield from _walk_value((*path, "tool_calls"), message.tool_calls, ChatCalls | None)


def _argument_values(spec: Spec) -> Iterator[tuple[NodePath, Any, Any]]:
    if not spec.rewards:
        return
    from hermes_rl.spec.check_code import argument_types

    for name, reward in spec.rewards.items():
        types = argument_types(spec, name)
        for argument, value in reward.args.items():
            yield from _walk_value(("rewards", name, "args", argument), value, types.get(argument))


def _content_values(path: NodePath, content: Content | None) -> Iterator[tuple[NodePath, Any, Any]]:
    if isinstance(content, tuple):
        for index, part in enumerate(content):
            yield (*path, index, "text"), part.text, TEXT
            yield (*path, index, "image"), part.image, IMAGE
            yield (*path, index, "image_url"), part.image_url, IMAGE
    elif content is not None:
        yield path, content, TEXT


def _walk_value(path: NodePath, value: Any, kind: Any) -> Iterator[tuple[NodePath, Any, Any]]:
    """Yield each template of a value, so that errors name its path, then the complete value if it has templates."""
    if not isinstance(value, str):
        yield from _templates_below(path, value, None)
    if isinstance(value, str) or (kind is not None and has_template(value)):
        yield path, value, kind


def _templates_below(path: NodePath, value: Any, kind: Any) -> Iterator[tuple[NodePath, Any, Any]]:
    """Yield each template inside a value, so that errors name its path. Only a complete value has a declared type;
    parts keep it if it is a text type."""
    item_kind = kind if kind in (str, EnvText, SystemText) else None
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _templates_below((*path, name), item, item_kind)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _templates_below((*path, index), item, item_kind)
    else:
        yield path, value, kind


def _check_template(path: NodePath, value: Any, kind: Any, row: RowColumns, key: str, findings: Findings) -> bool:
    file = Path(value.file) if isinstance(value, TextFile) else None
    try:
        if file is not None:
            value = read_regular(file).decode()
        if is_template(value) and kind in (TEXT, str):
            render_text(value, row, key=key)
        if has_template(value) and kind is not TEXT:
            rendered = render(to_plain(value), row, key=key)
            if kind is IMAGE:
                if rendered not in (None, ""):
                    image_url(rendered, findings.spec.folder, "")
            elif kind is not None:
                coerce(rendered, kind, key=key)
    except TemplateError as error:
        error.row = error.row or key
        findings.template((*path, *error.path), error, file)
        return False
    except (OSError, UnicodeDecodeError):
        return False  # a missing file is reported where files are checked
    return True


def _check_section(
    name: str, section: SandboxSection | User, row: RowColumns, key: str, failed: set[NodePath], findings: Findings
) -> None:
    """Check a section whose values have their own types, value by value first."""
    path: NodePath = (name,)
    for value_path, value, _ in _templates_below(path, section.model_dump(by_alias=True, exclude_unset=True), None):
        if not _check_template(value_path, value, None, row, key, findings):
            failed.add(value_path)
            return
    with _report_row_errors(path, key, failed, findings):
        rendered = render_section(section, row, location=name, key=key)
        for location, files in _files_of(rendered):
            placed_files(files, findings.spec.folder, location)
        if isinstance(rendered, SandboxSection):
            if rendered.backend == "none":
                require_in_home(rendered.workdir, [file.to for file in rendered.files])
            elif rendered.backend == "bubblewrap" and rendered.image:
                assert isinstance(section, SandboxSection)
                image_path(rendered.image, str(section.image), findings.spec.folder, "sandbox.image")
        elif (names := _tool_names(findings.spec)) is not None:
            require_offered(rendered.turns or (), [*names, *list(findings.spec.agents)[1:]])


def _files_of(section: SandboxSection | User) -> Iterator[tuple[str, Sequence[File]]]:
    """Yield the files of a rendered section by their place."""
    if isinstance(section, SandboxSection):
        yield "sandbox.files", section.files
        yield from ((f"sandbox.services.{name}.files", each.files) for name, each in section.services.items())
    else:
        yield from ((f"user.turns.{index}.files", each.files) for index, each in enumerate(section.turns or ()))


def _check_arguments(spec: Spec, name: str, row: RowColumns, key: str) -> None:
    """Raise `TemplateError` if the arguments of a reward do not go together, or name a file that cannot be read."""
    from hermes_rl.spec.check_code import argument_types, signature_of

    location = f"rewards.{name}.args"
    args = render(to_plain(spec.rewards[name].args), row, location=location, key=key)
    for argument in LOCATED_ARGUMENTS:
        located_files(args.get(argument), spec.folder, f"{location}.{argument}")
    types, signature = argument_types(spec, name), signature_of(spec, name)
    typed_arguments = {each: coerce(value, types[each]) if each in types else value for each, value in args.items()}
    if signature is not None:
        require(signature.name, signature.requirements, {**signature.defaults(), **typed_arguments})


def _check_chosen(spec: Spec, tool: ToolSection, row: RowColumns, key: str) -> None:
    """Raise `TemplateError` if a row selects a tool of the state that does not exist. Checked only if all tool names
    are written in the spec, the row, or the code of the state."""
    from hermes_rl.spec.check_code import state_methods

    tool_names: set[str] = set()  # stays empty if the schemas come from the state or from a file
    if tool.schemas is None:
        tool_names = {str(tool.state)} & state_methods(spec)
    elif is_template(tool.schemas):
        tool_names = {each["name"] for each in coerce(render(tool.schemas, row, key=key), ToolSchemas, key=key)}
    for name in (
        coerce(render(to_plain(tool.names), row, key=key), list[str] | None, key=key) or () if tool_names else ()
    ):
        if not set("*?[") & set(name) and name not in tool_names:
            raise TemplateError(f"there is no tool {name!r}{choices(name, tool_names)}")


# ------------------------------------------------------------------------------------------------ The whole spec


def check_spec(
    spec: Spec,
    *,
    known_toolsets: Collection[str] | None = None,
    known_distributions: Collection[str] | None = None,
    samples: Sequence[Mapping[str, Any]] = (),
    keys: Sequence[str] = (),
) -> tuple[list[Problem], list[Problem]]:
    """Return the problems and warnings of a spec. Every template is rendered with `samples`, derived columns included.

    Pass None for `known_toolsets` or `known_distributions` to leave these names unchecked.
    """
    findings = Findings(spec)
    _check_code(spec, findings)
    missing = _check_files(spec, findings)
    _check_toolsets(spec, known_toolsets, known_distributions, findings)
    if spec.rewards:
        from hermes_rl.spec.check_code import check_rewards

        check_rewards(spec, findings)
    else:
        findings.warning((), "there are no rewards, so every rollout scores the same")
    if spec.rewards or spec.all_tools or spec.state is not None:
        from hermes_rl.spec.check_code import recommend_sandboxes

        recommend_sandboxes(spec, findings)
    for mode in ("process", "serve") if spec.dataset.row_selection == "skip_uniform" else ():
        if getattr(spec, mode).group_size == 1:
            message = f"`row_selection: skip_uniform` does nothing in {mode}, whose groups of one rollout never differ"
            findings.warning((mode, "group_size"), message)
    for name in (name for name in spec.unpaid_seats if spec.agents[name].train):
        message = "no reward pays this seat, so it is not trained: name it in a reward's `seats`, or say `train: false`"
        findings.warning(("agents", name), message)
    _check_seat_tools(spec, findings)
    _check_first_words(spec, findings)
    _check_programs(spec, findings)
    _check_far_away(spec, findings)
    check_samples(spec, samples, findings, keys, missing)
    return findings.result()


def _tool_names(spec: Spec) -> list[str] | None:
    """Return the names of all tools of the agent, or None if the spec does not list all of them."""
    names = [tool.python.rpartition(":")[2] for tool in spec.tools if tool.python is not None and tool.names is None]
    if len(names) < len(spec.tools) or "*" in names or spec.toolsets.enabled or spec.toolsets.distribution:
        return None
    return names


def _check_seat_tools(spec: Spec, findings: Findings) -> None:
    """Report tools of seats that do not exist. Checked only if the spec lists the names of all tools."""
    names = _tool_names(spec)
    for seat, seat_config in spec.agents.items() if names is not None else ():
        for name in sorted(set(seat_config.tools or ()) - set(names or ())):
            message = f"agents.{seat}.tools: there is no tool {name!r}{choices(name, names or ())}"
            findings.problem(("agents", seat, "tools"), message)


def _check_first_words(spec: Spec, findings: Findings) -> None:
    """Report seats that would be asked without a user message, which chat templates refuse."""
    order = spec.schedule.order if spec.schedule is not None else None
    speaks_first = spec.user is not None and spec.user.speaks_first
    for seat in asked_first(order, list(spec.agents)) if not speaks_first else ():
        seat_config = spec.agents[seat]
        prompt = spec.prompt if seat_config.prompt is None else seat_config.prompt
        if prompt.user is None and prompt.messages is None and seat_config.agent.program is None:
            path: NodePath = ("agents", seat) if seat_config.prompt is None else ("agents", seat, "prompt")
            message = "the seat speaks first and would be asked without a user message: give its prompt a `user`"
            findings.problem(path, message, part="key")


def _check_programs(spec: Spec, findings: Findings) -> None:
    for path, program in spec.programs.items():
        texts = "\n".join(str(text) for _, text, _ in _templates_below((), program.model_dump(by_alias=True), str))
        if program.command and "endpoint" not in texts and "127.0.0.1" not in texts:
            message = "neither `command`, `env` nor `files` hand on `{{ endpoint }}`: how does it find the model?"
            findings.warning(path, message)


def code_references(spec: Spec) -> Iterator[tuple[NodePath, str, str]]:
    """Yield the path, reference and kind of everything that names code, except rewards."""
    if spec.dataset.generator is not None:
        yield ("dataset", "generator"), spec.dataset.generator, "function"
    functions = (((*path, "python"), program.python or "") for path, program in spec.programs.items())
    yield from ((path, function, "function") for path, function in functions if ".py:" in function)
    if spec.state is not None:
        yield ("state", "python"), spec.state.python, "class"
    if spec.schedule is not None and spec.schedule.fn is not None:
        yield ("schedule", "fn"), spec.schedule.fn, "function"
    if ":" in spec.serve.trainer:
        yield ("serve", "trainer"), spec.serve.trainer, "class"
    for path, tool in spec.all_tools.items():
        if tool.python is not None:
            yield (*path, "python"), tool.python, "function"


def _check_code(spec: Spec, findings: Findings) -> None:
    references = list(code_references(spec))
    if not references:
        return
    from hermes_rl.spec.check_code import (
        check_constructor,
        check_generator,
        check_reference,
        check_state_tools,
        check_tool,
    )

    reference_exists = {path: check_reference(path, text, kind, findings) for path, text, kind in references}
    checks = {"python": check_tool, "generator": check_generator, "trainer": check_constructor}
    for path, reference, _ in references:
        if reference_exists[path] and path[0] not in ("agent", "schedule"):  # whose function may take what it wants
            check = check_constructor if path[0] == "state" else checks[str(path[-1])]
            check(path, reference, findings)
    if reference_exists.get(("state", "python")):
        check_state_tools(spec, findings)


def _check_files(spec: Spec, findings: Findings) -> list[NodePath]:
    """Report missing files; return the paths of the ones that would otherwise also be reported for a row."""
    missing: list[NodePath] = []
    for path, text in _text_files(spec):
        if not Path(text.file).is_file():
            findings.problem((*path, "file"), f"there is no file {text.file}")
    lists: list[tuple[NodePath, Any]] = [(("sandbox", "files"), spec.sandbox.files)]
    lists += [(("tools", n, "mcp", "files"), tool.mcp.files) for n, tool in enumerate(spec.tools) if tool.mcp]
    says = spec.user.turns if spec.user is not None and isinstance(spec.user.turns, tuple) else ()
    lists += [(("user", "turns", n, "files"), turn.files) for n, turn in enumerate(says)]
    for path, files in lists:
        for index, file in enumerate(files if isinstance(files, tuple) else ()):
            if file.from_ is not None and not is_template(file.from_) and not Path(file.from_).exists():
                missing.append((*path, index, "from"))
                findings.problem(missing[-1], f"there is no file or directory {file.from_}")
    image = spec.sandbox.image
    if spec.sandbox.backend == "bubblewrap" and image and not is_template(image) and not Path(image).exists():
        findings.problem(("sandbox", "image"), f"there is no folder or archive {image}")
    services = spec.sandbox.services if isinstance(spec.sandbox.services, Mapping) else {}
    images: dict[NodePath, Any] = {("sandbox", "image"): image}
    images |= {("sandbox", "services", name, "image"): service.image for name, service in services.items()}
    for path, name in images.items() if spec.sandbox.backend == "docker" else ():
        built = str(name).startswith((".", "/")) and not is_template(name)
        if built and not (spec.folder / name / "Dockerfile").is_file():
            findings.problem(path, f"there is no folder {name} with a Dockerfile")
    return missing


def _text_files(spec: Spec) -> Iterator[tuple[NodePath, TextFile]]:
    candidates = [(path, text) for path, text, _ in _rendered_values(spec)]
    candidates += [((*path, "schemas"), tool.schemas) for path, tool in spec.all_tools.items()]
    yield from ((path, text) for path, text in candidates if isinstance(text, TextFile))


def _check_toolsets(
    spec: Spec, toolsets: Collection[str] | None, distributions: Collection[str] | None, findings: Findings
) -> None:
    toolset_references: list[tuple[NodePath, str]] = []
    for key in ("enabled", "disabled"):
        toolset_references += [(("toolsets", key, n), name) for n, name in enumerate(getattr(spec.toolsets, key))]
    if isinstance(spec.toolsets.distribution, Mapping):
        toolset_references += [(("toolsets", "distribution", name), name) for name in spec.toolsets.distribution]
    elif spec.toolsets.distribution is not None and distributions is not None:
        name = spec.toolsets.distribution
        if name not in distributions:
            message = f"there is no distribution `{name}`{choices(name, distributions)}"
            findings.problem(("toolsets", "distribution"), message)
    for path, name in toolset_references:
        if toolsets is not None and name not in toolsets:
            message = f"there is no toolset `{name}`{choices(name, toolsets)}"
            findings.problem(path, message, part="key" if path[1] == "distribution" else "value")


def _check_far_away(spec: Spec, findings: Findings) -> None:
    """Warn about settings that cannot be checked on this machine."""
    if spec.sandbox.backend not in ("bubblewrap", "none"):
        message = f"whether {spec.sandbox.backend} works here, and has the image, was not checked; ask hermes-rl doctor"
        if spec.sandbox.backend == "ssh":
            message += "; use it for `evaluate` and `play` only: other modes refuse it"
        findings.warning(("sandbox", "backend"), message)
    path = spec.dataset.path
    if path is not None and path not in FILE_FORMATS and not Path(path).is_absolute():
        findings.warning(("dataset", "path"), "the dataset is on the hub; its rows and columns were not checked")
    for index, tool in enumerate(spec.tools):
        if tool.mcp is not None:
            findings.warning(("tools", index, "mcp"), "the tools of the MCP server were not checked")
