"""DBBench's tasks: questions about a table, or changes to make in it, and how an answer is compared."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from server import Database, checkout, new_files

PLACE = Path("src/server/tasks/dbbench/task.py")
NOT_STRICT = ("--sql-mode=NO_ENGINE_SUBSTITUTION",)
"""As where the digests were made: two of gold's changes compare a text with a number, which is an error otherwise."""
WRITES = {"INSERT", "DELETE", "UPDATE"}
NOTES = {"standard-225": "the table that its gold leaves is not the one that it is compared with"}
"""What is known to be wrong with a task."""
NOTHING = {"none", "null", "undefined", "nan", "inf", "infinity", "-inf", "-infinity", ""}
"""What counts as 0 in an answer."""


def standard(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield the 300 tasks of the benchmark, each with the original's messages and tools."""
    folder = checkout("AGENTBENCH_DIR", "THUDM/AgentBench", str(PLACE))
    source = ast.parse((folder / PLACE).read_text("utf-8"))
    texts = [node.value for node in source.body if ast.unparse(node).startswith("SYSTEM_PROMPT = ")]
    system = ast.literal_eval(texts[0])
    tools = yaml.safe_load((folder / "configs/tasks/dbbench.yaml").read_text("utf-8"))["default"]["parameters"]["tools"]
    for index, line in enumerate((folder / "data/dbbench/standard.jsonl").read_text("utf-8").splitlines()):
        entry = json.loads(line)
        about = [
            ("Evidence about the question", entry.get("evidence")),
            ("Additional table information about the question", entry.get("add_description")),
            ("Question", entry["description"]),
        ]
        identity, kind = f"standard-{index}", entry["type"][0]
        statement = entry["label"][0] if kind in WRITES else entry["sql"]["query"]
        answers = ["done"] if kind in WRITES else entry["label"]
        yield {
            "id": identity,
            "kind": kind,
            "note": NOTES.get(identity, ""),
            "system": system,
            "question": "".join(f"{title}: {text}\n" for title, text in about if text),
            "tools": [tool["function"] for tool in tools],
            "table": entry["table"],
            "truth": entry["answer_md5"] if kind in WRITES else entry["label"],
            "gold": [
                {"tools": [{"name": "execute_sql", "args": {"query": statement}}]},
                {"tools": [{"name": "commit_final_answer", "args": {"answers": answers}}]},
            ],
        }


class Table:
    """A table in a separate database, until an answer is committed."""

    imports = ("mysql.connector",)

    @classmethod
    def prepare(cls) -> None:
        """Make the files of a new server once for all rollouts."""
        new_files(NOT_STRICT)

    def __init__(self, item: dict[str, Any]) -> None:
        self.table, self.truth, self.writes = item["table"], item["truth"], item["kind"] in WRITES
        self.database = Database("dbbench", list(filled(self.table)), NOT_STRICT)
        self.committed = self.right = False

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the result of a call. The original reads the first of its arguments, whatever its name is."""
        if self.committed:
            return "The answer is committed."
        if name == "execute_sql":
            return self.execute(next(iter(arguments.values()))) if arguments else "Error executing query: no query"
        self.committed = True
        self.right = bool(arguments) and self.compared(next(iter(arguments.values())))
        return "The answer is committed."

    def without_call(self, message: str | None) -> str:
        """Return the reply to a message without a call."""
        return "Internal error: No tool calls found despite finish reason."

    def execute(self, statement: Any) -> str:
        """Return the database's result of a statement, up to 800 characters of it."""
        try:
            connection = self.database.connection()
            with connection.cursor() as cursor:
                cursor.execute(statement)
                answer = str(cursor.fetchall() if cursor.with_rows else [])
                while cursor.nextset():  # the original, too, answers with the first of several
                    cursor.fetchall()
            connection.commit()
        except Exception as error:  # noqa: BLE001 - whatever it is, the agent reads it
            answer = str(error)
            self.database.undo(error)
        return answer if len(answer) <= 800 else answer[:800] + "[TRUNCATED]"

    def compared(self, answer: Any) -> bool:
        """Return True for a right answer. A number or a mapping never is: the original fails on it, and counts that as
        wrong."""
        if answer and not isinstance(answer, str | list):
            return False
        return cleaned(self.digest()) == cleaned(self.truth) if self.writes else equal(answer, self.truth)

    def digest(self) -> str:
        """Return the digest of all rows, regardless of their order."""
        columns = ",".join(f"`{column['name']}`" for column in self.table["table_info"]["columns"])
        short = f"SELECT substring(MD5(CONCAT_WS(',', {columns})), 1, 5) AS digest FROM `{self.table['table_name']}`"
        return self.execute(f"SELECT md5(group_concat(digest ORDER BY digest)) FROM ({short}) AS rows_of_table")

    def close(self) -> None:
        """Delete the database."""
        self.database.close()


def filled(table: dict[str, Any]) -> Iterator[Any]:
    """Yield the statements that create a table; all its columns are texts."""
    columns, lines = table["table_info"]["columns"], table["table_info"]["rows"]
    names = [f"`{column['name']}`" for column in columns]
    yield f"CREATE TABLE `{table['table_name']}` ({','.join(f'{name} TEXT' for name in names)})"
    placeholders = ",".join(f"({','.join(['%s'] * len(line))})" for line in lines)
    insert = f"INSERT INTO `{table['table_name']}` ({','.join(names)}) VALUES {placeholders}"
    yield insert, tuple(str(value) for line in lines for value in line)


# ----------------------------------------------------------------------------------------------------- The comparison


def equal(answer: Any, truth: Any) -> bool:
    """Return True if an answer has the expected values: numbers to a hundredth and one by one, texts as a set."""
    values, expected = cleaned(answer), cleaned(truth)
    if not all(map(is_number, [*values, *expected])):
        return set(values) == set(expected)
    unmatched = list(map(float, expected))
    for value in map(float, values):
        near = next((index for index, each in enumerate(unmatched) if abs(value - each) <= 0.01), None)
        if near is None:
            return False
        del unmatched[near]
    return not unmatched


def is_number(text: str) -> bool:
    """Return True if a text can be parsed as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def cleaned(answer: Any) -> list[str]:
    """Return the values of an answer: a list, or a text with a list in the syntax of Python or MySQL."""
    if answer is None:
        return ["0"]
    if isinstance(answer, str):
        stripped = answer.strip()
        if not (stripped.startswith("[") and stripped.endswith("]")):
            return [plain(stripped.strip("'\""))]
        answer = written(stripped)
    elif not isinstance(answer, list):
        answer = [answer]
    return [plain(str(value).strip().strip("'\"")) for value in answer]


def written(text: str) -> list[Any]:
    """Return the values of a list in Python syntax, or else the parts between commas outside of quotes."""
    try:
        values = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        parts, quoted = [""], False
        for letter in text[1:-1]:
            if letter in "\"'":
                quoted = not quoted
            elif letter == "," and not quoted:
                parts.append("")
            else:
                parts[-1] += letter
        return [part for part in parts if part]
    if all(isinstance(value, tuple) for value in values):  # rows, of which those with one column count
        return [value[0] for value in values if len(value) == 1]
    return [value[0] if isinstance(value, tuple) and len(value) == 1 else value for value in values]


def plain(text: str) -> str:
    """Return a value without formatting: percent sign, commas between digits, words for an empty value."""
    text = text.strip()
    if text.endswith("%"):
        return text[:-1].strip()
    if not text.startswith("[") and not text.endswith("]"):
        text = text.replace(",", "")
    return "0" if text.lower() in NOTHING else text


def right(result: Any, state: Table) -> float:
    """Return 1 if the committed answer is right, else 0."""
    return float(state.right)
