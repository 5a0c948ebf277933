"""`hermes-rl run … --dry-run` in words; what a run would do is found out by `hermes_rl.reading.dry_run`."""

from __future__ import annotations

from collections.abc import Iterator

from hermes_rl.cli.screen import dollars
from hermes_rl.reading.dry_run import DryRun
from hermes_rl.visible import counted

SHOWN = 400
"""Characters of a prompt."""


def plan_lines(found: DryRun) -> Iterator[str]:
    """Yield what a run would do, in words."""
    yield from found.notes
    yield f"{found.name} {found.mode}, a dry run: it plays and writes nothing"
    yield f"run directory: {found.directory}" + ("" if found.exists else " (new)")
    rows = "rows without end" if found.rows is None else counted(found.rows, "row")
    if found.groups is None:
        yield f"{rows}; groups of {found.size} until the trainer has had its steps"
    else:
        all_of_them = counted(found.groups * found.size, "rollout")
        yield f"{rows}; {counted(found.groups, 'group')} of {found.size}: {all_of_them}"
    yield from _earlier(found)
    if found.play == 0:
        yield "nothing is left to play"
    elif found.play is not None:
        yield f"to play: {counted(found.play, 'rollout')}, at most {found.play * found.max_turns} model calls"
    yield f"tokenizer: {found.tokenizer}"
    for prompt in found.prompts:
        text = prompt.text or "\n".join(str(message.get("content")) for message in prompt.request.messages)
        size = f"{len(prompt.ids)} tokens" if prompt.ids else f"{len(text)} characters"
        words = " ".join(str(prompt.request.messages[-1].get("content")).split())
        yield f"prompt of row {prompt.row.key}: {size}: {words[:SHOWN]}{'…' if len(words) > SHOWN else ''}"
    yield from _takes(found)


def _earlier(found: DryRun) -> Iterator[str]:
    if found.new:
        yield f"{found.new}: all rollouts are played anew; what is there stays"
    if not found.exists:
        return
    yield f"kept of what is there: {counted(found.kept, 'rollout')}"
    if found.again:
        yield f"played again, because infrastructure failed: {counted(found.again, 'rollout')}"
    if found.rejudged:
        yield f"judged anew: what is there, by {', '.join(found.rejudged)}, which changed"
    elif found.rescored:
        yield "scored anew: what is there, because weights, `score` or `endings` changed"


def _takes(found: DryRun) -> Iterator[str]:
    one = found.measured
    if one is None:
        bound = f"at most {found.max_tokens} completion tokens each" if found.max_tokens else "as the server bounds it"
        yield f"a rollout: at most {counted(found.max_turns, 'call')}, {bound}; --sample 5 measures what it takes"
        return
    calls = f"{one.turns:.3g} {'call' if one.turns == 1 else 'calls'}"
    yield (
        f"a rollout, measured on {counted(one.count, 'rollout')} of {one.source}: {calls}, "
        f"{one.prompt_tokens:.0f} prompt and {one.completion_tokens:.0f} completion tokens, {one.seconds:.3g} s"
    )
    if not found.play:
        return
    if one.played is None:
        yield "none of them is one that the run would keep, so how many are played for those is not known"
        return
    if one.played > 1:
        yield f"for each that the run keeps {one.played:.3g} are played: others fail, or are left out"
    tokens = (
        f"{one.prompt_tokens * found.played:,.0f} prompt and {one.completion_tokens * found.played:,.0f} "
        "completion tokens"
    )
    yield f"to play takes about {one.turns * found.played:,.0f} calls, {tokens}"
    yield f"disk: about {one.bytes * found.played / 1e6:,.1f} MB; {found.free / 1e9:,.1f} GB are free"
    for role, asked in one.roles.items():
        if role != "policy":
            yield (
                f"{role}: about {asked.prompt_tokens * found.played:,.0f} prompt and "
                f"{asked.completion_tokens * found.played:,.0f} completion tokens"
            )
    known = {role: cost for role, cost in found.costs.items() if cost is not None}
    if "policy" not in known:
        yield "cost: not known; servers.policy.prices or --prices FILE says what tokens cost"
        return
    each = ", ".join(f"{role} {dollars(cost)}" for role, cost in known.items()) if len(known) > 1 else ""
    yield f"cost: about {dollars(sum(known.values()))}" + (f" ({each})" if each else "")
    for role in found.costs.keys() - known.keys():
        yield f"cost: without the {role}'s, which is not known; servers.{role}.prices says what tokens cost"
