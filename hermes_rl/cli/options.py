"""Apply the command line's changes to a spec, for all commands that load one: `--set`, Atropos' flags, `--env-file`.

If the spec names no policy, environment variables name it or the user picks it; it is never guessed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import typer

from hermes_rl.cli.echo import echo
from hermes_rl.errors import UserError
from hermes_rl.spec.load import load_spec
from hermes_rl.spec.model import Mode, Spec
from hermes_rl.spec.overrides import Overrides, parse_extra_args
from hermes_rl.spec.substitution import read_env_file


class Options(NamedTuple):
    """Options of one command, unparsed."""

    sets: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    env_file: Path | None = None

    def overrides(self, *more: str) -> Overrides:
        """Return the changes, with `more` as further values of `--set`.

        Raises:
            SpecError: at least one change is wrong; the error lists all wrong ones.
        """
        return parse_extra_args(self.flags, [*self.sets, *more])

    def load(self, source: str, *more: str, demo: bool = False, mode: Mode | None = None) -> Spec:
        """Load a spec with the changes, and with `more` as further values of `--set`."""
        overrides = self.overrides(*more)
        return load_spec(source, overrides=overrides, demo=demo, environ=self.environ(), mode=mode)

    def environ(self) -> dict[str, str]:
        """Return the variables of `env_file` and of the process, which take precedence.

        Raises:
            UserError: as for `read_env_file`.
        """
        return {**(read_env_file(self.env_file) if self.env_file is not None else {}), **os.environ}


def split_flags(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return the specs, and the flags with their values; Typer puts unknown flags and specs into one list."""
    specs: list[str] = []
    flags: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            specs.append(word)
            continue
        flags.append(word)
        if "=" not in word and rest and not rest[0].startswith("--"):
            flags.append(rest.pop(0))
    return specs, tuple(flags)


# ------------------------------------------------------------------------- Choosing a policy if the spec names none


class _Choice(NamedTuple):
    name: str
    type: str
    base_url: str | None
    key_env: str | None = None
    needs_key: bool = False


_CHOICES = (
    _Choice("OpenRouter", "openai", "https://openrouter.ai/api/v1", "OPENROUTER_API_KEY", needs_key=True),
    _Choice("self-hosted vLLM", "vllm", "http://localhost:8000/v1"),
    _Choice("another OpenAI-compatible API", "openai", None, "OPENAI_API_KEY"),
    _Choice("a local Atropos training server", "vllm", "http://localhost:9001/v1"),
)

NO_POLICY = """\
no policy: the spec names no servers.policy, and OPENAI_BASE_URL with OPENAI_MODEL is not set. Add one of:
  OpenRouter:        --openai.base_url https://openrouter.ai/api/v1 --openai.model_name MODEL \
--set servers.policy.api_key_env=OPENROUTER_API_KEY
  self-hosted vLLM:  --openai.server_type vllm --openai.base_url http://localhost:8000/v1 --openai.model_name MODEL
  another API:       --openai.base_url URL --openai.model_name MODEL --set servers.policy.api_key_env=OPENAI_API_KEY
  training server:   --openai.server_type vllm --openai.base_url http://localhost:9001/v1 --openai.model_name MODEL
  no model at all:   --demo"""


def with_policy(load: Callable[..., Spec], environ: Mapping[str, str]) -> Spec:
    """Load the spec with a policy: the spec's, the environment's, or, on a terminal, the one that the user picks.

    Args:
        load: loads the spec; its optional argument names the policy, as a value of `--set`.
        environ: the environment variables.

    Raises:
        UserError: there is no policy; the message lists the flags that name one.
    """
    spec = load()
    if "policy" in spec.servers:
        return spec
    if (policy_override := policy_of(environ)) is not None:
        return load(policy_override)
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UserError(NO_POLICY)
    return load(_ask_for_server(environ))


def policy_of(environ: Mapping[str, str]) -> str | None:
    """Return the policy that OPENAI_BASE_URL and OPENAI_MODEL name, as the text of a `--set`."""
    if not (environ.get("OPENAI_BASE_URL") and environ.get("OPENAI_MODEL")):
        return None
    key = "OPENAI_API_KEY" if environ.get("OPENAI_API_KEY") else None
    return _server_setting("openai", environ["OPENAI_BASE_URL"], environ["OPENAI_MODEL"], key)


def _server_setting(kind: str, base_url: str, model: str, key_env: str | None) -> str:
    policy = {"type": kind, "base_url": base_url, "model": model}
    return "servers.policy=" + json.dumps(policy | ({"api_key_env": key_env} if key_env else {}))


def _ask_for_server(environ: Mapping[str, str]) -> str:
    echo("The spec names no policy. Which model is to act?", err=True)
    for position, choice in enumerate(_CHOICES, 1):
        echo(f"  {position}  {choice.name}", err=True)
    echo(f"  {len(_CHOICES) + 1}  none: the scripted demo", err=True)
    picked = typer.prompt("Number", type=int, err=True)
    if not 1 <= picked <= len(_CHOICES):
        return 'servers.policy={"type": "scripted", "error_rate": 0.4}'
    choice = _CHOICES[picked - 1]
    has_key = choice.key_env is not None and bool(environ.get(choice.key_env))
    if choice.needs_key and not has_key:
        raise UserError(
            f"{choice.name} needs a key: set {choice.key_env}, in the environment or in the file of --env-file, and "
            "start again"
        )
    base_url = typer.prompt("Address", default=choice.base_url, err=True)
    model = typer.prompt("Model", err=True)
    return _server_setting(choice.type, base_url, model, choice.key_env if has_key else None)
