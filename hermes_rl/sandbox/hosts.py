"""Decide which hosts a sandbox may reach: by name from the spec's list, and by address only public ones.

A listed name is not enough: it may resolve to a service of this machine or of its cloud, now or a moment later. So a
name is resolved once, every address is checked, and the connection goes to a checked address.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Sequence

from hermes_rl.errors import UserError

HOST_NAME = re.compile(r"(\*\.)?([a-z0-9_]([a-z0-9_-]*[a-z0-9_])?\.)*[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?\.?")
WITH_PORT = re.compile(r"(?P<name>[^:]+|\[[^\]]+\]):(?P<port>[0-9]{1,5})")
PORTS: tuple[int, ...] = (80, 443)
"""Ports of a listed host that may be reached if its entry names none."""
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
ISATAP = (0x00005EFE, 0x02005EFE)
"""The third quarter of an IPv6 address whose last quarter is an IPv4 address."""
SPECIAL_NETWORKS = tuple(
    ipaddress.ip_network(network)
    for network in (
        *("::/96", "::ffff:0:0:0/96"),  # old forms of IPv4 in IPv6: compatible, and translated
        *("64:ff9b:1::/48", "fec0::/10", "100::/64", "3fff::/20", "5f00::/16"),  # translation inside a site, …
        *("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32"),  # protocols, relays of 6to4, metadata of clouds
    )
)
"""Special addresses that Python considers public."""
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class RefusedError(Exception):
    """This host may not be reached; the message is for the agent."""


class HostList:
    """Entries of `sandbox.network`: ``pypi.org``, or ``*.example.com`` for all its subdomains, without itself.

    An entry is for the ports 80 and 443, or for the one that it names: ``pypi.org:8080``.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = [_parse_entry(host) for host in hosts]

    def require(self, host: str, port: int) -> None:
        """Raise `RefusedError` unless the list contains this port of this name."""
        name = host.lower().rstrip(".")
        allowed_ports = {
            allowed_port for pattern, ports in self._hosts if _name_matches(name, pattern) for allowed_port in ports
        }
        if port in allowed_ports:
            return
        subject, others = (f"port {port} of {host}", ", other ports are") if allowed_ports else (host, "")
        raise RefusedError(f"{subject} is not among the hosts of sandbox.network{others}")


def _parse_entry(text: str) -> tuple[str, tuple[int, ...]]:
    """Return an entry's name, and its ports."""
    host, ports = text.lower().rstrip("."), PORTS
    if (match := WITH_PORT.fullmatch(host)) is not None and _parse_address(host) is None:
        host, ports = match["name"].strip("[]").rstrip("."), (int(match["port"]),)
    if not (HOST_NAME.fullmatch(host) or _parse_address(host)) or not all(0 < port < 1 << 16 for port in ports):
        raise UserError(f"sandbox.network: invalid host {text!r}; expected pypi.org, *.example.com or pypi.org:8080")
    return host, ports


def _name_matches(name: str, pattern: str) -> bool:
    if pattern.startswith("*."):
        return name.endswith(pattern[1:]) and name != pattern[2:]
    return name == pattern


def is_public(address: str) -> bool:
    """Return True for a public address: not private, loopback, link-local or otherwise special."""
    literal = _parse_address(address.partition("%")[0])
    return literal is not None and all(
        meant.is_global and not meant.is_multicast and not any(meant in network for network in SPECIAL_NETWORKS)
        for meant in _meant_addresses(literal)
    )


def _parse_address(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _meant_addresses(address: Address) -> list[Address]:
    """Return the address, or the IPv4 addresses that are packed into an IPv6 one."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if address in NAT64:
        return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    packed = [part for part in (address.sixtofour, *(address.teredo or ())) if part is not None]
    if int(address) >> 32 & 0xFFFFFFFF in ISATAP:
        packed.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return [address, *packed]


async def public_address(host: str, port: int) -> str:
    """Return the address to connect to; raises `RefusedError` if there is none, or one is not public."""
    try:
        resolved = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # a label that is empty or too long cannot be encoded
        raise RefusedError(f"{host} cannot be resolved") from error
    addresses = [str(entry[4][0]) for entry in resolved]
    if not addresses or not all(is_public(address) for address in addresses):
        raise RefusedError(f"{host} is not an address of the internet")
    return addresses[0]
