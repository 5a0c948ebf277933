"""Run τ²-bench's domains: their tasks, the simulated domain of one task, and its score by the rules of the task."""

import json
import logging
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

from hermes_rl import UserError

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else importing it asks the internet for prices
BANK = "banking_knowledge"
STEPS, ERRORS = 200, 10
"""Limits of messages and of failed calls, of both sides; a conversation that reaches one ends with a score of 0."""


@cache
def original() -> Any:
    """Return the package, with its logging disabled."""
    try:
        from loguru import logger

        logger.remove()
        from tau2.registry import registry
    except ImportError as error:
        raise UserError(
            "τ²-bench is not installed: clone github.com/sierra-research/tau2-bench (Python 3.12), pip install it, "
            f"and name its data folder in TAU2_DATA_DIR ({error})"
        ) from error
    logging.getLogger("LiteLLM").setLevel(logging.ERROR)
    return registry


@cache
def tasks(domain: str) -> dict[str, Any]:
    """Return all tasks of a domain, by their ids."""
    return {task.id: task for task in original().get_tasks_loader(domain)(None)}


NOTES = dict.fromkeys(
    [("retail", "2"), ("retail", "3"), ("retail", "4")], "gold asks for a product that is not there (issue 89)"
) | {("airline", "9"): "its user names two dates (issue 47)"}
"""Known faults of tasks, by domain and id; issue numbers refer to the original repository."""
ALIVE: list[Any] = []
"""All simulations of a rollout's process. They are never freed: freeing takes time, and unshares memory."""
READY: dict[str, list[Any]] = {}
"""Unused simulations by domain. The ones for a rollout and its gold are created before its process is forked."""


def made(domain: str, task: Any) -> Any:
    """Return the simulation of a domain. A bank's has no documents; it has its gold calls to log the documents they
    read."""
    if READY.get(domain):
        return READY[domain].pop()
    if domain != BANK:
        return original().get_env_constructor(domain)()
    tool_names = {action.arguments.get("agent_tool_name") for action in task.evaluation_criteria.actions or ()}
    return original().get_env_constructor(domain)(
        retrieval_variant="no_knowledge", read_log_allowlist=tool_names - {None}
    )


def started(task: Any, domain: str) -> Any:
    """Return a simulation in the initial state of the task."""
    world, initial = made(domain, task), task.initial_state
    data, actions = (initial.initialization_data, initial.initialization_actions) if initial else (None, None)
    world.set_state(initialization_data=data, initialization_actions=actions, message_history=[])
    return world


# ------------------------------------------------------------------------------------------------------------- Rows


def retail(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield the tasks of a shop."""
    return rows("retail", split)


def airline(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield the tasks of an airline."""
    return rows("airline", split)


def telecom(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield the tasks of a telephone company, whose customers operate their own telephones."""
    return rows("telecom", split)


def telecom_full(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield the 2,285 tasks of the telephone company; training gets all that are not for evaluation."""
    tested = {row["id"] for row in rows("telecom", "test")}
    return (row for row in rows("telecom", "full") if (row["id"] in tested) == (split != "train"))


def banking(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield the tasks of a bank, which are not split."""
    return rows(BANK, split)


def rows(domain: str, split: str) -> Iterator[dict[str, Any]]:
    """Yield the tasks of the domain's split for training, or for evaluation."""
    world = made(domain, next(iter(tasks(domain).values())))
    from tau2.agent.llm_agent import AGENT_INSTRUCTION, SYSTEM_PROMPT
    from tau2.user.user_simulator import UserSimulator

    splits = original().get_task_splits_loader(domain)
    chosen = tasks(domain) if splits is None else set(splits()[split])
    system = SYSTEM_PROMPT.format(domain_policy=world.get_policy(), agent_instruction=AGENT_INSTRUCTION)
    for task in tasks(domain).values():
        if task.id in chosen:
            criteria = task.evaluation_criteria
            tools = world.get_user_tools(include=task.user_tools) if world.user_tools is not None else None
            user = UserSimulator(llm="none", instructions=str(task.user_scenario), tools=tools)
            yield {
                "id": task.id,
                "task": task.id,
                "note": NOTES.get((domain, task.id), ""),
                "system": system,
                "user_system": user.system_prompt,
                "user_tools": [tool.openai_schema["function"] for tool in tools or ()],
                "assertions": criteria.nl_assertions or [] if asks(criteria, "NL_ASSERTION") else [],
                "gold": gold(task),
                "actions": list(map(turn_of, criteria.actions or ())),
            }


def asks(criteria: Any, basis: str) -> bool:
    """Return True if a task's score includes this part."""
    return basis in {each.value for each in criteria.reward_basis}


WORDS = {"say": "Please go on.", "user": "I did."}
"""What is said where the customer acts."""


def turn_of(action: Any) -> dict[str, Any]:
    """Return a gold action as a turn of its side."""
    return {
        "tools" if action.requestor == "assistant" else "user_tools": [{"name": action.name, "args": action.arguments}]
    }


def gold(task: Any) -> list[dict[str, Any]]:
    """Return the gold actions of both sides, and the required messages, as turns."""
    turns: list[dict[str, Any]] = [{"user": "Hello."}]
    criteria = task.evaluation_criteria
    for action in criteria.actions or []:
        turns.append(turn_of(action) if action.requestor == "assistant" else WORDS | turn_of(action))
    turns.append({"say": " ".join(criteria.communicate_info or []) or "Done."})
    return turns


# ------------------------------------------------------------------------------------------------------------ World


@cache
def documents(domain: str) -> list[dict[str, Any]]:
    """Return the schemas of the agent's tools."""
    world = made(domain, next(iter(tasks(domain).values())))
    return [tool.openai_schema["function"] for tool in world.get_tools()]


class World:
    """The simulated domain that agent and user act on."""

    domain: str
    imports = ("tau2.registry", "tau2.agent.llm_agent", "tau2.user.user_simulator")

    @classmethod
    def prepare(cls) -> None:
        """Create the objects that each rollout needs, in the process from which rollouts are forked."""
        documents(cls.domain)
        if cls.domain != BANK:
            READY[cls.domain] = [original().get_env_constructor(cls.domain)() for _ in range(2)]

    def __init__(self, item: dict[str, Any]) -> None:
        self.task = tasks(self.domain)[item["task"]]
        self.world = started(self.task, self.domain)
        self.errors, self.calls = 0, list[Any]()
        """Failed calls of tools that exist, and all calls of either side."""
        self.writes: list[tuple[str, ...]] = []
        """Calls of either side that may change the domain's state, in order."""
        ALIVE.append(self)
        self.documents = documents(self.domain)

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the result of the agent's call."""
        return self.answer(name, arguments, "assistant")

    def call_of_user(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the result of the user's call."""
        return self.answer(name, arguments, "user")

    def answer(self, name: str, arguments: dict[str, Any], requestor: str) -> str:
        """Return the text result of a call, including errors."""
        from tau2.data_model.message import ToolCall

        call = ToolCall(id="call", name=name, arguments=arguments, requestor=requestor)
        self.calls.append(call)
        side = self.world.tools if requestor == "assistant" else self.world.user_tools
        if side is not None and side.has_tool(name) and side.tool_mutates_state(name):
            self.writes.append((requestor, name, json.dumps(arguments, sort_keys=True)))
        message = self.world.get_response(call)
        self.errors += message.error
        return str(message.content)

    def databases(self) -> Any:
        """Return the databases of both sides if the task compares them with gold's, else None."""
        return Databases(self) if asks(self.task.evaluation_criteria, "DB") else None

    def too_many_errors(self) -> bool:
        """True if the conversation ends because of too many errors."""
        return self.errors >= ERRORS


class Retail(World):
    """A shop."""

    domain = "retail"


class Airline(World):
    """An airline."""

    domain = "airline"


class Telecom(World):
    """A telephone company."""

    domain = "telecom"


class Bank(World):
    """A bank."""

    domain = BANK


class Databases:
    """The databases of agent and user. They are equal after the same writes, or if their hashes are equal.

    Hashing takes longer than copying them, and both take much longer than the calls of a rollout.
    """

    def __init__(self, state: World) -> None:
        self.world, self.writes = state.world, state.writes

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Databases):
            return False
        return self.writes == other.writes or self.written == other.written or self.hashes == other.hashes

    __hash__ = None  # type: ignore[assignment]

    @property
    def written(self) -> list[Any]:
        sides = [self.world.tools, self.world.user_tools]
        return [side.db.model_dump_json() for side in sides if side is not None and side.db is not None]

    @property
    def hashes(self) -> list[Any]:
        return [self.world.get_db_hash(), self.world.get_user_db_hash()]


# ------------------------------------------------------------------------------------------------------------ Score


def by_the_rules(result: Any, state: Any) -> float:
    """Return the product of the task's criteria except databases and a judge: the domain's state, calls, and
    messages."""
    criteria, world = state.task.evaluation_criteria, state.world
    messages = [message for message in result.messages[result.prompt_length :] if message["role"] != "tool"]
    offered = {each["name"] for each in state.documents}
    unknown = sum(error.tool_name not in offered for error in result.tool_errors)
    batches = sum(1 for message in messages if message.get("tool_calls"))
    of_user = sum(call.requestor == "user" for call in state.calls)
    if len(messages) + batches + 2 * of_user + 1 >= STEPS or state.errors + unknown >= ERRORS:
        return 0.0
    if any(not message.get("tool_calls") and not str(message["content"] or "").strip() for message in messages):
        return 0.0
    value = True
    if asks(criteria, "ENV_ASSERTION"):
        checks = [world.run_env_assertion(each, raise_assertion_error=False) for each in criteria.env_assertions or []]
        value = all(checks)
    if asks(criteria, "ACTION"):
        actions = criteria.actions or []
        value &= all(any(action.compare_with_tool_call(call) for call in state.calls) for action in actions)
    if asks(criteria, "COMMUNICATE"):
        replies = [
            str(each["content"] or "").lower().replace(",", "") for each in messages if each["role"] == "assistant"
        ]
        value &= all(any(info.lower() in text for text in replies) for info in criteria.communicate_info or [])
    return float(value)
