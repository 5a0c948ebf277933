"""`HermesAgentBaseEnv.cli()`: an environment as a program, with the flags that Atropos' users know.

atroposlib's own parser reads ``-1`` as True, cannot take lists, ignores typos, and prints API keys; this one is strict
and prints none. Precedence: command line > --config file > `config_init`.
"""

from __future__ import annotations

import asyncio
import difflib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from pydantic import BaseModel, ValidationError

from hermes_rl.errors import HermesRLError, RunError, UserError
from hermes_rl.visible import visible

if TYPE_CHECKING:
    from hermes_rl.env.base import HermesAgentBaseEnv

MODES = ("serve", "process", "evaluate")


def main(cls: type[HermesAgentBaseEnv], arguments: Sequence[str] | None = None) -> None:
    """Run the environment class; ends the process: 0 done, 1 failed, 2 wrong input, 130 after Ctrl-C."""
    try:
        run(cls, list(sys.argv[1:] if arguments is None else arguments))
    except HermesRLError as error:
        sys.stderr.write(f"error: {visible(str(error))}\n")
        sys.exit(2 if isinstance(error, UserError) else 1)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; groups that were written are kept\n")
        sys.exit(130)


def run(cls: type[HermesAgentBaseEnv], arguments: list[str]) -> None:
    """Parse, make the environment, and run a mode.

    Raises:
        UserError: the arguments are wrong.
    """
    usage = f"usage: {Path(sys.argv[0]).name} {'|'.join(MODES)} [--env.FIELD V] [--openai.FIELD V] [--config F]"
    if {"--help", "-h"} & set(arguments):
        sys.stdout.write(f"{usage}\n\n{_help(cls)}")
        return
    if not arguments or arguments[0] not in MODES:
        raise UserError(usage)
    mode, flags = arguments[0], arguments[1:]
    if hasattr(cls, "spec"):
        asyncio.run(_run_spec(cls, mode, flags))
        return
    config, servers = cls.config_init()
    given = _given(flags)
    config = _changed(config, given["env"], "--env")
    servers = _servers(servers, given["openai"])
    asyncio.run(_run_by_hand(cls, mode, config, servers))


def _help(cls: type[HermesAgentBaseEnv]) -> str:
    """Every field of the configuration and of a server, with its description."""
    lines = [
        f"--{space}.{name}\n    {field.description or 'See atroposlib.'}\n"
        for space, model in (("env", cls.env_config_cls), ("openai", APIServerConfig))
        for name, field in model.model_fields.items()
    ]
    return "".join(lines)


async def _run_by_hand(cls: type[HermesAgentBaseEnv], mode: str, config: Any, servers: Any) -> None:
    if mode == "process":
        config.data_path_to_save_groups = config.data_path_to_save_groups or f"data/{cls.name or 'groups'}.jsonl"
    env = cls(config, servers)
    await {"serve": env.env_manager, "process": env.process_manager, "evaluate": env._run_evaluate}[mode]()


async def _run_spec(cls: Any, mode: Any, flags: list[str]) -> None:
    """A compiled spec reads its file again with the flags, so that they mean what they mean to `hermes-rl run`.

    What a subclass of it overrides is called in every mode.
    """
    from hermes_rl.env.serve import run_serve
    from hermes_rl.env.subclass import overridden, run_subclass, with_spec
    from hermes_rl.runs.evaluate import Evaluation, run_evaluate
    from hermes_rl.runs.opening import Launch, require_effect
    from hermes_rl.runs.process import run_process
    from hermes_rl.spec.load import load_spec
    from hermes_rl.spec.overrides import parse_extra_args

    spec = cls.spec
    require_effect(flags, mode)
    if flags:
        spec = load_spec(spec.source, overrides=parse_extra_args(flags, ()), environ=cls.environ, mode=mode)
    launch = Launch(mode, environ=cls.environ)
    if mode == "serve":
        directory = await run_serve(spec, launch, with_spec(cls, spec, mode))
    elif overridden(cls):
        directory = await run_subclass(with_spec(cls, spec, mode), launch)
    else:
        found, directory = await (run_process if mode == "process" else run_evaluate)(spec, launch)
        if found.stopped is not None:
            raise RunError(f"ended early: {found.stopped}. Run directory: {directory.path}")
        if isinstance(found, Evaluation):
            found.require_reliable()
    launch.progress.note(f"run directory: {directory.path}")


def _given(flags: list[str]) -> dict[str, dict[str, Any]]:
    """Flags and the --config file as {env: …, openai: …}."""
    found: dict[str, dict[str, Any]] = {"env": {}, "openai": {}}
    later: dict[str, dict[str, Any]] = {"env": {}, "openai": {}}
    for name, text in _pairs(flags):
        if name == "config":
            found = _read_config(Path(text))
            continue
        space, dot, field = name.partition(".")
        if space not in later or not dot:
            raise UserError(f"unknown flag --{name}; known are --env.FIELD, --openai.FIELD and --config")
        if field in later[space]:
            raise UserError(f"--{name} is given twice")
        later[space][field] = _value(name, text)
    return {space: {**found.get(space, {}), **later[space]} for space in later}


def _pairs(flags: list[str]) -> Iterator[tuple[str, str]]:
    rest = list(flags)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            raise UserError(f"unexpected argument {flag!r}")
        name, equals, value = flag[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise UserError(f"--{name} needs a value")
            value = rest.pop(0)
        yield name, value


def _value(name: str, text: str) -> Any:
    if name == "openai.api_key":
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"--{name}: the value is not YAML") from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"--config {path} cannot be read: {error}") from error
    unknown = set(content) - {"env", "openai"}
    if unknown:
        raise UserError(f"{path}: unknown key {sorted(unknown)[0]!r}; known are env and openai")
    return dict(content)


def _changed(config: Any, changes: dict[str, Any], flag: str) -> Any:
    """A copy of a pydantic object with other values, validated as a whole.

    A field that nobody has set stays unset, so that what follows from others, such as the tool parser, is detected.
    """
    _known(type(config), changes, flag)
    try:
        return type(config)(**{**config.model_dump(exclude_unset=True), **changes})
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise UserError(f"{flag}.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _known(cls: type[BaseModel], changes: dict[str, Any], flag: str) -> None:
    for name in changes:
        if name not in cls.model_fields:
            close = difflib.get_close_matches(name, cls.model_fields, n=1)
            raise UserError(f"{flag}.{name}: there is no such field" + (f"; did you mean {close[0]}?" if close else ""))


def _servers(given: Any, changes: Any) -> Any:
    """The servers with `--openai.*` applied to each; a list in the --config file replaces them."""
    if isinstance(changes, list):
        return [_changed(APIServerConfig(), entry, "openai") for entry in changes]
    if not changes:
        return given
    listed = given if isinstance(given, list) else [given]
    full = [s if isinstance(s, APIServerConfig) else APIServerConfig(**s.model_dump()) for s in listed]
    return [_changed(server, changes, "--openai") for server in full]
