"""`hermes-rl doctor`: report the features that work on this machine, and a fix for the others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from hermes_rl.cli.echo import echo
from hermes_rl.cli.options import Options, policy_of
from hermes_rl.cli.run import run_interruptible
from hermes_rl.errors import HermesRLError, UserError
from hermes_rl.rollouts.sandboxes import named_toolsets
from hermes_rl.runs.renderer_check import describe_forecast, forecast_of, tokenizer_of
from hermes_rl.sandbox.bubblewrap import Ability, parts, probe
from hermes_rl.sandbox.packages import npm_folder, package_folder
from hermes_rl.sandbox.remote import NAMES as NAMES_OF_REMOTE
from hermes_rl.sandbox.remote import missing
from hermes_rl.servers.exactness import describe_sampling
from hermes_rl.servers.exactness import examine as examine_server
from hermes_rl.servers.factory import config_from_spec, token_server
from hermes_rl.servers.sampling_check import measure
from hermes_rl.servers.transport import Transport, unversioned
from hermes_rl.spec.model import Spec
from hermes_rl.spec.sections.servers import Server
from hermes_rl.tokens.load import load_tokenizer
from hermes_rl.tokens.tokenizer import TokenizerUnavailable
from hermes_rl.tools.hermes_toolsets import NAMES, HermesToolsets

PATIENCE = 5.0
"""Timeout in seconds for a server."""


@dataclass(frozen=True)
class Check:
    """Result of one check; `remedy` is the fix if the feature does not work."""

    name: str
    ok: bool
    detail: str
    remedy: str | None = None
    needed: bool = True
    """False for a feature that the spec does not require, so that its absence is not an error."""

    @property
    def word(self) -> str:
        return "ok" if self.ok else "FAIL" if self.needed else "note"


def examine(source: str | None, options: Options, *, sampling: bool = False) -> list[Check]:
    """Check the sandbox, and the requirements of a spec with these options.

    Args:
        source: the spec; None: check only the sandbox.
        options: changes of the spec.
        sampling: also sample thousands of tokens from the policy's servers, and compare their frequencies with the
            log-probabilities.

    Raises:
        UserError: the spec or an option is wrong.
    """
    environ = options.environ()
    spec = options.load(source) if source is not None else None
    if spec is not None and "policy" not in spec.servers and (policy_override := policy_of(environ)) is not None:
        spec = options.load(str(source), policy_override)  # in the form that a run would use
    checks = run_interruptible(_check_sandboxes(spec.sandbox.backend if spec is not None else "bubblewrap", environ))
    if spec is None:
        return [*checks, _check_tokenizer(None)]
    if "policy" in spec.servers:
        checks.append(_check_tokenizer(tokenizer_of(spec)))
        checks += _check_tokens(spec)
    image = spec.sandbox.backend == "docker" or spec.sandbox.image is not None
    checks += _check_packages("sandbox.python", partial(package_folder, image=image), spec.sandbox.python)
    checks += _check_packages("sandbox.npm", npm_folder, spec.sandbox.npm)
    checks += _check_toolsets(spec, environ)
    return [*checks, *run_interruptible(_server_checks(spec, environ, sampling))]


def examine_security() -> list[Check]:
    """Run a short version of the attacks in the default sandbox, for `hermes-rl doctor --security`."""
    from hermes_rl.sandbox.escape_probes import trials

    remedy = "do not run untrusted agents here; docs/security.md lists the requirements of each part of the sandbox"
    trial_results = run_interruptible(trials())
    return [
        Check(f"attack on {trial.name}", trial.held, trial.detail, None if trial.held else remedy)
        for trial in trial_results
    ]


def print_checks(checks: Sequence[Check], *, as_json: bool) -> int:
    """Print the results; return the exit status, which is 1 if a needed feature does not work."""
    if as_json:
        echo(json.dumps([asdict(check) for check in checks], indent=2, ensure_ascii=False))
    else:
        for check in checks:
            echo(f"{check.word:4}  {check.name}: {check.detail}")
            if check.remedy is not None:
                echo(f"      {check.remedy}")
    return 0 if all(check.ok or not check.needed for check in checks) else 1


async def _check_sandboxes(backend: str, environ: Mapping[str, str]) -> list[Check]:
    """Check every backend; only the requested one must work."""
    checks = {"bubblewrap": _ability_check(probe()), "docker": await _check_docker()}
    if backend in NAMES_OF_REMOTE:
        lacking = missing(backend, environ)
        checks[backend] = Check(f"sandbox {backend}", lacking is None, lacking or "nothing is known to be missing")
    backend_checks = [replace(check, needed=name == backend) for name, check in checks.items()]
    return [*backend_checks, *(replace(_ability_check(part), needed=False) for part in parts())]


def _ability_check(ability: Ability) -> Check:
    return Check(f"sandbox {ability.name}", ability.ok, ability.detail, ability.remedy or None)


async def _check_docker() -> Check:
    from hermes_rl.sandbox.docker_engine import REMEDY, Engine

    try:
        engine = Engine()
        version = await engine.version()
    except HermesRLError as error:
        return Check("sandbox docker", False, str(error), REMEDY)
    return Check("sandbox docker", True, f"the engine at {engine.socket} is version {version}")


def _check_tokenizer(name: str | None) -> Check:
    title = f"tokenizer {name or '(the small one)'}"
    try:
        tokenizer = load_tokenizer(name)
    except TokenizerUnavailable as error:
        return Check(title, False, str(error), "without it, groups have messages and no tokens")
    return Check(title, True, f"{len(tokenizer.control)} control tokens")


def _check_packages(title: str, make: Callable[[tuple[str, ...]], Path], packages: tuple[str, ...]) -> list[Check]:
    """Check that the packages of the sandbox are available, by installing them."""
    if not packages:
        return []
    try:
        folder = make(packages)
    except UserError as error:
        return [Check(title, False, str(error), "another version, or an index or registry that has it")]
    return [Check(title, True, f"{', '.join(packages)} in {folder}")]


def _check_toolsets(spec: Spec, environ: Mapping[str, str]) -> list[Check]:
    """Check the toolsets of hermes-agent; built-in ones only need the sandbox."""
    hermes = HermesToolsets(environ)
    far = dict.fromkeys(name for _, name in named_toolsets(spec) if name in NAMES)
    reasons = {name: hermes.problem(name) for name in far}
    return [Check(f"toolset {name}", problem is None, problem or "works") for name, problem in reasons.items()]


def _check_tokens(spec: Spec) -> list[Check]:
    """Check that the spec's tokenizer renders its conversations to token-exact sequences."""
    if not spec.servers["policy"][0].kind.exact:
        return [Check("tokens", True, "a chat server does not return sampled tokens: serve needs allow_inexact")]
    try:
        return [Check("tokens", True, describe_forecast(forecast_of(spec), spec))]
    except UserError as error:
        return [Check("tokens", False, str(error), "another tokenizer or renderer, or `type: openai`")]


async def _check_exactness(spec: Spec, environ: Mapping[str, str], sampling: bool) -> list[Check]:
    """Return the results of the checks of the policy's token-level servers."""
    checks = []
    agent, servers = spec.agent, spec.servers.get("policy", ())
    for server in servers:
        if not server.kind.token_level:
            continue
        examined = token_server(config_from_spec(server, environ, api_key=_policy_key(spec)))
        try:
            findings = {"exactness": await examine_server(examined, agent.temperature, agent.top_p)}
            if sampling:
                # Check with the spec's settings and, if they change the distribution, also without them.
                findings["sampling"] = await measure(examined, agent.temperature, agent.top_p)
                if describe_sampling(agent.temperature, agent.top_p):
                    findings["sampling"] += await measure(examined, 1.0, None)
            for name, check_findings in findings.items():
                checks += [
                    Check(f"{name} ({server.type})", each.ok, each.detail, each.remedy) for each in check_findings
                ]
        finally:
            await examined.close()
    if sampling and not any(server.kind.token_level for server in servers):
        detail = "no server of the policy returns the log-probabilities of sampled tokens"
        checks.append(Check("sampling", False, detail, "a server of type vllm or sglang does", needed=False))
    return checks


def _policy_key(spec: Spec) -> str | None:
    """Return the policy's key from the command line."""
    return spec.policy_api_key.get_secret_value() if spec.policy_api_key is not None else None


async def _server_checks(spec: Spec, environ: Mapping[str, str], sampling: bool) -> list[Check]:
    """Check all servers for their models, and the policy's servers for their token-level features."""
    servers = [(role, server) for role, role_servers in spec.servers.items() for server in role_servers]
    keys = {"policy": _policy_key(spec)}
    checks = await asyncio.gather(*(_check_server(role, server, environ, keys.get(role)) for role, server in servers))
    return [*checks, *await _check_exactness(spec, environ, sampling)]


async def _check_server(role: str, server: Server, environ: Mapping[str, str], key: str | None) -> Check:
    """Check a server by requesting its list of models, with the key for calls; the request is free."""
    title = f"server {role} ({server.type})"
    if server.kind.embedded:
        return Check(title, True, "built in")
    if server.base_url is None:
        return Check(title, False, "it has no base_url", f"set servers.{role}.base_url")
    try:
        transport = Transport(config_from_spec(server, environ, api_key=key))
    except UserError as error:
        return Check(title, False, str(error), "set it, or name another variable")
    try:
        status, _ = await transport.get_json("models", PATIENCE)
    finally:
        await transport.close()
    url = transport.address("models")
    if status == 0:
        return Check(title, False, f"{url} gives no answer", "is it running, and is the address right?")
    if status in (401, 403):
        return Check(title, False, f"{url} refuses the key (status {status})", f"see servers.{role}.api_key_env")
    if status >= 500:
        return Check(title, False, f"{url} answers with status {status}", "look at what the server itself logs")
    if status == 404 and not server.kind.token_level and (hint := unversioned(server.base_url)):
        return Check(title, False, f"{url} answers with status 404", hint.removeprefix("; "))
    return Check(title, True, f"{url} answers with status {status}")
