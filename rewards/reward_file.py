"""Read the reward from a file of numbers that a command writes."""

from __future__ import annotations

import re
import shlex
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from hermes_rl import Score
from hermes_rl.errors import AgentFault, RewardFailure
from hermes_rl.scoring.reward_value import value_range
from hermes_rl.terminal_text import end_of
from hermes_rl.values import is_number, read_json

if TYPE_CHECKING:
    from hermes_rl.spec.argument_types import EnvText, PathText, PlacedFile, SystemText

JSON, TEXT = "reward.json", "reward.txt"
BYTE_ORDER_MARK = "\ufeff"
LACKING = re.compile(
    r"(curl|wget|uv|uvx|pip3?|pytest|python3?|bash): (command )?not found|No module named '?pytest|"
    r"Could not resolve host|Temporary failure in name resolution"
)
"""What says that the tests did not run, because the image or the network lacks what their script needs."""
NOT_EXECUTED = (126, 127)
MOST_NAMES, LONGEST_NAME = 32, 80
"""Of the numbers in reward.json, and characters of a name."""
SHOWN = 400
"""Characters of the command's output in a reason."""


@value_range(0, 1, written=True)
def reward_file(
    ctx: Any,
    *,
    command: SystemText,
    files: list[PlacedFile] | None = None,
    folder: PathText = "/logs/verifier",
    env: dict[SystemText, EnvText] | None = None,
    name: str = "reward",
    timeout: float = 600.0,
) -> Score:
    """Return the number that `command` writes into `folder`: into reward.json, as named numbers, or into reward.txt.

    Existing content of the directory is moved away first and restored afterwards. If reward.json has several numbers,
    the value is the one called `name`, or else their mean; all are metrics. A number outside the reward's `range` is
    invalid, and counts as its low end. If there is no number, the command runs again in a sandbox that the agent never
    used: if it cannot run there either, the reward fails, else the value is the low end.

    Args:
        command: a shell command, run in the working directory after `files` are copied.
        files: files that exist only while the command runs: a list of {to, content | from, mode}.
        folder: output directory of the command; empty when it starts.
        env: environment variables of the command.
        name: name of the number in reward.json that is the value.
        timeout: seconds; a command that takes longer scores the low end of the range.
    """
    answer, numbers, problem = _run_command(ctx, command, files or [], folder, env or {}, timeout)
    if answer.get("timed_out"):
        raise AgentFault(f"no end within {timeout:g} s")
    value = None if numbers is None else numbers.get(name, sum(numbers.values()) / len(numbers))
    if value is None or (value <= 0 and LACKING.search(answer["output"])):
        _require_it_can_run(ctx, command, files or [], folder, env or {}, timeout)
    if numbers is None or value is None:
        output = end_of(answer["output"].strip(), SHOWN)
        raise AgentFault(f"{problem} (exit status {answer['exit_code']}): {output}")
    return Score(value, metrics=numbers if set(numbers) != {name} else {})


def _run_command(
    ctx: Any, command: str, files: list[dict[str, Any]], folder: str, env: dict[str, str], timeout: float
) -> tuple[dict[str, Any], dict[str, float] | None, str]:
    """Run the command; its answer, the numbers that it wrote, and where these are None why."""
    ctx.empty_dir(folder)
    answers = []
    for file in files:
        answers.append(
            ctx.upload(file["from"], file["to"])
            if "from" in file
            else ctx.write_file(file["to"], file["content"], file.get("mode"))
        )
    for each in answers:
        if "error" in each:
            return {"exit_code": 1, "output": ""}, None, f"the tests cannot be put in place: {each['error']}"
    variables = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in env.items())
    answer = ctx.terminal(variables + command, timeout=timeout)
    return answer, *_read_numbers(ctx, folder)


def _read_numbers(ctx: Any, folder: str) -> tuple[dict[str, float] | None, str]:
    read = ctx.read_file(f"{folder}/{JSON}")
    if "error" not in read:
        try:
            written = read_json(read["content"].removeprefix(BYTE_ORDER_MARK))
        except ValueError:
            return None, f"{JSON} is not valid JSON"
        if not isinstance(written, dict) or not written or not all(map(_is_value, written.values())):
            return None, f"{JSON} has to hold names with a finite number each"
        if len(written) > MOST_NAMES or any(len(name) > LONGEST_NAME for name in written):
            return None, f"{JSON} has more than {MOST_NAMES} names, or one of more than {LONGEST_NAME} characters"
        return {name: float(value) for name, value in written.items()}, ""
    read = ctx.read_file(f"{folder}/{TEXT}")
    if "error" in read or not read["content"].strip():
        return None, f"the command has written no {JSON} and no {TEXT}"
    try:
        score = float(read["content"].removeprefix(BYTE_ORDER_MARK))
    except ValueError:
        return None, f"{TEXT} is not a number"
    return ({"reward": score}, "") if is_number(score) else (None, f"{TEXT} is not a finite number")


def _is_value(value: object) -> bool:
    return isinstance(value, bool) or is_number(value)


def _require_it_can_run(
    ctx: Any, command: str, files: list[dict[str, Any]], folder: str, env: dict[str, str], timeout: float
) -> None:
    """Raise `RewardFailure` if the command cannot run in a sandbox that has nothing from the agent."""
    key_source = repr(
        (command, [sorted((key, repr(value)) for key, value in file.items()) for file in files], env, folder)
    )
    key = f"reward_file {sha256(key_source.encode('utf-8', 'surrogatepass')).hexdigest()}"
    lacks = ctx.recall(key)  # it is the same for all rollouts of a row
    if lacks is None:
        with ctx.pristine_sandbox() as clean:
            answer, numbers, _ = _run_command(clean, command, files, folder, env, timeout)
            clean.restore()
        cannot = numbers is None and answer["exit_code"] in NOT_EXECUTED
        lacks = end_of(answer["output"].strip(), SHOWN) if cannot or LACKING.search(answer["output"]) else ""
        if cannot and not lacks:
            lacks = f"exit status {answer['exit_code']}"
        if not answer.get("timed_out"):
            ctx.remember(key, lacks)
    if lacks:
        remedy = "sandbox.network, sandbox.python or an image may give what it needs, or another `command`"
        raise RewardFailure(f"reward_file: the command cannot run in this sandbox ({remedy}): {lacks}")
