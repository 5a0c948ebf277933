"""Compile a spec into an environment that the core can run.

Compiling loads the code that the spec names and creates its roles; it starts nothing. The parts of each rollout (tools,
sandbox, prompt, script) are created per key, so rollouts share no mutable objects.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from hermes_rl.agent.program import PORT, AgentProgram, ProgramOf, context_of
from hermes_rl.agent.recorder import LoopOptions
from hermes_rl.agent.result import AgentResult, Message
from hermes_rl.agent.seats import (
    MultiAgentEpisode,
    Schedule,
    SeatRunner,
    SeatTool,
)
from hermes_rl.agent.user import AnswersAgent, CodeUser, ScriptedUser, SimulatedUser, WithHook, user_id
from hermes_rl.data.load import require_split
from hermes_rl.data.rows import Row
from hermes_rl.errors import UserError
from hermes_rl.rollouts.agent_options import changed_agent, ending_tools, loop_options, options_of_seat, read_settings
from hermes_rl.rollouts.agent_programs import AgentPrograms
from hermes_rl.rollouts.environment import EndingPolicy
from hermes_rl.rollouts.rewards import grader_of
from hermes_rl.rollouts.rollout import ONLY_SEAT, Rollout, RolloutKey, Seat
from hermes_rl.rollouts.rollout_code import RolloutCode
from hermes_rl.rollouts.sandboxes import ArtifactSandboxes, Keep, RewardSandboxes, Tooling, sandbox_config
from hermes_rl.rollouts.seating import Seating, seat_id
from hermes_rl.rollouts.solutions import policy_script, solution_turns, trial_row, user_script
from hermes_rl.rollouts.steps import BeforeWords, grade
from hermes_rl.rollouts.teacher import Teacher
from hermes_rl.sandbox.base import SandboxConfig
from hermes_rl.sandbox.isolation import require_grading, require_isolation
from hermes_rl.scoring.grader import GradedSeat
from hermes_rl.servers.base import POLICY, ChatServer
from hermes_rl.servers.client import ModelClient
from hermes_rl.servers.factory import config_from_spec, create_client
from hermes_rl.servers.scripted.play import FINISHED, Script, ScriptedTurn
from hermes_rl.spec.findings import locating
from hermes_rl.spec.model import Spec
from hermes_rl.spec.prompts import content_of, messages_of
from hermes_rl.spec.row_files import placed_files, require_offered
from hermes_rl.spec.sections.prompt import User, UserWords
from hermes_rl.spec.sections.tools import NO_TOOLSETS
from hermes_rl.spec.suggest import choices
from hermes_rl.spec.templates import (
    has_template,
    render_section,
)
from hermes_rl.stop_reasons import StopReason
from hermes_rl.tokens.tokenizer import Tokenizer
from hermes_rl.tools.artifacts import ArtifactRequest, TakenArtifact
from hermes_rl.tools.base import Tool, ToolFailedError, ToolInputError, Toolkit, ToolRuntime, free_task_id
from hermes_rl.tools.context import ToolContext
from hermes_rl.tools.execute import run_tool
from hermes_rl.tools.python_tools import StateTool
from hermes_rl.tools.rollout_process import RolloutTool
from hermes_rl.tools.state_questions import ask_state, state_question
from hermes_rl.user_code.environment import admit

log = logging.getLogger(__name__)


def with_thinking(messages: list[Message], thinking: str | None) -> list[Message]:
    """Return the messages with Atropos' `custom_thinking_prompt` before the system message."""
    if not thinking:
        return messages
    first = messages[0] if messages and messages[0]["role"] == "system" else None
    text = f"{thinking}\n\n{first['content']}" if first is not None else thinking
    return [{"role": "system", "content": text}, *messages[1 if first is not None else 0 :]]


class CompiledSpec:
    """Environment of a spec, as used by the core.

    Args:
        spec: the spec to run.
        environ: variables that hold the API keys of servers; default: the process's environment.

    Raises:
        UserError: code that the spec names cannot be loaded, or a key is missing.
    """

    gradings = 1
    """How often a final state is graded; its sandbox stays until the last time."""

    def __init__(self, spec: Spec, environ: Mapping[str, str] | None = None) -> None:
        require_isolation(spec)
        self.spec = spec
        self.name = spec.name
        self.seed = spec.seed
        variables = os.environ if environ is None else environ
        admit(spec.user_code.env, variables or os.environ)  # without keys of servers, code still sees what it names
        self.roles = _make_clients(spec, variables)
        self.tooling = Tooling(spec, variables)
        self._user_tooling = Tooling(spec, variables, spec.user.tools if spec.user else (), NO_TOOLSETS)
        self._programs = AgentPrograms(spec)
        self.seating = Seating(spec)
        self.seats = self.seating.seats
        self.grader = grader_of(spec, self.roles, self.trial)
        functions = [reward.function for reward in self.grader.rewards]
        self._code = RolloutCode(spec, functions, [self.tooling, self._user_tooling])
        require_grading(spec, [each.name for each in self.grader.rewards if each.function.uses_context])
        self.keep: Keep | None = None
        """Stores the artifacts of a rollout by its id and describes them; None if a run stores none."""
        self.images: dict[str, set[str]] = {}
        """Digests of the images of graded rollouts, by image name in the spec."""
        self._folder = spec.folder
        self._environ = environ
        self._opened = False
        self._questions: dict[str, Tool] = {}
        """Questions of the run to states, by method or attribute name."""
        self.sandbox: SandboxConfig | None = None
        """Sandbox configuration of all rows if no template makes them differ; set on first use."""

    @property
    def has_group_rewards(self) -> bool:
        return self.grader.has_group_rewards

    @property
    def uses_context(self) -> bool:
        """True if a reward may use the sandbox."""
        return any(reward.function.uses_context for reward in self.grader.rewards)

    @property
    def policy(self) -> ModelClient:
        """The acting model. Raises `UserError` if the spec names none."""
        if POLICY not in self.roles:
            raise UserError("servers.policy is missing: name the model that acts")
        return self.roles[POLICY]

    @property
    def teacher(self) -> Teacher | None:
        """Teacher that scores the tokens of training rollouts, or None."""
        distill = self.spec.distill
        return None if distill is None else Teacher(self.roles[distill.server], distill.top_k)

    def with_policy(self, policy: ModelClient) -> CompiledSpec:
        """Return this environment with another policy; tools, sandboxes and rewards are shared."""
        other = copy.copy(self)
        other.roles = {**self.roles, POLICY: policy}
        other.grader = replace(self.grader, trial=other.trial)
        return other

    async def open(self, row: Row) -> None:
        """Start the services that the tools of all rollouts need; `row` may be any row. A rollout does this if needed.

        Raises:
            RunError: a service cannot be started; see `Tooling.open`.
            UserError: a service lacks the requested tools; see `Tooling.open`.
        """
        await self._open(self._sandbox_of(row))

    async def _open(self, config: SandboxConfig) -> None:
        if not self._opened:
            self._opened = True
            self._code.prepare()
        await self.tooling.open(config)
        await self._user_tooling.open(config)

    async def close(self) -> None:
        """Release the servers of tools and of all roles."""
        if self.spec.sandbox.backend == "docker":
            from hermes_rl.sandbox.docker import remove_now

            await remove_now()
        await self.tooling.close()
        await self._user_tooling.close()
        for role in self.roles.values():
            await role.close()

    async def __aenter__(self) -> Self:
        for role in self.roles.values():
            role.bind_to_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def options(self, split: str, sampling: Mapping[str, Any] | None = None) -> LoopOptions:
        """Return the limits of one rollout.

        Args:
            sampling: settings of `agent` that replace the spec's.

        Raises:
            UserError: there is no such split, `agent` has no such setting, or its value is invalid.
        """
        require_split(split)
        agent = self.spec.agent_for("evaluate" if split == "eval" else "process")
        if settings := read_settings(sampling):
            agent = changed_agent(agent, settings)
        # A scripted policy is deterministic and reports log-probabilities; other chat servers may refuse the request
        # for them.
        return replace(loop_options(agent, self.spec), logprobs=self.policy.scripted)

    def prompt(self, row: Row, seat: str = "") -> list[Message]:
        """Return the initial messages of a rollout, for this seat if there are several (default: the first)."""
        seat = seat or next(iter(self.spec.agents), "")
        seat_config = self.spec.agents.get(seat)
        prompt, location = self.spec.prompt, "prompt"
        if seat_config is not None and seat_config.prompt is not None:
            prompt, location = seat_config.prompt, f"agents.{seat}.prompt"
        with locating(self.spec, row.key, ("prompt",)):
            messages = messages_of(prompt, row, self._folder, location)
        return with_thinking(messages, self.spec.atropos.get("custom_thinking_prompt"))

    async def toolkit(self, row: Row, group: str) -> Toolkit:
        """Return the tools of a rollout of this row in this group; tools of tool servers only once they are open.

        If tools come from the state, a state is created in the process where the states of rollouts are.
        """
        if not self._has_state_tools:
            return await self._toolkit(self.tooling, group, None, row)
        process = await self._code.process(row)
        try:
            async with ToolRuntime(state=process if self.spec.state_apart else self._code.state(row)) as runtime:
                runtime.process = process
                try:
                    return await self._toolkit(self.tooling, group, runtime.state, row)
                finally:
                    await self._close_state(runtime)
        finally:
            if process is not None:
                await process.close()

    @asynccontextmanager
    async def runtime(self, key: RolloutKey) -> AsyncIterator[ToolRuntime]:
        config = self._sandbox_of(key.row)
        await self._open(config)
        process = await self._code.process(key.row)
        try:
            state = process if self.spec.state_apart else self._code.state(key.row)
            toolkit = await self._toolkit(self.tooling, key.group, state, key.row)
        except BaseException:  # no other code knows this process yet
            if process is not None:
                await process.close()
            raise
        for role in self.roles.values():
            role.bind_to_loop()
        name = free_task_id(key.id)
        with locating(self.spec, key.row.key, ("solution",)):
            self._register_scripts(key, name)
        try:
            new = ToolRuntime(config, task_id=name, toolkit=toolkit, state=state, run=True)
            new.process = process
            self._require_tools(toolkit)
            if self.spec.state is not None and self.spec.state.done is not None:
                new.is_over = self._state_caller(self.spec.state.done, new)
            seats = [seat for seat, seat_config in self.spec.agents.items() if seat_config.sandbox == "own"]
            entered: Any = AsyncExitStack() if seats else nullcontext()  # few rollouts need it, and it takes a kilobyte
            async with new as runtime, entered as stack:
                for seat in seats:
                    identity = seat_id(name, seat)
                    apart = ToolRuntime(config, task_id=identity, toolkit=toolkit, state=state, run=True)
                    apart.process, apart.is_over = process, new.is_over
                    runtime.apart[seat] = await stack.enter_async_context(apart)
                try:
                    yield runtime
                finally:
                    await self._close_state(runtime)
        finally:
            self._forget(name)
            if process is not None:
                await process.close()

    @asynccontextmanager
    async def trial(self, item: Mapping[str, Any], solved: bool) -> AsyncIterator[tuple[ToolContext, Any]]:
        """Open a sandbox and a state of a row that no agent has used, for rewards that failed.

        Args:
            item: columns of the row.
            solved: run the solution's tool calls that act on the state or the sandbox, and no others.
        """
        key = RolloutKey(trial_row(item), "trial", 0, 1)
        async with self.runtime(key) as runtime:
            users = await self._toolkit(self._user_tooling, key.group, runtime.state, key.row)
            for turn in solution_turns(self.spec, key.row) if solved else ():
                for turn_key, toolkit in (("user_tools", users), ("tools", runtime.toolkit)):
                    for call in turn.get(turn_key) or ():
                        tool = toolkit.get(call["name"])
                        if tool is not None and (tool.on_sandbox or isinstance(tool, RolloutTool | StateTool)):
                            with suppress(ToolFailedError, ToolInputError):
                                await run_tool(tool, call.get("args") or {}, runtime, self.spec.tool_timeout)
            await runtime.settle()
            yield ToolContext(runtime.task_id), runtime.state

    async def _close_state(self, runtime: ToolRuntime) -> None:
        """Let the state release its resources; errors are logged and do not stop the run."""
        if self.spec.state is None or self.spec.state.close is None:
            return
        try:
            await self._state_caller(self.spec.state.close, runtime)()
        except ToolFailedError as error:
            log.warning("state.close: %s %s", self.spec.state.close, error.detail)

    async def _toolkit(self, tooling: Tooling, group: str, state: Any, row: Row) -> Toolkit:
        """Return the tools of a rollout; errors name its row."""
        with locating(self.spec, row.key, ("tools",)):
            return await tooling.toolkit(group, state, row)

    def _require_tools(self, toolkit: Toolkit) -> None:
        """Raise `UserError` if a tool that ends rollouts, or a tool of a seat, does not exist."""
        for name in sorted(ending_tools(self.spec) - toolkit.names):
            raise UserError(
                f"tools: `ends_rollout` names {name!r}, and there is no such tool{choices(name, toolkit.names)}"
            )
        for seat, seat_config in self.spec.agents.items():
            for name in sorted(set(seat_config.tools or ()) - toolkit.names):
                raise UserError(f"agents.{seat}.tools: there is no tool {name!r}{choices(name, toolkit.names)}")

    @property
    def _has_state_tools(self) -> bool:
        """True if the agent or its user has tools of the state; otherwise no state is created to list tools."""
        return any(tool.state is not None for tool in self.spec.all_tools.values())

    def _sandbox_of(self, row: Row) -> SandboxConfig:
        if self.sandbox is not None:
            return self.sandbox
        with locating(self.spec, row.key, ("sandbox",)):
            config = sandbox_config(self.spec, row, self._environ)
        section = self.spec.sandbox
        if not (section.model_fields_set and has_template(section.model_dump(exclude_unset=True))):
            self.sandbox = config
        return config

    async def grade(self, rollout: Rollout, runtime: ToolRuntime) -> None:
        with locating(self.spec, rollout.key.row.key):
            await self._grade(rollout, runtime)

    async def _grade(self, rollout: Rollout, runtime: ToolRuntime) -> None:
        item = dict(rollout.key.row.columns)
        if not rollout.others:
            sandboxes = await self._collect_artifacts(rollout, runtime)
            result = _result_of(rollout).for_rewards()
            await grade(self.grader, item, result, sandboxes, runtime.state, rollout.rewards)
            return
        shared: RewardSandboxes | None = None
        graded, sharing = [], [seat.seat.name for seat in rollout.seats if seat.seat.name not in runtime.apart]
        for seat in rollout.seats:
            name = seat.seat.name
            if name in runtime.apart:
                machines = await self._collect_artifacts(seat, runtime.apart[name], [name])
            else:
                machines = shared = shared or await self._collect_artifacts(seat, runtime, sharing)
            graded.append(GradedSeat(name, _result_of(seat).for_rewards(), machines, seat.rewards))
        await self.grader.grade_seats(item, graded, runtime.state)

    async def _collect_artifacts(
        self, rollout: Rollout, runtime: ToolRuntime, seats: Sequence[str] = ("",)
    ) -> RewardSandboxes:
        """Take the artifacts of a sandbox that these seats share; return the sandboxes for the rewards."""
        calls = [each for each in self.grader.ordered for seat in seats if each.is_called_for(seat)]
        sandboxes = RewardSandboxes(runtime, calls * self.gradings, self._unmounted_artifacts())
        # already taken when it was graded before
        requests = [] if rollout.artifacts else self._artifacts(rollout.key.row)
        artifacts = await sandboxes.take(requests, self.spec.command_timeout)
        if self.keep is not None and requests and artifacts:
            rollout.artifacts = await asyncio.to_thread(self.keep, rollout.id, artifacts)
        rollout.image = runtime.image_digest
        if rollout.image is not None:
            self.images.setdefault(runtime.config.image or "(default)", set()).add(rollout.image)
        return sandboxes

    def artifact_sandboxes(
        self, name: str, group: str, row: Row, artifacts: Callable[[], Mapping[str, TakenArtifact]]
    ) -> ArtifactSandboxes:
        """Return sandboxes for the rewards of a rollout of an earlier run; tools of tool servers are not available."""
        config, toolkit = sandbox_config(self.spec, row, self._environ), self.tooling.shared(group)
        return ArtifactSandboxes(name, config, toolkit, artifacts, self._unmounted_artifacts())

    def _artifacts(self, row: Row) -> list[ArtifactRequest]:
        """Return the artifacts that the spec requests, rendered for a row."""
        rendered = {
            name: render_section(artifact, row.columns, location=f"artifacts.{name}", key=row.key)
            for name, artifact in self.spec.artifacts.items()
        }
        for name, artifact in rendered.items():
            if artifact.path is None and artifact.command is None:
                raise UserError(f"artifacts.{name}, row {row.key}: its template returns None")
        return [ArtifactRequest(name, artifact.path, artifact.command) for name, artifact in rendered.items()]

    def _unmounted_artifacts(self) -> frozenset[str]:
        """Return the names of artifacts that are not copied into fresh sandboxes."""
        return frozenset(name for name, artifact in self.spec.artifacts.items() if not artifact.restore)

    async def grade_group(self, rollouts: list[Rollout]) -> None:
        item = dict(rollouts[0].key.row.columns)
        by_seat = [list(members) for members in zip(*(rollout.seats for rollout in rollouts), strict=True)]
        results = {
            members[0].seat.name: [_result_of(member).for_rewards() for member in members] for members in by_seat
        }
        for members in by_seat:
            name = members[0].seat.name
            paying = {reward.name for reward in self.grader.rewards if reward.pays(name)}
            values = [member.rewards for member in members]
            seats = results if name else None
            with locating(self.spec, rollouts[0].key.row.key):
                await self.grader.grade_group(item, results[name], values, paying, seats)

    def score(self, rollout: Rollout) -> float:
        score = self.grader.score(rollout.rewards, rollout.seat.name)
        self.seating.count_win([other.seat for other in rollout.others], score)
        return score

    def credit(self, rollout: Rollout) -> tuple[float, ...] | None:
        return self.grader.credit(rollout.rewards)

    def on_stop_policy(self, stop_reason: StopReason) -> EndingPolicy:
        policy = self.spec.on_stop.get(str(stop_reason), "grade")
        assert policy != "worst", "the spec's rules allow `worst` for `retries_exhausted` only"
        return policy

    async def user(self, key: RolloutKey, runtime: ToolRuntime) -> AnswersAgent | None:
        user, state = self.spec.user, self.spec.state
        if user is None:
            return None
        answers = await self._make_user(user, key, runtime)
        return (
            answers
            if state is None or state.before_user_turn is None
            else WithHook(answers, self._state_caller(state.before_user_turn, runtime))
        )

    def _state_caller(self, member: str, runtime: ToolRuntime) -> Callable[..., Awaitable[Any]]:
        """Return a function that calls a method of a rollout's state; see `ask_state`."""
        question = self._questions.get(member)
        if question is None:
            question = self._questions[member] = state_question(member, apart=self.spec.state_apart)
        return partial(ask_state, question, runtime, self.spec.tool_timeout)

    async def _make_user(self, user: User, key: RolloutKey, runtime: ToolRuntime) -> AnswersAgent:
        names = runtime.toolkit.names | {seat.name for seat in self.seats[1:]}
        if user.state is not None:
            ask = self._state_caller(user.state, runtime)
            location = f"user.state: {user.state} of the state"
            return CodeUser(ask, location, names, max_turns=user.max_turns, speaks_first=user.speaks_first)
        if user.turns is not None:
            user_turns = self._render_user_turns(key.row)
            with locating(self.spec, key.row.key):
                require_offered(user_turns, names)
            lines = [{"say": each.say, "tools": each.tools} for each in user_turns]
            before = BeforeWords(self.spec, self.grader, key.row, runtime, user_turns)
            return ScriptedUser(lines, "user.turns", names, before, speaks_first=user.speaks_first)
        toolkit = await self._toolkit(self._user_tooling, key.group, runtime.state, key.row)
        with locating(self.spec, key.row.key, ("user",)):
            system = None if user.system is None else content_of(user.system, key.row, "user.system")
        return SimulatedUser(
            self.roles[user.server],
            system,
            runtime,
            toolkit=toolkit,
            stop=user.stop,
            max_turns=user.max_turns,
            speaks_first=user.speaks_first,
            transform=None if user.transform is None else self._state_caller(user.transform, runtime),
        )

    def seated(self, key: RolloutKey) -> list[Seat]:
        return self.seating.seated(key)

    def table(
        self,
        key: RolloutKey,
        seats: Sequence[Seat],
        runtime: ToolRuntime,
        policy: ChatServer,
        options: LoopOptions,
        seeds: Mapping[str, int | None],
        tokenizer: Tokenizer | None,
        user: AnswersAgent | None,
    ) -> MultiAgentEpisode:
        players: list[SeatRunner] = []
        order = self.spec.schedule.order if self.spec.schedule is not None else None
        for seat in seats:
            name, seat_config = seat.name, self.spec.agents[seat.name]
            model = policy if seat.role == POLICY else self.roles[seat.role]
            bounds = replace(options_of_seat(options, seat_config.agent, self.spec), seed=seeds[name])
            if players:
                bounds = replace(bounds, max_turns_per_answer=None)  # only the first seat responds to the user
            identity, port = seat_id(runtime.task_id, name), PORT + len(players)
            toolkit = runtime.toolkit.only(seat_config.tools)
            if order == "call" and not players:
                others = [  # `players` is filled by the time of the call
                    SeatTool(other, other_config.description or f"Asks {other}.", partial(players.__getitem__, index))
                    for index, (other, other_config) in enumerate(self.spec.agents.items())
                    if index
                ]
                schemas = [*toolkit.schemas, *(tool.schema for tool in others)]
                toolkit = Toolkit([*toolkit.tools, *others], schemas)
            players.append(
                SeatRunner(
                    name,
                    model,
                    self.prompt(key.row, name),
                    bounds,
                    toolkit,
                    runtime.apart.get(name, runtime),
                    request_id=identity,
                    tokenizer=tokenizer if seat.role == POLICY else None,
                    user=None if players else user,
                    program=self._program_of(seat, key, identity, port, partial(context_of, model, bounds)),
                    port=port,
                )
            )
        return MultiAgentEpisode(players, partial(self.seating.heard_text, key.row), self.spec.tool_timeout)

    def schedule(self, key: RolloutKey, runtime: ToolRuntime) -> Schedule:
        return self.seating.schedule(key.row, runtime.state, partial(self._state_caller, runtime=runtime))

    def _render_user_turns(self, row: Row) -> Sequence[UserWords]:
        """Return the user's fixed messages, rendered for a row; empty for other kinds of user."""
        user = self.spec.user
        if user is None or user.turns is None:
            return ()
        with locating(self.spec, row.key, ("user",)):
            user_turns = render_section(user, row.columns, location="user", key=row.key).turns or ()
            for index, each in enumerate(user_turns):
                placed_files(each.files, self._folder, f"user.turns.{index}.files")
            return user_turns

    def program(self, key: RolloutKey, runtime: ToolRuntime, context: Callable[[], Awaitable[int]]) -> ProgramOf | None:
        if self.spec.agent.program is not None and self._render_user_turns(key.row):
            raise UserError(f"user.turns: an agent program hears no further words (row {key.row.key})")
        return self._program_of(ONLY_SEAT, key, runtime.task_id, PORT, context)

    def _program_of(
        self, seat: Seat, key: RolloutKey, rollout_id: str, port: int, context: Callable[[], Awaitable[int]]
    ) -> ProgramOf | None:
        """Return the function that prepares the program of a seat, or None if the loop runs the seat."""
        if seat.name not in self._programs:
            return None

        async def started(messages: Sequence[Message]) -> AgentProgram:
            if seat.name and (role := self.roles[seat.role]).scripted:
                role.register(rollout_id, self._script_from(key, seat, messages))
            return self._programs.render(seat.name, key.row, messages, rollout_id, await context(), port)

        return started

    def _script_from(self, key: RolloutKey, seat: Seat, messages: Sequence[Message]) -> Script:
        """Return the script of a scripted policy for another run of a seat's program: the turns after its replies so
        far.

        The run may start a new conversation or continue one.
        """
        prior = _reply_count(self.prompt(key.row, seat.name))
        script, answered = self.script(key, prior, seat), _reply_count(messages) - prior
        begins = [0, *(index for index, turn in enumerate(script.turns, 1) if not turn.tools)]
        remaining = script.turns[begins[answered] :] if answered < len(begins) else ()
        # An empty script would count as missing.
        return Script(remaining or (script.turns and (ScriptedTurn(FINISHED),)), prior=None)

    def _register_scripts(self, key: RolloutKey, name: str) -> None:
        for seat in self.seated(key) if self.seats else ():
            if (role := self.roles[seat.role]).scripted:
                prior = _reply_count(self.prompt(key.row, seat.name))
                role.register(seat_id(name, seat.name), self.script(key, prior, seat))
        user = self._simulated
        user_scripted = user is not None and self.roles[user.server].scripted
        if not user_scripted and (self.seats or not self.policy.scripted):
            return
        roles = Counter(message["role"] for message in self.prompt(key.row))
        if self.policy.scripted and not self.seats:
            self.policy.register(name, self.script(key, roles["assistant"]))
        if user is not None and user_scripted:
            self.roles[user.server].register(user_id(name), user_script(self.spec, key.row, roles["user"]))

    def script(self, key: RolloutKey, prior: int, seat: Seat = ONLY_SEAT) -> Script:
        """Return the script of a scripted policy for a key; the prompt has `prior` assistant messages."""
        return policy_script(self.spec, self.roles[seat.role].configs[0], key, prior, seat.name)

    def _forget(self, name: str) -> None:
        for seat, seat_config in self.spec.agents.items():
            for role in seat_config.opponents or (seat_config.server,):
                self.roles[role].forget(seat_id(name, seat))
        self.policy.forget(name)
        if self._simulated is not None:
            self.roles[self._simulated.server].forget(user_id(name))

    @property
    def _simulated(self) -> User | None:
        """The user of the spec if a model simulates it, or None."""
        user = self.spec.user
        return user if user is not None and user.simulated else None


def _reply_count(messages: Sequence[Message]) -> int:
    return sum(message["role"] == "assistant" for message in messages)


def _result_of(rollout: Rollout) -> AgentResult:
    """Return the result of a graded rollout, which always has one."""
    assert rollout.result is not None
    return rollout.result


def _make_clients(spec: Spec, environ: Mapping[str, str]) -> dict[str, ModelClient]:
    key = spec.policy_api_key.get_secret_value() if spec.policy_api_key is not None else None
    return {
        role: create_client(
            role,
            [
                config_from_spec(server, environ, api_key=key if role == POLICY else None, seed=spec.seed)
                for server in servers
            ],
        )
        for role, servers in spec.servers.items()
    }
