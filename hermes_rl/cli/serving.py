"""`hermes-rl rollouts` and `hermes-rl openenv`: from the command line to what is served."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hermes_rl import open_env
from hermes_rl.cli.echo import echo
from hermes_rl.cli.options import Options
from hermes_rl.cli.running import DEMO, logged
from hermes_rl.errors import UserError
from hermes_rl.rollouts.admission import raise_descriptor_limit
from hermes_rl.runs.opening import workers_of
from hermes_rl.service.serving import ServiceOptions, serve, serve_app
from hermes_rl.spec.load import load_spec
from hermes_rl.threads import rare_full_collections
from hermes_rl.tokens.hub import without_advice


@dataclass(frozen=True)
class RolloutsRequest:
    """The words of `hermes-rl rollouts`."""

    spec: str
    options: Options
    listen: str
    token_env: str | None
    most: int
    keys: tuple[str, ...]
    out: Path | None
    fresh: bool
    idle: float
    drain: float
    demo: bool
    verbose: bool
    workers: int | None = None
    ray: str | None = None


def serve_rollouts(request: RolloutsRequest) -> int:
    """Serve until the process is told to end; returns the exit status.

    Raises:
        UserError: the command line or the spec is wrong.
    """
    raise_descriptor_limit()
    without_advice()
    environ = request.options.environ()
    more = [f"serve.workers={request.workers}"] if request.workers is not None else []
    spec = load_spec(
        request.spec, overrides=request.options.overrides(*more), demo=request.demo, environ=environ, mode="serve"
    )
    if spec.demo:
        echo(DEMO, err=True)
    record = request.out or Path("outputs") / spec.name / "rollouts"
    options = ServiceOptions(
        listen=request.listen,
        token_env=request.token_env,
        keys=request.keys,
        most=request.most,
        record=_beside(record) if request.fresh else record,
        idle=request.idle,
        drain=request.drain,
        workers=workers_of(spec, "serve", request.ray),
        ray=request.ray,
    )
    with rare_full_collections(), logged(partial(echo, err=True), verbose=request.verbose):
        return asyncio.run(serve(spec, options, environ, echo))


def serve_openenv(spec: str, options: Options, listen: str, token_env: str | None, most: int) -> int:
    """Serve a spec to OpenEnv's clients until the process is told to end; returns the exit status.

    Raises:
        UserError: the command line or the spec is wrong, or OpenEnv is missing.
    """
    try:
        from hermes_rl.integrations.openenv import make_app
    except ImportError as error:
        raise UserError(f"OpenEnv 0.10 is needed ({error}): pip install 'hermes-rl[openenv]'") from error
    raise_descriptor_limit()
    without_advice()
    environ = options.environ()
    loaded = load_spec(spec, overrides=options.overrides(), environ=environ)

    async def main() -> int:
        async with open_env(loaded, environ=environ) as env:
            return await serve_app(make_app(env, most), listen, token_env, environ, echo)

    return asyncio.run(main())


def _beside(path: Path) -> Path:
    """Return a folder that does not exist yet, beside this one."""
    number, found = 2, path
    while found.exists():
        found, number = path.with_name(f"{path.name}-{number}"), number + 1
    return found
