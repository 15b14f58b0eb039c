"""Responses whose content is read in parts while it is sent, so that a slow client holds few bytes of memory."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Protocol

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from roller_svc.errors import StoreError
from roller_svc.service.shares import Share

MAX_PART_BYTES = 1 << 20  # of a response, in memory while it is sent

log = logging.getLogger(__name__)


class Parts(Protocol):
    """A content of known size that is read in parts."""

    size_bytes: int

    def read(self) -> bytes:
        """Return the next part; empty at the end. May raise StoreError."""

    def close(self) -> None:
        """Free what reading takes."""


class PartsResponse(StreamingResponse):
    """A response of known size. If its content cannot be read to the end, the connection is cut.

    Args:
        parts: its content, which it closes.
        share: of the bytes of responses in memory. It uses some while it is sent.
        run: runs the reading of a part in a thread.
        media_type: of the content.
        headers: further ones.
    """

    def __init__(
        self,
        parts: Parts,
        share: Share,
        run: Callable[[Callable[[], bytes]], Awaitable[bytes]],
        media_type: str,
        headers: Mapping[str, str],
    ) -> None:
        self._parts = parts
        self._share = share
        self._run = run
        length = {"Content-Length": str(parts.size_bytes)}
        super().__init__(self._read(), media_type=media_type, headers={**headers, **length})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._share.add(min(self._parts.size_bytes, MAX_PART_BYTES))
            await super().__call__(scope, receive, send)
        finally:
            self._parts.close()
            self._share.close()

    async def _read(self) -> AsyncIterator[bytes]:
        while part := await self._run(self._parts.read):
            yield part

    async def stream_response(self, send: Send) -> None:
        """Send the content. A response that ends early lacks bytes, so the server cuts its connection."""
        try:
            await super().stream_response(send)
        except StoreError as error:
            log.warning("a response is cut: %s", error.message)
