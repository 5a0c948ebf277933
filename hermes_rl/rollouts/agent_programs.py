"""Agent programs of a spec's seats, rendered for a row and a conversation."""

from __future__ import annotations

from collections.abc import Sequence

from hermes_rl.agent.program import PORT, AgentFunction, AgentProgram, endpoint_of
from hermes_rl.agent.result import Message, text_of
from hermes_rl.data.rows import Row
from hermes_rl.rollouts.sandboxes import laid_files
from hermes_rl.spec.model import Spec
from hermes_rl.spec.section import EnvText
from hermes_rl.spec.sections.agent import PROGRAM_VALUES
from hermes_rl.spec.templates import coerce, render, render_section


class AgentPrograms:
    """Programs that run in the place of the loop, by seat; the seat of a single agent has an empty name.

    Raises `UserError` if a function that a program names cannot be loaded.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._programs = {path[1] if path[0] == "agents" else "": program for path, program in spec.programs.items()}
        self._functions = {
            seat: AgentFunction.from_ref(program.python, spec_key=f"{_key(seat)}.python")
            for seat, program in self._programs.items()
            if program.python
        }

    def __contains__(self, seat: str) -> bool:
        return seat in self._programs

    def render(
        self, seat: str, row: Row, messages: Sequence[Message], rollout_id: str, context: int, port: int = PORT
    ) -> AgentProgram:
        """Return a seat's program for the row and a conversation.

        Args:
            messages: the conversation, whose last message it must respond to.
            rollout_id: id of the rollout, or of the seat in it.
            context: maximum tokens of a conversation.
            port: port in the sandbox at which it reaches the model.

        Raises:
            TemplateError: a template does not work for this row.
            UserError: one of its files cannot be read, is outside the spec's directory, or has the target of another
                file.
        """
        program, function, spec_key = self._programs[seat], self._functions.get(seat), _key(seat)
        system = next((text_of(message["content"]) for message in messages if message["role"] == "system"), "")
        prompt = text_of(messages[-1]["content"]) if messages else ""
        offered = (prompt, system, endpoint_of(rollout_id, port), rollout_id, context)
        values = {**row.columns, **dict(zip(PROGRAM_VALUES, offered, strict=True))}
        command, env = (
            coerce(render(written, values, location=location, key=row.key), kind, location=location, key=row.key)
            for written, kind, location in (
                (program.command, list[EnvText], f"{spec_key}.command"),
                (program.env, dict[str, EnvText], f"{spec_key}.env"),
            )
        )
        arguments = {"row": dict(row.columns), "messages": list(messages), "prompt": prompt, "system": system}
        location = f"{spec_key}.files"
        files = tuple(
            render_section(file, values, location=f"{location}.{index}", key=row.key)
            for index, file in enumerate(program.files)
        )
        return AgentProgram(
            tuple(command),
            env,
            laid_files(files, self._spec.folder, location),
            tuple(program.train),
            program.tools is not None,
            function,
            {} if function is None else arguments,
            spec_key,
        )


def _key(seat: str) -> str:
    """Return the key of a seat's program in the spec."""
    return f"agents.{seat}.agent.program" if seat else "agent.program"
