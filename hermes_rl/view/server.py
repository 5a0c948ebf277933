"""`hermes-rl view`: serve the page of runs over HTTP, for the person who started it.

Owns access control, and the permissions of a page. Every response except the page itself, which holds no data, requires
the token in the printed address; the browser stores it as a cookie that no script sees. Another site's page can neither
make requests in its name nor show this page in a frame, and this page loads and runs only its two files. Nothing is
ever written.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import secrets
from collections.abc import Callable, Mapping, Sequence
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hermes_rl.analysis.report import asset
from hermes_rl.analysis.rollout_view import artifact_file
from hermes_rl.errors import UserError
from hermes_rl.service.gate import HEADERS
from hermes_rl.service.refusals import Refused
from hermes_rl.service.serving import address_of, listening, serve_until_told
from hermes_rl.threads import run_in_thread
from hermes_rl.view.run_index import RunIndex

TOKENS = 2_000
"""Maximum tokens of a sequence in one response."""
PAGES = {
    "/": ("view.html", "text/html; charset=utf-8"),
    "/view.css": ("view.css", "text/css; charset=utf-8"),
    "/view.js": ("view.js", "text/javascript; charset=utf-8"),
}
"""Files without data that need no token."""
SAFE = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every response."""


async def view(folders: Sequence[Path], listen: str, say: Callable[[str], None]) -> int:
    """Serve the runs in directories until a stop signal; return the exit status.

    Raises `UserError` if there is no run, or the address cannot be used.
    """
    run_index = await run_in_thread(lambda: RunIndex(folders))
    token = secrets.token_urlsafe(24)
    with contextlib.closing(listening(listen, token)) as listener:
        name = listen.rpartition(":")[0].strip("[]")
        gate = ViewGate(make_view_app(run_index), token, name, listener.getsockname()[1])
        return await serve_until_told(
            lambda ended: gate, listener, lambda: say(f"look at your runs here: {address_of(listener)}/?token={token}")
        )


def make_view_app(run_index: RunIndex) -> FastAPI:
    """Return the application inside the gate: the page, and the data that it requests."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    @app.exception_handler(UserError)
    async def refuse(request: Request, error: UserError) -> Response:
        return JSONResponse({"error": "not_found", "detail": str(error)}, 404)

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        return error.response()

    def page(name: str, kind: str) -> Callable[[], Any]:
        content = asset(name)

        async def give() -> Response:
            return Response(content, headers={"Content-Type": kind})

        return give

    for path, (name, kind) in PAGES.items():
        app.get(path)(page(name, kind))
    _answer_of_runs(app, run_index)
    _answer_of_rollouts(app, run_index)
    return app


def _answer_of_runs(app: FastAPI, run_index: RunIndex) -> None:
    @app.get("/api/runs")
    async def runs() -> Response:
        return JSONResponse(await run_in_thread(run_index.runs))

    @app.get("/api/compare")
    async def compare(a: str, b: str) -> Response:
        return JSONResponse(await run_in_thread(lambda: run_index.compare(a, b)))

    @app.get("/api/runs/{run}")
    async def overview(run: str, request: Request) -> Response:
        version, overview_now = await run_in_thread(lambda: run_index.overview(run))
        if request.headers.get("if-none-match") == version:
            return Response(status_code=304, headers={"ETag": version})
        return JSONResponse(overview_now, headers={"ETag": version})

    @app.get("/api/runs/{run}/rows")
    async def rows(run: str, request: Request) -> Response:
        return JSONResponse(await run_in_thread(lambda: run_index.rows(run, request.query_params)))

    @app.get("/api/runs/{run}/rollouts")
    async def rollouts(run: str, request: Request) -> Response:
        return JSONResponse(await run_in_thread(lambda: run_index.rollouts(run, request.query_params)))


def _answer_of_rollouts(app: FastAPI, run_index: RunIndex) -> None:
    @app.get("/api/runs/{run}/rollouts/{rollout:path}")
    async def rollout(run: str, rollout: str) -> Response:
        return JSONResponse(await run_in_thread(lambda: run_index.rollout(run, rollout)))

    @app.get("/api/runs/{run}/beside/{rollout:path}")
    async def beside(run: str, rollout: str, request: Request) -> Response:
        return JSONResponse(await run_in_thread(lambda: run_index.neighbour(run, rollout, request.query_params)))

    @app.get("/api/runs/{run}/tokens/{rollout:path}")
    async def tokens(run: str, rollout: str, sequence: int = 0, begin: int = 0) -> Response:
        return JSONResponse(await run_in_thread(lambda: run_index.tokens(run, rollout, sequence, begin, TOKENS)))

    @app.get("/api/runs/{run}/artifacts/{rollout:path}")
    async def artifact(run: str, rollout: str, file: str) -> Response:
        path = await run_in_thread(lambda: _artifact_file(run_index, run, rollout, file))
        # A browser saves an attachment of unknown type as a file, whatever its content.
        headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(path.name, safe='')}"}
        return FileResponse(path, media_type="application/octet-stream", headers=headers)


def _artifact_file(run_index: RunIndex, run: str, rollout: str, file: str) -> Path:
    """Return a file that a rollout's record names, wherever links in the directory lead.

    Raises `UserError` if the rollout has no such artifact.
    """
    folder, line = run_index.line(run, rollout)
    artifact_paths = [
        str(artifact["path"]) for artifact in (line.get("artifacts") or {}).values() if "path" in artifact
    ]
    is_artifact = (
        any(file == path or file.startswith(f"{path}/") for path in artifact_paths) and ".." not in Path(file).parts
    )
    artifact_path = artifact_file(folder, folder / file) if is_artifact else None
    if artifact_path is None:
        raise UserError(f"rollout {rollout} has no artifact file {file!r}")
    return artifact_path


class ViewGate:
    """Passes requests with the token to the application, and adds headers to each response.

    Args:
        app: the application.
        token: token in the printed address.
        name: host name of the listening address.
        port: port of the listening address; browsers send the cookies of one port to all others.
    """

    def __init__(self, app: ASGIApp, token: str, name: str, port: int) -> None:
        self._app, self._token, self._name = app, token.encode(), name.lower()
        self._cookie = f"hermes_rl_view_{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1008})
            return
        headers = {**SAFE}

        async def safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                mutable = MutableHeaders(scope=message)
                for name, value in headers.items():
                    mutable[name] = value
            await send(message)

        try:
            self._require_allowed(scope, headers)
        except Refused as refused:
            await refused.response()(scope, receive, safely)
            return
        await self._app(scope, receive, safely)

    def _require_allowed(self, scope: Scope, headers: dict[str, str]) -> None:
        if len(scope["headers"]) > HEADERS:
            raise Refused(431, "too_many_headers", f"a request has at most {HEADERS} headers")
        request_headers = dict(scope["headers"])
        if not self._own_name(request_headers.get(b"host", b"").decode("latin-1")):
            raise Refused(403, "foreign_host", "use the address that hermes-rl view has printed")
        if scope["method"] not in ("GET", "HEAD"):
            raise Refused(405, "read_only", "nothing can be changed here")
        token = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["path"] in PAGES:
            if self._right(token):
                headers["Set-Cookie"] = f"{self._cookie}={token}; Path=/; HttpOnly; SameSite=Strict"
            return
        if request_headers.get(b"sec-fetch-site", b"same-origin") not in (b"same-origin", b"none"):
            raise Refused(403, "foreign_page", "pages of other sites are not answered")
        if not self._right(_kept_token(request_headers, self._cookie)):
            raise Refused(
                401, "unauthorized", "Open the address that hermes-rl view has printed: its token is missing."
            )

    def _right(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "replace"), self._token)

    def _own_name(self, host: str) -> bool:
        """Return True if a request was sent to an IP address or the listening name, and not to another name.

        A page of another site can let its name resolve to this machine; an unknown name reveals it.
        """
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        if name in ("localhost", self._name):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _kept_token(headers: Mapping[bytes, bytes], cookie: str) -> str:
    scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    try:
        cookie_sent = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1")).get(cookie)
    except CookieError:
        return ""
    return cookie_sent.value if cookie_sent is not None else ""
