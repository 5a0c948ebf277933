"""The provenance of a group: it holds for what was sampled, and names whatever was changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hermes_rl.agent.result import AgentResult
from hermes_rl.data.rows import Row
from hermes_rl.rollouts.rollout import Group, Rollout, RolloutKey, attach_provenance
from hermes_rl.runs.groups import group_lines
from hermes_rl.runs.process import ProcessSummary
from hermes_rl.runs.store import rollout_of, rollout_record
from hermes_rl.servers.base import ChatReply, LedgerEntry
from hermes_rl.stop_reasons import StopReason
from hermes_rl.tokens.transcript import SampledSpan, Step, TokenSequence, Transcript, WeightVersions, ids, numbers

ROW = Row(key="row", columns={}, index=0, digest="0" * 64)


def rollout(index: int, score: float, *, sequences: int = 1, versions: tuple[int, int] = (3, 4)) -> Rollout:
    """Two turns, in one sequence or in two."""
    transcript, replies, messages = Transcript(), [], [{"role": "user", "content": "hi"}]
    prompt = [1, 2]
    for turn in range(2):
        step = Step.from_lists(prompt, [10 + turn, 9], [-0.5, -0.25 - index], weights=WeightVersions(*versions))
        transcript.add(step)
        message = {"role": "assistant", "content": f"turn {turn}"}
        replies.append(ChatReply(message, "stop", {}, "m", "vllm", sampled=LedgerEntry.from_step(step)))
        messages.append(message)
        prompt = [1, 2, 10, 9, 5] if sequences == 1 else [1, 7]
    result = AgentResult(messages=messages, prompt_length=1, replies=replies, transcript=transcript, turns_used=2)
    made = Rollout(RolloutKey(ROW, "row:0", index, 2), 1, StopReason.FINISHED, result, score=score)
    made.sequences = transcript.sequences()
    return made


def group(*rollouts: Rollout) -> Group:
    return Group("row:0", ROW, list(rollouts))


def test_what_was_sampled_is_certified() -> None:
    proof = attach_provenance(group(rollout(0, 1.0), rollout(1, 0.0, sequences=2, versions=(2, 2))))
    assert proof.exact, proof.problems
    assert (proof.sampled, proof.trained, proof.turns, proof.sequences) == (8, 8, 4, 3)
    assert (proof.oldest, proof.newest) == (2, 4)
    assert proof.record()["exact"] is True


def _other_token(one: Rollout) -> None:
    assert one.sequences is not None
    one.sequences[0].ids[2] = 77


def _other_logprob(one: Rollout) -> None:
    assert one.sequences is not None and one.sequences[0].sampled is not None
    one.sequences[0].sampled[0] = -0.75


def _other_context(one: Rollout) -> None:
    assert one.sequences is not None
    one.sequences[0].ids[4] = 6


def _lost_turn(one: Rollout) -> None:
    assert one.sequences is not None
    first = one.sequences[0]
    one.sequences[0] = replace(first, spans=first.spans[:1], sampled=numbers(first.sampled[:2]))  # type: ignore[index]


def _doubled_turn(one: Rollout) -> None:
    assert one.sequences is not None
    one.sequences.append(one.sequences[0])


def _other_message(one: Rollout) -> None:
    assert one.result is not None
    one.result.messages[1] = {"role": "assistant", "content": "never said"}


def _added_message(one: Rollout) -> None:
    assert one.result is not None
    one.result.messages.append({"role": "assistant", "content": "never said"})


def _from_chat(one: Rollout) -> None:
    assert one.result is not None
    one.result.replies[0] = replace(one.result.replies[0], sampled=None)


def _no_logprobs(one: Rollout) -> None:
    assert one.sequences is not None
    one.sequences[0] = replace(one.sequences[0], sampled=None)


def _no_tokens(one: Rollout) -> None:
    one.sequences = None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_other_token, "turn 0 differ from the sampled ones"),
        (_other_logprob, "turn 0 differ from the sampled ones"),
        (_other_context, "the context of turn 1"),
        (_lost_turn, "2 turns were sampled"),
        (_doubled_turn, "2 turns were sampled"),
        (_other_message, "the assistant message 0"),
        (_added_message, "3 assistant messages of 2 answers"),
        (_from_chat, "a chat server does not report"),
        (_no_logprobs, "has no log-probabilities"),
        (_no_tokens, "its tokens are not known"),
    ],
)
def test_whatever_was_changed_is_named(change: Any, problem: str) -> None:
    changed = rollout(1, 0.0)
    change(changed)
    proof = attach_provenance(group(rollout(0, 1.0), changed))
    assert not proof.exact
    assert problem in proof.problems[0]
    assert proof.problems[0].startswith("row:0-1: ")


def test_reloaded_group_gets_the_same_provenance() -> None:
    kept = [rollout(0, 1.0), rollout(1, 0.0, sequences=2)]
    back = [rollout_of(rollout_record(one), one.key) for one in kept]
    assert attach_provenance(group(*back)) == attach_provenance(group(*kept))
    assert [one.sequences for one in back] == [one.sequences for one in kept]


def _sampled_with(one: Rollout, *temperatures: float) -> Rollout:
    assert one.result is not None
    given = [{"temperature": value} for value in temperatures]
    one.result.replies = [
        replace(reply, sampling=value) for reply, value in zip(one.result.replies, given, strict=True)
    ]
    return one


def test_provenance_lists_every_sampling_setting_and_survives_reloading() -> None:
    alike = group(_sampled_with(rollout(0, 1.0), 1.0, 1.0), _sampled_with(rollout(1, 0.0), 1.0, 1.0))
    assert attach_provenance(alike).record()["sampling"] == ({"temperature": 1.0},)
    assert alike.rollouts[0].policy["sampling"] == {"temperature": 1.0}
    mixed = [_sampled_with(rollout(0, 1.0), 1.0, 1.0), _sampled_with(rollout(1, 0.0), 0.5, 1.0)]
    assert attach_provenance(group(*mixed)).sampling == ({"temperature": 1.0}, {"temperature": 0.5})
    back = [rollout_of(rollout_record(one), one.key) for one in mixed]
    assert attach_provenance(group(*back)) == attach_provenance(group(*mixed))
    assert attach_provenance(group(rollout(0, 1.0))).sampling == ()


def test_several_sequences_go_as_layers_of_exactly_the_group() -> None:
    first, second = group_lines(group(rollout(0, 1.0), rollout(1, 0.0, sequences=2)), {"temperature": 1.0})
    assert [len(layer["tokens"]) for layer in (first, second)] == [2, 2]
    assert first["overrides"] is None
    assert second["overrides"] == [{"set_advantage_to_zero": True}, {}]
    assert (second["tokens"][0], second["masks"][0], second["inference_logprobs"][0]) == ([1], [-100], [1.0])
    assert second["scores"] == [1.0, 0.0]
    assert second["masks"][1] == [-100, -100, 11, 9]
    assert second["messages"] is None


def test_advantages_of_turns_are_bounded_however_close_the_scores_are() -> None:
    one, other = rollout(0, 0.5), rollout(1, 0.5005)
    one.credit, other.credit = (1.0, 0.0), (0.0, 1.0)
    assert group(one, other).turn_advantages() == [pytest.approx([0.0, -2.0]), pytest.approx([0.0, 2.0])]
    one.credit = other.credit = (0.5, 0.5)
    assert group(one, other).turn_advantages() == [pytest.approx([-1.0] * 2), pytest.approx([1.0] * 2)]


def test_masked_tokens_do_not_count_as_trained() -> None:
    of = group(rollout(0, 1.0), rollout(1, 0.0))
    of.rollouts[1].masked, of.provenance = True, attach_provenance(of)
    summary = ProcessSummary()
    summary.count(of)
    assert (summary.sampled, summary.trained) == (8, 4)


def test_masked_rollout_without_tokens_is_marked() -> None:
    of = group(rollout(0, 1.0), rollout(1, 0.0))
    for one in of.rollouts:
        one.sequences = None
    of.rollouts[1].masked = True
    (line,) = group_lines(of, {})
    assert line["overrides"] == [{}, {"set_advantage_to_zero": True}]


def test_credit_of_turns_becomes_advantages_of_tokens() -> None:
    one, other = rollout(0, 1.0), rollout(1, 0.0)
    assert group(one, other).turn_advantages() is None
    one.credit = (1.0, 0.0)
    assert group(one, other).turn_advantages() == [[2.0, 0.0], [-1.0, -1.0]]
    (layer,) = group_lines(group(one, other), {})
    assert layer["advantages"] == [[0.0, 0.0, 2.0, 2.0, 0.0, 0.0, 0.0], [0.0, 0.0, -1.0, -1.0, 0.0, -1.0, -1.0]]


def test_sequences_take_few_bytes() -> None:
    line = TokenSequence(ids(range(1000)), (SampledSpan(0, 0, 1000),), numbers([-0.123456789] * 1000))
    assert line.sampled is not None
    assert line.ids.itemsize * len(line.ids) + line.sampled.itemsize * len(line.sampled) <= 16 * len(line)
    assert attach_provenance(group()).exact


@pytest.mark.parametrize(
    "spans", [(SampledSpan(0, 0, 9),), (SampledSpan(0, 0, 2), SampledSpan(1, 1, 3)), (SampledSpan(0, 2, 1),)]
)
def test_spans_that_cannot_be_are_refused(spans: tuple[SampledSpan, ...]) -> None:
    with pytest.raises(ValueError, match="the span"):
        TokenSequence(ids([1, 2, 3]), spans)
