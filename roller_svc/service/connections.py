"""HTTP connections with limits on their number and on the time for requests and responses."""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from roller_svc.service.problems import RETRY_AFTER_S, encode_problem, problem
from roller_svc.settings import Limit, Resource

MAX_HEAD_BYTES = 1 << 14  # of a request line and its headers
FREE_CHUNKS = 1000  # chunks of a body without a minimum size
MIN_MEAN_CHUNK_BYTES = 64  # of the further chunks
MAX_BACKLOG = 128  # connections that the event loop accepts before it serves one
ACCEPT_ITERATIONS = 4  # of the event loop, from accepting connections to closing those they displace
RESERVED_DESCRIPTORS = 64  # for the store, workers and compilers
JOINED_BYTES = 1 << 16  # of writes that are sent together
LINGER_S = 2.0  # for a client that is still sending to read its response


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_connections: int
    header_timeout_s: float
    body_timeout_s: float
    write_timeout_s: float


def descriptor_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def fit_connections(descriptors: int, requested: int) -> tuple[int, int]:
    """Return the backlog and the number of connections that fit a descriptor limit."""
    if descriptors == resource.RLIM_INFINITY:
        return MAX_BACKLOG, requested
    backlog = max(1, min(MAX_BACKLOG, descriptors // 16))
    return backlog, max(1, min(requested, descriptors - RESERVED_DESCRIPTORS - ACCEPT_ITERATIONS * backlog))


def fit_limits(limits: Mapping[Resource, Limit], descriptors: int) -> dict[Resource, Limit]:
    """Return limits whose connections, those for probes included, fit a descriptor limit."""
    clients, probes = (limits[each].total or 0 for each in (Resource.CONNECTIONS, Resource.PROBES))
    _, fitting = fit_connections(descriptors, clients + probes)
    probes = min(probes, max(1, fitting // 4))
    clients = max(1, min(clients, fitting - probes))
    sizes = {Resource.CONNECTIONS: clients, Resource.PROBES: probes}
    return dict(limits) | {each: limits[each].scaled_to(size) for each, size in sizes.items()}


class OpenConnections:
    """The open connections of a server; those that wait for their client are ordered by waiting time."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: set[BoundedConnection] = set()
        self._waiting: dict[BoundedConnection, None] = {}

    def admit(self, connection: BoundedConnection) -> bool:
        """Add a connection; abort the longest waiting ones beyond the limit. Return False if it must close itself."""
        self._open.add(connection)
        self.begin_waiting(connection)
        while len(self._open) > self._limit:
            oldest = next(iter(self._waiting))
            if oldest is connection:
                return False
            self.remove(oldest)
            oldest.transport.abort()
        return True

    def begin_waiting(self, connection: BoundedConnection) -> None:
        if connection in self._open:
            self._waiting.pop(connection, None)
            self._waiting[connection] = None

    def end_waiting(self, connection: BoundedConnection) -> None:
        self._waiting.pop(connection, None)

    def remove(self, connection: BoundedConnection) -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)


class ServiceConfig(uvicorn.Config):
    """Uvicorn's configuration, with the limits and the open connections of the server."""

    def __init__(self, app: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(app, http=BoundedConnection, **options)
        self.limits = limits
        self.open_connections = OpenConnections(limits.max_connections)


class Phase(Enum):
    HEADERS = auto()  # receiving the request line and headers
    BODY = auto()  # receiving the body
    RESPONDING = auto()  # the request is complete
    IDLE = auto()  # between two requests


class BoundedConnection(H11Protocol):
    """Uvicorn's connection with deadlines, a bounded number of chunks, and errors as problem+json."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        assert isinstance(config, ServiceConfig)
        self.conn = _CountingConnection()
        self._limits = config.limits
        self._open = config.open_connections
        self._phase: Phase | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        self._is_rejected = False
        self._is_urgent = asyncio.Event()  # nothing shall wait any more
        self.app_state = app_state | {"pause": self.pause}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        socket = cast(asyncio.Transport, transport)
        super().connection_made(_LingeringTransport(socket, self.loop, self._close_gracefully))
        if self._open.admit(self):
            self._track_phase()
        else:
            self._is_rejected = True
            self._reject(problem(503, "too-many-connections", "the service has too many open connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._is_urgent.set()
        self._open.remove(self)
        self._set_deadline(None)
        self._cancel_write_deadline()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return  # ignore data after a rejection
        super().data_received(data)
        self._track_phase()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._track_phase()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._cancel_write_deadline()
        self._write_deadline = self.loop.call_later(self._limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._cancel_write_deadline()
        super().resume_writing()

    async def pause(self, seconds: float) -> None:
        """Wait before a response, unless the client leaves or the server stops. Others may have the connection meanwhile."""
        self._open.begin_waiting(self)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_urgent.wait(), seconds)
        if self._phase is Phase.RESPONDING:
            self._open.end_waiting(self)

    def shutdown(self) -> None:
        self._is_urgent.set()
        if self.transport.is_closing():
            self.transport.abort()
        elif self._phase is Phase.BODY:
            self._reject(problem(503, "shutting-down", "the service is shutting down; send the request again"))
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Respond to a request that h11 rejected; uvicorn calls this while it handles h11's exception."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if status == 413:
            self._reject(problem(413, "body-too-large", "the body has too many small chunks"))
        elif status == 431 and b"\n" not in self.conn.trailing_data[0]:
            self._reject(problem(414, "target-too-long", "the request line is too long"))
        elif status == 431:
            detail = f"request line and headers are too large: the limit is {MAX_HEAD_BYTES} bytes"
            self._reject(problem(431, "headers-too-large", detail))
        else:
            self._reject(problem(400, "malformed-request", "the request is not well-formed HTTP/1.1"))

    def _track_phase(self) -> None:
        """Update the phase, and the deadline for the client's next step."""
        if self.transport.is_closing():
            return
        phase = self._current_phase()
        if phase is self._phase:
            return
        self._phase = phase
        if phase is Phase.RESPONDING:
            self._open.end_waiting(self)
        else:
            self._open.begin_waiting(self)
        limits = {Phase.HEADERS: self._limits.header_timeout_s, Phase.BODY: self._limits.body_timeout_s}
        self._set_deadline(limits.get(phase), self._expire)

    def _current_phase(self) -> Phase:
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            return Phase.BODY
        if state is not h11.IDLE:
            return Phase.RESPONDING
        # uvicorn's timer for idle connections runs until the first byte of the next request
        return Phase.IDLE if self.timeout_keep_alive_task is not None else Phase.HEADERS

    def _expire(self) -> None:
        """Reject a request that did not arrive in time."""
        if self._phase is Phase.HEADERS and not self.conn.trailing_data[0]:
            self.transport.close()
            return
        part, seconds = "head", self._limits.header_timeout_s
        if self._phase is Phase.BODY:
            part, seconds = "body", self._limits.body_timeout_s
        self._reject(problem(408, "request-timeout", f"the request's {part} did not arrive within {seconds:g} s"))

    def _reject(self, body: dict[str, object]) -> None:
        """Respond unless the application has started to, then close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            status, headers, content = encode_problem(body)
            headers = [*self.server_state.default_headers, *headers, (b"connection", b"close")]
            if status == 503:
                headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
            is_head = self.conn.our_state is h11.SEND_RESPONSE and self.scope["method"] == "HEAD"
            parts = [
                self.conn.send(h11.Response(status_code=status, headers=headers, reason=str(body["title"]).encode())),
                self.conn.send(h11.Data(data=b"" if is_head else content)),
                self.conn.send(h11.EndOfMessage()),
            ]
            self.transport.write(b"".join(part for part in parts if part))
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _close_gracefully(self, socket: asyncio.Transport) -> None:
        """Close after a client that is still sending has read its response (RFC 9112 §9.6)."""
        self._open.begin_waiting(self)
        is_sending = self._is_rejected or self.conn.their_state in (h11.SEND_BODY, h11.ERROR)
        if not is_sending or not socket.can_write_eof():
            socket.close()
            self._set_deadline(self._limits.write_timeout_s, socket.abort)
            return
        try:
            self.flow.resume_reading()
            socket.write_eof()
        except OSError:  # the client has gone
            socket.abort()
            return
        self._set_deadline(LINGER_S, socket.abort)

    def _set_deadline(self, seconds: float | None, act: Callable[[], None] = lambda: None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, act)

    def _cancel_write_deadline(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None


class _CountingConnection(h11.Connection):
    """h11's server side that rejects bodies of many tiny chunks: each costs as much as a large one."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self._chunks = 0
        self._body_bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._body_bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._body_bytes += len(event.data)
            if self._chunks > FREE_CHUNKS + self._body_bytes // MIN_MEAN_CHUNK_BYTES:
                self._process_error(self.their_role)
                raise h11.RemoteProtocolError("too many small chunks", error_status_hint=413)
        return event


class _LingeringTransport(asyncio.Transport):
    """A socket's transport whose connection decides how to close it.

    It sends the writes of one iteration of the event loop together, so that a short response is one packet.
    """

    def __init__(
        self, socket: asyncio.Transport, loop: asyncio.AbstractEventLoop, on_close: Callable[[asyncio.Transport], None]
    ) -> None:
        super().__init__()
        self._socket = socket
        self._loop = loop
        self._on_close = on_close
        self._has_closed = False
        self._waiting: list[bytes | bytearray | memoryview] = []
        self._waiting_bytes = 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._socket.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self._has_closed or self._socket.is_closing()

    def close(self) -> None:
        if not self._has_closed:
            self._flush()
            self._has_closed = True
            self._on_close(self._socket)

    def abort(self) -> None:
        self._has_closed = True
        self._socket.abort()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not data:
            return
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        if self._waiting_bytes >= JOINED_BYTES:
            self._flush()

    def pause_reading(self) -> None:
        self._socket.pause_reading()

    def resume_reading(self) -> None:
        self._socket.resume_reading()

    def _flush(self) -> None:
        if self._waiting and not self._socket.is_closing():
            self._socket.write(b"".join(self._waiting))
        self._waiting.clear()
        self._waiting_bytes = 0
