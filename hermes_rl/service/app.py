"""Define the paths of the service, and their OpenAPI description.

Annotations are not postponed here: FastAPI reads the annotations of functions that are defined inside another one.
"""

import asyncio
import logging
import sys
import threading
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Coroutine, Iterable
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from hermes_rl import __version__
from hermes_rl.service import nemo_gym
from hermes_rl.service.batches import Batch, Lines, wait_for_disconnect
from hermes_rl.service.bodies import (
    EndOfBatch,
    ErrorResponse,
    GroupResponse,
    GymRunRequest,
    HealthResponse,
    PolicyUpdate,
    RolloutsRequest,
    RowsResponse,
    SessionRequest,
    SplitName,
    StepRequest,
    TurnResponse,
)
from hermes_rl.service.refusals import Refused, service_ending, wrong
from hermes_rl.service.sessions import Sessions
from hermes_rl.service.state import Service, first_of
from hermes_rl.values import read_json, too_many_values, write_json

T = TypeVar("T")
logger = logging.getLogger(__name__)

_STATUSES = {
    401: "the token is missing or wrong",
    413: "the body is too large",
    422: "something in the request is wrong: `place` says where",
    429: "there is no room now: ask again after Retry-After seconds",
    503: "the service is shutting down: ask again after Retry-After seconds",
}
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": text} for status, text in _STATUSES.items()
}
SUMMING = 60.0
"""Seconds for summing up the rows of a run."""
IN_THREAD = 1 << 16
"""Bytes from which a body is parsed in the helper thread."""
MOST_BODY_VALUES = 400_000
"""Maximum values of a body: the ids and log-probabilities of a turn of 200,000 tokens."""
MOST_KEYS = 10_000
"""Maximum keys of one object; each unknown one creates an error."""
_ALTERNATIVES = ("str", "MessageBody")
"""Types that a value may have, which pydantic includes in the location of an error."""
_NO_SESSION: dict[int | str, dict[str, Any]] = {
    404: {"model": ErrorResponse, "description": "there is no such session"}
}


class BoundedRoute(APIRoute):
    """A path whose body, if it is large, is parsed in a helper thread, one at a time, and within bounds.

    FastAPI would parse it on the event loop and block all rollouts meanwhile.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            if self.body_field is not None and len(body := await request.body()) > IN_THREAD:
                request._json = await asyncio.to_thread(_read_alone, body)  # `Request.json` looks here first
            return await handler(request)

        return bounded


_reading = threading.Lock()


def _read_alone(body: bytes) -> Any:
    """See `_read_body`; runs one at a time, as each blocks the event loop by holding the interpreter."""
    with _reading:
        return _read_body(body)


def _read_body(body: bytes) -> Any:
    """Return the value of a body. Raises `Refused` if it exceeds the limits of values or levels, or is not JSON."""
    if too_many_values(body, MOST_BODY_VALUES):
        raise Refused(413, "too_large", f"a request has at most {MOST_BODY_VALUES} values: ask in several parts")
    value = _parse_body(body)
    level = [value]
    while level:
        if any(isinstance(each, dict) and len(each) > MOST_KEYS for each in level):
            raise Refused(413, "too_large", f"an object of a request has at most {MOST_KEYS} keys")
        level = [child for holder in level for child in _containers_in(holder)]
    return value


def _containers_in(value: Any) -> Iterable[Any]:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [each for each in children if isinstance(each, dict | list)]


class JsonAnswer(JSONResponse):
    """JSON of any value that can occur here, including unpaired surrogates, which UTF-8 refuses."""

    def render(self, content: Any) -> bytes:
        return write_json(content, default=str)


def bare_app(description: str, *, token: bool, below: str = "", elsewhere: str = "") -> FastAPI:
    """Return an application without paths, which responds to invalid requests with the error.

    Args:
        description: description of its purpose.
        token: True if requests need a token, which the description then mentions.
        below: the path below which clients find it.
        elsewhere: where other paths are, for a client that requests an unknown one.
    """
    app = FastAPI(
        title="hermes-rl serve-http",
        version=__version__,
        description=description,
        servers=[{"url": below}] if below else None,
        docs_url=None,  # both pages would load code of another host
        redoc_url=None,
        redirect_slashes=False,
        default_response_class=JsonAnswer,
        responses=_REFUSALS,
    )
    app.router.route_class = BoundedRoute
    _answer_mistakes(app, f"see {below}/openapi.json for the paths and their methods{elsewhere}")
    _complete_description(app, token=token)
    return app


def metrics_of(service: Service, sessions: Sessions) -> dict[str, Any]:
    """Return the counts of a service since it started, as JSON."""
    versions = [batch.version for batch in service.batches]
    in_flight = {
        "batches": len(service.batches),
        "rollouts": service.in_flight,
        "sessions": len(sessions),
        "versions": sorted({version for version in versions if version is not None}),
    }
    difference, status = service.policies.difference, service.env.status()
    workers = {"ready": status.workers, "died": status.died, "rollouts_lost": status.lost}
    return service.metrics.record(
        in_flight=in_flight,
        phases=status.phases,
        version=max(service.policies.versions, default=None),
        logprob_difference={"mean": difference.mean, "largest": difference.largest},
        most=service.max_requests,
        retries=status.retries,
        workers=workers if status.workers is not None else None,
    )


def make_app(service: Service, sessions: Sessions, *, token: bool, below: str = "") -> FastAPI:  # noqa: C901 - a path each
    """Return the application of one environment.

    Its description mentions the `token`, if requests need one, and the path `below` which clients find it.
    """
    app = bare_app("Rollouts of one spec, for trainers.", token=token, below=below)

    @app.get("/v1/health", response_model=HealthResponse)
    async def health() -> Response:
        """Say that the service takes requests."""
        return JsonAnswer({"status": "ok", "name": service.env.spec.name, "record": service.record})

    @app.get("/v1/metrics")
    async def metrics() -> Response:
        """Return the counts of the service since its start."""
        return JsonAnswer(metrics_of(service, sessions))

    @app.get("/v1/rows", response_model=RowsResponse)
    async def rows(split: SplitName = "train", after: Annotated[str | None, Query(max_length=1000)] = None) -> Response:
        """List rows in their order, a thousand at a time."""
        page, following = service.page(split, after)
        entries = [{"key": row.key, "index": row.index, "digest": row.digest} for row in page]
        return JsonAnswer({"rows": entries, "fingerprint": service.env.rows(split).fingerprint, "after": following})

    lines = {
        "schema": {
            "oneOf": [{"$ref": f"#/components/schemas/{model.__name__}"} for model in (GroupResponse, EndOfBatch)]
        }
    }
    streamed = {
        "description": "a line for each group as it ends, and last the end",
        "content": {Lines.media_type: lines},
    }

    @app.post("/v1/rollouts", response_class=Response, responses={200: streamed})
    async def rollouts(body: RolloutsRequest) -> Response:
        """Play a batch of groups; each is a line as it ends. A reader that goes away ends it."""
        return Lines(await Batch.requested(service, body), service)

    @app.put("/v1/policy", status_code=204, response_class=Response)
    async def policy(news: PolicyUpdate) -> Response:
        """Take up that the weights have changed; calls from now on are of this version."""
        service.policies.tell(news)
        await service.env.sync_policies()
        return Response(status_code=204)

    @app.post("/v1/sessions", response_model=TurnResponse)
    async def begin(body: SessionRequest, request: Request) -> Response:
        """Begin a rollout whose turns come from the caller."""
        return JsonAnswer(await _unless_gone(request, service, sessions.start(body)))

    @app.get("/v1/sessions/{session_id}", response_model=TurnResponse, responses=_NO_SESSION)
    async def look(session_id: str) -> Response:
        """Say once more what the last step was answered with, for one who lost the answer."""
        return JsonAnswer(sessions.get_session(session_id).answer)

    @app.post("/v1/sessions/{session_id}/step", response_model=TurnResponse, responses=_NO_SESSION)
    async def step(session_id: str, body: StepRequest) -> Response:
        """Answer the turn that waits."""
        return JsonAnswer(await sessions.step(session_id, body))

    @app.delete("/v1/sessions/{session_id}", status_code=204, response_class=Response, responses=_NO_SESSION)
    async def end(session_id: str) -> Response:
        """End a rollout, and release what it has."""
        await sessions.end(session_id)
        return Response(status_code=204)

    @app.post("/run")
    async def run(body: GymRunRequest, request: Request) -> Response:
        """Play one rollout, as NeMo Gym asks an agent server to."""
        return await run_for_gym(service, body, request)

    add_aggregation(app)
    return app


async def run_for_gym(service: Service, body: GymRunRequest, request: Request) -> Response:
    """Play one rollout and answer as NeMo Gym expects it."""
    policy = await service.policy(None)
    reservation = service.make_reservation()
    reservation.take(1)
    try:
        group = await _unless_gone(request, service, nemo_gym.played(service, body, policy))
    finally:
        reservation.leave()
    allowed = service.env.spec.serve.allow_inexact
    answer, cause = await asyncio.to_thread(nemo_gym.answer, body, group, allow_inexact=allowed)
    service.metrics.count(group, cause)
    return JsonAnswer(answer)


def add_aggregation(app: FastAPI) -> None:
    """Add NeMo Gym's path that aggregates rows, of any environment."""

    @app.post("/aggregate_metrics")
    async def aggregate(request: Request) -> Response:
        """Aggregate the results of /run; failed rows are excluded."""
        body = await request.body()
        if len(body) <= IN_THREAD:
            status, text = nemo_gym.aggregation(body)
            return Response(text, status, media_type="application/json")
        # A thread that parses holds the interpreter.
        command = sys.executable, "-m", "hermes_rl.service.nemo_gym"
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
        try:
            async with asyncio.timeout(SUMMING):
                answer, _ = await process.communicate(body)
        except TimeoutError:
            answer = b""
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        status_line, _, answer = answer.partition(b"\n")
        if process.returncode:
            raise Refused(413, "too_large", "aggregating the results takes too much memory or time; send fewer rows")
        return Response(answer, int(status_line), media_type="application/json")


async def _unless_gone(request: Request, service: Service, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work; it ends if the client disconnects, or the service stops waiting."""
    working, *_ = await first_of(work, wait_for_disconnect(request.receive), service.cut.wait())
    if not working.cancelled():
        answer: T = working.result()
        return answer
    if service.cut.is_set():
        raise service_ending()
    service.metrics.cancelled += 1
    raise Refused(400, "gone", "the client has disconnected")


def _parse_body(body: bytes) -> Any:
    try:
        return read_json(body)
    except ValueError as error:
        raise wrong("not_json", "body", f"the body is not JSON: {error}") from error


def _answer_mistakes(app: FastAPI, paths: str) -> None:
    """Convert every error of a request to a response that describes it; `paths` is shown for a wrong path."""

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return wrong("not_json", "body", f"the body is not JSON: {first['ctx']['error']}").response()
        error_path = [str(part) for part in first["loc"]]
        inside = [
            part for part in error_path[error_path[0] in ("body", "query", "path") :] if part not in _ALTERNATIVES
        ]
        location = ".".join(inside) or "body"
        return wrong("invalid", location, f"{location}: {first['msg']}").response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        if error.status_code == 400:  # FastAPI could not parse the body
            return wrong("not_json", "body", "the body is not JSON that can be read").response()
        return Refused(error.status_code, error.detail.lower().replace(" ", "_"), paths).response()


def _complete_description(app: FastAPI, *, token: bool) -> None:
    """Add to the description the parts that FastAPI does not see: the token, and the types of lines."""

    def build_document() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                servers=app.servers or None,
                routes=app.routes,
            )
            schemas = document["components"]["schemas"]
            for model in (GroupResponse, EndOfBatch) if "/v1/rollouts" in document["paths"] else ():
                schema = model.model_json_schema(ref_template="#/components/schemas/{model}", mode="serialization")
                schemas |= schema.pop("$defs", {})
                schemas[model.__name__] = schema
            content = {"application/json": {"schema": {"type": "object"}}}
            document["paths"]["/aggregate_metrics"]["post"]["requestBody"] = {"required": True, "content": content}
            if token:
                document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
                document["security"] = [{"token": []}]
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = build_document  # type: ignore[method-assign]
