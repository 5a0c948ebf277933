"""Run the process of `hermes-rl serve-http`: its address, its token, and its end.

After SIGTERM no new work is accepted, started rollouts run to their end within a bound, remaining ones are interrupted
with a line that reports it, sandboxes are released, and the status is 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import uvicorn
from starlette.routing import Route
from starlette.types import ASGIApp

from hermes_rl import Env, Spec, connect_ray, open_env
from hermes_rl.active_environment import ENVIRONMENT, with_environment
from hermes_rl.errors import UserError
from hermes_rl.service.app import make_app
from hermes_rl.service.environments import ByName, below, make_shared_app
from hermes_rl.service.gate import HEADER_BYTES, PATIENCE, Gate, TimedProtocol
from hermes_rl.service.policies import Policies
from hermes_rl.service.sessions import IDLE, Sessions
from hermes_rl.service.state import Service

MAX_REQUESTS = 16_384
DRAIN = 30.0
CUT = 10.0
"""Seconds in which interrupted work is released and its last lines are read."""
CONNECTIONS = 4096
INTERRUPTED = 130
_BUFFER = 2**18
"""Bytes that the system buffers for a reader: data written there counts as read."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServiceOptions:
    """Options of a service.

    Attributes:
        listen: HOST:PORT; the port 0 is any free one.
        token_env: the variable that holds the token; None: there is none.
        keys: variables that requests may name as keys of any server.
        max_requests: maximum concurrent rollouts that may be requested of an environment.
        idle: seconds without a step after which a session ends.
        drain: seconds for started work, once the service must end.
        ray: address of the Ray cluster that runs the rollouts; None: this machine.
    """

    listen: str = "127.0.0.1:8600"
    token_env: str | None = None
    keys: tuple[str, ...] = ()
    max_requests: int = MAX_REQUESTS
    idle: float = IDLE
    drain: float = DRAIN
    ray: str | None = None


class ToServe(NamedTuple):
    """A spec to serve, the run directory that records its rollouts, and the processes that run them (None: as many as
    the Ray cluster has room for).
    """

    spec: Spec
    record: Path
    workers: int | None = 1


class _Served(NamedTuple):
    """An open environment."""

    service: Service
    sessions: Sessions


async def serve(
    specs: Sequence[ToServe], options: ServiceOptions, environ: Mapping[str, str], say: Callable[[str], None]
) -> int:
    """Serve one spec at the top of the address, or several below their names, until a stop signal; return the exit
    status.

    Raises `UserError` if the address, the token, the record or the spec is wrong; `RunError` if no rollout can run any
    more, as its workers die again and again.
    """
    token = _require_token(options.token_env, environ)
    with contextlib.closing(listening(options.listen, token)) as listener:
        async with AsyncExitStack() as stack:
            env_of: Callable[..., Env] = partial(open_env, environ=environ)
            if options.ray is not None:
                connecting = connect_ray([spec.spec for spec in specs], options.ray, environ=environ)
                env_of = partial(env_of, ray=await stack.enter_async_context(connecting))
            served = await _all_opened(specs, options, environ, env_of, stack)
            first, *others = served.values()
            if not others:
                app: ASGIApp = _make_gate(first, token)
            else:
                apps_by_name = {name: _make_gate(one, token, below(name)) for name, one in served.items()}
                shared = make_shared_app(served, token=token is not None)
                gated = Gate(shared, token, first.service.draining.is_set)
                app = ByName(apps_by_name, gated, {route.path for route in shared.routes if isinstance(route, Route)})
            return await _serve_all(app, listener, list(served.values()), options, say)


async def _all_opened(
    specs: Sequence[ToServe],
    options: ServiceOptions,
    environ: Mapping[str, str],
    env_of: Callable[..., Env],
    stack: AsyncExitStack,
) -> dict[str, _Served]:
    """Open each under its name; raises UserError with the problems of all that cannot be opened."""
    served, problems = dict[str, _Served](), list[str]()
    for spec in specs:
        # Background tasks that start here use this name.
        ENVIRONMENT.set(spec.spec.name if len(specs) > 1 else "")
        try:
            env = await stack.enter_async_context(env_of(spec.spec, record=spec.record, workers=spec.workers))
            policies = Policies(spec.spec, environ, frozenset(options.keys))
            service = Service(env, policies, options.max_requests, str(spec.record))
            await service.open()
            served[spec.spec.name] = _Served(service, Sessions(service, options.idle))
        except UserError as error:
            problems.append(with_environment(str(error)))
    ENVIRONMENT.set("")
    if problems:
        raise UserError("\n".join(problems))
    return served


def _make_gate(served: _Served, token: str | None, below: str = "") -> Gate:
    return Gate(make_app(*served, token=token is not None, below=below), token, served.service.draining.is_set)


async def serve_app(
    app: ASGIApp, listen: str, token_env: str | None, environ: Mapping[str, str], say: Callable[[str], None]
) -> int:
    """Serve an external application, WebSockets included, until a stop signal; return the exit status of the process.

    Raises `UserError` if the address or the token is wrong.
    """
    token = _require_token(token_env, environ)
    with contextlib.closing(listening(listen, token)) as listener:
        return await serve_until_told(
            lambda ended: Gate(app, token, ended),
            listener,
            lambda: say(f"listening on {address_of(listener)}"),
            ws="auto",
        )


async def serve_until_told(
    gated: Callable[[Callable[[], bool]], ASGIApp],
    listener: socket.socket,
    on_start: Callable[[], None],
    ws: Literal["none", "auto"] = "none",
    *,
    background_work: Sequence[Coroutine[Any, Any, None]] = (),
    on_stop: Callable[[bool], None] = lambda _: None,
    ended: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> int:
    """Serve an application until SIGTERM or Ctrl-C; return the exit status of the process.

    Args:
        gated: makes the application with its guard, from a function that returns True once the process must end.
        listener: listening socket; see `listening`.
        on_start: called when it listens.
        ws: "auto" if WebSockets are supported.
        background_work: background work; if any of it ends, the service ends, and its error is raised.
        on_stop: called at each stop signal; with True if the process must end immediately.
        ended: work to finish then, before the service stops listening.
    """
    stop_event, status, loop = asyncio.Event(), 0, asyncio.get_running_loop()

    def end(code: int) -> None:
        nonlocal status
        status = max(status, code)
        on_stop(stop_event.is_set() or code != 0)
        stop_event.set()

    loop.add_signal_handler(signal.SIGTERM, end, 0)
    loop.add_signal_handler(signal.SIGINT, end, INTERRUPTED)
    server = _Server(
        uvicorn.Config(
            gated(stop_event.is_set),
            http=TimedProtocol,
            ws=ws,
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            h11_max_incomplete_event_size=HEADER_BYTES,
            limit_concurrency=CONNECTIONS,
            backlog=1024,
            timeout_keep_alive=int(PATIENCE),
            timeout_graceful_shutdown=5,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    others = [asyncio.create_task(work) for work in (stop_event.wait(), *background_work)]
    try:
        on_start()
        await asyncio.wait([serving, *others], return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            if task.done():
                task.result()
        if ended is not None:
            await ended()
    finally:
        for task in others:
            task.cancel()
        server.should_exit = True
        await asyncio.gather(serving, *others, return_exceptions=True)
        loop.remove_signal_handler(signal.SIGTERM)
        loop.remove_signal_handler(signal.SIGINT)
    return status


async def _serve_all(
    app: ASGIApp,
    listener: socket.socket,
    served: Sequence[_Served],
    options: ServiceOptions,
    say: Callable[[str], None],
) -> int:
    def announce() -> None:
        for service, _ in served:
            name = service.env.spec.name
            prefix = "" if len(served) == 1 else f"{name}, below {below(name)}: "
            say(f"{prefix}rollouts are recorded in {service.record}")
        say(f"listening on {address_of(listener)}")

    def start_draining(at_once: bool) -> None:
        for service, _ in served:
            if at_once:
                service.cut.set()
            service.draining.set()

    async def ended() -> None:
        await asyncio.gather(*(_drain(service, options.drain) for service, _ in served))
        for service, _ in served:
            service.cut.set()
        await asyncio.gather(*(sessions.close() for _, sessions in served))
        await asyncio.gather(*(_drain(service, CUT, until_cut=False) for service, _ in served))

    background_work = [work for service, sessions in served for work in (sessions.end_idle(), service.env.watch())]
    return await serve_until_told(
        lambda _: app, listener, announce, background_work=background_work, on_stop=start_draining, ended=ended
    )


async def _drain(service: Service, seconds: float, *, until_cut: bool = True) -> None:
    """Wait until no request is in progress, within the time limit."""
    waiting = [asyncio.create_task(service.quiet.wait())]
    if until_cut:
        waiting.append(asyncio.create_task(service.cut.wait()))
    await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would end it immediately."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def address_of(listener: socket.socket) -> str:
    """Return the address of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


SHORTEST_TOKEN = 16
"""Minimum characters of the token of a service that other machines can reach; shorter ones can be guessed."""


def _require_token(variable: str | None, environ: Mapping[str, str]) -> str | None:
    if variable is None:
        return None
    token = environ.get(variable, "").strip()
    if not token:
        raise UserError(f"--token-env: the variable {variable} is not set; give it a long random value")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(f"--token-env: the value of {variable} cannot be sent as a header: use letters and digits")
    return token


def listening(listen: str, token: str | None) -> socket.socket:
    """Return a socket at the address, which only this machine can reach unless there is a token."""
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise UserError(f"--listen {listen}: give HOST:PORT, such as 127.0.0.1:8600 or [::1]:8600")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UserError(f"--listen {listen}: there is no such address ({error.strerror})") from error
    if len(token or "") < SHORTEST_TOKEN and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise UserError(
            f"--listen {listen}: without a token of {SHORTEST_TOKEN} characters or more everybody who reaches this "
            "address could run commands through the service. Set a variable to a long random value and name it: "
            "--token-env NAME"
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Detects a reader that disappeared silently within minutes. Connections inherit these options from their
        # listener.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise UserError(f"--listen {listen}: {error.strerror}; choose another address") from error
    return listener
