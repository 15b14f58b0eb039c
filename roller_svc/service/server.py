"""The server: an application and settings → uvicorn with bounded connections, and an end that answers who waits."""

from __future__ import annotations

import contextlib
import resource
import socket
from typing import Any

import uvicorn
from fastapi import FastAPI

from roller_svc.service.app import create_app
from roller_svc.service.connections import ConnectionLimits, ServiceConfig
from roller_svc.service.middleware import allowed_hosts
from roller_svc.settings import Settings, forget_secrets

STOP_S = 10  # what requests under way get before the service ends
KEEP_ALIVE_S = 5
MAX_BACKLOG = 128  # connections that the loop accepts before it looks at one of them
ACCEPT_ITERATIONS = 4  # of the loop, from accepting connections to closing those that they displace
RESERVED_DESCRIPTORS = 64  # for the store, workers and compilers
MAX_DESCRIPTORS = 1 << 16


class ServiceServer(uvicorn.Server):
    """Tells the application that the end begins, before it waits for requests under way."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.begin_shutdown()
        await super().shutdown(sockets)

    def begin_shutdown(self) -> None:
        """Wake who waits for an operation, so that each has an answer."""
        assert isinstance(self.config.app, FastAPI)
        self.config.app.state.roller.begin_shutdown()


def server_config(app: FastAPI, settings: Settings, **overrides: Any) -> ServiceConfig:
    """How the service is served; `overrides` are options of uvicorn.Config."""
    allowed_hosts(settings)  # a wrong one is told now, and not at the first request
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    backlog, max_connections = fit_connections(soft, settings.connections_most)
    limits = ConnectionLimits(
        max_connections, settings.header_timeout_s, settings.body_timeout_s, settings.body_timeout_s
    )
    options: dict[str, Any] = {
        "host": settings.host,
        "port": settings.port,
        "ws": "none",
        "server_header": False,
        "backlog": backlog,
        "timeout_keep_alive": KEEP_ALIVE_S,
        "timeout_graceful_shutdown": STOP_S,
    }
    return ServiceConfig(app, limits, **options | overrides)


def fit_connections(descriptors: int, requested: int) -> tuple[int, int]:
    """The backlog, and the connections that leave descriptors for it and for everything else."""
    if descriptors == resource.RLIM_INFINITY:
        return MAX_BACKLOG, requested
    backlog = max(1, min(MAX_BACKLOG, descriptors // 16))
    return backlog, max(1, min(requested, descriptors - RESERVED_DESCRIPTORS - ACCEPT_ITERATIONS * backlog))


def raise_descriptor_limit() -> None:
    """Take as many descriptors as this process may have, within reason."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def run_server(settings: Settings) -> bool:
    """Serve until a signal; False where the server could not start."""
    raise_descriptor_limit()
    forget_secrets()
    server = ServiceServer(server_config(create_app(settings, ready=True), settings))
    with contextlib.suppress(KeyboardInterrupt):  # the signal that ended it, which uvicorn raises again
        server.run()
    return server.started
