"""AgentDojo's user tasks: which there are, one task's environment with its tools, and the original's check of it."""

import contextlib
import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

from hermes_rl import UserError

with contextlib.suppress(ImportError):
    # Its modules have circular imports that only work from this entry point. Unpickling an environment in another
    # process would start from the module of its class.
    import agentdojo.task_suite.load_suites  # noqa: F401

VERSION = "v1.2.2"
MOST_STEPS = 14
"""Maximum number of steps of a solution before its final message."""
STEPS = 16
"""Answers of a model that are read; what the last of them calls is not carried out."""
LONGEST_LIST = 1 << 16
"""Characters of a text that is read as a list of Python: while it is read, nothing else of the runner has its turn."""


@cache
def suites() -> dict[str, Any]:
    """Return the four suites by name."""
    try:
        from agentdojo.task_suite.load_suites import get_suites
    except ImportError as error:
        raise UserError(f"AgentDojo is not installed: pip install agentdojo==0.1.35 ({error})") from error
    return dict(get_suites(VERSION))


@cache
def environment(suite: str) -> Any:
    """Return a suite's environment in its initial state, before any task."""
    return suites()[suite].load_and_inject_default_environment({})


def tasks(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield the user tasks, each with the calls and messages that solve it."""
    all_suites = suites()
    from agentdojo.agent_pipeline.agent_pipeline import load_system_message

    system = load_system_message(None)
    for name, suite in all_suites.items():
        for identity, task in suite.user_tasks.items():
            before = task.init_environment(copy.deepcopy(environment(name)))
            calls = [{"name": call.function, "args": dict(call.args)} for call in task.ground_truth(before)]
            steps = [[call] for call in calls] if len(calls) <= MOST_STEPS else [calls]
            gold = [*({"tools": step} for step in steps), {"say": task.GROUND_TRUTH_OUTPUT or "Done."}]
            row = {"id": f"{name}-{identity}", "suite": name, "task": identity}
            yield {**row, "system": system, "prompt": task.PROMPT, "gold": gold}


def read(arguments: dict[str, Any]) -> dict[str, Any]:
    """Convert arguments like the original: a text that contains a Python list becomes that list."""
    from ast import literal_eval

    from agentdojo.agent_pipeline.tool_execution import is_string_list

    texts = {key: value for key, value in arguments.items() if isinstance(value, str) and len(value) <= LONGEST_LIST}
    list_keys = {key for key, value in texts.items() if is_string_list(value)}
    return {key: literal_eval(value) if key in list_keys else value for key, value in arguments.items()}


class World:
    """The environment of one task, before and after the agent's calls."""

    def __init__(self, item: dict[str, Any]) -> None:
        self.suite, self.task = item["suite"], item["task"]
        suite = suites()[self.suite]
        self.now = suite.user_tasks[self.task].init_environment(copy.deepcopy(environment(self.suite)))
        self.before = self.now.model_copy(deep=True)
        self.documents = [
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters.model_json_schema()}
            for tool in suite.tools
        ]

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the result of the tool of this name; an error is a result too."""
        from agentdojo.agent_pipeline.tool_execution import tool_result_to_str
        from agentdojo.functions_runtime import FunctionsRuntime

        runtime = FunctionsRuntime(suites()[self.suite].tools)
        result, error = runtime.run_function(self.now, name, read(arguments))
        return error or str(tool_result_to_str(result))


def utility(result: Any, item: dict[str, Any], state: World) -> float:
    """Return 1 if the task's own check passes, else 0."""
    from agentdojo.functions_runtime import FunctionCall
    from agentdojo.types import text_content_block_from_string

    answers = [message for message in result.messages if message["role"] == "assistant"]
    executed = [call for call in result.tool_calls if call.error is None and call.executed_by == "hermes_rl"]
    calls = [FunctionCall(function=call.name, args=read(call.arguments)) for call in executed]
    if len(answers) == STEPS and answers[-1].get("tool_calls"):
        state = World(item)
        for call in executed:
            if call.turn < STEPS:
                state.call(call.name, call.arguments)
    final_text = (answers[-1].get("content") or "") if answers else ""
    content_blocks = [text_content_block_from_string(final_text)] if final_text else []
    suite = suites()[state.suite]
    return float(suite._check_task_result(suite.user_tasks[state.task], content_blocks, state.before, state.now, calls))
