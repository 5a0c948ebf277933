"""What can be told about a loaded spec without running it: code files, rewards and their arguments, names, files.

Reads Python files as syntax trees, never imports them, and reaches for no network. What only a hub, an extra or an
engine could tell is a warning. Rows are given by the caller (`hermes_rl.data.check` reads them). The checks of code are
imported for a spec that names code.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hermes_rl.errors import Problem
from hermes_rl.spec.check_templates import check_samples
from hermes_rl.spec.findings import Findings
from hermes_rl.spec.model.base import is_template
from hermes_rl.spec.model.prompt import TextFile
from hermes_rl.spec.model.spec import Spec
from hermes_rl.spec.nodes import NodePath
from hermes_rl.spec.paths import FILE_FORMATS
from hermes_rl.spec.suggest import choices


def check_spec(
    spec: Spec,
    *,
    known_toolsets: Collection[str] | None = None,
    known_distributions: Collection[str] | None = None,
    samples: Sequence[Mapping[str, Any]] = (),
) -> tuple[list[Problem], list[Problem]]:
    """Problems and warnings of a spec.

    Args:
        spec: a loaded spec.
        known_toolsets: names of the toolsets that exist; None leaves them unchecked.
        known_distributions: likewise of distributions.
        samples: rows, derived columns included, that every template of the spec is rendered with.
    """
    findings = Findings(spec)
    _check_code(spec, findings)
    _check_files(spec, findings)
    _check_toolsets(spec, known_toolsets, known_distributions, findings)
    _check_rewards(spec, findings)
    _check_far_away(spec, findings)
    check_samples(spec, samples, findings)
    return findings.result()


def code_references(spec: Spec) -> Iterator[tuple[NodePath, str, str]]:
    """Path, reference and kind of everything that names code, but for rewards."""
    if spec.dataset.generator is not None:
        yield ("dataset", "generator"), spec.dataset.generator, "function"
    if spec.state is not None:
        yield ("state",), spec.state, "class"
    if ":" in spec.serve.trainer:
        yield ("serve", "trainer"), spec.serve.trainer, "class"
    for index, tool in enumerate(spec.tools):
        if tool.python is not None:
            yield ("tools", index, "python"), tool.python, "function"
    for index, tool in enumerate(spec.user.tools if spec.user else ()):
        if tool.python is not None:
            yield ("user", "tools", index, "python"), tool.python, "function"


def _check_code(spec: Spec, findings: Findings) -> None:
    references = list(code_references(spec))
    if not references:
        return
    from hermes_rl.spec.check_code import check_reference, check_tool
    from hermes_rl.spec.check_state import check_state_tools

    there = {path: check_reference(path, text, kind, findings) for path, text, kind in references}
    for path, reference, _ in references:
        if there[path] and path[-1] == "python":
            check_tool(path, reference, findings)
    if there.get(("state",)):
        check_state_tools(spec, findings)


def _check_rewards(spec: Spec, findings: Findings) -> None:
    if not spec.rewards:
        findings.warning((), "there are no rewards, so every rollout scores the same")
        return
    from hermes_rl.spec.check_rewards import check_rewards

    check_rewards(spec, findings)


def _check_files(spec: Spec, findings: Findings) -> None:
    for path, text in _text_files(spec):
        if not Path(text.file).is_file():
            findings.problem((*path, "file"), f"there is no file {text.file}")
    lists: list[tuple[NodePath, Any]] = [(("sandbox", "files"), spec.sandbox.files)]
    lists += [(("tools", n, "mcp", "files"), tool.mcp.files) for n, tool in enumerate(spec.tools) if tool.mcp]
    for path, files in lists:
        for index, file in enumerate(files if isinstance(files, tuple) else ()):
            if file.from_ is not None and not is_template(file.from_) and not Path(file.from_).exists():
                findings.problem((*path, index, "from"), f"there is no file or folder {file.from_}")
    image = spec.sandbox.image
    if spec.sandbox.backend == "bubblewrap" and image and not is_template(image) and not Path(image).exists():
        findings.problem(("sandbox", "image"), f"there is no folder or archive {image}")


def _text_files(spec: Spec) -> Iterator[tuple[NodePath, TextFile]]:
    prompt, user = spec.prompt, spec.user
    candidates: list[tuple[NodePath, Any]] = [
        (("prompt", "system"), prompt.system),
        (("prompt", "user"), prompt.user),
        (("user", "system"), user.system if user else None),
    ]
    messages = prompt.messages if isinstance(prompt.messages, tuple) else ()
    candidates += [(("prompt", "messages", n, "content"), message.content) for n, message in enumerate(messages)]
    yield from ((path, text) for path, text in candidates if isinstance(text, TextFile))


def _check_toolsets(
    spec: Spec, toolsets: Collection[str] | None, distributions: Collection[str] | None, findings: Findings
) -> None:
    named: list[tuple[NodePath, str]] = []
    for key in ("enabled", "disabled"):
        named += [(("toolsets", key, n), name) for n, name in enumerate(getattr(spec.toolsets, key))]
    if isinstance(spec.toolsets.distribution, Mapping):
        named += [(("toolsets", "distribution", name), name) for name in spec.toolsets.distribution]
    elif spec.toolsets.distribution is not None and distributions is not None:
        name = spec.toolsets.distribution
        if name not in distributions:
            message = f"there is no distribution `{name}`{choices(name, distributions)}"
            findings.problem(("toolsets", "distribution"), message)
    for path, name in named:
        if toolsets is not None and name not in toolsets:
            message = f"there is no toolset `{name}`{choices(name, toolsets)}"
            findings.problem(path, message, at="key" if path[1] == "distribution" else "value")


def _check_far_away(spec: Spec, findings: Findings) -> None:
    """What cannot be told from here."""
    if spec.sandbox.backend not in ("bubblewrap", "none"):
        message = f"whether {spec.sandbox.backend} works here, and has the image, was not checked; ask hermes-rl doctor"
        findings.warning(("sandbox", "backend"), message)
    path = spec.dataset.path
    if path is not None and path not in FILE_FORMATS and not Path(path).is_absolute():
        findings.warning(("dataset", "path"), "the dataset is on the hub; its rows and columns were not checked")
    for index, tool in enumerate(spec.tools):
        if tool.mcp is not None:
            findings.warning(("tools", index, "mcp"), "the tools of the MCP server were not checked")
