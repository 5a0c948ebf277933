"""The user's code of a spec: the states of rollouts, their processes, and all code that runs in processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hermes_rl.data.rows import Row
from hermes_rl.errors import UserError
from hermes_rl.plugins import Code, load_object, place_of
from hermes_rl.rollouts.sandboxes import Tooling
from hermes_rl.sandbox.user_code import CONFINED
from hermes_rl.scoring.reward_function import RewardFunction
from hermes_rl.spec.model import Spec
from hermes_rl.spec.sections.tools import Isolate
from hermes_rl.tools.rollout_process import BEGIN, RolloutProcess
from hermes_rl.user_code.pool import POOL
from hermes_rl.values import deep_copy


class RolloutCode:
    """Code of a spec that runs for its rollouts.

    Args:
        rewards: functions of the spec's rewards.
        tooling: the tools of the agent and of its user.

    Raises `UserError` if the class of the state cannot be loaded.
    """

    def __init__(self, spec: Spec, rewards: Sequence[RewardFunction], tooling: Sequence[Tooling]) -> None:
        self._spec = spec
        self._state_class = load_object(spec.state.python) if spec.state is not None else None
        self._rewards = [(function, function.code) for function in rewards if function.code is not None]
        """Each reward that runs in a process, with its code."""
        self._tooling = tooling

    def prepare(self) -> None:
        """Load the code in the background, so that no first call waits for it."""
        rewards = [code for function, code in self._rewards if function.pool is POOL]
        POOL.prepare([*rewards, *(code for tooling in self._tooling for code in tooling.codes)])
        for codes in self._sandboxed():
            CONFINED.prepare(codes)

    async def process(self, row: Row) -> RolloutProcess | None:
        """Start the process of a rollout if the spec needs one."""
        state = self._spec.state if self._spec.state_apart else None
        if state is None and not any(tool.isolate == "process" for tool in self._spec.all_tools.values()):
            return None
        code = None if state is None else Code.from_ref(state.python)
        python = "" if state is None else state.python
        isolate: Isolate = "process" if state is None else state.isolate
        item, codes = dict(row.columns), self._of_process() if isolate == "sandbox" else ()
        return await RolloutProcess.start(code, item, python, row.key, isolate=isolate, codes=codes)

    def state(self, row: Row) -> Any:
        """Create the state object for a row; return None if the spec has no state."""
        if self._state_class is None:
            return None
        try:
            return self._state_class(deep_copy(dict(row.columns)))
        except (Exception, SystemExit) as error:  # any exception of the spec's code is a mistake in the spec
            error_text = place_of(error, self._state_class.__init__)
            raise UserError(
                f"state: {self._spec.state and self._spec.state.python} raised {error_text} (row {row.key})"
            ) from error

    def _of_process(self) -> tuple[Code, ...]:
        """Return all code of the spec that the process of a rollout may load: a sandbox contains no other code."""
        assert self._spec.state is not None
        tools = self._spec.all_tools.values()
        functions = [
            Code.from_ref(tool.python) for tool in tools if tool.python is not None and tool.isolate == "process"
        ]
        rewards = [code for function, code in self._rewards if "state" in function.parameters]
        return tuple(dict.fromkeys((BEGIN, Code.from_ref(self._spec.state.python), *functions, *rewards)))

    def _sandboxed(self) -> Iterator[tuple[Code, ...]]:
        """Yield the code of each kind of sandboxed process."""
        if self._spec.state is not None and self._spec.state.isolate == "sandbox":
            yield self._of_process()
        yield from ((code,) for function, code in self._rewards if function.pool is CONFINED)
        for tooling in self._tooling:
            yield from tooling.sandboxed
