"""The verifier of Terminal-Bench 2's rows: an archive of tests, and a script that runs them and writes the reward."""

import base64
import io
import re
import tarfile
from typing import Any

from hermes_rl import Score
from hermes_rl.errors import AgentFault, RewardFailure

REWARD = "/logs/verifier/reward.txt"
LACKING = re.compile(
    r"(curl|wget|uv|uvx|pip3?|pytest|python3?|bash): (command )?not found|No module named '?pytest|"
    r"Could not resolve host|Temporary failure in name resolution"
)
"""What says that the tests did not run, because the image or the network lacks what their script needs."""


def verified(ctx: Any, *, script: str, tests: str = "", timeout: float = 900.0) -> Score:
    """Return the reward that the test script writes, from 0 to 1; if it is one that writes none, 1 if it exits with 0.

    Args:
        ctx: the rollout's sandbox.
        script: the script that runs the tests, copied to /tests/test.sh.
        tests: files for /tests, as a tar.gz in base64.
        timeout: seconds of the script; one that takes longer scores 0.
    """
    answer, reward_text = _run_tests(ctx, script, tests, timeout)
    if answer.get("timed_out"):
        return Score(0.0, reason=f"the tests had no end in time: {answer['output'][-400:]}")
    value = 0.0 if reward_text is None and "reward.txt" in script else _reward_value(reward_text, answer)
    ran = reward_text is not None and LACKING.search(answer["output"]) is None
    if value > 0 or ran:
        return Score(
            value, reason=None if value > 0 else f"exit status {answer['exit_code']}: {answer['output'][-400:]}"
        )
    # Either the solution or the sandbox is to blame. A sandbox that the agent never saw tells which.
    with ctx.pristine_sandbox() as clean:
        alone, written = _run_tests(clean, script, tests, timeout)
    lacking = LACKING.search(alone["output"])
    if lacking or (written is None and alone["exit_code"] in (126, 127)):
        raise RewardFailure(f"the tests cannot run in this sandbox: {alone['output'].strip()[-400:]}")
    return Score(value, reason=f"the tests did not run to their end (exit status {answer['exit_code']})")


def _run_tests(ctx: Any, script: str, tests: str, timeout: float) -> tuple[dict[str, Any], str | None]:
    """Put the tests in place and run them; the answer of the script, and the reward that it wrote."""
    ctx.empty_dir("/tests")
    ctx.empty_dir("/logs/verifier")
    for name, content, mode in [*_archive_files(tests), ("test.sh", script.encode(), 0o755)]:
        written = ctx.write_file(f"/tests/{name}", content, mode)
        if "error" in written:
            raise AgentFault(f"the tests cannot be put in place: {written['error']}")
    answer = ctx.terminal("bash /tests/test.sh", timeout=timeout)
    reward_file = ctx.read_file(REWARD)
    return answer, None if "error" in reward_file or not reward_file["content"].strip() else reward_file[
        "content"
    ].strip()


def _archive_files(archive: str) -> list[tuple[str, bytes, int]]:
    """Return the path, content and mode of each file of an archive, without links and paths that lead out of it."""
    if not archive:
        return []
    entries = []
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(archive)), mode="r:*") as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            if file is not None and not member.name.startswith("/") and ".." not in member.name.split("/"):
                entries.append((member.name.removeprefix("./"), file.read(), member.mode & 0o777))
    return entries


def _reward_value(reward_text: str | None, answer: dict[str, Any]) -> float:
    """Return the number that was written, 0 if it is not from 0 to 1; without one, 1 if the script exits with 0."""
    if reward_text is None:
        return float(answer["exit_code"] == 0)
    try:
        reward = float(reward_text)
    except ValueError:
        return 0.0
    return reward if 0 <= reward <= 1 else 0.0
