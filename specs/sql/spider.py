"""InterCode-SQL's tasks: questions about Spider's databases, and how the last result is compared with gold's."""

import json
import math
import os
import re
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

from server import Database, checkout, new_files

from hermes_rl import UserError

DUMP = "data/sql/spider/ic_spider_dbs.sql"
ONE_CASE = ("--lower-case-table-names=1", "--innodb-stats-auto-recalc=0")
"""Gold writes names of tables as it likes, as in the original; and the same query finds rows in the same order."""
NEEDLESS = re.compile(r"^(DROP TABLE|(UN)?LOCK TABLES|/\*!40000 ALTER TABLE)", re.MULTILINE)
"""Statements of the dump that a new database does without."""
UNPLAYABLE = (164, 178, 225, 531, 638, 802)
"""Tasks whose gold MariaDB refuses."""


@cache
def databases() -> dict[str, list[str]]:
    """Return the statements that create each database."""
    text = (checkout("INTERCODE_DIR", "princeton-nlp/intercode", DUMP) / DUMP).read_text("utf-8")
    parts = re.split(r"^CREATE DATABASE .*\n+USE `(\w+)`;\n", text, flags=re.MULTILINE)[1:]
    statements_by_name = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        statements = [each for each in re.split(r";\n", body) if each.strip() and not NEEDLESS.search(each)]
        tables = ", ".join(re.findall(r"^CREATE TABLE (`\w+`)", body, re.MULTILINE))
        statements_by_name[name.lower()] = [*statements, f"ANALYZE TABLE {tables}"]
    return statements_by_name


def questions(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield the questions of Spider's development set."""
    folder = checkout("INTERCODE_DIR", "princeton-nlp/intercode", DUMP)
    for index, row in enumerate(json.loads((folder / "data/sql/spider/ic_spider_dev.json").read_text("utf-8"))):
        gold = [
            {"tools": [{"name": "execute", "args": {"sql": row["gold"]}}]},
            {"tools": [{"name": "submit", "args": {}}]},
        ]
        columns = {"query": row["query"], "truth": row["gold"], "db": row["db"], "hardness": row["hardness"]}
        if index not in UNPLAYABLE:
            yield {"id": index, **columns, "gold": gold}


class Spider:
    """One of the databases, in a separate copy."""

    imports = ("mysql.connector",)
    reads = tuple(filter(None, [os.environ.get("INTERCODE_DIR")]))

    @classmethod
    def prepare(cls) -> None:
        """Make the files of a new server, and read the statements of all databases, once for all rollouts."""
        new_files(ONE_CASE)
        databases()

    def __init__(self, item: dict[str, Any]) -> None:
        name = item["db"].lower()
        self.database = Database(name, databases()[name], ONE_CASE)
        self.cursor = self.database.connection(use_pure=False).cursor(buffered=True)
        # Before the agent's first statement; another connection would find equal rows in another order.
        self.gold = self.fetched(item["truth"])
        if not isinstance(self.gold, list):
            raise UserError(f"the gold query gives no rows: {self.gold}")
        self.last, self.submitted = None, False

    def execute(self, sql: str) -> str:
        """Execute a statement of SQL.

        Args:
            sql: The statement.
        """
        if self.submitted:
            return self.submit()
        self.last = self.fetched(sql)
        return self.last[:350] if isinstance(self.last, str) else str(self.last[:25] if self.last else self.last)

    def submit(self) -> str:
        """Say that the last result is the answer."""
        self.submitted = True
        return "Submitted."

    def again(self, message: str | None) -> str:
        """Return the reply to a message without a call."""
        return "Call execute with a statement of SQL, or submit if the last result answers the question."

    def fetched(self, sql: str) -> Any:
        """Return the rows of a statement, None if it returns no rows, or an error as text."""
        import mysql.connector

        try:
            self.cursor.execute(sql)
            return self.cursor.fetchall() if self.cursor.description is not None else None
        except mysql.connector.Error as error:
            return f"Error executing query: {error.msg}"

    def score(self) -> float:
        """Return the similarity of the last result to gold's, on the database that the agent started with."""
        return shared(self.last, self.gold) if isinstance(self.last, list) else 0.0

    def close(self) -> None:
        """Delete the database."""
        self.database.close()


def shared(rows: list[Any], gold: list[Any]) -> float:
    """Return the number of shared rows over all rows, times the similarity of their order."""
    actual_rows, theirs = list(map(str, rows)), list(map(str, gold))
    both, either = Counter(actual_rows) & Counter(theirs), Counter(actual_rows) | Counter(theirs)
    if not either:
        return 1.0
    share = both.total() / either.total()
    order = tau(first_of(actual_rows, both), first_of(theirs, both)) if both else math.nan
    return share if math.isnan(order) else round(order * share * 100) / 100


def first_of(rows: list[str], counts: Counter[str]) -> list[str]:
    """Return the first rows of each text, up to its count."""
    remaining_counts = counts.copy()
    return [row for row in rows if (remaining_counts.subtract([row]) or remaining_counts[row] >= 0)]


def tau(actual_rows: list[str], theirs: list[str]) -> float:
    """Return Kendall's tau-b of the rows by their text; NaN if all are the same."""
    pairs = sorted(zip(actual_rows, theirs, strict=True))
    total = len(pairs) * (len(pairs) - 1) // 2
    ties = sum(n * (n - 1) // 2 for n in Counter(actual_rows).values())
    if total == ties:
        return math.nan
    equal_in_both = sum(n * (n - 1) // 2 for n in Counter(pairs).values())
    discordant, sorted_rows = 0, list[str]()
    for _, theirs_row in pairs:
        discordant += len(sorted_rows) - bisect_right(sorted_rows, theirs_row)
        insort(sorted_rows, theirs_row)
    more = total - 2 * ties + equal_in_both - 2 * discordant  # concordant pairs, less discordant ones
    return min(1.0, max(-1.0, more / math.sqrt(total - ties) / math.sqrt(total - ties)))


def score(result: Any, state: Spider) -> float:
    """Return the similarity of the last result to gold's."""
    return state.score()
