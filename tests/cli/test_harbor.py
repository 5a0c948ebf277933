"""Task folders in Harbor's format, by `harbor:FOLDER`: what is played scores as its tests write, the rest is named."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.data.harbor import read_tasks
from hermes_rl.errors import RunError, SpecError, UserError
from hermes_rl.runs.evaluate import run_evaluate
from hermes_rl.runs.opening import Launch
from hermes_rl.runs.progress import Progress
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
    folder: Path, toml: str = TOML, dockerfile: str | None = DOCKERFILE, test: str = TEST, solve: str = SOLVE
) -> Path:
    """Write a task folder."""
    files = {
        "task.toml": toml,
        "instruction.md": "Write the answer into answer.txt.",
        "environment/given.txt": "given\n",
        "tests/test.sh": test,
        "solution/solve.sh": solve,
    }
    if dockerfile is not None:
        files["environment/Dockerfile"] = dockerfile
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


async def played(folder: Path, out: Path, command: str | None = None, *more: str) -> dict[str, Any]:
    """Play one task by its own solution, or by a command; returns the rollout's line."""
    sets = ['servers.policy={"type": "scripted"}', *more]
    if command is not None:
        turns = [{"tools": [{"name": "terminal", "args": {"command": command}}]}, {"say": "Done."}]
        sets.append(f"solution={json.dumps({'turns': turns})}")
    spec = load_spec(f"harbor:{folder}", overrides=parse_extra_args((), sets))
    _, directory = await run_evaluate(spec, Launch("evaluate", out=out, progress=Progress(io.StringIO())))
    (line,) = lines(directory.path / "rollouts.jsonl")
    return dict(line)


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


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("set -e; grep -q 42 answer.txt; echo 1 > /logs/verifier/reward.txt", "has written no reward.json"),
        ("cat answer.txt > /logs/verifier/reward.txt", "has written no reward.json"),
        ("echo nan > /logs/verifier/reward.txt", "is no finite number"),
        ("echo '{\"reward\": 1e999}' > /logs/verifier/reward.json", "a finite number each"),
        ("echo '{}' > /logs/verifier/reward.json", "a finite number each"),
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


TABLES = '[[steps]]\nname = "one"\n'
"""A table that is written behind the others."""


@pytest.mark.parametrize(
    ("toml", "dockerfile", "place", "why"),
    [
        (TOML + TABLES, DOCKERFILE, "task.toml:12", "several steps"),
        (TOML + "gpus = 1\n", DOCKERFILE, "task.toml:12", "no sandbox here has a GPU"),
        (TOML + "[[environment.mcp_servers]]\nname = 'a'\n", DOCKERFILE, "task.toml:12", "tool servers"),
        (TOML + "[environment.healthcheck]\ncommand = 'true'\n", DOCKERFILE, "task.toml:12", "health checks"),
        (TOML + "os = 'windows'\n", DOCKERFILE, "task.toml:12", "sandboxes are Linux"),
        (TOML + "cpus = 'many'\n", DOCKERFILE, "task.toml:12", "expected a number"),
        (TOML + "docker_image = 'a/b:1'\n", DOCKERFILE, "task.toml:12", "--set sandbox.backend=docker"),
        (TOML + "env = { KEY = '${KEY}' }\n", DOCKERFILE, "task.toml:12", "not handed over"),
        (TOML + "= 1\n", DOCKERFILE, "task.toml:12", "cannot be read"),
        (TOML, "FROM alpine\n", "Dockerfile:1", "it needs the image alpine"),
        (TOML, "FROM debian\nRUN apt-get update \\\n && apt-get install -y jq\n", "Dockerfile:2", "docker_image"),
        (TOML, "FROM debian\nFROM debian\n", "Dockerfile:2", "several stages"),
        (TOML, "FROM debian\n# a note\nUSER nobody\n", "Dockerfile:3", "`USER` is not built"),
        (TOML, "FROM debian\nCOPY ../task.toml /\n", "Dockerfile:2", "has no such file"),
        (TOML, "FROM debian\nENV A='b\n", "Dockerfile:2", "cannot be read"),
    ],
)
def test_what_cannot_be_played_is_refused_by_file_and_line(
    tmp_path: Path, toml: str, dockerfile: str, place: str, why: str
) -> None:
    with pytest.raises(SpecError) as refused:
        read_tasks(task(tmp_path / "odd", toml, dockerfile), "bubblewrap", network=False)
    (problem,) = refused.value.problems
    assert f"{place}:1: task odd cannot be played: " in str(problem)
    assert why in problem.message


def test_tasks_that_cannot_be_played_are_left_out_and_named(tmp_path: Path) -> None:
    task(tmp_path / "a")
    task(tmp_path / "b", TOML + "gpus = 1\n")
    tasks = read_tasks(tmp_path, "bubblewrap", network=False)
    assert [row["name"] for row in tasks.rows] == ["a"]
    assert tasks.notes[-1].startswith(f"WARNING: left out: {tmp_path}/b/task.toml:12:1: task b cannot be played")


def test_a_backend_with_images_has_the_tasks_own(tmp_path: Path) -> None:
    built = task(tmp_path / "built", TOML + "docker_image = 'a/b:1'\n", "FROM scratch\nUSER x\n")
    (row,) = read_tasks(built, "docker", network=False).rows
    assert (row["image"], row["setup"], row["files"]) == ("a/b:1", [], [])
    (row,) = read_tasks(task(tmp_path / "plain"), "docker", network=False).rows
    assert (row["image"], row["workdir"]) == ("debian:bookworm-slim", "/app")


def test_a_task_without_network_is_refused_where_the_sandbox_has_one(tmp_path: Path) -> None:
    closed = task(tmp_path / "closed", TOML + "allow_internet = false\n")
    assert read_tasks(closed, "bubblewrap", network=False).rows
    with pytest.raises(SpecError, match=r"task.toml:12:1: .*the task has no network"):
        read_tasks(closed, "bubblewrap", network=True)


def test_a_folder_without_tasks_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no task\.toml"):
        read_tasks(tmp_path, "bubblewrap", network=False)
    with pytest.raises(UserError, match="there is no folder"):
        load_spec(f"harbor:{tmp_path}/nowhere")
