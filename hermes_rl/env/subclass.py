"""A subclass of a compiled spec as a program: what it overrides is what runs.

`hermes-rl run` plays a spec without Atropos' loops in process and evaluate mode, and so does `.cli()` of a compiled
spec. Hooks that a subclass overrides are called by Atropos' loops alone, so a class that has any is played by those.
"""

from __future__ import annotations

from typing import Any

from hermes_rl.env.spec_env import SpecEnv
from hermes_rl.errors import UserError
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.opening import Launch, require_runnable
from hermes_rl.runs.provenance import provenance
from hermes_rl.servers.engine import engines
from hermes_rl.spec.model import Mode, Spec

_NOT_HOOKS = {"spec", "environ", "name"}
"""What `compile_spec` itself defines."""


def overridden(cls: type[SpecEnv]) -> list[str]:
    """The names of our environment, or of Atropos', that a subclass of a compiled spec defines itself."""
    own = cls.__mro__[: cls.__mro__.index(SpecEnv)]
    names = {name for one in own for name in vars(one) if not name.startswith("_") or name == "__init__"}
    return sorted(name for name in names - _NOT_HOOKS if hasattr(SpecEnv, name))


def with_spec(cls: type[SpecEnv], spec: Spec, mode: Mode) -> type[SpecEnv]:
    """The same class for another spec, which may be its own with the flags of the command line."""
    return type(cls.__name__, (cls,), {"spec": spec, "_mode": mode, "__module__": cls.__module__})


async def run_subclass(cls: type[SpecEnv], launch: Launch) -> RunDirectory:
    """Process or evaluate through the hooks of the class, into the spec's run directory.

    Raises:
        UserError: the spec asks for something that Atropos' loops do not have.
        RunError: the run failed.
    """
    spec = cls.spec
    _require_what_hooks_can(spec, launch.mode, overridden(cls))
    await require_runnable(spec, launch).close()
    env: Any = cls(*cls.config_init())
    with RunDirectory.choose(spec, launch.mode, launch.out, fresh=launch.fresh) as directory:
        told = await engines(env._compiled.policy.configs)
        directory.describe(spec, provenance(spec, launch.mode, None, env._encoder.tokenizer, engines=told))
        env._compiled.artifact_folder = directory.artifacts
        if launch.mode == "process":
            env._record_to(directory, launch.progress, send=False)
            moved = spec.env.get("data_path_to_save_groups")
            env.config.data_path_to_save_groups = str(moved or directory.path / "groups.jsonl")
            await env.process_manager()
        else:
            env._run_directory, env._progress = directory, launch.progress
            env.config.data_dir_to_save_evals = str(spec.env.get("data_dir_to_save_evals") or directory.path)
            await env._run_evaluate()
    return directory


def _require_what_hooks_can(spec: Spec, mode: Mode, hooks: list[str]) -> None:
    if mode != "process":
        return
    given = spec.model_dump(include={"process": {"drop_uniform", "format"}, "budget": True}, exclude_defaults=True)
    refused = [f"{section}.{key}" for section, keys in given.items() for key in keys]
    if refused:
        raise UserError(
            f"{refused[0]} has no effect on a class that overrides {', '.join(hooks)}: leave it out, or play the spec "
            f"itself with `hermes-rl run {spec.source} {mode}`"
        )
