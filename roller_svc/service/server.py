"""Run the application by uvicorn, with bounded connections and a graceful shutdown."""

from __future__ import annotations

import contextlib
import resource
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI

from roller_svc.service.app import create_app
from roller_svc.service.connections import ConnectionLimits, ServiceConfig, descriptor_limit, fit_connections
from roller_svc.service.logs import configure_logging
from roller_svc.service.malloc import limit_arenas
from roller_svc.service.middleware import allowed_hosts
from roller_svc.service.processes import bind_shared, run_processes
from roller_svc.service.telemetry import open_tracing
from roller_svc.settings import Resource, Settings, forget_secrets

STOP_S = 10  # for running requests to finish at shutdown
KEEP_ALIVE_S = 5
MAX_DESCRIPTORS = 1 << 16
SWITCH_S = 0.0005  # for which a thread keeps the interpreter while another waits: the event loop's is one of many
MAX_PENDING = 1024  # connections that the kernel keeps until they are accepted; a further one is tried again after a second


class ServiceServer(uvicorn.Server):
    """Notifies the application of a shutdown before it waits for running requests.

    Args:
        config: of the server.
        on_start: called when it serves.
    """

    def __init__(self, config: ServiceConfig, on_start: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in (each for server in self.servers for each in server.sockets):
            with socket.fromfd(listener.fileno(), listener.family, listener.type) as same:
                same.listen(MAX_PENDING)  # uvicorn's backlog is also how many are accepted at once
        if self.started:
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.begin_shutdown()
        await super().shutdown(sockets)

    def begin_shutdown(self) -> None:
        """Wake the requests that wait for operations, so that they respond."""
        assert isinstance(self.config.app, FastAPI)
        self.config.app.state.roller.begin_shutdown()


def server_config(app: FastAPI, settings: Settings, **overrides: Any) -> ServiceConfig:
    """Return the server's configuration; `overrides` are options of uvicorn.Config."""
    allowed_hosts(settings)  # reports an invalid host now, not at the first request
    shares = app.state.roller.shares
    max_connections = sum(shares.limits[each].total for each in (Resource.CONNECTIONS, Resource.PROBES))
    limits = ConnectionLimits(max_connections, settings.header_timeout_s, settings.body_timeout_s, settings.body_timeout_s)
    options: dict[str, Any] = {
        "host": settings.host,
        "port": settings.port,
        "ws": "none",
        "server_header": False,
        "log_config": None,  # see service/logs.py
        "access_log": False,  # see service/request_log.py
        "backlog": fit_connections(descriptor_limit(), max_connections)[0],
        "timeout_keep_alive": KEEP_ALIVE_S,
        "timeout_graceful_shutdown": STOP_S,
    }
    return ServiceConfig(app, limits, **options | overrides)


def raise_descriptor_limit() -> None:
    """Raise the descriptor limit of this process to the hard limit or MAX_DESCRIPTORS."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def run_server(settings: Settings) -> bool:
    """Serve until a signal arrives; return False if the server could not start."""
    return _serve(settings) if settings.processes == 1 else run_processes(settings, serve_shared)


def serve_shared(settings: Settings, on_start: Callable[[], None]) -> None:
    """Serve by one of several processes, on their common port."""
    with bind_shared(settings.host, settings.port) as bound:
        _serve(settings, on_start, [bound])


def _serve(settings: Settings, on_start: Callable[[], None] = lambda: None, sockets: list[socket.socket] | None = None) -> bool:
    limit_arenas(settings.malloc_arenas)
    sys.setswitchinterval(SWITCH_S)
    raise_descriptor_limit()
    configure_logging(settings)
    tracing = open_tracing(settings)  # reads OTEL_* variables, some of them secrets
    forget_secrets()
    server = ServiceServer(server_config(create_app(settings, ready=True, tracing=tracing), settings), on_start)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn re-raises the signal that ended it
        server.run(sockets)
    return server.started
