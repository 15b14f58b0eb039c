"""An application behind a real socket, for tests."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from fastapi import FastAPI
from waiting import PATIENCE_S, wait_until

from roller_svc.service.server import ServiceServer, server_config


@contextmanager
def running(app: FastAPI) -> Iterator[tuple[ServiceServer, int]]:
    """A server of the application and its port; it runs in a thread until the block ends."""
    config = server_config(app, app.state.roller.settings, host="127.0.0.1", port=0, log_level="warning")
    server = ServiceServer(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        assert server.started
        yield server, server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def served(app: FastAPI) -> Iterator[httpx.Client]:
    """A client of the application, which runs until the block ends."""
    with running(app) as (_, port), httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
        yield client


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    """A plain connection, for what no HTTP client would send."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        yield connection


def received(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def answer_of(connection: socket.socket) -> bytes:
    """One answer with a Content-Length, on a connection that stays open; what came where it closes before."""
    answer = b""
    while True:
        head, separator, content = answer.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        if separator and length and len(content) >= int(length[1]):
            return answer
        part = connection.recv(1 << 16)
        if not part:
            return answer
        answer += part


def exchanged(port: int, request: bytes) -> tuple[int, dict[str, Any]]:
    """Status and problem of one request, after which the server closes or the client has asked it to."""
    with connected(port) as connection:
        connection.sendall(request)
        return parsed(received(connection))


def parsed(answer: bytes) -> tuple[int, dict[str, Any]]:
    """The first answer of a connection: its status, and its content where that is JSON."""
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content) if b"json" in head and content else {}
