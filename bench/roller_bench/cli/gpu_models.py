"""roller bench gpu-models: whole models compiled for GPUs, without a device."""

from __future__ import annotations

import argparse
from typing import Any

from roller_bench.cpu.report import machine
from roller_bench.zoo.gpu import PLANS, compile_models
from roller_svc import hardware
from roller_svc.cli import format as show
from roller_svc.cli import progress

TARGETS = ("nvidia-a100-sxm-80gb", "nvidia-h200-sxm")
COLUMNS = ("model", "target", "plan", "cold", "warm", "warm CPU", "classes", "launches", "seconds", "registers", "spills")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="models: ONNX files or JSON graphs")
    parser.add_argument("--target", action="append", default=[], metavar="ID", help="device; may be repeated")
    parser.add_argument(
        "--plans", default=",".join(PLANS), metavar="KIND,...", help="plans, compiled one after the other (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="write one JSON document to stdout")


def execute(options: argparse.Namespace) -> int:
    targets = tuple(options.target) or TARGETS
    for target in targets:
        hardware.load(target)  # refuse an unknown one before the first compile
    plans = options.plans.split(",")
    rows = compile_models(options.files, targets, plans)
    listed = list(progress.show_progress(rows, len(options.files) * len(targets), "models"))
    if options.json:
        show.print_json({"machine": machine(hardware.detect_local()), "settings": {"plans": plans}, "models": listed})
    else:
        print(show.format_table(COLUMNS, [_shown(row, plan) for row in listed for plan in plans]))
    return 1 if any("error" in plan for row in listed for plan in row["plans"].values()) else 0


def _shown(row: dict[str, Any], plan: str) -> list[str]:
    made = row["plans"][plan]
    if "cold" not in made:
        why = made.get("error") or f"{made['refused']['code']}: {made['refused']['reason']}"
        return [row["file"], row["target"], plan, why[:60], *["-"] * (len(COLUMNS) - 4)]
    seconds = made["lowerings"][made["plan"]]["seconds"]
    times = [made["cold"]["seconds"], made["warm"].get("seconds"), made["warm"].get("cpu_seconds")]
    registers = [str(kernel["registers"]) for kernel in made["joint_kernels"]]
    return [
        *(row["file"], row["target"], made["plan"]),
        *("-" if each is None else show.format_seconds(each) for each in times),
        *(str(made["classes"]), str(made["launches"]), show.format_seconds(seconds)),
        *(", ".join(registers) or "-", str(max(made["spills"].values(), default=0))),
    ]
