"""`open_env`: rows, plays and groups, with a policy that is a function, and what is certain about them."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hermes_rl
from hermes_rl import Policy, Sampled, Sampling, StopReason, open_env
from hermes_rl.errors import UserError
from hermes_rl.runs.store import RolloutStore
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from hermes_rl.tools.base import ToolRuntime, find_runtime
from hermes_rl.tools.catalogue import toolkit_of
from tests.api.summing import COMPARED, END, TEXT, TOKENIZER, Sampler, sampled, spec_in, trained, write
from tests.env.test_token_exact import tokenizer_folder
from tests.servers.token_policy import TokenPolicy

TERMINAL = """
dataset: {items: [{word: hello}]}
prompt: {user: "Say {{ word }}."}
toolsets: [terminal]
rewards: {right: {fn: exact_match, args: {target: "{{ word }}"}}}
"""


# ---------------------------------------------------------------------- rows


async def test_judge_grades_single_rollouts_unless_its_fallback_compares_groups(tmp_path: Path) -> None:
    args = 'rubric: "Names {{ a + b }}.", reference: "{{ a + b }}"'
    judged = TEXT.replace("{right:", f"{{judged: {{fn: llm_judge, args: {{{args}}}}}, right:")
    judged += "servers: {judge: {type: scripted}}\n"
    async with open_env(spec_in(tmp_path, judged)) as env:
        assert env.comparing == []
        row = env.rows()[0]
        alone = await env.run(row, Sampler().policy(), index=2, size=4)
        assert (alone.key.index, alone.rewards["judged"].value) == (2, 1.0)
        group = await env.run_group(row, 2, Sampler(wrong=1.0).policy())
        assert [one.rewards["judged"].value for one in group.rollouts] == [0.0, 0.0]
    async with open_env(spec_in(tmp_path, judged.replace("rubric:", "fallback: keyword_overlap, rubric:"))) as env:
        assert env.comparing == ["rewards.judged.args.fallback"]
        with pytest.raises(UserError, match=r"rewards.judged.args.fallback compares the members of a group"):
            await env.run(row, Sampler().policy(), index=2, size=4)


async def test_rows_have_keys_prompts_and_tools(tmp_path: Path) -> None:
    async with open_env(spec_in(tmp_path)) as env:
        rows = list(env.rows())
        assert [env.row(row.key) for row in rows] == rows
        assert env.prompt(rows[1])[-1] == {"role": "user", "content": "What is 3 plus 4?"}
        assert [tool["function"]["name"] for tool in env.tools(rows[0].key)] == ["add"]
        assert env.comparing == []
        with pytest.raises(UserError, match="there is no row with the key 'nothing'"):
            env.row("nothing")
        with pytest.raises(UserError, match="splits are train and eval"):
            env.rows("test")
        with pytest.raises(UserError, match="no rows for evaluation"):
            env.rows("eval")
        with pytest.raises(UserError, match="a row is one of"):
            env.prompt(3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="is not open"):
        env.rows()


async def test_rows_without_end_are_searched_for_a_key_within_bounds(tmp_path: Path) -> None:
    generator = 'dataset: {generator: "rows.py:numbers", key: n}'
    (tmp_path / "rows.py").write_text(
        "import itertools\n\n\ndef numbers(*, seed, split):\n    return ({'n': n} for n in itertools.count())\n"
    )
    text = f'{generator}\nprompt: {{user: "{{{{ n }}}}"}}\nrewards: {{r: {{fn: exact_match, args: {{target: a}}}}}}\n'
    async with open_env(spec_in(tmp_path, text)) as env:
        assert env.rows().length is None
        assert env.row("17").columns["n"] == 17
        with pytest.raises(UserError, match="no row with the key"):
            env.row("10000000")


async def test_a_path_and_a_shipped_name_are_specs_too(tmp_path: Path) -> None:
    spec_in(tmp_path)
    (tmp_path / "sums.yaml").write_text(TEXT)
    async with open_env(tmp_path / "sums.yaml") as env:
        assert len(env.rows()) == 4
    async with open_env("terminal-files") as env:
        assert (await env.run(env.rows()[0])).error is None, "the spec's own policy plays"
    with pytest.raises(UserError, match="no-such-spec"):
        open_env("no-such-spec")


# ---------------------------------------------------------------------- one rollout


async def test_runs_have_the_same_seeds_only_if_repeatable(tmp_path: Path) -> None:
    async def program(**how: Any) -> list[tuple[str, int | None]]:
        async with open_env(spec_in(tmp_path), **how) as env:
            row, policy = env.rows()[0], Sampler().policy()
            played = [await env.run(row, policy), await env.run(row, policy), await env.run(row, policy, "g")]
            played += [await env.run(row, policy, "g")]
            for _ in range(2):
                group = await anext(env.groups(2, policy, rows=[row]))
                played += group.rollouts
            return [(rollout.id, rollout.seed) for rollout in played]

    first, second = await program(repeatable=True), await program(repeatable=True)
    assert first == second
    assert len(set(first)) == len({seed for _, seed in first}) == len(first), "no play is another one's copy"
    assert not set(first) & set(await program()), "processes of one trainer sample differently otherwise"


async def test_a_repeatable_program_is_answered_from_its_record(tmp_path: Path) -> None:
    samplers = Sampler(), Sampler()
    for sampler in samplers:
        async with open_env(spec_in(tmp_path), record=tmp_path / "run", repeatable=True) as env:
            rollouts = [await env.run(row, sampler.policy()) for row in list(env.rows())[:2] for _ in range(2)]
            assert len({rollout.id for rollout in rollouts}) == 4
    assert samplers[0].asked
    assert not samplers[1].asked


async def test_a_rollout_has_score_messages_and_exact_tokens(tmp_path: Path) -> None:
    sampler = Sampler(version=3)
    async with open_env(spec_in(tmp_path)) as env:
        rollout = await env.run(env.rows()[0], sampler.policy())
    assert (rollout.score, rollout.stop_reason, rollout.error, rollout.turns) == (1.0, StopReason.FINISHED, None, 2)
    assert rollout.rewards["right"].value == 1.0
    assert [message["role"] for message in rollout.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert rollout.sequences is not None
    assert len(rollout.sequences) == 1
    [example] = rollout.examples(one=True)
    assert example.prompt_ids == sampler.asked[0][0]
    assert example.prompt_ids + example.response_ids == sampler.asked[1][0] + list(sampler.answers[1].ids)
    assert example.weights == (3, 3)
    assert trained([rollout]) == sampled(sampler.answers)


async def test_sampling_argument_overrides_the_settings_of_the_spec(tmp_path: Path) -> None:
    sampler = Sampler()
    async with open_env(spec_in(tmp_path)) as env:
        row = env.rows()[0]
        await env.run(row, sampler.policy(), sampling={"temperature": 0.3, "top_p": 0.9, "max_turns": 1})
        [(_, asked)] = sampler.asked
        assert (asked.temperature, asked.top_p, asked.max_tokens) == (0.3, 0.9, 200)
        ended = await env.run(row, sampler.policy(), sampling={"max_tokens": 5})
        assert sampler.asked[-1][1].max_tokens == 5
        assert ended.error is None
        with pytest.raises(UserError, match="no setting 'temprature'; did you mean `temperature`"):
            await env.run(row, sampler.policy(), sampling={"temprature": 0.3})
        with pytest.raises(UserError, match=r"sampling\.temperature: "):
            await env.run(row, sampler.policy(), sampling={"temperature": -1.0})
        with pytest.raises(UserError, match="sampling: there is no setting 'program'"):
            await env.run(row, sampler.policy(), sampling={"program": {"command": "true"}})


async def test_mistakes_of_the_user_are_said(tmp_path: Path) -> None:
    async with open_env(spec_in(tmp_path)) as env:
        row = env.rows()[0]
        with pytest.raises(UserError, match=r"servers\.policy is missing"):
            await env.run(row)
        with pytest.raises(UserError, match="expected a policy made with"):
            await env.run(row, Sampler())  # type: ignore[arg-type]
        with pytest.raises(UserError, match="members from 0 to 1, not 2"):
            await env.run(row, Sampler().policy(), index=2, size=2)
        for size in (0, 10**9, "2"):
            with pytest.raises(UserError, match="at least 1 rollout"):
                await env.run_group(row, size, Sampler().policy())  # type: ignore[arg-type]
        for retries in (-1, "x"):
            with pytest.raises(UserError, match=f"retries is at least 0, not {retries!r}"):
                await env.run(row, Sampler().policy(), retries=retries)  # type: ignore[arg-type]
        for wrong in (["a"], 5, "\ud800"):
            with pytest.raises(UserError, match=r"group is .*, and not a text"):
                await env.run(row, Sampler().policy(), group=wrong)  # type: ignore[arg-type]
        for settings in (5, {5: 1}, "max_turns"):
            with pytest.raises(UserError, match=r"sampling is .*: write settings of `agent`"):
                await env.run(row, Sampler().policy(), sampling=settings)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="unknown split 'evaluate'"):
            await env.run(row, Sampler().policy(), split="evaluate")
        with pytest.raises(UserError, match="there is no row with the key 5"):
            env.row(5)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="renderer is 5: write its name"):
            await env.run(row, Policy.sampling(Sampler(), None, renderer=5))  # type: ignore[arg-type]
        with pytest.raises(UserError, match="at least 1 rollout"):
            env.groups(0)

        async def pair(ids: list[int], sampling: Sampling) -> Any:
            return ids, [0.0]

        with pytest.raises(UserError, match=r"return hermes_rl\.Sampled"):
            await env.run(row, Policy.sampling(pair, None))
        with pytest.raises(UserError, match="opened once"):
            await env.open()


async def test_arrays_are_taken_for_lists(tmp_path: Path) -> None:
    sampler = Sampler()

    async def arrays(ids: list[int], sampling: Sampling) -> Sampled:
        found = await sampler(ids, sampling)
        return Sampled(np.array(found.ids), np.array(found.logprobs))  # type: ignore[arg-type]

    async with open_env(spec_in(tmp_path)) as env:
        rollout = await env.run(env.rows()[0], Policy.sampling(arrays, None))
    assert trained([rollout]) == sampled(sampler.answers)


async def test_a_tokenizer_object_and_a_renderer_may_be_given(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(small_tokenizer_path()))
    sampler = Sampler()
    async with open_env(spec_in(tmp_path)) as env:
        rollout = await env.run(env.rows()[0], sampler.policy(tokenizer=theirs, renderer="template"))
        assert trained([rollout]) == sampled(sampler.answers)
        with pytest.raises(UserError, match="a tokenizer is a hub name"):
            await env.run(env.rows()[0], sampler.policy(tokenizer=3))


async def test_a_context_that_is_full_ends_the_rollout_by_the_policys_doing(tmp_path: Path) -> None:
    sampler = Sampler()
    async with open_env(spec_in(tmp_path)) as env:
        first = await env.run(env.rows()[0], sampler.policy())
        size = len(first.examples()[0].prompt_ids) + len(sampler.answers[0].ids)
        ended = await env.run(env.rows()[0], sampler.policy(context=size + 1))
    assert (ended.stop_reason, ended.error, ended.score) == (StopReason.TOKEN_BUDGET, None, 0.0)


async def test_credit_per_turn_reaches_a_loop_of_ones_own_token_by_token(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, TEXT.replace("{right:", '{steps: {fn: "steps.py:steps"}, right:'))
    (tmp_path / "steps.py").write_text("def steps(result) -> list:\n    return [1.0, 0.0]\n")
    async with open_env(spec) as env:
        group = await env.run_group(env.rows()[0], 2, Sampler().policy())
    per_turn = group.turn_advantages()
    assert per_turn is not None
    assert per_turn[0][0] > 0 > per_turn[0][1]
    (example,) = group.rollouts[0].examples()
    values = example.of_turns(per_turn[0])
    assert len(values) == len(example.response_ids)
    assert {value for value, kept in zip(values, example.mask, strict=True) if kept} == set(per_turn[0])
    assert [value != 0 for value in values] == [bool(kept) for kept in example.mask]


async def test_no_sequence_is_longer_than_the_bound_of_a_trajectory(tmp_path: Path) -> None:
    async def chat(messages: list[dict[str, Any]], tools: Any) -> Any:
        return "word " * 300

    async with open_env(spec_in(tmp_path)) as env:
        policy, row = Policy.chat(chat, tokenizer=small_tokenizer_path()), env.rows()[0]
        free = (await env.run(row, policy)).examples()[0]
        size = len(free.prompt_ids)
        rollout = await env.run(row, policy, sampling={"max_trajectory_tokens": size + 50})
        (example,) = rollout.examples()
        assert example.prompt_ids + example.response_ids == (free.prompt_ids + free.response_ids)[: size + 50]
        refused = await env.run(row, policy, sampling={"max_trajectory_tokens": size - 20}, retries=0)
        assert (refused.score, refused.sequences) == (None, None)
        assert "and agent.max_trajectory_tokens is" in str(refused.error)


# ---------------------------------------------------------------------- failures


@pytest.mark.parametrize("count", [12])
async def test_failing_calls_never_become_a_score(tmp_path: Path, count: int) -> None:
    sampler = Sampler(fails=1 / 3)
    async with open_env(spec_in(tmp_path)) as env:
        policy, rows = sampler.policy(), list(env.rows())
        played = await asyncio.gather(*(env.run(rows[n % 4], policy, retries=0) for n in range(count)))
    assert len(sampler.answers) < len(sampler.asked), "some calls failed"
    for rollout in played:
        assert rollout.score in (None, 1.0), "what was scored was played right"
        assert (rollout.score is None) == (rollout.error is not None)
        if rollout.error is not None:
            assert rollout.stop_reason is StopReason.SERVER_FAILURE
            assert "OSError: the device is busy" in rollout.error


async def test_failing_policy_gives_rollouts_and_groups_without_a_score(tmp_path: Path) -> None:
    sampler = Sampler(fails=1.0)
    async with open_env(spec_in(tmp_path)) as env:
        rollout = await env.run(env.rows()[0], sampler.policy(), retries=1)
        assert (rollout.score, rollout.stop_reason, rollout.examples()) == (None, StopReason.SERVER_FAILURE, [])
        assert len(sampler.asked) == 6, "three attempts of each of two plays"
        with pytest.raises(UserError, match="no tokens, because it was not scored"):
            rollout.examples(one=True)
        group = await env.run_group(env.rows()[0], 2, sampler.policy(), retries=0)
        assert group.dropped is StopReason.SERVER_FAILURE
        assert group.detail is not None
        assert group.scores == []
        assert set(group.advantages()) <= {None}


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (Sampled([1, 2], [-0.5]), "2 tokens and 1 log-probabilities"),
        (Sampled([1], [0.5]), "which no token can have"),
        (Sampled([1], [float("nan")]), "log-probability nan"),
        (Sampled([], []), "no tokens"),
        (Sampled([1], [-0.5], "exploded"), "exploded"),
    ],
)
async def test_a_wrong_answer_is_a_failed_attempt(tmp_path: Path, wrong: Sampled, why: str) -> None:
    async def answer(ids: list[int], sampling: Sampling) -> Sampled:
        return wrong

    async with open_env(spec_in(tmp_path)) as env:
        rollout = await env.run(env.rows()[0], Policy.sampling(answer, None), retries=0)
    assert rollout.score is None
    assert rollout.error is not None
    assert why in rollout.error


async def test_aborted_reply_is_continued_with_exact_tokens(tmp_path: Path) -> None:
    sampler, pieces = Sampler(), []

    async def in_pieces(ids: list[int], sampling: Sampling) -> Sampled:
        if not pieces:
            found = await sampler(ids, sampling)
            half = len(found.ids) // 2
            pieces.append((len(ids) + half, found.ids[half:], found.logprobs[half:]))
            return Sampled(found.ids[:half], found.logprobs[:half], "abort", 1)
        if (rest := pieces[-1])[0] == len(ids) and len(pieces) == 1:
            pieces.append(rest)
            return Sampled(rest[1], rest[2], "stop", 2)
        return await sampler(ids, sampling)

    async with open_env(spec_in(tmp_path)) as env:
        group = await env.run_group(env.rows()[0], 1, Policy.sampling(in_pieces, None))
    assert group.provenance is not None
    assert group.provenance.exact
    assert (group.provenance.oldest, group.provenance.newest) == (1, 2)
    assert trained(group.rollouts) == sampled(sampler.answers)


# ---------------------------------------------------------------------- groups


async def test_every_group_is_exact_and_every_token_is_found_once(tmp_path: Path) -> None:
    sampler = Sampler(wrong=0.4, version=1)
    async with open_env(spec_in(tmp_path)) as env:
        policy = sampler.policy()
        groups = [await env.run_group(row, 4, policy) for row in env.rows()]
        async with env.groups(4, policy, rows=env.rows()) as playing:
            groups += [group async for group in playing]
    assert len(groups) == 8
    for group in groups:
        assert group.provenance is not None
        assert group.provenance.exact, group.provenance.problems
        assert set(group.scores) <= {0.0, 1.0}
    everything = [rollout for group in groups for rollout in group.rollouts]
    assert trained(everything) == sampled(sampler.answers)


async def test_rollouts_of_several_sequences_are_exact_too(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer", keeps_thinking=False)
    sampler = Sampler(thought="<think>\nI add.\n</think>\n\n")
    async with open_env(spec_in(tmp_path)) as env:
        group = await env.run_group(env.rows()[0], 3, sampler.policy(folder))
    assert group.provenance is not None
    assert group.provenance.exact, group.provenance.problems
    assert [len(rollout.examples()) for rollout in group.rollouts] == [2, 2, 2]
    assert trained(group.rollouts) == sampled(sampler.answers)


async def test_a_version_that_is_pushed_while_tokens_are_sampled_brackets_them(tmp_path: Path) -> None:
    sampler = Sampler()

    async def pushed(ids: list[int], sampling: Sampling) -> Sampled:
        policy.version = (policy.version or 0) + 1
        return await sampler(ids, sampling)

    policy = Policy.sampling(pushed, None, version=0)
    async with open_env(spec_in(tmp_path)) as env:
        group = await env.run_group(env.rows()[0], 1, policy)
    assert group.rollouts[0].examples(one=True)[0].weights == (0, 2)
    assert group.provenance is not None
    assert (group.provenance.oldest, group.provenance.newest) == (0, 2)
    told = Policy.sampling(sampler, None, version=lambda: 6)
    async with open_env(spec_in(tmp_path)) as env:
        assert (await env.run(env.rows()[0], told)).examples()[0].weights == (6, 6)


async def test_concurrent_runs_of_one_row_do_not_interfere(tmp_path: Path) -> None:
    policy = Sampler().policy()
    async with open_env(spec_in(tmp_path)) as env, open_env(spec_in(tmp_path)) as other:
        row = env.rows()[0]
        plays = [env.run(row, policy) for _ in range(3)]
        plays += [env.run(row, policy, group="mine", index=1, size=2) for _ in range(2)]
        plays += [one.run(row, policy, group="mine") for one in (env, other)]
        played = await asyncio.gather(*plays)
        groups = await asyncio.gather(*(env.run_group(row, 2, policy, group="mine") for _ in range(2)))
        first, second = env.groups(2, policy, rows=[row]), env.groups(2, policy, rows=[row.key])
        both = await asyncio.gather(anext(first), anext(second))
    rollouts = [*played, *(rollout for group in (*groups, *both) for rollout in group.rollouts)]
    assert [rollout.score for rollout in rollouts] == [1.0] * len(rollouts)
    assert len({rollout.id for rollout in rollouts}) == len(rollouts)
    assert [rollout.key.group for rollout in played[3:]] == ["mine"] * 4
    assert {group.id for group in groups} == {"mine"}
    assert both[0].id != both[1].id


async def test_group_comparing_rewards_require_run_group(tmp_path: Path) -> None:
    sampler = Sampler(wrong=0.5)
    async with open_env(spec_in(tmp_path, COMPARED)) as env:
        row, policy = env.rows()[0], sampler.policy()
        with pytest.raises(UserError, match=r"rewards\.longest compares the members of a group.*run_group"):
            await env.run(row, policy, size=2)
        alone = await env.run(row, policy)
        assert alone.rewards["longest"].value == 1.0
        assert alone.score is not None
        group = await env.run_group(row, 4, policy)
    assert max(rollout.rewards["longest"].value or 0 for rollout in group.rollouts) == 1.0
    assert len(group.scores) == 4


async def test_masked_stop_reasons_zero_examples_and_advantages(tmp_path: Path) -> None:
    text = TEXT + "on_stop: {max_turns: mask}\n"
    async with open_env(spec_in(tmp_path, text)) as env:
        group = await env.run_group(env.rows()[0], 2, Sampler().policy(), sampling={"max_turns": 1})
    for rollout in group.rollouts:
        [example] = rollout.examples()
        assert example.mask == [0] * len(example.response_ids)
        assert example.logprobs == [0.0] * len(example.response_ids)
    assert group.advantages() == [0.0, 0.0]


# ---------------------------------------------------------------------- other policies


async def test_chat_function_runs_with_and_without_tokens(tmp_path: Path) -> None:
    async def chat(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> Any:
        if messages[-1]["role"] == "tool":
            return f"The sum is {messages[-1]['content']}."
        assert tools is not None
        assert tools[0]["function"]["name"] == "add"
        return {"tool_calls": [{"function": {"name": "add", "arguments": json.dumps({"a": 1, "b": 2})}}]}

    async with open_env(spec_in(tmp_path)) as env:
        row = next(row for row in env.rows() if row.columns["a"] == 1)
        rollout = await env.run(row, Policy.chat(chat))
        assert (rollout.score, rollout.turns, rollout.sequences) == (1.0, 2, None)
        with pytest.raises(UserError, match="its tokens are not known"):
            rollout.examples(one=True)
        group = await env.run_group(row, 1, Policy.chat(chat, tokenizer=small_tokenizer_path()))
        assert group.provenance is not None
        assert not group.provenance.exact
        [example] = group.rollouts[0].examples(one=True)
        assert example.logprobs is None
        assert sum(example.mask) > 0

        async def broken(messages: list[dict[str, Any]], tools: Any) -> Any:
            return 7

        with pytest.raises(UserError, match="an answer is a text, or an assistant message"):
            await env.run(row, Policy.chat(broken))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_server_whose_model_and_version_a_trainer_changes(tmp_path: Path, kind: str) -> None:
    served = TokenPolicy(TOKENIZER, lambda text, _: write(text) + END)
    names = iter(["adapter-v0", "adapter-v1", "adapter-v2", "adapter-v3", "adapter-v4", "adapter-v5"])
    path = str(small_tokenizer_path())
    async with served.running() as url, open_env(spec_in(tmp_path)) as env:
        policy = Policy.server(kind, url, lambda: next(names), tokenizer=path, version=7)
        group = await env.run_group(env.rows()[0], 1, policy)
        assert group.provenance is not None
        assert group.provenance.exact, group.provenance.problems
        assert (group.provenance.oldest, group.provenance.newest) == (7, 7), "not the server's own"
        policy.version = 8
        later = await env.run(env.rows()[0], policy)
        assert later.examples()[0].weights == (8, 8)
        asked = Policy.server(kind, url, "m", tokenizer=path)
        served.version = 4
        own = (await env.run(env.rows()[0], asked)).examples()[0].weights
        assert own == ((4, 4) if kind == "sglang" else (None, None)), "what the server itself tells"
        rendered = Policy.server(kind, url, "m", tokenizer=path, renderer="nonesuch")
        with pytest.raises(UserError, match="there is no renderer 'nonesuch'"):
            await env.run(env.rows()[0], rendered)
    if kind == "vllm":
        assert [body["model"] for body in served.asked[:4]] == [f"adapter-v{n}" for n in (1, 2, 3, 4)]
    with pytest.raises(UserError, match="needs a `tokenizer`"):
        Policy.server(kind, url, lambda: "m")
    with pytest.raises(UserError, match="there is no type none-such"):
        Policy.server("none-such", url, "m")


async def test_a_scripted_policy_may_be_named_too(tmp_path: Path) -> None:
    text = TEXT + 'solution: {turns: [{say: "The sum is {{ total }}."}]}\n'
    async with open_env(spec_in(tmp_path, text)) as env:
        rollout = await env.run(env.rows()[0], Policy.server("scripted", None, ""))
    assert rollout.score == 1.0
    assert rollout.sequences is not None


# ---------------------------------------------------------------------- cancelling and closing


class Hanging:
    """Uses the terminal once and then never answers; says when that is so."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.left = asyncio.Event()

    async def __call__(self, ids: list[int], sampling: Sampling) -> Sampled:
        if "<tool_response>" in TOKENIZER.decode(ids):
            self.reached.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.left.set()
        call = '<tool_call>\n{"name": "terminal", "arguments": {"command": "echo hello"}}\n</tool_call>'
        tokens = TOKENIZER.encode(call + END)
        return Sampled(tokens, [-0.5] * len(tokens))


@pytest.mark.parametrize("how", ["play", "run_group", "groups"])
async def test_cancelling_the_wait_releases_the_sandbox(tmp_path: Path, runtimes: list[ToolRuntime], how: str) -> None:
    hanging = Hanging()
    async with open_env(spec_in(tmp_path, TERMINAL)) as env:
        row, policy = env.rows()[0], Policy.sampling(hanging, None)
        waits = {
            "play": lambda: env.run(row, policy),
            "run_group": lambda: env.run_group(row, 1, policy),
            "groups": lambda: anext(env.groups(1, policy)),
        }
        waiting = asyncio.ensure_future(waits[how]())
        await asyncio.wait_for(hanging.reached.wait(), 60)
        sandboxes = [await runtime.sandbox() for runtime in runtimes]
        assert sandboxes
        assert all(sandbox.alive for sandbox in sandboxes)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert hanging.left.is_set()
        assert not any(sandbox.alive for sandbox in sandboxes)
        assert not any(find_runtime(runtime.task_id) for runtime in runtimes)


async def test_closing_the_environment_cancels_its_rollouts(tmp_path: Path) -> None:
    hanging = Hanging()
    env = await open_env(spec_in(tmp_path, TERMINAL)).open()
    waiting = asyncio.ensure_future(env.run(env.rows()[0], Policy.sampling(hanging, None)))
    groups = env.groups(1, Policy.sampling(hanging, None))
    group = asyncio.ensure_future(anext(groups))
    await asyncio.wait_for(hanging.reached.wait(), 60)
    await env.close()
    with pytest.raises(UserError, match="the environment was closed"):
        await waiting
    with pytest.raises((asyncio.CancelledError, UserError)):
        await group
    assert hanging.left.is_set()
    await env.close()


# ---------------------------------------------------------------------- a record


def ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in (path / "rollouts.jsonl").read_text().splitlines()]


async def test_what_is_recorded_is_answered_from_the_record(tmp_path: Path) -> None:
    record, sampler = tmp_path / "run", Sampler(version=2)
    async with open_env(spec_in(tmp_path), record=record) as env:
        first = await env.run(env.rows()[0], sampler.policy(), group="g", index=1, size=2)
        group = await env.run_group(env.rows()[1], 2, sampler.policy(), group="h")
    played = len(sampler.asked)
    async with open_env(spec_in(tmp_path), record=record) as env:
        again = await env.run(env.rows()[0], sampler.policy(), group="g", index=1, size=2)
        twice = await asyncio.gather(
            *(env.run(env.rows()[0], sampler.policy(), group="g", index=0, size=2) for _ in range(2))
        )
        same = await env.run_group(env.rows()[1], 2, sampler.policy(), group="h")
    assert (again.id, again.score, again.examples()) == (first.id, first.score, first.examples())
    assert twice[0].id == twice[1].id
    assert same.provenance == group.provenance
    assert same.provenance is not None
    assert same.provenance.exact
    assert len(sampler.asked) == played + 2, "only the member that was not there was played, once"
    assert len(set(ids(record))) == len(ids(record)) == 4
    described = json.loads((record / "run.json").read_text())
    assert described["name"] == "sums"


async def test_a_damaged_run_json_keeps_nothing_open(tmp_path: Path) -> None:
    record = tmp_path / "run"
    env = open_env(spec_in(tmp_path), record=record)
    await env.open()
    await env.run(env.rows()[0], Sampler().policy())
    whole = (record / "run.json").read_text()
    (record / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"run\.json cannot be read"):
        await env.close()
    assert env.loop is None
    (record / "run.json").write_text(whole)
    async with open_env(spec_in(tmp_path), record=record) as again:  # the folder is not locked any more
        assert (await again.run(again.rows()[0], Sampler().policy())).score == 1.0


async def test_a_policy_that_cannot_be_left_keeps_nothing_open(tmp_path: Path) -> None:
    policy = Sampler().policy()

    async def broken() -> None:
        raise RuntimeError("no connection to close")

    env = await open_env(spec_in(tmp_path), record=tmp_path / "run").open()
    await env.run(env.rows()[0], policy)
    policy.leave = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no connection to close"):
        await env.close()
    async with open_env(spec_in(tmp_path), record=tmp_path / "run"):
        pass


async def test_cancelled_recorded_run_resumes_without_repeating_rollouts(tmp_path: Path) -> None:
    record, sampler = tmp_path / "run", Sampler(wrong=0.3)
    spec = spec_in(tmp_path)

    async def first_start() -> None:
        async with open_env(spec, record=record) as env:
            async for _ in env.groups(3, sampler.policy(), rows=env.rows(), concurrency=2):
                raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await first_start()
    there = set(ids(record))
    assert 3 <= len(there) < 12
    async with open_env(spec, record=record) as env:
        groups = [group async for group in env.groups(3, sampler.policy(), rows=env.rows(), concurrency=2)]
    assert len(groups) == 4
    assert len(set(ids(record))) == len(ids(record)) == 12
    assert there <= set(ids(record))
    assert all(group.provenance is not None and group.provenance.exact for group in groups)
    asked = len(sampler.asked)
    async with open_env(spec, record=record) as env:
        assert sorted([group.id async for group in env.groups(3, sampler.policy(), rows=env.rows())]) == sorted(
            group.id for group in groups
        )
    assert len(sampler.asked) == asked


async def test_repeated_row_in_a_training_loop_runs_once_per_batch(tmp_path: Path) -> None:
    record, sampler = tmp_path / "run", Sampler()

    async def step(env: Any, **given: Any) -> list[str]:
        return [group.id async for group in env.groups(1, sampler.policy(), rows=[env.rows()[0]], **given)]

    async def training() -> list[list[str]]:
        async with open_env(spec_in(tmp_path), record=record) as env:
            return [await step(env), await step(env), await step(env, batch="step-3"), await step(env, batch="step-3")]

    first = await training()
    assert len({tuple(groups) for groups in first}) == 3
    assert first[2] == first[3], "one batch is played once"
    assert len(ids(record)) == 3
    asked = len(sampler.asked)
    assert await training() == first
    assert len(sampler.asked) == asked, "after a restart every step finds its own"


async def test_a_record_is_of_one_spec_and_where_groups_are_compared_of_one_size(tmp_path: Path) -> None:
    record = tmp_path / "run"
    async with open_env(spec_in(tmp_path, COMPARED), record=record) as env:
        await env.run_group(env.rows()[0], 2, Sampler().policy(), group="g")
        with pytest.raises(UserError, match=r"contains groups of 2, whose members rewards\.longest compares"):
            await env.run_group(env.rows()[0], 3, Sampler().policy())
        with pytest.raises(UserError, match="another run is using"):
            await open_env(spec_in(tmp_path, COMPARED), record=record).open()
    async with open_env(spec_in(tmp_path, COMPARED), record=record) as env:
        with pytest.raises(UserError, match="contains groups of 2"):
            await env.run(env.rows()[0], Sampler().policy())
        again = await env.run_group(env.rows()[0], 2, Policy.sampling(never, None), group="g")
        assert len(again.scores) == 2
    with pytest.raises(UserError, match="contains a run of another spec"):
        await open_env(spec_in(tmp_path, TEXT.replace("What is", "Say")), record=record).open()


async def never(ids: list[int], sampling: Sampling) -> Sampled:
    raise AssertionError("nothing is played twice")


# ---------------------------------------------------------------------- names


def test_the_public_names_of_one_thing_have_one_home() -> None:
    assert hermes_rl.Sampled.__module__ == hermes_rl.Sampling.__module__ == "hermes_rl.servers.base"


# ------------------------------------------------------------------------------- what adapters to trainers need


async def test_full_response_stops_each_sequence_with_token_budget(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer", keeps_thinking=False)
    sampler = Sampler(thought="<think>\nI add.\n</think>\n\n")
    async with open_env(spec_in(tmp_path)) as env:
        whole = await env.run(env.rows()[0], sampler.policy())
        ended = []
        for response in (len(whole.examples()[0].response_ids), len(sampler.answers[0].ids) + 1):
            rollout = await env.run(env.rows()[0], sampler.policy(response=response))
            assert all(len(one.response_ids) <= response for one in rollout.examples())
            ended.append(rollout.stop_reason)
        assert ended == [StopReason.FINISHED, StopReason.TOKEN_BUDGET]
        # Each of two sequences has a response of its own.
        two = await env.run(env.rows()[0], sampler.policy(folder, response=max(len(a.ids) for a in sampler.answers)))
    assert (two.stop_reason, len(two.examples())) == (StopReason.FINISHED, 2)


async def test_an_answer_may_tell_the_older_weights_of_its_first_tokens(tmp_path: Path) -> None:
    sampler = Sampler(version=7)

    async def across(ids: list[int], sampling: Sampling) -> Sampled:
        asking.add(sampling.rollout)
        return replace(await sampler(ids, sampling), oldest=4)

    asking: set[str | None] = set()
    async with open_env(spec_in(tmp_path)) as env:
        rollout = await env.run(env.rows()[0], Policy.sampling(across, None))
    assert rollout.error is None, rollout.error
    assert rollout.examples(exact=True)[0].weights == (4, 7)
    assert asking == {rollout.id}


async def test_exact_examples_refuse_tokens_without_provenance(tmp_path: Path) -> None:
    async def chat(messages: Any, tools: Any) -> str:
        return "The sum is 3."

    async with open_env(spec_in(tmp_path)) as env:
        rollout = await env.run(env.rows()[0], Policy.chat(chat, tokenizer=small_tokenizer_path()))
    assert len(rollout.examples()) == 1
    with pytest.raises(UserError, match=r"not proven .*does not report which tokens it sampled"):
        rollout.examples(exact=True)


async def test_record_loads_in_a_thread_and_is_released_when_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading some gigabytes takes a minute, in which the other requests of a service would stand still."""
    spec, begun, go_on = spec_in(tmp_path), threading.Event(), threading.Event()
    async with open_env(spec, record=tmp_path / "run") as env:
        first = await env.run(env.rows()[0], Sampler().policy(), group="g")
    load, threads = RolloutStore.load, list[int]()

    def slow(store: RolloutStore) -> None:
        threads.append(threading.get_ident())
        begun.set()
        assert go_on.wait(10)
        load(store)

    monkeypatch.setattr(RolloutStore, "load", slow)
    async with open_env(spec, record=tmp_path / "run") as env:
        given_up = asyncio.create_task(env.run(env.rows()[0], Sampler().policy(), group="g"))
        assert await asyncio.to_thread(begun.wait, 10)
        given_up.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        again = await env.run(env.rows()[0], Sampler().policy(), group="g")
    assert (again.id, again.messages) == (first.id, first.messages), "it was read again, and is locked by nobody else"
    assert len(threads) == 2
    assert threading.get_ident() not in threads


async def test_rollouts_and_groups_can_be_pickled_and_copied(tmp_path: Path) -> None:
    text = TEXT.replace('"code.py:add"', '"code.py:add", isolate: none')
    async with open_env(spec_in(tmp_path, text)) as env:
        group = await env.run_group(env.rows()[0], 2, Sampler().policy())
    arrived = pickle.loads(pickle.dumps(group))
    assert arrived.scores == group.scores and arrived.rollouts[0].key == group.rollouts[0].key
    for here, there in zip(group.rollouts, arrived.rollouts, strict=True):
        assert here.result is not None and there.result is not None
        assert (there.sequences, there.result.messages) == (here.sequences, here.result.messages)
        assert type(there.result.tool_schemas) is list and there.result.tool_schemas == here.result.tool_schemas
        for copied in (copy.copy(here.result.tool_schemas), copy.deepcopy(here.result.tool_schemas)):
            assert copied == here.result.tool_schemas and toolkit_of(copied).names == {"add"}
