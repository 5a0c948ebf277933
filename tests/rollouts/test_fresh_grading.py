"""Grading out of the agent's reach: a spec in the shape of swe-tests, each row on a root file system of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.sandboxes import RewardSandboxes, kept_artifacts
from hermes_rl.runs.process import run_process
from hermes_rl.runs.setup import RunOptions
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import Sandbox, SandboxConfig, SandboxFile
from hermes_rl.spec.load import load_spec
from hermes_rl.tools.artifacts import ArtifactRequest
from hermes_rl.tools.base import ToolRuntime, find_runtime
from tests.rootfs import make_rootfs

SPEC = """
version: 1
name: swe-tests
dataset: {path: json, data_files: tasks.jsonl, split: train, key: instance_id}
prompt:
  system: Work in the repository in the current directory.
  user: "{{ problem_statement }}"
toolsets: {enabled: [terminal, file]}
sandbox:
  image: "{{ image }}"
  workdir: /testbed
  files: [{to: TASK.md, content: "{{ problem_statement }}"}]
  setup: ["git rev-parse HEAD"]
  network: false
  limits: {memory: 2GiB, processes: 256, disk: 1GiB}
  timeout: 60
artifacts:
  patch: {command: "git add -A && git diff --cached --binary {{ base_commit }}"}
rewards:
  tests_pass:
    sandbox: fresh
    args:
      apply: patch
      files: [{to: tests/test_hidden.py, content: "{{ test_code }}"}]
      command: python3 -m pytest -q tests/test_hidden.py
      expected: "{{ fail_to_pass }}"
      timeout: 60
solution:
  turns:
    - tools: [{name: terminal, args: {command: "{{ command }}"}}]
    - say: done
servers: {policy: {type: scripted, error_rate: 0}}
process: {group_size: 1, groups: 1}
"""
TEST = "import repo\n\ndef test_value():\n    assert repo.value() == {value}\n"
FIX = "sed -i 's/WRONG/{value}/' repo.py"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory, own_cache: Path) -> Path:
    """A folder with the spec and two images: a folder and an archive with other content."""
    folder = tmp_path_factory.mktemp("swe")
    (folder / "swe.yaml").write_text(SPEC)
    image = make_rootfs(folder / "one", "one")
    python = next(image.glob("usr/lib/python3*"))
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py"):
        spec = find_spec(name)
        assert spec is not None and spec.origin is not None
        source = Path(spec.origin)
        if source.name == "__init__.py":
            shutil.copytree(source.parent, python / name)
        else:
            shutil.copy(source, python)
    commit(image / "testbed", 'NAME = "one"\n\ndef value():\n    return WRONG\n')
    subprocess.run(["cp", "-a", image, folder / "two"], check=True)
    shutil.rmtree(folder / "two/testbed")
    (folder / "two/testbed").mkdir()
    commit(folder / "two/testbed", 'NAME = "two"\n\ndef value():\n    return int(WRONG)\n')
    subprocess.run(["tar", "-cf", folder / "two.tar", "-C", folder / "two", "."], check=True)
    return folder


def commit(folder: Path, source: str) -> str:
    (folder / "repo.py").write_text(source)
    (folder / "conftest.py").write_text("# the repository's own\n")
    config = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "init.defaultBranch=main"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "base"]):
        subprocess.run(["git", *config, *words], cwd=folder, check=True)
    return "HEAD"


def row(image: str, value: int, command: str, name: str = "row") -> dict[str, Any]:
    return {
        "instance_id": f"{image}-{name}",
        "image": image,
        "problem_statement": "value() is wrong",
        "base_commit": "HEAD",
        "test_code": TEST.format(value=value),
        "fail_to_pass": ["tests/test_hidden.py::test_value"],
        "command": command,
    }


async def play(tasks: Path, out: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    (tasks / "tasks.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    spec = load_spec(tasks / "swe.yaml", overrides=None)
    spec = spec.model_copy(update={"process": spec.process.model_copy(update={"groups": len(rows)})})
    await run_process(spec, RunOptions("process", out=out))
    lines = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    return sorted(lines, key=lambda line: [each["instance_id"] for each in rows].index(line["row_key"]))


HOOK = """import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
    outcome = yield
    outcome.get_result().outcome = "passed"
"""
EXIT = "echo 'import os; os._exit(0)'"
FORGED = '<testsuite><testcase classname="tests.test_hidden" name="test_value"/></testsuite>'
PLANTS = {
    "conftest": f"mkdir -p tests; cat > conftest.py <<'END'\n{HOOK}END\ncp conftest.py tests/",
    "own test": "mkdir -p tests; echo 'def test_value(): pass' > tests/test_hidden.py",
    "sitecustomize": f"{EXIT} | tee sitecustomize.py usercustomize.py",
    "shadowing": f"for m in pytest pluggy json argparse; do {EXIT} > $m.py; done",
    "shadowing beside the tests": f"mkdir -p tests; {EXIT} | tee tests/argparse.py tests/pytest.py",
    "options": "printf '[pytest]\\naddopts = --collect-only\\n' > pytest.ini; cp pytest.ini tox.ini",
    "project options": "printf '[tool.pytest.ini_options]\\npython_functions=\"nothing\"\\n' > pyproject.toml",
    "plugin": "mkdir x.egg-info; printf '[pytest11]\\nx = evil\\n' > x.egg-info/entry_points.txt; echo > evil.py",
    "profile": "printf 'alias python3=true\\nexit 0\\n' | tee ~/.bashrc ~/.profile ~/.bash_profile",
    "path": "mkdir -p bin; printf '#!/bin/sh\\nexit 0\\n' | tee bin/python3 > python3; chmod 755 python3 bin/python3",
    "interpreter": "cp /bin/true /usr/bin/python3; cp /bin/true /bin/python3",
    "user site": f"d=~/.local/lib/python3.11/site-packages; mkdir -p $d; {EXIT} > $d/usercustomize.py",
    "module path": f"for d in /usr/lib/python3*; do {EXIT} > $d/sitecustomize.py; done",
    "report": f"echo '{FORGED}' | tee /tmp/report.xml report.xml",
    "git": "git config diff.external 'echo diff; true'; echo '* -diff' > .git/info/attributes",
    "link to the tests": "mkdir -p /tmp/x; ln -s /tmp/x tests",
}


HARMLESS = ("conftest", "sitecustomize", "shadowing", "options")


@pytest.mark.slow
async def test_rows_with_different_images_are_graded_in_fresh_sandboxes(tasks: Path, tmp_path: Path) -> None:
    right = [row("one", 11, FIX.format(value=11), "right"), row("two.tar", 22, FIX.format(value=22), "right")]
    wrong = [row("one", 11, FIX.format(value=12), "wrong"), row("two.tar", 22, "rm -rf .git", "broken")]
    planted = [row("one", 11, plant, name) for name, plant in sorted(PLANTS.items())]
    solved = [row("two.tar", 22, f"{FIX.format(value=22)}; {PLANTS[name]}", name) for name in HARMLESS]
    lines = await play(tasks, tmp_path / "run", [*right, *wrong, *planted, *solved])
    scores = {line["row_key"]: line["score"] for line in lines}
    ones = {"one-right", "two.tar-right", *(f"two.tar-{name}" for name in HARMLESS)}
    assert {key for key, score in scores.items() if score == 1} == ones, [line["rewards"] for line in lines]
    assert {score for key, score in scores.items() if key not in ones} == {0}
    assert "artifact patch" in lines[3]["rewards"]["tests_pass"]["reason"]
    for line, value in zip(lines[:2], ("11", "int(22)"), strict=True):
        kept = line["artifacts"]["patch"]
        assert f"+    return {value}" in (tmp_path / "run" / kept["path"]).read_text()
        assert len(kept["sha256"]) == 64


LAID = """
dataset: {items: [{q: hi, c: "mkdir work; echo a > work/a; echo n > note; echo x > gone"}]}
prompt: {user: "{{ q }}"}
toolsets: [terminal]
artifacts: {work: {path: work}, note: {command: cat note}}
rewards:
  own: {fn: "look.py:own"}
  fresh: {fn: "look.py:fresh", sandbox: fresh}
solution: {turns: [{tools: [{name: terminal, args: {command: "{{ c }}"}}]}]}
servers: {policy: {type: scripted, error_rate: 0}}
process: {group_size: 2, groups: 1}
"""
LOOK = """
def own(ctx):
    return ctx.terminal("cat gone")["output"] == "x\\n"

def fresh(ctx):
    assert ctx.terminal("ls -A ~; cat work/a .artifacts/note")["output"] == ".artifacts\\nwork\\na\\nn\\n"
    assert ctx.artifact("note") == b"n\\n"
    return not ctx.terminal("cat gone")["exit_code"] == 0
"""


async def test_artifacts_are_all_that_a_fresh_sandbox_has_of_the_agent(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(LAID)
    (tmp_path / "look.py").write_text(LOOK)
    await run_process(load_spec(tmp_path / "spec.yaml"), RunOptions("process", out=tmp_path / "run"))
    lines = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_text().splitlines()]
    assert [line["score"] for line in lines] == [2, 2], lines
    assert sorted(path.name for path in (tmp_path / "run/artifacts").iterdir()) == sorted(line["id"] for line in lines)


LOOKS = "ls -A ~ /tmp; cat work/a; env | grep -c LEFT; cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 77[7]'"


async def test_fresh_sandboxes_have_nothing_of_anybody(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(LAID)
    (tmp_path / "look.py").write_text(LOOK)
    laid = SandboxConfig(files=(SandboxFile("given", b"x"),), setup=("cp given set-up",))
    async with CompiledSpec(load_spec(tmp_path / "spec.yaml")) as compiled:
        for _ in range(3):
            async with ToolRuntime(laid) as runtime:
                own = await runtime.sandbox()
                await own.run("mkdir work; echo a > work/a; touch ~/left /tmp/left; sleep 777 >/dev/null 2>&1 &")
                sandboxes = RewardSandboxes(runtime, compiled.grader.ordered)
                await sandboxes.take([ArtifactRequest("work", path="work")], 9)
                async with sandboxes(compiled.grader.ordered[1]) as context:
                    assert context is not None
                    found = find_runtime(context.task_id)
                    assert found is not None
                    fresh = await found.sandbox()
                    assert fresh is not own
                    seen = (await fresh.run(LOOKS)).output
                    assert seen == "/home/user:\ngiven\nset-up\nwork\n\n/tmp:\na\n0\n0\n"
                    await fresh.run("touch ~/left /tmp/left; export LEFT=1; sleep 777 >/dev/null 2>&1 &")


async def test_own_sandbox_is_given_back_before_a_fresh_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, alive = list[Sandbox](), list[int]()

    def noted(config: SandboxConfig) -> Sandbox:
        alive.append(sum(sandbox.alive for sandbox in made))
        made.append(create_sandbox(config))
        return made[-1]

    (tmp_path / "spec.yaml").write_text(LAID)
    (tmp_path / "look.py").write_text(LOOK)
    monkeypatch.setattr("hermes_rl.tools.base.create_sandbox", noted)
    spec = load_spec(tmp_path / "spec.yaml")
    spec = spec.model_copy(update={"process": spec.process.model_copy(update={"group_size": 1})})
    await run_process(spec, RunOptions("process", out=tmp_path / "run"))
    assert alive == [0, 0]


DAEMONS = """
dataset: {items: [{q: hi, c: "true"}]}
prompt: {user: "{{ q }}"}
toolsets: [terminal]
artifacts: {work: {command: "setsid sleep 7791 >/dev/null 2>&1 & echo work"}}
rewards:
  first: {fn: "look.py:first"}
  second: {fn: "look.py:second"}
solution: {turns: [{tools: [{name: terminal, args: {command: "{{ c }}"}}]}]}
servers: {policy: {type: scripted, error_rate: 0}}
process: {group_size: 1, groups: 1}
"""
ALONE = """
def alone(ctx):
    return not ctx.terminal("cat /proc/[0-9]*/cmdline | tr '\\\\0' ' ' | grep -o 'sleep 779[0-9]'")["output"]

def first(ctx):
    found = alone(ctx)
    ctx.terminal("(trap '' TERM; exec setsid sleep 7792) >/dev/null 2>&1 &")
    return found

def second(ctx):
    return alone(ctx)
"""


async def test_processes_of_artifacts_and_rewards_do_not_reach_the_next_reward(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(DAEMONS)
    (tmp_path / "look.py").write_text(ALONE)
    await run_process(load_spec(tmp_path / "spec.yaml"), RunOptions("process", out=tmp_path / "run"))
    line = json.loads((tmp_path / "run/rollouts.jsonl").read_text())
    assert {name: reward["value"] for name, reward in line["rewards"].items()} == {"first": 1, "second": 1}


SURVIVED = """
dataset: {items: [{q: hi, c: "true"}]}
prompt: {user: "{{ q }}"}
toolsets: [terminal]
rewards:
  own: {fn: "look.py:looks", weight: 1}
  fresh: {fn: "look.py:looks", sandbox: fresh}
solution: {turns: [{tools: [{name: terminal, args: {command: "{{ c }}"}}]}]}
servers: {policy: {type: scripted, error_rate: 0}}
process: {group_size: 2, groups: 1}
"""


async def test_what_was_graded_stays_graded_where_a_sandbox_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An agent whose processes cannot be killed would otherwise choose that its rollout is not scored."""
    from hermes_rl.errors import SandboxFailure
    from hermes_rl.sandbox.helper_sandbox import HelperSandbox

    close = HelperSandbox.close

    async def close_and_tell(self: HelperSandbox) -> None:
        await close(self)
        if self.connection.exposed:
            raise SandboxFailure("3 processes of a closed sandbox cannot be killed")

    monkeypatch.setattr(HelperSandbox, "close", close_and_tell)
    (tmp_path / "spec.yaml").write_text(SURVIVED)
    (tmp_path / "look.py").write_text("def looks(ctx):\n    return ctx.terminal('true')['exit_code'] == 0\n")
    await run_process(load_spec(tmp_path / "spec.yaml"), RunOptions("process", out=tmp_path / "run"))
    lines = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_text().splitlines()]
    assert [(line["score"], line["error"]) for line in lines] == [(2, None)] * 2
    assert "3 processes of a closed sandbox cannot be killed" in caplog.text


ONLY_KEPT = """
dataset: {items: [{q: a}]}
prompt: {user: "{{ q }}"}
toolsets: [terminal]
artifacts:
  work: {path: work, restore: LAY}
  said: {command: echo said}
rewards:
  looks: {fn: "look.py:looks", sandbox: fresh, range: [0, 99]}
solution: {turns: [{tools: [{name: terminal, args: {command: "mkdir work; echo kept > work/a"}}]}, {say: done}]}
servers: {policy: {type: scripted}}
process: {groups: 1, group_size: 1}
"""
LOOKS_FOR = """
def looks(ctx):
    assert ctx.artifact("said").strip() == b"said"
    there = ctx.terminal("cat work/a ~/.artifacts/said")["output"]
    return float("kept" in there) + 10 * float("said" in there)
"""


async def test_artifact_may_be_saved_without_being_restored(tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(LOOKS_FOR)
    for lay, score in (("false", 10), ("true", 11), ("false", 10)):
        (tmp_path / "spec.yaml").write_text(ONLY_KEPT.replace("LAY", lay))
        await run_process(load_spec(tmp_path / "spec.yaml"), RunOptions("process", out=tmp_path / "run"))
        (line,) = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_text().splitlines()]
        assert (line["score"], line["error"]) == (score, None)
        assert kept_artifacts(tmp_path / "run", line["artifacts"], ["work"])["work"].files[0].data == b"kept\n"


HOSTILE = """
dataset: {path: json, data_files: rows.jsonl}
prompt: {user: "{{ name }}"}
toolsets: [terminal]
sandbox: {files: [{to: base/conftest.py, content: ""}], limits: {LIMITS}}
artifacts: {fix: {path: fix}, tree: {path: tree}, base: {path: base}}
rewards:
  looks: {fn: "look.py:looks", sandbox: fresh}
solution: {turns: [{tools: [{name: terminal, args: {command: "{{ command }}"}}]}, {say: done}]}
servers: {policy: {type: scripted, error_rate: 0}}
process: {groups: COUNT, group_size: 1}
"""
GRADES = """
def looks(ctx):
    ctx.terminal("true")
    return ctx.artifact("fix") == b"right\\n"
"""
LEFT = {
    "honest": "echo right > fix",
    "no file": "true",
    "a folder": "mkdir fix",
    "a folder with a file": "mkdir fix; echo right > fix/x",
    "long path": "echo right > fix; mkdir tree; cd tree; D=$(printf 'd%.0s' $(seq 250)); "
    "for i in $(seq 15); do mkdir $D; cd -P $D; done; echo x > $(printf 'f%.0s' $(seq 200))",
    "long name": "echo right > fix; mkdir tree; echo x > tree/$(printf 'n%.0s' $(seq 255))",
    "odd names": "echo right > fix; mkdir tree; cd tree; touch -- -rf $'\\377\\n' $'\\e[2J' ' ' '*' '\\\\'",
    "many files": "echo right > fix; mkdir tree; cd tree; seq 2000 | xargs touch",
    "deep": "echo right > fix; mkdir -p tree/$(printf 'd/%.0s' $(seq 900)); touch tree/$(printf 'd/%.0s' $(seq 900))f",
    "too much": "echo right > fix; mkdir tree; truncate -s 65M tree/a",
    "a file where a folder was": "echo right > fix; rm -r base; echo > base",
    "a folder where a file was": "echo right > fix; cd base; rm conftest.py; mkdir conftest.py; echo > conftest.py/x",
    "closed": "echo right > fix; chmod 444 base/conftest.py; chmod 111 base",
    "no mode": "echo right > fix; chmod 0 fix base",
}
ZERO = {"no file", "a folder", "a folder with a file", "no mode"}


@pytest.mark.slow
async def test_no_file_of_an_agent_ends_a_run_or_keeps_it_from_being_graded(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"name": name, "command": command}) + "\n" for name, command in LEFT.items())
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "spec.yaml").write_text(HOSTILE.replace("COUNT", str(len(LEFT))).replace("LIMITS", ""))
    (tmp_path / "look.py").write_text(GRADES)
    await run_process(load_spec(tmp_path / "spec.yaml"), RunOptions("process", out=tmp_path / "run"))
    lines = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_text().splitlines()]
    got = {line["messages"][0]["content"]: (line["score"], line["error"]) for line in lines}
    assert got == {name: (0.0 if name in ZERO else 1.0, None) for name in LEFT}
    reasons = {line["messages"][0]["content"]: line["rewards"]["looks"].get("reason") for line in lines}
    assert "it is a folder" in reasons["a folder"]
    assert "No such file" in reasons["no file"]
    for line in lines:
        kept_artifacts(tmp_path / "run", line["artifacts"], line["artifacts"])


async def test_artifact_that_cannot_be_restored_scores_zero_with_the_reason(tmp_path: Path) -> None:
    """Files with holes take no room in the sandbox of the agent, and all of it in a fresh one."""
    rows = json.dumps({"name": "full", "command": "echo right > fix; mkdir tree; truncate -s 20M tree/a tree/b"}) + "\n"
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "spec.yaml").write_text(HOSTILE.replace("COUNT", "1").replace("LIMITS", "disk: 32MiB"))
    (tmp_path / "look.py").write_text(GRADES)
    await run_process(load_spec(tmp_path / "spec.yaml"), RunOptions("process", out=tmp_path / "run"))
    (line,) = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_text().splitlines()]
    assert (line["score"], line["error"]) == (0, None)
    assert "artifacts cannot be copied into a fresh sandbox" in line["rewards"]["looks"]["reason"]
