"""Define the stop reasons of a rollout, and the table of their causes.

The table decides which rollouts are graded (caused by the policy), which are retried (infrastructure failures), and the
value of `AgentResult.finished_naturally`. A spec may change the handling of a stop reason of the policy under
`on_stop:`; an infrastructure failure never gives a score.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class StopReason(StrEnum):
    """Stop reason of a rollout: the last event; the value is its name in specs and in records."""

    FINISHED = "finished"
    MAX_TURNS = "max_turns"
    TOKEN_BUDGET = "token_budget"
    LENGTH = "length"
    TIMEOUT = "timeout"
    EMPTY = "empty"
    REFUSED = "refused"
    SANDBOX_KILLED = "sandbox_killed"
    USER_STOP = "user_stop"
    USER_TURNS = "user_turns"
    ENVIRONMENT_DONE = "environment_done"
    ENVIRONMENT_ERROR = "environment_error"
    STEP_FAILED = "step_failed"
    TOOL_ERRORS = "tool_errors"
    PROGRAM_ABORTED = "program_aborted"
    UNTRAINED = "untrained"
    SERVER_FAILURE = "server_failure"
    SANDBOX_FAILURE = "sandbox_failure"
    TOOL_SERVER_FAILURE = "tool_server_failure"
    REWARD_FAILURE = "reward_failure"
    JUDGE_FAILURE = "judge_failure"
    ROW_FAILURE = "row_failure"
    CANCELLED = "cancelled"
    STALE = "stale"

    @property
    def rule(self) -> Rule:
        """Description, cause and handling of the stop reason."""
        return RULES[self]

    @property
    def graded(self) -> bool:
        """True if the policy caused the stop reason, so that its rewards are computed."""
        return self.rule.caused_by_policy

    @property
    def finished_naturally(self) -> bool:
        """True if the model itself, or its environment, ended the conversation."""
        return self in {StopReason.FINISHED, StopReason.USER_STOP, StopReason.ENVIRONMENT_DONE}


class Rule(NamedTuple):
    """One row of the table: stop reasons `caused_by_policy` are graded, infrastructure failures never are.

    `retried`: the rollout is retried in a fresh sandbox; if its retries are exhausted, its group is dropped and
    counted.
    """

    description: str
    caused_by_policy: bool
    retried: bool = False
    of_program: str = ""
    """Description for a rollout that an agent program ran, if it differs."""
    advice: str = ""
    """What to do if most rollouts of a run stop for this reason; empty if it is not a problem."""

    @property
    def events(self) -> str:
        """Both descriptions."""
        return "; ".join(filter(None, (self.description, self.of_program)))

    def event(self, *, program: bool) -> str:
        """Return the description for a rollout of an agent program, or of the built-in loop."""
        return self.of_program if program and self.of_program else self.description


def _policy_caused(description: str, of_program: str = "", advice: str = "") -> Rule:
    return Rule(description, caused_by_policy=True, of_program=of_program, advice=advice)


def _infrastructure(description: str, *, retried: bool = True, advice: str = "") -> Rule:
    return Rule(description, caused_by_policy=False, retried=retried, advice=advice)


RULES: Mapping[StopReason, Rule] = {
    StopReason.FINISHED: _policy_caused(
        "it replied without calling a tool", of_program="an agent program exited with status 0 after a reply"
    ),
    StopReason.MAX_TURNS: _policy_caused(
        "`agent.max_turns` model calls were made, including refused and malformed tool calls",
        advice="raise agent.max_turns",
    ),
    StopReason.TOKEN_BUDGET: _policy_caused(
        "`agent.max_trajectory_tokens`, or the context of the model or of its simulated user, was used up",
        advice="raise agent.max_trajectory_tokens, or take a model with a longer context",
    ),
    StopReason.LENGTH: _policy_caused("a turn was cut at `agent.max_tokens`", advice="raise agent.max_tokens"),
    StopReason.TIMEOUT: _policy_caused(
        "`agent.timeout` or `agent.task_timeout` seconds of working time, or `agent.deadline` seconds of wall-clock"
        " time were used up",
        advice="raise agent.timeout, agent.task_timeout or agent.deadline",
    ),
    StopReason.EMPTY: _policy_caused(
        "it replied with no text and no tool call",
        advice="the server's parser of reasoning or tool calls may keep all of the text",
    ),
    StopReason.REFUSED: _policy_caused(
        "the server reported a refusal or a content filter", advice="the server's filter refuses what is said here"
    ),
    StopReason.SANDBOX_KILLED: _policy_caused(
        "its own commands hit a limit of the sandbox, or killed it", advice="raise sandbox.limits or sandbox.lifetime"
    ),
    StopReason.USER_STOP: _policy_caused(
        "the simulated user sent a stop phrase, or the policy's message left it without a reply"
    ),
    StopReason.USER_TURNS: _policy_caused(
        "`user.max_turns` turns of the simulated user were used up without a stop phrase", advice="raise user.max_turns"
    ),
    StopReason.ENVIRONMENT_DONE: _policy_caused(
        "a tool, the state, a user implemented in code, or the schedule of several agents reported that it is done"
    ),
    StopReason.ENVIRONMENT_ERROR: _policy_caused(
        "the spec's code for the user or the schedule raised, or a file or command of a user turn failed",
        advice="correct that code",
    ),
    StopReason.STEP_FAILED: _policy_caused(
        "the rewards of a step were below the `min_reward` of the next user turn",
        advice="lower the `min_reward` of these user turns",
    ),
    StopReason.TOOL_ERRORS: _policy_caused(
        "`agent.max_tool_errors` tool calls were errors",
        advice="raise agent.max_tool_errors, or see whether the model knows these tools",
    ),
    StopReason.PROGRAM_ABORTED: _policy_caused(
        "its agent program ended without a request to the model, after a request without a response, or after a tool"
        " call with a status other than 0",
        advice="see what the program printed",
    ),
    StopReason.UNTRAINED: _policy_caused(
        "less than `agent.min_trained_share` of the tokens sampled for its agent program is trained on",
        advice="lower agent.min_trained_share, or see why the program changes what was sampled",
    ),
    StopReason.SERVER_FAILURE: _infrastructure(
        "a model server gave no usable reply in all attempts", advice="see run.log, and ask hermes-rl doctor SPEC"
    ),
    StopReason.SANDBOX_FAILURE: _infrastructure(
        "a sandbox could not start, its setup failed, or its backend was lost",
        advice="see run.log, and ask hermes-rl doctor SPEC",
    ),
    StopReason.TOOL_SERVER_FAILURE: _infrastructure(
        "the server of a tool was lost, or a proxy responded instead of it",
        advice="see run.log, and start the tool server by hand",
    ),
    StopReason.REWARD_FAILURE: _infrastructure(
        "a reward raised, returned None although it counts, or was not finite",
        advice="correct that reward; hermes-rl validate SPEC --deep tries it",
    ),
    StopReason.JUDGE_FAILURE: _infrastructure(
        "a judge failed, or its verdict could not be read", advice="see run.log, and ask the judge's server by hand"
    ),
    StopReason.ROW_FAILURE: _infrastructure(
        "its row cannot be used: a template fails for it, or its prompt does not fit the model's context or is refused"
        " by the server, which accepts another one",
        retried=False,
        advice="correct the rows; hermes-rl validate SPEC and render SPEC show what they give",
    ),
    StopReason.CANCELLED: _infrastructure("the run ended, or its group was dropped, before it finished", retried=False),
    StopReason.STALE: _infrastructure("the weights that sampled it are older than `serve.max_staleness`"),
}
"""Rules for grading each stop reason. A wrong tool call does not end a rollout."""


def stop_reason_named(name: str) -> StopReason | None:
    """Return the stop reason of this name, or None if there is none, as in a record of another version."""
    return next((stop_reason for stop_reason in StopReason if stop_reason == name), None)


INFRASTRUCTURE_FAILURES = frozenset(stop_reason for stop_reason, rule in RULES.items() if not rule.caused_by_policy)
"""Stop reasons caused by infrastructure: no score, retries, then the group is dropped and replaced."""

RETRIES_EXHAUSTED = "retries_exhausted"
"""Key of `on_stop:` for a group with a member whose retries were exhausted by infrastructure failures: ``drop``, the
group is dropped, or ``worst``, the member counts as the worst of its group and is not trained on.
"""

POLICY_STOP_REASONS = tuple(stop_reason for stop_reason in StopReason if stop_reason not in INFRASTRUCTURE_FAILURES)
"""Stop reasons that a spec may treat differently under `on_stop:`."""


def table() -> str:
    """Return the rules as a Markdown table, for the documentation."""
    lines = ["| stop reason | event | cause | graded | retried |", "|---|---|---|---|---|"]
    for stop_reason, rule in RULES.items():
        policy = rule.caused_by_policy
        cause, graded = ("policy", "yes, unless `on_stop` changes it") if policy else ("infrastructure", "never")
        lines.append(f"| `{stop_reason}` | {rule.events} | {cause} | {graded} | {'yes' if rule.retried else 'no'} |")
    return "\n".join(lines)
