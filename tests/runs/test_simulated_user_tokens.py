"""A simulated user who talks to a token-level policy: sampled tokens are trained on, all of them and nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hermes_rl.runs.process import run_process
from hermes_rl.runs.setup import RunOptions
from hermes_rl.spec.load import load_spec
from hermes_rl.tokens.hub import HubTokenizer
from hermes_rl.tokens.transcript import unpacked
from tests.agent.scripted_chat import ScriptedChat, call, calls, says
from tests.env.test_token_exact import STOP, tokenizer_folder
from tests.runs.playing import lines
from tests.servers.token_policy import TokenPolicy

CODE = '''
def look(what: str) -> str:
    """Look at something."""
    return f"there is one {what} on the shelf"


def note(word: str) -> str:
    """Write down a word."""
    return f"noted {word} in the book"
'''
SPEC = """
version: 1
name: shop
dataset: {{items: [{{}}]}}
prompt: {{system: You run a shop.}}
tools: [{{python: "code.py:look"}}]
user: {{system: You want a pear., speaks_first: true, stop: ["goodbye"], tools: [{{python: "code.py:note"}}]}}
rewards: {{said: {{fn: contains_all, args: {{values: [apple]}}}}}}
servers:
  policy: {{type: {kind}, base_url: "{policy}", model: m, tokenizer: "{tokenizer}"}}
  user: {{type: openai, base_url: "{user}", model: u}}
process: {{group_size: 1, groups: 1}}
"""
THOUGHT = "<think>\nhm\n</think>\n\n"
LOOK = '<tool_call>\n{{"name":"look", "arguments": {{"what":   "{}"}}}}\n</tool_call>'
SAYS = [LOOK.format("pear"), "Here is a pear.", LOOK.format("apple"), "And an apple."]
USER = [
    says("A pear please."),
    calls(call("note", {"word": "thrift"})),
    says("An apple too."),
    says("Thanks, goodbye."),
]
CONTEXT = ["You run a shop", "pear please", "one pear on the shelf", "apple too", "one apple on the shelf"]


@pytest.mark.parametrize("kind", ["vllm", "sglang", "atropos"])
@pytest.mark.parametrize("keeps_thinking", [True, False])
async def test_only_what_the_policy_sampled_is_trained_on(tmp_path: Path, kind: str, keeps_thinking: bool) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer", keeps_thinking=keeps_thinking)
    tokenizer = HubTokenizer(str(folder))
    policy, run = await played(tmp_path, kind, tokenizer, str(folder))
    (record,) = lines(run / "rollouts.jsonl")
    assert (record["stop_reason"], record["turns"], record["score"]) == ("user_stop", 4, 1.0)
    sequences = [unpacked(one) for one in record["sequences"]]
    assert len(sequences) == (1 if keeps_thinking else 4), "thinking that is dropped begins another, visibly"
    trained = [token for line in sequences for token in line.trained]
    assert trained == [token for logged in policy.log for token in logged.ids]
    seen, said = tokenizer.decode(sequences[-1].tokens), tokenizer.decode(trained)
    assert all(words in seen and words not in said for words in CONTEXT)
    assert "noted thrift" not in seen, "the user's tools are its own"
    groups = lines(run / "groups.jsonl")
    assert len(groups) == len(sequences), "a layer for each"
    assert all(group["provenance"]["exact"] for group in groups)


async def played(folder: Path, kind: str, tokenizer: HubTokenizer, name: str) -> tuple[TokenPolicy, Path]:
    """One rollout of two turns of the user, each answered by a call and by words; the policy and the run directory."""
    answers = iter(SAYS)

    def write(_prompt: str, _chance: random.Random) -> str:
        return THOUGHT + next(answers) + STOP

    policy = TokenPolicy(tokenizer, write, ("completions" if kind == "vllm" else "generate",))
    user = ScriptedChat(list(USER))
    stop_user = await user.start()
    (folder / "code.py").write_text(CODE)
    spec = folder / "shop.yaml"
    async with policy.running() as url:
        spec.write_text(SPEC.format(kind=kind, policy=url, tokenizer=name, user=user.url))
        _, directory = await run_process(load_spec(spec), RunOptions("process", out=folder / "out"))
    await stop_user()
    return policy, directory.path
