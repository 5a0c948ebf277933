"""Tests that are put in place after the agent has ended pass."""

from __future__ import annotations

import ast
import inspect
import json
import posixpath
import re
import secrets
import shlex
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hermes_rl import Score
from hermes_rl.errors import RewardFailure, UserError
from hermes_rl.sandbox.listener import REPORT_FD
from hermes_rl.scoring import isolated_import as apart_tests
from hermes_rl.scoring import isolated_protocol, isolated_relay, isolated_server, reporter
from hermes_rl.scoring.canaries import Planted, add_canaries
from hermes_rl.scoring.control_files import (
    CONFIGURATIONS,
    INIT,
    Steering,
    created,
    named_in_configuration,
    parent_folders,
    renamed,
)
from hermes_rl.scoring.missing_programs import NOT_EXECUTED, NOT_FOUND, last_command, missing, programs
from hermes_rl.scoring.runner_report import RunnerReport, parse_report
from hermes_rl.scoring.test_names import RUNNERS, collected, may_skip, passed

if TYPE_CHECKING:
    from hermes_rl.spec.argument_types import PlacedFile, ReferencePart, SystemText

PROGRAMS = (".py", ".sh", ".bash")
"""Endings of files that are run, and not only read."""
PYTHONPATH = re.compile(r"(?<![\w$])PYTHONPATH=([\"']?)")
SCRIPT = re.compile(r"(?<![\w-])(python[\d.]*(?:\s+-[uBOqv]+)*\s+)(?=([^\s;&|()\"'$`-][^\s;&|()\"']*\.py)(?!\w))")
"""A Python that runs a file, and the file."""
TIMED_OUT = 124
SUSPECT = ("not found", "No module named ", "No such file or directory")
"""What an image that lacks a program may let a command print."""
DELETED = re.compile(r"^ delete (?:mode \d{6} )?(.*)$", re.MULTILINE)
"""What ``git apply --summary`` says of a file that a patch takes away."""
FIND = """
import sys
from importlib.machinery import PathFinder
for name in open(sys.argv[1], "rb").read().decode("utf-8").split():
    spec = PathFinder.find_spec(name, [place for place in sys.path if place])
    if spec is not None and spec.origin:
        print(name, spec.origin, sep="\\t")
"""


def tests_pass(
    ctx: Any,
    *,
    command: SystemText,
    files: list[PlacedFile] | None = None,
    expected: list[str] | None = None,
    apply: str | None = None,
    trust: list[str] | None = None,
    needs: list[str] | None = None,
    reference: str | list[ReferencePart] | None = None,
    canaries: bool | None = None,
    apart: bool = False,
    timeout: float = 180.0,
) -> Score:
    """1 if `command` exits with 0 in the reward's sandbox and its tests have passed, else 0.

    Which tests is `expected`, or else those in the files that the command runs with pytest or unittest.
    A command that cannot run because the image lacks what it needs is a failure of the reward and no score. Whether the
    image lacks it is asked of a new sandbox in which nothing of the rollout is, so that no solution can bring it about.

    Args:
        command: a shell command, run in the working directory.
        files: laid down before, removed after: a list of {to, content | from, mode} with `to` relative to the working
            directory, and `from` a file or folder below the spec's.
        expected: tests (``test_x``, ``file.py::test_x``, ``file.py::Class::test_x[case]``) that have to pass, each of
            that name, whatever the command's exit status says about others. Default: all that the sources of `files`
            show, where the command names pytest or unittest; then the exit status counts too. ``[]``: it alone.
        apply: name of an artifact, a patch as `git diff` writes it, to apply first.
        trust: patterns of files of the artifacts that count although they steer how tests run, such as
            ``pyproject.toml``, or are of no kind that patches add; without it these stay as they are in the image.
        needs: programs and Python modules that the image has to bring; default: whatever the command does not find in
            a new sandbox. ``[]``: nothing, where the agent is to install or to make it.
        reference: a right solution: a patch, files as `files`, or turns as the spec's `solution` has them;
            ``solution``: the spec's own. What it skips may be skipped, and nothing else.
        canaries: put copies of the tests whose expected values are changed among them, which score 0 where they pass
            and the `reference` fails them. Default: where there is a reference. Without one they are run behind the
            others, and the metric `canaries` says how many have passed.
        apart: run the tests in a sandbox of their own, which has nothing of the agent, and the code in the reward's.
            For tests that call functions of Python; what the `reference` needs of it is found out by its own run.
        timeout: seconds; a command that takes longer scores 0.
    """
    sources = _sources(files or [])
    tests = _Tests(command, files or [], sources, expected, timeout, apart)
    if apart and tests.names is None:
        raise UserError("tests_pass: `apart` is for commands that run pytest or unittest on `files`")
    of_use = reference and tests.names is not None  # of other commands it would tell nothing
    known = _by_reference(ctx, tests, reference, canaries=canaries is not False) if of_use else _Known()
    within = ctx.resolve(".").rstrip("/") + "/"
    steers = f"{command.replace(within, '')} {_configured(ctx) if RUNNERS.search(command) else ''}"
    paths = [posixpath.normpath(ctx.relative(path)) for path in sources]
    steering = Steering(paths, trust or [], steers, _packages(ctx, paths))
    problem = _withdraw(ctx, steering, apply, command)
    if problem is None and apart:
        return _scored_apart(ctx, tests, known, needs, sing=bool(canaries))
    problem = problem or _lay(ctx, tests.files, known.planted)
    if problem is not None:
        return Score(0.0, reason=problem)
    watch = _Watch(ctx, list(sources)) if tests.can_be_heard else None
    answer, heard = watch.run(command, timeout) if watch else (ctx.terminal(command, timeout=timeout), RunnerReport())
    if answer.get("timed_out"):
        return Score(0.0, reason=f"no end within {timeout:g} s")
    marked = set() if expected else may_skip(sources)
    skips = marked if known.skips is None else known.skips
    score = _judged(tests, answer, heard, known, skips)
    if score.value:
        now = known.planted.sources if known.planted else sources
        rewritten = _rewritten(ctx, command, now)
        score = Score(0.0, reason=f"{rewritten} was changed while the tests ran") if rewritten else score
    unheard = watch is not None and not heard.spoke
    if (unheard or score.value == 0) and _alone(ctx, tests, needs, answer, heard):
        return Score(0.0, reason=f"the tests did not run to their end (exit status {answer['exit_code']})")
    if unheard and watch and expected:
        return _by_pytest(watch.pytest_report(), expected, answer)
    if canaries and score.value and known.planted is None:
        return replace(score, metrics={**score.metrics, **_sung(ctx, tests)})
    return score


@dataclass(frozen=True)
class _Tests:
    """What is run to judge, and what has to pass of it."""

    command: str
    files: list[dict[str, Any]]
    sources: dict[str, str]
    expected: list[str] | None
    timeout: float
    apart: bool = False

    @property
    def names(self) -> list[str] | None:
        """Tests that have to pass; empty where the command chooses them, None where it runs none that can be heard."""
        return collected(self.command, self.sources) if self.expected is None else self.expected or None

    @property
    def can_be_heard(self) -> bool:
        """Whether the command names a runner of tests, or Python with one of the files."""
        scripts = any(_is_one_of(self.sources, path) for _, path in SCRIPT.findall(self.command))
        return self.names is not None or (self.expected is None and scripts)

    def planted(self) -> Planted | None:
        """Return the sources with canaries among the tests; None where a failing test would change what else is run."""
        in_files = collected(last_command(self.command) or "", self.sources)
        if not in_files or not self.names:
            return None
        return add_canaries(self.sources, in_files, sha256(repr((self.command, self.sources)).encode()).hexdigest())


# ------------------------------------------------------------------ what the reference does


@dataclass(frozen=True)
class _Known:
    """What the reference solution has shown of the tests of a row."""

    skips: set[str] | None = None
    """Tests that it skips; None where there is no reference, or it does not pass."""
    planted: Planted | None = None
    counted: frozenset[str] = frozenset()
    """Canaries that it fails."""
    places: tuple[str, ...] = ()
    """Where it needs that its objects are asked for operators with plain values, with `apart`."""
    seconds: float = 0.0
    """How long its tests took, with `apart`."""


def _by_reference(ctx: Any, tests: _Tests, reference: str | list[dict[str, Any]], *, canaries: bool) -> _Known:
    """Run the reference in an untouched sandbox, once for each row."""
    planted = tests.planted() if canaries else None
    said = repr((tests.command, tests.sources, tests.expected, reference, canaries, tests.apart))
    key = f"reference {sha256(said.encode('utf-8', 'surrogatepass')).hexdigest()}"
    known = ctx.recall(key)
    if known is None:
        known = None if planted is None else _played(ctx, tests, reference, planted)
        if known is None:
            known = _played(ctx, tests, reference, None) or {"skips": None, "counted": None}
        ctx.remember(key, known)
    if tests.apart and known["skips"] is None:
        raise RewardFailure(
            "tests_pass: the reference does not pass while its tests run apart from it; leave `apart` out, or change "
            "what docs/sandbox.md says that cannot be carried"
        )
    skips = None if known["skips"] is None else set(known["skips"])
    more = {"places": tuple(known.get("places") or ()), "seconds": known.get("seconds") or 0.0}
    if planted is None or not known["counted"]:
        return _Known(skips, **more)
    return _Known(skips, planted, frozenset(known["counted"]), **more)


def _played(
    ctx: Any, tests: _Tests, reference: str | list[dict[str, Any]], planted: Planted | None
) -> dict[str, Any] | None:
    """Return which tests the reference skips and which canaries it fails; None where it does not pass the tests."""
    places, seconds = list[str](), 0.0
    with ctx.pristine_sandbox() as clean:
        problem = _lay_reference(clean, reference)
        if tests.apart and problem is None:
            limit = max(REFERENCE_TIMES * tests.timeout, REFERENCE_SECONDS)
            answer, heard, problem, places = _run_apart(clean, tests, planted, None, limit)
            seconds = answer.get("seconds", 0.0)
        else:
            problem = problem or _lay(clean, tests.files, planted)
            answer, heard = _Watch(clean, list(tests.sources)).run(tests.command, tests.timeout)
        clean.restore()
    if problem is not None or answer.get("timed_out") or not heard.spoke:
        return None
    own, copies = _divided(heard, planted)
    own = _alike(own)
    skips = [name for name in tests.names or [] if not passed(name, own) and passed(name, own, may_skip=True)]
    known = _Known(set(skips), planted)
    if not _judged(tests, answer, heard, known, set(skips)).value:
        return None
    counted = [name for name, outcome in copies.items() if outcome == {"failed"}]
    return {"skips": skips, "counted": counted if planted else None, "places": places, "seconds": seconds}


def _lay_reference(clean: Any, reference: str | list[dict[str, Any]]) -> str | None:
    if not isinstance(reference, str):
        turns = [each for each in reference if "to" not in each]
        clean.play(turns)
        return _lay(clean, [each for each in reference if "to" in each])
    path = f"/tmp/patch-{secrets.token_hex(16)}"
    clean.write_file(path, reference.rstrip("\n") + "\n")
    answer = clean.terminal(shlex.join(["git", "apply", "--whitespace=nowarn", path]))
    return None if answer["exit_code"] == 0 else answer["output"]


def _divided(heard: RunnerReport, planted: Planted | None) -> tuple[list[tuple[str, str]], dict[str, set[str]]]:
    """Return the outcomes of the tests, by their own names, and those of the canaries."""
    if planted is None:
        return heard.outcomes, {}
    own, copies = list[tuple[str, str]](), dict[str, set[str]]()
    for test, outcome in heard.outcomes:
        name, copied = planted.own_name(test)
        if copied:
            copies.setdefault(name, set()).add(
                "passed" if outcome == "passed" else "failed" if outcome == "failed" else "none"
            )
        else:
            own.append((name, outcome))
    return own, {name: {"failed"} if "failed" in outcomes else outcomes for name, outcomes in copies.items()}


def _alike(outcomes: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return outcomes in which it does not matter by what a test was skipped: the reference says which may be."""
    return [(name, reporter.SKIPPED if said == reporter.SKIPPED_ITSELF else said) for name, said in outcomes]


def _sung(ctx: Any, tests: _Tests) -> dict[str, float]:
    """Run the tests again with canaries among them; how many pass, of which nobody knows whether they should."""
    planted = tests.planted()
    if planted is None or _lay(ctx, tests.files, planted) is not None:
        return {}
    _, heard = _Watch(ctx, list(tests.sources)).run(tests.command, tests.timeout)
    return _passed_copies(heard, planted)


def _passed_copies(heard: RunnerReport, planted: Planted) -> dict[str, float]:
    _, copies = _divided(heard, planted)
    return {"canaries": float(sum(outcomes == {"passed"} for outcomes in copies.values()))}


# ------------------------------------------------------------------ tests in a sandbox of their own

APART = "hermes_rl_apart"
"""The module that has the tests' end of the wire."""
REFERENCE_TIMES, REFERENCE_SECONDS = 4.0, 60.0
"""How much longer than `timeout` the reference may take, as each call is a message, and how long at least."""
SLOWER = 3.0
"""How much longer than the reference a solution may take, where that is more than `timeout`."""


def _scored_apart(ctx: Any, tests: _Tests, known: _Known, needs: list[str] | None, *, sing: bool) -> Score:
    """Judge the code in the reward's sandbox by tests in another."""
    limit = max(tests.timeout, SLOWER * known.seconds)
    answer, heard, problem, _ = _run_apart(ctx, tests, known.planted, known.places, limit)
    if problem is not None:
        raise RewardFailure(f"tests_pass: {problem}")  # nothing of the agent is where the tests are put in place
    if answer.get("timed_out"):
        return Score(0.0, reason=f"no end within {limit:g} s")
    marked = set() if tests.expected else may_skip(tests.sources)
    score = _judged(tests, answer, heard, known, marked if known.skips is None else known.skips)
    unheard = not heard.spoke
    if (unheard or score.value == 0) and _alone(ctx, tests, needs, answer, heard):
        return Score(0.0, reason=f"the tests did not run to their end (exit status {answer['exit_code']})")
    if unheard:
        return Score(0.0, reason="the tests said nothing")
    planted = tests.planted() if sing and score.value and known.planted is None else None
    if planted is not None:
        heard = _run_apart(ctx, tests, planted, known.places, limit)[1]
        return replace(score, metrics={**score.metrics, **_passed_copies(heard, planted)})
    return score


def _run_apart(
    ctx: Any, tests: _Tests, planted: Planted | None, places: Sequence[str] | None, timeout: float
) -> tuple[dict[str, Any], RunnerReport, str | None, list[str]]:
    """Run the tests in an untouched sandbox, and the code in that of `ctx`.

    Return the answer, what was heard, what went wrong, and the places that were noted where `places` is None.
    """
    python = next(
        (word for word in re.findall(r"[\w./-]+", tests.command) if re.fullmatch(r"python[\d.]*", word)), "python3"
    )
    folder = f"/tmp/{secrets.token_hex(16)}"
    serving = f"{_source(isolated_protocol, isolated_server, isolated_relay)}\n\nanswer(serve, {ctx.resolve('.')!r})\n"
    written = ctx.write_file(f"{folder}/server.py", serving)
    if "error" in written:
        return (
            {"exit_code": 1, "output": written["error"]},
            RunnerReport(spoke=True, problem=written["error"]),
            None,
            [],
        )
    with ctx.pristine_sandbox() as clean:
        problem = _lay(clean, tests.files, planted)
        wire, noted = f"{folder}/wire", f"{folder}/noted"
        clean.write_file(f"{folder}/relay.py", f"{_source(isolated_relay)}\n\nlisten({wire!r})\n")
        files = [clean.resolve(path) for path in tests.sources if path.endswith(".py")]
        given = None if places is None else list(places)
        install = f"install({wire!r}, {clean.resolve('.')!r}, {files!r}, {given!r}, {noted!r})"
        more = f"{_source(isolated_protocol, apart_tests)}\n\n{install}\n"
        watch = _Watch(clean, list(tests.sources), more)
        programs = {
            "here": ["python3", "-I", "-S", f"{folder}/relay.py"],
            "there": [python, f"{folder}/server.py"],
        }
        answer, heard = watch.run(tests.command, timeout, **programs)
        lines = clean.read_file(noted).get("content", "").splitlines() if places is None else []
        clean.restore()
    return answer, heard, problem, sorted({str(json.loads(line)) for line in lines})


def _source(*modules: Any) -> str:
    """Return modules of ours as one source, which needs nothing but Python."""
    return "from __future__ import annotations\n" + "\n\n".join(map(_without_ours, modules))


def _without_ours(module: Any) -> str:
    source = inspect.getsource(module)
    lines = source.split("\n")
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("hermes_rl", "__future__")):
            lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
    return "\n".join(lines)


# ------------------------------------------------------------------ what is put in place


def _sources(files: list[dict[str, Any]]) -> dict[str, str]:
    """The files one by one, by path, with their text."""
    found = {}
    for file in files:
        if "from" not in file:
            content = file["content"]
            found[file["to"]] = content if isinstance(content, str) else content.decode("utf-8", "replace")
            continue
        source = Path(file["from"])
        for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if path.is_file():
                inner = f"/{path.relative_to(source)}" if path != source else ""
                found[file["to"] + inner] = (
                    path.read_bytes().decode("utf-8", "replace") if path.suffix in PROGRAMS else ""
                )
    return found


def _rewritten(ctx: Any, command: str, sources: dict[str, str]) -> str | None:
    """Return a test that is no longer what was put in place: a shell reads its script while it runs.

    Data beside the tests may be written by them; what is run may not.
    """
    for path, source in sources.items():
        run = path.endswith(PROGRAMS) or posixpath.basename(path) in command
        if run and source and ctx.read_file(path).get("content") != source:
            return path
    return None


def _packages(ctx: Any, paths: Sequence[str]) -> set[str]:
    """Return the folders above tests that are packages in the image, or are made such by the tests' own files."""
    marks = {f"{folder}/{INIT}" for path in paths for folder in parent_folders(path) if folder not in ("", "/")}
    own = marks & set(paths)
    there = (_there(ctx, sorted(marks - own)) or set()) - set(ctx.restored_files()) if marks - own else set()
    return {posixpath.dirname(mark) for mark in own | there}


def _configured(ctx: Any) -> str:
    """Return the folders in which the configuration of pytest lets Python look for modules."""
    look = f"grep -hs -A20 '^[[:space:]]*pythonpath' {' '.join(CONFIGURATIONS)} | head -c 20000"
    return named_in_configuration(ctx.terminal(look)["output"])


def _withdraw(ctx: Any, steering: Steering, apply: str | None, command: str) -> str | None:
    """Leave out what steers of the artifacts that lie there, and of the patch `apply`; what went wrong, if anything."""
    laid: dict[str, bool] = ctx.restored_files()
    known = {steering.shadows(path) for path, replaced in laid.items() if replaced}
    out = [path for path in laid if steering.steers(path) or steering.shadows(path) not in (known | {None})]
    try:
        ctx.withdraw(out)
        new = [path for path, replaced in laid.items() if not replaced and path not in out]
        ctx.withdraw(_in_front(ctx, steering, new, command))
    except OSError as error:
        return f"a file that steers tests cannot be left out: {error}"
    problem = _apply(ctx, apply, steering, command, out) if apply is not None else None
    for path in steering.packages(out):
        if "error" in ctx.read_file(path):
            ctx.write_file(path, "")  # what imports by the names of packages goes on as before
    return problem


def _in_front(ctx: Any, steering: Steering, paths: Sequence[str], command: str) -> list[str]:
    """Return those of these new files that Python would import instead of what the image has installed."""
    modules = steering.modules(paths)
    if not modules:
        return []
    python = next((word for word in re.findall(r"[\w./-]+", command) if re.fullmatch(r"python[\d.]*", word)), "python3")
    names = "\n".join(sorted(modules))
    key = f"installed {python} {sha256(names.encode()).hexdigest()}"
    installed: list[str] | None = ctx.recall(key)
    if installed is None:
        listing = f"/tmp/list-{secrets.token_hex(16)}"  # as arguments so many names may be more than a program takes
        ctx.write_file(listing, names)
        answer = ctx.terminal("cd / && " + shlex.join([python, "-c", FIND, listing]))
        within = ctx.resolve(".").rstrip("/") + "/"
        lines = [line.split("\t") for line in answer["output"].splitlines() if "\t" in line]
        installed = [
            name
            for name, origin, *_ in lines
            if name in modules and (not origin.startswith(within) or "-packages/" in origin)
        ]
        ctx.remember(key, installed)
    return [path for name in installed for path in modules[name]]


def _apply(ctx: Any, name: str, steering: Steering, command: str, out: list[str]) -> str | None:
    """Apply a patch, but for the files that steer, which are added to `out`; what went wrong, if anything."""
    try:
        patch = ctx.artifact(name)
    except OSError as error:
        return f"artifact {name}: {error.strerror}"
    if not patch.strip():
        return None
    path = f"/tmp/patch-{secrets.token_hex(16)}"
    written = ctx.write_file(path, patch)
    listed = ctx.terminal(shlex.join(["git", "apply", "--numstat", "-z", path]) + " 2>/dev/null")
    summary = ctx.terminal(shlex.join(["git", "apply", "--summary", path]) + " 2>/dev/null | grep '^ delete '")
    if listed["exit_code"] == NOT_FOUND and _lacks_git(ctx):
        raise RewardFailure("tests_pass: the image lacks 'git', which `apply` needs")
    changed = [line.split("\t", 2)[2] for line in listed["output"].split("\0") if line.count("\t") >= 2]
    text = patch.decode("utf-8", "replace")
    away = {target for source, target in renamed(text) if steering.steers(source) or steering.holds(source)}
    cut = listed.get("truncated") or summary.get("truncated")
    listable = not cut and "\ufffd" not in listed["output"] and away <= set(changed)
    there = _there(ctx, changed + _modules_of(steering, changed)) if listable else None
    if there is None:
        return f"artifact {name} changes more files than can be listed, or files whose names cannot"
    # What the spec lays into every sandbox is in a fresh one already; the agent's patch may have it as something new.
    provided = sorted(created(text) & set(ctx.spec_files()))
    # A module of that name which the image has is what is worked on, such as the code of a library that pytest uses.
    known = {line.removesuffix(".py") for line in there}
    new = [path for path in changed if path not in there]
    excluded = {path for path in changed if steering.steers(path) or steering.shadows(path) not in (known | {None})}
    excluded |= {path for path in new if not steering.may_add(path)} | away
    excluded |= set(filter(steering.holds, DELETED.findall(summary["output"])))
    excluded |= set(_in_front(ctx, steering, [path for path in new if path not in excluded], command))
    out += sorted(excluded)
    excluded = [f"--exclude={_literal(path)}" for path in (*sorted(excluded), *provided)]
    links = (_there(ctx, changed, test="-h") or set()) if b"120000" in patch else set()
    answer = ctx.terminal(shlex.join(["git", "apply", "--whitespace=nowarn", *excluded, path]))
    if "error" in written or answer["exit_code"] != 0:
        return f"artifact {name} cannot be applied: {written.get('error') or answer['output'][-400:]}"
    if b"120000" in patch:
        for link in sorted((_there(ctx, changed, test="-h") or set()) - links):
            ctx.terminal(shlex.join(["rm", "-f", "--", link]))  # it may lead to what would be left out
    return None


def _modules_of(steering: Steering, paths: Sequence[str]) -> list[str]:
    modules = sorted({module for path in paths if (module := steering.shadows(path)) is not None})
    return [form for module in modules for form in (module, f"{module}.py")]


def _there(ctx: Any, paths: Sequence[str], test: str = "-e") -> set[str] | None:
    """Return which of these paths are in the sandbox; None where that cannot be said."""
    if any("\n" in path for path in paths):
        return None
    listing = f"/tmp/list-{secrets.token_hex(16)}"
    ctx.write_file(listing, "".join(f"{path}\n" for path in paths))
    loop = f'while IFS= read -r p; do if [ {test} "$p" ] || [ -h "$p" ]; then printf "%s\\n" "$p"; fi; done <{listing}'
    answer = ctx.terminal(loop)
    whole = answer["exit_code"] == 0 and not answer.get("truncated")
    return set(answer["output"].split("\n")) & set(paths) if whole else None  # others break lines within names


def _lacks_git(ctx: Any) -> bool:
    with (
        ctx.pristine_sandbox() as clean
    ):  # a git that the agent has put in front of the image's own may end with 127 too
        return clean.terminal("command -v git")["exit_code"] != 0  # type: ignore[no-any-return]


def _literal(path: str) -> str:
    """A pattern of git that matches this path alone."""
    return re.sub(r"([\\*?\[\]])", r"\\\1", path)


def _lay(ctx: Any, files: Sequence[dict[str, Any]], planted: Planted | None = None) -> str | None:
    """Put the files in place, with canaries among the tests where there are some; what went wrong, if anything."""
    for file in files:
        try:
            answer = (
                ctx.upload(file["from"], file["to"])
                if "from" in file
                else ctx.write_file(file["to"], file["content"], file.get("mode"))
            )
        except OSError as error:
            if "from" in file and not Path(file["from"]).exists():
                raise UserError(f"tests_pass: {file['from']}, which is to be laid down, is not there") from error
            return f"the tests cannot be put in place: {error}"
        if "error" in answer:
            return f"the tests cannot be put in place: {answer['error']}"
    names = () if planted is None else (*planted.copies, *planted.originals)
    for path in dict.fromkeys(name.partition("::")[0] for name in names):
        answer = ctx.write_file(path, planted.sources[path]) if planted else {}
        if "error" in answer:
            return f"the tests cannot be put in place: {answer['error']}"
    return None


class _Watch:
    """A reporter in the sandbox, loaded by each Python that the command starts; it speaks to the host directly."""

    def __init__(self, ctx: Any, files: list[str], more: str = "") -> None:
        self._ctx = ctx
        self._files = files
        self._folder = f"/tmp/{secrets.token_hex(16)}"
        self._report = f"/tmp/report-{secrets.token_hex(16)}.xml"
        paths = [ctx.resolve(path) for path in files if path.endswith(".py")]
        text = _alone_in_process(f"begin({self._folder!r}, {ctx.resolve('.')!r}, {paths!r}, {REPORT_FD})")
        if more:  # before the reporter, which tells what changes how modules are found
            ctx.write_file(f"{self._folder}/{APART}.py", more)
            text = f"import {APART}\n{text}"
        ctx.write_file(f"{self._folder}/sitecustomize.py", text)
        ctx.write_file(
            f"{self._folder}/{reporter.SCRIPT}", _alone_in_process("run_script(vars(__import__('__main__')))")
        )

    def run(self, command: str, timeout: float, **apart: Any) -> tuple[dict[str, Any], RunnerReport]:
        """Run the command, with what makes Python load the reporter also where it sets `PYTHONPATH` itself."""
        command = PYTHONPATH.sub(rf"PYTHONPATH=\1{self._folder}:", command)
        if RUNNERS.search(command) is None:
            run = f"{self._folder}/{reporter.SCRIPT} "
            command = SCRIPT.sub(lambda found: found[1] + (run if _is_one_of(self._files, found[2]) else ""), command)
        run = self._ctx.terminal_apart if apart else self._ctx.terminal_heard
        answer = run(
            f'export PYTHONPATH="{self._folder}${{PYTHONPATH:+:$PYTHONPATH}}"\n'
            f'export PYTEST_ADDOPTS="${{PYTEST_ADDOPTS:-}} --junitxml={self._report}"\n{command}',
            timeout=timeout,
            **apart,
        )
        return answer, parse_report(answer["heard"])

    def pytest_report(self) -> dict[str, Any]:
        """What pytest itself has written, for a Python that did not load the reporter."""
        return self._ctx.read_file(self._report)  # type: ignore[no-any-return]


def _is_one_of(files: Iterable[str], path: str) -> bool:
    """Whether a command may mean one of these files by this path; the process itself knows."""
    return posixpath.basename(path) in map(posixpath.basename, files)


def _alone_in_process(call: str) -> str:
    """Return a program that makes this call of the reporter.

    The reporter has built-in names of its own there, and is no module, so that nothing that the code under test
    replaces is used.
    """
    source = f"{inspect.getsource(reporter)}\n\n{call}\n"
    own = "{'__builtins__': dict(vars(__import__('builtins'))), '__name__': 'reporter'}"
    return f"exec(compile({source!r}, 'reporter', 'exec'), {own})\n"


def _alone(ctx: Any, tests: _Tests, needs: list[str] | None, answer: dict[str, Any], heard: RunnerReport) -> bool:
    """Ask a sandbox that the agent never saw: whether the reporter speaks there, and the image has what it needs.

    What the answer of the command says may be the agent's: its code can print anything and end with any status. So it
    is only the reason to look. Raises `RewardFailure` where the image lacks something.
    """
    unheard = tests.can_be_heard and not heard.spoke
    complains = answer["exit_code"] >= NOT_EXECUTED or any(words in answer["output"] for words in SUSPECT)
    suspect = complains and not heard.outcomes and needs != []  # where tests were run, what runs them is there
    if not (suspect or unheard):
        return False
    said = repr((tests.command, tests.sources, tests.timeout, needs, suspect))
    key = f"alone {sha256(said.encode('utf-8', 'surrogatepass')).hexdigest()}"
    known = ctx.recall(key)  # it is the same for all rollouts of a row
    if known is None:
        known = _asked(ctx, tests, needs, suspect=suspect)
        if known["status"] != TIMED_OUT:
            ctx.remember(key, known)
    if known["lacks"] is not None:
        raise RewardFailure(
            f"tests_pass: the command cannot run, as the image lacks {known['lacks']!r} (the default sandbox gets "
            f"packages by `sandbox.python`; `needs` names what the image is to bring; exit status {known['status']}): "
            f"{known['output']}"
        )
    return unheard and known["speaks"]


def _asked(ctx: Any, tests: _Tests, needs: list[str] | None, *, suspect: bool) -> dict[str, Any]:
    """Run the command in an untouched sandbox: whether the reporter speaks there, and which program is not there."""
    with ctx.pristine_sandbox() as clean:
        problem = _lay(clean, tests.files)
        answer, heard = _Watch(clean, list(tests.sources)).run(tests.command, tests.timeout)
        lacks = None
        if suspect and problem is None and not heard.outcomes:
            lacks = missing(tests.command, answer["exit_code"], answer["output"], needs)
            if lacks is None and answer["exit_code"] == NOT_FOUND:
                lacks = _not_there(clean, programs(tests.command) if needs is None else [[name] for name in needs])
        clean.restore()
    output = answer["output"].strip()[-400:]
    return {"lacks": lacks, "speaks": heard.spoke, "status": answer["exit_code"], "output": output}


def _not_there(clean: Any, chains: Sequence[Sequence[str]]) -> str | None:
    """Return the first program of the first chain of which a shell finds none, as the command itself says nothing."""
    for names in chains:
        if all(clean.terminal(f"command -v -- {shlex.quote(name)}")["exit_code"] != 0 for name in names):
            return names[0]
    return None


# ------------------------------------------------------------------ what counts


def _judged(tests: _Tests, answer: dict[str, Any], heard: RunnerReport, known: _Known, skips: set[str]) -> Score:
    """Return the score by the exit status, where it says anything, and by what was reported."""
    status, planted = answer["exit_code"], known.planted
    # A canary that fails makes the runner of the tests end with 1.
    if status >= NOT_EXECUTED or (status > (1 if planted and heard.spoke else 0) and not tests.expected):
        return _failed(answer)
    if not heard.spoke:
        return Score(1.0)
    if tests.names is None:
        return Score(float(heard.problem is None), reason=heard.problem)
    own, copies = _divided(heard, planted)
    own = own if known.skips is None else _alike(own)
    score = _compared(tests.names or [], own, heard.problem, skips)
    others = [name for name, outcome in own if outcome not in (*OTHERS, "passed")]
    if score.value and planted and others and not tests.expected:
        score = Score(0.0, reason=f"not passed: {', '.join(others[:5])}")
    if not planted or not known.counted:
        return score
    # A wrong solution may pass a copy, but then it fails the test that the copy was made of.
    both = {name for name, test in planted.copies.items() if copies.get(name) == {"passed"} and passed(test, own)}
    return _with_canaries(score, both, copies, known.counted)


OTHERS = (reporter.SKIPPED, reporter.SKIPPED_ITSELF)
"""Outcomes of tests that nobody has asked for which do not let a command fail."""


def _with_canaries(score: Score, both: set[str], copies: dict[str, set[str]], counted: frozenset[str]) -> Score:
    """Take what the canaries say into account; `both` passed as their tests did, and the reference fails `counted`."""
    spoke = both & counted
    run = [name for name in counted if copies.get(name) in ({"failed"}, {"passed"})]
    if spoke:
        many = (
            f"{len(spoke)} of {len(counted)} changed copies of the tests, which a right solution must fail, have passed"
        )
        score = Score(0.0, reason=many)
    elif score.value and len(run) < len(counted):
        score = Score(0.0, reason="copies of the tests were not run")
    return Score(
        score.value,
        reason=score.reason,
        metrics={**score.metrics, "canaries": float(len(spoke)), "canaries_planted": float(len(counted))},
    )


def _failed(answer: dict[str, Any]) -> Score:
    return Score(0.0, reason=f"exit status {answer['exit_code']}: {answer['output'][-400:]}")


def _compared(names: list[str], outcomes: list[tuple[str, str]], problem: str | None, skips: set[str]) -> Score:
    """Compare what was reported with the tests that have to pass, of which `skips` may be skipped instead."""
    if problem is not None:
        return Score(0.0, reason=problem)
    by_name: dict[str, list[tuple[str, str]]] = {}
    for test, outcome in outcomes:
        by_name.setdefault(_function(test), []).append((test, outcome))
    absent = [name for name in names if not passed(name, by_name.get(_function(name), ()), may_skip=name in skips)]
    skipped = {"all_skipped": 1.0} if outcomes and {outcome for _, outcome in outcomes} <= set(OTHERS) else {}
    if not names and not any(outcome == "passed" for _, outcome in outcomes):
        return Score(0.0, reason="no test has passed", metrics=skipped)
    if absent:
        return Score(0.0, reason=f"not passed: {', '.join(absent[:5])}", metrics={"missing": len(absent), **skipped})
    return Score(1.0, metrics=skipped)


def _function(test: str) -> str:
    """Return the last part of a test's name, without its case."""
    return test.partition("[")[0].rpartition("::")[2]


def _by_pytest(report: dict[str, Any], expected: list[str], answer: dict[str, Any]) -> Score:
    """What the report in XML says, which pytest writes at its end."""
    if "error" in report:
        return _failed(answer) if answer["exit_code"] else Score(0.0, reason="the command wrote no pytest report")
    try:
        cases = list(ElementTree.fromstring(report["content"]).iter("testcase"))
    except ElementTree.ParseError as error:
        return Score(0.0, reason=f"the pytest report cannot be read: {error}")
    outcomes = [(name, _outcome(case)) for case in cases for name in _called(case)]
    return _compared(expected, outcomes, None, set())


def _outcome(case: ElementTree.Element) -> str:
    return "failed" if {"failure", "error", "skipped"} & {child.tag for child in case} else "passed"


def _called(case: ElementTree.Element) -> list[str]:
    """What a test may be called of class ``a.test_b.Class``: the report does not say where the file's name ends."""
    parts = case.get("classname", "").split(".")
    splits = [("/".join(parts[:n]) + ".py", parts[n:]) for n in range(1, len(parts) + 1)]
    return ["::".join([file, *classes, case.get("name", "")]) for file, classes in splits]
