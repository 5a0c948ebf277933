"""Whose doing an exception is that leaves a rollout: every `raise` of the modules behind the first rollout is listed.

A `UserError` or `RunError` that an agent's text, files or timing could bring about would end a run, and a `Failure`
would keep the rollout from being graded: an agent could choose either. So each of them stands in one of the tables
below, under the reason why no agent reaches it, or what it becomes. A new one has to be put there, or to be an
`AgentFault`, a `ToolInputError`, or an ending of the policy's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

TOP = Path(__file__).parents[1]
ROOMS = ("agent", "user_code", "rollouts", "sandbox", "scoring", "servers", "tokens", "tools")
MODULES = (
    "plugins.py",
    "threads.py",
    *(f"runs/{name}.py" for name in ("journal", "rollout_worker", "run", "store", "workers")),
)
ENDINGS = ("UserError", "RunError", "Failure", "Unavailable")
MADE = ("WorkerLostError", "KilledByAgentError", "LoopGoneError", "WorkersDied", "sandbox_gone")
"""Exceptions of these kinds with other names, and the function that makes one for a sandbox."""

Places = Mapping[str, str]
"""Module → functions in it that raise."""

BEFORE: Places = {
    # The spec, the command line and this machine decide, before any agent has said a word.
    "agent/program.py": "AgentFunction.from_ref",
    "agent/seats.py": "MultiAgentEpisode.play",
    "agent/user.py": "CodeUser.speak ScriptedUser.__init__ ScriptedUser.speak",
    "sandbox/isolation.py": "_require_none require_by_hand",
    "plugins.py": "load_object published load_published load_file _execute_module _import_module _require_attribute",
    "rollouts/compiled.py": "CompiledSpec.policy CompiledSpec._require_tools",
    "rollouts/seating.py": "_schedule_function",
    "rollouts/agent_options.py": "changed_agent read_settings",
    "rollouts/rewards.py": "_reward_function",
    "rollouts/admission.py": "require_descriptors",
    "rollouts/sandboxes.py": "Tooling._every_toolset",
    "rollouts/teacher.py": "Teacher.probe",
    "runs/journal.py": "Journal._parsed Journal._require_short _lock_file",
    "runs/run.py": "RowSource.require_first",
    "runs/store.py": "rollout_of RolloutStore.require_same RolloutStore._episodes",
    "runs/workers.py": "require_shares",
    "sandbox/backends.py": "_package_backend",
    "sandbox/base.py": "ResourceLimits.require_at_most SandboxConfig.__post_init__ Sandbox.converse Sandbox.copy_files",
    "sandbox/bubblewrap.py": "find_bwrap shared_prefix _sandbox_workdir require_bubblewrap _seccomp_filter "
    "_limits_in_force",
    "sandbox/docker.py": "Container.start Container._create_otherwise",
    "sandbox/docker_engine.py": "engine_socket Engine.check Engine.network",
    "sandbox/hosts.py": "_parse_entry",
    "sandbox/images.py": "cache_folder overlay_refused ready_image _unpack_confined _stream_archive",
    "sandbox/none.py": "NoIsolation.__init__",
    "sandbox/packages.py": "find_pip npm_folder _bring_interpreter _run_command _find_interpreter",
    "sandbox/remote.py": "machine _ssh_machine",
    "scoring/grader.py": "Grader.__post_init__",
    "scoring/reward_function.py": "find_reward _load_reward RewardFunction.from_function RewardFunction.require_takes",
    "servers/client.py": "ModelClient.rated ModelClient.scored SampledByFunction._sample_chunk assistant "
    "_scoring_dialect",
    "servers/exactness.py": "require_address require_reachable",
    "servers/factory.py": "create_client _make_backend variable",
    "servers/scripted/server.py": "ScriptedServer.start",
    "tokens/rendering.py": "RendererSettings.from_mapping",
    "threads.py": "OfThisProcess.__reduce__",
    "servers/policy.py": "Policy.server Policy.of_spec Policy.describe",
    "servers/token_level.py": "TokenServer._score TokenServer._load_renderer",
    "servers/transport.py": "Transport.__init__",
    "tokens/families.py": "require_family",
    "tokens/hub.py": "_load_pretrained _require_bounded_growth _with_template",
    "tokens/load.py": "as_tokenizer",
    "tokens/parsers/table.py": "load_parser parser_for",
    "tools/base.py": "Toolkit.__init__ ToolRuntime.__init__ register_task_env_overrides _require_image",
    "tools/catalogue.py": "_chances draw _loaded find_tool check_toolsets",
    "tools/hermes_toolsets.py": "HermesToolsets.tools HermesToolsets._describe",
    "tools/mcp_client.py": "require_mcp",
    "tools/mcp_tools.py": "McpSource.list_tools McpSource._allowed McpSource._tool",
    "tools/python_tools.py": "Signature.from_function _typed_parameters PythonTool.__init__ python_tool "
    "described_tools state_tools "
    "functions_of _get_attribute _read_document _get_method",
    "tools/recording.py": "Recorder.__init__ Replay.__init__ Replay.tools canned_tools",
}
OF_A_ROW: Places = {
    # Made of a row and the spec alone. Once a rollout was graded, such an error is of its own rollout.
    "agent/program.py": "ProgramDriver._open_port",
    "agent/seats.py": "SeatRunner.say",
    "rollouts/compiled.py": "CompiledSpec.program CompiledSpec._artifacts",
    "rollouts/rollout_code.py": "RolloutCode.state",
    "rollouts/sandboxes.py": "require_copies _backend_image _read_file",
    "sandbox/base.py": "Sandbox.prepare",
    # What an agent program sends is refused by its endpoint, before it is asked for. A server refuses a row's prompt
    # and answers another one.
    "agent/recorder.py": "PolicyRecorder._find_out",
    "servers/base.py": "require_parts",
    "scoring/grader.py": "Grader._arguments",
    "scoring/judge.py": "require_agreement labelled_cases",
    "scoring/mathematics.py": "_is_equal",
    "tools/context.py": "ToolContext.artifact ToolContext.call_tool",
    "rewards/llm_judge.py": "_Task.scorer.score _judge_role",
    "rewards/llm_pairwise.py": "llm_pairwise",
    "rewards/reward_model.py": "reward_model",
    "rewards/tests_pass.py": "tests_pass _apply _alone _lay _by_reference _scored_apart",
    "tools/python_tools.py": "Choice.require_met",
    "tools/rollout_process.py": "RolloutProcess.start RolloutProcess.tools",
    "tools/base.py": "require_usable",
}
OF_A_CALLER: Places = {
    # Code of the user, of a trainer, or of a person who grades anew has called what it may not.
    "user_code/proxies.py": "ContextStandIn.runtime",
    "plugins.py": "Code.load_module",
    "rollouts/rollout.py": "Rollout.examples Group.advantages",
    "rollouts/sandboxes.py": "kept_artifacts _load_artifact",
    "servers/usage.py": "Meter.count_request",
    "threads.py": "wait_for_loop",
    "tools/base.py": "ToolRuntime._released",
    "tools/context.py": "ToolContext.runtime ToolContext._wait ToolContext.terminal_apart ConfinedContext._refused",
}
OURS: Places = {
    # A server, an engine, a process or the disk of ours: nothing of the agent's has run yet, or reaches it.
    "agent/loop.py": "HermesAgentLoop._run_turns",
    "agent/recorder.py": "PolicyRecorder.ask PolicyRecorder._in_time",
    "servers/completion.py": "CompletionAdapter.chat",
    "sandbox/user_code.py": "ConfinedTemplate._ask",
    "user_code/worker.py": "Warm._ask Warm.fork",
    "rollouts/sandboxes.py": "keep_artifacts _copy_sandbox",
    "runs/journal.py": "_write_error",
    "runs/run.py": "RunBudget.require_kept RunBudget.count",
    "runs/workers.py": "Workers._adjust_count Workers._exclude",
    "sandbox/bubblewrap.py": "_mount_image Bubblewrap._enter_group",
    "sandbox/docker.py": "Container.until_healthy build_context Docker._build Docker.pid Docker.start "
    "Docker._prepare_images Docker._meet_helper "
    "Docker._make_folders Docker._remove_container Docker._pull",
    "sandbox/docker_engine.py": "Engine.version Engine.pull Engine.build Engine.start",
    "sandbox/helper_sandbox.py": "Isolation.in_time HelperSandbox._isolate HelperSandbox.unusable_image",
    "sandbox/launcher.py": "_Ending._give_up _Ending.poll_finished as_sandbox_failure python_output "
    "LocalProcess.pid LocalProcess.started",
    "sandbox/remote.py": "Link.start Link.execute RemoteSandbox.start",
    "servers/transport.py": "exhausted",
    "tools/base.py": "ToolRuntime._start",
    "tools/hermes_toolsets.py": "HermesToolsets.connect HermesToolsets._start",
}
OF_A_REWARD: Places = {
    # What a reward's own code gives or raises. What the agent's files do to it is an `AgentFault` already.
    "scoring/reward_value.py": "_no_value interpret _value_of_score _check_overrides _finite_number combine "
    "require_value",
}
DECIDED: Places = {
    # An agent reaches these, and data decide: the same call over plain words, what the kernel says, what worked before,
    # whether an agent had touched the sandbox.
    "agent/program.py": "ProgramDriver._run_once ProgramDriver._timeout_reason",
    "agent/user.py": "SimulatedUser._reply_or_failure",
    "user_code/failures.py": "exception_of",
    "rollouts/runner.py": "RolloutRunner._fail_alone RolloutRunner._fail_unexpectedly RolloutRunner._compare",
    "runs/rollout_worker.py": "error_of",
    "sandbox/base.py": "sandbox_gone",
    "sandbox/channel.py": "Connection.open Connection.ask Connection.failure",
    "sandbox/remote.py": "answer RemoteSandbox._result RemoteSandbox._reading",
    "scoring/grader.py": "_per_member Grader._read_value Grader._compare_group",
    "scoring/reward_function.py": "call_reward _call_in_process _await_on_loop _raise_as_documented",
    "scoring/judge.py": "_JudgeSession.decided",
    "rewards/reward_file.py": "_require_it_can_run",
    "tools/context.py": "ToolContext._on_sandbox",
    "tools/execute.py": "_outcome_of",
    "tools/mcp_server.py": "McpServer._start",
}
LOST: Places = {
    # An agent could bring these about at a price that the spec sets: by `on_stop.retries_exhausted`.
    "rollouts/teacher.py": "Teacher.ask",
    "runs/workers.py": "Workers.compare Workers._ask_any PolicyWorkers.run PolicyWorkers.compare",
    # The HTTP layer of a server that arguments of a call bring down.
    "tools/mcp_server.py": "McpServer.call",
}
TABLE = (BEFORE, OF_A_ROW, OF_A_CALLER, OURS, OF_A_REWARD, DECIDED, LOST)


def raised_in(tree: ast.AST, inside: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield where an exception is made that ends a run or keeps a rollout from being graded, and which it is.

    All that are made count, raised at once or handed on.
    """
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        within = (*inside, node.name) if named else inside
        if isinstance(node, ast.Call):
            made = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if made.endswith(ENDINGS) or made in MADE:
                yield ".".join(inside), made
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Name) and node.exc.id in MADE:
            yield ".".join(inside), node.exc.id
        yield from raised_in(node, within)


def modules() -> Iterator[tuple[str, Path]]:
    package = TOP / "hermes_rl"
    found = [path for room in ROOMS for path in (package / room).rglob("*.py")] + [package / name for name in MODULES]
    yield from ((str(path.relative_to(package)), path) for path in sorted(found))
    yield from ((f"rewards/{path.name}", path) for path in sorted((TOP / "rewards").glob("*.py")))


def test_every_raised_exception_is_listed_with_its_cause() -> None:
    raised = {
        f"{module} {function}"
        for module, path in modules()
        for function, _ in raised_in(ast.parse(path.read_text(encoding="utf-8")))
    }
    listed = {f"{module} {name}" for places in TABLE for module, names in places.items() for name in names.split()}
    assert sorted(raised - listed) == [], "put it into a table, or make it an AgentFault, ToolInputError or an ending"
    assert sorted(listed - raised) == [], "it is raised no longer"


def test_shipped_rewards_raise_only_user_or_infrastructure_errors() -> None:
    """What shipped rewards raise is about their arguments: they are looked at before the answer is."""
    for path in sorted((TOP / "rewards").glob("*.py")):
        for function, name in raised_in(ast.parse(path.read_text(encoding="utf-8"))):
            assert name in ("UserError", "RewardFailure", "JudgeFailure"), f"{path.name} {function}"


def test_the_table_finds_what_is_raised() -> None:
    source = """
class A:
    def b(self):
        def c():
            raise errors.UserError("x")
        raise sandbox_gone("y")
"""
    assert list(raised_in(ast.parse(source))) == [("A.b.c", "UserError"), ("A.b", "sandbox_gone")]
