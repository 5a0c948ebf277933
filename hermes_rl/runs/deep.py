"""Rewards put to the test before a model is: right answers and wrong ones, played in real sandboxes by scripts.

Owns what is played on a few rows (the spec's solution as gold, twice; no answer; garbage; the solution of another
row; the gold answer's last words alone; blind answers on more rows) and what it shows about the rewards: that they
cannot tell right from wrong, that nothing, garbage or a blind answer satisfies them, that they fail, differ from one
time to the next, or take long, and that the prompt gives the answer away or is the same for every row.
"""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean

from hermes_rl.agent.result import text_of
from hermes_rl.data.load import Split, load_rows
from hermes_rl.data.rows import Row
from hermes_rl.rollouts.compiled import CompiledSpec, gold_turns, has_solution, last_words, user_script
from hermes_rl.rollouts.rollout import ALONE, Group, Rollout, RolloutKey, Seat, never_asked
from hermes_rl.rollouts.sandboxes import keep_artifacts
from hermes_rl.runs.exact import uses_tools
from hermes_rl.runs.run import Plan, Run
from hermes_rl.runs.store import rollout_record
from hermes_rl.scoring.grader import GradedReward
from hermes_rl.servers.scripted import Script, ScriptedCall, ScriptedTurn
from hermes_rl.shipped import shipped_rewards
from hermes_rl.spec.model import Spec
from hermes_rl.values import write_json

Answers = Mapping[str, Callable[[str], tuple[ScriptedTurn, ...]]]
"""What is played instead of a policy, by name, from the words of a row's prompt."""
ROWS = 3
LOOKED_AT = 50
"""Rows among which another one's solution is looked for."""
NEAR = 0.1
"""A wrong answer whose score is this near to gold's, as a share of it, scores like gold."""
SLOW_SECONDS = 10.0
SHOWN = 400
"""Characters, from the end, of an output that is shown."""
LETTERS = "abcdefghijklmnopqrstuvwxyz {}[]<>()0123456789.,:;'\"\\/!?#*_-\n"


def saying(text: str) -> Callable[[str], tuple[ScriptedTurn, ...]]:
    """Return an answer that is this text, whatever the prompt."""
    return lambda prompt: (ScriptedTurn(say=text),)


NO_EFFECT = ScriptedTurn(tools=(ScriptedCall("terminal", {"command": "true"}),))
"""A call that changes nothing; where there is no terminal, one of a tool that is not there."""
COPIED = 20_000
"""Characters of a prompt that a blind answer repeats."""
BLIND: Answers = {
    **{text: saying(text) for text in ("", "yes", "no", "A", "0", "1", "I have done it. The task is complete.")},
    "the prompt": lambda prompt: (ScriptedTurn(say=prompt[:COPIED]),),
    "one call without effect": lambda prompt: (NO_EFFECT, ScriptedTurn(say="")),
}
"""Answers that solve nothing, the empty one first: by name, from the words of the prompt to the turns."""
BLIND_SECONDS = 30.0
"""After so long no further row is played blindly."""
KINDS = ("gold", "gold again", "empty", "garbage", "near miss", "last words")
WRONG = {
    "empty": "an empty answer scores like the solution ({score:g} of {gold:g}): the rewards ask for nothing",
    "garbage": "garbage scores like the solution ({score:g} of {gold:g}): the rewards take anything",
    "near miss": "the solution of another row scores like a row's own ({score:g} of {gold:g}): the rewards do not look "
    "at the row",
}


@dataclass
class DeepReport:
    """What was found: mean scores by kind of answer (None where none could be scored), and what is wrong.

    `kept` is the folder with what was played, where something is wrong.
    """

    scores: dict[str, float | None] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    kept: Path | None = None


async def examine(spec: Spec, keep: Path | None = None) -> DeepReport:
    """Play and judge a spec that was loaded for a demo.

    Where something is wrong, what was played is put into the folder `keep`, in the place of what is there. Raises
    `UserError` where the rows cannot be had, or the environment cannot be started.
    """
    split: Split = "eval" if spec.dataset.eval is not None and spec.dataset.eval.only else "train"
    rows = await asyncio.to_thread(load_rows, spec, split, notify=lambda _: None)
    sample = list(islice(rows, LOOKED_AT))
    report = DeepReport()
    if not sample:
        report.problems.append("no rows are left to play: does dataset.filter drop them all?")
        return report
    if not has_solution(spec):
        report.warnings.append("there is no solution, so it was not shown that a right answer scores well")
    with tempfile.TemporaryDirectory(prefix="hermes-rl-deep-") as folder:
        async with Probe(spec, sample) as probe:
            probe.keep = partial(keep_artifacts, Path(folder) / "artifacts")
            await probe.open(sample[0])
            run = Run(probe, sample[:ROWS], Plan(size=len(KINDS), split=split, repeat=False, whole=False, replays=0))
            groups = [group async for group in run.groups()]
            _judge(report, probe, groups)
            if not report.problems:  # which cost time, and are enough to look at
                answers = _blind_answers(probe)
                blind = [group async for group in play(probe, sample, split, answers)] if answers else []
                answered = {
                    f"the answer {name!r}": [group.rollouts[i] for group in blind] for i, name in enumerate(answers)
                }
                report.problems += _failures(answered, _asking(probe))[0]
                report.warnings += _blind(probe, blind)
        gold = [group.rollouts[KINDS.index("gold")] for group in groups] if has_solution(spec) else []
        failed = [_why(each) for each in gold if each.score is None or each.score < spec.evaluate.success]
        report.warnings += failed
        if keep is not None and (report.problems or failed):
            report.kept = await asyncio.to_thread(_keep, groups, Path(folder), keep)
    return report


async def play(
    probe: Probe, rows: list[Row], split: Split, answers: Answers, seconds: float = BLIND_SECONDS
) -> AsyncIterator[Group]:
    """Play each row with these answers, in their order, until `seconds` have passed; yields a group for each row."""
    probe.answers, probe.keep, end = answers, None, time.monotonic() + seconds
    run = Run(probe, rows, Plan(size=len(answers), split=split, repeat=False, whole=False, replays=0))
    async with aclosing(run.groups()) as groups:
        async for group in groups:
            yield group
            if time.monotonic() > end:
                return


def _judged(probe: Probe) -> list[GradedReward]:
    """Return the rewards that blind answers can judge: none that compares the members of a group, or asks a model,
    which a script plays here."""
    roles = {*probe.spec.servers, "roles"}
    return [
        reward
        for reward in probe.grader.rewards
        if reward.weighting.counts and not reward.group_level and not roles & reward.function.parameters.keys()
    ]


def _blind_answers(probe: Probe) -> Answers:
    """Return the answers that may make a difference: words do not where rewards look into the sandbox alone."""
    taken = [reward.function.parameters.keys() for reward in _judged(probe)]
    if probe.seats or probe.spec.user is not None or any({"result", "state", "seats"} & names for names in taken):
        return BLIND
    return {name: BLIND[name] for name in ("", "one call without effect")} if taken else {}


def _blind(probe: Probe, groups: list[Group]) -> list[str]:
    """Return a warning for each reward that pays for an answer that solves nothing, with the best one: an answer that
    is worth more than an empty one, by more than `NEAR` of the range."""
    warnings = []
    for reward in _judged(probe):
        sign = -1 if reward.weighting.weight < 0 else 1
        least = NEAR * (reward.bounds[1] - reward.bounds[0])
        played = [_values(group, _blind_answers(probe), reward.name) for group in groups]
        paid = {
            name: [
                (group.row.key, values[name], values[""])
                for group, values in zip(groups, played, strict=True)
                if name in values and "" in values and sign * (values[name] - values[""]) > least
            ]
            for name in _blind_answers(probe)
        }
        name, rows = max(paid.items(), key=lambda each: len(each[1]))
        if rows:
            key, value, empty = rows[0]
            warnings.append(
                f"reward {reward.name} pays for an answer that solves nothing: of {len(groups)} rows {len(rows)} "
                f"({len(rows) / len(groups):.0%}) give {name!r} more than no answer, such as row {key} "
                f"({value:g} instead of {empty:g})"
            )
    return warnings


def _values(group: Group, answers: Answers, reward: str) -> dict[str, float]:
    """Return what a reward has given to each answer, by its name; those that it has judged."""
    values = {name: rollout.rewards.get(reward) for name, rollout in zip(answers, group.rollouts, strict=True)}
    return {name: value.value for name, value in values.items() if value is not None and value.value is not None}


def _why(rollout: Rollout) -> str:
    """Return what each reward said, and what came out last."""
    score = "is not graded" if rollout.score is None else f"scores {rollout.score:g}"
    parts = [f"the solution of row {rollout.key.row.key} {score} (it ended with {rollout.ending})"]
    if rollout.result is not None and rollout.result.program is not None and not rollout.turns:
        parts.append(never_asked(rollout.result.program))
    for name, reward in rollout.rewards.items():
        value = "no value" if reward.value is None else f"{reward.value:g}"
        parts.append(f"{name} {value}" + (f": {reward.reason}" if reward.reason else ""))
    messages = rollout.result.messages[rollout.result.prompt_length :] if rollout.result is not None else []
    for role, what in (("tool", "the last output of a tool"), ("assistant", "the last answer")):
        last = next((message for message in reversed(messages) if message.get("role") == role), None)
        text = text_of(last.get("content")).strip() if last is not None else ""
        parts += [f"{what}: {text if len(text) <= SHOWN else '…' + text[-SHOWN:]!r}"] if text else []
    return "; ".join(parts)


def _keep(groups: list[Group], played: Path, keep: Path) -> Path:
    """Put the rollouts and their artifacts into a folder; blocks."""
    shutil.rmtree(keep, ignore_errors=True)
    keep.mkdir(parents=True)
    if (played / "artifacts").is_dir():
        shutil.copytree(played / "artifacts", keep / "artifacts")
    with (keep / "rollouts.jsonl").open("wb") as file:
        for group in groups:
            for kind, rollout in zip(KINDS, group.rollouts, strict=True):
                file.write(write_json({"kind": kind, **rollout_record(rollout)}, default=str) + b"\n")
    return keep


class Probe(CompiledSpec):
    """The spec with an answer of each kind in each group, in the order of `KINDS`, or else of `answers`."""

    answers: Answers | None = None

    def __init__(self, spec: Spec, rows: list[Row]) -> None:
        super().__init__(spec, {})
        self.grader = replace(self.grader, blames=False)  # what is answered is the spec's own, or deliberately wrong
        self.rows = rows
        self.uses_tools = bool(spec.programs) or uses_tools(spec)

    def script(self, key: RolloutKey, prior: int, seat: Seat = ALONE) -> Script:
        gold = gold_turns(self.spec, key.row, seat.name)
        first = not seat.name or seat.name == self.seats[0].name
        if self.answers is not None:
            answer = list(self.answers.values())[key.index]
            return Script(answer(_words(self, key.row)) if first else gold or (ScriptedTurn(say=""),), prior)
        kind = KINDS[key.index]
        if kind == "near miss":
            other = self.other(key.row)
            turns = () if other is None else gold_turns(self.spec, other, seat.name)
        elif not first:
            turns = gold
        else:
            turns = self._turns(kind, key.row, gold)
        return Script(turns or (ScriptedTurn(say=""),), prior)

    def _turns(self, kind: str, row: Row, gold: tuple[ScriptedTurn, ...]) -> tuple[ScriptedTurn, ...]:
        if kind == "garbage":
            source = random.Random(f"garbage {row.key}")
            return (ScriptedTurn(say="".join(source.choices(LETTERS, k=300))),)
        if kind == "last words":
            return (ScriptedTurn(say=last_words(gold)),)
        return () if kind == "empty" else gold

    def other(self, row: Row) -> Row | None:
        """Return a row whose solution is another one than this one's; None where all are the same."""
        own = gold_turns(self.spec, row)
        others = (other for other in self.rows if other is not row)
        return next((other for other in others if gold_turns(self.spec, other) != own), None)


def _judge(report: DeepReport, probe: Probe, groups: list[Group]) -> None:
    has_gold = has_solution(probe.spec)
    played = {kind: [group.rollouts[i] for group in groups] for i, kind in enumerate(KINDS)}
    if not has_gold:
        played = {kind: played[kind] for kind in ("empty", "garbage")}
    elif probe.other(groups[0].row) is None:
        del played["near miss"]
    report.scores = {kind: _mean(rollouts) for kind, rollouts in played.items()}
    asking = _asking(probe)
    failures, of_scripts = _failures(played, asking)
    verdicts = _leaks(probe, groups, played) + _scores(report.scores) + (_differences(played) if has_gold else [])
    doubt = _doubt(probe, groups[0].row, asking)
    report.problems += failures + (verdicts if doubt is None else [])
    report.warnings += [] if doubt is None else [f"{problem}; {doubt}" for problem in (*of_scripts, *verdicts)]
    if (
        len(groups) > 1
        and probe.spec.user is None
        and not probe.seats
        and len({_words(probe, group.row) for group in groups}) == 1
    ):
        # Without tools a model cannot know which row it is asked about.
        same = "the prompt is the same for every row"
        if probe.uses_tools:
            report.warnings.append(f"{same}, which is right where the model finds out through tools, as in a game")
        else:
            report.problems.append(f"{same}: does the template leave out the question?")
    took: dict[str, float] = {}
    for rollout in (rollout for rollouts in played.values() for rollout in rollouts):
        for name, value in rollout.rewards.items():
            took[name] = max(took.get(name, 0.0), value.seconds)
    slow = {name: seconds for name, seconds in took.items() if seconds > SLOW_SECONDS}
    report.warnings += [f"reward {name} took {seconds:.0f} s" for name, seconds in slow.items()]


def _mean(rollouts: list[Rollout]) -> float | None:
    scores = [rollout.score for rollout in rollouts if rollout.score is not None]
    return fmean(scores) if scores else None


def _asking(probe: Probe) -> dict[str, str]:
    """Return the rewards that ask a server, each with its role; shipped ones ask in a form that scripts can answer."""
    own = [reward for reward in probe.grader.rewards if probe.spec.rewards[reward.name].fn not in shipped_rewards()]
    return {
        reward.name: role
        for reward in own
        for role in probe.spec.servers
        if {role, "roles"} & reward.function.parameters.keys()
    }


def _doubt(probe: Probe, row: Row, asking: Mapping[str, str]) -> str | None:
    """Why a low score may be the doing of a script that plays here; None where the rewards alone decide."""
    for name, role in asking.items():
        return (
            f"but `{role}`, which reward {name} asks, is played by a script here, and a script does not judge as a "
            "model does: look at a few rows with the real one (`hermes-rl play`)"
        )
    for seat in probe.seats:
        if seat.role != ALONE.role:
            return (
                f"but seat `{seat.name}` is played by a script here, and a script does not answer as a model does: "
                "look at a few rows with the real one (`hermes-rl play`)"
            )
    user = probe.spec.user
    if user is not None and user.simulated and len(user_script(probe.spec, row, 0).turns) <= len(user.stop[:1]):
        return (
            "but the simulated user is played by a script here, and the solution does not say what it says: give its "
            "words as `user:` among the solution's turns"
        )
    return None


def _failures(played: Mapping[str, list[Rollout]], asking: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return each failure once, with the kind of answer at which it came first; those of rewards that ask apart."""
    first: dict[str, str] = {}
    for kind, rollouts in played.items():
        for rollout in rollouts:
            if rollout.error is not None:
                first.setdefault(rollout.error, f"{kind} (row {rollout.key.row.key}): {rollout.error}")
    of_scripts = [error for error in first if any(f"reward {name!r}" in error for name in asking)]
    return [first[error] for error in first if error not in of_scripts], [first[error] for error in of_scripts]


def _leaks(probe: Probe, groups: list[Group], played: Mapping[str, list[Rollout]]) -> list[str]:
    for row in (group.row for group in groups):
        answer = last_words(gold_turns(probe.spec, row)).strip()
        # The answer stands there by itself; a single letter says nothing.
        if len(answer) < 2 or not re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", _words(probe, row)):
            return []
    if groups and "gold" in played and _alike(_mean(played["last words"]), _mean(played["gold"])):
        return ["the prompt holds the answer: saying what the solution says last is enough, and it stands there"]
    return []


def _words(probe: Probe, row: Row) -> str:
    return "\n".join(text_of(message.get("content")) for message in probe.prompt(row))


def _scores(scores: Mapping[str, float | None]) -> list[str]:
    known = {kind: score for kind, score in scores.items() if score is not None}
    gold = known.get("gold")
    if len(known) > 1 and len({round(score, 9) for score in known.values()}) == 1:
        return [f"every answer scores {next(iter(known.values())):g}, right or wrong: the reward is constant"]
    if gold is None:
        return []
    wrong = [text.format(score=known[kind], gold=gold) for kind, text in WRONG.items() if _alike(known.get(kind), gold)]
    better = [kind for kind, score in known.items() if score > gold + 1e-9 and kind in WRONG and not wrong]
    return wrong + [f"{kind} scores {known[kind]:g}, more than the solution ({gold:g})" for kind in better]


def _alike(score: float | None, gold: float | None) -> bool:
    return score is not None and gold is not None and score >= gold - NEAR * max(abs(gold), 1e-9)


def _differences(played: Mapping[str, list[Rollout]]) -> list[str]:
    """Rewards that gave another value to the same answer."""
    names = {
        name
        for first, again in zip(played["gold"], played["gold again"], strict=True)
        for name in first.rewards.keys() & again.rewards.keys()
        if first.rewards[name].value != again.rewards[name].value
    }
    return [
        f"reward {name} is not deterministic: it gave different values to the same answer" for name in sorted(names)
    ]
