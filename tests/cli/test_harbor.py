"""Task folders in Harbor's format, by `harbor:FOLDER`: what is played scores as its tests write, the rest is named."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.data import harbor
from hermes_rl.data.check import check_spec
from hermes_rl.data.harbor import read_tasks
from hermes_rl.errors import RunError, SpecError, UserError
from hermes_rl.plugins import load_object
from hermes_rl.runs.evaluate import run_evaluate
from hermes_rl.runs.process import run_process
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.setup import RunOptions
from hermes_rl.spec.load import load_spec
from hermes_rl.spec.overrides import parse_extra_args
from tests.runs.playing import lines

TOML = """\
version = "1.0"

[verifier]
timeout_sec = 60.0
env = { WANTED = "42" }

[agent]
timeout_sec = 600.0

[environment]
memory_mb = 512
"""
DOCKERFILE = "FROM debian:bookworm-slim\nWORKDIR /app\nENV GREETING=hello PLACE=/app\nCOPY given.txt ./\n"
TEST = """\
if [ "$(cat answer.txt)" = "$WANTED" ] && [ "$(cat given.txt)" = "given" ] && [ "$GREETING" = hello ]
then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
SOLVE = "echo 42 > answer.txt\n"


def task(
    folder: Path,
    toml: str = TOML,
    dockerfile: str | None = DOCKERFILE,
    test: str = TEST,
    solve: str = SOLVE,
    others: Mapping[str, str] | None = None,
) -> Path:
    """Write a task folder, and other files into it."""
    files = {
        "task.toml": toml,
        "instruction.md": "Write the answer into answer.txt.",
        "environment/given.txt": "given\n",
        "tests/test.sh": test,
        "solution/solve.sh": solve,
    }
    if dockerfile is not None:
        files["environment/Dockerfile"] = dockerfile
    files |= others or {}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def quiet() -> Progress:
    return Progress(io.StringIO())


async def played(folder: Path, out: Path, command: str | None = None, *more: str) -> dict[str, Any]:
    """Play one task by its own solution, or by a command; returns the rollout's line."""
    (line,) = await all_played(f"harbor:{folder}", out, command, *more)
    return line


async def all_played(source: str, out: Path, command: str | None = None, *more: str) -> list[dict[str, Any]]:
    """Play each row of a spec by its solution, or by a command; returns the rollouts' lines."""
    sets = ['servers.policy={"type": "scripted"}', *more]
    if command is not None:
        turns = [{"tools": [{"name": "terminal", "args": {"command": command}}]}, {"say": "Done."}]
        sets.append(f"solution={json.dumps({'turns': turns})}")
    spec = load_spec(source, overrides=parse_extra_args((), sets))
    _, directory = await run_evaluate(spec, RunOptions("evaluate", out=out, progress=quiet()))
    return lines(directory.path / "rollouts.jsonl")


@pytest.mark.parametrize(
    ("command", "score"),
    [
        (None, 1.0),
        ("true", 0.0),
        ("echo 41 > answer.txt", 0.0),
        ("mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt", 0.0),
        ("mkdir -p /logs/verifier; echo '{\"reward\": 1}' > /logs/verifier/reward.json", 0.0),
        ("mkdir -p /logs /tmp/mine; echo 1 > /tmp/mine/reward.json; ln -s /tmp/mine /logs/verifier", 0.0),
        ("mkdir -p /logs; mkfifo /logs/verifier", 0.0),
        ("mkdir -p /tests; printf 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 500 /tests", 0.0),
        ("setsid sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; done' >/dev/null 2>&1 & true", 0.0),
    ],
    ids=["oracle", "nothing", "wrong", "text", "json", "link", "fifo", "tests", "daemon"],
)
async def test_the_score_is_what_the_tests_write(tmp_path: Path, command: str | None, score: float) -> None:
    line = await played(task(tmp_path / "task"), tmp_path / "run", command)
    assert (line["score"], line["error"]) == (score, None)


async def test_names_with_numbers_are_metrics_and_their_mean_the_value(tmp_path: Path) -> None:
    test = 'echo "{\\"right\\": $(wc -l < answer.txt), \\"fast\\": 0.5}" > /logs/verifier/reward.json\n'
    line = await played(task(tmp_path / "task", test=test), tmp_path / "run")
    assert line["rewards"]["verified"]["value"] == 0.75
    assert line["rewards"]["verified"]["metrics"] == {"right": 1.0, "fast": 0.5}


SEVERAL = """\
grep -qx 42 answer.txt && right=1 || right=0
[ $(wc -c < answer.txt) -lt 4 ] && short=1 || short=0
printf '{"right": %s, "short": %s}' $right $short > /logs/verifier/reward.json
"""


@pytest.mark.parametrize(
    ("command", "numbers"),
    [
        (None, {"right": 1.0, "short": 1.0}),
        ("true", {"right": 0.0, "short": 0.0}),
        ("echo 41 > answer.txt", {"right": 0.0, "short": 1.0}),
        ("printf '42\\n43\\n' > answer.txt", {"right": 1.0, "short": 0.0}),
    ],
    ids=["oracle", "nothing", "wrong", "half"],
)
async def test_several_rewards_are_recorded_as_separate_metrics(
    tmp_path: Path, command: str | None, numbers: dict[str, float]
) -> None:
    line = await played(task(tmp_path / "task", test=SEVERAL), tmp_path / "run", command)
    assert line["rewards"]["verified"]["metrics"] == numbers
    assert line["score"] == sum(numbers.values()) / 2


FETCHING = """\
apt-get update
curl -LsSf https://example.invalid/install.sh | sh
source $HOME/.local/bin/env
uvx --with a==1 -w b pytest /tests/test_it.py
if [ $? -eq 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
"""What tests do that bring their own pytest, as most published tasks' do."""


def offline() -> str:
    """The command of the docs that runs such tests where they cannot fetch anything."""
    page = (Path(__file__).parents[2] / "docs/ports.md").read_text("utf-8")
    (way,) = re.findall(r"^TESTS='(.*?)'$", page, re.MULTILINE | re.DOTALL)
    return str(way)


@pytest.mark.parametrize(("command", "score"), [(None, 1.0), ("true", 0.0)])
async def test_tests_that_download_tools_run_offline_with_another_command(
    tmp_path: Path, command: str | None, score: float
) -> None:
    others = {"environment/bin/pytest": "#!/bin/sh\ntest $1 = /tests/test_it.py && grep -q 42 answer.txt\n"}
    folder = task(tmp_path / "task", TOML, "FROM debian\nCOPY bin /app/bin\n", FETCHING, others=others)
    (folder / "environment/bin/pytest").chmod(0o755)
    way = offline().replace("uvx()", "PATH=/app/bin:$PATH; uvx()", 1)
    if command is None:
        with pytest.raises(RunError, match=r"cannot run in this sandbox \(sandbox.network, sandbox.python or an image"):
            await played(folder, tmp_path / "as-it-is", command)
    line = await played(folder, tmp_path / "run", command, f"rewards.verified.args.command={way}")
    assert (line["score"], line["error"]) == (score, None)


async def test_packages_that_this_machine_has_need_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = tmp_path / "status"
    status.write_text(
        "Package: one\nEssential: yes\nStatus: install ok installed\n\nPackage: two\nStatus: hold ok installed\n\n"
        "Package: gone\nStatus: deinstall ok config-files\n"
    )
    monkeypatch.setattr(harbor, "PACKAGES", status)
    run = "RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends {} \\\n"
    run += "    && apt-get clean && rm -rf /var/lib/apt/lists/*\nCOPY given.txt ./\nENV GREETING=hello\n"
    folder = task(tmp_path / "task", dockerfile=f"FROM debian\nWORKDIR /app\n{run.format('one two')}")
    tasks = read_tasks(folder, "bubblewrap", network=False)
    assert "task: this machine has what `RUN` installs: one, two" in tasks.notes
    assert (await played(folder, tmp_path / "run"))["score"] == 1.0
    pip = (
        "RUN apt-get install -y one && python3 -m pip install --no-cache-dir 'a>=1' b && rm -rf /var/lib/apt/lists/*\n"
    )
    (folder / "environment/Dockerfile").write_text(f"FROM public.ecr.aws/docker/library/debian:12\n{pip}")
    with pytest.raises(
        SpecError, match=r"--set 'sandbox.python=\[c, a>=1, b\]' has what pip installs; --set"
    ) as refused:
        read_tasks(folder, "bubblewrap", network=False, packages=("c",))
    assert "Dockerfile:2:1: " in str(refused.value)
    assert read_tasks(folder, "bubblewrap", network=False, packages=("c", "a>=1", "b")).rows
    for packages, why in (
        ("one gone", "lacks gone, "),
        ("one=1.2", "lacks one=1.2, "),
        ("one > /log", "installs or"),
        ("one && pip install -r a", "or"),
    ):
        (folder / "environment/Dockerfile").write_text(f"FROM debian\nRUN apt-get install -y {packages}\n")
        with pytest.raises(SpecError, match=why):
            read_tasks(folder, "bubblewrap", network=False)


async def test_the_prompt_says_where_skills_are(tmp_path: Path) -> None:
    folder = task(
        tmp_path / "task", TOML + 'skills_dir = "/skills"\n', DOCKERFILE + "COPY given.txt /skills/a/SKILL.md\n"
    )
    line = await played(
        folder, tmp_path / "run", "cp /skills/a/SKILL.md .; grep given SKILL.md && echo 42 > answer.txt"
    )
    assert line["score"] == 1.0
    said = "Write the answer into answer.txt.\n\nSkills are in /skills, each a folder with a SKILL.md."
    assert line["messages"][0]["content"] == said


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("set -e; grep -q 42 answer.txt; echo 1 > /logs/verifier/reward.txt", "has written no reward.json"),
        ("cat answer.txt > /logs/verifier/reward.txt", "has written no reward.json"),
        ("echo nan > /logs/verifier/reward.txt", "is not a finite number"),
        ("echo '{\"reward\": 1e999}' > /logs/verifier/reward.json", "a finite number each"),
        ("echo '{}' > /logs/verifier/reward.json", "a finite number each"),
        ("echo 1e99 > /logs/verifier/reward.txt", "which is not from 0 to 1"),
        ("echo '{\"reward\": -1}' > /logs/verifier/reward.json", "which is not from 0 to 1"),
        (f"echo '{json.dumps({f'n{n}': 1 for n in range(33)})}' > /logs/verifier/reward.json", "more than 32 names"),
        ("printf '{\"%0100d\": 1}' 0 > /logs/verifier/reward.json", "more than 80 characters"),
    ],
)
async def test_no_number_by_the_agents_doing_is_0(tmp_path: Path, test: str, why: str) -> None:
    line = await played(task(tmp_path / "task", test=test + "\n"), tmp_path / "run", "true")
    assert line["score"] == 0.0
    assert why in line["rewards"]["verified"]["reason"]


async def test_tests_that_cannot_run_at_all_are_nobodys_score(tmp_path: Path) -> None:
    test = "uvx pytest /tests && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
    with pytest.raises(RunError, match=r"cannot run in this sandbox.*uvx: command not found"):
        await played(task(tmp_path / "task", test=test), tmp_path / "run", "true")


async def test_a_solution_may_have_other_files_whatever_their_bytes(tmp_path: Path) -> None:
    folder = task(
        tmp_path / "task", solve="cmp /solution/odd/it\\'s.bin given.bin && cat '/solution/a b' > answer.txt\n"
    )
    (folder / "solution/a b").write_text("42\n")
    (folder / "solution/odd").mkdir()
    (folder / "solution/odd/it's.bin").write_bytes(bytes(range(256)))
    (folder / "environment/given.bin").write_bytes(bytes(range(256)))
    (folder / "environment/Dockerfile").write_text(DOCKERFILE + "COPY given.bin ./\n")
    line = await played(folder, tmp_path / "run")
    assert (line["score"], line["error"]) == (1.0, None)


def test_a_variable_of_this_machine_has_its_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "this machine's")
    folder = task(tmp_path / "task", TOML + "env = { PLACE = '${PLACE:-here}/${OTHER:-}' }\n")
    (row,) = read_tasks(folder, "bubblewrap", network=False).rows
    assert row["env"]["PLACE"] == "here/"


async def test_variables_of_a_solution_are_the_sandboxs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANSWER", "this machine's")
    solve = 'echo "${ANSWER:-none} $GREETING ${HERE} {{ nothing }}" > said.txt; echo 42 > answer.txt\n'
    test = TEST.replace(
        "[ ", '[ "$(cat said.txt)" = "it\'s mine hello /app {{ nothing }}" ] && [ -z "$ANSWER" ] && [ ', 1
    )
    toml = TOML + '[solution]\nenv = { ANSWER = "it\'s mine", HERE = "/app" }\n'
    folder = task(tmp_path / "task", toml, test=test, solve=solve)
    assert (await played(folder, tmp_path / "run"))["score"] == 1.0
    folder = task(tmp_path / "task", test=test, solve=solve)
    assert (await played(folder, tmp_path / "without"))["score"] == 0.0


async def test_process_excludes_the_evaluation_tasks(tmp_path: Path) -> None:
    for name in "abcd":
        task(tmp_path / "tasks" / name)
    sets = (
        "dataset.eval={fraction: 0.25}",
        "process={groups: 3, group_size: 2}",
        'servers.policy={"type": "scripted"}',
    )
    spec = load_spec(f"harbor:{tmp_path}/tasks", overrides=parse_extra_args((), sets))
    summary, directory = await run_process(spec, RunOptions("process", tmp_path / "process", progress=quiet()))
    assert summary.written == 3
    trained = {line["row_key"] for line in lines(directory.path / "rollouts.jsonl")}
    assert {score for group in lines(directory.path / "groups.jsonl") for score in group["scores"]} == {1.0}
    (evaluated,) = await all_played(f"harbor:{tmp_path}/tasks", tmp_path / "run", None, sets[0])
    assert trained | {evaluated["row_key"]} == set("abcd")
    assert evaluated["row_key"] not in trained

    only = load_spec(f"harbor:{tmp_path}/tasks", overrides=parse_extra_args((), sets[1:]))
    with pytest.raises(UserError, match="every row is for evaluation"):
        await run_process(only, RunOptions("process", tmp_path / "only", progress=quiet()))


async def test_evaluate_resumes_with_the_remaining_tasks(tmp_path: Path) -> None:
    task(tmp_path / "tasks/a")
    task(tmp_path / "tasks/b")
    first = await all_played(f"harbor:{tmp_path}/tasks", tmp_path / "run", None, "evaluate.limit=1")
    both = await all_played(f"harbor:{tmp_path}/tasks", tmp_path / "run")
    assert (len(first), len(both), both[:1]) == (1, 2, first)
    again = await all_played(f"harbor:{tmp_path}/tasks", tmp_path / "run")
    assert again == both, "nothing is played anew"
    task(tmp_path / "tasks/b", test="echo 1 > /logs/verifier/reward.txt\n")
    with pytest.raises(UserError, match=r"a run of another spec .*changed: dataset"):
        await all_played(f"harbor:{tmp_path}/tasks", tmp_path / "run")


STEPS = """
[[steps]]
name = "one"
min_reward = 1
[[steps]]
name = "two"
min_reward = { reward = 0.5, right = 0.5 }
[steps.verifier]
timeout_sec = 30
env = { WANTED = "2" }
[[steps]]
name = "three"
"""
NEXT = """\
grep -qx $WANTED answer.txt && right=1 || right=0
printf '{"reward": %s, "right": %s}' $right $right > /logs/verifier/reward.json
"""


def steps(folder: Path, toml: str = TOML + STEPS, others: Mapping[str, str] | None = None) -> Path:
    """Write a task folder of three steps: the first asks for 42, the others for 2 and 3, where a file has to be."""
    given = "test -e given.txt && test -e answer.txt"
    files = {f"steps/{name}/instruction.md": f"Write the number of {name}." for name in ("one", "two", "three")}
    files |= {f"steps/{name}/solution/solve.sh": f"echo {n} > answer.txt" for name, n in NUMBERS.items()}
    files |= {"steps/two/workdir/begun.txt": "2", "steps/two/workdir/setup.sh": given, "steps/two/tests/test.sh": NEXT}
    files |= {"steps/three/tests/test.sh": NEXT.replace("$WANTED", "3"), "steps/one/workdir/given.txt": "given"}
    task(folder, toml, others=files | dict(others or {}))
    for name in ("instruction.md", "solution/solve.sh", "environment/given.txt"):
        (folder / name).unlink()
    (folder / "solution").rmdir()
    (folder / "environment/Dockerfile").write_text("FROM debian\nWORKDIR /app\nENV GREETING=hello\n")
    return folder


NUMBERS = {"one": 42, "two": 2, "three": 3}


@pytest.mark.parametrize(
    ("answers", "score", "stop_reason", "played_steps"),
    [
        (None, 1.0, "finished", 3),
        (("true",) * 3, 0.0, "step_failed", 1),
        (("echo 42 > answer.txt", "echo 2 > answer.txt", "true"), 2 / 3, "finished", 3),
        (("echo 42 > answer.txt", "true", "echo 3 > answer.txt"), 0.5, "step_failed", 2),
        (("echo 2 > answer.txt", "echo 42 > answer.txt", "echo 3 > answer.txt"), 0.0, "step_failed", 1),
    ],
    ids=["oracle", "nothing", "third", "second", "order"],
)
async def test_steps_run_in_order_until_one_fails(
    tmp_path: Path, answers: tuple[str, ...] | None, score: float, stop_reason: str, played_steps: int
) -> None:
    sets = []
    if answers is not None:
        calls = [{"tools": [{"name": "terminal", "args": {"command": command}}]} for command in answers]
        turns = [turn for call in calls for turn in (call, {"say": "Done."})]
        sets = [f"solution={json.dumps({'turns': turns})}"]
    line = await played(steps(tmp_path / "task"), tmp_path / "run", None, *sets)
    assert (line["score"], line["stop_reason"], line["error"]) == (pytest.approx(score), stop_reason, None)
    values = [name for name in line["rewards"]["verified"].get("metrics", {}) if name.startswith("step_")]
    assert len(values) == (played_steps if played_steps > 1 else 0)
    heard = [message["content"] for message in line["messages"] if message["role"] == "user"]
    assert heard == [f"Write the number of {name}." for name in list(NUMBERS)[:played_steps]]


SECRETS = """
[[steps]]
name = "one"
[[steps]]
name = "two"
"""
CHECKED = """\
sh ./hook.sh
grep -qx "$(grep {step} /tests/expected.txt)" answer.txt && R=1; echo ${{R:-0}} > /logs/verifier/reward.txt
"""
"""Tests that run a program of the agent, and share with those of other steps what they expect."""
LEAVE = "mkdir -p {0} && cp /tests/expected.txt /tests/test.sh {0}"


def secret_steps(folder: Path) -> Path:
    """Write a task folder of two steps whose tests share a file that the agent must not see."""
    others = {"tests/expected.txt": "one 42\ntwo 7\n"}
    for name in ("one", "two"):
        others |= {f"steps/{name}/tests/test.sh": CHECKED.format(step=name), f"steps/{name}/instruction.md": "Say it."}
        others |= {
            f"steps/{name}/solution/solve.sh": f"echo true > hook.sh; grep {name} > answer.txt <<E\none 42\ntwo 7\nE"
        }
    task(folder, TOML + SECRETS, others=others)
    (folder / "instruction.md").unlink()
    return folder


@pytest.mark.parametrize(
    "place", ["/app/.seen", "/tmp/.seen", "/dev/shm/.seen", "$HOME/.seen", "/var/tmp/.seen", "/logs/.seen"]
)
async def test_tests_of_one_step_are_not_there_in_the_next(tmp_path: Path, place: str) -> None:
    """The agent leaves a program that the tests of a step run, and another that waits for them."""
    leave = LEAVE.format(place)
    waits = f"until {leave} 2>/dev/null; do :; done"
    first = (
        f"echo {shlex.quote(leave)} > hook.sh; (setsid sh -c {shlex.quote(waits)} >/dev/null 2>&1 &); "
        "echo one 42 > answer.txt"
    )
    second = f"ls -A {place} /tests /logs; grep two {place}/expected.txt > answer.txt"
    calls = [{"tools": [{"name": "terminal", "args": {"command": command}}]} for command in (first, second)]
    turns = [turn for call in calls for turn in (call, {"say": "Done."})]
    folder = secret_steps(tmp_path / "task")
    line = await played(folder, tmp_path / "run", None, f"solution={json.dumps({'turns': turns})}")
    said = [message["content"] for message in line["messages"] if message["role"] == "tool"]
    assert line["rewards"]["verified"]["metrics"] == {"step_1": 1.0, "step_2": 0.0}, said
    assert not any(name in said[1] for name in ("expected.txt\n", "test.sh", "reward.txt")), said[1]
    assert (await played(folder, tmp_path / "honest"))["score"] == 1.0


@pytest.mark.parametrize(
    ("toml", "place", "why"),
    [
        (TOML + STEPS + "healthcheck = { retries = 3 }\n", "task.toml:24", "`steps.2.healthcheck.command`: expected a"),
        (TOML + STEPS + "[steps.agent]\nuser = 'root'\n", "task.toml:25", "`steps.2.agent.user`"),
        (TOML + STEPS + "min_reward = 'much'\n", "task.toml:24", "expected a number, or names with a number each"),
        (
            TOML + STEPS + "verifier = { environment_mode = 'separate' }\n",
            "task.toml:24",
            "in the agent's sandbox alone",
        ),
        (TOML + STEPS + "verifier = { env = { KEY = '${KEY}' } }\n", "task.toml:24", "variables of this machine"),
        (
            "multi_step_reward_strategy = 'final'\n" + TOML + STEPS,
            "task.toml:1",
            "--set rewards.verified.per_step=last",
        ),
        ("multi_step_reward_strategy = 'best'\n" + TOML + STEPS, "task.toml:1", "expected mean or final"),
        (TOML + STEPS.replace("three", "../three"), "task.toml:23", "steps/ has no folder of that name"),
        (TOML + STEPS.replace("three", ".."), "task.toml:23", "steps/ has no folder of that name"),
    ],
)
def test_unsupported_steps_are_refused_with_file_and_line(tmp_path: Path, toml: str, place: str, why: str) -> None:
    with pytest.raises(SpecError) as refused:
        read_tasks(steps(tmp_path / "odd", toml), "bubblewrap", network=False, agent_timeout=600, steps="mean")
    (problem,) = refused.value.problems
    assert f"{place}:1: task odd cannot run: " in str(problem)
    assert why in problem.message


def test_task_steps_require_a_spec_with_user_turns(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused:
        read_tasks(steps(tmp_path / "odd"), "bubblewrap", network=False)
    (problem,) = refused.value.problems
    assert "task.toml:13:1: " in str(problem) and "user: {turns:" in problem.message
    folder = steps(
        tmp_path / "noted",
        others={"steps/two/notes.txt": "", "steps/two/solution/solve.sh": "true"},
    )
    (row,) = (read := read_tasks(folder, "bubblewrap", network=False, agent_timeout=600, steps="mean")).rows
    assert any("steps/two/notes.txt" in note for note in read.notes)
    assert [step["min_reward"] for step in row["steps"]] == [1, {"reward": 0.5, "right": 0.5}]
    assert [each["timeout"] for each in row["verifiers"]] == [60.0, 30, 60.0]


@pytest.mark.parametrize(
    ("backend", "keeps", "why"),
    [
        ("ssh", False, "the files of the sandbox backend ssh cannot be copied; use"),
        ("bubblewrap", True, "processes cannot be copied; remove sandbox.keep_processes"),
        ("docker", False, "services cannot be copied; remove"),
    ],
)
def test_steps_whose_sandbox_cannot_be_copied_are_refused(tmp_path: Path, backend: str, keeps: bool, why: str) -> None:
    folder = steps(tmp_path / "odd", others={"environment/docker-compose.yaml": "services: {db: {image: x}}\n"})
    if backend != "docker":
        (folder / "environment/docker-compose.yaml").unlink()
    with pytest.raises(SpecError) as refused:
        read_tasks(folder, backend, network=False, agent_timeout=600, steps="mean", keeps_processes=keeps)
    (problem,) = refused.value.problems
    assert "task.toml:16:1: " in str(problem) and why in problem.message


HEALTH = """
[environment.healthcheck]
command = "echo >> {place}/looks; [ $(wc -l < {place}/looks) -gt 3 ]"
interval_sec = 0.1
retries = {retries}
"""


async def test_agent_starts_after_the_health_check_passes(tmp_path: Path) -> None:
    """The command fails three times before it passes."""
    toml = TOML + HEALTH.format(place=".", retries=4)
    test = "[ $(wc -l < looks) = 4 ] && grep -q 4 looks.txt && R=1; echo ${R:-0} > /logs/verifier/reward.txt\n"
    line = await played(task(tmp_path / "a", toml, test=test), tmp_path / "run", "wc -l < looks > looks.txt")
    assert (line["score"], line["error"]) == (1.0, None)
    grace = "start_period_sec = 60\nstart_interval_sec = 0.1\n"
    folder = task(tmp_path / "b", TOML + HEALTH.format(place=".", retries=1) + grace, test=test)
    assert (await played(folder, tmp_path / "run-b", "wc -l < looks > looks.txt"))["score"] == 1.0


async def test_a_sandbox_that_stays_ill_is_nobodys_score(tmp_path: Path) -> None:
    toml = TOML + HEALTH.format(place=".", retries=3)
    with pytest.raises(RunError, match="the health check fails"):
        await played(task(tmp_path / "task", toml), tmp_path / "run")


async def test_health_check_of_a_step_runs_after_its_setup(tmp_path: Path) -> None:
    """Where it fails, which the agent can bring about, the step is graded as it stands."""
    check = "healthcheck = {{ command = '{}', interval_sec = 0.1, retries = 2 }}\n"
    toml = TOML + STEPS.replace('name = "two"\n', 'name = "two"\n' + check.format("test -e begun.txt"))
    line = await played(steps(tmp_path / "task", toml), tmp_path / "run")
    assert (line["score"], line["stop_reason"]) == (1.0, "finished")
    toml = TOML + STEPS.replace('name = "two"\n', 'name = "two"\n' + check.format("test -e nowhere.txt"))
    line = await played(steps(tmp_path / "ill", toml), tmp_path / "run-ill")
    assert (line["score"], line["stop_reason"]) == (0.5, "environment_error")


SERVER = (Path(__file__).parents[2] / "specs" / "servers" / "inventory.py").read_text()


async def test_a_tool_server_of_a_task_runs_in_its_sandbox(tmp_path: Path) -> None:
    served = '[[environment.mcp_servers]]\nname = "shop"\ntransport = "stdio"\ncommand = "python3"\nargs = ["{}"]\n'
    server = SERVER.replace('return "stored"', 'open("/app/stored.txt", "w").write(args["what"]); return "stored"')
    folder = task(
        tmp_path / "task",
        TOML + served.format("/app/shop.py"),
        DOCKERFILE + "COPY shop.py ./\n",
        "grep -qx plums stored.txt && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n",
        others={"environment/shop.py": server},
    )
    with pytest.raises(SpecError, match=r"task.toml:12:1: .*: --set 'tools=\[\{") as refused:
        read_tasks(folder, "bubblewrap", network=False)
    (way,) = shlex.split(str(refused.value).partition(" --set ")[2])
    turns = [{"tools": [{"name": "store", "args": {"what": "plums", "boxes": 1, "each": 2}}]}, {"say": "Done."}]
    line = await played(folder, tmp_path / "run", None, way, f"solution={json.dumps({'turns': turns})}")
    assert (line["score"], line["error"]) == (1.0, None)
    task(folder, TOML + served.format("/app/other.py"), DOCKERFILE + "COPY shop.py ./\n")
    with pytest.raises(SpecError, match=r"other\.py"):
        await played(folder, tmp_path / "other", None, way)


REMOTE = '[[environment.mcp_servers]]\nname = "shop"\n{}url = "http://shop:80/mcp"\n'


@pytest.mark.parametrize(("transport", "said"), [('transport = "streamable-http"\n', "streamablehttp"), ("", "sse")])
def test_a_tool_server_at_an_address_is_reached_from_the_sandbox(tmp_path: Path, transport: str, said: str) -> None:
    folder = task(tmp_path / "task", TOML + REMOTE.format(transport))
    with pytest.raises(SpecError, match=r"task.toml:12:1: .* --set 'sandbox\.python=\[mcp-proxy\]'$") as refused:
        read_tasks(folder, "bubblewrap", network=False)
    tools, python = shlex.split(str(refused.value).partition(" --set ")[2])[::2]
    spec = load_spec(f"harbor:{folder}", overrides=parse_extra_args((), (tools, python)))
    assert spec.tools[0].mcp is not None and spec.tools[0].mcp.command == (
        "mcp-proxy", "--transport", said, "http://shop:80/mcp",
    )  # fmt: skip
    assert [warning for warning in check_spec(spec)[1] if "left out" in str(warning)] == []
    (row,) = read_tasks(folder, "bubblewrap", network=False, servers={"shop": ("http://shop:80/mcp",)}).rows
    assert row["name"] == "task"
    task(folder, TOML + REMOTE.format(transport) + 'headers = { Authorization = "Bearer ${TOKEN}" }\n')
    with pytest.raises(SpecError, match="headers of the tool server 'shop' are not sent"):
        read_tasks(folder, "bubblewrap", network=False)


TABLES = '[[steps]]\nname = "one"\n'
"""A table that is written behind the others."""


@pytest.mark.parametrize(
    ("toml", "dockerfile", "place", "why"),
    [
        (TOML + TABLES, DOCKERFILE, "task.toml:13", "steps/ has no folder of that name"),
        (TOML + "[[steps]]\n", DOCKERFILE, "task.toml:12", "steps/ has no folder of that name"),
        ("steps = 3\n" + TOML, DOCKERFILE, "task.toml:1", "expected [[steps]]"),
        (TOML + "gpus = 1\n", DOCKERFILE, "task.toml:12", "no sandbox here has a GPU"),
        (TOML + "[[environment.mcp_servers]]\nname = 'a'\n", DOCKERFILE, "task.toml:12", "neither a url nor a command"),
        (TOML + "mcp_servers = 'a'\n", DOCKERFILE, "task.toml:12", "expected [[environment.mcp_servers]]"),
        (TOML + "[environment.healthcheck]\nretries = nan\ncommand = 'true'\n", DOCKERFILE, "task.toml:13", "a number"),
        (TOML + "[environment.healthcheck]\nretries = 1\n", DOCKERFILE, "task.toml:12", "expected a command"),
        (TOML + "os = 'windows'\n", DOCKERFILE, "task.toml:12", "sandboxes are Linux"),
        (TOML + "cpus = 'many'\n", DOCKERFILE, "task.toml:12", "expected a number"),
        (TOML + "docker_image = 'a/b:1'\n", DOCKERFILE, "task.toml:12", "--set sandbox.backend=docker"),
        (TOML + "env = { KEY = '${KEY}' }\n", DOCKERFILE, "task.toml:12", "not handed over"),
        (TOML + "= 1\n", DOCKERFILE, "task.toml:12", "cannot be read"),
        (TOML, "FROM alpine\n", "Dockerfile:1", "it needs the image alpine"),
        (
            TOML,
            "FROM debian\nRUN apt-get update \\\n && apt-get install -y no-such\n",
            "Dockerfile:2",
            "lacks no-such, which",
        ),
        (TOML, "FROM debian\nFROM debian\n", "Dockerfile:2", "several stages"),
        (TOML, "FROM debian\n# a note\nUSER nobody\n", "Dockerfile:3", "`USER` is not built"),
        (TOML, "FROM debian\nCOPY ../task.toml /\n", "Dockerfile:2", "has no such file"),
        (TOML, "FROM debian\nENV A='b\n", "Dockerfile:2", "cannot be read"),
        (TOML, 'FROM debian\nENTRYPOINT ["/serve"]\n', "Dockerfile:2", "`ENTRYPOINT` is not built here: --set"),
        (TOML + "env = 'A=b'\n", DOCKERFILE, "task.toml:12", "`environment.env`: expected a table"),
        (TOML + "memory = 'much'\n", DOCKERFILE, "task.toml:12", "expected 512M or 2G"),
        (TOML + "memory = '1G'\n", DOCKERFILE, "task.toml:12", "`environment.memory_mb` says another size"),
        (TOML + "network_mode = 'some'\n", DOCKERFILE, "task.toml:12", "expected no-network, public, or allowlist"),
        (TOML + "allowed_hosts = 'a.org'\n", DOCKERFILE, "task.toml:12", "expected no-network, public, or allowlist"),
        (TOML + "[verifier.environment]\n", DOCKERFILE, "task.toml:12", "tests run in the agent's sandbox alone"),
        (
            TOML + "[solution]\nenv = { KEY = '${KEY}' }\n",
            DOCKERFILE,
            "task.toml:13",
            "`solution.env.KEY`: takes variables",
        ),
        ("solution = 3\n" + TOML, DOCKERFILE, "task.toml:1", "`solution`: expected a table"),
        (
            TOML.replace("[verifier]\n", "[verifier]\nenvironment_mode = 'separate'\n"),
            DOCKERFILE,
            "task.toml:4",
            "`verifier.environment_mode`: tests run in the agent's sandbox alone",
        ),
    ],
)
def test_unsupported_task_is_refused_with_file_and_line(
    tmp_path: Path, toml: str, dockerfile: str, place: str, why: str
) -> None:
    with pytest.raises(SpecError) as refused:
        read_tasks(task(tmp_path / "odd", toml, dockerfile), "bubblewrap", network=False)
    (problem,) = refused.value.problems
    assert f"{place}:1: task odd cannot run: " in str(problem)
    assert why in problem.message


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("trajectory.json", "{}", "a conversation that came before"),
        ("tests/data/.harborignore", "*.log\n", "it is ignored, so it excludes no files"),
        ("solution/.harborignore", "*.log\n", "it is ignored, so it excludes no files"),
        ("environment/docker-compose.yaml", "services: []\n", "it has no services"),
        (
            "environment/docker-compose.yaml",
            "services: {main: {}, db: {image: x}}\n",
            "services next to the sandbox need Docker: --set",
        ),
        ("environment/singularity-compose.yaml", "services: {}\n", "it is not supported"),
    ],
)
def test_a_file_that_would_be_ignored_refuses_the_task(tmp_path: Path, name: str, text: str, why: str) -> None:
    with pytest.raises(SpecError) as refused:
        read_tasks(task(tmp_path / "odd", others={name: text}), "bubblewrap", network=False)
    (problem,) = refused.value.problems
    assert str(problem).startswith(f"{tmp_path}/odd/{name}:1:1: task odd cannot run: {why}")


@pytest.mark.parametrize(
    ("link", "target"),
    [("tests/out", "../task.toml"), ("solution/folder", "."), ("environment/none", "nothing"), ("tests/far", "/etc")],
)
def test_link_outside_its_directory_refuses_the_task(tmp_path: Path, link: str, target: str) -> None:
    folder = task(tmp_path / "odd")
    (folder / link).symlink_to(target)
    with pytest.raises(SpecError) as refused:
        read_tasks(folder, "bubblewrap", network=False)
    (problem,) = refused.value.problems
    assert str(problem).startswith(f"{folder}/{link}:1:1: task odd cannot run: only links to files in ")


@pytest.mark.parametrize(
    "file", ["instruction.md", "task.toml", "environment/Dockerfile", "tests/test.sh", "solution/solve.sh"]
)
@pytest.mark.parametrize("kind", ["link", "pipe", "device"])
def test_no_file_of_this_machine_gets_into_a_task(tmp_path: Path, file: str, kind: str) -> None:
    (tmp_path / "secret").write_text("FROM debian\nRUN echo the-key-of-this-machine\n")
    folder = task(tmp_path / "odd")
    (folder / file).unlink()
    if kind == "pipe":
        os.mkfifo(folder / file)
    else:
        (folder / file).symlink_to("/dev/zero" if kind == "device" else tmp_path / "secret")
    try:
        rows = read_tasks(folder, "bubblewrap", network=False).rows
    except SpecError as refused:
        assert str(refused.problems[0]).startswith(f"{folder}/")
        return
    except UserError as refused:
        assert str(folder) in str(refused)
        return
    assert file in ("environment/Dockerfile", "solution/solve.sh"), (
        "these may be missing, and then they count as missing"
    )
    assert kind == "pipe" or file == "solution/solve.sh"
    assert "the-key-of-this-machine" not in str(rows)


def sparse(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


def chain(folder: Path, depth: int) -> None:
    """Make folders in each other, deeper than a path may be long."""
    directory = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(20 * "d", dir_fd=directory)
        parent, directory = directory, os.open(20 * "d", os.O_RDONLY, dir_fd=directory)
        os.close(parent)
    os.close(directory)


HOSTILE: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "nested": ("a = " + 5000 * "[" + 5000 * "]", Path.exists, "RecursionError"),
    "dotted": ("a" + 20_000 * ".a" + " = 1", Path.exists, "a key of more than 50 names"),
    "long": ("#" * (1 << 20), Path.exists, "has more than 1048576 bytes"),
    "server": ("[[environment.mcp_servers]]\ntransport = 'stdio'\nargs = 5", Path.exists, "TypeError"),
    "steps": (101 * "[[steps]]\nname = 'a'\n", Path.exists, "more than 100 steps"),
    "name": (f"[[steps]]\nname = '{5000 * 'a'}'", Path.exists, "File name too long"),
    "large": ("", lambda folder: sparse(folder / "tests/large", 70 << 20), "more than 67108864 bytes"),
    "many": ("", lambda folder: [sparse(folder / f"solution/{n}", 1 << 18) for n in range(5)], "1 MiB together"),
    "context": ("", lambda folder: sparse(folder / "environment/large", 5 << 30), "1 GiB in them"),
    "deep": ("", lambda folder: chain(folder / "tests", 200), "File name too long"),
    "bytes": ("", lambda folder: (folder / "tests/\udcff").touch(), "its name is not UTF-8"),
    "pipe": ("", lambda folder: os.mkfifo(folder / "tests/pipe"), "only files are read"),
    "services": (
        "",
        lambda folder: (folder / "environment/docker-compose.yaml").write_text(
            "services: {main: {}, a: {image: x, depends_on: [{b: 1}]}}"
        ),
        "TypeError",
    ),
    "line\nbreak": ("", Path.exists, "cannot be printed"),
}
"""Name of a task's folder → what is added to task.toml, what is done to the folder, and why it is left out."""


@pytest.mark.parametrize("name", HOSTILE)
def test_task_that_cannot_be_read_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(harbor, "LARGEST_TASK", 1 << 20)
    added, change, why = HOSTILE[name]
    task(tmp_path / "good")
    change(task(tmp_path / name, TOML + added))
    tasks = read_tasks(tmp_path, "bubblewrap", network=False, steps="mean")
    assert [row["name"] for row in tasks.rows] == ["good"]
    assert why in tasks.notes[-1]


@pytest.mark.parametrize("name", ["tests", "solution", "environment", "steps/a", "steps/a/tests", "steps/a/workdir"])
@pytest.mark.parametrize("backend", ["bubblewrap", "docker"])
def test_folder_of_a_task_that_is_a_link_is_not_followed(tmp_path: Path, name: str, backend: str) -> None:
    toml = TOML + ("[[steps]]\nname = 'a'\n" if name.startswith("steps") else "")
    folder = task(tmp_path / "odd", toml, others={"steps/a/instruction.md": "Do.", "steps/a/tests/test.sh": "true"})
    outside = tmp_path / "outside"
    if (folder / name).exists():
        (folder / name).rename(outside)
    outside.mkdir(exist_ok=True)
    (outside / "key").write_text("the-key-of-this-machine")
    (folder / name).symlink_to(outside)
    with pytest.raises(SpecError) as refused:
        read_tasks(folder, backend, network=False, steps="mean")
    assert any(why in str(refused.value) for why in ("links are not followed", "has no folder of that name"))


def test_file_that_becomes_a_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at a file and its reading."""
    (tmp_path / "key").write_text("the-key-of-this-machine")
    folder = task(tmp_path / "odd")
    listed = harbor.list_below

    def swapped(directory: Path, top: Path) -> dict[Path, int]:
        modes = listed(directory, top)
        for path in modes if directory.name == "tests" else ():
            path.unlink()
            path.symlink_to(tmp_path / "key")
        return modes

    monkeypatch.setattr(harbor, "list_below", swapped)
    with pytest.raises(SpecError, match="is not below"):
        read_tasks(folder, "bubblewrap", network=False)


def test_link_to_a_neighbouring_file_is_read_as_that_file(tmp_path: Path) -> None:
    folder = task(tmp_path / "task", dockerfile="FROM debian\nCOPY data /app\n", others={"environment/data/a": "a"})
    (folder / "environment/data/b").symlink_to("../given.txt")
    (row,) = read_tasks(folder, "bubblewrap", network=False).rows
    files = {file["to"]: base64.b64decode(file["base64"]) for file in row["files"]}
    assert files == {"/app/a": b"a", "/app/b": b"given\n"}


async def test_folders_may_be_made_before_files_are_copied(tmp_path: Path) -> None:
    dockerfile = "FROM debian\nRUN mkdir -p /app /app/b\nCOPY given.txt /app/b/\nWORKDIR /app\nENV GREETING=hello\n"
    folder = task(tmp_path / "task", dockerfile=dockerfile, test=TEST.replace("given.txt", "b/given.txt"))
    assert (await played(folder, tmp_path / "run"))["score"] == 1.0
    (folder / "environment/Dockerfile").write_text(dockerfile.replace("/app/b\n", "/app/b; ls\n", 1))
    with pytest.raises(SpecError, match="`COPY` after `RUN`"):
        read_tasks(folder, "bubblewrap", network=False)


def test_a_dockerignore_refuses_the_copy_of_a_folder(tmp_path: Path) -> None:
    others = {"environment/.dockerignore": "*.log\n"}
    assert read_tasks(task(tmp_path / "file", others=others), "bubblewrap", network=False).rows
    folder = task(tmp_path / "all", dockerfile="FROM debian\nCOPY . /app\n", others=others)
    with pytest.raises(SpecError, match=r"Dockerfile:2:1: .*`COPY \.` of a folder with a \.dockerignore"):
        read_tasks(folder, "bubblewrap", network=False)


STANDS_IN = "the default sandbox replaces the image debian:bookworm-slim"


@pytest.mark.parametrize(
    ("toml", "dockerfile", "others", "note"),
    [
        (
            TOML + "build_timeout_sec = 60.0\n",
            DOCKERFILE,
            {},
            "`environment.build_timeout_sec` is of no effect: a build may",
        ),
        (TOML + "gpu_types = ['H100']\n", DOCKERFILE, {}, "`environment.gpu_types` is of no effect where no GPU"),
        ("artifacts = ['/app/out']\n" + TOML, DOCKERFILE, {}, "`artifacts` is not collected; `artifacts` of the spec"),
        (
            "multi_step_reward_strategy = 'mean'\n" + TOML,
            DOCKERFILE,
            {},
            "`multi_step_reward_strategy` is of effect for",
        ),
        (
            TOML + "memory_bm = 1\n",
            DOCKERFILE,
            {},
            "`environment.memory_bm` is not a key of the format and has no effect; did you mean `memory_mb`?",
        ),
        (TOML + "[extra]\na = 1\n", DOCKERFILE, {}, "`extra` is not a key of the format and has no effect"),
        (TOML + "[solution]\nuser = 'a'\n", DOCKERFILE, {}, "`solution.user` is not a key of the format"),
        (TOML, DOCKERFILE + 'CMD ["nginx"]\n', {}, "`CMD` of environment/Dockerfile is not run, nor is it by Harbor"),
        (TOML, DOCKERFILE + "EXPOSE 80\n", {}, "`EXPOSE` of environment/Dockerfile is of no effect"),
        (TOML, DOCKERFILE, {"notes.md": ""}, "of no effect, as no part of the format: notes.md"),
        (
            TOML,
            DOCKERFILE,
            {"tests/Dockerfile": "FROM debian"},
            "tests/Dockerfile is not built: tests run in the agent's",
        ),
        (
            TOML.replace("600.0", "90.0"),
            DOCKERFILE,
            {},
            "`agent.timeout_sec` is 90, but `agent.timeout` of the spec is 600, and that counts: --set agent.",
        ),
    ],
)
def test_what_changes_nothing_is_said_in_a_line_for_all_tasks(
    tmp_path: Path, toml: str, dockerfile: str, others: dict[str, str], note: str
) -> None:
    for name in "abcde":
        task(tmp_path / name, toml, dockerfile, others=others)
    tasks = read_tasks(tmp_path, "bubblewrap", network=False, agent_timeout=600)
    assert [row["name"] for row in tasks.rows] == list("abcde")
    first, second = sorted(tasks.notes, key=lambda said: STANDS_IN in said)
    assert first.startswith(f"a, b, c and 2 more: {note}")
    assert second == f"a, b, c and 2 more: {STANDS_IN}"


def test_validate_says_all_that_a_run_says(tmp_path: Path) -> None:
    task(tmp_path / "a", TOML + "build_timeout_sec = 60.0\n")
    task(tmp_path / "b", TOML.replace("600.0", "900.0"))
    task(tmp_path / "c", TOML + "gpus = 1\n")
    sets = ("evaluate.agent.timeout=300",)
    problems, warnings = check_spec(load_spec(f"harbor:{tmp_path}", overrides=parse_extra_args((), sets)))
    assert problems == []
    expected = [
        "a, b: the default sandbox replaces the image debian",
        "a: `agent.timeout_sec` is 600, but `agent.timeout` of the spec is 300, and that counts",
        "a: `environment.build_timeout_sec` is of no effect",
        "b: `agent.timeout_sec` is 900, but `agent.timeout` of the spec is 300, and that counts",
        f"excluded: {tmp_path}/c/task.toml:12:1: task c cannot run: `environment.gpus`",
    ]
    assert len(warnings) == len(expected)
    for warning, begin in zip(warnings, expected, strict=True):
        assert str(warning).startswith(f"{tmp_path}: {begin}")


def test_fully_supported_task_produces_no_notes(tmp_path: Path) -> None:
    toml = """\
schema_version = "1.4"
source = "here"
[task]
name = "a/b"
[metadata]
anything = "goes"
[agent]
timeout_sec = 600
network_mode = "no-network"
[verifier]
timeout_sec = 60
environment_mode = "shared"
env = { WANTED = "42" }
[environment]
os = "Linux"
cpus = 1
gpus = 0
memory = "512M"
storage = "2G"
mcp_servers = []
workdir = "/app"
network_mode = "no-network"
env = { A = "b" }
[solution]
env = { C = "d" }
"""
    folder = task(tmp_path / "task", toml, None, others={"README.md": "", ".gitignore": ""})
    tasks = read_tasks(folder, "bubblewrap", network=False, agent_timeout=600)
    assert tasks.notes == []
    (row,) = tasks.rows
    assert (row["memory"], row["disk"], row["cpu"]) == (512 * 2**20, 2 * 2**30, 1)


ALLOWS = "network_mode = 'allowlist'\nallowed_hosts = ['pypi.org', '*.a.org']\n"


@pytest.mark.parametrize("table", ["environment", "agent", "verifier"])
@pytest.mark.parametrize(
    ("rule", "network", "refused", "note"),
    [
        ("network_mode = 'no-network'\n", False, None, None),
        ("network_mode = 'no-network'\n", True, "the task may reach no host, and", None),
        ("network_mode = 'no-network'\n", ["pypi.org"], "--set sandbox.network=false", None),
        ("network_mode = 'public'\n", True, None, None),
        ("network_mode = 'public'\n", ["pypi.org"], None, "any host, and `sandbox.network` does not: --set sandbox."),
        ("network_mode = 'public'\n", False, None, "--set sandbox.network=true"),
        (ALLOWS, True, '--set \'sandbox.network=["pypi.org", "*.a.org"]\'', None),
        (ALLOWS, ["pypi.org", "*.a.org"], None, None),
        (ALLOWS, ["PyPI.org", "b.a.org"], None, "lets the task reach pypi.org, *.a.org, and"),
        (ALLOWS, ["pypi.org", "b.org"], "the task may reach pypi.org, *.a.org, and `sandbox.network` gives more", None),
        (ALLOWS, False, None, "lets the task reach pypi.org, *.a.org, and `sandbox.network` does not"),
    ],
)
def test_each_table_of_a_task_may_bound_the_network(
    tmp_path: Path, table: str, rule: str, network: bool | Sequence[str], refused: str | None, note: str | None
) -> None:
    folder = task(tmp_path / "task", TOML.replace(f"[{table}]\n", f"[{table}]\n{rule}"))
    if refused is not None:
        with pytest.raises(SpecError) as raised:
            read_tasks(folder, "bubblewrap", network=network, agent_timeout=600)
        (problem,) = raised.value.problems
        assert f"`{table}.network_mode`: " in problem.message
        assert refused in problem.message
        return
    notes = read_tasks(folder, "bubblewrap", network=network, agent_timeout=600).notes
    assert [said for said in notes if STANDS_IN not in said] == [said for said in notes if note and note in said]
    assert len(notes) == (1 if note is None else 2)


def test_unsupported_tasks_are_excluded_with_a_warning(tmp_path: Path) -> None:
    task(tmp_path / "a")
    task(tmp_path / "b", TOML + "gpus = 1\n")
    tasks = read_tasks(tmp_path, "bubblewrap", network=False)
    assert [row["name"] for row in tasks.rows] == ["a"]
    assert tasks.notes[-1].startswith(f"WARNING: excluded: {tmp_path}/b/task.toml:12:1: task b cannot run")


def test_docker_has_the_tasks_own_image(tmp_path: Path) -> None:
    named = task(tmp_path / "named", TOML + "docker_image = 'a/b:1'\n", "FROM scratch\nUSER x\n")
    (row,) = read_tasks(named, "docker", network=False).rows
    assert (row["image"], row["workdir"], row["setup"], row["files"]) == ("a/b:1", None, [], [])


def test_files_of_a_task_with_an_image_are_copied_to_its_workdir(tmp_path: Path) -> None:
    folder = task(tmp_path / "task", TOML + "docker_image = 'a/b:1'\n", None, others={"environment/d/run.sh": "x"})
    (folder / "environment/d/run.sh").chmod(0o755)
    (row,) = read_tasks(folder, "docker", network=False).rows
    assert [(file["to"], file["mode"]) for file in row["files"]] == [("d/run.sh", "0o755"), ("given.txt", "0o644")]
    (folder / "environment/out").symlink_to("/etc/hostname")
    with pytest.raises(SpecError, match="only links to files in environment/ are followed"):
        read_tasks(folder, "docker", network=False)


def test_docker_builds_images_that_the_default_sandbox_cannot_emulate(tmp_path: Path) -> None:
    dockerfile = "FROM scratch AS a\nARG A=1\nRUN --mount=type=cache apt-get install -y $A\nFROM a\nUSER x\nCOPY . .\n"
    folder = task(tmp_path / "here/tasks/built", dockerfile=dockerfile)
    (folder / "environment/outside").symlink_to("/etc/hostname")
    (row,) = read_tasks(folder.parent, "docker", network=False).rows
    assert (row["image"], row["workdir"], row["env"], row["files"]) == ("./built/environment", None, {}, [])
    moved = tmp_path / "there"
    (tmp_path / "here").rename(moved)
    assert read_tasks(moved / "tasks", "docker", network=False).rows == [row], "wherever the folder lies"
    (moved / "tasks/built/environment/given.txt").write_text("another")
    (changed,) = read_tasks(moved / "tasks", "docker", network=False).rows
    assert changed["builds"].keys() == row["builds"].keys() and changed != row


@pytest.mark.parametrize("image", ["", "docker_image = 'a/b:1'\n"])
def test_what_an_image_starts_by_itself_is_started_where_processes_stay(tmp_path: Path, image: str) -> None:
    folder = task(tmp_path / "task", TOML + image, 'FROM x\nENTRYPOINT ["/serve", "it\'s"]\n')
    with pytest.raises(
        SpecError, match=r"Dockerfile:2:1: .*`ENTRYPOINT` starts .*: --set sandbox\.keep_processes=true"
    ):
        read_tasks(folder, "docker", network=False)
    (row,) = (tasks := read_tasks(folder, "docker", network=False, keeps_processes=True)).rows
    command, ready = row["setup"]
    assert ready == "sleep 2" and any("without a health check, the agent starts" in note for note in tasks.notes)
    assert command.startswith("(/serve 'it'\"'\"'s' sh -c 'touch ")
    (folder / "environment/Dockerfile").write_text("FROM x\nENTRYPOINT serve $A\n")
    (row,) = read_tasks(folder, "docker", network=False, keeps_processes=True).rows
    assert row["setup"][0].startswith("(sh -c 'serve $A' sh -c 'touch ")
    (folder / "task.toml").write_text(TOML + image + "[environment.healthcheck]\ncommand = 'true'\n")
    (row,) = (tasks := read_tasks(folder, "docker", network=False, keeps_processes=True)).rows
    assert len(row["setup"]) == 2 and "until timeout" in row["setup"][1]
    assert not any("ENTRYPOINT" in note for note in tasks.notes)


def test_error_for_a_task_image_names_the_backend_option(tmp_path: Path) -> None:
    folder = task(tmp_path / "task", dockerfile="FROM alpine\n")
    for demo, way in ((False, "docker"), (True, "docker --set servers.policy.type=scripted (instead of --demo)")):
        with pytest.raises(SpecError) as refused:
            read_tasks(folder, "bubblewrap", network=False, demo=demo)
        assert f"it needs the image alpine: --set sandbox.backend={way}" in str(refused.value)


COMPOSE = """\
services:
  main:
    image: ${MAIN_IMAGE_NAME}
    command: [sh, -c, sleep infinity]
    depends_on: [api]
    environment: {API: "http://api:80"}
    volumes: ["./given.txt:/given", "${HOST_AGENT_LOGS_PATH}:/logs/agent"]
  api:
    image: api:1
    depends_on: {db: {condition: service_healthy}}
    command: serve --port 80 'two words'
    restart: always
  db:
    image: db:1
    environment: [WORD=of=it, EMPTY=]
    volumes: [data:/var/lib/db, ".:/seed:ro", {type: bind, source: ./given.txt, target: /one}]
    healthcheck: {test: [CMD, ready, "$$USER now"], interval: 1s}
volumes: {data: {}}
"""


def composed(folder: Path, text: str) -> Path:
    return task(folder, TOML + "docker_image = 'a/b:1'\n", others={"environment/docker-compose.yaml": text})


def test_compose_services_run_alongside_the_sandbox(tmp_path: Path) -> None:
    tasks = read_tasks(composed(tmp_path / "two", COMPOSE), "docker", network=False)
    (row,) = tasks.rows
    given = base64.b64encode(b"given\n").decode()
    assert list(row["services"]) == ["db", "api"], "each behind those that it depends on"
    assert row["services"]["api"] == {"image": "api:1", "command": ["serve", "--port", "80", "two words"]}
    assert row["env"]["API"] == "http://api:80"
    assert [(file["to"], file["base64"]) for file in row["files"]] == [("/given", given)]
    db = row["services"]["db"]
    assert (db["env"], db["healthy"]) == ({"WORD": "of=it", "EMPTY": ""}, "ready '$USER now'")
    assert {file["to"] for file in db["files"]} == {
        *("/seed/Dockerfile", "/seed/docker-compose.yaml", "/seed/given.txt"),
        "/one",
    }
    assert "two: `restart` of services in environment/docker-compose.yaml is of no effect" in tasks.notes


def test_sandbox_does_not_depend_on_the_main_service_of_a_compose_file(tmp_path: Path) -> None:
    folder = composed(tmp_path / "two", "services: {db: {image: x}}\n")
    (row,) = read_tasks(folder, "docker", network=False).rows
    assert list(row["services"]) == ["db"]
    (folder / "environment/docker-compose.yaml").rename(folder / "environment/docker-compose.yml")
    (row,) = read_tasks(folder, "docker", network=False).rows
    assert row["services"] == {}, "a file of another name is a file as any other"


def test_a_service_may_be_built_of_a_folder(tmp_path: Path) -> None:
    text = COMPOSE.replace("image: db:1", "build: {context: ./db}\n    image: named")
    folder = composed(tmp_path / "two", text.replace("WORD=of=it", '"WORD=${WORD:-of}=$${it} ${OTHER-}"'))
    (folder / "environment/db").mkdir()
    (folder / "environment/db/Dockerfile").write_text("FROM scratch\n")
    (row,) = read_tasks(folder, "docker", network=False).rows
    assert row["services"]["db"]["image"] == "./environment/db"
    assert row["services"]["db"]["env"]["WORD"] == "of=${it} "
    (folder / "environment/db/Dockerfile").write_text("FROM other\n")
    (changed,) = read_tasks(folder, "docker", network=False).rows
    assert changed["builds"] != row["builds"]


def test_a_link_leads_no_file_of_this_machine_into_a_service(tmp_path: Path) -> None:
    folder = composed(tmp_path / "two", COMPOSE)
    (folder / "environment/outside").symlink_to("/etc/hostname")
    (row,) = read_tasks(folder, "docker", network=False).rows
    assert "/seed/outside" not in {file["to"] for file in row["services"]["db"]["files"]}


@pytest.mark.parametrize(
    ("old", "new", "line", "why"),
    [
        ("image: db:1", "init: true", 13, "`db` has no `image` and no `build`"),
        (
            "image: db:1",
            "build: nowhere",
            14,
            "`build` of the service `db` names nowhere, which is not a directory with",
        ),
        ("image: db:1", "build: ../tests", 14, "`build` of the service `db` names ../tests, which is not a directory"),
        ("image: db:1", "build: {context: ., target: x}", 14, "arguments or stages"),
        ("image: ${MAIN_IMAGE_NAME}", "build: ../tests", 3, "`build` of the service `main` is supported only as"),
        ("image: db:1", "privileged: true", 14, "`privileged` of the service `db` is not supported"),
        ("image: db:1", "image: db:$TAG", 14, "`image` of the service `db` takes variables of this machine"),
        ("sleep infinity", "serve", 4, "`command` of the service `main` starts a program in the sandbox"),
        ("${MAIN_IMAGE_NAME}", "other:1", 3, "`image` of the service `main` is named in [environment] docker_image"),
        ("{db: {condition: service_healthy}}", "[nobody]", 10, "`api` depends on nobody, which is not a service"),
        ("{db: {condition: service_healthy}}", "[db, api]", 1, "depend on each other in a circle"),
        ("./given.txt, target", "../../task.toml, target", 16, "which is not in environment/"),
        ("./given.txt, target", "/etc/passwd, target", 16, "names /etc/passwd, which is not in environment/"),
        ("restart: always", "volumes: [data:/x]", 16, "`volumes` of the service `db` shares data with api"),
        ("WORD=of=it", "WORD", 15, "takes variables of this machine"),
        ("[CMD, ready", "[READY, it", 17, "has no `test` that can be run"),
        ("[WORD=of=it, EMPTY=]", "7", 15, "`environment` of the service `db` cannot be read"),
        ("{db: {condition: service_healthy}}", "7", 10, "`api` depends on 7, which is not a service"),
        ('[CMD, ready, "$$USER now"]', "[]", 17, "has no `test` that can be run"),
        ("volumes: {data: {}}", "secrets: {}", 18, "`secrets` is not supported"),
    ],
)
def test_unsupported_compose_settings_are_refused_with_file_and_line(
    tmp_path: Path, old: str, new: str, line: int, why: str
) -> None:
    assert old in COMPOSE
    with pytest.raises(SpecError) as refused:
        read_tasks(composed(tmp_path / "odd", COMPOSE.replace(old, new)), "docker", network=False)
    messages = [str(problem) for problem in refused.value.problems]
    assert any(f"docker-compose.yaml:{line}:" in message and why in message for message in messages), messages


def test_a_task_without_network_is_refused_where_the_sandbox_has_one(tmp_path: Path) -> None:
    closed = task(tmp_path / "closed", TOML + "allow_internet = false\n")
    assert read_tasks(closed, "bubblewrap", network=False).rows
    with pytest.raises(SpecError, match=r"task.toml:12:1: .*`environment.allow_internet`: the task may reach no host"):
        read_tasks(closed, "bubblewrap", network=True)


def test_a_folder_without_tasks_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no task\.toml"):
        read_tasks(tmp_path, "bubblewrap", network=False)
    with pytest.raises(UserError, match="there is no folder"):
        load_spec(f"harbor:{tmp_path}/nowhere")


def example(page: str, begin: str) -> str:
    """The block of YAML in a page of the docs that has a line."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text("utf-8")
    (block,) = [
        block for block in re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) if begin in block
    ]
    return str(block)


async def test_task_directory_spec_from_the_docs_runs_the_selected_tasks(tmp_path: Path) -> None:
    for name, category in {"a": "files", "b": "files", "c": "files", "d": "networks"}.items():
        task(tmp_path / "tasks" / name, TOML + f"[metadata]\ncategory = '{category}'\n")
    (tmp_path / "spec.yaml").write_text(example("spec.md", "{harbor: tasks"))
    played_lines = await all_played(str(tmp_path / "spec.yaml"), tmp_path / "run")
    assert [(line["score"], line["row_key"] in "abc") for line in played_lines] == [(1.0, True)], "a quarter of three"


@pytest.mark.parametrize(
    ("command", "value", "alone"), [(None, 1.0, 1.0), ("echo 8 34 > answer.txt", 1.0, 0.0), ("true", 0.0, 0.0)]
)
async def test_the_docs_spec_of_reward_file_scores(
    tmp_path: Path, command: str | None, value: float, alone: float
) -> None:
    (tmp_path / "spec.yaml").write_text(example("rewards.md", "fn: reward_file"))
    played_lines = await all_played(str(tmp_path / "spec.yaml"), tmp_path / "run", command)
    assert [line["rewards"]["checked"]["value"] for line in played_lines] == [value] * 2
    assert [line["rewards"]["checked"]["metrics"] for line in played_lines] == [{"right": value, "alone": alone}] * 2


@pytest.mark.parametrize("name", ["task.yaml", "run-tests.sh", "setup.sh", "solution.sh", "tests/key", "tests"])
def test_task_folders_of_terminal_bench_are_read_without_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tasks = load_object("tasks/terminal_bench.py:tasks", Path(__file__).parents[2] / "specs")
    monkeypatch.setenv("TERMINAL_BENCH_TASKS", str(tmp_path / "tasks"))
    folder = tmp_path / "tasks/odd"
    (folder / "tests").mkdir(parents=True)
    (folder / "task.yaml").write_text("instruction: Do it.")
    (folder / "run-tests.sh").write_text("true")
    (folder / "tests/a.py").write_text("a")
    (row,) = tasks(seed=0, split="train")
    assert {each["to"]: each["content"] for each in row["verifier"]} == {
        "/tmp/task/run-tests.sh": b"true",
        "/tmp/task/tests/a.py": b"a",
    }
    if (folder / name).exists():
        (folder / name).rename(tmp_path / "key")
    else:
        (tmp_path / "key").write_text("the-key-of-this-machine")
    (folder / name).symlink_to(tmp_path / "key")
    with pytest.raises(UserError, match="is a link"):
        list(tasks(seed=0, split="train"))
