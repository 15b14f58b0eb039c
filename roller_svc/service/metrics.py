"""Metrics in Prometheus's text format: the farm's figures, and what this process was asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from roller_svc.farm.operations import CacheStatus
from roller_svc.farm.statistics import WINDOW_S, Figures
from roller_svc.service.request_metrics import RequestMetrics
from roller_svc.service.shares import Shares
from roller_svc.settings import Resource

MEDIA_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """Counters of this service, rendered together with figures of the farm.

    Args:
        is_shared: whether the counters of several processes are added up (processes.py).
    """

    def __init__(self, *, is_shared: bool = False) -> None:
        self._registry = CollectorRegistry()
        if is_shared:
            MultiProcessCollector(self._registry)  # type: ignore[no-untyped-call]  # it has no types
        self._own = None if is_shared else self._registry  # the collector reads those of all processes from files
        self._submissions = Counter(
            "roller_submissions",
            "Requests for builds that this service accepted, by how they met the cache",
            ["cache"],
            registry=self._own,
        )
        self._refusals = Counter(
            "roller_refusals",
            "Requests that exceeded a limit",
            ["resource", "status"],
            registry=self._own,
        )

    def count(self, cache: CacheStatus) -> None:
        """Count an accepted request."""
        self._submissions.labels(cache.value).inc()

    def submissions(self) -> dict[str, int]:
        """Return the requests that this service accepted, by how they met the cache."""
        values = {
            each.value: self._registry.get_sample_value("roller_submissions_total", {"cache": each.value}) for each in CacheStatus
        }
        return {cache: int(value or 0) for cache, value in values.items()}

    def count_refusal(self, resource: Resource, status: int) -> None:
        """Count a request that exceeded a limit."""
        self._refusals.labels(resource.value, str(status)).inc()

    def of_requests(self, routes: Iterable[APIRoute]) -> RequestMetrics:
        """Return the counters of requests to an application. Call it once."""
        return RequestMetrics(self._own, routes)

    def render(self, figures: Figures, shares: Shares, free_bytes: int) -> bytes:
        farm = CollectorRegistry()
        farm.register(_ShareCollector(shares))
        ProcessCollector(registry=farm)  # memory, CPU time and open files of this process
        farm.register(_FigureCollector(figures))
        Gauge("roller_store_free_bytes", "Free space where uploads arrive", registry=farm).set(free_bytes)
        return generate_latest(self._registry) + generate_latest(farm)


class _ShareCollector(Collector):
    def __init__(self, shares: Shares) -> None:
        self._shares = shares

    def collect(self) -> Iterator[Metric]:
        used = GaugeMetricFamily("roller_resource_used", "What clients use of each resource of this process", labels=["resource"])
        limit = GaugeMetricFamily("roller_resource_limit", "How much all clients may use of it", labels=["resource"])
        for resource, each in self._shares.limits.items():
            if each.total is not None and resource is not Resource.BUILDS:  # a total of all processes
                used.add_metric([resource], self._shares.used(resource))
                limit.add_metric([resource], each.total)
        yield used
        yield limit


class _FigureCollector(Collector):
    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        figures, window = self._figures, f"in the last {WINDOW_S:g} seconds"
        count = GaugeMetricFamily("roller_operations", "Operations that are not done", labels=["queue", "state"])
        oldest = GaugeMetricFamily(
            "roller_oldest_operation_seconds", "Age of the oldest operation that is not done", labels=["queue", "state"]
        )
        for each in figures.queues:
            count.add_metric([each.queue, each.state], each.count)
            oldest.add_metric([each.queue, each.state], each.oldest_s)
        yield count
        yield oldest
        ended = GaugeMetricFamily(
            "roller_recently_ended_operations", f"Operations that ended {window}, by error code", labels=["code"]
        )
        for code, number in figures.ended.items():
            ended.add_metric([code], number)
        yield ended
        for name, what, quantiles in (
            ("wait", "Seconds from the request to the last attempt", figures.wait_s),
            ("build", "Seconds of the last attempt", figures.build_s),
        ):
            family = GaugeMetricFamily(
                f"roller_recent_{name}_seconds", f"{what}, of operations that ended {window}", labels=["quantile"]
            )
            for quantile, seconds in quantiles.items():
                family.add_metric([f"{quantile:g}"], seconds)
            yield family
        workers = GaugeMetricFamily("roller_workers", "Workers that are alive", labels=["state"])
        for state, number in figures.workers.items():
            workers.add_metric([state], number)
        yield workers
