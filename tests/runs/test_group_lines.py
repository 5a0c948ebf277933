"""Groups whose rollouts have several sequences, in process mode: a line per layer, found again after a crash."""

from __future__ import annotations

import json
from operator import itemgetter
from pathlib import Path
from typing import Any

from hermes_rl.runs.process import ProcessSummary, run_process
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.regrade import regrade
from hermes_rl.runs.setup import RunOptions
from hermes_rl.spec.load import parse_spec
from hermes_rl.spec.overrides import parse_extra_args
from tests.env.test_token_exact import tokenizer_folder
from tests.runs.playing import lines

TEXT = """
name: layered
dataset: {{items: [{{q: one}}, {{q: two}}]}}
prompt: {{user: "{{{{ q }}}}"}}
toolsets: [todo]
solution:
  turns:
    - {{say: "<think>\\nhm\\n</think>\\n\\nfirst", tools: [{{name: todo, args: {{todos: []}}}}]}}
    - {{say: "the answer is 7"}}
rewards: {{right: {{fn: regex_match, args: {{pattern: "is 7"}}}}}}
servers: {{policy: {{type: scripted, tokenizer: "{tokenizer}"}}}}
process: {{groups: 2, group_size: 2}}
"""


async def play(folder: Path, tokenizer: Path) -> tuple[ProcessSummary, list[dict[str, Any]]]:
    spec = parse_spec(TEXT.format(tokenizer=tokenizer))
    summary, directory = await run_process(spec, RunOptions("process", folder, progress=Progress(quiet=True)))
    return summary, [json.loads(line) for line in (directory.path / "groups.jsonl").read_text().splitlines()]


async def test_each_layer_is_a_line_and_a_group_is_all_of_its_lines(tmp_path: Path) -> None:
    tokenizer = tokenizer_folder(tmp_path / "tokenizer", keeps_thinking=False)
    summary, lines = await play(tmp_path / "run", tokenizer)
    assert (summary.written, len(lines)) == (2, 4)
    assert [(line["layer"], line["layers"]) for line in lines] == [(0, 2), (1, 2)] * 2
    assert all(line["provenance"]["exact"] and len(line["tokens"]) == 2 for line in lines)
    again, same = await play(tmp_path / "run", tokenizer)
    assert (again.existing, again.written, again.attempts, same) == (2, 0, 0, lines)
    path = tmp_path / "run" / "groups.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines[:3]))
    mended, made = await play(tmp_path / "run", tokenizer)
    assert (mended.existing, mended.written, mended.attempts) == (1, 1, 0), "made from the rollouts, nothing is played"
    assert sorted(made, key=lambda line: (line["group"], line["layer"])) == sorted(
        lines, key=lambda line: (line["group"], line["layer"])
    )


async def test_regrade_writes_every_layer_with_provenance_and_advantages(tmp_path: Path) -> None:
    tokenizer = tokenizer_folder(tmp_path / "tokenizer", keeps_thinking=False)
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def turns(result):\n    return [1.0 for _ in range(result.turns_used)]\n")
    with_turns = TEXT.replace("rewards: {{", f'rewards: {{{{turns: {{{{fn: "{rewards}:turns"}}}}, ')
    spec = parse_spec(with_turns.format(tokenizer=tokenizer))
    _, directory = await run_process(spec, RunOptions("process", tmp_path / "run", progress=Progress(quiet=True)))
    path = directory.path / "groups.jsonl"
    played = lines(path)
    done = await regrade(
        directory.path, parse_extra_args([], ["rewards.right.weight=3"]), progress=Progress(quiet=True)
    )
    assert done.groups == 2
    order = itemgetter("group", "layer")
    regraded = sorted(lines(path), key=order)
    assert [line["scores"] for line in regraded] != [line["scores"] for line in sorted(played, key=order)]
    for old, new in zip(sorted(played, key=order), regraded, strict=True):
        assert {**new, "scores": None, "advantages": None} == {**old, "scores": None, "advantages": None}
        assert new["provenance"]["exact"]
        assert new["advantages"] is not None
        assert [len(line) for line in new["advantages"]] == [len(line) for line in new["tokens"]]


async def test_reward_overrides_are_in_every_layer_and_survive_resuming(tmp_path: Path) -> None:
    tokenizer = tokenizer_folder(tmp_path / "tokenizer", keeps_thinking=False)
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "from hermes_rl import Score\n"
        "def right(result, item):\n"
        "    return Score(1.0, overrides={'set_advantage_to_zero': True} if item['q'] == 'one' else {})\n"
    )
    text = TEXT.replace('{{fn: regex_match, args: {{pattern: "is 7"}}}}', "{{fn: 'REWARDS:right'}}")
    spec = parse_spec(text.replace("REWARDS", str(rewards)).format(tokenizer=tokenizer))
    launch = RunOptions("process", tmp_path / "run", progress=Progress(quiet=True))
    _, directory = await run_process(spec, launch)
    made = lines(directory.path / "groups.jsonl")
    told = sorted((line["row_key"], line["layer"], line["overrides"]) for line in made)
    zero = [{"set_advantage_to_zero": True}] * 2
    assert [overrides for *_, overrides in told] in ([zero, zero, None, None], [None, None, zero, zero])
    (directory.path / "groups.jsonl").unlink()
    await run_process(spec, launch)
    assert sorted(map(json.dumps, lines(directory.path / "groups.jsonl"))) == sorted(map(json.dumps, made))


async def test_the_images_of_the_prompt_are_in_the_group(tmp_path: Path) -> None:
    picture = "https://a.example/x.png"
    text = """
dataset: {items: [{q: one, i: "PICTURE"}, {q: two, i: ""}]}
prompt: {user: [{text: "{{ q }}"}, {image: "{{ i }}"}]}
solution: {turns: [{say: seven}]}
rewards: {right: {fn: regex_match, args: {pattern: seven}}}
servers: {policy: {type: scripted}}
process: {groups: 2, group_size: 2}
""".replace("PICTURE", picture)
    launch = RunOptions("process", tmp_path / "run", progress=Progress(quiet=True))
    _, directory = await run_process(parse_spec(text), launch)
    images = [line["images"] for line in lines(directory.path / "groups.jsonl")]
    assert len(images) == 2 and None in images and [[picture], [picture]] in images
