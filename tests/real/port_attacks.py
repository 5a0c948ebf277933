"""Try attacks on a shipped port from which an agent must gain nothing, in the working directory of this process.

    python port_attacks.py KIND NAME

Prints a JSON object, whose form depends on the kind; see the functions at the end.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import pickle
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from hermes_rl import Env, open_env
from hermes_rl.data.rows import Row
from hermes_rl.rollouts.solutions import gold_turns
from hermes_rl.tools.execute import MAX_CALLS_PER_TURN
from tests.real.port_trajectories import UNKNOWN, Script, played

AT_A_TIME = asyncio.Semaphore(8)


def rows_of(env: Env, count: int, step: int = 1) -> list[Row]:
    """Return a few rows; evaluation rows if there are no others."""
    return list(islice(env.rows("eval" if env.spec.dataset.eval.only else "train"), 0, count * step, step))


async def score(env: Env, row: Row, script: Script) -> float:
    """Return the score of a rollout that plays a script and then ends."""
    async with AT_A_TIME:
        rollout = await played(env, row, script)
    assert rollout.score is not None, (row.key, rollout.error)
    return rollout.score


async def refused(name: str) -> dict[str, list[float]]:
    """Play solutions with more calls than a turn allows, and their texts alone; return both scores by row."""

    async def scores(row: Row) -> list[float]:
        turns: Script = [[asdict(call) for call in turn.tools] or turn.say for turn in gold_turns(env.spec, row)]
        return [await score(env, row, script) for script in ([*map(late, turns)], [*filter(said, turns)] or [""])]

    async with open_env(name) as env:
        rows = rows_of(env, 8, 12)
        return dict(zip([row.key for row in rows], await asyncio.gather(*map(scores, rows)), strict=True))


def late(turn: Any) -> Any:
    """Return a turn whose calls are all refused, with readable arguments."""
    return [*UNKNOWN * MAX_CALLS_PER_TURN, *turn] if isinstance(turn, list) else turn


def said(turn: Any) -> bool:
    return not isinstance(turn, list)


async def saved(name: str) -> dict[str, float]:
    """Let one rollout save a game that another one restores, and name files of the working directory."""
    async with open_env(name) as env:
        row = next(row for row in env.rows() if row.columns["quest"] >= 4)
        walk = [turn["say"] for turn in row.columns["walkthrough"]]
        kinds = {
            "gold": walk,
            "saves": [*walk[:-1], "save", "mine"],
            "restores": ["restore", "mine", walk[-1]],
            "restores the default": ["restore", walk[-1]],
            "writes": ["script", "transcript", "transcripts.txt", "look", "unscript", "record", "commands", "look"],
        }
        return {kind: await score(env, row, script) for kind, script in kinds.items()}


def hostile(file: Path) -> list[str]:
    """Return texts that write a file if any code evaluates them."""
    write = f"__import__('pathlib').Path({str(file)!r}).write_text('x')"

    class Writes:
        def __reduce__(self) -> tuple[Any, ...]:
            return eval, (write,)

    return [
        f"[str({write})]",
        f"{write} and globals().update(__builtins__={{}})",
        f"!!python/object/apply:builtins.eval [{json.dumps(write)}]",
        pickle.dumps(Writes(), 0).decode("latin-1"),
        "{0.__class__.__init__.__globals__} {self.__class__} %(x)s",
    ]


REPLACES = (
    "[setattr(c, 'score_answer', lambda *a, **k: 1.0) for c in __import__('gc').get_objects() "
    "if isinstance(c, type) and hasattr(c, 'score_answer')] and 'x'"
)
"""What makes every answer right in the process in which it is evaluated."""


async def evaluated(name: str) -> dict[str, Any]:
    """Answer each dataset's question with texts that write a file; `others` are the scores of wrong answers
    afterwards.
    """
    texts = [f"<answer>{text}</answer>" for text in (*hostile(Path.cwd() / "written"), REPLACES)]
    async with open_env(name) as env:
        rows = list({row.columns["dataset"]: row for row in islice(env.rows(), 100)}.values())
        before = await asyncio.gather(*(score(env, row, ["<answer>qq</answer>"]) for row in rows))
        for start in range(0, len(rows), 20):
            some = rows[start : start + 20]
            await asyncio.gather(*(score(env, row, [text]) for row in some for text in texts))
        after = await asyncio.gather(*(score(env, row, ["<answer>qq</answer>"]) for row in rows))
    return {"rows": len(rows), "before": before, "after": after}


WORST: dict[str, list[tuple[str, Script]]] = {
    "reasoning-gym": [
        ("rubiks_cube", ["<answer>R3000000</answer>"]),
        ("polynomial_equations", ["<answer>9**9**9</answer>"]),
        ("decimal_arithmetic", ["<answer>1e99999999</answer>"]),
        ("power_function", ["<answer>1e99999999</answer>"]),
        ("bitwise_arithmetic", [f"<answer>{'9' * 4_000_000}</answer>"]),
        ("rush_hour", ["<answer>" + "A+1 A-1 " * 500_000 + "</answer>"]),
    ],
    "textworld": [("", ["\\P"]), ("", ["\\x"])],
    "intercode-sql": [
        (
            "",
            [
                [{"name": "execute", "args": {"sql": "SELECT seq FROM seq_1_to_9000000"}}],
                [{"name": "submit", "args": {}}],
            ],
        )
    ],
}
"""Start of the keys of the rows and the text, for the texts that take longest of those that are known."""


async def held(name: str) -> list[float]:
    """Play the slowest known texts, which the port's own time limit ends."""
    async with open_env(name) as env:
        rows = rows_of(env, 200)
        return [
            await score(env, next(row for row in rows if row.key.startswith(start)), script)
            for start, script in WORST[name]
        ]


EMPTY = "SELECT 1 FROM dual WHERE 1 = 0"
EMPTIED = (
    ("CREATE PROCEDURE p() EXECUTE IMMEDIATE CONCAT('DROP DATABASE ', DATABASE())", "CALL p()", EMPTY),
    ("SET SESSION sql_select_limit = 0", "SELECT 1"),
    ("CREATE TEMPORARY TABLE {table} LIKE {table}", EMPTY),
    ("SET SESSION max_statement_time = 0.000001", EMPTY),
    ("SET STATEMENT sql_select_limit = 0 FOR SELECT 1",),
    ("SET autocommit = 0", "SET foreign_key_checks = 0", "DELETE FROM {table}", EMPTY),
    ("RENAME TABLE {table} TO gone", "CREATE VIEW {table} AS SELECT * FROM gone WHERE 1 = 0", EMPTY),
    ("KILL CONNECTION_ID()", EMPTY),
    ("USE information_schema", "SET NAMES latin1", "SET SESSION sql_mode = 'ANSI_QUOTES'", EMPTY),
)
"""Statements that change the data that gold is compared with: the database, and the agent's session."""


async def emptied(name: str) -> dict[str, list[float]]:
    """Execute each group of statements, and submit the last result; return the scores by row."""

    def asked(statements: Sequence[str]) -> Script:
        return [[{"name": "execute", "args": {"sql": each}} for each in statements], [{"name": "submit", "args": {}}]]

    def of_row(row: Row, script: Script) -> Script:
        words = row.columns["truth"].split()
        table = next(word for before, word in pairwise(words) if before.lower() == "from")
        return json.loads(json.dumps(script).replace("{table}", table))  # type: ignore[no-any-return]

    async with open_env(name) as env:
        rows = rows_of(env, 8, 110)
        return {row.key: [await score(env, row, of_row(row, asked(each))) for each in EMPTIED] for row in rows}


EXHAUST = {
    "disk": ("CREATE TABLE big (x LONGBLOB)", "INSERT INTO big SELECT REPEAT('x', 1000000) FROM seq_1_to_200"),
    "files": (
        "CREATE PROCEDURE p() FOR i IN 1..5000 DO EXECUTE IMMEDIATE CONCAT('CREATE TABLE t', i, ' (x INT)'); END FOR",
        "CALL p()",
    ),
    "temporary files": (
        "SELECT MAX(s) FROM (SELECT a.seq AS s FROM seq_1_to_4000 a, seq_1_to_4000 b "
        "ORDER BY RAND(), REPEAT(a.seq, 200) LIMIT 10000000) AS z",
    ),
    "memory": (
        "CREATE PROCEDURE p() FOR i IN 1..1000 DO "
        "EXECUTE IMMEDIATE CONCAT('SET @v', i, ' = REPEAT(1, 16000000)'); END FOR",
        "CALL p()",
    ),
    "time": ("SET SESSION max_statement_time = 0", "SELECT BENCHMARK(1e15, MD5('x'))"),
}
"""Statements of which the last one asks for more than a rollout may have, by what it asks for."""


async def exhausted(name: str) -> dict[str, tuple[str, float, float]]:
    """Request too much of the server; return the last result, the rollout's score and a neighbour's score by
    resource.
    """

    async def results(row: Row, statements: Sequence[str]) -> tuple[str, float]:
        (call,) = gold_turns(env.spec, row)[0].tools
        (argument,) = call.args
        rollout = await played(env, row, [[{"name": call.name, "args": {argument: each}}] for each in statements])
        assert rollout.score is not None, (row.key, rollout.error)
        return str(rollout.messages[-1]["content"]), rollout.score

    async with open_env(name) as env:
        rows = rows_of(env, len(EXHAUST))
        made, scores = await asyncio.gather(
            asyncio.gather(*map(results, rows, EXHAUST.values())),
            asyncio.gather(
                *(score(env, row, [[*map(asdict, t.tools)] for t in gold_turns(env.spec, row)]) for row in rows)
            ),
        )
    return {kind: (*each, own) for kind, each, own in zip(EXHAUST, made, scores, strict=True)}


async def unasked(name: str) -> str:
    """Call the Java process of a simulator without its secret, as any local process could; return the error."""
    from py4j.java_gateway import GatewayParameters, JavaGateway
    from py4j.protocol import Py4JError

    sys.path.insert(0, str(Path(__file__).parents[2] / "specs" / name))
    simulator = importlib.import_module("world").Simulator()
    try:
        port = simulator.gateway.gateway_parameters.port
        return str(JavaGateway(gateway_parameters=GatewayParameters(port=port)).jvm.java.lang.System.getenv("HOME"))
    except Py4JError as error:
        return f"refused: {error}"
    finally:
        simulator.close()


KINDS: dict[str, Callable[[str], Awaitable[Any]]] = {
    each.__name__: each for each in (refused, saved, evaluated, held, emptied, exhausted, unasked)
}

if __name__ == "__main__":
    print(json.dumps(asyncio.run(KINDS[sys.argv[1]](sys.argv[2]))))
