"""Which model acts, where the spec does not say: the environment's, or the one that the user picks; never a guess."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping

import typer

from hermes_rl.cli.echo import echo
from hermes_rl.errors import UserError
from hermes_rl.spec.model import Spec

Load = Callable[[tuple[str, ...]], Spec]

_CHOICES = (
    ("OpenRouter", "https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
    ("self-hosted vLLM", "http://localhost:8000/v1", None),
    ("another OpenAI-compatible API", None, "OPENAI_API_KEY"),
    ("a local Atropos training server", "http://localhost:9001/v1", None),
)

HELP = """no policy: the spec names no servers.policy, and OPENAI_BASE_URL with OPENAI_MODEL is not set. Add one of:
  OpenRouter:        --openai.base_url https://openrouter.ai/api/v1 --openai.model_name MODEL \
--set servers.policy.api_key_env=OPENROUTER_API_KEY
  self-hosted vLLM:  --openai.base_url http://localhost:8000/v1 --openai.model_name MODEL
  another API:       --openai.base_url URL --openai.model_name MODEL --set servers.policy.api_key_env=OPENAI_API_KEY
  training server:   --openai.base_url http://localhost:9001/v1 --openai.model_name MODEL
  no model at all:   --demo"""


def with_policy(load: Load, environ: Mapping[str, str]) -> Spec:
    """Load the spec with a policy: its own, the environment's, or, on a terminal, the one that the user picks.

    Raises:
        UserError: there is none, with the flags for each way to name one.
    """
    spec = load(())
    if "policy" in spec.servers:
        return spec
    if (named := policy_of(environ)) is not None:
        return load((named,))
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UserError(HELP)
    return load((_ask(environ),))


def policy_of(environ: Mapping[str, str]) -> str | None:
    """The policy that OPENAI_BASE_URL and OPENAI_MODEL name, as the text of a `--set`."""
    if not (environ.get("OPENAI_BASE_URL") and environ.get("OPENAI_MODEL")):
        return None
    key = "OPENAI_API_KEY" if environ.get("OPENAI_API_KEY") else None
    return _setting(environ["OPENAI_BASE_URL"], environ["OPENAI_MODEL"], key)


def _setting(base_url: str, model: str, key_env: str | None) -> str:
    policy = {"type": "openai", "base_url": base_url, "model": model}
    return "servers.policy=" + json.dumps(policy | ({"api_key_env": key_env} if key_env else {}))


def _ask(environ: Mapping[str, str]) -> str:
    echo("The spec names no policy. Which model is to act?", err=True)
    for number, (name, _, _) in enumerate(_CHOICES, 1):
        echo(f"  {number}  {name}", err=True)
    echo(f"  {len(_CHOICES) + 1}  none: the scripted demo", err=True)
    picked = typer.prompt("Number", type=int, err=True)
    if not 1 <= picked <= len(_CHOICES):
        return 'servers.policy={"type": "scripted", "deviate": 0.4}'
    _, url, key_env = _CHOICES[picked - 1]
    base_url = typer.prompt("Address", default=url, err=True)
    model = typer.prompt("Model", err=True)
    return _setting(base_url, model, key_env if key_env and environ.get(key_env) else None)
