"""Serve mode: feed a trainer through Atropos' trajectory API."""

from __future__ import annotations

import asyncio

import aiohttp
from tenacity import RetryError

from hermes_rl.env.spec_env import SpecEnv, compile_spec
from hermes_rl.errors import RunError, UserError
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.exact import TOKEN_LEVEL, renderer_of
from hermes_rl.runs.opening import Launch, require_runnable
from hermes_rl.runs.provenance import provenance
from hermes_rl.servers.engine import engines
from hermes_rl.spec.model import Spec

_UNTOLD = ("openai", "vllm", "scripted")
"""Server types that tell no version of their weights by themselves."""


async def run_serve(spec: Spec, launch: Launch, cls: type[SpecEnv] | None = None) -> RunDirectory:
    """Play until the trainer has had its steps; `cls` is the environment class of the spec, where it is a subclass.

    Raises:
        UserError: the spec cannot serve, or there is no trajectory API at its address.
        RunError: the trajectory API was lost.
    """
    await require_runnable(spec, launch).close()
    require_exact(spec)
    if spec.servers["policy"][0].type in TOKEN_LEVEL:
        await asyncio.to_thread(renderer_of, spec)
    await _reach(spec.serve.api_url)
    cls = cls or compile_spec(spec, launch.environ)
    env = cls(*cls.config_init())
    if env._encoder.tokenizer is None:
        raise UserError(f"serve needs the policy's tokenizer: {env._encoder.missing}. Set servers.policy.tokenizer")
    launch.progress.note(f"serving {spec.name} to {spec.serve.api_url}; waiting for a trainer")
    with RunDirectory.choose(spec, "serve", launch.out, fresh=launch.fresh) as directory:
        told = await engines(env._compiled.policy.configs)
        directory.describe(spec, provenance(spec, "serve", None, env._encoder.tokenizer, engines=told))
        env._compiled.artifact_folder = directory.artifacts
        env._record_to(directory, launch.progress)
        await _manage(env)
        return directory


def require_exact(spec: Spec) -> None:
    """Refuse a policy whose sampled tokens are not known, unless the spec accepts that.

    What a token-level or scripted server sampled is certified for each group.
    """
    policy, staleness = spec.servers["policy"], spec.serve.max_staleness
    if staleness is not None and any(one.type in _UNTOLD and one.weights_path is None for one in policy):
        raise UserError(
            "serve.max_staleness: the policy's server does not tell the version of its weights. Name a path at it that "
            'answers {"version": N} under weights_path, or leave max_staleness out'
        )
    if spec.serve.allow_inexact or all(server.type != "openai" for server in policy):
        return
    raise UserError(
        "serve: a chat server does not say which tokens it sampled, so a trainer would train on a reconstruction "
        "without log-probabilities. Set serve.allow_inexact: true to accept that"
    )


async def _manage(env: SpecEnv) -> None:
    try:
        await env.env_manager()
    except (RetryError, aiohttp.ClientError) as error:
        cause = error.last_attempt.exception() if isinstance(error, RetryError) else error
        raise RunError(
            f"the trajectory API at {env.config.rollout_server_url} was lost: {type(cause).__name__}: {cause}. "
            "The same command goes on when it is back"
        ) from error


async def _reach(url: str) -> None:
    try:
        timeout = aiohttp.ClientTimeout(total=10)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as answer:
            await answer.read()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise UserError(
            f"no trajectory API at {url} ({type(error).__name__}): start one with `run-api`, or set serve.api_url"
        ) from error
