"""ASGI middleware: the id of each request, its log record, and the context of what is logged meanwhile."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars, clear_contextvars

from roller_svc.service.access import OPEN_PATHS
from roller_svc.service.request_metrics import RequestMetrics

REQUEST_ID = "X-Request-Id"
MAX_PATH_CHARACTERS = 200  # in a record
_VALID_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

log = logging.getLogger(__name__)


class RequestLogMiddleware:
    """Gives each request an id, the client's if it is valid, and logs its end with what routes bind to the context.

    Args:
        app: handles the requests.
        metrics: counts them.
    """

    def __init__(self, app: ASGIApp, *, metrics: RequestMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = choose_request_id(Headers(scope=scope).getlist(REQUEST_ID))
        scope.setdefault("state", {})["request_id"] = request_id
        clear_contextvars()  # of an earlier request in the same task
        bind_contextvars(request_id=request_id)
        status: int | None = None
        response_start_s: float | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status, response_start_s
            if message["type"] == "http.response.start":
                status, response_start_s = message["status"], time.perf_counter() - start_s
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        start_s = time.perf_counter()
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            status = status or 500
            raise
        finally:
            self._metrics.observe(scope["method"], scope["path"], status, response_start_s)
            _log_request(scope, status, time.perf_counter() - start_s)


def choose_request_id(offered: list[str]) -> str:
    """Return the id that a client offered if it is one valid id, or a new one."""
    if len(offered) == 1 and _VALID_ID.fullmatch(offered[0]):
        return offered[0]
    return uuid.uuid4().hex[:16]


def _log_request(scope: Scope, status: int | None, seconds: float) -> None:
    """Log a request. It has no status if its client left before a response; probes are logged at level debug."""
    level = logging.DEBUG if scope["path"] in OPEN_PATHS and status == 200 else logging.INFO
    if not log.isEnabledFor(level):
        return
    path = scope.get("raw_path", b"").decode("ascii", "replace")[:MAX_PATH_CHARACTERS]
    fields = {"method": scope["method"], "path": path, "status": status, "seconds": round(seconds, 6)}
    log.log(level, "request", extra=fields)
