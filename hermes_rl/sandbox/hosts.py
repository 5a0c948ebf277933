"""Which hosts a sandbox may reach: by name as the spec lists them, and by address as the internet has them.

Owns the two questions. A listed name is not enough: it may resolve to a service of this machine or of its cloud, now or
a moment later, so it is asked once, every address is looked at, and the connection goes to the address that was seen.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Sequence

from hermes_rl.errors import UserError

NAME = re.compile(r"(\*\.)?([a-z0-9_]([a-z0-9_-]*[a-z0-9_])?\.)*[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?\.?")
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class RefusedError(Exception):
    """This host may not be reached; the message is for the agent."""


class HostList:
    """The names of `sandbox.network`: ``pypi.org``, or ``*.example.com`` for everything below it, not itself."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = [host.lower().rstrip(".") for host in hosts]
        for host in self._hosts:
            if not (NAME.fullmatch(host) or _literal(host)):
                raise UserError(f"sandbox.network: {host!r} is no host name; expected pypi.org or *.example.com")

    def allows(self, host: str) -> bool:
        """Whether the list has this name."""
        name = host.lower().rstrip(".")
        return any(_matches(name, pattern) for pattern in self._hosts)


def _matches(name: str, pattern: str) -> bool:
    if pattern.startswith("*."):
        return name.endswith(pattern[1:]) and name != pattern[2:]
    return name == pattern


def is_public(address: str) -> bool:
    """True for an address of the internet; false for private, loopback, link-local and all other special ones."""
    found = _literal(address.partition("%")[0])
    return found is not None and all(part.is_global and not part.is_multicast for part in _meant(found))


def _literal(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _meant(address: Address) -> list[Address]:
    """The address, or the IPv4 addresses that are packed into an IPv6 one."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if address in NAT64:
        return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    packed = [part for part in (address.sixtofour, *(address.teredo or ())) if part is not None]
    return [address, *packed]


async def public_address(host: str, port: int) -> str:
    """The address to connect to.

    Raises:
        RefusedError: it has none, or one of them is not of the internet.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RefusedError(f"{host} cannot be resolved") from error
    addresses = [str(entry[4][0]) for entry in found]
    if not addresses or not all(is_public(address) for address in addresses):
        raise RefusedError(f"{host} is not an address of the internet")
    return addresses[0]
