"""τ²-bench's domains: their tasks, their world as it is for one task, and its score by the rules of the task."""

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
"""Messages and failed calls, of both sides: with so many a conversation is over, and worth nothing."""


@cache
def original() -> Any:
    """The package, without what it logs."""
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
    """All tasks of a domain, by their ids."""
    return {task.id: task for task in original().get_tasks_loader(domain)(None)}


NOTES = dict.fromkeys(
    [("retail", "2"), ("retail", "3"), ("retail", "4")], "gold asks for a product that is not there (issue 89)"
) | {("airline", "9"): "its user names two dates (issue 47)"}
"""What is known to be wrong with a task, by domain and id; issues are those of the original."""
ALIVE: list[Any] = []
"""All worlds of a rollout's process, with which they end: to free one would take time, and memory that is shared."""
READY: dict[str, list[Any]] = {}
"""Worlds by domain that nobody has used yet: those for a rollout and its gold are made before its process is."""


def made(domain: str, task: Any) -> Any:
    """The world of a domain. That of a bank is without its documents, and has its gold calls to log what they read."""
    if READY.get(domain):
        return READY[domain].pop()
    if domain != BANK:
        return original().get_env_constructor(domain)()
    named = {action.arguments.get("agent_tool_name") for action in task.evaluation_criteria.actions or ()}
    return original().get_env_constructor(domain)(retrieval_variant="no_knowledge", read_log_allowlist=named - {None})


def started(task: Any, domain: str) -> Any:
    """A world as it is when the task begins."""
    world, initial = made(domain, task), task.initial_state
    data, actions = (initial.initialization_data, initial.initialization_actions) if initial else (None, None)
    world.set_state(initialization_data=data, initialization_actions=actions, message_history=[])
    return world


# ------------------------------------------------------------------------------------------------------------- Rows


def retail(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """The tasks of a shop."""
    return rows("retail", split)


def airline(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """The tasks of an airline."""
    return rows("airline", split)


def telecom(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """The tasks of a telephone company, whose customers have telephones of their own to operate."""
    return rows("telecom", split)


def telecom_full(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """All 2,285 of them: for training those that are not for evaluation."""
    tested = {row["id"] for row in rows("telecom", "test")}
    return (row for row in rows("telecom", "full") if (row["id"] in tested) == (split != "train"))


def banking(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """The tasks of a bank, which are not split."""
    return rows(BANK, split)


def rows(domain: str, split: str) -> Iterator[dict[str, Any]]:
    """The tasks of the domain's own split for training, or for evaluation."""
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
    """Whether a task's score is made of this, too."""
    return basis in {each.value for each in criteria.reward_basis}


WORDS = {"say": "Please go on.", "user": "I did."}
"""What is said where the customer acts."""


def turn_of(action: Any) -> dict[str, Any]:
    """A gold action, as its side makes it."""
    return {
        "tools" if action.requestor == "assistant" else "user_tools": [{"name": action.name, "args": action.arguments}]
    }


def gold(task: Any) -> list[dict[str, Any]]:
    """The gold actions of both sides, and what has to be said, as turns."""
    turns: list[dict[str, Any]] = [{"user": "Hello."}]
    criteria = task.evaluation_criteria
    for action in criteria.actions or []:
        turns.append(turn_of(action) if action.requestor == "assistant" else WORDS | turn_of(action))
    turns.append({"say": " ".join(criteria.communicate_info or []) or "Done."})
    return turns


# ------------------------------------------------------------------------------------------------------------ World


@cache
def documents(domain: str) -> list[dict[str, Any]]:
    """The schemas of the agent's tools."""
    world = made(domain, next(iter(tasks(domain).values())))
    return [tool.openai_schema["function"] for tool in world.get_tools()]


class World:
    """What agent and user act on."""

    domain: str
    imports = ("tau2.registry", "tau2.agent.llm_agent", "tau2.user.user_simulator")

    @classmethod
    def prepare(cls) -> None:
        """Make what each rollout needs, in the process of which its own will be a fork."""
        documents(cls.domain)
        if cls.domain != BANK:
            READY[cls.domain] = [original().get_env_constructor(cls.domain)() for _ in range(2)]

    def __init__(self, item: dict[str, Any]) -> None:
        self.task = tasks(self.domain)[item["task"]]
        self.world = started(self.task, self.domain)
        self.errors, self.calls = 0, list[Any]()
        """Failed calls of tools that exist, and all calls of either side."""
        self.writes: list[tuple[str, ...]] = []
        """Calls of either side that may change the world, in order."""
        ALIVE.append(self)
        self.documents = documents(self.domain)

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """What the agent's call answers."""
        return self.answer(name, arguments, "assistant")

    def call_of_user(self, name: str, arguments: dict[str, Any]) -> str:
        """What the user's call answers."""
        return self.answer(name, arguments, "user")

    def answer(self, name: str, arguments: dict[str, Any], requestor: str) -> str:
        """The text that a call answers, what went wrong included."""
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
        """What gold has to leave as the agent did, where the task asks for that: the databases of both sides."""
        return Databases(self) if asks(self.task.evaluation_criteria, "DB") else None

    def too_many_errors(self) -> bool:
        """Whether the conversation is over for them."""
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
    """The databases of agent and user: equal after the same writes, and where their hashes are the same.

    To hash them takes longer than to write them, and both far longer than what was done.
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
    """The product of what the task asks for beside databases and a judge's word: how the world is, calls, and words."""
    criteria, world = state.task.evaluation_criteria, state.world
    said = [message for message in result.messages[result.prompt_length :] if message["role"] != "tool"]
    offered = {each["name"] for each in state.documents}
    unknown = sum(error.tool_name not in offered for error in result.tool_errors)
    batches = sum(1 for message in said if message.get("tool_calls"))
    of_user = sum(call.requestor == "user" for call in state.calls)
    if len(said) + batches + 2 * of_user + 1 >= STEPS or state.errors + unknown >= ERRORS:
        return 0.0
    if any(not message.get("tool_calls") and not str(message["content"] or "").strip() for message in said):
        return 0.0
    value = True
    if asks(criteria, "ENV_ASSERTION"):
        checks = [world.run_env_assertion(each, raise_assertion_error=False) for each in criteria.env_assertions or []]
        value = all(checks)
    if asks(criteria, "ACTION"):
        actions = criteria.actions or []
        value &= all(any(action.compare_with_tool_call(call) for call in state.calls) for action in actions)
    if asks(criteria, "COMMUNICATE"):
        words = [str(each["content"] or "").lower().replace(",", "") for each in said if each["role"] == "assistant"]
        value &= all(any(info.lower() in text for text in words) for info in criteria.communicate_info or [])
    return float(value)
