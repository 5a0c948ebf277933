"""Play scripts made of tasks' gold actions in a port of τ²-bench, and in the original.

    python tau2_trajectories.py DOMAIN [EVERY [KIND]]

It takes an interpreter that has the original and this package, and `TAU2_DATA_DIR`. Of the base split each task of
EVERY (1: all of them) is played, by all kinds of trajectories or one, such as `gold`, for which all tasks of the domain
are taken. Prints a JSON object: `gold`, how many score 1 and of how many; `trajectories`; and
`differ`, those whose scores are not the same, with both. No judge is asked on either side.
"""

from __future__ import annotations

import asyncio
import copy
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from hermes_rl import open_env
from hermes_rl.scoring.reward_value import rounded
from hermes_rl.spec.load import parse_spec

FOLDER = Path(__file__).resolve().parents[2] / "specs" / "tau2"
AT_A_TIME = 4
STOP = "###STOP###"
Turns = list[dict[str, Any]]


def kinds(gold: Turns, other: Turns) -> Iterator[tuple[str, Turns]]:
    """Return kinds of scripts made of a task's gold turns, and of another task's."""
    opening, *acts, words = gold
    calls = [turn for turn in acts if "tools" in turn]
    yield "gold", gold
    yield "nothing", [opening, {"say": "Done."}]
    yield "other words", [*gold[:-1], {"say": "I am not able to help you."}]
    yield "reversed", [opening, *reversed(acts), words]
    yield "twice", [opening, *(turn for turn in acts for _ in range(2)), words]
    yield "an unknown tool", [opening, {"tools": [{"name": "no_such_tool", "args": {}}]}, *acts, words]
    yield "ten unknown tools", [opening, *([{"tools": [{"name": "no_such_tool", "args": {}}]}] * 10), *acts, words]
    yield (
        "calls with words",
        [*gold[:-1], {"say": words["say"], "tools": [{"name": "no_such_tool", "args": {}}]}, words],
    )
    yield "of another task", [opening, *other[1:-1], words]
    yield "more from another task", [opening, *acts, *other[1:-1][-1:], words]
    if len(calls) > 1 and len(calls) == len(acts):
        yield "parallel", [opening, {"tools": [call for turn in calls for call in turn["tools"]]}, words]
    for place in sorted({0, len(acts) // 2, len(acts) - 1}) if acts else ():
        yield f"without number {place}", [opening, *acts[:place], *acts[place + 1 :], words]
        for name, change in (("a wrong argument", wrong), ("JSON as text", as_text)):
            turn = copy.deepcopy(acts[place])
            for call in [*turn.get("tools", ()), *turn.get("user_tools", ())]:
                call["args"] = {key: change(value) for key, value in call["args"].items()}
            yield f"{name} in number {place}", [opening, *acts[:place], turn, *acts[place + 1 :], words]


def wrong(value: Any) -> Any:
    return value + "9" if isinstance(value, str) else [*value[1:]] if isinstance(value, list) else value


def as_text(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


# ----------------------------------------------------------------------------------------------------- The original


class Side:
    """An agent or a user that plays fixed messages, and then repeats the last one."""

    def __init__(self, kind: Any, script: Sequence[Any], last: str) -> None:
        self.kind, self.script, self.last = kind, list(script), last

    def generate_next_message(self, message: Any, state: Any) -> tuple[Any, Any]:
        from tau2.data_model.message import ToolCall

        turn = self.script.pop(0) if self.script else {"say": self.last}
        by = "assistant" if self.kind.__name__ == "AssistantMessage" else "user"
        calls = [
            ToolCall(id=f"{id(turn)}-{place}", name=call["name"], arguments=dict(call["args"]), requestor=by)
            for place, call in enumerate(turn.get("tools", ()))
        ]
        return self.kind(role=by, content=turn.get("say"), tool_calls=calls or None), state

    def get_init_state(self, message_history: Any = None) -> Any:
        return SimpleNamespace(messages=[])

    def is_stop(self, message: Any) -> bool:
        return False

    def stop(self, *_: Any) -> None: ...

    def set_seed(self, _: int) -> None: ...


def original(domain: str, task: Any, turns: Turns) -> float:
    from tau2.data_model.message import AssistantMessage, UserMessage
    from tau2.data_model.tasks import RewardType
    from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation
    from tau2.orchestrator.orchestrator import Orchestrator
    from tau2.registry import registry

    said = [{key: turn[key] for key in ("tools", "say") if key in turn} for turn in turns]
    user: Turns = []
    for turn in turns:
        user += [{"tools": turn["user_tools"]}] if "user_tools" in turn else []
        user += [{"say": turn["user"]}] if "user" in turn else []
    agent: Any = Side(AssistantMessage, [turn for turn in said if turn], "That was all.")
    customer: Any = Side(UserMessage, user, STOP)
    how: dict[str, Any] = {}
    if domain == "banking_knowledge":
        from tau2.runner.build import _derive_read_log_allowlist

        how = {"retrieval_variant": "no_knowledge", "read_log_allowlist": _derive_read_log_allowlist(task)}
    world = registry.get_env_constructor(domain)(**how)
    run = Orchestrator(domain, agent, customer, world, task, max_steps=200).run()
    task = task.model_copy(deep=True)
    basis = task.evaluation_criteria.reward_basis
    task.evaluation_criteria.reward_basis = [each for each in basis if each is not RewardType.NL_ASSERTION]
    graded = evaluate_simulation(run, task, EvaluationType.ALL, solo_mode=False, domain=domain, env_kwargs=how)
    return float(graded.reward)


# --------------------------------------------------------------------------------------------------------- The port


async def ours(domain: str, rows: list[dict[str, Any]]) -> list[float | str]:
    spec = yaml.safe_load((FOLDER / f"tau2-{domain.partition('_')[0]}.yaml").read_text())
    spec["rewards"].pop("assertions", None)
    spec["dataset"] = {"items": rows, "key": "id"}
    spec["servers"] = {"policy": {"type": "scripted"}, "user": {"type": "scripted"}}
    free = asyncio.Semaphore(AT_A_TIME)
    async with open_env(parse_spec(yaml.safe_dump(spec), folder=FOLDER)) as env:

        async def score(row: Any) -> float | str:
            async with free:
                rollout = await env.run(row)
            return f"{rollout.stop_reason}: {rollout.error}" if rollout.score is None else rollout.score

        return await asyncio.gather(*map(score, env.rows()))


def main(domain: str, every: int, only: str | None) -> None:
    sys.path.insert(0, str(FOLDER))
    import world

    tasks = world.tasks(domain)
    splits = ("full",) if only and domain == "telecom" else ("train", "test")
    by_id = {row["id"]: row for split in splits for row in world.rows(domain, split)}
    rows = list(by_id.values())[::every]
    made, names = [], []
    for number, row in enumerate(rows):
        for kind, turns in kinds(row["gold"], rows[number - 1]["gold"]):
            if only in (None, kind):
                made.append({**row, "id": f"{row['task']} {kind}", "gold": turns})
                names.append(kind)
    scores = asyncio.run(ours(domain, made))
    differ, gold = [], []
    for row, kind, score in zip(made, names, scores, strict=True):
        theirs = rounded(original(domain, tasks[row["task"]], row["gold"]))
        if kind == "gold":
            gold.append(theirs == 1)
        if score != theirs:
            differ.append([row["id"], score, theirs])
    sys.stdout.write(json.dumps({"gold": [sum(gold), len(gold)], "trajectories": len(made), "differ": differ}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1, sys.argv[3] if len(sys.argv) > 3 else None)
