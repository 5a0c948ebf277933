"""Processes that hold the state of a rollout and run tools of the spec.

A `PoolTool` shares processes with calls of other rollouts. Everything that belongs to one rollout alone is in a
separate process: the state, its tools, the rewards that name it, and functions with `isolate: process`.

Data that such code stores in its modules then belongs to the rollout alone, and a call that takes too long ends the
process, and with it the state. The second half of this module runs in the process.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from hermes_rl.errors import Failure, SandboxFailure, UserError
from hermes_rl.plugins import Code, identity
from hermes_rl.sandbox.user_code import CONFINED
from hermes_rl.tools.base import (
    ArgumentRule,
    DescribedTool,
    Tool,
    ToolFailedError,
    ToolInputError,
    ToolRuntime,
    as_json,
    describe,
)
from hermes_rl.tools.python_tools import TOOL_NAME, PythonTool, StateTool, answer_of, tools_of_state
from hermes_rl.user_code.failures import EndedError, ForeignError
from hermes_rl.user_code.messages import require_texts
from hermes_rl.user_code.pool import POOL, OwnProcess
from hermes_rl.user_code.process import current_runner, settled
from hermes_rl.user_code.proxies import lives_in_runner
from hermes_rl.user_code.wire import WireError

if TYPE_CHECKING:  # each process that runs tools would load the models of specs
    from hermes_rl.spec.sections.tools import Isolate

HERE = "hermes_rl.tools.rollout_process"
T = TypeVar("T")
BEGIN = Code.from_ref(f"{HERE}:begin")
"""Function that rollouts without such a process do not need."""
STATE = "state"
"""Name under which the process keeps the state."""
LONGEST = 3600.0
"""Seconds of one call; `agent.tool_timeout` and the like are shorter."""


@lives_in_runner(f"{HERE}:own_state")
class RolloutProcess:
    """A process for one rollout alone. A reward that names `state` runs in it, and gets the state itself."""

    def __init__(self, held: OwnProcess) -> None:
        self.held = held

    @classmethod
    async def start(
        cls,
        state: Code | None,
        item: Mapping[str, Any],
        python: str,
        key: str,
        *,
        isolate: Isolate = "process",
        codes: Sequence[Code] = (),
    ) -> RolloutProcess:
        """Start a process, and create the state of a row in it; raises UserError if the state cannot be created.

        `python` and `key` name its class and the row; `codes` is all code that a sandboxed process may have to load
        (see `codes_of_process`).
        """
        if isolate == "sandbox":
            held = await CONFINED.hold(*codes)
        else:
            held = await POOL.hold(BEGIN, *([state] if state is not None else []), reused=isolate == "reuse")
        process = cls(held)
        if state is not None:
            try:
                await process.call("begin", identity, state=state, item=item)
            except ForeignError as error:
                await process.close()
                if isinstance(error.claimed, Failure):  # the policy has done nothing yet
                    raise error.claimed from error
                raise UserError(f"state: {python} raised {error} (row {key})") from error
            except EndedError as error:  # it was killed, for example by the kernel when memory ran out
                await process.close()
                raise SandboxFailure(f"state: {python}: its process {error} (row {key})") from error
        return process

    def stand_in_fields(self) -> dict[str, Any]:
        """Return no fields: the process has the state."""
        return {}

    async def call(self, function: str, read: Callable[[Any], T], **arguments: Any) -> T:
        """Call a function of this module in the process.

        Cancellation ends the process: nothing else can stop the call.
        """
        code = Code.from_ref(f"{HERE}:{function}")
        return await self.held.call(code, arguments, "hermes_rl.plugins:identity", LONGEST, read)

    async def tools(self, source: Mapping[str, Any]) -> tuple[Tool, ...]:
        """Return the tools of an entry that names a part of the state, as described by the state in the process.

        Raises `UserError` if the state has no such part or raises, `SandboxFailure` if the process ends.
        """
        name, rule = source["name"], source["arguments"]
        try:
            descriptions = await self.call("describe_tools", read_descriptions, source=dict(source))
        except ForeignError as error:
            raise UserError(f"tools: {name} of the state raised {error}") from error
        except EndedError as error:
            raise SandboxFailure(f"tools: {name} of the state: its process {error}") from error
        if source["schemas"] is not None:
            return tuple(
                RolloutTool(one, rule, "call_described", member=name, called=one["name"]) for one in descriptions
            )
        return tuple(
            RolloutTool(one, rule, "call_method", method=one["name"], source=name, arguments=rule)
            for one in descriptions
        )

    async def close(self) -> None:
        """End the process and all its children."""
        await self.held.close()


def read_answer(answer: Any) -> Mapping[str, str]:
    """Return the validated result of `_result_or_error` from the process; raises `WireError` for anything else."""
    return require_texts(answer, {"text"}, {"input"}, {"failed", "detail"})


def read_descriptions(value: Any) -> list[dict[str, Any]]:
    """Return the validated result of `describe_tools` from the process; raises `WireError` for anything else."""
    if not isinstance(value, list):
        raise WireError("descriptions of tools are a list")
    for each in value:
        match each:
            case {"name": str(name), "description": str(), "parameters": dict(), "parallel": bool()} if len(each) == 4:
                if not TOOL_NAME.fullmatch(name):
                    raise WireError("a tool has another name")
            case _:
                raise WireError("the description of a tool has another form")
    return value


class IsolatedTool(DescribedTool):
    """A tool whose code runs in a process for user code; `function` is the one of this module that calls it there."""

    def __init__(
        self, description: Mapping[str, Any], rule: ArgumentRule | None, function: str, **arguments: Any
    ) -> None:
        super().__init__(description["name"], description["description"], description["parameters"])
        self.parallel, self.arguments = description["parallel"], rule
        self._function, self._arguments = function, arguments

    async def call(self, args: dict[str, Any], runtime: ToolRuntime) -> str:
        try:
            answer = await self._answer(
                Code.from_ref(f"{HERE}:{self._function}"), {"args": args, **self._arguments}, runtime
            )
        except EndedError as error:
            raise ToolFailedError(f"tool {self.name!r} failed: its process {error}", f"its process {error}") from error
        if "input" in answer:
            raise ToolInputError(answer["input"])
        if "failed" in answer:
            raise ToolFailedError(f"tool {self.name!r} failed: {answer['failed']}", answer["detail"])
        return answer["text"]

    @abstractmethod
    async def _answer(self, call: Code, arguments: Mapping[str, Any], runtime: ToolRuntime) -> Mapping[str, str]:
        """Return the result of a call in the process."""


class RolloutTool(IsolatedTool):
    """A function of the spec, or a method of its state, that is called in the rollout's process."""

    @classmethod
    def of_function(cls, tool: Tool, reference: str) -> RolloutTool:
        """Return the tool for the function that the reference names."""
        return cls(
            description_of(tool),
            tool.arguments,
            "call_function",
            code=Code.from_ref(reference),
            arguments=tool.arguments,
        )

    async def _answer(self, call: Code, arguments: Mapping[str, Any], runtime: ToolRuntime) -> Mapping[str, str]:
        held: OwnProcess = runtime.process.held
        return await held.call(call, arguments, "hermes_rl.plugins:identity", LONGEST, read_answer)


class PoolTool(IsolatedTool):
    """A function of the spec, which is called in a process shared with calls of other rollouts."""

    def __init__(self, tool: Tool, reference: str) -> None:
        self.code = Code.from_ref(reference)
        rule = tool.arguments
        super().__init__(description_of(tool), rule, "call_function", code=self.code, arguments=rule)

    async def _answer(self, call: Code, arguments: Mapping[str, Any], runtime: ToolRuntime) -> Mapping[str, str]:
        return await POOL.call(call, arguments, "hermes_rl.plugins:identity", LONGEST, read_answer)


class SandboxedTool(PoolTool):
    """A function of the spec, each call of which has a separate sandboxed process."""

    @property
    def codes(self) -> tuple[Code, ...]:
        """All code that its process loads."""
        return Code.from_ref(f"{HERE}:call_function"), self.code

    async def _answer(self, call: Code, arguments: Mapping[str, Any], runtime: ToolRuntime) -> Mapping[str, str]:
        process = await CONFINED.hold(*self.codes)
        try:
            return await process.call(call, arguments, "hermes_rl.plugins:identity", LONGEST, read_answer)
        finally:
            await process.close()


def description_of(tool: Tool) -> dict[str, Any]:
    """Return the data of a tool that a model and the runner need, as plain values."""
    return {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "parallel": tool.parallel,
    }


# ------------------------------------------------------------------------------------------ Code in the process


def begin(state: Code, item: dict[str, Any]) -> None:
    """Create the state of a row."""
    current_runner().objects[STATE] = state.load()(item)


def own_state(object_id: int) -> Any:
    """Return the state, for a reward that names it."""
    return current_runner().objects[STATE]


def describe_tools(source: dict[str, Any]) -> list[dict[str, Any]]:
    """Describe the tools of an entry that names a part of the state."""
    return [description_of(tool) for tool in tools_of_state(current_runner().objects[STATE], **source)]


def call_described(member: str, called: str, args: dict[str, Any]) -> dict[str, str]:
    """Call the method of the state that handles a tool of this name."""
    return _result_or_error(lambda: getattr(current_runner().objects[STATE], member)(called, args), answer_of)


def call_method(source: str, method: str, args: dict[str, Any], arguments: ArgumentRule | None) -> dict[str, str]:
    """Call a method of the state as a tool."""
    (tool,) = tools_of_state(current_runner().objects[STATE], source, arguments=arguments, names=[method])
    assert isinstance(tool, StateTool)
    called = tool.method_of(current_runner().objects[STATE])
    return _result_or_error(lambda: called(**tool.values(args)), answer_of)


def call_function(code: Code, args: dict[str, Any], arguments: ArgumentRule | None) -> dict[str, str]:
    """Call a function as a tool."""
    tool = PythonTool(code.load())
    tool.arguments = arguments
    return _result_or_error(lambda: tool.function(**tool.values(args)), answer_of)


def load_plugins() -> None:
    """Load pydantic's plugins, which takes 20 ms at the first schema."""
    TypeAdapter(int)


begin.prepare = load_plugins  # type: ignore[attr-defined]
call_function.prepare = load_plugins  # type: ignore[attr-defined]


def ask_state(member: str, args: dict[str, Any]) -> dict[str, str]:
    """Call a method or read an attribute of the state for the run."""
    return _result_or_error(lambda: query_state(current_runner().objects[STATE], member, **args), answer_in_json)


def query_state(state: object, member: str, arguments: Sequence[Any]) -> Any:
    """Return the result of a method of the state for these arguments, or the value of an attribute."""
    value = getattr(state, member)
    return value(*arguments) if callable(value) else value


def answer_in_json(value: Any) -> str:
    """Return a value as JSON, texts included, so that no part of its content is taken for structure."""
    return as_json(to_jsonable_python(value, fallback=str))


def _result_or_error(call: Callable[[], Any], form: Callable[[Any], str]) -> dict[str, str]:
    try:
        return {"text": form(settled(call()))}
    except ToolInputError as error:
        return {"input": str(error)}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the model is told whatever a user's tool raises
        return {"failed": describe(error), "detail": f"{type(error).__name__}: {error}"}
