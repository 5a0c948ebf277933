"""`hermes-rl init --from`: drafts of specs from verifiers and Inspect, valid, with what is missing named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hermes_rl.cli.main import status

MOVING = Path(__file__).parents[2] / "docs" / "moving.md"
BOMB = 'open("executed", "w").close()\n'
VERIFIERS = (
    BOMB
    + '''
import verifiers as vf
from datasets import load_dataset
from somewhere import searched

SYSTEM = "Answer {{ briefly }}."
WEIGHT = 0.5


def shout(text: str) -> str:
    """Say it aloud.

    Args:
        text: The words.
    """
    return text.upper()


def right(completion, answer, info) -> float:
    return float(completion[-1]["content"] == answer)


def load_environment(max_turns=7, split="train", **kwargs):
    dataset = load_dataset("owner/questions", "main", split=split, revision="abc").map(lambda row: row)
    rubric = vf.Rubric(funcs=[right], weights=[WEIGHT])
    rubric.add_reward_func(lambda completion: 1.0, weight=2)
    rubric.add_metric(right)
    env = vf.ToolEnv(
        dataset=dataset, system_prompt=SYSTEM, tools=[shout, searched], rubric=rubric, max_turns=max_turns, **kwargs
    )
    return env
'''
)
INSPECT = (
    BOMB
    + """
from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, Sample, hf_dataset
from inspect_ai.scorer import includes, model_graded_qa, pattern
from inspect_ai.solver import chain, chain_of_thought, generate, multiple_choice, prompt_template, system_message


@task
def one():
    return Task(
        dataset=[Sample(input="1+1?", target="2", metadata={"level": "easy"}), Sample(input="2+2?", target="4")],
        solver=chain(system_message("Be brief."), prompt_template("Think.\\n{prompt}"), chain_of_thought(), generate()),
        scorer=[includes(), model_graded_qa(partial_credit=True)],
        epochs=3,
        token_limit=1000,
        time_limit=60,
    )


@task
def two():
    return Task(dataset=hf_dataset("owner/set", split="test", sample_fields=FieldSpec(input="q", target="a")))
"""
)


def drafted(text: str, framework: str, folder: Path, name: str = "mine") -> tuple[dict[str, Any], str]:
    """Draft a file; return the spec and the text of its file."""
    (folder / f"{name}.py").write_text(text)
    assert status(["init", "--from", framework, str(folder / f"{name}.py")]) == 0
    written = (folder / name / f"{name}.yaml").read_text()
    return yaml.safe_load(written.replace("!raw ", "")), written


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "framework"), [("vf_prices", "verifiers"), ("vf_cart", "verifiers"), ("inspect_lines", "inspect")]
)
def test_drafts_of_the_examples_of_moving_are_valid(
    name: str, framework: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = dict(re.findall(r"^```python title=(\S+)\.py\n(.*?)^```$", MOVING.read_text(), re.MULTILINE | re.DOTALL))
    spec, text = drafted(blocks[name], framework, tmp_path, name)
    said = capsys.readouterr().out
    left = re.findall(r"^#   - (.*)$", text, re.MULTILINE)
    assert left and all(f"  {each}\n" in said for each in left)
    assert status(["validate", str(tmp_path / name / f"{name}.yaml")]) == 0
    if name == "vf_prices":
        assert spec["tools"] == [{"python": "vf_prices_code.py:price"}]
        assert spec["agent"] == {"max_turns": 5}
        assert spec["rewards"]["format_tags"] == {"args": {"tags": ["answer"]}, "weight": 0.2}
    if name == "vf_cart":
        assert spec["dataset"]["items"][0]["info"] == {"wanted": ["mug"]}
        assert spec["rewards"].keys() == {"bought", "llm_judge"}
        assert any("is_full" in each for each in left) and any("args_to_skip" in each for each in left)
    if name == "inspect_lines":
        assert spec["user"] == {"turns": [{"say": "Note the number, then answer with it again."}]}
        assert (spec["toolsets"], spec["evaluate"], spec["agent"]) == (["terminal"], {"rollouts": 4}, {"max_turns": 9})
        assert any("sandbox='docker'" in each for each in left) and any("uses store" in each for each in left)


def test_an_environment_of_verifiers_is_read_without_being_executed(tmp_path: Path) -> None:
    spec, text = drafted(VERIFIERS, "verifiers", tmp_path)
    assert not (tmp_path / "executed").exists()
    assert spec["dataset"] == {"path": "owner/questions", "name": "main", "split": "train"}
    assert 'system: !raw "Answer {{ briefly }}."' in text
    assert spec["agent"] == {"max_turns": 7}
    assert spec["rewards"]["right"] == {
        "fn": "mine_code.py:right",
        "args": {"answer": "{{ answer }}", "info": "{{ info }}"},
        "weight": 0.5,
    }
    assert [reward["weight"] for reward in spec["rewards"].values()] == [0.5, 0.0]
    for missing in ("revision='abc'", ".map(…)", "the reward lambda completion: 1.0", "the tool searched", "right"):
        assert re.search(rf"^#   - .*{re.escape(missing)}", text, re.MULTILINE), missing
    code = (tmp_path / "mine" / "mine_code.py").read_text()
    assert "def shout(text: str)" in code and "verifiers" not in code and "executed" not in code
    assert "    #     return float(completion[-1]" in code


def test_imports_and_files_of_the_old_directory_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
import json
from environments.shared import near
from .parsing import parsed
import verifiers as vf

def right(completion, answer):
    return near(parsed(completion), answer)

def load_environment():
    parser = vf.XMLParser(["reasoning", "answer"])
    return vf.SingleTurnEnv(dataset=[], rubric=vf.Rubric(funcs=[right, parser.get_format_reward_func()]))
"""
    spec, written = drafted(text, "verifiers", tmp_path)
    assert spec["rewards"]["format_tags"] == {"args": {"tags": ["reasoning", "answer"]}}
    left = re.findall(r"^#   - `(.*)`: copy the module next to the draft", written, re.MULTILINE)
    assert left == ["from environments.shared import near", "from .parsing import parsed"]
    assert status(["validate", "mine"]) == 2
    assert "needs the package `environments` (line 2)" in capsys.readouterr().err

    text = """
from inspect_ai import Task, task

@task
def capitals():
    return Task(dataset=csv_dataset("capitals.csv", to_sample), solver=[chain_of_thought(), generate()])
"""
    spec, written = drafted(text, "inspect", tmp_path, "capitals")
    assert spec["dataset"] == {"path": "capitals.csv", "eval": "only"}
    for missing in ("copy the file next to", "sample_fields=to_sample: define input", "add its text to prompt.user"):
        assert re.search(rf"^#   - .*{missing}", written, re.MULTILINE), missing


def test_names_that_are_assigned_again_are_followed(tmp_path: Path) -> None:
    """Most environments of the hub write `dataset = dataset.map(…)`."""
    text = """
import verifiers as vf
from datasets import load_dataset

def load_environment():
    dataset = load_dataset("owner/name", split="train")
    dataset = dataset.map(lambda row: row)
    dataset = dataset.shuffle(seed=1).select(range(9))
    rubric = vf.Rubric(funcs=[])
    rubric = vf.RubricGroup([rubric, vf.MathRubric()])
    prompt = "Think."
    prompt = prompt.strip()
    return vf.SingleTurnEnv(dataset=dataset, rubric=rubric, system_prompt=prompt)
"""
    spec, written = drafted(text, "verifiers", tmp_path)
    assert spec["dataset"] == {"path": "owner/name", "split": "train"}
    assert spec["rewards"] == {"math_equal": {"args": {"target": "{{ answer }}"}}}
    assert (spec["agent"], spec["prompt"]["system"]) == ({"max_turns": 1}, "Think.")
    assert all(f".{name}(…)" in written for name in ("map", "shuffle", "select"))


def test_functions_within_load_environment_are_moved(tmp_path: Path) -> None:
    """As most environments of the hub define their tools, rewards and dataset."""
    text = """
import verifiers as vf
from datasets import load_dataset

def load_environment(name="owner/name", old=False):
    if old:
        from other import load
        return load(name)

    def build_dataset():
        rows = load_dataset(name, split="train").map(lambda row: {"question": row["prompt"]})
        rows = rows.remove_columns(["prompt"])
        return rows

    async def search(query: str) -> list[str]:
        \'\'\'Search.

        Args:
            query: Words.
        \'\'\'
        return sorted(query)

    def close(completion, answer, **kwargs):
        def ratio(a, b):
            return float(len(a))

        return ratio(completion, answer)

    tools = [search]
    rubric = vf.JudgeRubric(judge_model="m")
    rubric.add_reward_func(close, weight=0.5)
    env = vf.ToolEnv(dataset=build_dataset, tools=tools, rubric=rubric, max_turns=3)
    return env
""".replace("\\'", "'")
    spec, written = drafted(text, "verifiers", tmp_path)
    assert spec["dataset"] == {"path": "owner/name", "split": "train"}
    assert spec["tools"] == [{"python": "mine_code.py:search"}]
    assert spec["rewards"]["close"] == {"fn": "mine_code.py:close", "args": {"answer": "{{ answer }}"}, "weight": 0.5}
    assert (spec["agent"], "llm_judge" in spec["rewards"]) == ({"max_turns": 3}, True)
    assert ".remove_columns(…)" in written and ".map(…)" in written
    code = (tmp_path / "mine" / "mine_code.py").read_text()
    assert "\nasync def search(query: str)" in f"\n{code}" and "    #     return ratio(completion, answer)" in code
    compile(code, "mine_code.py", "exec")


def test_a_deeply_nested_environment_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = "\n".join(f"    r{n} = vf.RubricGroup([r{n - 1}])" for n in range(1, 3000))
    text = f"def load_environment():\n    r0 = vf.Rubric()\n{names}\n    return vf.ToolEnv(rubric=r2999)\n"
    (tmp_path / "mine.py").write_text(text)
    assert status(["init", "--from", "verifiers", "mine.py"]) == 2
    assert "nested too deeply" in capsys.readouterr().err


def test_a_task_of_inspect_is_read_without_being_executed(tmp_path: Path) -> None:
    spec, text = drafted(INSPECT, "inspect", tmp_path)
    assert not (tmp_path / "executed").exists()
    assert spec["dataset"] == {
        "items": [{"input": "1+1?", "target": "2", "metadata": {"level": "easy"}}, {"input": "2+2?", "target": "4"}],
        "eval": "only",
    }
    assert spec["prompt"] == {"system": "Be brief.", "user": "Think.\n{{ input }}"}
    assert spec["agent"] == {"max_trajectory_tokens": 1000, "deadline": 60}
    assert spec["evaluate"] == {"rollouts": 3}
    assert spec["rewards"].keys() == {"contains_all", "llm_judge"}
    for missing in ("chain_of_thought()", "partial_credit=True", "the task two"):
        assert missing in text, missing
    assert status(["validate", str(tmp_path / "mine" / "mine.yaml")]) == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def f(: pass", "cannot be parsed as Python"),
        ("x = 1", "has no function load_environment"),
        ("def load_environment():\n    return make()[0]", "returns no environment that can be read"),
        ("\0", "cannot be parsed as Python"),
    ],
)
def test_files_without_an_environment_are_refused(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(text)
    assert status(["init", "--from", "verifiers", "mine.py"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "mine").exists()


def test_nothing_is_written_over_by_a_draft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafted(VERIFIERS, "verifiers", tmp_path)
    assert status(["init", "--from", "verifiers", "mine.py"]) == 2
    assert "already exists" in capsys.readouterr().err
