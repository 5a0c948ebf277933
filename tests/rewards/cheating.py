"""What a cheat or an honest layout is for `tests_pass`: the agent's files, the tests that judge them, and what they score."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from hermes_rl.sandbox.base import SandboxConfig, SandboxFile
from hermes_rl.scoring.reward_value import RewardValue
from hermes_rl.tools.artifacts import ArtifactFile, TakenArtifact
from hermes_rl.tools.base import ToolRuntime
from hermes_rl.tools.context import ToolContext
from tests.rewards.played import graded

# ruff: noqa: E501

RIGHT = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return a - b\n"
EXIT = "import os\nos._exit(0)\n"
UNITTEST = "python3 -m unittest -q test_hidden"
PYTEST = "python3 -m pytest -q tests/test_hidden.py"
CASE = """import unittest
from solution import add

class TestAdd(unittest.TestCase):
    def test_small(self):
        self.assertEqual(add(2, 3), 5)

    def test_zero(self):
        self.assertEqual(add(0, 3), 3)
"""
PLAIN = "from solution import add\n\ndef test_small():\n    assert add(2, 3) == 5\n\ndef test_zero():\n    assert add(0, 3) == 3\n"
PASSING = "class TestAdd:\n    def test_small(self): pass\n    def test_zero(self): pass\n"
PASSING_CASE = "import unittest\nclass TestAdd(unittest.TestCase):\n    def test_small(self): pass\n    def test_zero(self): pass\n"
FORGED = (
    '<testsuite><testcase classname="tests.test_hidden" name="test_small"/>'
    '<testcase classname="tests.test_hidden" name="test_zero"/></testsuite>'
)
HOOK = """import sys, types
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.rpartition(".")[2] != "test_hidden": return None
        import importlib.util
        return importlib.util.spec_from_loader(name, self)
    def create_module(self, spec): return None
    def exec_module(self, module):
        module.__file__ = {file!r}
        exec({passing!r}, module.__dict__)
sys.meta_path.insert(0, Finder())
"""
FORGE = """import os, re, sys
words = " ".join([os.environ.get("PYTEST_ADDOPTS", ""), *sys.argv])
for path in re.findall(r"junitxml=(\\S+)", words):
    open(path, "w").write({forged!r})
{end}
"""
SIGN = """import glob, hashlib, json, os, sys
for place in sys.path:
    for key in ("0" * 64, ""):
        body = json.dumps({"tests": [[os.path.abspath("tests/test_hidden.py") + "::" + t, "passed"]
                                     for t in ("test_small", "test_zero")], "tampered": []})
        try: open(place + "/report.0", "w").write(hashlib.sha256((key + body).encode()).hexdigest() + " " + body)
        except OSError: pass
os._exit(0)
"""


UNPACK = ("mkdir -p /tmp/lib && tar xf /tmp/lib.tar -C /tmp/lib",)
"""What makes pytest of its archive in a sandbox."""


@dataclass(frozen=True)
class Case:
    """What the agent has left, as files of artifacts or in a patch, and the tests that judge it."""

    kind: str
    name: str
    files: dict[str, str | bytes]
    """A text `-> x` in a patch is a link to x."""
    tests: dict[str, str] = field(default_factory=lambda: {"test_hidden.py": CASE})
    command: str = UNITTEST
    image: dict[str, str] = field(default_factory=dict)
    """What the spec itself lays into every sandbox."""
    patch: bool = False
    more: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    """Variables of the sandbox."""
    raw: bytes | None = None
    """The patch itself, beside `files`, where git is not to write it."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}".replace(" ", "-")


def case(kind: str, name: str, solution: str = WRONG, **files: str) -> Case:
    return Case(kind, name, {"solution.py": solution, **files})


def pytest_case(kind: str, name: str, solution: str = WRONG, files: dict[str, str] | None = None, **more: Any) -> Case:
    given = {"tests": {"tests/test_hidden.py": PLAIN}, "command": PYTEST, **more}
    return Case(kind, name, {"solution.py": solution, **(files or {})}, **given)


async def judged(case: Case, library_of_pytest: tuple[SandboxFile, ...]) -> RewardValue:
    """What the reward says in a fresh sandbox with these artifacts."""
    files = tuple(SandboxFile(path, text.encode()) for path, text in case.image.items())
    env, setup = {"PYTHONDONTWRITEBYTECODE": "1"}, ()
    if "pytest" in case.command:
        env["PYTHONPATH"] = "/tmp/lib"
        files, setup = (*files, *library_of_pytest), UNPACK
    config = SandboxConfig(env=env | case.env, files=files, setup=setup)
    given = {path: ArtifactFile("", _bytes(text), 0o644) for path, text in case.files.items()}
    artifacts = {path: TakenArtifact(path, path, (file,)) for path, file in given.items()}
    if case.patch:
        artifacts = ({} if case.raw is None else artifacts) | {
            "patch": TakenArtifact(
                "patch", "~/.artifacts/patch", (ArtifactFile("", case.raw or await diff(case), 0o644),)
            )
        }
    async with ToolRuntime(config) as runtime:
        runtime.artifacts = artifacts
        await runtime.laid.lay(await runtime.sandbox(), artifacts)
        tests = [{"to": path, "content": text} for path, text in case.tests.items()]
        more = {"apply": "patch"} if case.patch else {}
        args: dict[str, Any] = {"command": case.command, "files": tests, "timeout": 30, **more, **case.more}
        return await graded("tests_pass", ctx=ToolContext(runtime.task_id), **args)


async def diff(case: Case) -> bytes:
    """The agent's files as a patch over the image's."""
    git = "git -c user.name=a -c user.email=a@localhost"
    async with ToolRuntime(SandboxConfig(workdir="/home/user/repo")) as runtime:
        sandbox = await runtime.sandbox()
        for path, text in case.image.items():
            await sandbox.write_file(path, text.encode())
        await sandbox.run(f"git init -q && git add -A && {git} commit -q --allow-empty -m base")
        for path, text in case.files.items():
            if isinstance(text, str) and text.startswith("-> "):
                await sandbox.run(["ln", "-s", text[3:], path])
            else:
                await sandbox.write_file(path, _bytes(text))
        done = await sandbox.run("git add -A && git diff --cached --binary HEAD")
        assert done.exit_code == 0, done.output
        return done.stdout


def added(path: str, text: str, mode: str = "100644") -> str:
    """What a patch says of a new file; `path` as git writes it, with the quotes where it has some."""
    quote = '"' if path.startswith('"') else ""
    old, new = (f"{quote}{side}/{path.strip(quote or None)}{quote}" for side in "ab")
    lines = text.split("\n")
    end = [] if not lines.pop() else ["\\ No newline at end of file"]
    lines += text.split("\n")[-1:] if end else []
    body = [f"+{line}" for line in lines]
    head = [
        f"diff --git {old} {new}",
        f"new file mode {mode}",
        "--- /dev/null",
        f"+++ {new}",
        f"@@ -0,0 +1,{len(lines)} @@",
    ]
    return "\n".join([*head, *body, *end, ""])


def moved(source: str, target: str) -> str:
    """What a patch says of a file under a new name."""
    return f"diff --git a/{source} b/{target}\nsimilarity index 100%\nrename from {source}\nrename to {target}\n"


def removed(path: str, line: str) -> str:
    """What a patch says of a file of one line that it takes away."""
    head = f"diff --git a/{path} b/{path}\ndeleted file mode 100644\n--- a/{path}\n+++ /dev/null\n"
    return f"{head}@@ -1 +0,0 @@\n-{line}\n"


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


JUDGES = (
    *(
        f"hermes_rl/scoring/{name}.py"
        for name in ("isolated*", "canaries", "runner_report", "reporter", "control_files", "test_names")
    ),
    "rewards/tests_pass.py",
)
"""What decides whether a cheat scores; where it has changed, all cheats are run."""
in_turn = pytest.mark.by_turns(3, unless_changed=JUDGES)
