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
from hermes_rl.scoring.test_names import RUNNER_WORD, collected, may_skip, passed
from hermes_rl.terminal_text import end_of

if TYPE_CHECKING:
    from hermes_rl.spec.argument_types import PlacedFile, ReferencePart, SystemText

PROGRAMS = (".py", ".sh", ".bash")
"""Endings of files that are run, and not only read."""
PYTHONPATH = re.compile(r"(?<![\w$])PYTHONPATH=([\"']?)")
SCRIPT = re.compile(r"(?<![\w-])(python[\d.]*(?:\s+-[uBOqv]+)*\s+)(?=([^\s;&|()\"'$`-][^\s;&|()\"']*\.py)(?!\w))")
"""A Python that runs a file, and the file."""
TIMED_OUT = 124
MOST_FOLDERS = 50
"""Maximum depth of a test file in pytest's report, which code under test may have written."""
SUSPECT = ("not found", "No module named ", "No such file or directory")
"""What an image that lacks a program may let a command print."""
DELETED = re.compile(r"^ delete (?:mode \d{6} )?(.*)$", re.MULTILINE)
"""Line of ``git apply --summary`` for a file that a patch deletes."""
FIND = """
import sys
from importlib.machinery import PathFinder
names, top = sys.argv[1:]
installed = [each for each in sys.path if each and ("-packages" in each or not (each + "/").startswith(top))]
for name in open(names, "rb").read().decode("utf-8").split():
    directories, parts = installed, name.split(".")
    while parts:
        spec = PathFinder.find_spec(parts.pop(0), directories)
        if spec is not None and not parts:
            print(name)
        if spec is None or spec.loader is not None:
            break
        directories = list(spec.submodule_search_locations)
"""
"""Prints the modules that are installed; those in a directory without ``__init__.py`` by their dotted names."""


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
    """Return 1 if `command` exits with 0 in the reward's sandbox and its tests have passed, else 0.

    The tests are `expected`, or else all in the files that the command runs with pytest or unittest. A command that
    cannot run because the image lacks a requirement is a failure of the reward and gives no score. This is checked in a
    new sandbox without any file of the rollout, so that no solution can cause such a failure.

    Args:
        command: a shell command, run in the working directory.
        files: files that exist only while the command runs: a list of {to, content | from, mode} with `to` relative to
            the working directory, and `from` a file or directory inside the spec's.
        expected: tests (``test_x``, ``file.py::test_x``, ``file.py::Class::test_x[case]``) that must pass, all of
            that name, whatever the exit status of the command. Default: all tests in the sources of `files`, if the
            command names pytest or unittest; then the exit status counts too. ``[]``: only the exit status counts.
        apply: name of an artifact, a patch in the format of `git diff`, to apply first.
        trust: patterns of artifact files to accept although they affect how tests run, such as ``pyproject.toml``, or
            are of an unusual kind for patches; other such files stay unchanged from the image.
        needs: programs and Python modules that the image must provide; default: whatever the command does not find in
            a new sandbox. ``[]``: nothing, if the agent must install or create them.
        reference: a correct solution: a patch, files in the form of `files`, or turns in the form of the spec's
            `solution`; ``solution``: the spec's own. Only tests that it skips may be skipped.
        canaries: add copies of the tests with changed expected values, and score 0 if the solution passes any that
            the `reference` fails. Default: true if there is a reference. Without one, the copies run after the other
            tests, and the metric `canaries` is the number that passed.
        apart: run the tests in a separate sandbox without any file of the agent, and the code in the reward's sandbox.
            For tests that call Python functions; a run of the `reference` finds the accesses that it needs.
        timeout: seconds; a command that takes longer scores 0.
    """
    sources = _sources(files or [])
    tests = _Tests(command, files or [], sources, expected, timeout, apart)
    if apart and tests.names is None:
        raise UserError("tests_pass: `apart` is for commands that run pytest or unittest on `files`")
    of_use = reference and tests.names is not None  # of other commands it would tell nothing
    reference_facts = _by_reference(ctx, tests, reference, canaries=canaries is not False) if of_use else _Known()
    within = ctx.resolve(".").rstrip("/") + "/"
    steers = f"{command} {_configured(ctx)}".replace(within, "")
    paths = [posixpath.normpath(ctx.relative(path)) for path in sources]
    steering = Steering(paths, trust or [], steers, _packages(ctx, paths))
    problem = _withdraw(ctx, steering, apply, command)
    if problem is None and apart:
        return _scored_apart(ctx, tests, reference_facts, needs, sing=bool(canaries))
    problem = problem or _lay(ctx, tests.files, reference_facts.planted)
    if problem is not None:
        return Score(0.0, reason=problem)
    watch = tests.watch(ctx) if tests.can_be_heard else None
    before = _stamps(ctx, reference_facts.kept)
    answer, report = watch.run(command, timeout) if watch else (ctx.terminal(command, timeout=timeout), RunnerReport())
    if answer.get("timed_out"):
        return Score(0.0, reason=f"no end within {timeout:g} s")
    marked = set() if expected else may_skip(sources)
    skips = marked if reference_facts.skips is None else reference_facts.skips
    score = _judged(tests, answer, report, reference_facts, skips)
    if score.value:
        now = reference_facts.planted.sources if reference_facts.planted else sources
        after = _stamps(ctx, reference_facts.kept)
        written = (path for path, stamp in before.items() if after.get(path) != stamp)
        rewritten = _rewritten(ctx, command, now) or next(written, None)
        score = Score(0.0, reason=f"{rewritten} was changed while the tests ran") if rewritten else score
    unheard = watch is not None and not report.spoke
    needs = needs if reference_facts.skips is None else []  # the image has what the reference needs
    if (unheard or score.value == 0) and _alone(ctx, tests, needs, answer, report):
        return Score(0.0, reason=f"the tests did not run to their end (exit status {answer['exit_code']})")
    if unheard and watch and expected:
        return _by_pytest(watch.pytest_report(), expected, answer)
    if canaries and score.value and reference_facts.planted is None:
        return replace(score, metrics={**score.metrics, **_sung(ctx, tests)})
    return score


@dataclass(frozen=True)
class _Tests:
    """The test command, and the tests that must pass."""

    command: str
    files: list[dict[str, Any]]
    sources: dict[str, str]
    expected: list[str] | None
    timeout: float
    apart: bool = False

    @property
    def names(self) -> list[str] | None:
        """Tests that must pass; empty if the command selects them, None if it runs none that can report."""
        return collected(self.command, self.sources) if self.expected is None else self.expected or None

    @property
    def can_be_heard(self) -> bool:
        """True if the command names a test runner, or Python with one of the files."""
        scripts = any(_is_one_of(self.sources, path) for _, path in SCRIPT.findall(self.command))
        return self.names is not None or (self.expected is None and scripts)

    def watch(self, ctx: Any, more: str = "") -> _Watch:
        return _Watch(ctx, list(self.sources), [name.partition("::")[0] for name in self.expected or ()], more)

    def planted(self) -> Planted | None:
        """Return the sources with canaries among the tests, or None if a failing test would change the selection of
        others."""
        in_files = collected(last_command(self.command) or "", self.sources)
        if not in_files or not self.names:
            return None
        return add_canaries(self.sources, in_files, sha256(repr((self.command, self.sources)).encode()).hexdigest())


# ------------------------------------------------------------------ what the reference does


@dataclass(frozen=True)
class _Known:
    """Results of the reference solution on the tests of a row."""

    skips: set[str] | None = None
    """Tests that it skips; None if there is no reference, or it does not pass."""
    planted: Planted | None = None
    counted: frozenset[str] = frozenset()
    """Canaries that it fails."""
    kept: tuple[str, ...] = ()
    """Files of the tests that are not written to while its tests run."""
    places: tuple[str, ...] = ()
    """Comparisons of its objects with plain values that must call the object's operator, with `apart`."""
    seconds: float = 0.0
    """How long its tests took, with `apart`."""


def _by_reference(ctx: Any, tests: _Tests, reference: str | list[dict[str, Any]], *, canaries: bool) -> _Known:
    """Run the reference in an untouched sandbox, once for each row."""
    planted = tests.planted() if canaries else None
    key_source = repr((tests.command, tests.sources, tests.expected, reference, canaries, tests.apart))
    key = f"reference {sha256(key_source.encode('utf-8', 'surrogatepass')).hexdigest()}"
    record = ctx.recall(key)
    if record is None:
        record = None if planted is None else _played(ctx, tests, reference, planted)
        if record is None:
            record = _played(ctx, tests, reference, None) or {"skips": None, "counted": None}
        ctx.remember(key, record)
    if tests.apart and record["skips"] is None:
        raise RewardFailure(
            "tests_pass: the reference does not pass with its tests in another sandbox; set `apart: false`, or change "
            "the code that docs/sandbox.md lists as not supported"
        )
    skips = None if record["skips"] is None else set(record["skips"])
    more = {key: tuple(record.get(key) or ()) for key in ("places", "kept")}
    seconds = record.get("seconds") or 0.0
    if planted is None or not record["counted"]:
        return _Known(skips, seconds=seconds, **more)
    return _Known(skips, planted, frozenset(record["counted"]), seconds=seconds, **more)


def _played(
    ctx: Any, tests: _Tests, reference: str | list[dict[str, Any]], planted: Planted | None
) -> dict[str, Any] | None:
    """Return the tests that the reference skips and the canaries that it fails, or None if it does not pass the
    tests."""
    operator_locations, kept, seconds = list[str](), list[str](), 0.0
    with ctx.pristine_sandbox() as clean:
        problem = _lay_reference(clean, reference)
        if tests.apart and problem is None:
            limit = max(REFERENCE_TIMES * tests.timeout, REFERENCE_SECONDS)
            answer, report, problem, operator_locations = _run_apart(clean, tests, planted, None, limit)
            seconds = answer.get("seconds", 0.0)
        else:
            problem = problem or _lay(clean, tests.files, planted)
            watch, before = tests.watch(clean), _stamps(clean, list(tests.sources))
            answer, report = watch.run(tests.command, tests.timeout)
            kept = [path for path, stamp in _stamps(clean, list(before)).items() if before[path] == stamp]
        clean.restore()
    if problem is not None or answer.get("timed_out") or not report.spoke:
        return None
    test_outcomes, copies = _divided(report, planted)
    test_outcomes = _alike(test_outcomes)
    skips = [
        name
        for name in tests.names or []
        if not passed(name, test_outcomes) and passed(name, test_outcomes, may_skip=True)
    ]
    reference_facts = _Known(set(skips), planted)
    if not _judged(tests, answer, report, reference_facts, set(skips)).value:
        return None
    counted = [name for name, outcome in copies.items() if outcome == {"failed"}]
    found = {"skips": skips, "counted": counted if planted else None, "kept": kept}
    return {**found, "places": operator_locations, "seconds": seconds}


def _lay_reference(clean: Any, reference: str | list[dict[str, Any]]) -> str | None:
    if not isinstance(reference, str):
        turns = [each for each in reference if "to" not in each]
        clean.play(turns)
        return _lay(clean, [each for each in reference if "to" in each])
    path = f"/tmp/patch-{secrets.token_hex(16)}"
    clean.write_file(path, reference.rstrip("\n") + "\n")
    answer = clean.terminal(shlex.join(["git", "apply", "--whitespace=nowarn", path]))
    return None if answer["exit_code"] == 0 else answer["output"]


def _divided(report: RunnerReport, planted: Planted | None) -> tuple[list[tuple[str, str]], dict[str, set[str]]]:
    """Return the outcomes of the tests, by their original names, and the outcomes of the canaries."""
    if planted is None:
        return report.outcomes, {}
    test_outcomes, copies = list[tuple[str, str]](), dict[str, set[str]]()
    for test, outcome in report.outcomes:
        name, copied = planted.own_name(test)
        if copied:
            copies.setdefault(name, set()).add(
                "passed" if outcome == "passed" else "failed" if outcome == "failed" else "none"
            )
        else:
            test_outcomes.append((name, outcome))
    return test_outcomes, {name: {"failed"} if "failed" in outcomes else outcomes for name, outcomes in copies.items()}


def _alike(outcomes: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return outcomes without the cause of skips: the reference determines the tests that may be skipped."""
    return [(name, reporter.SKIPPED if outcome == reporter.SKIPPED_ITSELF else outcome) for name, outcome in outcomes]


def _sung(ctx: Any, tests: _Tests) -> dict[str, float]:
    """Run the tests again with canaries among them; return the number that pass, whose right value is unknown."""
    planted = tests.planted()
    if planted is None or _lay(ctx, tests.files, planted) is not None:
        return {}
    _, report = tests.watch(ctx).run(tests.command, tests.timeout)
    return _passed_copies(report, planted)


def _passed_copies(report: RunnerReport, planted: Planted) -> dict[str, float]:
    _, copies = _divided(report, planted)
    return {"canaries": float(sum(outcomes == {"passed"} for outcomes in copies.values()))}


# ------------------------------------------------------------------ tests in a separate sandbox

APART = "hermes_rl_apart"
"""The module that has the tests' end of the wire."""
REFERENCE_TIMES, REFERENCE_SECONDS = 4.0, 60.0
"""How much longer than `timeout` the reference may take, as each call is a message, and how long at least."""
SLOWER = 3.0
"""Maximum time of a solution relative to the reference, if that exceeds `timeout`."""


def _scored_apart(ctx: Any, tests: _Tests, reference_facts: _Known, needs: list[str] | None, *, sing: bool) -> Score:
    """Judge the code in the reward's sandbox by tests in another."""
    limit = max(tests.timeout, SLOWER * reference_facts.seconds)
    answer, report, problem, _ = _run_apart(ctx, tests, reference_facts.planted, reference_facts.places, limit)
    if problem is not None:
        raise RewardFailure(f"tests_pass: {problem}")  # the agent has no access to the sandbox of the tests
    if answer.get("timed_out"):
        return Score(0.0, reason=f"no end within {limit:g} s")
    marked = set() if tests.expected else may_skip(tests.sources)
    score = _judged(
        tests, answer, report, reference_facts, marked if reference_facts.skips is None else reference_facts.skips
    )
    unheard = not report.spoke
    if (unheard or score.value == 0) and _alone(ctx, tests, needs, answer, report):
        return Score(0.0, reason=f"the tests did not run to their end (exit status {answer['exit_code']})")
    if unheard:
        return Score(0.0, reason="the tests said nothing")
    planted = tests.planted() if sing and score.value and reference_facts.planted is None else None
    if planted is not None:
        report = _run_apart(ctx, tests, planted, reference_facts.places, limit)[1]
        return replace(score, metrics={**score.metrics, **_passed_copies(report, planted)})
    return score


def _run_apart(
    ctx: Any, tests: _Tests, planted: Planted | None, operator_locations: Sequence[str] | None, timeout: float
) -> tuple[dict[str, Any], RunnerReport, str | None, list[str]]:
    """Run the tests in an untouched sandbox, and the code in that of `ctx`.

    Return the answer, what was heard, what went wrong, and the places that were noted where `operator_locations` is
    None.
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
        location_list = None if operator_locations is None else list(operator_locations)
        install = f"install({wire!r}, {clean.resolve('.')!r}, {files!r}, {location_list!r}, {noted!r})"
        more = f"{_source(isolated_protocol, apart_tests)}\n\n{install}\n"
        watch = tests.watch(clean, more)
        programs = {
            "local_command": ["python3", "-I", "-S", f"{folder}/relay.py"],
            "remote_command": [python, f"{folder}/server.py"],
        }
        answer, report = watch.run(tests.command, timeout, **programs)
        lines = clean.read_file(noted).get("content", "").splitlines() if operator_locations is None else []
        clean.restore()
    return answer, report, problem, sorted({str(json.loads(line)) for line in lines})


def _source(*modules: Any) -> str:
    """Return modules of hermes-rl as one source that needs only Python."""
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
    """Return the text of each file, by path."""
    sources = {}
    for file in files:
        if "from" not in file:
            content = file["content"]
            sources[file["to"]] = content if isinstance(content, str) else content.decode("utf-8", "replace")
            continue
        source = Path(file["from"])
        for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if path.is_file():
                relative_path = f"/{path.relative_to(source)}" if path != source else ""
                sources[file["to"] + relative_path] = (
                    path.read_bytes().decode("utf-8", "replace") if path.suffix in PROGRAMS else ""
                )
    return sources


def _rewritten(ctx: Any, command: str, sources: dict[str, str]) -> str | None:
    """Return the path of a test that has changed since it was copied: a shell reads its script while it runs.

    Tests may write data files, but not change programs.
    """
    for path, source in sources.items():
        run = path.endswith(PROGRAMS) or posixpath.basename(path) in command
        if run and source and ctx.read_file(path).get("content") != source:
            return path
    return None


def _stamps(ctx: Any, paths: Sequence[str]) -> dict[str, str]:
    """Return the inode and the time of the last change of each file, which stay if nothing writes to it."""
    if not paths:
        return {}
    listing = f"/tmp/list-{secrets.token_hex(16)}"
    ctx.write_file(listing, "".join(f"{ctx.resolve(path)}\n" for path in paths if "\n" not in path))
    answer = ctx.terminal(f'while IFS= read -r p; do stat -c "%i %z %n" -- "$p"; done <{listing}')
    lines = [line for line in answer["output"].split("\n") if "/" in line and not answer.get("truncated")]
    found = {f"/{line.partition('/')[2]}": line for line in lines}
    return {path: found[full] for path in paths if (full := ctx.resolve(path)) in found}


def _packages(ctx: Any, paths: Sequence[str]) -> set[str]:
    """Return the folders above tests that are packages in the image, or are made such by the tests' own files."""
    marks = {f"{folder}/{INIT}" for path in paths for folder in parent_folders(path) if folder not in ("", "/")}
    test_init_files = marks & set(paths)
    image_init_files = (
        (_there(ctx, sorted(marks - test_init_files)) or set()) - set(ctx.restored_files())
        if marks - test_init_files
        else set()
    )
    return {posixpath.dirname(init_file) for init_file in test_init_files | image_init_files}


def _configured(ctx: Any) -> str:
    """Return the folders in which the sandbox and the configuration of pytest let Python look for modules."""
    look = f"grep -hs -A20 '^[[:space:]]*pythonpath' {' '.join(CONFIGURATIONS)} | head -c 20000"
    path, _, configuration = ctx.terminal(f'echo "$PYTHONPATH"; {look}')["output"].partition("\n")
    return f"{path} {named_in_configuration(configuration)}"


def _withdraw(ctx: Any, steering: Steering, apply: str | None, command: str) -> str | None:
    """Remove files of artifacts and of the patch `apply` that control how tests run; return an error, if any."""
    laid: dict[str, bool] = ctx.restored_files()
    replaced_modules = {steering.shadows(path) for path, replaced in laid.items() if replaced}
    out = [path for path in laid if steering.steers(path) or steering.shadows(path) not in (replaced_modules | {None})]
    out += [path for path, replaced in laid.items() if replaced and steering.runs_tests(path) and path not in out]
    try:
        ctx.withdraw(out)
        new = [path for path, replaced in laid.items() if not replaced and path not in out]
        ctx.withdraw(_in_front(ctx, steering, new, command))
    except OSError as error:
        return f"a file that controls how tests run cannot be removed: {error}"
    problem = _apply(ctx, apply, steering, command, out) if apply is not None else None
    for path in steering.packages(out):
        if "error" in ctx.read_file(path):
            ctx.write_file(path, "")  # imports by the names of packages still work
    return problem


def _in_front(ctx: Any, steering: Steering, paths: Sequence[str], command: str) -> list[str]:
    """Return the new files that Python would import instead of modules installed in the image."""
    modules = steering.modules(paths)
    if not modules:
        return []
    python = next((word for word in re.findall(r"[\w./-]+", command) if re.fullmatch(r"python[\d.]*", word)), "python3")
    names = "\n".join(sorted(modules))
    key = f"installed {python} {sha256(names.encode()).hexdigest()}"
    installed: list[str] | None = ctx.recall(key)
    if installed is None:
        listing = f"/tmp/list-{secrets.token_hex(16)}"  # a command line may be too short for all names
        ctx.write_file(listing, names)
        within = ctx.resolve(".").rstrip("/") + "/"
        answer = ctx.terminal("cd / && " + shlex.join([python, "-c", FIND, listing, within]))
        installed = [name for name in answer["output"].splitlines() if name in modules]
        ctx.remember(key, installed)
    return [path for name in installed for path in modules[name]]


def _apply(ctx: Any, name: str, steering: Steering, command: str, out: list[str]) -> str | None:
    """Apply a patch without the files that control how tests run, which are added to `out`; return an error, if any."""
    try:
        patch = ctx.artifact(name)
    except OSError as error:
        return f"artifact {name}: {error.strerror}"
    if not patch.strip():
        return None
    path = f"/tmp/patch-{secrets.token_hex(16)}"
    written = ctx.write_file(path, patch)
    numstat = ctx.terminal(shlex.join(["git", "apply", "--numstat", "-z", path]) + " 2>/dev/null")
    summary = ctx.terminal(shlex.join(["git", "apply", "--summary", path]) + " 2>/dev/null | grep '^ delete '")
    if numstat["exit_code"] == NOT_FOUND and _lacks_git(ctx):
        raise RewardFailure("tests_pass: the image lacks 'git', which `apply` needs")
    changed = [line.split("\t", 2)[2] for line in numstat["output"].split("\0") if line.count("\t") >= 2]
    text = patch.decode("utf-8", "replace")
    away = {target for source, target in renamed(text) if steering.steers(source) or steering.holds(source)}
    cut = numstat.get("truncated") or summary.get("truncated")
    listable = not cut and "\ufffd" not in numstat["output"] and away <= set(changed)
    existing_paths = _there(ctx, changed + _modules_of(steering, changed)) if listable else None
    if existing_paths is None:
        return f"artifact {name} changes more files than can be listed, or files whose names cannot"
    # A fresh sandbox has the spec's files already; the agent's patch may contain them as new files.
    provided = sorted(created(text) & set(ctx.spec_files()))
    # A module of that name which the image has is what is worked on, such as the code of a library that pytest uses.
    existing_modules = {line.removesuffix(".py") for line in existing_paths}
    new = [path for path in changed if path not in existing_paths]
    excluded = {
        path for path in changed if steering.steers(path) or steering.shadows(path) not in (existing_modules | {None})
    }
    excluded |= {path for path in new if not steering.may_add(path)} | away
    excluded |= {path for path in changed if path in existing_paths and steering.runs_tests(path)}
    excluded |= set(filter(steering.holds, DELETED.findall(summary["output"])))
    excluded |= set(_in_front(ctx, steering, [path for path in new if path not in excluded], command))
    out += sorted(excluded)
    excluded = [f"--exclude={_literal(path)}" for path in (*sorted(excluded), *provided)]
    links = (_there(ctx, changed, test="-h") or set()) if b"120000" in patch else set()
    answer = ctx.terminal(shlex.join(["git", "apply", "--whitespace=nowarn", *excluded, path]))
    if "error" in written or answer["exit_code"] != 0:
        return f"artifact {name} cannot be applied: {written.get('error') or end_of(answer['output'].strip(), 400)}"
    if b"120000" in patch:
        for link in sorted((_there(ctx, changed, test="-h") or set()) - links):
            ctx.terminal(shlex.join(["rm", "-f", "--", link]))  # it may point to a file that would be removed
    return None


def _modules_of(steering: Steering, paths: Sequence[str]) -> list[str]:
    modules = sorted({module for path in paths if (module := steering.shadows(path)) is not None})
    return [form for module in modules for form in (module, f"{module}.py")]


def _there(ctx: Any, paths: Sequence[str], test: str = "-e") -> set[str] | None:
    """Return the paths that exist in the sandbox, or None if that cannot be determined."""
    if any("\n" in path for path in paths):
        return None
    listing = f"/tmp/list-{secrets.token_hex(16)}"
    ctx.write_file(listing, "".join(f"{path}\n" for path in paths))
    loop = f'while IFS= read -r p; do if [ {test} "$p" ] || [ -h "$p" ]; then printf "%s\\n" "$p"; fi; done <{listing}'
    answer = ctx.terminal(loop)
    is_complete = answer["exit_code"] == 0 and not answer.get("truncated")
    return set(answer["output"].split("\n")) & set(paths) if is_complete else None  # others break lines within names


def _lacks_git(ctx: Any) -> bool:
    with ctx.pristine_sandbox() as clean:  # a git of the agent that shadows the image's may end with 127 too
        return clean.terminal("command -v git")["exit_code"] != 0  # type: ignore[no-any-return]


def _literal(path: str) -> str:
    """Return a git pattern that matches only this path."""
    return re.sub(r"([\\*?\[\]])", r"\\\1", path)


def _lay(ctx: Any, files: Sequence[dict[str, Any]], planted: Planted | None = None) -> str | None:
    """Copy the files, with canaries among the tests if there are any; return an error, if any."""
    for file in files:
        try:
            answer = (
                ctx.upload(file["from"], file["to"])
                if "from" in file
                else ctx.write_file(file["to"], file["content"], file.get("mode"))
            )
        except OSError as error:
            if "from" in file and not Path(file["from"]).exists():
                raise UserError(f"tests_pass: {file['from']} does not exist") from error
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

    def __init__(self, ctx: Any, files: list[str], expected_files: list[str], more: str) -> None:
        self._ctx = ctx
        self._files = files
        self._folder = f"/tmp/{secrets.token_hex(16)}"
        self._report = f"/tmp/report-{secrets.token_hex(16)}.xml"
        paths = [ctx.resolve(path) for path in files if path.endswith(".py")]
        self._relative = {posixpath.normpath(ctx.relative(path)) for path in (*files, *expected_files)}
        text = _alone_in_process(f"begin({self._folder!r}, {ctx.resolve('.')!r}, {paths!r}, {REPORT_FD})")
        if more:  # before the reporter, which tells what changes how modules are found
            ctx.write_file(f"{self._folder}/{APART}.py", more)
            text = f"import {APART}\n{text}"
        ctx.write_file(f"{self._folder}/sitecustomize.py", text)
        ctx.write_file(
            f"{self._folder}/{reporter.SCRIPT}", _alone_in_process("run_script(vars(__import__('__main__')))")
        )

    def run(self, command: str, timeout: float, **apart: Any) -> tuple[dict[str, Any], RunnerReport]:
        """Run the command; Python loads the reporter even if the command sets `PYTHONPATH` itself."""
        command = PYTHONPATH.sub(rf"PYTHONPATH=\1{self._folder}:", command)
        if RUNNER_WORD.search(command) is None:
            run = f"{self._folder}/{reporter.SCRIPT} "
            command = SCRIPT.sub(lambda found: found[1] + (run if _is_one_of(self._files, found[2]) else ""), command)
        run = self._ctx.terminal_apart if apart else self._ctx.terminal_heard
        answer = run(
            f'export PYTHONPATH="{self._folder}${{PYTHONPATH:+:$PYTHONPATH}}"\n'
            f'export PYTEST_ADDOPTS="${{PYTEST_ADDOPTS:-}} --junitxml={self._report}"\n{command}',
            timeout=timeout,
            **apart,
        )
        report = parse_report(answer["heard"])
        report.outcomes = [each for each in report.outcomes if not self._is_of_another_file(each[0])]
        return answer, report

    def _is_of_another_file(self, test: str) -> bool:
        """Return True if the file of a test only ends like one of the files, as ``a/tests/test_x.py`` may do."""
        path, top = test.partition("::")[0], self._ctx.resolve(".").rstrip("/") + "/"
        inner = path.removeprefix(top)
        return (
            inner != path and inner not in self._relative and any(inner.endswith(f"/{each}") for each in self._relative)
        )

    def pytest_report(self) -> dict[str, Any]:
        """Return pytest's own report, for a Python that did not load the reporter."""
        return self._ctx.read_file(self._report)  # type: ignore[no-any-return]


def _is_one_of(files: Iterable[str], path: str) -> bool:
    """Return True if a command may mean one of these files by this path; the process itself knows for certain."""
    return posixpath.basename(path) in map(posixpath.basename, files)


def _alone_in_process(call: str) -> str:
    """Return a program that makes this call of the reporter.

    The reporter has its own built-in names there, and is not a module, so that it uses nothing that the code under
    test replaces.
    """
    source = f"{inspect.getsource(reporter)}\n\n{call}\n"
    namespace = "{'__builtins__': dict(vars(__import__('builtins'))), '__name__': 'reporter'}"
    return f"exec(compile({source!r}, 'reporter', 'exec'), {namespace})\n"


def _alone(ctx: Any, tests: _Tests, needs: list[str] | None, answer: dict[str, Any], report: RunnerReport) -> bool:
    """Ask a sandbox that the agent never saw: whether the reporter speaks there, and the image has what it needs.

    What the answer of the command says may be the agent's: its code can print anything and end with any status. So it
    is only the reason to look. Raises `RewardFailure` if the image lacks a program.
    """
    unheard = tests.can_be_heard and not report.spoke
    complains = answer["exit_code"] >= NOT_EXECUTED or any(phrase in answer["output"] for phrase in SUSPECT)
    suspect = complains and not report.outcomes and needs != []  # if tests ran, the image has their runner
    if not (suspect or unheard):
        return False
    key_source = repr((tests.command, tests.sources, tests.timeout, needs, suspect))
    key = f"alone {sha256(key_source.encode('utf-8', 'surrogatepass')).hexdigest()}"
    probe = ctx.recall(key)  # it is the same for all rollouts of a row
    if probe is None:
        probe = _asked(ctx, tests, needs, suspect=suspect)
        if probe["status"] != TIMED_OUT:
            ctx.remember(key, probe)
    if probe["lacks"] is not None:
        raise RewardFailure(
            f"tests_pass: the command cannot run, as the image lacks {probe['lacks']!r} (the default sandbox gets "
            f"packages by `sandbox.python`; `needs` names programs of the image; exit status {probe['status']}): "
            f"{probe['output']}"
        )
    return unheard and probe["speaks"]


def _asked(ctx: Any, tests: _Tests, needs: list[str] | None, *, suspect: bool) -> dict[str, Any]:
    """Run the command in an untouched sandbox: whether the reporter speaks there, and which program is not there."""
    with ctx.pristine_sandbox() as clean:
        problem = _lay(clean, tests.files)
        answer, report = tests.watch(clean).run(tests.command, tests.timeout)
        lacks = None
        if suspect and problem is None and not report.outcomes:
            lacks = missing(tests.command, answer["exit_code"], answer["output"], needs)
            if lacks is None and answer["exit_code"] == NOT_FOUND:
                lacks = _not_there(clean, programs(tests.command) if needs is None else [[name] for name in needs])
        clean.restore()
    output = end_of(answer["output"].strip(), 400)
    return {"lacks": lacks, "speaks": report.spoke, "status": answer["exit_code"], "output": output}


def _not_there(clean: Any, chains: Sequence[Sequence[str]]) -> str | None:
    """Return the first program of the first chain of which a shell finds none, as the command itself says nothing."""
    for names in chains:
        if all(clean.terminal(f"command -v -- {shlex.quote(name)}")["exit_code"] != 0 for name in names):
            return names[0]
    return None


# ------------------------------------------------------------------ what counts


def _judged(
    tests: _Tests, answer: dict[str, Any], report: RunnerReport, reference_facts: _Known, skips: set[str]
) -> Score:
    """Return the score by the exit status, if it is conclusive, and by the reports."""
    status, planted = answer["exit_code"], reference_facts.planted
    # A canary that fails makes the runner of the tests end with 1.
    if status >= NOT_EXECUTED or (status > (1 if planted and report.spoke else 0) and not tests.expected):
        return _failed(answer)
    if not report.spoke:
        return Score(1.0)
    if tests.names is None:
        return Score(float(report.problem is None), reason=report.problem)
    test_outcomes, copies = _divided(report, planted)
    test_outcomes = test_outcomes if reference_facts.skips is None else _alike(test_outcomes)
    score = _compared(tests.names or [], test_outcomes, report.problem, skips)
    others = [name for name, outcome in test_outcomes if outcome not in (*OTHERS, "passed")]
    if score.value and planted and others and not tests.expected:
        score = Score(0.0, reason=f"not passed: {', '.join(others[:5])}")
    if not planted or not reference_facts.counted:
        return score
    # A wrong solution may pass a copy, but then it fails the test that the copy was made of.
    both = {
        name for name, test in planted.copies.items() if copies.get(name) == {"passed"} and passed(test, test_outcomes)
    }
    return _with_canaries(score, both, copies, reference_facts.counted)


OTHERS = (reporter.SKIPPED, reporter.SKIPPED_ITSELF)
"""Outcomes of unexpected tests that do not make a command fail."""


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
    return Score(0.0, reason=f"exit status {answer['exit_code']}: {end_of(answer['output'].strip(), 400)}")


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
    """Return the score from the XML report that pytest writes at its end."""
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
    """Return the possible ids of a test of class ``a.test_b.Class``: the report does not mark the end of the file
    name."""
    parts = case.get("classname", "").split(".", MOST_FOLDERS)
    splits = [("/".join(parts[:n]) + ".py", parts[n:]) for n in range(1, len(parts) + 1)]
    return ["::".join([file, *classes, case.get("name", "")]) for file, classes in splits]
