"""Tests that are put in place after the agent has ended pass."""

from __future__ import annotations

import posixpath
import re
import secrets
import shlex
import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

from hermes_rl import Score
from hermes_rl.errors import RewardFailure, UserError

STEERING = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"),
    *("pyproject.toml", "sitecustomize.py", "usercustomize.py", "*.pth", "*.pyc"),
    *("*.egg-info/*", "*.dist-info/*", "*.egg-link"),
)
"""Files that steer how Python and pytest run, wherever they lie."""
MODULES = (*sorted(sys.stdlib_module_names), "pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py")
"""What pytest itself imports; a file of that name in front of it would be imported instead."""

TOOLS = frozenset(
    {"python", "python2", "python3", "pypy3", "pytest", "py.test", "nose2", "tox", "nox", "uv", "coverage"}
    | {"sh", "bash", "zsh", "env", "make", "cmake", "ctest", "gcc", "g++", "clang", "cargo", "go", "swift"}
    | {"node", "npm", "npx", "pnpm", "yarn", "bun", "deno", "jest", "vitest", "mocha", "tsc"}
    | {"java", "javac", "mvn", "gradle", "dotnet", "ruby", "bundle", "rake", "rspec", "perl", "prove", "php", "phpunit"}
    | {"Rscript", "julia", "ghc", "stack", "cabal", "mix", "rebar3"}
)
"""Interpreters and test runners: where a command names one, the image has to bring it."""
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
    """1 if `command` exits with 0 in the reward's sandbox, else 0; with `expected`, if those tests passed.

    A command that cannot run because the image lacks what it needs is a failure of the reward and no score. Whether the
    image lacks it is asked of a new sandbox in which nothing of the rollout is, so that no solution can bring it about.

    Args:
        command: a shell command, run in the working directory.
        files: laid down before, removed after: a list of {to, content | from} with `to` relative to the working
            directory, and `from` a file or folder below the spec's.
        expected: tests (``test_x``, ``file.py::test_x``, ``file.py::Class::test_x[case]``) that the report of this
            very pytest run must show as passed, each of that name, whatever the command's exit status says about
            others. The report is written to a path that nobody could know beforehand.
        apply: name of an artifact, a patch as `git diff` writes it, to apply first.
        trust: patterns of files of the artifacts that count although they steer how tests run, such as
            ``pyproject.toml``; without it these stay as they are in the image.
        needs: programs and Python modules that the image has to bring; default: the interpreters and test runners that
            the command names. Name what else it needs; leave out what the agent is to install.
        timeout: seconds; a command that takes longer scores 0.
    """
    steering = _steering(files or [], trust or [])
    problem = _apply(ctx, apply, steering) if apply is not None else None
    if problem is None:
        ctx.withdraw(steering)
        problem = _lay(ctx, files or [])
    if problem is not None:
        return Score(0.0, reason=problem)
    report = f"/tmp/report-{secrets.token_hex(16)}.xml"
    answer = ctx.terminal(_with_report(command, report) if expected else command, timeout=timeout)
    if answer.get("timed_out"):
        return Score(0.0, reason=f"no end within {timeout:g} s")
    score = _compare(ctx.read_file(report), expected, answer) if expected else _judged(answer)
    if score.value == 0:
        wanted = sorted(TOOLS & set(WORD.findall(command))) if needs is None else needs
        _require(ctx, command, files or [], wanted, timeout, answer)
    return score


def _steering(files: list[dict[str, Any]], trust: list[str]) -> list[str]:
    """Patterns of what an artifact may not bring: it would decide over the tests instead of passing them."""
    # Python looks first where the command runs, and pytest adds the folder of each test.
    folders = {"", *(posixpath.dirname(posixpath.normpath(file["to"])) for file in files)}
    inside = [posixpath.join(folder, name) for folder in folders if folder[:1] != "/" for name in MODULES]
    anywhere = [pattern for name in STEERING for pattern in (name, f"*/{name}")]
    shadowing = [pattern for path in inside for pattern in (f"{path}.py", f"{path}/*")]
    return [pattern for pattern in (*anywhere, *shadowing) if not any(pattern in (t, f"*/{t}") for t in trust)]


def _apply(ctx: Any, name: str, steering: list[str]) -> str | None:
    """Apply a patch, but for the files that steer; what went wrong, if anything."""
    try:
        patch = ctx.artifact(name)
    except OSError as error:
        return f"artifact {name}: {error.strerror}"
    if not patch.strip():
        return None
    path = f"/tmp/patch-{secrets.token_hex(16)}"
    # What the spec lays into every sandbox is in a fresh one already; the agent's patch may have it as something new.
    new = set(NEW_FILE.findall(patch.decode("utf-8", "replace")))
    left_out = [*steering, *(path for path in ctx.provided() if path in new)]
    script = ["git", "apply", "--whitespace=nowarn", *(f"--exclude={pattern}" for pattern in left_out), path]
    written = ctx.write_file(path, patch)
    answer = ctx.terminal(shlex.join(script))
    if answer["exit_code"] == 127:
        with ctx.untouched() as clean:  # a git that the agent has put in front of the image's own may end with 127 too
            there = clean.terminal("command -v git")
        if there["exit_code"] != 0:
            raise UserError("tests_pass: `apply` needs git in the image")
    if "error" in written or answer["exit_code"] != 0:
        return f"artifact {name} cannot be applied: {written.get('error') or answer['output'][-400:]}"
    return None


def _lay(ctx: Any, files: list[dict[str, Any]]) -> str | None:
    """Put the files in place; what went wrong, if anything."""
    for file in files:
        to = file["to"]
        answer = ctx.upload(file["from"], to) if "from" in file else ctx.write_file(to, file["content"])
        if "error" in answer:
            return f"the tests cannot be put in place: {answer['error']}"
    return None


def _with_report(command: str, report: str) -> str:
    return f'export PYTEST_ADDOPTS="${{PYTEST_ADDOPTS:-}} --junitxml={report}"\n{command}'


def _require(
    ctx: Any, command: str, files: list[dict[str, Any]], needs: list[str], timeout: float, answer: dict[str, Any]
) -> None:
    """Raise where the command failed because the image lacks something.

    What the answer says may be the agent's: its code can print anything and end with any status. So it is only the
    reason to look: what decides is the same command among the same tests in a sandbox that the agent never saw.
    """
    if _lacking(answer, needs) is None:
        return
    with ctx.untouched() as clean:
        problem = _lay(clean, files)
        alone = clean.terminal(command, timeout=timeout)
        clean.restore()
    missing = _lacking(alone, needs)
    if problem is None and missing is not None:
        raise RewardFailure(
            f"tests_pass: the command cannot run, as the image lacks {missing!r} (the default sandbox gets packages by "
            f"`sandbox.python`; exit status {alone['exit_code']}): "
            f"{alone['output'].strip()[-400:]}"
        )


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


def _compare(report: dict[str, Any], expected: list[str], answer: dict[str, Any]) -> Score:
    if "error" in report:
        return _failed(answer) if answer["exit_code"] else Score(0.0, reason="the command wrote no pytest report")
    try:
        cases = list(ElementTree.fromstring(report["content"]).iter("testcase"))
    except ElementTree.ParseError as error:
        return Score(0.0, reason=f"the pytest report cannot be read: {error}")
    missing = [name for name in expected if not _passed(name, cases)]
    if missing:
        return Score(0.0, reason=f"not passed: {', '.join(missing[:5])}", metrics={"missing": len(missing)})
    return Score(1.0)


def _passed(name: str, cases: list[ElementTree.Element]) -> bool:
    """Whether the report has this test, and every case of it passed."""
    outcomes = [{child.tag for child in case} for case in cases if _is(name, case)]
    return bool(outcomes) and not any({"failure", "error", "skipped"} & outcome for outcome in outcomes)


def _is(name: str, case: ElementTree.Element) -> bool:
    """``tests/test_a.py::Class::test_x`` is in the report as class ``tests.test_a.Class``, name ``test_x``."""
    plain, bracket, case_id = name.partition("[")
    *where, test = plain.split("::")
    reported = case.get("name", "")
    if reported != test + bracket + case_id and (bracket or reported.partition("[")[0] != test):
        return False
    file, *classes = where or [""]
    wanted = ".".join([file.removesuffix(".py").replace("/", ".").lstrip("."), *classes])
    found = case.get("classname", "")
    return not wanted or found == wanted or found.endswith(f".{wanted}")
