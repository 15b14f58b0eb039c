"""An application behind a real socket, for tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import uvicorn
from fastapi import FastAPI

START_S = 30.0


@contextmanager
def served(app: FastAPI) -> Iterator[httpx.Client]:
    """A client of the application, which runs in a thread until the block ends."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    until = time.monotonic() + START_S
    while not server.started and thread.is_alive() and time.monotonic() < until:
        time.sleep(0.005)
    try:
        assert server.started
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()
