"""τ²-bench's domains: their tasks, their world as it is for one task, and its score by the rules of the task."""

import json
import logging
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

from hermes_rl import UserError

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else importing it asks the internet for prices
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
    """The tasks of a domain's base split, by their ids."""
    return {task.id: task for task in original().get_tasks_loader(domain)("base")}


def started(task: Any, domain: str) -> Any:
    """A world as it is when the task begins."""
    world, initial = original().get_env_constructor(domain)(), task.initial_state
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


def rows(domain: str, split: str) -> Iterator[dict[str, Any]]:
    """The tasks of the domain's own split for training, or for evaluation."""
    world = original().get_env_constructor(domain)()
    from tau2.agent.llm_agent import AGENT_INSTRUCTION, SYSTEM_PROMPT
    from tau2.user.user_simulator import UserSimulator

    chosen = set(original().get_task_splits_loader(domain)()[split])
    system = SYSTEM_PROMPT.format(domain_policy=world.get_policy(), agent_instruction=AGENT_INSTRUCTION)
    for task in tasks(domain).values():
        if task.id in chosen:
            tools = world.get_user_tools(include=task.user_tools) if world.user_tools is not None else None
            user = UserSimulator(llm="none", instructions=str(task.user_scenario), tools=tools)
            yield {
                "id": task.id,
                "task": task.id,
                "domain": domain,
                "system": system,
                "user_system": user.system_prompt,
                "gold": gold(task),
            }


def gold(task: Any) -> list[dict[str, Any]]:
    """The gold actions of both sides, and what has to be said, as turns."""
    turns: list[dict[str, Any]] = [{"user": "Hello."}]
    criteria = task.evaluation_criteria
    for action in criteria.actions or []:
        call = {"name": action.name, "args": action.arguments}
        if action.requestor == "assistant":
            turns.append({"tools": [call]})
        else:
            turns += [{"say": "Please go on.", "user_tools": [call], "user": "I did."}]
    turns.append({"say": " ".join(criteria.communicate_info or []) or "Done."})
    return turns


# ------------------------------------------------------------------------------------------------------------ World


class World:
    """What agent and user act on."""

    imports = ("tau2.registry", "tau2.agent.llm_agent", "tau2.user.user_simulator")

    def __init__(self, item: dict[str, Any]) -> None:
        self.domain, self.task = item["domain"], tasks(item["domain"])[item["task"]]
        self.world = started(self.task, self.domain)
        self.errors, self.calls = 0, list[Any]()
        """Failed calls of tools that exist, and the user's calls."""
        self.documents = [tool.openai_schema["function"] for tool in self.world.get_tools()]
        own = self.world.get_user_tools(include=self.task.user_tools) if self.world.user_tools is not None else []
        self.user_documents = [tool.openai_schema["function"] for tool in own]

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
        if requestor == "user":
            self.calls.append(call)
        message = self.world.get_response(call)
        self.errors += message.error
        return str(message.content)

    def too_many_errors(self) -> bool:
        """Whether the conversation is over for them."""
        return self.errors >= ERRORS


# ------------------------------------------------------------------------------------------------------------ Score


def by_the_rules(result: Any, state: Any) -> float:
    """The product of what the task asks for: databases, assertions about the world, calls, and words.

    What a judge would have to say of the agent's words is left out.
    """
    criteria, world = state.task.evaluation_criteria, state.world
    said = [message for message in result.messages[result.prompt_length :] if message["role"] != "tool"]
    offered = {each["name"] for each in state.documents}
    unknown = sum(error.tool_name not in offered for error in result.tool_errors)
    batches = sum(1 for message in said if message.get("tool_calls"))
    if len(said) + batches + 2 * len(state.calls) + 1 >= STEPS or state.errors + unknown >= ERRORS:
        return 0.0
    if any(not message.get("tool_calls") and not str(message["content"] or "").strip() for message in said):
        return 0.0
    asked, value = {str(basis.value) for basis in criteria.reward_basis}, 1.0
    if criteria.actions is None and criteria.env_assertions is None:
        asked -= {"DB", "ENV_ASSERTION"}
    if "DB" in asked:
        right = started(state.task, state.domain)
        for action in criteria.actions or []:
            try:
                right.make_tool_call(tool_name=action.name, requestor=action.requestor, **action.arguments)
            except Exception:  # noqa: BLE001, S112 - some gold calls fail, and change nothing
                continue
        same = right.get_db_hash() == world.get_db_hash() and right.get_user_db_hash() == world.get_user_db_hash()
        value *= same
    if "ENV_ASSERTION" in asked:
        checks = [world.run_env_assertion(each, raise_assertion_error=False) for each in criteria.env_assertions or []]
        value *= all(checks)
    if "ACTION" in asked:
        calls = [*state.calls, *calls_of(said)]
        value *= all(any(action.compare_with_tool_call(call) for call in calls) for action in criteria.actions or [])
    if "COMMUNICATE" in asked:
        words = [str(each["content"] or "").lower().replace(",", "") for each in said if each["role"] == "assistant"]
        value *= all(any(info.lower() in text for text in words) for info in criteria.communicate_info or [])
    return float(value)


def calls_of(messages: list[Any]) -> Iterator[Any]:
    """The agent's calls, whatever became of them: the original counts failed ones, too."""
    from tau2.data_model.message import ToolCall

    for message in messages:
        for call in message.get("tool_calls") or ():
            try:
                arguments = json.loads(call["function"]["arguments"] or "{}")
            except ValueError:
                continue
            if isinstance(arguments, dict):
                yield ToolCall(id="call", name=call["function"]["name"], arguments=arguments, requestor="assistant")
