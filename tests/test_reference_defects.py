"""What goes wrong in the design that this one follows, played through from a spec to its rollouts.

The parts are shown elsewhere:

- groups in flight see the last group's tools →
  tests/env/test_handwritten.py::test_groups_in_flight_keep_their_own_tools
- a reward blocks the event loop →
  tests/env/test_handwritten.py::test_blocking_reward_does_not_block_the_event_loop
  tests/scoring/test_reward_calls.py::test_blocking_rewards_run_concurrently_off_the_event_loop
- a RuntimeError in a tool runs the tool twice →
  tests/agent/test_loop_tool_calls.py::test_tool_that_raises_is_called_once_and_its_error_reaches_the_model
- arguments that are no object repeat the last tool's output →
  tests/agent/test_loop_tool_calls.py::test_failed_calls_do_not_reuse_the_result_of_an_earlier_call
- user and tool text is trained on →
  tests/tokens/test_chat_tokens.py::test_what_is_trained_on_is_what_the_model_wrote
  tests/env/test_serve.py::test_a_chat_server_is_refused_unless_inexact_is_allowed
- turns are counted where nothing happened →
  tests/agent/test_loop_endings.py::test_failure_of_the_first_call_returns_an_empty_rollout
- tool calls of a turn run one after another, without a timeout →
  tests/agent/test_loop_tool_calls.py::test_calls_of_one_turn_run_together_and_are_answered_in_order
  tests/agent/test_loop_tool_calls.py::test_hanging_tool_times_out_and_the_conversation_continues
- a cancelled rollout leaks its sandbox →
  tests/env/test_handwritten.py::test_a_cancelled_group_leaves_no_sandbox
  tests/sandbox/test_cleanup.py::test_cancelled_start_leaves_nothing
- a cut answer counts as a natural end →
  tests/agent/test_loop_endings.py::test_last_reply_determines_the_stop_reason
- there is no token budget for the whole trajectory →
  tests/agent/test_loop_endings.py::test_loop_starts_no_turn_after_the_token_budget_is_spent
- configuration goes through os.environ →
  tests/test_architecture.py::test_the_environment_of_the_process_is_never_changed
  tests/env/test_handwritten.py::test_two_environments_with_other_settings_run_in_one_process
- downloads are cut and names are not quoted →
  tests/tools/test_context.py::test_files_and_folders_go_in_and_out
- evaluation counts as training →
  tests/env/test_spec_env.py::test_evaluation_keeps_its_numbers_to_itself
- verifiers trust files that the agent planted →
  tests/tools/test_context.py::test_staged_files_replace_what_was_planted_and_go_again
  tests/rewards/test_tests_pass.py::test_planted_test_is_replaced_and_restored_after_the_reward
- NaN is a reward →
  tests/scoring/test_reward_values.py::test_reward_that_is_not_a_finite_number_is_a_reward_failure
- the split changes at a restart →
  tests/data/test_split.py::test_another_process_finds_the_same_split
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from hermes_rl import load_spec
from hermes_rl.data.load import load_rows
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.rollout import Group, Rollout
from hermes_rl.rollouts.runner import RolloutRunner
from hermes_rl.runs.store import rollout_record
from hermes_rl.spec.load import parse_spec
from hermes_rl.spec.model import Spec
from hermes_rl.spec.overrides import parse_extra_args
from tests.agent.scripted_chat import ScriptedChat, call, calls, refused, says, scripted_chat
from tests.runs.playing import EvaluatePlan, play_evaluate

ROOT = Path(__file__).parents[1]
CHECKS = '''
def right(item, result, ctx):
    return 1.0


def broken(item, result, ctx):
    raise KeyError("answer")


def greeted(item, result, ctx):
    """The greeting that this rollout was to write, whatever others wrote."""
    return float(ctx.terminal("cat ~/greeting.txt")["output"].strip() == item["who"])


async def judged(item, result, judge):
    return float(await judge.chat([{"role": "user", "content": result.final_response}]))


def shout(text: str) -> str:
    """Say it loudly.

    Args:
        text: what to say
    """
    return text.upper()
'''
SPEC = """
name: reference
dataset: {{items: [{{who: Ann}}, {{who: Bo}}]}}
prompt: {{user: "Greet {{{{ who }}}}"}}
agent: {{max_turns: 5, max_tokens: 100}}
servers: {{policy: {{type: openai, base_url: "{url}", model: m}}}}
rewards: {{right: {{fn: "checks.py:right"}}}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, where files that --set names are looked for."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


chat, judge = pytest.fixture(scripted_chat), pytest.fixture(scripted_chat)


def spec_of(folder: Path, chat: ScriptedChat, *sets: str) -> Spec:
    (folder / "checks.py").write_text(CHECKS)
    (folder / "spec.yaml").write_text(SPEC.format(url=chat.url))
    return load_spec(folder / "spec.yaml", overrides=parse_extra_args([], sets))


async def play(spec: Spec, size: int = 1, heard: list[Rollout] | None = None) -> list[Group]:
    """A group on every row of training, one after another, so that the script of a server fits."""
    async with CompiledSpec(spec) as world:
        player = RolloutRunner(world, on_played=(heard if heard is not None else []).append)
        rows = load_rows(spec, "train", notify=print)
        return [await player.start(row, row.key, size) for row in rows]


async def test_a_file_of_one_rollout_never_earns_the_reward_of_another(folder: Path, chat: ScriptedChat) -> None:
    """All rollouts share one shell and one file tree."""
    write = calls(call("terminal", {"command": "echo Ann > ~/greeting.txt"}))
    chat.script = [write, says("done"), says("done, too"), says("done"), says("done")]
    rows = "dataset.items=[{who: Ann}, {who: Ann}]"
    spec = spec_of(folder, chat, rows, "toolsets=[terminal]", "rewards.right.fn=checks.py:greeted")
    groups = await play(spec)
    assert [group.scores for group in groups] == [[1.0], [0.0]]


async def test_concurrent_rollouts_of_a_group_have_separate_files() -> None:
    """As above, within a group in flight."""
    spec = load_spec("terminal-files", overrides=parse_extra_args([], ["servers.policy.error_rate=0.5"]))
    for group in await play(spec, size=4):
        assert sorted(rollout.rewards["file_matches"].value or 0.0 for rollout in group.rollouts) == [0, 0, 1, 1]


@pytest.mark.parametrize("arguments", ["null", "[]", '"x"', "", "{broken"])
async def test_arguments_that_are_not_an_object_are_recorded_as_an_error(
    folder: Path, chat: ScriptedChat, arguments: str
) -> None:
    """They crash the group, or silently repeat the previous tool's output."""
    one_item = "dataset.items=[{who: Ann}]"
    chat.script = [calls(call("shout", '{"text": "hi"}')), calls(call("shout", arguments)), says("done")]
    (group,) = await play(spec_of(folder, chat, one_item, "tools=[{python: checks.py:shout}]"))
    record = rollout_record(group.rollouts[0])
    assert (record["stop_reason"], record["score"], record["turns"]) == ("finished", 1.0, 3)
    (error,) = record["tool_errors"]
    assert (error["turn"], error["tool_name"], error["arguments"]) == (2, "shout", arguments)
    answers = [message["content"] for message in record["messages"] if message["role"] == "tool"]
    assert answers[0] == "HI"
    assert "HI" not in answers[1]


@pytest.mark.parametrize(
    ("sets", "script", "stop_reason", "cause"),
    [
        ((), [refused(401, "no such key")] * 6, "server_failure", "no such key"),
        (
            ("toolsets=[terminal]", "sandbox.setup=['echo no image; exit 3']"),
            [calls(call("terminal", {"command": "true"}))] * 3,
            "sandbox_failure",
            "no image",
        ),
        (("rewards.right.fn=checks.py:broken",), [], "reward_failure", "KeyError: 'answer'"),
    ],
)
async def test_infrastructure_failure_has_no_score_and_records_its_cause(
    folder: Path, chat: ScriptedChat, sets: tuple[str, ...], script: list[Any], stop_reason: str, cause: str
) -> None:
    """A failed API call, sandbox or reward function becomes reward 0.0."""
    chat.script, heard = list(script), []
    (group,) = await play(spec_of(folder, chat, "dataset.items=[{who: Ann}]", *sets), heard=heard)
    assert (group.dropped, group.scores) == (stop_reason, [])
    records = [rollout_record(rollout) for rollout in heard]
    assert [record["id"][-2:] for record in records[1:]] == ["r1", "r2"], "played anew, twice"
    for record in records:
        assert (record["score"], record["stop_reason"]) == (None, stop_reason)
        assert cause in record["error"]


async def test_a_judge_is_asked_on_its_own_server(folder: Path, chat: ScriptedChat, judge: ScriptedChat) -> None:
    """The judge runs on the policy's server."""
    chat.script, judge.script = [says("hello Ann")], [says("0.75")]
    (group,) = await play(judged(folder, chat, judge))
    assert group.scores == [0.75]
    assert (len(chat.requests), len(judge.requests)) == (1, 1)
    assert judge.sent == [{"role": "user", "content": "hello Ann"}]


async def test_a_judge_that_fails_gives_no_score(folder: Path, chat: ScriptedChat, judge: ScriptedChat) -> None:
    """The judge falls back silently to keyword overlap."""
    judge.script = [refused(401, "no credit")] * 100
    (group,) = await play(judged(folder, chat, judge))
    assert group.scores == []
    assert group.dropped is not None
    assert not group.dropped.graded
    assert "no credit" in (group.detail or "")


def judged(folder: Path, chat: ScriptedChat, judge: ScriptedChat) -> Spec:
    server = f"servers.judge={{type: openai, base_url: '{judge.url}', model: j}}"
    return spec_of(folder, chat, "dataset.items=[{who: Ann}]", "rewards.right.fn=checks.py:judged", server)


async def test_evaluation_is_the_same_loop_with_the_same_tools(folder: Path, chat: ScriptedChat) -> None:
    """evaluate() is a stub in some environments and has no tools in others."""
    spec = spec_of(folder, chat, "tools=[{python: checks.py:shout}]", "toolsets=[terminal]", "dataset.eval=only")
    chat.script = [calls(call("shout", '{"text": "hi"}')), says("done")] * 2
    async with CompiledSpec(spec) as world:
        rows = list(load_rows(spec, "eval", notify=print))
        found = await play_evaluate(world, EvaluatePlan(concurrency=1), given=rows)
    evaluated = [{tool["function"]["name"] for tool in request["tools"]} for request in chat.requests]
    assert evaluated == [{"shout", "terminal", "process"}] * 4
    assert (found.metrics["eval/turns"], found.metrics["eval/tool_calls"]) == (2, 1)
    assert found.metrics["eval/mean_reward"] == 1.0


async def test_equal_rows_each_run(folder: Path, chat: ScriptedChat) -> None:
    """A run that is gone on with takes rows of one prompt for one row."""
    groups = await play(spec_of(folder, chat, "dataset.items=[{who: Ann}, {who: Ann}, {who: Ann}]"))
    assert len({group.id for group in groups}) == 3
    assert len(chat.requests) == 3


async def test_a_prompt_may_be_other_than_text(chat: ScriptedChat) -> None:
    """A prompt that is no string is not expected."""
    text = (
        "name: lists\ndataset: {items: [{ask: [{role: user, content: hi}]}]}\n"
        'prompt: {messages: "{{ ask }}"}\nagent: {max_tokens: 10}\nrewards: {exact_match: {args: {target: done}}}\n'
        f"servers: {{policy: {{type: openai, base_url: '{chat.url}', model: m}}}}\n"
    )
    (group,) = await play(parse_spec(text, name="lists.yaml"))
    assert chat.sent == [{"role": "user", "content": "hi"}]
    assert group.scores == [1.0]


@pytest.mark.parametrize("module", ["tests/test_reference_defects.py", "tests/env/test_atropos_defects.py"])
def test_what_is_said_to_be_shown_elsewhere_is_there(module: str) -> None:
    """A test that is renamed or removed may have been the only one of its kind."""
    said = ast.get_docstring(ast.parse((ROOT / module).read_text(encoding="utf-8"))) or ""
    shown = re.findall(r"(tests/\S+\.py)::(\w+)", said)
    assert len(shown) > 5
    missing = [name for file, name in shown if f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8")]
    assert missing == []
