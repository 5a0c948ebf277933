"""A sandbox that may reach some hosts, through the proxy of its own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.errors import UserError
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import ResourceLimits, Sandbox, SandboxConfig
from hermes_rl.sandbox.bubblewrap import Bubblewrap
from hermes_rl.sandbox.helper_sandbox import HelperSandbox
from hermes_rl.sandbox.hosts import HostList, RefusedError, is_public
from hermes_rl.sandbox.proxy import CONNECTIONS, Proxy, read_request
from tests.http_servers import Handler, serving
from tests.waiting import stays, until

FETCH = """
import sys, urllib.request
try:
    with urllib.request.urlopen(sys.argv[1], timeout=10) as answer:
        print(answer.status, answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
except OSError as error:
    print("error", error)
"""


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "224.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1",
        "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1",
        "2002:7f00:1::", "2001:db8::1", "nonsense", "", "64:ff9b:1::7f00:1", "64:ff9b:1::101:101", "fec0::1", "feff::1",
        "::127.0.0.1", "::1.1.1.1", "::ffff:0:127.0.0.1", "::ffff:0:1.1.1.1", "2606:4700::5efe:127.0.0.1",
        "2606:4700::200:5efe:10.0.0.1", "100::1", "3fff::1", "5f00::1", "192.88.99.1", "168.63.129.16", "240.0.0.1",
        "::ffff:168.63.129.16", "2002:a9fe:a9fe::1", "192.0.0.192", "fe80::5efe:1.1.1.1",
    ],
)  # fmt: skip
def test_special_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.215.14", "2606:4700::1111", "64:ff9b::101:101"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@given(st.ip_addresses(v=4))
def test_an_address_means_the_same_packed_into_another(address: object) -> None:
    assert is_public(f"::ffff:{address}") == is_public(str(address))


def test_names() -> None:
    hosts = HostList(["pypi.org", "*.Example.com"])
    for name in ("PyPI.org", "pypi.org.", "a.b.example.com"):
        hosts.require(name, 443)
    for other in ("example.com", "evilexample.com", "pypi.org.evil.com", "xpypi.org", "", "127.0.0.1"):
        with pytest.raises(RefusedError, match=f"^{other} is not among"):
            hosts.require(other, 443)


def test_ports() -> None:
    hosts = HostList(["pypi.org", "mirror.test:8080", "*.example.com:81", "[2606:4700::1111]:82", "2606:4700::2"])
    asked = [("pypi.org", 80), ("pypi.org", 443), ("mirror.test", 8080), ("a.example.com", 81)]
    asked += [("2606:4700::1111", 82), ("2606:4700::2", 443)]
    for each in asked:
        hosts.require(*each)
    refused = [("pypi.org", 22), ("pypi.org", 8080), ("mirror.test", 80), ("a.example.com", 80), ("2606:4700::2", 22)]
    for host, port in refused:
        with pytest.raises(RefusedError, match=f"port {port} of {host} is not among .*, other ports are"):
            hosts.require(host, port)
    for wrong in ("pypi.org:0", "pypi.org:70000", "pypi.org:x", "pypi.org:", ":80", "http://pypi.org"):
        with pytest.raises(UserError, match="invalid host"):
            HostList([wrong])


@pytest.mark.parametrize(
    "head",
    [
        "GET / HTTP/1.1", "GET https://pypi.org/ HTTP/1.1", "CONNECT pypi.org HTTP/1.1", "CONNECT :443 HTTP/1.1", "x",
        "GET http:///x HTTP/1.1", "CONNECT pypi.org:99999 HTTP/1.1", "GET  http://pypi.org HTTP/1.1", "\xff \xff \xff",
    ],
)  # fmt: skip
def test_invalid_proxy_request_is_refused(head: str) -> None:
    with pytest.raises(RefusedError):
        read_request(f"{head}\r\n\r\n".encode("latin-1"))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_refused(data: bytes) -> None:
    try:
        request = read_request(data + b"\r\n\r\n")
    except RefusedError:
        return
    assert request.host


def test_what_is_sent_on() -> None:
    request = read_request(
        b"GET http://User:pw@Pypi.org:81/a?b=c HTTP/1.1\r\nHost: 127.0.0.1\r\nProxy-Authorization: x\r\nX-A: 1\r\n\r\n"
    )
    assert (request.host, request.port) == ("pypi.org", 81)
    assert request.head == b"GET /a?b=c HTTP/1.1\r\nHost: Pypi.org:81\r\nConnection: close\r\nX-A: 1\r\n\r\n"


class Web(Handler):
    def do_GET(self) -> None:  # noqa: N802 - the name is that of http.server
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", "http://metadata.test:1/latest")
            self.end_headers()
            return
        self.answer(f"hello {self.headers['Host']}".encode())


@pytest.fixture
def web() -> Iterator[int]:
    """The port of a web server on this machine's loopback."""
    with serving(Web) as address:
        yield int(address.rpartition(":")[2])


async def everything_is_here(host: str, port: int) -> str:
    """A name service for which all allowed names but one are of this machine, so that tests need no other."""
    if host == "metadata.test":
        raise RefusedError(f"{host} is not an address of the internet")
    return "127.0.0.1"


@asynccontextmanager
async def reaching(*hosts: str, real: bool = False) -> AsyncIterator[Sandbox]:
    sandbox = create_sandbox(SandboxConfig(network=hosts))
    assert isinstance(sandbox, HelperSandbox) and isinstance(sandbox.isolation, Bubblewrap)
    if not real:
        sandbox.isolation.proxy = Proxy(hosts, everything_is_here)
    async with sandbox:
        yield sandbox


async def fetch(sandbox: Sandbox, url: str) -> str:
    return (await sandbox.run(["python3", "-c", FETCH, url])).output.strip()


async def test_listed_hosts_are_reached_and_others_are_not(web: int) -> None:
    async with reaching(f"files.test:{web}", "metadata.test:1") as sandbox:
        assert await fetch(sandbox, f"http://files.test:{web}/") == f"200 hello files.test:{web}"
        assert (
            await fetch(sandbox, f"http://other.test:{web}/")
            == "403 other.test is not among the hosts of sandbox.network"
        )
        away = await fetch(sandbox, f"http://files.test:{web}/away")
        assert away == "403 metadata.test is not an address of the internet"


async def test_tunnels(web: int) -> None:
    script = (
        "import socket, sys\ns = socket.create_connection(('127.0.0.1', 3128))\n"
        "s.sendall(f'CONNECT {sys.argv[1]}:{sys.argv[2]} HTTP/1.1\\r\\n\\r\\n'.encode())\n"
        "head = s.recv(1000)\nprint(head.split()[1].decode())\n"
        "s.sendall(b'GET / HTTP/1.0\\r\\nHost: inner\\r\\n\\r\\n')\nprint(s.makefile().read()[-11:])\n"
    )
    async with reaching(f"files.test:{web}") as sandbox:
        assert (await sandbox.run(["python3", "-c", script, "files.test", str(web)])).output == "200\nhello inner\n"
        # What is sent after the refusal may meet a closed connection: that is told on standard error.
        refused = await sandbox.run(["python3", "-c", script, "other.test", str(web)], merge_stderr=False)
        assert refused.output.startswith("403")


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "::1", "169.254.169.254"])
async def test_a_listed_name_that_is_of_this_machine_is_refused(web: int, name: str) -> None:
    async with reaching(f"[{name}]:{web}" if ":" in name else f"{name}:{web}", real=True) as sandbox:
        script = (
            "import socket, sys\ns = socket.create_connection(('127.0.0.1', 3128))\n"
            "s.sendall(f'CONNECT {sys.argv[1]}:{sys.argv[2]} HTTP/1.1\\r\\n\\r\\n'.encode())\n"
            "print(s.recv(1000).decode())"
        )
        host = f"[{name}]" if ":" in name else name
        said = (await sandbox.run(["python3", "-c", script, host, str(web)])).output
        assert "403" in said and "not an address of the internet" in said


async def test_there_is_no_way_around_the_proxy(web: int) -> None:
    async with reaching("files.test") as sandbox:
        direct = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 3)"
        assert (await sandbox.run(["python3", "-c", direct, str(web)])).exit_code != 0
        routes = (await sandbox.run("cat /proc/net/route /proc/net/dev")).output
        assert "eth" not in routes


async def test_a_proxy_goes_with_its_sandbox() -> None:
    before = asyncio.all_tasks()
    tunnel = (
        "import socket, sys\ns = socket.create_connection(('127.0.0.1', 3128))\n"
        "s.sendall(f'CONNECT files.test:{sys.argv[1]} HTTP/1.1\\r\\n\\r\\n'.encode())\n"
        "print(s.recv(1000).split()[1].decode(), flush=True)\ns.recv(1)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it never ends a connection
        port = silent.getsockname()[1]
        async with reaching(f"files.test:{port}") as sandbox:
            held = await sandbox.spawn(["python3", "-c", tunnel, str(port)])
            await until(lambda: held.output() == b"200\n")
        assert asyncio.all_tasks() <= before


@contextmanager
def listening() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


async def test_an_upstream_that_is_not_there() -> None:
    with listening() as port:
        pass
    async with reaching(f"files.test:{port}") as sandbox:
        assert (await fetch(sandbox, f"http://files.test:{port}/")).startswith("502 files.test does not answer")


async def test_empty_host_list_disables_the_network() -> None:
    async with create_sandbox(SandboxConfig(network=())) as sandbox:
        assert "proxy" not in (await sandbox.run("env")).output


@pytest.mark.parametrize("later", range(6))
async def test_closing_ends_a_connection_in_the_moment_of_its_request(later: int) -> None:
    async def never(_: str, __: int) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    proxy = Proxy(["example.com"], never)
    listener = socket.create_server(("127.0.0.1", 0))
    await proxy.listen(listener)
    with socket.create_connection(listener.getsockname()) as client:
        await asyncio.sleep(0.01)
        client.sendall(b"CONNECT example.com:443 HTTP/1.1\r\n\r\n")
        for _ in range(later):
            await asyncio.sleep(0)
        async with asyncio.timeout(30):
            await proxy.close()


@asynccontextmanager
async def through_proxy(
    serve: Callable[[asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[asyncio.StreamReader]:
    """A tunnel through a proxy to somebody who only talks."""
    served: list[asyncio.Task[None]] = []

    async def resolve(_: str, __: int) -> str:
        return "127.0.0.1"

    far = await asyncio.start_server(
        lambda _, writer: served.append(asyncio.create_task(serve(writer))), "127.0.0.1", 0
    )
    proxy = Proxy([f"far.test:{far.sockets[0].getsockname()[1]}"], resolve)
    listener = socket.create_server(("127.0.0.1", 0))
    where = listener.getsockname()
    await proxy.listen(listener)
    reader, writer = await asyncio.open_connection(*where)
    writer.write(f"CONNECT far.test:{far.sockets[0].getsockname()[1]} HTTP/1.1\r\n\r\n".encode())
    assert b"200" in await reader.readuntil(b"\r\n\r\n")
    yield reader
    writer.close()
    await proxy.close()
    far.close()
    for task in served:
        task.cancel()
    await asyncio.gather(*served, return_exceptions=True)


async def test_a_connection_is_idle_when_neither_side_says_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes_rl.sandbox.proxy.IDLE_SECONDS", 2.0)

    async def slowly(writer: asyncio.StreamWriter) -> None:
        for _ in range(12):
            writer.write(b"x")
            await asyncio.sleep(0.25)
        writer.close()

    async def silently(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(600)
        writer.close()

    async with through_proxy(slowly) as reader:
        assert await reader.read() == b"x" * 12
    async with through_proxy(silently) as reader, asyncio.timeout(30):
        assert await reader.read() == b""


FLOOD = """
import socket, time
held = []
for _ in range(int(3000)):
    s = socket.socket(); s.setblocking(False)
    try: s.connect(("127.0.0.1", 3128))
    except BlockingIOError: pass
    held.append(s)
print("flooded", flush=True)
time.sleep(600)
"""


async def test_excess_connections_of_a_sandbox_use_no_host_resources(web: int) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async with (
        reaching(f"files.test:{web}") as other,
        create_sandbox(SandboxConfig(network=("files.test",), limits=ResourceLimits(open_files=4096))) as sandbox,
    ):
        before = descriptors()
        flood = await sandbox.spawn(["python3", "-c", FLOOD])
        await until(lambda: flood.poll() is not None or b"flooded" in flood.output())
        assert flood.poll() is None
        await until(lambda: descriptors() > before)
        await until(stays(descriptors, looks=20))
        assert 0 < descriptors() - before <= CONNECTIONS + 8
        assert await fetch(other, f"http://files.test:{web}/") == f"200 hello files.test:{web}"
        await flood.kill()


MALFORMED = [
    *(b"CONNECT " + host + b" HTTP/1.1\r\n\r\n" for host in (
        b"a..b:443", b"x" * 70 + b".test:443", b"\xff\xfe.test:443", b":443", b".test:443", b"a.test:0", b"%s:443",
        b"a.test:4\xb2", b"xn--\x80.test:443", b"a.test:443:443", b"[::1", b"a.test:" + b"9" * 5000)),
    *(b"GET " + url + b" HTTP/1.1\r\n\r\n" for url in (
        b"http://[::1", b"http://a\0b.test/", b"http://a.test:-1/", b"http://[v1.x]/", b"http://\x85/")),
    b"\r\n\r\n", b"\0\0\r\n\r\n", b"x" * 100_000,
]  # fmt: skip


async def test_malformed_proxy_request_is_refused_without_logged_errors(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostList, "require", lambda *_: None)
    proxy = Proxy(["x.test"])
    listener = socket.create_server(("127.0.0.1", 0))
    await proxy.listen(listener)
    for head in MALFORMED:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(head)
        writer.write_eof()
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionResetError):
                assert (await reader.read(12)) in (b"HTTP/1.1 403", b"HTTP/1.1 502", b""), head
        writer.close()
    await proxy.close()
    await asyncio.sleep(0)
    gc.collect()
    assert caplog.records == []
