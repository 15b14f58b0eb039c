"""Metrics of HTTP requests: how many, by route, method and status, and how long clients wait for a response to begin."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry, Counter, Histogram

OTHER = "other"  # a route or a method that the service does not have: their number is bounded
NO_STATUS = "none"  # of a request whose client left before a response
MAX_PATHS = 1024  # whose series are remembered
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class RequestMetrics:
    """Counts the requests of this process.

    Args:
        registry: gets the metrics; None: they are read from the files of all processes.
        routes: of the application.
    """

    def __init__(self, registry: CollectorRegistry | None, routes: Iterable[APIRoute]) -> None:
        self._routes = tuple(routes)
        self._series_of = lru_cache(MAX_PATHS)(self._find_series)
        self._requests = Counter("roller_http_requests", "Requests", ["route", "method", "status"], registry=registry)
        self._seconds = Histogram(
            "roller_http_response_start_seconds",
            "Time until a response began, which includes the time that a client asked to wait",
            ["route", "method"],
            buckets=BUCKETS_S,
            registry=registry,
        )

    def observe(self, method: str, path: str, status: int | None, start_s: float | None) -> None:
        """Count a request that has ended.

        Args:
            method: of the request.
            path: of the request.
            status: of the response; None: there was none.
            start_s: seconds until the response began; None: it did not begin.
        """
        requests, seconds = self._series_of(method, path, status)
        requests.inc()
        if start_s is not None:
            seconds.observe(start_s)

    def _find_series(self, method: str, path: str, status: int | None) -> tuple[Counter, Histogram]:
        """Return the series of a request."""
        labels = _find_route(self._routes, method, path)
        return self._requests.labels(*labels, NO_STATUS if status is None else str(status)), self._seconds.labels(*labels)


def _find_route(routes: Iterable[APIRoute], method: str, path: str) -> tuple[str, str]:
    """Return the template of a request's route, and its method. The request need not have reached the route."""
    for route in routes:
        if method in (route.methods or ()) and route.path_regex.match(path):
            return route.path_format, method
    return OTHER, OTHER
