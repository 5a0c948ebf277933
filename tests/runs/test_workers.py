"""Worker processes: what they play is what one process plays, and no death of any of them costs more than it must."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hermes_rl.errors import UserError
from hermes_rl.runs.handles import WorkerHandle
from hermes_rl.runs.process import run_process
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.setup import RunOptions
from hermes_rl.runs.workers import LocalWorkers
from hermes_rl.spec.load import load_spec
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.cli.test_run import lines as lines_of
from tests.commands import LIBRARIES, Command, environment, hermes
from tests.runs.faulty_model import FaultyModel
from tests.runs.processes import alive, workers_of
from tests.waiting import until_blocking as until

SPEC = """
name: played-by-workers
dataset: {items: ITEMS, eval: EVAL}
prompt: {user: "Do {{ n }}"}
toolsets: [terminal]
tools: [{python: "code.py:shout"}]
rewards:
  right: {fn: exact_match, args: {target: "{{ n }}"}}
  ours: {fn: "code.py:ours", weight: 0.5}
  rank: {fn: "code.py:rank", weight: 0.25}
solution:
  turns:
    - tools:
        - {name: terminal, args: {command: "COMMAND"}}
        - {name: shout, args: {text: "a{{ n }}"}}
    - {say: "{{ n }}"}
servers: {policy: {type: scripted, error_rate: 0.5}}
process: {group_size: 2, groups: GROUPS}
evaluate: {rollouts: 2}
"""
CODE = '''
"""The spec's own code."""

def shout(text: str) -> str:
    """Shout."""
    return text.upper()

def ours(result, ctx):
    written = ctx.terminal("cat /tmp/n")["output"]
    return len(written) / 10

def rank(group):
    assert all(one.managed_state["nodes"] for one in group)
    assert all(one.tool_schemas for one in group)
    lengths = sorted({len(one.final_response) for one in group})
    return [lengths.index(len(one.final_response)) for one in group]
'''


def write(folder: Path, *, groups: int = 6, command: str = "echo {{ n }} > /tmp/n", evaluation: bool = False) -> None:
    folder.mkdir(exist_ok=True)
    text = SPEC.replace("ITEMS", json.dumps([{"n": n} for n in range(5)])).replace("GROUPS", str(groups))
    text = text.replace("COMMAND", command).replace(", eval: EVAL", ", eval: only" if evaluation else "")
    (folder / "spec.yaml").write_text(text)
    (folder / "code.py").write_text(CODE)


def change(folder: Path, before: str, after: str) -> None:
    for name in ("spec.yaml", "code.py"):
        (folder / name).write_text((folder / name).read_text().replace(before, after))


def lines(path: Path) -> list[dict[str, Any]]:
    return lines_of(path)  # type: ignore[return-value]


def timeless(value: Any) -> Any:
    """A line of rollouts.jsonl, or a part of it, without what a clock says."""
    if isinstance(value, list):
        return [timeless(each) for each in value]
    if not isinstance(value, dict):
        return value
    kept = {key: timeless(each) for key, each in value.items() if key not in ("seconds", "started_at")}
    return kept | ({"timings": sorted(value["timings"])} if "timings" in value else {})


def rollouts(run: Path) -> dict[str, Any]:
    return {line["id"]: timeless(line) for line in lines(run / "rollouts.jsonl")}


def groups(run: Path) -> dict[str, Any]:
    found = lines(run / "groups.jsonl")
    assert len({line["group"] for line in found}) == len(found), "every group once"
    return {line["group"]: line for line in found}


# ------------------------------------------------------------------ what is played


@pytest.mark.slow
def test_what_code_logs_in_a_worker_comes_with_its_traceback(tmp_path: Path) -> None:
    write(tmp_path)
    fails = (
        "    try: 1 / 0\n    except ZeroDivisionError: logging.getLogger('hermes_rl.ours').exception('it went wrong')\n"
    )
    change(tmp_path, "    written = ctx", f"{fails}    written = ctx")
    change(tmp_path, '"""The spec', 'import logging\n"""The spec')
    change(tmp_path, 'ours", weight', 'ours", isolate: none, weight')
    done = hermes("run", "spec.yaml", "process", *OUT, "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "it went wrong" in done.stderr and "ZeroDivisionError: division by zero" in done.stderr


def test_process_gives_the_same_rollouts_and_groups_as_one_process(tmp_path: Path) -> None:
    write(tmp_path, groups=3)
    for number in ("1", "2"):
        done = hermes("run", "spec.yaml", "process", "--out", number, "--workers", number, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert rollouts(tmp_path / "1") == rollouts(tmp_path / "2")
    assert groups(tmp_path / "1") == groups(tmp_path / "2")
    assert all(len(set(line["scores"])) == 2 for line in groups(tmp_path / "2").values())
    of_one, of_two = (json.loads((tmp_path / number / "run.json").read_text()) for number in ("1", "2"))
    assert {key for key in of_one if of_one[key] != of_two.get(key)} <= {"started", "ended", "usage"}
    without_seconds = [
        {role: {**used, "seconds": 0} for role, used in each["usage"].items()} for each in (of_one, of_two)
    ]
    assert without_seconds[0] == without_seconds[1]
    assert not (tmp_path / "2" / "waiting.jsonl").exists()


@pytest.mark.slow
def test_evaluate_gives_the_same_metrics_as_one_process(tmp_path: Path) -> None:
    write(tmp_path, evaluation=True)
    for number in ("1", "3"):
        more = ["--set", f"evaluate.workers={number}", "--set", "evaluate.concurrency=4"]
        done = hermes("run", "spec.yaml", "evaluate", "--out", number, *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    one, three = (json.loads((tmp_path / number / "metrics.json").read_text())["results"] for number in ("1", "3"))
    assert one == three
    assert rollouts(tmp_path / "1") == rollouts(tmp_path / "3")


def test_a_trainer_is_served_and_evaluated_with_workers(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "counts.py").write_text((Path(__file__).parents[1] / "trainers" / "counts.py").read_text())
    serve = {"trainer": "counts.py:Counts", "group_size": 2, "eval_every": 1, "workers": 2}
    change(tmp_path, "process: {", f"serve: {json.dumps(serve)}\nprocess: {{")
    change(tmp_path, "dataset: {", "dataset: {eval: {fraction: 0.4}, ")
    for steps in ("1", "2"):
        more = ["--out", "run", "--set", f"serve.total_steps={steps}"]
        done = hermes("run", "spec.yaml", "serve", *more, cwd=tmp_path, loaded=LIBRARIES)
        assert done.returncode == 0, done.stderr
    got = [line["group"] for line in lines(tmp_path / "got.jsonl")]
    assert len(got) == len(set(got)) >= 2, "every group once, also over the restart"
    assert all(line["exact"] for line in lines(tmp_path / "got.jsonl"))
    # The trainer may have made another step by the time that it is looked at.
    assert list((tmp_path / "run" / "eval").glob("step-*/metrics.json"))


CHAT = """
dataset: {items: ITEMS}
prompt: {user: "Do {{ n }}"}
tools: [{python: "code.py:shout"}]
agent: {max_tokens: 50, temperature: 1.0}
rewards: {number: {fn: "code.py:number"}}
servers: {policy: {type: openai, base_url: URL, model: faulty, tokenizer: TOKENIZER, timeout: 2}}
process: {groups: 12, group_size: 2, concurrency: 6}
"""
CHAT_CODE = '''
def shout(text: str, times: int) -> str:
    """Shout."""
    return text.upper() * times

def number(result):
    return float(result.final_response.rsplit(" ", 1)[1])
'''


@pytest.mark.slow
async def test_a_chat_server_that_fails_now_and_then_gives_the_same_with_workers(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CHAT_CODE)
    async with FaultyModel(faults=0.15) as model:
        text = CHAT.replace("URL", model.url).replace("TOKENIZER", str(small_tokenizer_path()))
        (tmp_path / "spec.yaml").write_text(text.replace("ITEMS", json.dumps([{"n": n} for n in range(20)])))
        for number in ("1", "2"):
            more = ["--out", number, "--workers", number]
            done = await asyncio.to_thread(hermes, "run", "spec.yaml", "process", *more, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
    one, two = groups(tmp_path / "1"), groups(tmp_path / "2")
    both = one.keys() & two.keys()
    assert len(both) >= 8 and all(one[name]["tokens"] for name in both)
    assert {name: one[name] for name in both} == {name: two[name] for name in both}
    said = json.loads((tmp_path / "2" / "run.json").read_text())
    assert said["retried"]["calls"]["policy"] > 0, "what workers send again is counted"
    assert set(said["failure_rates"]["policies"]) >= {"faulty"}


def test_a_reward_that_raises_is_lost_as_in_one_process(tmp_path: Path) -> None:
    write(tmp_path, groups=1)
    change(tmp_path, "    return len(written) / 10", "    raise ValueError('not this one')")
    said = []
    for number in ("1", "2"):
        more = ["--set", "budget.max_failures=1", "--set", "process.concurrency=2"]
        done = hermes("run", "spec.yaml", "process", "--out", number, "--workers", number, *more, cwd=tmp_path)
        assert done.returncode == 1
        said.append(done.stderr.partition("error: ")[2])
        lost = json.loads((tmp_path / number / "run.json").read_text())["failure_rates"]
        assert lost["failure_rate"] == 1.0 and set(lost["causes"]) == {"reward_failure"}
        assert {line["state"] for line in lines(tmp_path / number / "rollouts.jsonl")} == {"failed"}
    of_one, of_two = rollouts(tmp_path / "1"), rollouts(tmp_path / "2")
    both = of_one.keys() & of_two.keys()
    assert len(both) >= 3, "failed attempts included"
    assert {name: of_one[name] for name in both} == {name: of_two[name] for name in both}
    assert "not this one" in said[0] and "max_failures (1)" in said[0]
    assert said[0].partition("The last")[0] == said[1].partition("The last")[0]


def test_the_budget_counts_what_workers_have_used(tmp_path: Path) -> None:
    write(tmp_path, groups=50)
    more = ["--set", "budget.max_tokens=1", "--set", "process.concurrency=4", "--workers", "2"]
    done = hermes("run", "spec.yaml", "process", "--out", "run", *more, cwd=tmp_path)
    assert done.returncode == 1
    assert "budget.max_tokens (1) is used up" in done.stdout


# ------------------------------------------------------------------ what is refused


def test_error_in_workers_is_reported_once(tmp_path: Path) -> None:
    write(tmp_path)
    raises = 'import sys\nif sys.argv[0] == "-c":\n    raise ValueError("not in a worker")\n'
    (tmp_path / "code.py").write_text(raises + CODE)
    done = hermes("run", "spec.yaml", "process", "--out", "run", "--workers", "3", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("not in a worker") == 1
    assert "Traceback" not in done.stderr


def test_a_server_that_takes_fewer_calls_than_there_are_workers_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    more = ["--workers", "3", "--set", "servers.policy.max_concurrency=2"]
    done = hermes("run", "spec.yaml", "process", *more, cwd=tmp_path)
    assert done.returncode == 2
    assert "servers.policy.max_concurrency is 2, and each of 3 workers" in done.stderr


async def test_workers_refuse_an_environment_with_custom_code(tmp_path: Path) -> None:
    from hermes_rl.env.spec_env import compile_spec, run_subclass, with_spec

    write(tmp_path)
    spec = load_spec(tmp_path / "spec.yaml", mode="process", environ={})
    spec = spec.model_copy(update={"process": spec.process.model_copy(update={"workers": 2})})

    class Own(compile_spec(spec)):  # type: ignore[misc]
        async def get_next_item(self) -> Any:
            return None

    env = compile_spec(spec.model_copy(update={"serve": spec.serve.model_copy(update={"workers": 2})}))
    with pytest.raises(UserError, match=r"serve\.workers: only `hermes-rl run` starts workers"):
        await env(*env.config_init()).setup()
    launch = RunOptions("process", tmp_path / "run", progress=Progress(quiet=True))
    with pytest.raises(UserError, match="workers: this environment has its own Python code"):
        await run_subclass(with_spec(Own, spec, "process"), launch)


# ------------------------------------------------------------------ what dies


@contextmanager
def started(folder: Path, *arguments: str, silent: float = 300.0) -> Iterator[Command]:
    """The program as a process, which is ended with its workers."""
    program = f"import hermes_rl.runs.handles as p; p.SILENT = {silent}; from hermes_rl.cli.main import main; main()"
    with (folder / "said.txt").open("a") as said, Path(os.devnull).open() as nothing:
        streams = (nothing, said, said)
        words = ("run", "spec.yaml", *arguments)
        run = Command(*words, cwd=folder, env=environment(), streams=streams, code=program)
    try:
        yield run
    finally:
        run.kill()
        run.wait()


def sleepers(word: str) -> list[int]:
    """Processes whose command line has a word: commands in sandboxes, seen from outside."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"sleep\0{word}\0".encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def played(folder: Path) -> int:
    path = folder / "run" / "rollouts.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def said(folder: Path) -> str:
    return (folder / "said.txt").read_text()


def deaths_told(folder: Path) -> int:
    """Return how many deaths of workers were told; the third in vain in one place is told as its exclusion."""
    return said(folder).count(", which died (") + said(folder).count("excluded ")


OUT = ("--out", "run", "--workers")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_killed_worker_loses_only_its_current_rollouts(tmp_path: Path) -> None:
    write(tmp_path, groups=12, command="sleep 0.2; echo {{ n }} > /tmp/n")
    with started(tmp_path, "process", *OUT, "2", "--set", "process.concurrency=4") as run:
        until(lambda: played(tmp_path) >= 4)
        os.kill(workers_of(run.pid)[0], signal.SIGKILL)
        assert run.wait(90) == 0, said(tmp_path)
    assert said(tmp_path).count("which died (it was ended by SIGKILL") == 1
    lost = json.loads((tmp_path / "run" / "run.json").read_text())["retried"]["workers"]
    assert lost["died"] == 1 and 1 <= lost["rollouts"] <= 4
    assert "workers that died: 1" in said(tmp_path)
    write(tmp_path / "calm", groups=12, command="sleep 0.2; echo {{ n }} > /tmp/n")
    assert hermes("run", "spec.yaml", "process", "--out", "run", cwd=tmp_path / "calm").returncode == 0
    calm = groups(tmp_path / "calm" / "run")
    found = groups(tmp_path / "run")
    assert len(found) == 12
    both = found.keys() & calm.keys()
    assert {name: found[name]["scores"] for name in both} == {name: calm[name]["scores"] for name in both}


@pytest.mark.timeout(180)
def test_killed_run_ends_its_workers_and_resumes_with_another_count(tmp_path: Path) -> None:
    mark = f"{os.getpid()}.5"
    write(
        tmp_path, groups=4, command=f"test -e /tmp/no || sleep 0.1; sleep {mark} & echo {{{{ n }}}} > /tmp/n; sleep 0.5"
    )
    with started(tmp_path, "process", *OUT, "2", "--set", "process.concurrency=4") as run:
        until(lambda: played(tmp_path) >= 2 and sleepers(mark))
        of_the_run = workers_of(run.pid)
        assert len(of_the_run) == 2
        os.kill(run.pid, signal.SIGKILL)
        until(lambda: not any(map(alive, of_the_run)) and not sleepers(mark))
    for number in ("3", "1"):
        done = hermes("run", "spec.yaml", "process", *OUT, number, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert len(groups(tmp_path / "run")) == 4
    assert "4 were there already" in done.stdout


@pytest.mark.timeout(120)
def test_ctrl_c_releases_what_workers_hold(tmp_path: Path) -> None:
    mark = f"{os.getpid()}.25"
    write(tmp_path, command=f"sleep {mark}")
    with started(tmp_path, "process", *OUT, "2", "--set", "process.concurrency=4") as run:
        until(lambda: len(sleepers(mark)) >= 2)
        of_the_run = workers_of(run.pid)
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130, said(tmp_path)
    assert not any(map(alive, of_the_run))
    until(lambda: not sleepers(mark))
    assert ", which died (" not in said(tmp_path)
    assert "Traceback" not in said(tmp_path)


WRITES = """
import os, socket

def write_to_sockets(data):
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as end:
                if end.family == socket.AF_UNIX:
                    end.send(data)
        except OSError:
            pass

"""
"""Code that writes into the sockets of its process, of which one leads to the run."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("os.kill(os.getpid(), 9)", "3 workers died one after the other while they had rollout"),
        pytest.param(
            "os.kill(os.getpid(), 2); import time; time.sleep(60)",
            "3 workers died one after the other while they had rollout",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "write_to_sockets(b'\\0\\0\\0\\5hello')", "it sent a message that cannot be read", marks=pytest.mark.slow
        ),
        pytest.param(
            "write_to_sockets(b'\\0\\0\\0\\x0a{\"id\": 99,')", "there is no request 99", marks=pytest.mark.slow
        ),
        pytest.param(
            "the start", "workers ended one after the other before they had finished a rollout", marks=pytest.mark.slow
        ),
    ],
)
def test_workers_that_die_again_and_again_end_the_run(tmp_path: Path, where: str, words: str) -> None:
    write(tmp_path, groups=1)
    if where != "the start":
        change(tmp_path, "    return len(written) / 10", f"    {where}")
        (tmp_path / "code.py").write_text(WRITES + (tmp_path / "code.py").read_text())
        change(tmp_path, "items: [", 'items: [{"n": 99}, ')
        change(tmp_path, 'ours", weight', 'ours", isolate: none, weight')
    else:
        ends = 'import os, sys\nif sys.argv[0] == "-c":\n    os._exit(3)\n'
        (tmp_path / "code.py").write_text(ends + CODE)
    done = hermes("run", "spec.yaml", "process", *OUT, "2", "--set", "process.concurrency=2", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        ("os._exit(3)", "3 workers died there (it ended with status 3)"),
        pytest.param("raise ValueError('not any more')", "not any more", marks=pytest.mark.slow),
    ],
)
def test_worker_whose_replacements_cannot_start_is_excluded(tmp_path: Path, fails: str, reason: str) -> None:
    write(tmp_path, groups=10, command="sleep 0.1; echo {{ n }} > /tmp/n")
    change(tmp_path, "error_rate: 0.5", "error_rate: 0")
    in_worker = 'open("/proc/self/comm").read() == "hermes-worker\\n"'
    breaks = f"import os\nif {in_worker} and os.path.exists({str(tmp_path / 'broken')!r}):\n    {fails}\n"
    (tmp_path / "code.py").write_text(breaks + CODE)
    with started(tmp_path, "process", *OUT, "2", "--set", "process.concurrency=4") as run:
        until(lambda: played(tmp_path) >= 2)
        (tmp_path / "broken").touch()
        os.kill(workers_of(run.pid)[0], signal.SIGKILL)
        assert run.wait(90) == 0, said(tmp_path)
    assert "of 2, the other workers continue: " in said(tmp_path) and reason in said(tmp_path)
    assert len(groups(tmp_path / "run")) == 10 and "Traceback" not in said(tmp_path)


@pytest.mark.timeout(120)
async def test_a_worker_that_says_nothing_any_more_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes_rl.runs.handles.SILENT", 3.0)
    monkeypatch.setattr("hermes_rl.runs.handles.EXIT", 1.0)
    write(tmp_path, groups=3, command="sleep 0.3; echo {{ n }} > /tmp/n")
    spec = load_spec(tmp_path / "spec.yaml", mode="process", environ={})
    spec = spec.model_copy(update={"process": spec.process.model_copy(update={"workers": 2, "concurrency": 2})})
    told = io.StringIO()
    playing = asyncio.create_task(run_process(spec, RunOptions("process", tmp_path / "run", progress=Progress(told))))
    while played(tmp_path) < 2:
        await asyncio.sleep(0.05)
    os.kill(workers_of(os.getpid())[0], signal.SIGSTOP)
    await playing
    assert "which died (it said nothing any more)" in told.getvalue()
    assert len(groups(tmp_path / "run")) == 3


@pytest.mark.timeout(120)
async def test_a_worker_that_makes_room_costs_no_rollout_and_has_not_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_rl.runs.workers.LOOK", 0.2)
    made_room = list[WorkerHandle]()

    def surplus(_: LocalWorkers, handles: Sequence[WorkerHandle]) -> Sequence[WorkerHandle]:
        busy = [handle for handle in handles if handle.pending_requests and handle.finished and not handle.closed]
        found = busy[:1] if not made_room else []
        made_room.extend(found)
        return found

    monkeypatch.setattr(LocalWorkers, "surplus", surplus)
    for name in ("undisturbed", "disturbed"):
        write(tmp_path / name, groups=6, command="sleep 0.3; echo {{ n }} > /tmp/n")
    spec = load_spec(tmp_path / "undisturbed" / "spec.yaml", mode="process", environ={})
    await run_process(spec, RunOptions("process", tmp_path / "undisturbed" / "run", progress=Progress(io.StringIO())))
    spec = load_spec(tmp_path / "disturbed" / "spec.yaml", mode="process", environ={})
    spec = spec.model_copy(update={"process": spec.process.model_copy(update={"workers": 2, "concurrency": 4})})
    told = io.StringIO()
    await run_process(spec, RunOptions("process", tmp_path / "disturbed" / "run", progress=Progress(told)))
    assert [handle.unanswered_rollouts > 0 for handle in made_room] == [True], "it was at work"
    assert rollouts(tmp_path / "undisturbed" / "run") == rollouts(tmp_path / "disturbed" / "run")
    assert groups(tmp_path / "undisturbed" / "run") == groups(tmp_path / "disturbed" / "run")
    assert ", which died (" not in told.getvalue() and not workers_of(os.getpid())


@pytest.mark.timeout(120)
def test_worker_that_blocks_the_interpreter_ends_with_the_killed_run(tmp_path: Path) -> None:
    write(tmp_path)
    hangs = "open('hangs', 'w').close(); import re; re.match('(a+)+$', 'a' * 64 + 'b')"
    change(tmp_path, "    return len(written) / 10", f"    {hangs}")
    with started(tmp_path, "process", *OUT, "2", "--set", "process.concurrency=2", silent=8.0) as run:
        until((tmp_path / "hangs").exists)
        of_the_run = workers_of(run.pid)
        assert len(of_the_run) == 2
        os.kill(run.pid, signal.SIGKILL)
        until(lambda: not any(map(alive, of_the_run)))


KILLS, OF_ONE_RUN = 50, 5
"""Kills in all, and those of one start of the run: the last of them is the run's own."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fifty_kills_of_workers_and_of_the_run_lose_nothing(tmp_path: Path) -> None:
    mark = f"0.2{os.getpid()}"
    command = f"sleep {mark}; echo {{{{ n }}}} > /tmp/n"
    write(tmp_path, groups=100_000, command=command)
    random, seen, died = Random(7), set[int](), 0
    more = ("process", *OUT)
    for kill in range(0, KILLS, OF_ONE_RUN):
        with started(tmp_path, *more, str(2 + kill // OF_ONE_RUN % 2), "--set", "process.concurrency=3") as run:
            for last in [False] * (OF_ONE_RUN - 1) + [True]:
                # What was in flight at the last kill has ended by now: a rollout that takes three along ends the run.
                enough = played(tmp_path) + 4
                until(lambda run=run, enough=enough: played(tmp_path) >= enough and workers_of(run.pid))
                time.sleep(random.uniform(0, 0.2))
                seen.update(found := workers_of(run.pid))
                assert run.poll() is None, said(tmp_path)
                os.kill(run.pid if last else random.choice(found), signal.SIGKILL)
                died += not last
                if not last:
                    until(lambda died=died: deaths_told(tmp_path) >= died)
            run.wait()
    until(lambda: not any(map(alive, seen)) and not sleepers(mark))
    total = len(groups(tmp_path / "run")) + 3
    done = hermes("run", "spec.yaml", *more, "2", "--set", f"process.groups={total}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(groups(tmp_path / "run")) == total
    found_lines = lines(tmp_path / "run" / "rollouts.jsonl")
    assert len({line["id"] for line in found_lines}) == len(found_lines), "each rollout once"
    assert died == deaths_told(tmp_path) == KILLS - KILLS // OF_ONE_RUN, said(tmp_path)
    until(lambda: not sleepers(mark))
    calm = tmp_path / "calm"
    write(calm, groups=30, command=command)
    assert hermes("run", "spec.yaml", "process", "--out", "run", cwd=calm).returncode == 0
    expected, found_groups = groups(calm / "run"), groups(tmp_path / "run")
    both = expected.keys() & found_groups.keys()
    assert len(both) >= 20
    assert {name: found_groups[name]["scores"] for name in both} == {name: expected[name]["scores"] for name in both}
