"""The Grafana dashboard and the alert rules ask for metrics and labels that the service has."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from roller_svc.errors import QueueFullError
from roller_svc.farm.operations import CacheStatus
from roller_svc.farm.statistics import Figures, QueueFigures
from roller_svc.service.metrics import Metrics
from roller_svc.service.shares import Shares
from roller_svc.settings import LIMITS, Resource

DOCKER = Path(__file__).resolve().parents[2] / "docker"
DASHBOARD = json.loads((DOCKER / "grafana" / "roller.json").read_text())
FIGURES = Figures(
    queues=(QueueFigures("build.cuda", "queued", 3, 1.5),),
    ended={"ok": 2, "no-worker": 1},
    wait_s={0.5: 1.0},
    build_s={0.5: 2.0},
    workers={"active": 1},
)
ALERTS = [
    rule for group in yaml.safe_load((DOCKER / "prometheus" / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
METRIC = re.compile(r"\b(?:roller|process)_\w+")
OWN_LABELS = {"job", "instance"}  # that Prometheus adds to what it scrapes


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> Iterator[str]:
    for panel in panels():
        yield from (target["expr"] for target in panel["targets"])


def exposed() -> dict[str, set[str]]:
    """The labels of each metric that a service in use exposes."""
    metrics = Metrics()
    shares = Shares(LIMITS, metrics.count_refusal)
    with contextlib.suppress(QueueFullError):
        shares.hold(Resource.UPLOADS, "client", 100)
    for cache in CacheStatus:
        metrics.count(cache)
    metrics.of_requests([]).observe("GET", "/", 200, 0.1)
    samples: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.render(FIGURES, shares, free_bytes=1).decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, set()).update(sample.labels)
    return samples


@pytest.mark.parametrize("query", [*queries(), *(rule["expr"] for rule in ALERTS)])
def test_a_query_names_metrics_and_labels_that_are_exposed(query: str) -> None:
    known = exposed()
    names = METRIC.findall(query)
    assert names or "up{" in query
    matchers = re.findall(r"\{([^}]*)\}", query)
    labels = {label for each in matchers for label in re.findall(r"(\w+)\s*[=!]", each)}
    grouped = {label.strip() for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(",")}
    for name in names:
        assert name in known
        assert (labels | grouped) <= known[name] | OWN_LABELS


def test_every_metric_of_the_farm_is_shown() -> None:
    shown = {name for query in queries() for name in METRIC.findall(query) if name.startswith("roller_")}
    assert shown == {name for name in exposed() if name.startswith("roller_") and not name.endswith("_created")}


def test_an_alert_says_what_is_wrong_and_what_to_do() -> None:
    for rule in ALERTS:
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert rule["annotations"].keys() == {"summary", "action"}
        assert rule["for"]
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS)


def test_every_alert_is_explained() -> None:
    page = (DOCKER.parent / "docs" / "operating.md").read_text()
    assert [rule["alert"] for rule in ALERTS if f"`{rule['alert']}`" not in page] == []


def test_panels_have_titles_and_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert panel["title"]
        assert place["x"] + place["w"] <= 24
        assert not own & cells
        cells |= own
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_the_dashboard_runs_on_any_prometheus() -> None:
    assert {panel["datasource"]["uid"] for panel in panels()} == {"${datasource}"}
