"""Compress responses for clients that accept gzip, by the weights of Accept-Encoding (RFC 9110, 12.5.3)."""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import Receive, Scope, Send

_CODING = re.compile(r"\s*([\w!#$%&'*+.^`|~-]+)\s*(?:;\s*q\s*=\s*(0(?:\.\d{0,3})?|1(?:\.0{0,3})?)\s*)?", re.ASCII | re.IGNORECASE)


def accepts_gzip(headers: Headers) -> bool:
    """Return whether a request accepts gzip, and does not prefer a response as it is. What is not well-formed counts as 0."""
    weights: dict[str, float] = {}
    for coding in ",".join(headers.getlist("Accept-Encoding")).split(","):
        match = _CODING.fullmatch(coding)
        if match is not None:
            weights[match[1].lower()] = float(match[2] or 1)
    gzip = weights.get("gzip", weights.get("x-gzip", weights.get("*", 0.0)))
    return gzip > 0 and gzip >= weights.get("identity", 0.0)


class CompressionMiddleware(GZipMiddleware):
    """GZipMiddleware, which looks for the word gzip alone, for the requests that accept gzip."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            rest = [(name, value) for name, value in scope["headers"] if name != b"accept-encoding"]
            is_accepted = accepts_gzip(Headers(scope=scope))
            scope["headers"] = [*rest, (b"accept-encoding", b"gzip" if is_accepted else b"identity")]
        await super().__call__(scope, receive, send)
