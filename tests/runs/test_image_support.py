"""Images for servers that take token ids are refused by `validate` and by the first request of a row."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hermes_rl.data.check import check_spec
from hermes_rl.runs.process import run_process
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.setup import RunOptions
from hermes_rl.spec.load import load_spec, parse_spec
from hermes_rl.tokens.load import load_tokenizer
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.servers.token_policy import TokenPolicy

STATIC = """
dataset: {items: [{q: hi, picture: pipe.png}]}
prompt: {user: [{text: "{{ q }}"}, {image: "{{ picture }}"}]}
rewards: {exact_match: {args: {target: hi}}}
"""
BY_ROW = """
dataset: {path: rows.jsonl, key: id}
prompt: {messages: "{{ messages }}"}
rewards: {exact_match: {args: {target: "{{ a }}"}}}
process: {groups: 2, group_size: 2, drop_uniform: false}
"""


@pytest.mark.parametrize("kind", ["vllm", "sglang", "atropos"])
def test_validate_refuses_picture_of_prompt_by_server_type(kind: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    seat = "agents: {a: {prompt: {user: [{image: x}]}, server: eyes}, b: {}}\nschedule: {order: alternate}\n"
    server = "{type: %s, base_url: 'http://127.0.0.1:1/v1', model: m}"
    eyes = f"servers: {{policy: {server % 'openai'}, eyes: {server % kind}}}\n"
    own = f"servers: {{policy: {server % kind}}}\n"
    blind = STATIC.replace('{image: "{{ picture }}"}', "{text: so}")
    for text, line in ((STATIC + own, "s.yaml:3:36"), (blind + seat + eyes, "s.yaml:5:30")):
        (tmp_path / "s.yaml").write_text(text)
        with pytest.raises(Exception, match=f"{line}: a server of type {kind} cannot be sent pictures"):
            load_spec(tmp_path / "s.yaml")
    parse_spec(STATIC + own.replace(kind, "openai"))


async def test_row_with_picture_costs_that_row_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    policy = TokenPolicy(load_tokenizer(None), lambda *_: "red<|im_end|>")
    async with policy.running() as url:
        look = {"type": "text", "text": "look"}
        contents = [
            [look, {"type": "image_url", "image_url": {"url": url.replace("/v1", "/picture")}}],
            [{"type": "image", "image": str(tmp_path / "pipe.png")}],
            [look],
            [look, look],
        ]
        rows = [
            {"id": f"row-{number}", "messages": [{"role": "user", "content": content}], "a": "red"}
            for number, content in enumerate(contents)
        ]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        server = (
            f"servers: {{policy: {{type: vllm, base_url: '{url}', model: m, tokenizer: {small_tokenizer_path()}}}}}\n"
        )
        spec = parse_spec(BY_ROW + server, folder=tmp_path)
        problems, _ = check_spec(spec)
        summary, _ = await run_process(
            spec, RunOptions("process", tmp_path / "run", environ={}, progress=Progress(quiet=True))
        )
    (problem,) = map(str, problems)
    assert "vllm: message 1" in problem and "(row row-0)" in problem and "image_url" in problem
    assert summary.written == 2
    records = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_text().splitlines()]
    ends = {(each["row_key"], each["stop_reason"]) for each in records}
    assert {"row-0", "row-1"} == {key for key, stop_reason in ends if stop_reason == "row_failure"}
    assert {"row-2", "row-3"} == {key for key, stop_reason in ends if stop_reason == "finished"}
    assert all("only text can be sent" in each["error"] for each in records if each["stop_reason"] == "row_failure")
    # A member whose prompt is refused asks once whether another prompt is answered, if its group still waits for it.
    assert "/picture" not in policy.told and 4 + 2 <= len(policy.asked) <= 4 + 4
