"""roller bench: measurements of the project itself."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from roller_svc.bench.construct import bench_construct
from roller_svc.bench.published import TARGET, bench_published
from roller_svc.cli import show
from roller_svc.errors import ArgumentError

TARGETS = ("nvidia-v100-sxm2", "nvidia-a100-sxm-80gb", "nvidia-h200-sxm", "local")
CASES = Path(__file__).resolve().parents[2] / "bench" / "data" / "public.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    construct = kinds.add_parser(
        "construct", help="seconds from a program to its ranked candidates", allow_abbrev=False
    )
    construct.add_argument("--cases", metavar="FILE", help="a corpus; default: the public one, in a checkout")
    construct.add_argument("--target", action="append", default=[], metavar="ID", help="a device; may be repeated")
    construct.add_argument("--json", action="store_true", help="one JSON document on stdout, nothing else")

    model = kinds.add_parser("model", help="what the model expects beside published times", allow_abbrev=False)
    model.add_argument("--published", metavar="FILE", required=True, help="operators with the times others measured")
    model.add_argument("--target", default=TARGET, metavar="ID", help="the device (default: %(default)s)")
    model.add_argument("--json", action="store_true", help="one JSON document on stdout, nothing else")


def execute(options: argparse.Namespace) -> int:
    if options.kind == "model":
        results = bench_published(Path(options.published), options.target)
        shown = show.table(("class", "median |log ratio|"), _model_rows(results))
    else:
        results = bench_construct(_cases(options.cases), tuple(options.target) or TARGETS)
        shown = show.table(("target", "cases", "median", "p99", "max"), _construct_rows(results))
    if options.json:
        show.as_json(results)
    else:
        print(shown)
    return 0


def _cases(given: str | None) -> Path:
    cases = Path(given) if given else CASES
    if not cases.is_file():
        raise ArgumentError(f"no case file {cases}", code="unreadable-file", hint="--cases FILE names one")
    return cases


def _construct_rows(results: dict[str, Any]) -> list[tuple[object, ...]]:
    return [
        (target, len(one["cases"]), *(show.duration(one[key]) for key in ("median_s", "p99_s", "max_s")))
        for target, one in results["targets"].items()
    ]


def _model_rows(results: dict[str, Any]) -> list[tuple[object, ...]]:
    figures = {"overall": results["overall"]} | results["classes"]
    return [(name, f"{one['median_abs_log_ratio']:.3f}") for name, one in figures.items()]
