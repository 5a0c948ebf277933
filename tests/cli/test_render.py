"""`hermes-rl render` shows what `hermes-rl run` sends, to the last field, and asks nobody."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.cli.main import status
from tests.http_servers import Handler, serving

SPEC = """
name: asking
dataset:
  items:
  - {q: "What is 1+1?", a: "2", id: one}
  - {q: "What is 2+2?", a: "4", id: two}
  - {q: "What is 3+3?", a: "6", id: three}
  key: id
  eval: {fraction: 0.3}
prompt: {system: Be brief., user: "{{ q }} é<|im_end|>"}
toolsets: [todo]
agent: {temperature: 0.7, top_p: 0.9, max_tokens: 99, reasoning: {effort: low}, extra_body: {top_k: 5}}
rewards: {exact_match: {args: {target: "{{ a }}"}}}
solution: {turns: [{say: "{{ a }}"}]}
process: {group_size: 1, groups: 1}
"""


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "asking.yaml"
    path.write_text(SPEC)
    return str(path)


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A chat server that answers 2, and what it was sent."""
    sent: list[dict[str, Any]] = []

    class Model(Handler):
        def do_POST(self) -> None:  # noqa: N802 - the name is that of http.server
            sent.append(json.loads(self.body()))
            message = {"role": "assistant", "content": "2"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            choices = [{"message": message, "finish_reason": "stop"}]
            self.answer({"id": "1", "model": "m", "choices": choices, "usage": usage})

        def do_GET(self) -> None:  # noqa: N802 - the name is that of http.server
            self.answer({"data": [{"id": "m"}]})

    with serving(Model) as address:
        yield f"{address}/v1", sent


def test_a_chat_server_gets_exactly_that(
    spec: str, server: tuple[str, list[dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, sent = server
    policy = ["--openai.base_url", url, "--openai.model_name", "m"]
    assert status(["render", spec, "--json", *policy]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sent == [], "render asks nobody"
    assert status(["run", spec, "process", "--out", str(tmp_path / "run"), *policy]) == 0
    assert sent == [{"messages": found["messages"], "tools": found["tools"], **found["request"]}]
    assert found["sent_as"] == "messages"
    assert [tool["function"]["name"] for tool in found["tools"]] == ["todo"]


def test_a_token_level_policy_gets_exactly_that(spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = ["--set", "servers.policy.type=scripted"]
    run = str(tmp_path / "run")
    assert status(["run", spec, "process", "--out", run, "--quiet", *policy]) == 0
    capsys.readouterr()
    assert status(["show", run, "1", "--prompt", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert status(["render", spec, *policy]) == 0
    assert capsys.readouterr().out == got["text"] + "\n"
    assert status(["render", spec, "--json", *policy]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["sent_as"], found["tokens"], found["tools"]) == ("tokens", got["tokens"], got["tools"])
    assert status(["render", spec, "--tokens", *policy]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{len(got['tokens'])} tokens of hermes-rl/small: what the server is sent"
    assert [int(line.split()[1]) for line in lines[2:]] == got["tokens"]


@pytest.mark.parametrize(
    ("options", "question"),
    [
        (["--row", "three"], "What is 3+3?"),
        (["--row", "tw"], "What is 2+2?"),
        (["--row", "0", "--split", "eval"], "What is 1+1?"),
        (["--row", "on", "--split", "eval"], "What is 1+1?"),
    ],
)
def test_a_row_is_named_by_key_or_place(
    spec: str, capsys: pytest.CaptureFixture[str], options: list[str], question: str
) -> None:
    assert status(["render", spec, *options]) == 0
    found = capsys.readouterr()
    assert question in found.out
    assert "whatever its model" in found.err


def test_every_row_of_the_split_has_a_place(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for place in ("0", "1"):
        assert status(["render", spec, "--json", "--row", place]) == 0
        said.append(json.loads(capsys.readouterr().out)["row_key"])
    assert sorted(said) == ["three", "two"]
    assert status(["render", spec, "--row", "2"]) == 2
    assert "a place from 0 (rows: 2); --split eval looks among" in capsys.readouterr().err


def test_no_key_is_needed(spec: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    policy = ["--openai.base_url", "http://127.0.0.1:9/v1", "--openai.model_name", "m"]
    assert status(["render", spec, *policy, "--set", "servers.policy.api_key_env=NOT_SET_HERE"]) == 0
    out = capsys.readouterr().out
    assert "POST http://127.0.0.1:9/v1/chat/completions, row " in out
    assert "── system ──\nBe brief.\n" in out
    assert "── 1 tool ──" in out


def test_tokens_need_a_tokenizer(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["render", spec, "--tokens"]) == 2
    assert "names no policy, and so no tokenizer" in capsys.readouterr().err
    assert status(["render", spec, "--tokens", "--demo"]) == 0
    policy = ["--openai.base_url", "http://127.0.0.1:9/v1", "--openai.model_name", "/no/such/model"]
    capsys.readouterr()
    assert status(["render", spec, "--tokens", *policy]) == 2
    assert "the tokenizer '/no/such/model' cannot be loaded" in capsys.readouterr().err


def test_what_a_row_holds_is_only_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(
        'dataset: {items: [{q: "a\\x1b[2Jb\\u202e"}]}\nprompt: {user: "{{ q }}"}\n'
        "rewards: {exact_match: {args: {target: x}}}\n"
    )
    for options in ([], ["--demo"], ["--json"]):
        assert status(["render", str(path), *options]) == 0
        out = capsys.readouterr().out
        assert "\x1b" not in out
        assert "\u202e" not in out
        assert "\\u001b" in out


def test_row_that_does_not_exist_is_refused_with_the_number_of_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.yaml").write_text("dataset: {items: [{q: a}, {q: b}]}\nprompt: {user: '{{ q }}'}\n")
    assert status(["render", str(tmp_path / "s.yaml"), "--row", "7000"]) == 2
    assert "there is no row '7000': give a key, or a place from 0 (rows: 2)" in capsys.readouterr().err
