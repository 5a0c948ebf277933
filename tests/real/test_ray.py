"""Rollouts on a Ray cluster: the results equal those of one process, whatever happens to the nodes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.errors import install_command
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.cli.test_run import listen_to_ctrl_c
from tests.commands import environment, hermes
from tests.env import test_spec_sets
from tests.env.trainer import train, trajectory_api
from tests.real.environments import HERE, ray_python
from tests.runs.faulty_model import FaultyModel
from tests.runs.test_workers import change, groups, lines, played, rollouts, said, sleepers, write
from tests.service.playing import holds, named, policy
from tests.service.served import PLAYED, Served, spec_in
from tests.service.test_environments import another, batch_below, keys_below, paths
from tests.waiting import until_blocking

COMPONENT = "Ray"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(900)]
PATIENCE = 300.0
"""Seconds until a wait fails: an engine that another test runs may have both cores, and nodes start slowly then."""
until = partial(until_blocking, seconds=PATIENCE)
ROLLOUTS = 2_000
"""Of the run that loses a node; each has a sandbox, and they take two minutes on two cores."""
SECRET = "sk-9f3b71c2-not-for-anybody"
TOKEN = "d41d8cd98f00b204e9800998ecf8427e-of-this-cluster"
ANYBODY = environment({"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"})
OWN = {**ANYBODY, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}


class RayCluster:
    """Nodes with one core each, as processes of this machine, run by `ray_cluster.py`."""

    def __init__(self, environ: Mapping[str, str] = OWN) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # its sockets need a short path
        command = [str(ray_python()), str(HERE / "ray_cluster.py"), str(self.folder)]
        self._log = (self.folder / "said").open("wb")
        self._process = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self.address = self._answer()

    def do(self, word: str) -> None:
        """Let a node join (`add`, or `add NAME` for one with the variable NODE), or kill the newest one (`kill`)."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        assert self._answer() == "done"

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        assert answer, (self.folder / "said").read_text()
        return answer


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    """Yield a cluster of one node."""
    one = RayCluster()
    yield one
    one.close()


def on_ray(
    *arguments: str, cwd: Path, seconds: float = PATIENCE, environ: Mapping[str, str] = OWN
) -> subprocess.CompletedProcess[str]:
    """Run the command line in the environment with Ray."""
    return subprocess.run(
        [str(ray_python()), "-m", "hermes_rl.cli.main", *arguments],
        cwd=cwd, env=environ, capture_output=True, text=True, timeout=seconds, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@contextmanager
def started(folder: Path, *arguments: str, before: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """Start the same in the background; its output is in said.txt."""
    program = f"{before}\nfrom hermes_rl.cli.main import main; main()"
    with (folder / "said.txt").open("ab") as told:
        run = subprocess.Popen(
            [str(ray_python()), "-c", program, "run", "spec.yaml", *arguments],
            cwd=folder, env=OWN, stdin=subprocess.DEVNULL, stdout=told, stderr=told, preexec_fn=listen_to_ctrl_c,
        )  # fmt: skip
    try:
        yield run
    finally:
        run.kill()
        run.wait()


def processes_with(word: str) -> list[int]:
    """Return the ids of the processes with a word in their command line or environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if word.encode() in (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


# ------------------------------------------------------------------ what is played


def test_cluster_that_replaces_a_node_gives_the_results_of_one_process(tmp_path: Path, cluster: RayCluster) -> None:
    for name in ("undisturbed", "ray"):
        write(tmp_path / name, evaluation=True)
        items = json.dumps([{"n": n} for n in range(ROLLOUTS // 2)])
        change(tmp_path / name, json.dumps([{"n": n} for n in range(5)]), items)
        change(tmp_path / name, "evaluate: {rollouts: 2}", "evaluate: {rollouts: 2, concurrency: 16}")
    cluster.do("add")
    with started(tmp_path / "ray", "evaluate", "--out", "run", "--ray", cluster.address) as run:
        until(lambda: played(tmp_path / "ray") >= ROLLOUTS // 4)
        cluster.do("kill")
        until(lambda: played(tmp_path / "ray") >= ROLLOUTS // 2)
        cluster.do("add")
        assert run.wait(PATIENCE) == 0, said(tmp_path / "ray")
    told = said(tmp_path / "ray")
    assert "2 nodes with 2 CPU; workers: 2, each with 1 CPU" in told
    assert told.count("which died (") == 1 and "raylet" not in told
    lost = json.loads((tmp_path / "ray" / "run" / "run.json").read_text())["retried"]["workers"]
    assert lost["died"] == 1 and 1 <= lost["rollouts"] <= 16
    done = on_ray("run", "spec.yaml", "evaluate", "--out", "run", cwd=tmp_path / "undisturbed")
    assert done.returncode == 0, done.stderr
    one, ray = (tmp_path / name / "run" for name in ("undisturbed", "ray"))
    assert len(lines(ray / "rollouts.jsonl")) == ROLLOUTS
    assert rollouts(one) == rollouts(ray)
    assert results(one) == results(ray)


def results(run: Path) -> Any:
    return json.loads((run / "metrics.json").read_text())["results"]


def test_process_and_serve_give_the_same_as_one_process(tmp_path: Path) -> None:
    write(tmp_path)
    assert hermes("run", "spec.yaml", "process", "--out", "one", cwd=tmp_path).returncode == 0
    done = on_ray("run", "spec.yaml", "process", "--out", "ray-run", "--ray", "--workers", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert rollouts(tmp_path / "one") == rollouts(tmp_path / "ray-run")
    assert groups(tmp_path / "one") == groups(tmp_path / "ray-run")
    assert len(done.stdout.splitlines()) == 2, "nothing of Ray is among the results"
    (tmp_path / "counts.py").write_text((HERE.parent / "trainers" / "counts.py").read_text())
    serve = {"trainer": "counts.py:Counts", "group_size": 2, "eval_every": 0, "total_steps": 2}
    change(tmp_path, "process: {", f"serve: {json.dumps(serve)}\nprocess: {{")
    done = on_ray("run", "spec.yaml", "serve", "--out", "served", "--ray", "--workers", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(lines(tmp_path / "got.jsonl")) >= 2


async def served_together(
    folder: Path, steps: int, *more: str, python: str = sys.executable, meanwhile: Callable[[], None] = lambda: None
) -> str:
    """Serve the two specs of a directory to a trainer, and return the output.

    `meanwhile` is called when the trainer has had its first batch.
    """
    folder.mkdir()
    batches: list[Any] = []
    go_on = asyncio.Event()
    async with trajectory_api() as url:
        test_spec_sets.write(folder, url, steps)
        async with test_spec_sets.serving(folder, *more, python=python, environ=OWN) as process:
            pulled = train(url, steps=steps, batch_size=test_spec_sets.BATCH, batches=batches, go_on=go_on)
            training = asyncio.create_task(pulled)
            await asyncio.wait_for(test_spec_sets.received(batches, 1), PATIENCE)
            await asyncio.to_thread(meanwhile)
            go_on.set()
            await asyncio.wait_for(training, PATIENCE)
            output = await test_spec_sets.ended(process, PATIENCE)
    assert process.returncode == 0, output
    return output


def same_where_both_have_played(one: Path, other: Path) -> None:
    """Compare the common groups of both runs of two specs; the order of the groups varies."""
    for name in ("long", "short"):
        first, second = (rollouts(folder / "run" / name) for folder in (one, other))
        assert len(first.keys() & second.keys()) >= 16
        assert all(first[key] == second[key] for key in first.keys() & second.keys())
        sent, again = (groups(folder / "run" / name) for folder in (one, other))
        assert sent.keys() & again.keys()
        assert all(sent[key]["scores"] == again[key]["scores"] for key in sent.keys() & again.keys())


@pytest.mark.parametrize("where", ["a cluster of its own", "a cluster of somebody's"])
async def test_specs_that_are_served_together_share_a_cluster(tmp_path: Path, where: str) -> None:
    cluster = await asyncio.to_thread(RayCluster) if where == "a cluster of somebody's" else None
    try:
        if cluster is not None:
            await asyncio.to_thread(cluster.do, "add")
        await served_together(tmp_path / "one", 6)
        more = [cluster.address] if cluster is not None else ["--workers", "1"]
        output = await served_together(tmp_path / "ray", 6, "--ray", *more, python=str(ray_python()))
    finally:
        if cluster is not None:
            await asyncio.to_thread(cluster.close)
    assert output.count("Ray cluster") == output.count("for 2 environments") == 1, output
    for name in ("long", "short"):
        assert f"{name}: workers: 1, each with 1 CPU" in output
    same_where_both_have_played(tmp_path / "one", tmp_path / "ray")
    assert ", which died (" not in output and "Traceback" not in output


async def test_new_cluster_too_small_for_all_specs_is_reported_at_once(tmp_path: Path) -> None:
    cores = os.cpu_count()
    async with trajectory_api() as url:
        test_spec_sets.write(tmp_path, url)
        more = ["--ray", "--set", f"sandbox.limits.cpu={cores}"]
        async with test_spec_sets.serving(tmp_path, *more, python=str(ray_python()), environ=OWN) as process:
            output = await test_spec_sets.ended(process, PATIENCE)
    assert process.returncode == 2, output
    assert f"a worker asks for {cores} CPU, and the Ray cluster has 1 node with {cores} CPU for 2 env" in output
    assert "Traceback" not in output


async def test_specs_that_are_served_together_follow_nodes_that_vanish_and_join(
    tmp_path: Path, cluster: RayCluster
) -> None:
    def logged() -> str:
        return "".join(path.read_text() for path in (tmp_path / "ray" / "run").glob("*/run.log"))

    def lose_a_node_and_get_two() -> None:
        cluster.do("kill")
        until(lambda: "which died (" in logged() and "workers: 1, not 2" in logged())
        cluster.do("add")
        cluster.do("add")
        until(lambda: "workers: 3, not 2" in logged())

    for _ in range(3):
        await asyncio.to_thread(cluster.do, "add")
    await served_together(tmp_path / "one", 8)
    more = ["--out", "run", "--ray", cluster.address]
    output = await served_together(
        tmp_path / "ray", 8, *more, python=str(ray_python()), meanwhile=lose_a_node_and_get_two
    )
    assert output.count("4 nodes with 4 CPU, for 2 environments") in (1, 2), "two nodes may join in one look"
    assert output.count("3 nodes with 3 CPU, for 2 environments") == 1
    assert output.count("5 nodes with 5 CPU, for 2 environments") == 1
    assert output.count("workers: 2, each with 1 CPU") == 2
    # Nodes of one machine have one folder for what travels, and lay it out anew below each other's workers.
    assert output.count("which died (its process or its node is gone") == 1 and "Traceback" not in output
    same_where_both_have_played(tmp_path / "one", tmp_path / "ray")
    for name in ("long", "short"):
        ids = [line["id"] for line in lines(tmp_path / "ray" / "run" / name / "rollouts.jsonl")]
        assert len(set(ids)) == len(ids), "each rollout once"


def test_environments_of_one_process_share_a_cluster(tmp_path: Path, cluster: RayCluster) -> None:
    paths = [str(tmp_path / name / "spec.yaml") for name in ("one", "two")]
    for path in paths:
        write(Path(path).parent, command="sleep 0.5; echo {{ n }} > /tmp/n")
        change(Path(path).parent, ", error_rate: 0.5", "")
    cluster.do("add")
    command = [str(ray_python()), str(HERE / "ray_environments.py"), cluster.address, *paths]
    done = subprocess.run(command, env=OWN, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    connected, other = found["refused"]
    assert "connected to a Ray cluster already" in connected and "hermes_rl.connect_ray" in connected
    assert "other specs than played-by-workers" in other
    assert found["workers"] == [[1, 1], [2]] and found["died"] == 0
    assert "for 2 environments" in done.stderr and "Traceback" not in done.stderr
    assert found["first"] == found["second"] and len(found["first"]) == 40
    assert all(len(set(scores)) == 1 and scores[0] > 1 for scores in found["first"].values())
    until(lambda: not set(processes_with("ray::_Actor")).intersection(processes_with(str(cluster.folder))))


def test_a_service_of_several_specs_divides_a_cluster(tmp_path: Path, cluster: RayCluster) -> None:
    cluster.do("add")
    specs = spec_in(tmp_path), another(tmp_path, "other")
    with Served(*specs, "--ray", cluster.address, environ=OWN, python=str(ray_python())) as service:
        for path in paths(service).values():
            lines, end = batch_below(service, path, rows=keys_below(service, path), n=2)
            assert (end["groups"], end["dropped"]) == (4, 0), end
            assert {rollout["score"] for line in lines for rollout in line["rollouts"]} == {1.0}
        assert [one["workers"]["ready"] for one in service.get("/v1/metrics").values()] == [1, 1]
        assert "2 nodes with 2 CPU, for 2 environments" in service.said
        assert "other: workers: 1, each with 1 CPU" in service.said
        assert service.terminate() == 0


async def test_service_runs_on_a_cluster_with_the_policy_of_each_request(tmp_path: Path, cluster: RayCluster) -> None:
    for name in ("one", "ray"):
        (tmp_path / name).mkdir()
    text = PLAYED.replace("scripted}", "scripted, error_rate: 0.5}")
    with Served(spec_in(tmp_path / "one", text)) as one:
        keys = one.keys()
        alone, _ = one.batch(rows=keys, n=2, batch="b")
    await asyncio.to_thread(cluster.do, "add")
    model = policy()
    async with model.running() as url:
        service = await asyncio.to_thread(
            lambda: Served(
                spec_in(tmp_path / "ray", text),
                *("--workers", "2", "--key-env", "POLICY_KEY", "--ray", cluster.address),
                environ={**OWN, "POLICY_KEY": SECRET},
                python=str(ray_python()),
            )
        )
        try:
            lines, end = await asyncio.to_thread(lambda: service.batch(rows=keys, n=2, batch="b"))
            assert (end["dropped"], by_group(lines)) == (0, by_group(alone))
            await holds(lambda: service.get("/v1/metrics")["workers"]["ready"] == 2, PATIENCE)
            model.pause()
            asked = {"rows": keys, "n": 2, "policy": named(url, version=1, api_key_env="POLICY_KEY")}
            answering = asyncio.create_task(asyncio.to_thread(lambda: service.batch(**asked)))
            await holds(lambda: len(model.asked) == 8)
            told = await asyncio.to_thread(service.ask, "PUT", "/v1/policy", {"version": 3, "model": "tiny-3"})
            assert told.status == 204
            await asyncio.to_thread(cluster.do, "kill")
            await holds(lambda: service.get("/v1/metrics")["workers"]["died"] == 1, PATIENCE)
            model.resume()
            lines, end = await answering
            assert (end["groups"], end["dropped"]) == (4, 0), end
            assert {line["weights"][1] for line in lines} == {3}, "the version that was told in flight"
            assert 1 in {line["weights"][0] for line in lines}
            assert {one["model"] for one in model.asked} == {"tiny", "tiny-3"}
            assert 0 < (await asyncio.to_thread(service.get, "/v1/metrics"))["workers"]["rollouts_lost"] < 8
            assert await asyncio.to_thread(service.terminate) == 0
        finally:
            await asyncio.to_thread(service.__exit__)
    assert files_of(cluster.folder)
    for folder in (cluster.folder, tmp_path):
        assert [path for path in files_of(folder) if SECRET.encode() in path.read_bytes()] == []


def by_group(answered: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {line["group"]: line for line in answered}


def test_joining_node_gets_rollouts(tmp_path: Path, cluster: RayCluster) -> None:
    write(tmp_path, groups=150, command="sleep 0.3; echo {{ n }} > /tmp/n")
    pids = tmp_path / "pids"
    pids.mkdir()
    says_who = f"    import os; open(f'{pids}/{{os.getpid()}}', 'w').close()\n    return len(written) / 10"
    change(tmp_path, "    return len(written) / 10", says_who)
    change(tmp_path, 'ours", weight', 'ours", isolate: none, weight')  # it says in which worker it is
    change(tmp_path, "groups: 150", "groups: 150, concurrency: 8")
    with started(tmp_path, "process", "--out", "run", "--ray", cluster.address) as run:
        until(lambda: played(tmp_path) >= 20)
        cluster.do("add")
        assert run.wait(PATIENCE) == 0, said(tmp_path)
    assert "1 node with 1 CPU; workers: 1" in said(tmp_path)
    assert "2 nodes with 2 CPU now; workers: 2, not 1" in said(tmp_path)
    assert len(list(pids.iterdir())) == 2, "both workers have played"
    assert len(groups(tmp_path / "run")) == 150


def test_artifacts_come_to_the_run_directory_and_do_not_stay_in_its_memory(tmp_path: Path, cluster: RayCluster) -> None:
    write(tmp_path, groups=100, command="head -c 2000000 /dev/zero > big; echo {{ n }} > /tmp/n")
    change(tmp_path, "rewards:", "artifacts: {big: {path: big}, lost: {path: nothing}}\nrewards:")
    with started(tmp_path, "process", "--out", "run", "--ray", cluster.address) as run:
        until(lambda: played(tmp_path) >= 40)
        before = peak(run.pid)
        until(lambda: played(tmp_path) >= 180)
        assert peak(run.pid) - before < 60 << 20, "some 200 MB have passed"
        assert run.wait(PATIENCE) == 0, said(tmp_path)
    found = {line["id"]: line["artifacts"] for line in lines(tmp_path / "run" / "rollouts.jsonl")}
    made = [artifacts["big"]["path"] for artifacts in found.values() if "path" in artifacts["big"]]
    assert len(made) > 80, "half of the rollouts deviate, and not all of these leave it out"
    assert {(tmp_path / "run" / path).stat().st_size for path in made} == {2_000_000}
    assert all("problem" in artifacts["lost"] for artifacts in found.values())
    done = hermes("run", "spec.yaml", "process", "--out", "one", "--set", "process.groups=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for line in lines(tmp_path / "one" / "rollouts.jsonl"):
        assert found[line["id"]] == line["artifacts"]


def peak(pid: int) -> int:
    """Return the peak memory of a process in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


# ------------------------------------------------------------------ what travels, and what does not


async def test_code_travels_and_no_key_is_in_anything_that_ray_writes(tmp_path: Path, cluster: RayCluster) -> None:
    folder = tmp_path / "task"
    write(folder, groups=4)
    async with FaultyModel(faults=0.0) as model:
        policy = {"type": "openai", "base_url": model.url, "model": "faulty", "api_key_env": "POLICY_KEY"}
        policy["tokenizer"] = str(small_tokenizer_path())
        change(folder, "{type: scripted, error_rate: 0.5}", json.dumps(policy))
        change(folder, 'one.managed_state["nodes"]', "one.messages")  # a chat server tells no tokens
        (folder / "help.py").write_text("def size(text):\n    return len(text)\n")
        (folder / "data.txt").write_text("from afar")
        (folder / "keys.env").write_text(f"POLICY_KEY={SECRET}\n")
        (folder / "notes.txt").write_text(f"do not forget {SECRET}\n")
        travelled = (
            "    import pathlib\n    here = pathlib.Path(__file__).parent\n"
            f"    assert str(here) != {str(folder)!r}, 'the code has travelled'\n"
            "    assert (here / 'data.txt').read_text() == 'from afar'\n"
            "    assert not (here / 'keys.env').exists() and not (here / 'notes.txt').exists()\n"
            "    from_beside = size('abc')\n    return from_beside"
        )
        code = (folder / "code.py").read_text().replace("    return len(written) / 10", travelled)
        (folder / "code.py").write_text(code.replace("def shout", "from help import size\n\ndef shout", 1))
        more = ["--out", "run", "--ray", cluster.address, "--env-file", "keys.env"]
        done = await asyncio.to_thread(on_ray, "run", "spec.yaml", "process", *more, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "notes.txt holds a key" in done.stderr
    assert {line["state"] for line in lines(folder / "run" / "rollouts.jsonl")} == {"scored"}
    assert [path for path in files_of(cluster.folder) if SECRET.encode() in path.read_bytes()] == []
    found = [path for path in files_of(cluster.folder) if b"from afar" in path.read_bytes()]
    assert found, "it is there that one has to look"


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_a_key_on_the_command_line_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    async with FaultyModel(faults=0.0) as model:
        more = ["--openai.server_type", "openai", "--openai.base_url", model.url, "--openai.model_name", "faulty"]
        more += ["--openai.api_key", SECRET, "--ray"]
        done = await asyncio.to_thread(on_ray, "run", "spec.yaml", "process", *more, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "Ray shows the command line in its dashboard" in done.stderr and SECRET not in done.stderr


# ------------------------------------------------------------------ what dies


@pytest.mark.parametrize("where", ["a cluster of its own", "a cluster of somebody's"])
def test_killed_run_leaves_no_processes_and_resumes(tmp_path: Path, where: str) -> None:
    own = where == "a cluster of its own"
    cluster = None if own else RayCluster()
    mark = f"{os.getpid()}.{3 if own else 4}"
    write(tmp_path, groups=8, command=f"sleep {mark} & echo {{{{ n }}}} > /tmp/n; sleep 0.5")
    try:
        more = ["process", "--out", "run", "--ray", *([cluster.address] if cluster else [])]
        with started(tmp_path, *more, "--workers", "1", "--set", "process.concurrency=4") as run:
            until(lambda: played(tmp_path) >= 2 and sleepers(mark))
            os.kill(run.pid, signal.SIGKILL)
            until(lambda: not sleepers(mark))
            if own:
                session = session_of(run.pid)
                until(lambda: not processes_with(session))
        done = on_ray("run", "spec.yaml", *more, "--workers", "2" if own else "1", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "resuming: " in done.stderr
        assert len(groups(tmp_path / "run")) == 8
        found = lines(tmp_path / "run" / "rollouts.jsonl")
        assert len({line["id"] for line in found}) == len(found), "each rollout once"
        assert not sleepers(mark)
    finally:
        if cluster is not None:
            cluster.close()


def session_of(pid: int) -> str:
    """Return the name of the Ray session that a process started; all its processes have it in their command lines."""
    (folder,) = Path("/tmp/ray").glob(f"session_*_{pid}")
    return folder.name


@pytest.mark.parametrize("token", [{}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}])
def test_node_without_the_runs_token_cannot_join(tmp_path: Path, token: dict[str, str]) -> None:
    write(tmp_path, groups=500, command="sleep 0.3; echo {{ n }} > /tmp/n")
    with started(tmp_path, "process", "--out", "run", "--ray", "--set", "process.concurrency=2") as run:
        until(lambda: played(tmp_path) >= 1)
        session = session_of(run.pid)
        (head,) = {found for pid in processes_with(session) for found in addresses_in(pid)}
        command = [str(ray_python()), "-m", "ray.scripts.scripts", "start", f"--address={head}", "--num-cpus=2"]
        joining = subprocess.run(
            [*command, "--object-store-memory=80000000", "--block"],
            env={**ANYBODY, **token}, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        assert joining.returncode != 0 and "InvalidAuthToken" in joining.stderr, joining
        at_refusal = played(tmp_path)
        until(lambda: played(tmp_path) > at_refusal)
        assert run.poll() is None and "now; workers" not in said(tmp_path)
        environs = [(Path("/proc") / str(pid) / "environ").read_bytes() for pid in processes_with(session)]
        (own,) = {value for each in environs for value in re.findall(rb"RAY_AUTH_TOKEN=(\w{64})\0", each)}
        run.send_signal(signal.SIGINT)
        assert run.wait(PATIENCE) == 130, said(tmp_path)
    kept = [*files_of(tmp_path), *files_of(Path("/tmp/ray") / session)]
    assert [path for path in kept if own in path.read_bytes()] == [], "the token is in memory alone"


def addresses_in(pid: int) -> list[str]:
    """Return the addresses of a cluster's head in the command line of one of its processes."""
    with suppress(OSError):
        return re.findall(r"--gcs-address=([\d.]+:\d+)", (Path("/proc") / str(pid) / "cmdline").read_text())
    return []


@pytest.mark.parametrize("gaps", [[], [0.2], [0.6], [1.2]])
def test_sigterm_interrupts_a_run_with_a_message(tmp_path: Path, gaps: list[float]) -> None:
    """A second signal, seconds after the first, may arrive while the run waits for Ray's own processes."""
    write(tmp_path, command="trap '' TERM; sleep 60" if gaps else "sleep 60")
    with started(tmp_path, "process", "--out", "run", "--ray", "--workers", "1") as run:
        until(lambda: "workers: 1" in said(tmp_path) and bool(sleepers("60")))
        run.send_signal(signal.SIGTERM)
        for gap in gaps:
            time.sleep(gap)
            run.send_signal(signal.SIGTERM)
        assert run.wait(PATIENCE) == 130, said(tmp_path)
    assert "interrupted" in said(tmp_path)
    assert "SIGTERM" not in said(tmp_path) and "Traceback" not in said(tmp_path), said(tmp_path)


def test_ctrl_c_releases_what_actors_hold(tmp_path: Path, cluster: RayCluster) -> None:
    mark = f"{os.getpid()}.75"
    write(tmp_path, command=f"sleep {mark}")
    with started(tmp_path, "process", "--out", "run", "--ray", cluster.address, "--workers", "1") as run:
        until(lambda: len(sleepers(mark)) >= 2)
        run.send_signal(signal.SIGINT)
        assert run.wait(PATIENCE) == 130, said(tmp_path)
    until(lambda: not sleepers(mark))
    assert ", which died (" not in said(tmp_path) and "Traceback" not in said(tmp_path)


def test_rollouts_that_take_their_actor_along_end_the_run(tmp_path: Path, cluster: RayCluster) -> None:
    write(tmp_path)
    change(tmp_path, "    return len(written) / 10", "    import os; os.kill(os.getpid(), 9)")
    change(tmp_path, 'ours", weight', 'ours", isolate: none, weight')
    more = ["--out", "run", "--ray", cluster.address, "--set", "process.concurrency=1"]
    done = on_ray("run", "spec.yaml", "process", *more, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "3 workers died one after the other while they had rollout" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        ("os._exit(1)", "3 workers died there ("),
        ("raise ValueError('not on this node')", "not on this node"),
        ("in a rollout", "3 workers died there ("),
    ],
)
def test_broken_node_is_excluded_while_others_continue(
    tmp_path: Path, cluster: RayCluster, fails: str, reason: str
) -> None:
    write(tmp_path, groups=5_000, command="sleep 0.3; echo {{ n }} > /tmp/n")
    change(tmp_path, "error_rate: 0.5", "error_rate: 0")
    change(tmp_path, "groups: 5000", "groups: 5000, concurrency: 4")
    if "rollout" in fails:
        dies = "    import os\n    if os.environ.get('NODE') == 'broken':\n        os._exit(1)\n"
        change(tmp_path, "    return len(written) / 10", f"{dies}    return len(written) / 10")
        change(tmp_path, 'ours", weight', 'ours", isolate: none, weight')
    else:
        breaks = f"import os\nif os.environ.get('NODE') == 'broken':\n    {fails}\n"
        (tmp_path / "code.py").write_text(breaks + (tmp_path / "code.py").read_text())
    with started(tmp_path, "process", "--out", "run", "--ray", cluster.address) as run:
        until(lambda: played(tmp_path) >= 4)
        cluster.do("add broken")
        until(lambda: "the other workers continue" in said(tmp_path))
        # A node that joins before the next look takes the place of the excluded one, and nothing is said.
        until(lambda: "workers: 1, not 2" in said(tmp_path).rpartition("excluded ")[2])
        cluster.do("add")
        until(lambda: "workers: 2, not 1" in said(tmp_path).rpartition("workers: 1, not 2")[2])
        before = played(tmp_path)
        until(lambda: played(tmp_path) >= before + 10)
        run.send_signal(signal.SIGINT)
        assert run.wait(PATIENCE) == 130, said(tmp_path)
    assert "the node" in said(tmp_path) and reason in said(tmp_path), said(tmp_path)
    assert "Traceback" not in said(tmp_path), said(tmp_path)


# ------------------------------------------------------------------ what is refused


def test_ray_that_is_not_installed_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    done = hermes("run", "spec.yaml", "process", "--ray", cwd=tmp_path)
    assert done.returncode == 2
    assert install_command("ray") in done.stderr


@pytest.mark.parametrize(
    ("address", "words"), [("127.0.0.1:1", "nothing answers there"), ("ray://127.0.0.1:1", "expected HOST:PORT")]
)
def test_address_without_a_cluster_is_reported(tmp_path: Path, address: str, words: str) -> None:
    write(tmp_path)
    done = on_ray("run", "spec.yaml", "process", "--ray", address, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "there is no token"),
        ({"RAY_AUTH_TOKEN_PATH": "/nonexistent"}, "there is no token"),
        ({"RAY_AUTH_TOKEN": f"{TOKEN}-2"}, "the cluster has another token"),
    ],
)
def test_cluster_without_its_token_is_refused(
    tmp_path: Path, cluster: RayCluster, environ: dict[str, str], words: str
) -> None:
    write(tmp_path)
    none = {**ANYBODY, "HOME": str(tmp_path), **environ}
    done = on_ray("run", "spec.yaml", "process", "--ray", cluster.address, cwd=tmp_path, environ=none)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr and "RAY_AUTH_TOKEN" in done.stderr
    assert "Traceback" not in done.stderr and TOKEN not in done.stderr


@pytest.mark.parametrize("address", ["as HOST:PORT", "auto"])
def test_cluster_without_token_authentication_is_refused(tmp_path: Path, address: str) -> None:
    write(tmp_path)
    cluster = RayCluster(ANYBODY)
    try:
        word = "auto" if address == "auto" else cluster.address
        environ = {**OWN, "RAY_ADDRESS": cluster.address}
        done = on_ray("run", "spec.yaml", "process", "--ray", word, cwd=tmp_path, environ=environ)
    finally:
        cluster.close()
    assert done.returncode == 2, done.stderr
    assert "the cluster requires no token" in done.stderr
    assert "Traceback" not in done.stderr and TOKEN not in done.stderr


def test_auto_address_without_a_local_cluster_is_reported(tmp_path: Path) -> None:
    write(tmp_path)
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as own:
        command = [ray_python(), "-m", "hermes_rl.cli.main", "run", "spec.yaml", "process", "--ray", "auto"]
        # Ray looks for clusters among all processes, and other tests may have one; only root can have none beside it.
        alone = ["unshare", "--pid", "--fork", "--mount-proc"] if os.geteuid() == 0 else []
        done = subprocess.run(
            [*alone, *map(str, command)],
            cwd=tmp_path,
            env={**OWN, "RAY_TMPDIR": own},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    assert done.returncode == 2
    assert "cannot connect" in done.stderr and "Traceback" not in done.stderr


def test_spec_error_on_a_node_is_reported_once(tmp_path: Path, cluster: RayCluster) -> None:
    write(tmp_path)
    raises = f"if not __file__.startswith({str(tmp_path)!r}):\n    raise ValueError('not on a node')\n"
    (tmp_path / "code.py").write_text(raises + (tmp_path / "code.py").read_text())
    done = on_ray("run", "spec.yaml", "process", "--ray", cluster.address, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("not on a node") == 1 and "Traceback" not in done.stderr


def test_unavailable_resources_are_reported(tmp_path: Path, cluster: RayCluster) -> None:
    write(tmp_path)
    change(tmp_path, "toolsets:", "sandbox: {limits: {cpu: 8, memory: 2GiB}}\ntoolsets:")
    words = "a worker asks for 8 CPU and 2.0 GiB of memory, and the Ray cluster has 1 node with"
    began = time.monotonic()
    done = on_ray("run", "spec.yaml", "process", "--ray", cwd=tmp_path)
    assert done.returncode == 2 and words in done.stderr, "a cluster of its own never grows"
    assert time.monotonic() - began < 60
    before = "import hermes_rl.runs.workers as w; w.ROOM = 5.0"
    with started(tmp_path, "process", "--out", "run", "--ray", cluster.address, before=before) as run:
        assert run.wait(PATIENCE) == 1, said(tmp_path)
    assert "there is room for 0 of them" in said(tmp_path)
    assert words in said(tmp_path) and "Traceback" not in said(tmp_path)
