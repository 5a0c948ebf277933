"""What a cheat or an honest layout is for `tests_pass`: the agent's files, the tests that judge them, and what they score."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hermes_rl.sandbox.base import SandboxConfig, SandboxFile
from hermes_rl.scoring.value import RewardValue
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
    raw: bytes | None = None
    """The patch itself, where git is not to write it."""

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
        files, setup = (*files, *library_of_pytest), ("mkdir /tmp/lib && tar xzf /tmp/lib.tgz -C /tmp/lib",)
    config = SandboxConfig(env=env, files=files, setup=setup)
    given = {path: ArtifactFile("", _bytes(text), 0o644) for path, text in case.files.items()}
    artifacts = {path: TakenArtifact(path, path, (file,)) for path, file in given.items()}
    if case.patch:
        artifacts = {
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


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()
