"""A subclass of a compiled spec as a program: what it overrides is what runs, in every mode."""

from __future__ import annotations

from typing import Any

from hermes_rl.env.processing import EnvLog
from hermes_rl.env.spec_env import SpecEnv
from hermes_rl.errors import UserError
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.opening import Launch, open_run
from hermes_rl.runs.process import Processing
from hermes_rl.runs.run import PlaysGroups
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
    """Process or evaluate with the hooks of the class, into the spec's run directory.

    Raises:
        UserError: the spec asks for something that the class' own code cannot give.
        RunError: the run failed.
    """
    env: Any = cls(*cls.config_init())
    try:
        own = env._own_code()
        if isinstance(own.environment, PlaysGroups) and cls.spec.process.format != "atropos":
            raise UserError(
                f"process.format: {cls.spec.process.format} is made of rollouts, and {cls.__name__} collects groups by "
                "its own code: leave process.format out"
            )
        async with open_run(cls.spec, launch, own) as opened:
            env._use(opened)
            await env.setup()
            env._begin_tracking()
            if launch.mode == "evaluate":
                env.config.data_dir_to_save_evals = env.config.data_dir_to_save_evals or str(opened.directory.path)
                await env.evaluate()
            else:
                assert opened.records.groups_file is not None
                work = Processing(opened.run, opened.records.groups_file, cls.spec.process.groups, EnvLog(env))
                await work.play(opened.records.changed)
            return opened.directory
    finally:
        await env.shut_down()
