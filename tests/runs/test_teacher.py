"""A teacher: its log-probabilities in groups, kept with the rollouts, and what becomes of its failures."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from atroposlib.api.server import ScoredData

from hermes_rl import compile_spec
from hermes_rl.env.custom_collection import FURTHER, assemble, stack_sequences
from hermes_rl.errors import Failure, RunError, ServerFailure, UserError
from hermes_rl.rollouts.rollout import Rollout
from hermes_rl.rollouts.runner import RolloutRunner
from hermes_rl.runs.process import ProcessSummary, run_process
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.renderer_check import require_same_tokenizer
from hermes_rl.runs.setup import RunOptions
from hermes_rl.servers.scripted.server import ScriptedServer
from hermes_rl.spec.fingerprint import fingerprint
from hermes_rl.spec.load import parse_spec
from hermes_rl.stop_reasons import StopReason
from hermes_rl.tokens.load import load_tokenizer
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from hermes_rl.tokens.transcript import MASKED, MASKED_LOGPROB
from tests.commands import LIBRARIES, hermes
from tests.env.test_token_exact import tokenizer_folder
from tests.env.trainer import train, trajectory_api
from tests.rollouts.worlds import World, row
from tests.runs.playing import lines

TEXT = """
name: taught
dataset: {items: [{word: one}, {word: two}, {word: three}]}
prompt: {user: "Say {{ word }}"}
rewards: {right: {fn: exact_match, args: {target: "{{ word }}"}}}
solution: {turns: [{say: "{{ word }}"}]}
distill: {top_k: 3}
servers:
  policy: {type: scripted, error_rate: 0.5}
  teacher: {type: vllm, base_url: "URL", model: m, tokenizer: "TOKENIZER"}
process: {groups: 2, group_size: 2}
"""
LAYERED = """
toolsets: [todo]
solution:
  turns:
    - {say: "<think>\\nhm\\n</think>\\n\\nfirst", tools: [{name: todo, args: {todos: []}}]}
    - {say: "{{ word }}"}
"""
TOKENIZER = load_tokenizer()


class TeacherServer(ScriptedServer):
    """Says of each token what follows from its place and id; refuses texts that hold `refused`."""

    def __init__(self) -> None:
        super().__init__("m", TOKENIZER)
        self.asked: list[list[int]] = []
        self.lengths: list[int] = []
        """Tokens of each request."""
        self.refused: str | None = None
        self.most = 20

    async def _completions(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        self.lengths.append(len(body["prompt"]))
        if self.refused is not None and self.refused in TOKENIZER.decode(body["prompt"]):
            return web.json_response({"error": {"message": "not this one"}}, status=400)
        assert "prompt_logprobs" in body, "a teacher samples nothing"
        if body["prompt_logprobs"] > self.most:
            return web.json_response({"error": {"message": f"at most {self.most} prompt_logprobs"}}, status=400)
        if len(body["prompt"]) > 2:  # no run's first look at it
            self.asked.append(body["prompt"])
        answer = json.loads((await super()._completions(request)).text or "")
        for place, scores in enumerate(answer["choices"][0]["prompt_logprobs"][1:], 1):
            token = body["prompt"][place]
            scores[str(token)] = {"logprob": said(place, token)}
        return web.json_response(answer)


def said(place: int, token: int) -> float:
    return -0.001 * place - token / 10_000


@pytest.fixture
async def teacher() -> AsyncIterator[tuple[TeacherServer, str]]:
    server = TeacherServer()
    url = await server.start()
    yield server, url
    await server.close()


def text_of(url: str, **changes: str) -> str:
    text = TEXT.replace("URL", url).replace("TOKENIZER", str(small_tokenizer_path()))
    for old, new in changes.items():
        text = text.replace(old, new)
    return text


async def play(text: str, folder: Path) -> tuple[ProcessSummary, list[dict[str, Any]]]:
    spec = parse_spec(text)
    summary, directory = await run_process(spec, RunOptions("process", folder, progress=Progress(quiet=True)))
    return summary, lines(directory.path / "groups.jsonl")


def check(line: dict[str, Any], top_k: int) -> None:
    """The shapes that Atropos has, and at each place what the teacher says of just that token."""
    ScoredData(**{name: value for name, value in line.items() if name in ScoredData.model_fields})
    for number, tokens in enumerate(line["tokens"]):
        reference = line["ref_logprobs"][number]
        assert reference == [MASKED_LOGPROB, *(said(at, tokens[at]) for at in range(1, len(tokens)))]
        ids, values = line["distill_token_ids"][number], line["distill_logprobs"][number]
        assert [len(one) for one in ids] == [len(one) for one in values] == [0, *[top_k] * (len(tokens) - 1)]
        for at in range(1, len(tokens)):
            assert (ids[at][0], values[at][0]) == (tokens[at], reference[at])
            assert values[at] == sorted(values[at], reverse=True)


Teaching = tuple[TeacherServer, str]


async def test_groups_contain_teacher_logprobs_for_each_token(teacher: Teaching, tmp_path: Path) -> None:
    server, url = teacher
    summary, groups = await play(text_of(url), tmp_path / "run")
    assert (summary.written, summary.attempts, len(server.asked)) == (2, 4, 4)
    for line in groups:
        check(line, 3)
        assert line["provenance"]["exact"]
    assert sorted(server.asked) == sorted(tokens for line in groups for tokens in line["tokens"])
    assert all(len(line["teacher"]) == 1 for line in lines(tmp_path / "run" / "rollouts.jsonl"))
    assert all(line["timings"]["teacher"] > 0 for line in lines(tmp_path / "run" / "rollouts.jsonl"))


async def test_resumed_run_does_not_call_the_teacher_again(teacher: Teaching, tmp_path: Path) -> None:
    server, url = teacher
    _, groups = await play(text_of(url), tmp_path / "run")
    path = tmp_path / "run" / "groups.jsonl"
    path.write_text(json.dumps(groups[0]) + "\n")  # as if it was killed before it wrote the second
    summary, again = await play(text_of(url), tmp_path / "run")
    assert (summary.attempts, len(server.asked)) == (0, 4)
    assert sorted(again, key=str) == sorted(groups, key=str)
    with pytest.raises(UserError, match="distill"):
        await play(text_of(url, **{"top_k: 3": "top_k: 4"}), tmp_path / "run")


async def test_each_sequence_of_a_rollout_is_asked_about(teacher: Teaching, tmp_path: Path) -> None:
    server, url = teacher
    folder = tokenizer_folder(tmp_path / "tokenizer", keeps_thinking=False)
    changes = {
        "solution: {turns": "# {",
        "error_rate: 0.5": f'tokenizer: "{folder}"',
        str(small_tokenizer_path()): str(folder),
    }
    _, groups = await play(text_of(url, **changes) + LAYERED, tmp_path / "run")
    assert [(line["layer"], line["layers"]) for line in groups] == [(0, 2), (1, 2)] * 2
    assert len(server.asked) == 8
    for line in groups:
        check(line, 3)


async def test_without_most_probable_tokens_there_is_the_reference_alone(teacher: Teaching, tmp_path: Path) -> None:
    _, groups = await play(text_of(teacher[1], **{"top_k: 3": "top_k: 0"}), tmp_path / "run")
    assert {(line["distill_token_ids"], line["distill_logprobs"]) for line in groups} == {(None, None)}
    assert all([len(one) for one in line["ref_logprobs"]] == [len(one) for one in line["tokens"]] for line in groups)


async def test_run_without_a_teacher_records_no_teacher_fields(tmp_path: Path) -> None:
    text = text_of("http://127.0.0.1:9/v1", **{"distill: {top_k: 3}\n": ""})
    _, groups = await play(text, tmp_path / "run")
    assert all(line[name] is None for line in groups for name in ("ref_logprobs", "distill_token_ids"))
    assert all("teacher" not in line for line in lines(tmp_path / "run" / "rollouts.jsonl"))


async def test_each_request_to_the_teacher_is_counted_and_priced(teacher: Teaching, tmp_path: Path) -> None:
    server, url = teacher
    await play(text_of(url, **{"model: m,": "model: m, prices: {prompt: 2, completion: 8},"}), tmp_path)
    usage = json.loads((tmp_path / "run.json").read_text())["usage"]["teacher"]
    assert usage.pop("seconds") > 0 and len(server.lengths) >= 5
    assert usage.pop("cost") == pytest.approx(sum(server.lengths) * 2e-6)
    assert usage == {"calls": len(server.lengths), "prompt_tokens": sum(server.lengths), "completion_tokens": 0}


async def test_teacher_failure_is_retried_and_never_scored(teacher: Teaching, tmp_path: Path) -> None:
    server, url = teacher
    server.refused = "Say one"
    summary, groups = await play(text_of(url), tmp_path / "run")
    assert summary.written == 2
    assert summary.failed == {"server_failure": 1}
    assert all("Say one" not in str(line["messages"]) for line in groups), "the group gave way to another"
    failed = [line for line in lines(tmp_path / "run" / "rollouts.jsonl") if "Say one" in str(line["messages"])]
    assert {(line["stop_reason"], line["score"], line["state"]) for line in failed} == {
        ("server_failure", None, "failed")
    }
    assert max(line["attempt"] for line in failed) == 2
    assert all("server 'teacher' gave no usable answer" in line["error"] for line in failed)


async def test_unreachable_teacher_is_reported_before_any_rollout(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no server of the role 'teacher' can be reached"):
        await play(text_of("http://127.0.0.1:9/v1"), tmp_path / "run")


async def test_teacher_that_refuses_top_k_is_reported_before_any_rollout(teacher: Teaching, tmp_path: Path) -> None:
    teacher[0].most = 2
    with pytest.raises(
        RunError, match=r"distill: the teacher does not report which 3 tokens .*at most 2 prompt_logprobs"
    ):
        await play(text_of(teacher[1]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


async def test_a_rollout_that_waits_for_its_group_is_asked_about_once(teacher: Teaching, tmp_path: Path) -> None:
    server, url = teacher
    (tmp_path / "rank.py").write_text(
        "def rank(group):\n    return [float(len(one.final_response)) for one in group]\n"
    )
    text = text_of(url) + f'rewards: {{rank: {{fn: "{tmp_path}/rank.py:rank"}}}}\n'
    text = text.replace('rewards: {right: {fn: exact_match, args: {target: "{{ word }}"}}}\n', "")
    _, groups = await play(text, tmp_path / "run")
    assert len(server.asked) == 4
    for line in groups:
        check(line, 3)


async def test_the_teacher_is_asked_only_where_something_is_trained() -> None:
    class Asked:
        def __init__(self, failure: Failure | None = None) -> None:
            self.rollouts: list[str] = []
            self.failure = failure

        async def ask(self, rollout: Rollout) -> None:
            self.rollouts.append(rollout.id)
            if self.failure is not None:
                raise self.failure

    asked = Asked()
    drops = World(teacher=asked, on_stop_policies={StopReason.FINISHED: "drop"})
    await RolloutRunner(drops).start(row(), "g", 2)
    await RolloutRunner(World(teacher=asked), split="eval").start(row(), "g", 2)
    assert asked.rollouts == []
    await RolloutRunner(World(teacher=asked)).start(row(), "g", 2)
    assert sorted(asked.rollouts) == ["g-0", "g-1"]
    world = World(teacher=Asked(ServerFailure("the teacher is gone")))
    group = await RolloutRunner(world, retries=0).start(row(), "g", 2)
    assert (group.dropped, group.detail, group.scores) == (StopReason.SERVER_FAILURE, "the teacher is gone", [])


@pytest.mark.parametrize("by_hand", [False, True])
async def test_environments_made_of_the_spec_have_the_teacher_too(
    by_hand: bool, teacher: Teaching, tmp_path: Path
) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer", keeps_thinking=False)
    own = {"error_rate: 0.5": f'tokenizer: "{folder}"', str(small_tokenizer_path()): str(folder)}
    parent: Any = compile_spec(parse_spec(text_of(teacher[1], **own, **{"solution: {turns": "# {"}) + LAYERED))

    class Mine(parent):
        async def collect_trajectory(self, item: Any) -> Any:
            return await super().collect_trajectory(item)

    made = (Mine if by_hand else parent)(*parent.config_init())
    await made.setup()
    try:
        layers, _ = await made.collect_trajectories(await made.get_next_item())
        assert len(layers) == 2
        for layer in layers:
            check(layer, 3)
    finally:
        await made.shut_down()


def test_a_filler_has_a_place_for_the_teacher() -> None:
    whole = {"tokens": [5, 6], "masks": [MASKED, 6], "inference_logprobs": [1.0, -0.5], "scores": 1.0}
    whole |= {"ref_logprobs": [1.0, -0.5], "distill_token_ids": [[], [6]], "distill_logprobs": [[], [-0.5]]}
    _, second = (assemble(layer) for layer in stack_sequences([{**whole, FURTHER: [whole]}, whole]))
    assert second["tokens"] == [[5, 6], [5]]
    assert second["ref_logprobs"] == [[1.0, -0.5], [MASKED_LOGPROB]]
    assert (second["distill_token_ids"], second["distill_logprobs"]) == ([[[], [6]], [[]]], [[[], [-0.5]], [[]]])


def test_what_is_asked_defines_the_rollouts_that_are_trained_on() -> None:
    texts = [text_of("http://a/v1"), text_of("http://a/v1", **{"top_k: 3": "top_k: 4"})]
    texts.append(texts[0].replace("model: m", "model: other"))
    moved = text_of("http://b/v1")
    assert len({fingerprint(parse_spec(text), "process") for text in texts}) == 3
    assert len({fingerprint(parse_spec(text), "evaluate") for text in texts}) == 1
    assert fingerprint(parse_spec(moved), "process") == fingerprint(parse_spec(texts[0]), "process")


def other_vocabulary(folder: Path) -> Path:
    """The small tokenizer with two tokens exchanged."""
    made = tokenizer_folder(folder, keeps_thinking=True)
    path = made / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(content))
    return made


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            lambda text: text.replace("type: vllm", "type: openai"),
            "spec.yaml:10:19: a teacher must be a token-level server",
        ),
        (lambda text: text.replace("  teacher:", "  expert:"), "there is no server role `teacher`"),
        (lambda text: text.replace("{top_k: 3}", "{server: judge}"), "there is no server role `judge`"),
        (lambda text: text.replace("top_k", "topk"), "did you mean `top_k`"),
    ],
)
def test_validate_refuses_what_cannot_teach(tmp_path: Path, change: Callable[[str], str], complaint: str) -> None:
    (tmp_path / "spec.yaml").write_text(change(text_of("http://127.0.0.1:9/v1")))
    done = hermes("validate", "spec.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert complaint in done.stderr


def test_validate_compares_local_tokenizers_of_policy_and_teacher(tmp_path: Path) -> None:
    other, copy = other_vocabulary(tmp_path / "other"), tokenizer_folder(tmp_path / "copy", keeps_thinking=False)
    own = str(small_tokenizer_path())
    for name, folder in (("other", other), ("copy", copy)):
        text = text_of("http://127.0.0.1:9/v1", **{own: str(folder)})
        (tmp_path / f"{name}.yaml").write_text(text)
    assert "valid" in hermes("validate", "copy.yaml", cwd=tmp_path, loaded=LIBRARIES).stdout, (
        "another template, and the same tokens"
    )
    done = hermes("validate", "other.yaml", cwd=tmp_path, loaded=LIBRARIES)
    assert done.returncode == 2
    assert "other.yaml:10:12: the teacher's tokenizer" in done.stderr
    assert "the small built-in one), so it would read other texts" in done.stderr
    with pytest.raises(UserError, match="the teacher's tokenizer"):
        require_same_tokenizer(parse_spec((tmp_path / "other.yaml").read_text()))


def test_a_demo_has_a_scripted_teacher(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(text_of("http://127.0.0.1:9/v1"))
    done = hermes("run", "spec.yaml", "process", "--demo", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    groups: list[Any] = lines(tmp_path / "out" / "groups.jsonl")
    assert len(groups) == 2
    values = [value for line in groups for one in line["ref_logprobs"] for value in one[1:]]
    assert set(values) == {math.log(0.5)}


@pytest.mark.slow
async def test_it_arrives_at_an_atropos_trainer(teacher: Teaching, tmp_path: Path) -> None:
    async with trajectory_api() as url:
        serve = f"serve: {{group_size: 2, total_steps: 2, eval_every: 0, api_url: '{url}'}}\n"
        (tmp_path / "spec.yaml").write_text(text_of(teacher[1]) + serve)
        serving = asyncio.create_task(
            asyncio.to_thread(hermes, "run", "spec.yaml", "serve", "--out", "out", cwd=tmp_path)
        )
        batches = await asyncio.wait_for(train(url, steps=2, batch_size=2), 60)
        done = await serving
    assert done.returncode == 0, done.stderr
    for group in (group for batch in batches for group in batch):
        check(group, 3)
