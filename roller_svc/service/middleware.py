"""ASGI middleware: host check, authorization, limits on bodies, and response headers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import unquote

from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars

from roller_svc.errors import ArgumentError, QueueFullError, StoreError
from roller_svc.service import refusals
from roller_svc.service.access import PROBE_PATHS, methods_of, needs_key
from roller_svc.service.authentication import Authenticator
from roller_svc.service.bodies import BodyError, check_json, max_value_count
from roller_svc.service.hits import HitAnswers
from roller_svc.service.hosts import Authority, is_own_host, is_same_origin, parse_authority
from roller_svc.service.problems import (
    RETRY_AFTER_S,
    RETRY_STATUSES,
    encode_problem,
    problem,
    retry_after_s,
    status_of,
)
from roller_svc.service.shares import Share, Shares, end_processing
from roller_svc.settings import Resource, Settings

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})
BLOBS_PATH = "/v1/blobs/"
MAX_TARGET_BYTES = 8192
MAX_PATHS = 1024  # whose methods are remembered
VALUES_PER_ITEM = 64  # JSON values per item of an estimate request, on average
FREE_VALUES = 1 << 14  # JSON values allowed regardless of the items
SMALL_BODY_BYTES = 1 << 16  # validated on the event loop


@dataclass(slots=True)
class _Exchange:
    """The state of one request."""

    unread: bool  # whether its body has not been read
    started: bool = False  # whether the response has started
    client: str = ""
    shares: list[Share] = field(default_factory=list)  # that a refusal gives back before it waits


class RequestLimitsMiddleware:
    """Rejects, as problem+json, requests that no route should see."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: Settings,
        authenticator: Authenticator,
        shares: Shares,
        routes: Iterable[APIRoute],
        hits: HitAnswers,
    ) -> None:
        self._app = app
        self._hits = hits
        self._max_body_bytes = settings.max_body_bytes
        self._max_blob_bytes = settings.max_blob_bytes
        self._max_values = FREE_VALUES + VALUES_PER_ITEM * settings.max_items
        self._authenticator = authenticator
        known_routes = tuple(routes)
        self._methods = lru_cache(MAX_PATHS)(lambda path: methods_of(known_routes, path))
        self._hosts = allowed_hosts(settings)
        self._shares = shares
        self._refusals = refusals.Refusals(shares.limits[Resource.REFUSALS])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(_has_body(Headers(scope=scope)))

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                if message["status"] in refusals.STATUSES:
                    await self._delay(scope, exchange)
                exchange.started = True
                headers = MutableHeaders(scope=message)
                headers["X-Content-Type-Options"] = "nosniff"
                if exchange.unread:
                    headers["Connection"] = "close"
            await send(message)

        try:
            await self._handle(scope, receive, send_with_headers, exchange)
        except asyncio.CancelledError:
            if not exchange.started:
                detail = "the service is shutting down; send the request again"
                await _send_problem(send_with_headers, problem(503, "shutting-down", detail))
            raise

    async def _delay(self, scope: Scope, exchange: _Exchange) -> None:
        """Wait before a refusal, if its client has too many."""
        seconds = self._refusals.count(exchange.client or _address_of(scope))
        if seconds:
            end_processing()
            for share in exchange.shares:
                share.close()
            await scope["state"]["pause"](seconds)

    async def _handle(self, scope: Scope, receive: Receive, send: Send, exchange: _Exchange) -> None:
        rejection = await self._request_problem(scope)
        if rejection is not None:
            await _send_problem(send, rejection)
            return
        try:
            share = self._hold_connection(scope, exchange)
        except QueueFullError as error:
            await _send_refusal(send, error)
            return
        exchange.shares.append(share)
        with share:
            await self._serve(scope, receive, send, exchange)

    def _hold_connection(self, scope: Scope, exchange: _Exchange) -> Share:
        """Use a connection of the client's part, or for a probe of those for probes. Raises QueueFullError."""
        principal = scope["state"].get("principal")
        exchange.client = _address_of(scope) if principal is None else principal.client
        resource = Resource.PROBES if scope["path"] in PROBE_PATHS else Resource.CONNECTIONS
        return self._shares.hold(resource, exchange.client)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, exchange: _Exchange) -> None:
        if not self._takes_body(scope) or not _has_content(Headers(scope=scope)):
            await self._process(scope, receive, send, exchange)
        elif _is_blob(scope):
            await self._process(scope, _note_end(receive, exchange), send, exchange)  # its route checks the body as it arrives
        else:
            await self._handle_body(scope, receive, send, exchange)

    async def _handle_body(self, scope: Scope, receive: Receive, send: Send, exchange: _Exchange) -> None:
        with self._shares.hold(Resource.BODY_BYTES, exchange.client, 0) as share:
            exchange.shares.append(share)
            refusal: QueueFullError | None = None
            try:
                self._shares.check(Resource.BODY_BYTES, exchange.client, _declared_bytes(Headers(scope=scope)))
                body = await self._read(receive, share)
            except QueueFullError as error:
                refusal = error.with_traceback(None)  # whose frames have the part of the body that was read
            if refusal is not None:
                await _send_refusal(send, refusal)
                return
            if isinstance(body, dict):
                await _send_problem(send, body)
                return
            exchange.unread = False
            with await self._shares.process(exchange.client):
                answer = await self._hits.find(scope, body)
            if answer is not None:  # a body that has an answer had no problem
                await send({"type": "http.response.start", "status": 200, "headers": list(answer.headers)})
                await send({"type": "http.response.body", "body": answer.body})
            elif (rejection := await self._body_problem(body)) is not None:
                await _send_problem(send, rejection)
            else:
                await self._process(scope, _replay_body(body, receive), send, exchange)

    async def _process(self, scope: Scope, receive: Receive, send: Send, exchange: _Exchange) -> None:
        """Give the request to the application, unless other requests of its client are first."""
        if scope["path"] in PROBE_PATHS:
            await self._app(scope, receive, send)
            return
        with await self._shares.process(exchange.client):
            await self._app(scope, receive, send)

    async def _request_problem(self, scope: Scope) -> dict[str, object] | None:
        """Return the problem of a request before its body is read, or None."""
        headers = Headers(scope=scope)
        rejection = _framing_problem(scope, headers) or self._host_problem(scope, headers)
        if rejection is not None:
            return rejection
        if needs_key(scope["path"]):
            try:
                principal = await self._authenticator.authenticate(headers)
            except StoreError as error:
                return problem(503, error.code, error.message)
            if principal is None:
                return problem(401, "unauthorized", "an API key is required: Authorization: Bearer KEY")
            scope["state"]["principal"] = principal
            bind_contextvars(client=principal.client)
        if self._takes_body(scope):
            max_bytes = self._max_blob_bytes if _is_blob(scope) else self._max_body_bytes
            if _declared_bytes(headers) > max_bytes:
                return too_large(max_bytes)
            if _is_blob(scope) or not _has_content(headers):
                return None
            media = headers.get("content-type", "").partition(";")[0].strip().lower()
            if media != "application/json" and not media.endswith("+json"):
                detail = f"unsupported media type: expected application/json, got {media[:100] or 'none'}"
                return problem(415, "unsupported-media-type", detail)
        return None

    def _takes_body(self, scope: Scope) -> bool:
        """Whether a route reads the body. That of another request is not read."""
        return scope["method"] in BODY_METHODS and scope["method"] in self._methods(scope["path"])

    def _host_problem(self, scope: Scope, headers: Headers) -> dict[str, object] | None:
        """Return the problem of a request for another host or from another site's page, or None."""
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            return problem(400, "malformed-request", f"invalid Host header: expected one, got {len(hosts)}")
        text = _take_authority(scope)
        requested = parse_authority(hosts[0] if text is None else text)
        if not scope["path"].startswith("/") and scope["path"] != "*":
            return problem(400, "malformed-request", "the request's target is not a path")
        if requested is None or not is_own_host(requested, scope.get("server"), self._hosts):
            hint = "set ROLLER_ALLOWED_HOSTS to the names of this service"
            return problem(421, "misdirected-request", f"the request is for another host; {hint}")
        origins = headers.getlist("origin")
        if scope["method"] not in SAFE_METHODS and not all(is_same_origin(origin, requested) for origin in origins):
            return problem(403, "foreign-origin", "the request was sent by another site's page")
        return None

    async def _read(self, receive: Receive, share: Share) -> bytes | dict[str, object]:
        """Return the whole body, or a problem if it is too large. Raises QueueFullError if all bodies together are."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return problem(400, "malformed-request", "the body is incomplete")
            part = message.get("body", b"")
            if len(body) + len(part) > self._max_body_bytes:
                return too_large(self._max_body_bytes)
            share.add(len(part))
            body += part
            if not message.get("more_body", False):
                return bytes(body)

    async def _body_problem(self, body: bytes) -> dict[str, object] | None:
        """Return the problem of a body that is not JSON or has too many values, or None."""
        if max_value_count(body) > self._max_values:
            return problem(413, "body-too-large", f"the body has too many values: the limit is {self._max_values}")
        try:
            if len(body) <= SMALL_BODY_BYTES:
                check_json(body)
            else:
                await asyncio.to_thread(check_json, body)
        except BodyError as error:
            return problem(400, "invalid-json", str(error))
        return None


def too_large(max_bytes: int) -> dict[str, object]:
    return problem(413, "body-too-large", f"the body is too large: the limit is {max_bytes} bytes")


def _address_of(scope: Scope) -> str:
    """Return the name of a client without a key."""
    address = scope.get("client") or ("",)
    return f"at {address[0]}"


def _is_blob(scope: Scope) -> bool:
    """Whether the body is a blob, which is not JSON and may be larger."""
    return bool(scope["method"] == "PUT" and scope["path"].startswith(BLOBS_PATH))


def allowed_hosts(settings: Settings) -> frozenset[Authority]:
    """Return the hosts that requests may name in addition to loopback and the local address."""
    named = {name: parse_authority(name) for name in settings.allowed_host_names}
    invalid = [name for name, host in named.items() if host is None]
    if invalid:
        raise ArgumentError(
            f"ROLLER_ALLOWED_HOSTS: {invalid[0][:100]!r} is not a host",
            code="invalid-setting",
            hint="write names as in kernels.example or kernels.example:8443, separated by commas",
        )
    bound = Authority(settings.host.lower(), settings.port)
    return frozenset(host for host in (bound, *named.values()) if host is not None)


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip("0") != ""


def _declared_bytes(headers: Headers) -> int:
    """Return the length of a body that comes in one piece; 0 for chunks."""
    length = headers.get("content-length", "0")
    return int(length[:20]) if length.isdecimal() else 0


def _has_content(headers: Headers) -> bool:
    """Whether a request has a body or says of which type it is."""
    return _has_body(headers) or "content-type" in headers


def _framing_problem(scope: Scope, headers: Headers) -> dict[str, object] | None:
    """Return the problem of a request that HTTP parsers may frame differently (RFC 9112 §6.1), or None."""
    if "transfer-encoding" in headers and ("content-length" in headers or scope["http_version"] == "1.0"):
        return problem(400, "malformed-request", "Transfer-Encoding with Content-Length, or in HTTP/1.0")
    if len(scope["raw_path"]) + len(scope["query_string"]) > MAX_TARGET_BYTES:
        return problem(414, "target-too-long", f"the request's target is too long: the limit is {MAX_TARGET_BYTES} bytes")
    return None


def _take_authority(scope: Scope) -> str | None:
    """Reduce an absolute-form target to its path; return its authority, which replaces Host (RFC 9112 §3.2.2)."""
    target: bytes = scope["raw_path"]
    scheme, separator, rest = target.partition(b"://")
    if scheme.lower() not in (b"http", b"https") or not separator:
        return None
    authority, _, path = rest.partition(b"/")
    scope["raw_path"] = b"/" + path
    scope["path"] = unquote(scope["raw_path"].decode("ascii"))
    return authority.decode("ascii")


def _note_end(receive: Receive, exchange: _Exchange) -> Receive:
    """Return the receive channel, which notes in the exchange that the body has been read."""

    async def next_message() -> Message:
        message = await receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            exchange.unread = False
        return message

    return next_message


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a receive channel that yields the body as one message, then the original messages."""
    sent = False

    async def next_message() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message


async def _send_refusal(send: Send, error: QueueFullError) -> None:
    await _send_problem(send, problem(status_of(type(error)), error.code, error.message), retry_after_s(error))


async def _send_problem(send: Send, body: dict[str, object], seconds: int = RETRY_AFTER_S) -> None:
    status, headers, content = encode_problem(body)
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status in RETRY_STATUSES:
        headers.append((b"retry-after", str(seconds).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
