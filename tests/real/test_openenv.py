"""OpenEnv's own client runs a spec served by `hermes-rl serve-openenv`, in an environment with the real OpenEnv."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.api.summing import CODE, TEXT
from tests.integrations.doors import DESERVED
from tests.ports import free_port
from tests.real.containers import settled
from tests.real.doors_played import require_scores_as_everywhere, write_doors
from tests.real.environments import HERE, ROOT, openenv_python
from tests.service.test_batches import BROKEN

COMPONENT = "OpenEnv"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(300)]
OWN = {**os.environ, "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1,localhost"}
TERMINAL = """
name: sums
dataset: {items: [{word: hello}]}
prompt: {user: "Say {{ word }}."}
toolsets: [terminal]
rewards: {right: {fn: exact_match, args: {target: "{{ word }}"}}}
"""


@contextmanager
def served(
    folder: Path, *options: str, text: str = TEXT, key: str | None = None, spec: str = "sums.yaml"
) -> Iterator[str]:
    """Yield the address of a server of the spec; the usual spec is written first."""
    if spec == "sums.yaml":
        (folder / "code.py").write_text(CODE)
        (folder / spec).write_text(text)
    port = free_port()
    command = [str(openenv_python()), "-m", "hermes_rl.cli.main", "serve-openenv", spec]
    command += ["--listen", f"127.0.0.1:{port}", *options]
    own = OWN if key is None else {**OWN, "KEY": key}
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, cwd=folder, env=own, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 60
        while b"listening on" not in (folder / "log").read_bytes():
            assert server.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
        server.terminate()
        assert server.wait(30) == 0, (folder / "log").read_text()
    finally:
        server.kill()
        server.wait()


def client(url: str, *program: str, key: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program of `openenv_client.py` and return its result."""
    own = OWN if key is None else {**OWN, "KEY": key}
    command = [str(openenv_python()), str(HERE / "openenv_client.py"), url, *program]
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=120, check=False)


def seen(url: str, program: str) -> Any:
    done = client(url, program)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_eight_clients_run_concurrently(tmp_path: Path) -> None:
    with served(tmp_path) as url:
        found = seen(url, "eight")
    assert [one["reward"] for one in found] == [0.0, 1.0] * 4
    assert [one["rewards"]["right"] for one in found] == [0.0, 1.0] * 4
    for one in found:
        assert (one["prompt"], one["tools"]) == (["system", "user"], ["add"])
        assert one["answers"] == [["tool"], ["tool"]]
        assert (one["sum"], one["done"], one["stop_reason"]) == (True, True, "finished")


def test_rows_are_found_by_key_index_and_seed_and_come_in_turn(tmp_path: Path) -> None:
    with served(tmp_path) as url:
        found = seen(url, "rows")
    assert (found["splits"], found["number"], found["listed"]) == (["train"], 4, 4)
    asked = ["What is 5 plus 6?", "What is 5 plus 6?", "What is 1 plus 2?", "What is 3 plus 4?"]
    assert found["found"] == asked
    key, index, unknown, split = found["refused"]
    assert "there is no row with the key 'none'" in key
    assert "train has 4 rows, and none with the index 9" in index
    assert "reset knows key, index, seed" in unknown
    assert "splits are train and eval" in split


def test_failed_rollout_has_no_reward_and_reports_the_error(tmp_path: Path) -> None:
    (tmp_path / "grading.py").write_text(BROKEN)
    (tmp_path / "broken").touch()
    text = TEXT.replace("rewards: {", 'rewards: {steady: {fn: "grading.py:steady", weight: 1}, ')
    with served(tmp_path, text=text) as url:
        found = seen(url, "broken")
    assert (found["done"], found["reward"], found["stop_reason"]) == (True, None, "reward_failure")
    assert found["error"]
    assert not found["trainable"]
    assert "no turn waits for an answer" in found["again"]


def test_the_sandbox_of_a_client_that_is_gone_is_released(tmp_path: Path) -> None:
    mark = f"{os.getpid()}4711"
    with served(tmp_path, "--most", "1", text=TERMINAL) as url:
        command = [str(openenv_python()), str(HERE / "openenv_client.py"), url, "stay", mark]
        staying = subprocess.Popen(command, env=OWN, stdout=subprocess.PIPE, text=True)
        try:
            assert staying.stdout is not None
            assert staying.stdout.readline() == "begun\n"
            assert settled(lambda: running(mark))  # the shell has answered, and it may not have begun
            assert "CAPACITY_REACHED" in client(url, "one").stderr
        finally:
            staying.kill()
            staying.communicate()
        assert settled(lambda: not running(mark))
        assert seen(url, "one") is False  # there is room again


def test_script_from_the_docs_runs_a_rollout(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "integrations" / "openenv.md").read_text("utf-8")
    (script,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    with served(tmp_path) as url:
        command = [str(openenv_python()), "-c", script.replace("http://127.0.0.1:8000", url)]
        done = subprocess.run(command, env=OWN, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "0.0 finished None\n", done.stderr


def test_a_token_lets_in_who_has_it(tmp_path: Path) -> None:
    with served(tmp_path, "--token-env", "KEY", key="abc") as url:
        assert client(url, "one", key="abc").returncode == 0
        assert "403" in client(url, "one", key="other").stderr


def test_common_spec_gives_the_same_scores_and_the_client_keeps_tokens(tmp_path: Path) -> None:
    write_doors(tmp_path)
    with served(tmp_path, spec="alone.yaml") as url:
        found = seen(url, "doors")
    require_scores_as_everywhere((one["key"], one["reward"]) for one in found)
    assert all(one["rewards"] == DESERVED[one["key"]] for one in found)
    assert {name for one in found for name in one["heard"] if "token" in name or "logprob" in name} == {"max_tokens"}
    refused = r"rewards.judged.args.fallback, rewards.longest compares the members of a group, and OpenEnv"
    with pytest.raises(AssertionError, match=refused), served(tmp_path, spec="doors.yaml"):
        pass


def running(mark: str) -> bool:
    """Return True if the process that the client started still runs in any sandbox of this machine."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended meanwhile
        if words[:2] == [b"sleep", mark.encode()]:
            return True
    return False
