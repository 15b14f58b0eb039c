"""roller bench tuning: models by kernels that were measured alone, and by those that trials in calls have chosen."""

from __future__ import annotations

import argparse
import os
from typing import Any

from roller_bench.cpu.report import machine
from roller_bench.zoo.gain import bench_gains, summarize_gains
from roller_svc import hardware
from roller_svc.cli import format as show
from roller_svc.cli import options as common
from roller_svc.cli import progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE.onnx", help="models")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="threads (default: %(default)s)"
    )
    parser.add_argument(
        "--limit", type=float, default=1440.0, metavar="S", help="seconds for all models; each has a share (default: %(default)s)"
    )
    common.add_calibration(parser)
    parser.add_argument("--json", action="store_true", help="write one JSON document to stdout")


def execute(options: argparse.Namespace) -> int:
    common.check_positive(options, "threads", "limit")
    common.calibrate_local(options, hardware.LOCAL)
    rows = bench_gains(options.files, options.threads, options.limit)
    listed = list(progress.show_progress(rows, len(options.files), "models"))
    summary = summarize_gains(listed)
    if options.json:
        settings = {"threads": options.threads, "limit_s": options.limit}
        described = machine(hardware.load(hardware.LOCAL))
        show.print_json({"machine": described, "settings": settings, "summary": summary, "models": listed})
    else:
        columns = ("model", "alone", "tuned", "times as fast", "trials", "calls", "wrong", "ended", "notes")
        print(show.format_table(columns, [show_row(row) for row in listed]))
        print(", ".join(f"{name.replace('_', ' ')}: {value:.4g}" for name, value in summary.items()))
    return 0 if all("error" not in row and not row["wrong"] for row in listed) else 1


def show_row(row: dict[str, Any]) -> list[str]:
    """Return the cells of a model."""
    if "error" in row:
        return [row["file"], row["error"], *[""] * 7]
    alone, tuned, ended = (show.format_seconds(row[name]) for name in ("alone_s", "tuned_s", "ended_s"))
    counts = [str(row[name]) for name in ("trials", "calls", "wrong")]
    return [row["file"], alone, tuned, f"{row['speedup']:.3f}", *counts, ended, ", ".join(row["notes"])]
