"""Serve several environments at one address: each below its name, and shared paths at the top.

Below `/NAME` are all paths that a service of that environment alone has at the top, so a client of one works with any
of them.
"""

import asyncio
from collections.abc import Collection, Mapping
from urllib.parse import quote, unquote

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from hermes_rl.active_environment import ENVIRONMENT
from hermes_rl.service.app import JsonAnswer, add_aggregation, bare_app, metrics_of, run_for_gym
from hermes_rl.service.bodies import AllHealthResponse, GymRunRequest, PolicyUpdate
from hermes_rl.service.refusals import wrong
from hermes_rl.service.sessions import Sessions
from hermes_rl.service.state import Service


def below(name: str) -> str:
    """Return the path below which the environment of that name is."""
    return f"/{quote(name, safe='')}"


class ByName:
    """Routes a request below the name of an environment to its application, and every other to the shared one; `top`
    are the paths of the shared one, even if an environment has the name with which one of them starts.
    """

    def __init__(self, apps_by_name: Mapping[str, ASGIApp], shared: ASGIApp, top: Collection[str]) -> None:
        self._apps_by_name, self._shared, self._top = apps_by_name, shared, top

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Not yet decoded, so that a slash in a name differs from one after it.
        first, slash, rest = scope.get("raw_path", b"").decode("latin-1").removeprefix("/").partition("/")
        app = self._apps_by_name.get(unquote(first)) if slash and scope["path"] not in self._top else None
        if app is None:
            await self._shared(scope, receive, send)
        else:
            ENVIRONMENT.set(unquote(first))  # each request has a separate context
            await app({**scope, "path": f"/{unquote(rest)}", "raw_path": f"/{rest}".encode("latin-1")}, receive, send)


def make_shared_app(environments: Mapping[str, tuple[Service, Sessions]], *, token: bool) -> FastAPI:
    """Return the shared application of several environments, by their names.

    Its description mentions the `token`, if requests need one.
    """
    paths = ", ".join(map(below, environments))
    app = bare_app(
        "What several environments share; each has its own description below its path.",
        token=token,
        elsewhere=f"; the paths of an environment are below its name: {paths}",
    )

    @app.get("/v1/health", response_model=AllHealthResponse)
    async def health() -> Response:
        """Say that the service takes requests, and where each environment is."""
        served = [
            {"name": name, "path": below(name), "record": service.record} for name, (service, _) in environments.items()
        ]
        return JsonAnswer({"status": "ok", "environments": served})

    @app.get("/v1/metrics")
    async def metrics() -> Response:
        """Return the counts of each environment since the start of the service."""
        return JsonAnswer({name: metrics_of(*served) for name, served in environments.items()})

    @app.put("/v1/policy", status_code=204, response_class=Response)
    async def policy(news: PolicyUpdate) -> Response:
        """Take up that the weights have changed, for all environments or for none."""
        for service, _ in environments.values():
            service.policies.require_newer_version(news)
        for service, _ in environments.values():
            service.policies.tell(news)
        await asyncio.gather(*(service.env.sync_policies() for service, _ in environments.values()))
        return Response(status_code=204)

    @app.post("/run")
    async def run(body: GymRunRequest, request: Request) -> Response:
        """Play one rollout for NeMo Gym, of the environment that `verifier_metadata.environment` names."""
        name = body.verifier_metadata.get("environment")
        if not isinstance(name, str) or name not in environments:
            environment_names = ", ".join(environments)
            raise wrong(
                "unknown_environment", "verifier_metadata.environment", f"name one of them: {environment_names}"
            )
        ENVIRONMENT.set(name)
        return await run_for_gym(environments[name][0], body, request)

    add_aggregation(app)
    return app
