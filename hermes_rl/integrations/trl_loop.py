"""Offer a spec's tools, sandbox and rewards to TRL's own tool-call loop, as `HermesEnvironments`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import hermes_rl
from hermes_rl.errors import UserError
from hermes_rl.integrations.background_loop import BackgroundEnv, dataset
from hermes_rl.integrations.common import require_carried, require_no_comparing

_TYPES = {"integer": int, "number": float, "boolean": bool, "array": list, "object": dict}


class HermesEnvironments(BackgroundEnv):
    """A spec's tools, sandbox and rewards for TRL's own loop: `GRPOTrainer(environment_factory=…)`.

    TRL renders, samples and stops; the spec's budgets and stop reasons apply. A spec with a simulated user, several
    agents, an agent program, tools that differ between rows, or rewards that compare group members is refused; use
    `HermesRollouts` for it.

    Args:
        spec, rows, environ, record: as for `HermesRollouts`.
    """

    def __init__(
        self,
        spec: hermes_rl.Spec | str | Path,
        *,
        rows: int | Iterable[str] | None = None,
        environ: Mapping[str, str] | None = None,
        record: str | Path | None = None,
    ) -> None:
        super().__init__(spec, rows, environ, record)

    @cached_property
    def train_dataset(self) -> Any:
        """A `datasets.Dataset` with the prompt messages and the key of each row."""
        rows = self.rows("train")
        return dataset(prompt=[self.sync.prompt(row) for row in rows.values()], key=list(rows))

    @cached_property
    def environment_factory(self) -> type[Any]:
        """A class whose methods are the spec's tools.

        Raises:
            UserError: TRL's own loop cannot run the spec.
        """
        if self.env.spec.user is not None:
            raise UserError("the spec has a simulated user, which TRL's own loop does not support: use HermesRollouts")
        if self.env.spec.agents:
            raise UserError("the spec has several agents, and TRL's own loop supports one: use HermesRollouts")
        if self.env.spec.agent.program is not None:
            raise UserError("the spec's agent is a program, and here the loop is TRL's: use HermesRollouts")
        require_no_comparing(self.env, "TRL's own loop", "use HermesRollouts")
        tools = [self.sync.tools(row) for row in self.rows("train").values()]
        if any(tool != tools[0] for tool in tools):
            raise UserError("the tools differ between rows, and TRL's own loop has one set: use HermesRollouts")
        methods = {tool["function"]["name"]: _tool_method(tool["function"]) for tool in tools[0]}
        return type("HermesEnvironment", (_Stepped,), {"_opened": self, **methods})

    @property
    def reward_funcs(self) -> list[Callable[..., list[float | None]]]:
        """The function that ends each rollout with the model's final message and returns its score."""

        def hermes_rl_score(completions: Any, environments: Any, **_: Any) -> list[float | None]:
            return [
                environment._end_rollout(turns) for environment, turns in zip(environments, completions, strict=True)
            ]

        return [hermes_rl_score]


class _Stepped:
    """One rollout that TRL steps; a subclass has one method per tool.

    TRL offers every public method to the model as a tool, so all other methods are private.
    """

    _opened: HermesEnvironments

    def __init__(self) -> None:
        self._session: Any = None
        self._numbers = count(1)

    def reset(self, key: str, **_: Any) -> None:
        """Start the rollout of a row."""
        self._close()
        self._session = self._opened.sync.session(self._opened.rows("train")[key])
        self._session.start()

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": f"call{next(self._numbers)}", "type": "function", "function": function}
        turn = None if self._session.done else self._session.step({"content": "", "tool_calls": [call]})
        if turn is None:  # TRL shows a tool's exception to the model
            raise ValueError(f"the episode is over: {self._session.rollout.stop_reason}")
        return str(turn.messages[-1]["content"])

    def _end_rollout(self, completion: Sequence[Mapping[str, Any]]) -> float | None:
        """End the rollout with the model's final message; return its score, or None if it has none or did not end."""
        last = completion[-1] if completion else {}
        if not self._session.done:
            self._session.step(last.get("content") or "" if last.get("role") == "assistant" else "")
        rollout = self._session.rollout
        self._close()
        return None if rollout is None else require_carried(rollout, "TRL's own loop").score

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()


def _tool_method(tool: Mapping[str, Any]) -> Callable[..., str]:
    """Return a tool as a method whose signature and docstring let TRL rebuild the tool's schema."""
    properties = tool["parameters"].get("properties", {})
    required = tool["parameters"].get("required", ())

    def call(self: _Stepped, **arguments: Any) -> str:
        return self._call(tool["name"], arguments)

    types = {name: _TYPES.get(schema.get("type", ""), str) for name, schema in properties.items()}
    lines = [f"    {name}: {_one_line(schema.get('description') or name)}" for name, schema in properties.items()]
    call.__name__ = tool["name"]
    call.__doc__ = "\n".join([_one_line(tool.get("description") or tool["name"]), "", "Args:", *lines])
    call.__annotations__ = {**types, "return": str}
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for name, kind in sorted(types.items(), key=lambda entry: entry[0] not in required):
        default = inspect.Parameter.empty if name in required else None
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=kind)
        )
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _one_line(text: str) -> str:
    return " ".join(text.split())
