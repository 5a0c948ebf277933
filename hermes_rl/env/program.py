"""Run an environment as a program with Atropos' flags: the implementation of `HermesAgentBaseEnv.cli()`.

atroposlib's own parser reads ``-1`` as True, does not accept lists, ignores typos, and prints API keys. This one is
strict and prints no keys. Precedence: command line > --config file > `config_init`.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from pydantic import ValidationError

from hermes_rl.env.hooks import convert_author_errors
from hermes_rl.errors import HermesRLError, UserError
from hermes_rl.others_files import read_regular
from hermes_rl.terminal_text import escape_controls
from hermes_rl.threads import end_process, run_loop

MODES = ("serve", "process", "evaluate")


def main(cls: Any, arguments: Sequence[str] | None = None) -> None:
    """Run an environment class, a `HermesAgentBaseEnv`, as a program; exit the process if it fails.

    The exit status is 0 on success, 1 if the mode failed, 2 for wrong input, and 130 after Ctrl-C.

    Args:
        arguments: the command line without the program's name; default: the arguments of this process.
    """
    try:
        run(cls, list(sys.argv[1:] if arguments is None else arguments))
    except HermesRLError as error:
        sys.stderr.write(f"error: {escape_controls(str(error))}\n")
        sys.exit(2 if isinstance(error, UserError) else 1)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the written groups remain\n")
        end_process(130)


def run(cls: Any, arguments: list[str]) -> None:
    """Parse the arguments, create the environment, and run a mode; raise `UserError` for wrong arguments."""
    usage = f"usage: {Path(sys.argv[0]).name} {'|'.join(MODES)} [--env.FIELD V] [--openai.FIELD V] [--config F]"
    if {"--help", "-h"} & set(arguments):
        sys.stdout.write(f"{usage}\n\n{_help_text(cls)}")
        return
    if not arguments or arguments[0] not in MODES:
        raise UserError(usage)
    mode, flags = arguments[0], arguments[1:]
    run_loop(cls._run_program(mode, flags))


def configured(cls: Any, flags: list[str]) -> tuple[Any, Any]:
    """Return the configuration and the servers of `config_init`, changed by the flags of a command line.

    Raises:
        UserError: a flag is unknown or its value is invalid, or `config_init` raised.
    """
    with convert_author_errors(cls.config_init):
        config, servers = cls.config_init()
    settings = _read_settings(flags)
    return _copy_with(config, settings["env"], "--env"), _merge_servers(servers, settings["openai"])


def _help_text(cls: Any) -> str:
    """Return the help text: every field of the configuration and of a server, with its description."""
    lines = [
        f"--{space}.{name}\n    {field.description or 'See atroposlib.'}\n"
        for space, model in (("env", cls.env_config_cls), ("openai", APIServerConfig))
        for name, field in model.model_fields.items()
    ]
    return "".join(lines)


def _read_settings(flags: list[str]) -> dict[str, dict[str, Any]]:
    """Return the values of the flags and of the --config file as {env: …, openai: …}."""
    values: dict[str, dict[str, Any]] = {"env": {}, "openai": {}}
    later: dict[str, dict[str, Any]] = {"env": {}, "openai": {}}
    for name, text in _flag_pairs(flags):
        if name == "config":
            values = _read_config(Path(text))
            continue
        space, dot, field = name.partition(".")
        if space not in later or not dot:
            raise UserError(f"unknown flag --{name}; known are --env.FIELD, --openai.FIELD and --config")
        if field in later[space]:
            raise UserError(f"--{name} is given twice")
        later[space][field] = _parse_value(name, text)
    return {space: {**values.get(space, {}), **later[space]} for space in later}


def _flag_pairs(flags: list[str]) -> Iterator[tuple[str, str]]:
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


def _parse_value(name: str, text: str) -> Any:
    if name == "openai.api_key":
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"--{name}: the value is not YAML") from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(read_regular(path)) or {}
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"--config {path} cannot be read: {error}") from error
    unknown = set(content) - {"env", "openai"}
    if unknown:
        raise UserError(f"{path}: unknown key {sorted(unknown)[0]!r}; known are env and openai")
    return dict(content)


def _copy_with(config: Any, changes: dict[str, Any], flag: str) -> Any:
    """Return a copy of a pydantic object with other values, fully validated.

    Unset fields stay unset, so that values derived from other fields, such as the tool parser, are still detected.
    """
    for name in changes:
        if name not in type(config).model_fields:
            close = difflib.get_close_matches(name, type(config).model_fields, n=1)
            raise UserError(f"{flag}.{name}: there is no such field" + (f"; did you mean {close[0]}?" if close else ""))
    try:
        return type(config)(**{**config.model_dump(exclude_unset=True), **changes})
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise UserError(f"{flag}.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _merge_servers(values: Any, changes: Any) -> Any:
    """Return the servers with the values of `openai` applied to each; a list in the --config file replaces them."""
    if isinstance(changes, list):
        return [_copy_with(APIServerConfig(), entry, "openai") for entry in changes]
    if not changes:
        return values
    servers = values if isinstance(values, list) else [values]
    full = [s if isinstance(s, APIServerConfig) else APIServerConfig(**s.model_dump()) for s in servers]
    return [_copy_with(server, changes, "--openai") for server in full]
