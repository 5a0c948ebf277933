"""Malformed specs of worlds, states, steps, arguments and task folders: each is one mistake, told at its place.

`▶` marks where the problem must be reported; it is taken out before the text is read.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_rl.data.check import check_spec
from hermes_rl.errors import SpecError
from hermes_rl.spec.load import load_spec

WORLD = '''
class World:
    """A world of three tools."""

    documents = [{"name": "look", "description": "Look.", "parameters": {"type": "object"}}]

    def __init__(self, item):
        self.item, self.over = item, False

    def answer(self, words):
        return "Yes."

    def call(self, name, arguments):
        return name

    def look(self, at: str) -> str:
        """Look at something."""
        return at

    def untyped(self, at) -> str:
        """Look at something."""
        return at


class Nothing:
    """A state that no row can be given to."""


class Two:
    """A state that asks for more than a row."""

    def __init__(self, item, other):
        self.item = item


def pick(at: str) -> str:
    """Pick something up."""
    return at


def compared(group):
    return [1.0] * len(group)
'''
HEAD = 'dataset: {items: [{q: "one", n: 1, says: [a, b]}, {q: "two", n: 2, says: [c]}]}\nprompt: {user: "{{ q }}"}\n'
STATE = HEAD + "state: world.py:World\nrewards: {environment_rewards: {}}\n"
REPLAY = HEAD + "state: world.py:World\ntools: [{state: look}]\n"
JUDGE = HEAD + "servers: {judge: {type: scripted}}\n"
USER = "servers: {user: {type: scripted}}\n"
RATED = HEAD + "servers: {rater: {type: ▶vllm-classify, base_url: 'http://r', model: m}}\n"
RATED_ = RATED.replace("▶", "")
SAYS = HEAD + "rewards: {exact_match: {args: {target: a}, per_step: mean}}\n"

CASES: dict[str, tuple[str, str]] = {
    # user: code of the state
    "a method that is not there": (STATE + "user: {state: ▶answr}\n", "no `answr`; did you mean `answer`?"),
    "a method of no state": (HEAD + "user: {state: ▶answer}\n", "there is no `state:` in this spec that could answer"),
    "a method that is a list": (STATE + "user: {state: ▶[answer]}\n", "expected text, got a list"),
    "a method that is a number": (STATE + "user: {state: ▶3}\n", "expected text, got the number 3"),
    "code and a model": (STATE + "user: {state: answer, ▶server: user}\n", "is for another kind of user than `state`"),
    "code and a system prompt": (STATE + "user: {state: answer, ▶system: Be kind.}\n", "another kind of user"),
    "code and stop phrases": (STATE + "user: {state: answer, ▶stop: [END]}\n", "another kind of user"),
    "code and tools of a user": (STATE + "user: {state: answer, ▶tools: [{state: look}]}\n", "another kind of user"),
    "code and fixed words": (STATE + "user: {state: answer, ▶turns: [a]}\n", "another kind of user than `state`"),
    "no turn at all": (STATE + "user: {state: answer, max_turns: ▶0}\n", "must be at least 1"),
    "no turn of the agent": (STATE + "user: {state: answer, max_agent_turns: ▶0}\n", "must be at least 1"),
    "turns in words": (STATE + "user: {state: answer, max_agent_turns: ▶few}\n", 'got the text "few"'),
    "opening in words": (STATE + "user: {state: answer, speaks_first: ▶yes}\n", "expected true or false"),
    "a word that is none": (STATE + "user: {▶sate: answer}\n", "did you mean `state`?"),
    # user: fixed words
    "words as a text": (SAYS + "user: {turns: ▶go on}\n", "expected a list, got the text"),
    "words as a mapping": (SAYS + "user: {turns: ▶{say: a}}\n", "expected a list, got a mapping"),
    "words without words": (SAYS + "user: {turns: [a, ▶{tools: []}]}\n", "missing key `say`"),
    "words that are a number": (SAYS + "user: {turns: [▶3]}\n", "expected a mapping, got the number 3"),
    "tools of words as a text": (SAYS + "user: {turns: [{say: a, tools: ▶look}]}\n", "expected a list, got the text"),
    "a key of words": (SAYS + "user: {turns: [{say: a, ▶tool: [look]}]}\n", "did you mean `tools`?"),
    "words and turns": (SAYS + "user: {turns: [a], ▶max_turns: 3}\n", "as many turns as there are words"),
    "words and a stop phrase": (SAYS + "user: {turns: [a], ▶stop: [END]}\n", "another kind of user than `turns`"),
    "a column of words that is not there": (SAYS + 'user: {turns: ▶"{{ say }}"}\n', "did you mean `says`?"),
    "a column that is no words": (SAYS + 'user: {turns: ▶"{{ n }}"}\n', "does not fit"),
    "a column in words that is not there": (SAYS + 'user: {turns: [{say: ▶"{{ nn }}"}]}\n', "`nn`"),
    # steps
    "a least reward in words": (SAYS + "user: {turns: [{say: a, min_reward: ▶much}]}\n", "got the text"),
    "a least reward as a list": (SAYS + "user: {turns: [{say: a, min_reward: ▶[1]}]}\n", "got a list"),
    "a least reward in words by name": (
        SAYS + "user: {turns: [{say: a, min_reward: {exact_match: ▶high}}]}\n",
        "got the text",
    ),
    "a least reward before all": (
        SAYS + "user: {speaks_first: true, turns: [{say: a, ▶min_reward: 1}]}\n",
        "no step comes before the first words",
    ),
    "a least reward of nothing": (
        HEAD + "rewards: {exact_match: {args: {target: a}}}\nuser: {turns: [{say: a, ▶min_reward: 1}]}\n",
        "no reward looks at steps: give one `per_step: mean`",
    ),
    "a least reward that the row has not": (
        SAYS + 'user: {turns: [{say: a, min_reward: ▶"{{ q }}"}]}\n',
        "does not fit",
    ),
    "a strategy that is none": (
        HEAD + "rewards: {exact_match: {args: {target: a}, per_step: ▶final}}\nuser: {turns: [a]}\n",
        "choices: mean, last",
    ),
    "steps of nobody": (HEAD + "rewards: {exact_match: {args: {target: a}, ▶per_step: mean}}\n", "`user: {turns: "),
    "steps in a fresh sandbox": (
        HEAD + "rewards: {exact_match: {args: {target: a}, per_step: mean, sandbox: ▶fresh}}\nuser: {turns: [a]}\n",
        "a reward per step uses the rollout's sandbox",
    ),
    "the step of no step": (
        HEAD + 'rewards: {exact_match: {args: {target: ▶"{{ step }}"}}}\nuser: {turns: [a]}\n',
        "`step`",
    ),
    "a step beyond the row": (
        HEAD + 'rewards: {exact_match: {args: {target: ▶"{{ says[step].text }}"}, per_step: mean}}\nuser: {turns: [a]}',
        "text",
    ),
    "a file of two kinds": (
        SAYS + "user: {turns: [{say: a, files: [{to: b, content: c, ▶base64: Yg==}]}]}\n",
        "`content` is there already",
    ),
    "a file of no place": (SAYS + "user: {turns: [{say: a, files: [▶{content: c}]}]}\n", "missing key `to`"),
    "a file of odd permissions": (
        SAYS + "user: {turns: [{say: a, files: [{to: b, content: c, mode: ▶rwx}]}]}\n",
        "expected octal permissions such as 0755",
    ),
    "a file twice": (
        SAYS + "user: {turns: [{say: a, files: [{to: b, content: c}, {to: ▶./b, content: c}]}]}\n",
        "file number 1 is put at",
    ),
    "a file from elsewhere": (
        SAYS + "user: {turns: [{say: a, files: [{to: b, from: ▶../secret}]}]}\n",
        "below the folder of the spec",
    ),
    "a file that is not there": (
        SAYS + "user: {turns: [{say: a, files: [{to: b, from: ▶nothing.txt}]}]}\n",
        "there is no file or directory",
    ),
    "a command that is no list": (SAYS + "user: {turns: [{say: a, setup: ▶make}]}\n", "expected a list, got the text"),
    "a command that is a mapping": (SAYS + "user: {turns: [{say: a, setup: [▶{run: make}]}]}\n", "expected text"),
    # state
    "an end that is not there": (HEAD + "state: {python: world.py:World, done: ▶ended}\n", "has no `ended`"),
    "a close that is not there": (HEAD + "state: {python: world.py:World, close: ▶shut}\n", "has no `shut`"),
    "an isolation that there is not": (
        HEAD + "state: {python: world.py:World, isolate: ▶own}\n",
        "not possible here; choices: none, process, reuse, sandbox",
    ),
    "an isolation that is nearly right": (
        HEAD + "state: {python: world.py:World, isolate: ▶reused}\n",
        "did you mean `reuse`?",
    ),
    "an isolation of a tool of the state": (STATE + "tools: [{state: look, ▶isolate: none}]\n", "of `state:`"),
    **{
        f"the former key with {old}": (
            HEAD + f"state: {{python: world.py:World, ▶process: {old}}}\n",
            f"`state.process: {old}` is now `state.isolate: {new}`; `hermes-rl migrate ",
        )
        for old, new in (("true", "process"), ("false", "none"), ("reused", "reuse"))
    },
    "the former key of a reward": (
        HEAD + "rewards: {given: {fn: world.py:given, ▶process: false}}\n",
        "is now `rewards.given.isolate: none`",
    ),
    "the former key of a tool": (
        HEAD + "tools: [{python: world.py:pick, ▶process: true}]\n",
        "`tools.0.isolate: process`",
    ),
    "a state without its class": (HEAD + "▶state: {isolate: process}\n", "missing key `python`"),
    "a class that is not there": (HEAD + "state: {python: ▶world.py:Wrld, isolate: none}\n", "did you mean `World`?"),
    "a class that takes no row": (HEAD + "state: ▶world.py:Nothing\n", "takes the row"),
    "a class that takes more": (HEAD + "state: {python: ▶world.py:Two}\n", "cannot be made of the row alone"),
    # tools
    "schemas that are not there": (STATE + "tools: [{state: call, schemas: ▶document}]\n", "did you mean `documents`?"),
    "arguments that are checked in another way": (
        STATE + "tools: [{state: look, arguments: ▶lenient}]\n",
        "choices: strict, repair",
    ),
    "the end of another function": (
        STATE + "tools: [{python: world.py:pick, ends_rollout: [▶drop]}]\n",
        "the tool is named `pick`",
    ),
    "an end that is no list": (STATE + "tools: [{state: look, ends_rollout: ▶look}]\n", "expected a list"),
    "a parameter without a type": (STATE + "tools: [{state: ▶untyped}]\n", "a parameter without a type: `at`"),
    "no error at all": (STATE + "agent: {max_tool_errors: ▶0}\n", "must be at least 1"),
    "errors in words": (STATE + "agent: {max_tool_errors: ▶ten}\n", 'got the text "ten"'),
    # score, endings, solution
    "another way to combine": (STATE + "score: {combine: ▶mean}\n", "choices: sum, product, minimum"),
    "a way that is nearly one": (STATE + "score: {combine: ▶minium}\n", "did you mean `minimum`?"),
    "an ending that is nearly one": (STATE + "on_stop: {▶step_fail: 0}\n", "did you mean `step_failed`?"),
    "an ending of the world": (STATE + "on_stop: {▶world_ended: 0}\n", "there is no stop reason `world_ended`"),
    "a user's call without a name": (
        STATE + "solution: {turns: [{user_tools: [▶{args: {}}], user: Hi.}]}\n",
        "missing key `name`",
    ),
    # rewards
    "a reward of the world with arguments": (
        HEAD + "rewards: {environment_rewards: {args: {▶weight: 1}}}\n",
        "has no argument `weight`; it takes none",
    ),
    "a command that is missing": (HEAD + "rewards: {▶reward_file: {}}\n", "needs `command`"),
    "a name that is a list": (
        HEAD + "rewards: {reward_file: {args: {command: make, name: ▶[a]}}}\n",
        "`reward_file` takes str here",
    ),
    # which tools
    "names of a function": (STATE + "tools: [{python: world.py:pick, ▶names: [pick]}]\n", "write file.py:* to choose"),
    "a mark of a function": (STATE + "tools: [{python: world.py:pick, ▶decorated_with: tool}]\n", "py:* to choose"),
    "names of a server": (STATE + "tools: [{mcp: {name: a, command: a}, ▶names: [b]}]\n", "use `allow`"),
    "names as a text": (STATE + "tools: [{state: look, names: ▶look}]\n", "expected a list, got the text"),
    "names of a column that is not there": (STATE + 'tools: [{state: look, names: ▶"{{ say }}"}]\n', "mean `says`?"),
    "names of a column that is no list": (STATE + 'tools: [{state: look, names: ▶"{{ n }}"}]\n', "does not fit"),
    "names by row of a file": (STATE + 'tools: [{python: "world.py:*", names: ▶"{{ says }}"}]\n', "same for each row"),
    "a mark of a document": (
        STATE + "tools: [{state: call, schemas: documents, ▶decorated_with: tool}]\n",
        "`schemas` describes tools, of which none is a function",
    ),
    "a mark in a list": (STATE + "tools: [{state: look, decorated_with: ▶[tool]}]\n", "expected text, got a list"),
    "all of a file that is not there": (STATE + 'tools: [{python: ▶"word.py:*"}]\n', "did you mean `world.py`?"),
    "schemas of a column that is not there": (STATE + 'tools: [{state: call, schemas: ▶"{{ tool }}"}]\n', "`tool`"),
    "schemas of a column that is no list": (STATE + 'tools: [{state: call, schemas: ▶"{{ n }}"}]\n', "does not fit"),
    "schemas of a file that is not there": (
        STATE + "tools: [{state: call, schemas: {file: ▶tools.json}}]\n",
        "there is no file",
    ),
    "schemas with another key": (
        STATE + "tools: [{state: call, schemas: {▶file: a.json, path: b.json}}]\n",
        "unknown key `path`",
    ),
    # a replay of gold
    "a replay of no state": (
        HEAD + "rewards: {▶state_matches: {}}\nsolution: {turns: [{say: a}]}\n",
        "there is no `state:` in this spec that could match",
    ),
    "a replay of nothing": (REPLAY + "rewards: {▶state_matches: {}}\n", "`solution` has no turns for this reward"),
    "a replay of a patch": (
        REPLAY + "rewards: {▶state_matches: {}}\nsolution: {patch: a}\n",
        "`solution` has no turns for this reward",
    ),
    "a comparison of what is not there": (
        REPLAY + "rewards: {state_matches: {args: {compare: [item, ▶ovr]}}}\nsolution: {turns: [{say: a}]}\n",
        "has no `ovr`; did you mean `over`?",
    ),
    "a comparison of one word": (
        REPLAY + "rewards: {state_matches: {args: {compare: ▶item}}}\nsolution: {turns: [{say: a}]}\n",
        "`state_matches` takes list[str] | None here",
    ),
    "gold that is a number": (
        REPLAY + "rewards: {state_matches: {args: {gold: ▶3}}}\n",
        "`state_matches` takes list[GoldTurn] | None here",
    ),
    # assertions for a judge
    "a judge by nothing": (JUDGE + "rewards: {▶llm_judge: {}}\n", "a judge needs one of rubric or assertions"),
    "a judge by two": (
        JUDGE + "rewards: {llm_judge: {args: {rubric: a, ▶assertions: [b]}}}\n",
        "a judge takes one of rubric or assertions; `rubric` is there already",
    ),
    "assertions as a text": (
        JUDGE + "rewards: {llm_judge: {args: {assertions: ▶it is right}}}\n",
        "`llm_judge` takes list[str] | None here",
    ),
    "assertions of a column that is none": (
        JUDGE + 'rewards: {llm_judge: {args: {assertions: ▶"{{ sayz }}"}}}\n',
        "did you mean `says`?",
    ),
    "assertions of a column that is no list": (
        JUDGE + 'rewards: {llm_judge: {args: {assertions: ▶"{{ n }}"}}}\n',
        "does not fit",
    ),
    "a need that is none": (
        JUDGE + "rewards: {llm_judge: {args: {assertions: [a], need: ▶most}}}\n",
        "`llm_judge` takes Literal['all', 'share'] here",
    ),
    "a need of a rubric": (
        JUDGE + "rewards: {llm_judge: {args: {rubric: a, ▶need: all}}}\n",
        "`need` has no effect together with `rubric`",
    ),
    "a scale of assertions": (
        JUDGE + "rewards: {llm_judge: {args: {assertions: [a], ▶scale: [0, 5]}}}\n",
        "`scale` has no effect together with `assertions`",
    ),
    "a place that is none": (
        JUDGE + "rewards: {llm_judge: {args: {rubric: a, where: ▶all}}}\n",
        "`llm_judge` takes Literal['final', 'conversation'] here",
    ),
    # code over a model's words, and between them
    "an edit that is not there": (STATE + USER + "user: {transform: ▶answr}\n", "no `answr`; did you mean `answer`?"),
    "an edit of no state": (HEAD + USER + "user: {transform: ▶answer}\n", "no `state:` in this spec that could"),
    "an edit that is a list": (STATE + USER + "user: {transform: ▶[answer]}\n", "expected text, got a list"),
    "an edit of code": (STATE + "user: {state: answer, ▶transform: answer}\n", "for another kind of user than `state`"),
    "an edit of fixed words": (STATE + "user: {turns: [a], ▶transform: answer}\n", "another kind of user than `turns`"),
    "a hook that is not there": (
        HEAD
        + USER
        + "state: {python: world.py:World, before_user_turn: ▶lok}\nuser: {}\nrewards: {environment_rewards: {}}",
        "has no `lok`; did you mean `look`?",
    ),
    "a hook between nobody's words": (
        HEAD + "state: {python: world.py:World, ▶before_user_turn: look}\nrewards: {environment_rewards: {}}\n",
        "there is no `user:` in this spec",
    ),
    # reward models
    "a reward model without a model": (
        HEAD
        + "servers: {▶r: {type: vllm-score, base_url: 'http://r'}}\nrewards: {reward_model: {args: {server: r}}}\n",
        "missing key `model`",
    ),
    "a type that is nearly one": (
        HEAD
        + "servers: {r: {type: ▶vllm-scores, base_url: 'http://r', model: m}}\n"
        + "rewards: {environment_rewards: {}}\n",
        "did you mean `vllm-score`?",
    ),
    "a reward model that plays": (
        HEAD
        + "servers: {policy: {type: ▶vllm-pooling, base_url: 'http://r', model: m}}\n"
        + "rewards: {environment_rewards: {}}\n",
        "a server of type vllm-pooling is a reward model, which says nothing",
    ),
    "a reward model as a user": (
        RATED + "user: {server: rater}\nrewards: {environment_rewards: {}}\n",
        "a server of type vllm-classify is a reward model, which says nothing",
    ),
    "a reward model that is not there": (RATED_ + "rewards: {▶reward_model: {}}\n", "no server role `reward_model`"),
    "a reward model that is nearly there": (
        RATED_ + "rewards: {reward_model: {args: {server: ▶rate}}}\n",
        "there is no server role `rate`; did you mean `rater`?",
    ),
    "a reward model that talks": (
        JUDGE.replace("scripted", "openai, base_url: 'http://r', model: m")
        + "rewards: {reward_model: {args: {server: ▶judge}}}\n",
        "`judge` is not a reward model; expected type vllm-score or vllm-classify or vllm-pooling",
    ),
    "a judge that gives numbers": (
        RATED_ + "rewards: {llm_judge: {args: {rubric: a, server: ▶rater}}}\n",
        "`rater` is a reward model, which says nothing; `reward_model` takes its number",
    ),
    "an index in words": (
        RATED_ + "rewards: {reward_model: {args: {server: rater, index: ▶last}}}\n",
        "`reward_model` takes int | None here",
    ),
    # task folders
    "a folder of two kinds": ("dataset: {harbor: tasks, ▶path: rows.jsonl}\nprompt: {user: a}\n", "`harbor` is there"),
    "a revision of a folder": ("dataset: {harbor: tasks, ▶revision: main}\nprompt: {user: a}\n", "goes with `path`"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_problem_is_reported_at_the_marked_position(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("world.py").write_text(WORLD)
    marked, fragment = CASES[name]
    before, mark, after = marked.partition("▶")
    assert mark
    Path("spec.yaml").write_text(before + after, encoding="utf-8")
    try:
        problems, _ = check_spec(load_spec("spec.yaml"))
    except SpecError as error:
        problems = list(error.problems)
    assert len(problems) == 1, "\n".join(map(str, problems))
    (problem,) = problems
    line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
    assert str(problem).startswith(f"spec.yaml:{line}:{column}: "), str(problem)
    assert fragment in problem.message
    assert "\n" not in problem.message and len(problem.message) < 400, "one sentence of help"


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 60
