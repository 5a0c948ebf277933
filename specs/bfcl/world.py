"""Run BFCL's multi-turn conversations: their rows, their simulated APIs, and the comparison after each turn."""

import ast
import importlib
import inspect
import json
import marshal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hermes_rl import UserError

KINDS = ("base", "miss_func", "miss_param", "long_context")
WORLDS = (
    *("MessageAPI", "TwitterAPI", "TradingBot", "TicketAPI", "GorillaFileSystem", "VehicleControlAPI", "MathAPI"),
    "TravelAPI",
)
"""The APIs of these rows, in an order consistent with the order in each row; the package has others."""
REFUSED = {"kill", "exit", "quit", "remove", "unlink", "popen", "Popen", "run"}
"""Names of functions that are not called."""
NOTES = {
    "multi_turn_base_4": "the user's messages do not determine its gold (issues 1133 and 1367)",
    "multi_turn_miss_func_49": "its gold calls a tool that it withholds",
}
"""Known faults of rows; issue numbers refer to the original repository."""


def part(name: str) -> Any:
    """Return a module of the package."""
    try:
        return importlib.import_module(f"bfcl_eval.{name}")
    except ImportError as error:
        package = "pip install --no-deps bfcl-eval==2026.3.23 && pip install mpmath==1.3.0"
        raise UserError(f"BFCL is not installed: {package} ({error})") from error


def data(name: str) -> list[dict[str, Any]]:
    """Return the records of a file in the package's data."""
    file = Path(part("constants").__path__[0]).parent / "data" / name
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def world_class(name: str) -> Any:
    """Return the class of one of the package's APIs."""
    module = part("constants.executable_backend_config").CLASS_FILE_PATH_MAPPING[name]
    return getattr(part(module.removeprefix("bfcl_eval.")), name)


@cache
def documents_of(world: str) -> tuple[dict[str, Any], ...]:
    """Return the schemas of an API's tools, with the type names of JSON Schema."""
    file = part("constants.executable_backend_config").MULTI_TURN_FUNC_DOC_FILE_MAPPING[world]
    types = part("constants.type_mappings").GORILLA_TO_OPENAPI

    def typed(schema: Any) -> Any:
        if isinstance(schema, list):
            return [typed(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        renamed = {key: typed(value) for key, value in schema.items()}
        kind = renamed.get("type")
        return renamed | {"type": types.get(kind, "string")} if isinstance(kind, str) else renamed

    keys = ("name", "description", "parameters")
    return tuple({key: typed(each[key]) for key in keys} for each in data(f"multi_turn_func_doc/{file}"))


def entries(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of the four kinds, each with the user's messages, the tools that arrive with them, and gold
    turns."""
    added = part("constants.default_prompts").DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC
    for kind in KINDS:
        truths = {row["id"]: row["ground_truth"] for row in data(f"possible_answer/BFCL_v4_multi_turn_{kind}.json")}
        for row in data(f"BFCL_v4_multi_turn_{kind}.json"):
            names = [each["name"] for world in row["involved_classes"] for each in documents_of(world)]
            missed: dict[str, list[str]] = row.get("missed_function", {})
            held = [name for names in missed.values() for name in names]
            says = []
            for turn_index, messages in enumerate(row["question"]):
                held = [name for name in held if name not in missed.get(str(turn_index), ())]
                text = "\n\n".join(message["content"] for message in messages) or added
                says.append({"say": text, "tools": [name for name in names if name not in held]})
            truth = truths[row["id"]]
            gold = [{"tools": calls, "say": "Done."} for calls in map(list, map(gold_calls, truth, [row] * len(truth)))]
            columns = {key: row[key] for key in ("id", "initial_config", "involved_classes")} | {"tools": names}
            turns = [
                turn
                for each in gold
                for turn in ([{"tools": each["tools"]}] if each["tools"] else []) + [{"say": each["say"]}]
            ]
            columns["note"] = NOTES.get(row["id"], "")
            yield {**columns, "kind": kind, "says": says, "truth": truth, "gold": turns}


def gold_calls(texts: Iterable[str], row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield calls that are written as Python, with every argument by name."""
    for text in texts:
        call: Any = ast.parse(text, mode="eval").body
        owners = [world_class(world) for world in row["involved_classes"]]
        method = next(getattr(owner, call.func.id) for owner in reversed(owners) if hasattr(owner, call.func.id))
        keyword_arguments = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        bound = dict(
            zip(list(inspect.signature(method).parameters)[1:], map(ast.literal_eval, call.args), strict=False)
        )
        yield {"name": call.func.id, "args": bound | keyword_arguments}


@cache
def public_methods(world: type) -> tuple[str, ...]:
    """Return the names of an API's methods that calls may use."""
    methods = inspect.getmembers(world, predicate=inspect.isfunction)
    return tuple(name for name, _ in methods if not name.startswith("_"))


@cache
def constants() -> list[tuple[dict[str, Any], bytes]]:
    """Return the package's constants that APIs with long contexts modify, with their initial content."""
    module = part("eval_checker.multi_turn_eval.func_source_code.long_context")
    constant_dicts = [
        value for name, value in vars(module).items() if isinstance(value, dict) and not name.startswith("_")
    ]
    return [(value, marshal.dumps(value)) for value in constant_dicts]


class Worlds:
    """One object of each class that a row involves. A call may ask for a number without end, or for a folder in itself
    again and again: so each rollout has a process, which the next one may use."""

    def __init__(self, item: dict[str, Any], sibling: "Worlds | None" = None) -> None:
        if sibling is None and item["kind"] == "long_context":  # an earlier rollout may have been here
            for value, at_first in constants():
                value.clear()
                value.update(marshal.loads(at_first))
        self.objects = {name: world_class(name)() for name in item["involved_classes"]}
        for name, world in self.objects.items():
            if hasattr(world, "_load_scenario"):
                # The API changes it. Rows are plain values, and this copy takes a seventh of the time of a deep copy.
                scenario = marshal.loads(marshal.dumps(item["initial_config"].get(name, {})))
                world._load_scenario(scenario, long_context=item["kind"] == "long_context")
        self.functions: dict[str, Callable[..., Any]] = {
            name: getattr(world, name) for world in self.objects.values() for name in public_methods(type(world))
        }

    @classmethod
    def prepare(cls) -> None:
        """Import the APIs once, for the processes of all rollouts."""
        for name in part("constants.executable_backend_config").CLASS_FILE_PATH_MAPPING:
            if name in WORLDS:
                world_class(name)
        constants()

    @property
    def documents(self) -> list[dict[str, Any]]:
        """Return the tool schemas of all APIs; a row names the ones it uses."""
        return [schema for name in WORLDS for schema in documents_of(name)]

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the result of the tool of this name; an exception is a result too."""
        return self.answer(name, lambda function: function(**arguments))

    def truth(self, text: str) -> str:
        """Return the result of a call that is written as Python."""
        return self.answer(text.partition("(")[0], lambda _: eval(text, dict(self.functions)))

    def answer(self, name: str, call: Callable[[Any], Any]) -> str:
        """Return the text of a call's result or exception."""
        try:
            if name in REFUSED:
                raise ValueError(f"Function call {name} is not allowed.")
            if name not in self.functions:
                raise NameError(f"name {name!r} is not defined")
            value = call(self.functions[name])
        except Exception as error:  # noqa: BLE001 - whatever it is, the agent reads it
            return f"Error during execution: {error}"
        if not isinstance(value, dict):
            return str(value)
        try:
            return json.dumps(value)
        except (TypeError, ValueError):
            return str(value)


def public(world: object) -> dict[str, Any]:
    """Return the public attributes of an API, which are compared."""
    return {name: value for name, value in vars(world).items() if not name.startswith("_")}


def calls_by_turn(result: Any) -> list[list[Any]]:
    """Return the executed calls for each message of the user."""
    turns: list[list[Any]] = []
    executed = [call for call in result.tool_calls if call.error is None and call.executed_by == "hermes_rl"]
    answers = 0
    for message in result.messages:
        if message["role"] == "user":
            turns.append([])
        elif message["role"] == "assistant":
            answers += 1
            turns[-1] += [call for call in executed if call.turn == answers]
    return turns


def turn_by_turn(result: Any, item: dict[str, Any]) -> float:
    """Return 1 if, after each turn with gold calls, the APIs match gold's and gold's results were seen, else 0."""
    policy_worlds = Worlds(item)
    gold = Worlds(item, sibling=policy_worlds)
    turns, answer_counts = calls_by_turn(result), Counter[str]()
    if len(turns) < len(item["truth"]):
        return 0.0
    for calls, truth in zip(turns, item["truth"], strict=False):
        answer_counts.update(policy_worlds.call(call.name, call.arguments) for call in calls)
        needed = Counter(gold.truth(text) for text in truth)
        if truth and not (
            calls
            and needed <= answer_counts
            and all(public(policy_worlds.objects[name]) == public(world) for name, world in gold.objects.items())
        ):
            return 0.0
    return 1.0
