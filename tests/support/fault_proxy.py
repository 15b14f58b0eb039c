"""A proxy of TCP connections that delays, cuts, refuses or holds back what passes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from waiting import PATIENCE_S


@dataclass
class Faults:
    """What happens to connections; it may be changed at any time."""

    delay_s: float = 0.0  # before each part
    part_bytes: int = 1 << 16  # of which it is delayed
    cut_after_bytes: int | None = None  # towards the client, on each of the next `cuts` connections
    cuts: int = 0
    refuses: bool = False  # new connections are closed at once
    holds: bool = False  # nothing passes until it is unset


class FaultProxy:
    """Passes connections on to a port of this machine, or to a Unix socket."""

    def __init__(self, target: int | str) -> None:
        self._target = target
        self.faults = Faults()
        self.connections = 0
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self, started: threading.Event, stop: asyncio.Event) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Begin to serve a connection. A task that is cancelled before it runs leaves a writer for `serve` to close."""
        self._writers.append(writer)
        self.connections += 1
        task = asyncio.ensure_future(self._serve_connection(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not self.faults.refuses:
                await self._pass_on(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # an end of the connection has gone, or the proxy ends
        finally:
            writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if isinstance(self._target, int):
            answers, requests = await asyncio.open_connection("127.0.0.1", self._target)
        else:
            answers, requests = await asyncio.open_unix_connection(self._target)
        self._writers.append(requests)
        limit: int | None = None
        if self.faults.cuts > 0:
            self.faults.cuts -= 1
            limit = self.faults.cut_after_bytes
        ways = [
            asyncio.ensure_future(self._copy(reader, requests, None)),
            asyncio.ensure_future(self._copy(answers, writer, limit)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            requests.transport.abort()
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, limit: int | None) -> None:
        """Copy until the source ends, or `limit` bytes have passed."""
        while part := await source.read(self.faults.part_bytes):
            while self.faults.holds:
                await asyncio.sleep(0.01)
            await asyncio.sleep(self.faults.delay_s)
            if limit is not None and len(part) >= limit:
                sink.write(part[:limit])
                await sink.drain()
                return
            limit = None if limit is None else limit - len(part)
            sink.write(part)
            await sink.drain()


@contextmanager
def fault_proxy(target: int | str) -> Iterator[FaultProxy]:
    """A proxy in a thread of its own, until the block ends."""
    proxy, started = FaultProxy(target), threading.Event()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    def run() -> None:
        with contextlib.closing(loop):
            loop.run_until_complete(proxy.serve(started, stop))

    thread = threading.Thread(target=run, name="fault-proxy")
    thread.start()
    assert started.wait(PATIENCE_S)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
