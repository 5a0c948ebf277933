"""Tests that are put in place after the agent has ended pass."""

from __future__ import annotations

import inspect
import json
import posixpath
import re
import secrets
import shlex
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from hermes_rl import Score
from hermes_rl.errors import RewardFailure, UserError
from hermes_rl.scoring import reporter
from hermes_rl.scoring.steering import Steering
from hermes_rl.scoring.test_names import MAY_SKIP, collected, passed

TOOLS = frozenset(
    {"python", "python2", "python3", "pypy3", "pytest", "py.test", "nose2", "tox", "nox", "uv", "coverage"}
    | {"sh", "bash", "zsh", "env", "make", "cmake", "ctest", "gcc", "g++", "clang", "cargo", "go", "swift"}
    | {"node", "npm", "npx", "pnpm", "yarn", "bun", "deno", "jest", "vitest", "mocha", "tsc"}
    | {"java", "javac", "mvn", "gradle", "dotnet", "ruby", "bundle", "rake", "rspec", "perl", "prove", "php", "phpunit"}
    | {"Rscript", "julia", "ghc", "stack", "cabal", "mix", "rebar3"}
)
"""Interpreters and test runners: where a command names one, the image has to bring it."""
PROGRAMS = (".py", ".sh", ".bash")
"""Endings of files that are run, and not only read."""
WORD = re.compile(r"[\w.+-]+")
NEW_FILE = re.compile(r"^diff --git a/.* b/(.*)\nnew file mode", re.MULTILINE)
"""Paths that a patch creates, as `git diff` writes them."""


def tests_pass(
    ctx: Any,
    *,
    command: str,
    files: list[dict[str, Any]] | None = None,
    expected: list[str] | None = None,
    apply: str | None = None,
    trust: list[str] | None = None,
    needs: list[str] | None = None,
    timeout: float = 180.0,
) -> Score:
    """1 if `command` exits with 0 in the reward's sandbox and its tests have passed, else 0.

    Which tests is `expected`, or else those in the files that the command runs with pytest or unittest.
    A command that cannot run because the image lacks what it needs is a failure of the reward and no score. Whether the
    image lacks it is asked of a new sandbox in which nothing of the rollout is, so that no solution can bring it about.

    Args:
        command: a shell command, run in the working directory.
        files: laid down before, removed after: a list of {to, content | from} with `to` relative to the working
            directory, and `from` a file or folder below the spec's.
        expected: tests (``test_x``, ``file.py::test_x``, ``file.py::Class::test_x[case]``) that have to pass, each of
            that name, whatever the command's exit status says about others. Default: all that the sources of `files`
            show, where the command names pytest or unittest; then the exit status counts too. ``[]``: it alone.
        apply: name of an artifact, a patch as `git diff` writes it, to apply first.
        trust: patterns of files of the artifacts that count although they steer how tests run, such as
            ``pyproject.toml``; without it these stay as they are in the image.
        needs: programs and Python modules that the image has to bring; default: the interpreters and test runners that
            the command names. Name what else it needs; leave out what the agent is to install.
        timeout: seconds; a command that takes longer scores 0.
    """
    sources = _sources(files or [])
    steering = Steering(map(ctx.relative, sources), trust or [])
    names = collected(command, sources) if expected is None else expected or None
    problem = _withdraw(ctx, steering, apply) or _lay(ctx, files or [])
    if problem is not None:
        return Score(0.0, reason=problem)
    watch = _Watch(ctx, list(sources)) if names is not None else None
    answer = ctx.terminal(watch.command(command) if watch else command, timeout=timeout)
    if answer.get("timed_out"):
        return Score(0.0, reason=f"no end within {timeout:g} s")
    told = watch.told() if watch else None
    score = Score(1.0) if expected else _judged(answer)
    if told is not None and score.value:
        skips = not expected and any(MAY_SKIP.search(source) for source in sources.values())
        score = _compared(names or [], told, may_skip=skips)
    if score.value:
        rewritten = _rewritten(ctx, command, sources)
        score = Score(0.0, reason=f"{rewritten} was changed while the tests ran") if rewritten else score
    unheard = watch is not None and told is None
    if unheard or score.value == 0:
        wanted = sorted(TOOLS & set(WORD.findall(command))) if needs is None else needs
        if _alone(ctx, command, files or [], wanted, timeout, answer, unheard=unheard):
            return Score(0.0, reason=f"the tests did not run to their end (exit status {answer['exit_code']})")
    if unheard and watch and expected:
        return _by_pytest(watch.pytest_report(), expected, answer)
    return score


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


def _withdraw(ctx: Any, steering: Steering, apply: str | None) -> str | None:
    """Leave out what steers of the artifacts that lie there, and of the patch `apply`; what went wrong, if anything."""
    laid: dict[str, bool] = ctx.brought()
    known = {steering.shadows(path) for path, replaced in laid.items() if replaced}
    out = [path for path in laid if steering.steers(path) or steering.shadows(path) not in (known | {None})]
    ctx.withdraw(out)
    problem = None
    if apply is not None:
        problem = _apply(ctx, apply, steering, out)
    for path in steering.packages(out):
        if "error" in ctx.read_file(path):
            ctx.write_file(path, "")  # what imports by the names of packages goes on as before
    return problem


def _apply(ctx: Any, name: str, steering: Steering, out: list[str]) -> str | None:
    """Apply a patch, but for the files that steer, which are added to `out`; what went wrong, if anything."""
    try:
        patch = ctx.artifact(name)
    except OSError as error:
        return f"artifact {name}: {error.strerror}"
    if not patch.strip():
        return None
    path = f"/tmp/patch-{secrets.token_hex(16)}"
    written = ctx.write_file(path, patch)
    listed = ctx.terminal(shlex.join(["git", "apply", "--numstat", "-z", path]))
    changed = [line.split("\t", 2)[2] for line in listed["output"].split("\0") if line.count("\t") >= 2]
    # What the spec lays into every sandbox is in a fresh one already; the agent's patch may have it as something new.
    new = set(NEW_FILE.findall(patch.decode("utf-8", "replace")))
    provided = [path for path in ctx.provided() if path in new]
    modules = sorted({module for path in changed if (module := steering.shadows(path)) is not None})
    # A module of that name which the image has is what is worked on, such as the code of a library that pytest uses.
    there = ctx.terminal("".join(f"ls -d {shlex.quote(m)} {shlex.quote(m)}.py 2>/dev/null; " for m in modules) + ":")
    known = {line.removesuffix(".py") for line in there["output"].splitlines()}
    left_out = [path for path in changed if steering.steers(path) or steering.shadows(path) not in (known | {None})]
    out += left_out
    excluded = [f"--exclude={_literal(path)}" for path in (*left_out, *provided)]
    answer = ctx.terminal(shlex.join(["git", "apply", "--whitespace=nowarn", *excluded, path]))
    if answer["exit_code"] == 127:
        with ctx.untouched() as clean:  # a git that the agent has put in front of the image's own may end with 127 too
            there = clean.terminal("command -v git")
        if there["exit_code"] != 0:
            raise UserError("tests_pass: `apply` needs git in the image")
    if "error" in written or answer["exit_code"] != 0:
        return f"artifact {name} cannot be applied: {written.get('error') or answer['output'][-400:]}"
    return None


def _literal(path: str) -> str:
    """A pattern of git that matches this path alone."""
    return re.sub(r"([\\*?\[\]])", r"\\\1", path)


def _lay(ctx: Any, files: list[dict[str, Any]]) -> str | None:
    """Put the files in place; what went wrong, if anything."""
    for file in files:
        to = file["to"]
        answer = ctx.upload(file["from"], to) if "from" in file else ctx.write_file(to, file["content"])
        if "error" in answer:
            return f"the tests cannot be put in place: {answer['error']}"
    return None


class _Watch:
    """A reporter in the sandbox, loaded by each Python that the command starts; what it says is signed."""

    def __init__(self, ctx: Any, files: list[str]) -> None:
        self._ctx = ctx
        self._folder = f"/tmp/{secrets.token_hex(16)}"
        self._key = secrets.token_hex(32)
        self._report = f"/tmp/report-{secrets.token_hex(16)}.xml"
        paths = [ctx.resolve(path) for path in files if path.endswith(".py")]
        source = f"{inspect.getsource(reporter)}\n\nbegin({self._folder!r}, {ctx.resolve('.')!r}, {paths!r})\n"
        ctx.write_file(f"{self._folder}/sitecustomize.py", source)
        ctx.write_file(f"{self._folder}/key", f"0 {self._key}")

    def command(self, command: str) -> str:
        """The command with what makes Python load the reporter, also where it sets `PYTHONPATH` itself."""
        command = re.sub(r"(?<![\w$])PYTHONPATH=([\"']?)", rf"PYTHONPATH=\1{self._folder}:", command)
        return (
            f'export PYTHONPATH="{self._folder}${{PYTHONPATH:+:$PYTHONPATH}}"\n'
            f'export PYTEST_ADDOPTS="${{PYTEST_ADDOPTS:-}} --junitxml={self._report}"\n{command}'
        )

    def told(self) -> list[tuple[str, str]] | None:
        """Tests and their outcomes, in all processes that ran tests; None where none came to its end."""
        found: list[tuple[str, str]] | None = None
        key, number = self._key, 0
        while "error" not in (report := self._ctx.read_file(f"{self._folder}/report.{number}")):
            signature, _, body = report["content"].partition(" ")
            if not secrets.compare_digest(signature.encode(), reporter.sign(key, body).encode()):
                break
            said = json.loads(body)
            tampered = ", ".join(said["tampered"])
            found = found or []
            found += [(str(name), f"with {tampered}" if tampered else str(outcome)) for name, outcome in said["tests"]]
            key, number = reporter.sign(key, "next"), number + 1
        return found

    def pytest_report(self) -> dict[str, Any]:
        """What pytest itself has written, for a Python that did not load the reporter."""
        return self._ctx.read_file(self._report)  # type: ignore[no-any-return]


def _alone(
    ctx: Any,
    command: str,
    files: list[dict[str, Any]],
    needs: list[str],
    timeout: float,
    answer: dict[str, Any],
    *,
    unheard: bool,
) -> bool:
    """Ask a sandbox that the agent never saw: whether the reporter speaks there, and the image has what it needs.

    What the answer of the command says may be the agent's: its code can print anything and end with any status. So it
    is only the reason to look. Raises `RewardFailure` where the image lacks something.
    """
    suspect = _lacking(answer, needs) is not None
    if not (suspect or unheard):
        return False
    with ctx.untouched() as clean:
        problem = _lay(clean, files)
        watch = _Watch(clean, list(_sources(files)))
        alone = clean.terminal(watch.command(command) if unheard else command, timeout=timeout)
        speaks = unheard and watch.told() is not None
        clean.restore()
    missing = _lacking(alone, needs) if suspect else None
    if problem is None and missing is not None:
        raise RewardFailure(
            f"tests_pass: the command cannot run, as the image lacks {missing!r} (the default sandbox gets packages by "
            f"`sandbox.python`; exit status {alone['exit_code']}): "
            f"{alone['output'].strip()[-400:]}"
        )
    return speaks


def _lacking(answer: dict[str, Any], needs: list[str]) -> str | None:
    """The first of `needs` of which the output of a command says that it is not there, or cannot be executed.

    The name stands directly before the complaint: "bash: run.sh: No such file or directory" says nothing of bash.
    """
    complaint = "command not found|not found"
    if answer["exit_code"] in (126, 127):
        complaint += "|No such file or directory|Permission denied|cannot execute"
    for name in needs:
        exact = rf"(?<![\w.+-]){re.escape(name)}(?![\w.+-])"
        forms = rf"{exact}['\"’]?: (?:{complaint})", rf"not found: {exact}", rf"No module named ['\"]?{exact}"
        if re.search("|".join(forms), answer["output"]):
            return name
    return None


def _judged(answer: dict[str, Any]) -> Score:
    return Score(1.0) if answer["exit_code"] == 0 else _failed(answer)


def _failed(answer: dict[str, Any]) -> Score:
    return Score(0.0, reason=f"exit status {answer['exit_code']}: {answer['output'][-400:]}")


def _compared(names: list[str], outcomes: list[tuple[str, str]], *, may_skip: bool = False) -> Score:
    missing = [name for name in names if not passed(name, outcomes, may_skip=may_skip)]
    if not names and not any(outcome == "passed" for _, outcome in outcomes):
        return Score(0.0, reason="no test has passed")
    if missing:
        return Score(0.0, reason=f"not passed: {', '.join(missing[:5])}", metrics={"missing": len(missing)})
    return Score(1.0)


def _by_pytest(report: dict[str, Any], expected: list[str], answer: dict[str, Any]) -> Score:
    """What the report in XML says, which pytest writes at its end."""
    if "error" in report:
        return _failed(answer) if answer["exit_code"] else Score(0.0, reason="the command wrote no pytest report")
    try:
        cases = list(ElementTree.fromstring(report["content"]).iter("testcase"))
    except ElementTree.ParseError as error:
        return Score(0.0, reason=f"the pytest report cannot be read: {error}")
    return _compared(expected, [(name, _outcome(case)) for case in cases for name in _called(case)])


def _outcome(case: ElementTree.Element) -> str:
    return "failed" if {"failure", "error", "skipped"} & {child.tag for child in case} else "passed"


def _called(case: ElementTree.Element) -> list[str]:
    """What a test may be called of class ``a.test_b.Class``: the report does not say where the file's name ends."""
    parts = case.get("classname", "").split(".")
    splits = [("/".join(parts[:n]) + ".py", parts[n:]) for n in range(1, len(parts) + 1)]
    return ["::".join([file, *classes, case.get("name", "")]) for file, classes in splits]
