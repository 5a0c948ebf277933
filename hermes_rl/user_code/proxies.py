"""Define proxies, in a process for user code, of objects that live in the runner.

A proxy has the methods of its object and forwards each call. A class is marked by `lives_in_runner` with its proxy
class, and returns the initial fields of the proxy from `stand_in_fields`; `hermes_rl.user_code.served` inserts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from hermes_rl.errors import AgentFault, UserError
from hermes_rl.user_code.process import current_runner

LIVING: dict[type, str] = {}
"""Classes whose objects live only in the runner → reference to their proxy."""
Living = TypeVar("Living", bound=type)


def lives_in_runner(stand_in: str) -> Callable[[Living], Living]:
    """Keep objects of a class, not of its subclasses, in the runner; code in other processes gets a proxy.

    Args:
        stand_in: `module:name` of the proxy, which is called with the object's number and its `stand_in_fields`.
    """

    def marked(kind: Living) -> Living:
        LIVING[kind] = stand_in
        return kind

    return marked


class ObjectProxy:
    """Proxy of the object with this number; unknown public methods are forwarded to the object."""

    def __init__(self, object_id: int) -> None:
        self._object_id = object_id

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._ask, name)

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return current_runner().ask(self._object_id, method, *args, **kwargs).result()

    async def _ask_here(self, method: str, *args: Any) -> Any:
        import asyncio

        return await asyncio.wrap_future(current_runner().ask(self._object_id, method, *args))


class ContextStandIn(ObjectProxy):
    """Proxy of a `ToolContext`."""

    def __init__(self, object_id: int, task_id: str) -> None:
        super().__init__(object_id)
        self.task_id = task_id

    @property
    def runtime(self) -> Any:
        """Unavailable: the sandbox of a rollout is managed by the runner."""
        raise UserError("ctx.runtime is not available in a separate process; give the reward `isolate: none`")

    @contextmanager
    def staged(self) -> Iterator[None]:
        """See `ToolContext.staged`."""
        try:
            yield
        finally:
            self._ask("restore")

    @contextmanager
    def pristine_sandbox(self) -> Iterator[ContextStandIn]:
        """See `ToolContext.pristine_sandbox`."""
        fresh: ContextStandIn = self._ask("pristine_sandbox")
        try:
            yield fresh
        finally:
            fresh._ask("leave")


class RoleStandIn(ObjectProxy):
    """Proxy of the `ModelHandle` of a role; its calls are awaited."""

    def __init__(self, object_id: int, name: str, scripted: bool) -> None:
        super().__init__(object_id)
        self.name, self.scripted = name, scripted
        self.verdicts: dict[str, Future[Mapping[str, Any]]] = {}

    async def chat(self, messages: list[dict[str, Any]], schema: Mapping[str, Any] | None = None) -> str:
        """See `ModelHandle.chat`."""
        answer: str = await self._ask_here("chat", messages, schema)
        return answer

    async def answer(
        self, messages: Sequence[dict[str, Any]], schema: Mapping[str, Any], temperature: float
    ) -> tuple[str, Mapping[str, float]]:
        """See `ModelHandle.answer`."""
        text, usage = await self._ask_here("answer", list(messages), schema, temperature)
        return text, usage

    async def rate(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        """See `ModelHandle.rate`."""
        numbers: list[float] = await self._ask_here("rate", list(messages))
        return numbers


class SeatStandIn(ObjectProxy):
    """Proxy of a `SeatRunner` for a schedule of the spec."""

    def __init__(self, object_id: int, name: str) -> None:
        super().__init__(object_id)
        self.name = name

    async def say(self, message: str | None = None) -> str | None:
        """See `SeatRunner.say`; an exception ends the episode, unless the schedule continues."""
        answer = await self._ask_here("handle_say", message)
        if "problem" in answer:
            raise AgentFault(answer["problem"])
        text: str | None = answer["text"]
        return text
