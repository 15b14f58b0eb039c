"""roller bench model-zoo: whole models on this CPU, ours and other engines'."""

from __future__ import annotations

import argparse
import os
from typing import Any

from roller_bench.cpu.report import machine
from roller_bench.zoo.run import BASELINES, bench_models
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
        "--peers",
        default="onnxruntime",
        dest="baselines",
        metavar="NAME,...",
        help=f"engines to compare with, of {', '.join(BASELINES)} (default: %(default)s)",
    )
    parser.add_argument(
        "--select",
        default="measure",
        metavar="HOW",
        help="measure: time the candidates of each kernel; model: trust the ranking (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        metavar="N",
        help="times that each engine runs, in turns; least times count (default: %(default)s)",
    )
    parser.add_argument(
        "--modules",
        metavar="FILE.py",
        help="torch modules for inductor: build(name) returns module, inputs, names of inputs and of outputs",
    )
    parser.add_argument(
        "--quantize",
        action="store_true",
        help="time the models that onnxruntime's tool quantizes: uint8 activations, int8 weights with a scale of each channel",
    )
    common.add_calibration(parser)
    parser.add_argument("--json", action="store_true", help="write one JSON document to stdout")


def execute(options: argparse.Namespace) -> int:
    common.check_positive(options, "threads", "rounds")
    common.calibrate_local(options, hardware.LOCAL)
    baselines = [name for name in options.baselines.split(",") if name]
    rows = bench_models(
        options.files,
        options.threads,
        baselines,
        options.select,
        options.rounds,
        options.modules,
        is_quantized=options.quantize,
    )
    listed = list(progress.show_progress(rows, len(options.files), "models"))
    if options.json:
        show.print_json(
            {
                "machine": machine(hardware.load(hardware.LOCAL)),
                "settings": {
                    "threads": options.threads,
                    "peers": baselines,
                    "select": options.select,
                    "rounds": options.rounds,
                    "quantized": options.quantize,
                },
                "models": listed,
            }
        )
    else:
        print(show.format_table(("model", "ours", *baselines, "ratio", "compile", "warm"), [_shown(r, baselines) for r in listed]))
    return 0 if all("error" not in row["ours_ms"] for row in listed) else 1


def _shown(row: dict[str, Any], baselines: list[str]) -> list[str]:
    engines = [row["ours_ms"], *(row["peers"].get(name, {"error": "not run"}) for name in baselines)]
    times = [each.get("error", "")[:60] or f"{each['min']:.3g} ({each['median']:.3g}) ms" for each in engines]
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
    seconds = [show.format_seconds(row[name]) for name in ("compile_s", "warm_compile_s")]
    return [row["file"], *times, ratio, *seconds]
