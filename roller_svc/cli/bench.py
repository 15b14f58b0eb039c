"""roller bench: measurements of the project itself."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from roller_svc.bench.construct import bench_construct
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


def execute(options: argparse.Namespace) -> int:
    cases = Path(options.cases) if options.cases else CASES
    if not cases.is_file():
        raise ArgumentError(f"no case file {cases}", code="unreadable-file", hint="--cases FILE names one")
    results: dict[str, Any] = dict(bench_construct(cases, tuple(options.target) or TARGETS))
    if options.json:
        show.as_json(results)
    else:
        print(show.table(("target", "cases", "median", "p99", "max"), _rows(results)))
    return 0


def _rows(results: dict[str, Any]) -> list[tuple[object, ...]]:
    return [
        (target, len(one["cases"]), *(show.duration(one[key]) for key in ("median_s", "p99_s", "max_s")))
        for target, one in results["targets"].items()
    ]
