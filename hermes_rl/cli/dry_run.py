"""`hermes-rl run … --dry-run`: print the plan of a run; `hermes_rl.analysis.dry_run` computes it."""

from __future__ import annotations

from collections.abc import Iterator

from hermes_rl.analysis.dry_run import DryRun, MeasuredRole
from hermes_rl.cli.screen import dollars_by_role
from hermes_rl.terminal_text import pluralize

PROMPT_CHARACTERS = 400
"""Maximum number of characters shown of a prompt."""


def plan_lines(plan: DryRun) -> Iterator[str]:
    """Yield the lines that describe the plan of a run."""
    agent = plan.spec.agent_for(plan.mode)
    yield from plan.notes
    yield f"{plan.spec.name} {plan.mode}, a dry run: it runs and writes nothing"
    yield f"run directory: {plan.directory}" + ("" if plan.exists else " (new)")
    rows = "rows without end" if plan.rows is None else pluralize(plan.rows, "row")
    if plan.groups is None:
        yield f"{rows}; groups of {plan.size} until the trainer has had its steps"
    else:
        all_of_them = pluralize(plan.groups * plan.size, "rollout")
        yield f"{rows}; {pluralize(plan.groups, 'group')} of {plan.size}: {all_of_them}"
    yield from _existing_lines(plan)
    if plan.play == 0:
        yield "no rollouts are left to run"
    elif plan.play is not None:
        yield f"to run: {pluralize(plan.play, 'rollout')}, at most {plan.play * agent.max_turns} model calls"
    if (memory := plan.spec.describe_processes(plan.mode)) is not None:
        yield f"memory: {memory}"
    yield f"tokenizer: {plan.tokenizer}"
    for prompt in plan.prompts:
        text = prompt.text or "\n".join(str(message.get("content")) for message in prompt.request.messages)
        size = f"{len(prompt.ids)} tokens" if prompt.ids else f"{len(text)} characters"
        prompt_text = " ".join(str(prompt.request.messages[-1].get("content")).split())
        shown = prompt_text[:PROMPT_CHARACTERS] + ("…" if len(prompt_text) > PROMPT_CHARACTERS else "")
        yield f"prompt of row {prompt.row.key}: {size}: {shown}"
    yield from _too_long(plan)
    yield from _cost_lines(plan)


def _existing_lines(plan: DryRun) -> Iterator[str]:
    if plan.new:
        yield f"{plan.new}: starting a new run; the earlier run remains"
    if not plan.exists:
        return
    yield f"reused from the earlier run: {pluralize(plan.kept_rollouts, 'rollout')}"
    if plan.retried_rollouts:
        yield f"to retry, because infrastructure failed: {pluralize(plan.retried_rollouts, 'rollout')}"
    if plan.rejudged:
        yield f"to grade again, because rewards changed: {', '.join(plan.rejudged)}"
    elif plan.rescored:
        yield "to score again, because weights, `score` or `on_stop` changed"


def _too_long(plan: DryRun) -> Iterator[str]:
    """Yield a warning if sequences are longer than the trainer accepts."""
    max_length = plan.spec.serve.max_token_length
    if plan.mode != "serve" or max_length is None:
        return
    policy = None if plan.measured is None else plan.measured.roles["policy"]
    if policy is not None and plan.measured is not None:  # a rollout's last call is longer than its mean call
        size = (policy.prompt_tokens + policy.completion_tokens) / max(1.0, plan.measured.turns)
        size_text = f"rollouts have {size:.0f} tokens and more"
    else:
        size = max((len(prompt.ids or ()) for prompt in plan.prompts), default=0)
        size_text = f"a prompt has {size} tokens already"
    if size >= max_length:
        becomes = {"drop": "not sent", "truncate": "cut", "mask": "not trained on"}[plan.spec.serve.on_too_long]
        yield f"WARNING: {size_text}, and serve.max_token_length is {max_length}: what is longer is {becomes}"


def _cost_lines(plan: DryRun) -> Iterator[str]:
    measured = plan.measured
    if measured is None:
        agent = plan.spec.agent_for(plan.mode)
        bound = f"at most {agent.max_tokens} completion tokens each" if agent.max_tokens else "as the server bounds it"
        yield f"a rollout: at most {pluralize(agent.max_turns, 'call')}, {bound}; --sample 5 measures what it takes"
        return
    policy = measured.roles["policy"]
    yield (
        f"a rollout, measured on {pluralize(measured.count, 'rollout')} of {measured.source}: {measured.turns:.3g} "
        f"{'call' if measured.turns == 1 else 'calls'}, {_describe_tokens(policy)}, {measured.seconds:.3g} s"
    )
    if measured.played is None and plan.mode == "serve":
        yield "WARNING: each measured group is uniform or excluded, so a trainer receives none of them"
    if not plan.play:
        return
    if measured.played is None:
        yield "the run would keep none of them, so the number of rollouts to run is unknown"
        return
    if measured.played > 1:
        yield f"the run executes {measured.played:.3g} for each that it keeps: others fail, or are excluded"
    yield f"the rollouts use about {_describe_use(policy, plan.played)}"
    yield f"disk: about {measured.bytes * plan.played / 1e6:,.1f} MB; {plan.free / 1e9:,.1f} GB are free"
    for role, usage in measured.roles.items():
        if role != "policy":
            yield f"{role}: about {_describe_use(usage, plan.played)}"
    known_costs = {role: cost for role, cost in plan.costs.items() if cost is not None}
    if "policy" not in known_costs:
        yield "cost: unknown; set servers.policy.prices or pass --prices FILE"
        return
    yield f"cost: about {dollars_by_role(known_costs)}"
    for role in plan.costs.keys() - known_costs.keys():
        yield f"cost: excludes the {role}, whose prices are unknown; set servers.{role}.prices"


def _describe_use(usage: MeasuredRole, rollouts: float) -> str:
    return f"{usage.calls * rollouts:,.0f} calls, {_describe_tokens(usage, rollouts)}"


def _describe_tokens(usage: MeasuredRole, rollouts: float = 1) -> str:
    comma = "," if rollouts != 1 else ""
    prompt, completion = usage.prompt_tokens * rollouts, usage.completion_tokens * rollouts
    return f"{prompt:{comma}.0f} prompt and {completion:{comma}.0f} completion tokens"
