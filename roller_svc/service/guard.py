"""What stands before the routes, as ASGI: body size, media type, API key, request id and the answer's fixed headers."""

from __future__ import annotations

import hmac
import json
import uuid
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from roller_svc.service.problems import MEDIA_TYPE, problem

OPEN_PATHS = frozenset({"/healthz", "/readyz"})


class Guard:
    """Refuses what no route should see; a refusal is problem+json like any other."""

    def __init__(self, app: ASGIApp, *, body_bytes_most: int, keys: Iterable[str]) -> None:
        self._app = app
        self._body_bytes_most = body_bytes_most
        self._keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex[:16]

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                headers["X-Content-Type-Options"] = "nosniff"
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            await _answer(marked, refusal)
            return
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, marked)
            return
        body = await self._body(receive)
        if body is None:
            await _answer(marked, self._too_large())
            return
        await self._app(scope, _replayed(body, receive), marked)

    def _refusal(self, scope: Scope) -> dict[str, object] | None:
        headers = Headers(scope=scope)
        if self._keys and scope["path"] not in OPEN_PATHS and not self._known(headers):
            return problem(401, "unauthorized", "this service wants an API key: Authorization: Bearer KEY")
        if scope["method"] in ("POST", "PUT", "PATCH"):
            length = headers.get("content-length", "0")
            if length.isdecimal() and int(length[:20]) > self._body_bytes_most:
                return self._too_large()
            media = headers.get("content-type", "").partition(";")[0].strip().lower()
            if media != "application/json" and not media.endswith("+json"):
                return problem(
                    415, "unsupported-media-type", f"the body must be application/json, not {media or 'unnamed'}"
                )
        return None

    def _known(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        offered = (given if scheme.lower() == "bearer" else headers.get("x-api-key", "")).encode()
        # every key is compared, so that the time taken says nothing
        return sum(hmac.compare_digest(offered, key) for key in self._keys) > 0

    async def _body(self, receive: Receive) -> bytes | None:
        """The whole body; None once it is too large."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return b"".join(parts)
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._body_bytes_most:
                return None
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> dict[str, object]:
        return problem(413, "body-too-large", f"a body may have {self._body_bytes_most} bytes at most")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body in one message, then whatever comes."""
    given = False

    async def next_message() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message


async def _answer(send: Send, body: dict[str, object]) -> None:
    content = json.dumps(body).encode()
    headers = [(b"content-type", MEDIA_TYPE.encode()), (b"content-length", str(len(content)).encode())]
    if body["status"] == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": body["status"], "headers": headers})
    await send({"type": "http.response.body", "body": content})
