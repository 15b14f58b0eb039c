"""Host and Origin validation, which keeps other sites' pages from the service.

DNS rebinding can point any name at this machine, so only known names are accepted.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::([0-9]{1,5}))?")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Authority(NamedTuple):
    """A host in lower case (IPv6 addresses without brackets) and an optional port."""

    host: str
    port: int | None


def parse_authority(text: str) -> Authority | None:
    """Parse RFC 3986 host and port; return None for anything else, such as user information."""
    match = _AUTHORITY.fullmatch(text)
    if match is None:
        return None
    port = int(match[2]) if match[2] else None
    return Authority(match[1].strip("[]").lower(), port) if port is None or port < 1 << 16 else None


def is_own_host(requested: Authority, bound: tuple[str, int | None] | None, allowed: Collection[Authority]) -> bool:
    """Whether the requested host is this service; `bound` is the local address of the connection."""
    if requested in allowed or Authority(requested.host, None) in allowed:
        return True
    if bound is None or requested.port not in (None, bound[1]):
        return False
    if requested.host == "localhost":
        return True
    address = _address(requested.host)
    return address is not None and (address.is_loopback or address == _address(bound[0]))


def is_same_origin(origin: str, requested: Authority) -> bool:
    """Whether an origin is the requested host."""
    parts = _split(origin)
    if parts is None or parts.scheme not in _DEFAULT_PORTS or parts.path or parts.query or parts.fragment:
        return False
    sender = parse_authority(parts.netloc)
    default = _DEFAULT_PORTS[parts.scheme]
    return sender is not None and (sender.host, sender.port or default) == (requested.host, requested.port or default)


def _split(url: str) -> SplitResult | None:
    try:
        return urlsplit(url)
    except ValueError:
        return None


def _address(text: str) -> Address | None:
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
