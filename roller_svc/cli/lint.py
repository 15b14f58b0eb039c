"""roller lint: lint the machine code of a program's CUDA kernels."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from roller_svc.cli import format as show
from roller_svc.cli import options as common
from roller_svc.compiler.pipeline import build_kernel
from roller_svc.compiler.request import resolve_spec
from roller_svc.ir.options import KernelOptions
from roller_svc.ir.printer import text
from roller_svc.verify.lint_reports import check_target, lint_json, lint_reports


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_program(parser)
    common.add_device(parser)
    common.add_options(parser, KernelOptions, select="model")


def execute(options: argparse.Namespace) -> int:
    request = common.parse_request(options)
    check_target(resolve_spec(request))
    report = build_kernel(request)
    (result,) = lint_reports([report])
    facts = {"target": report.hardware.id, "expression": text(report.program), **lint_json(report, result)}
    show.print_result(options, facts, format_summary(facts))
    return 0


def format_summary(facts: Mapping[str, Any]) -> str:
    """Format the instruction counts of each launch, then the findings."""
    lines = [
        facts["expression"],
        f"for {facts['target']}, compiled in {show.format_seconds(facts['compile_seconds'])}:",
    ]
    for launch in facts["launches"]:
        lines += ["", _resources(launch), "  " + ", ".join(f"{name} {n}" for name, n in launch["counts"].items())]
    lines.append("")
    lines += [f"{f['launch'] or 'all'}: {f['kind']}: {f['message']}" for f in facts["findings"]] or ["no findings"]
    return "\n".join(lines)


def _resources(launch: Mapping[str, Any]) -> str:
    registers, shared = (
        f"{launch[name]}{'' if (planned := launch[f'planned_{name}']) is None else f' (planned {planned})'}"
        for name in ("registers_per_thread", "shared_bytes")
    )
    unit = "" if launch["unit"] is None else f" on {launch['unit']}"
    return (
        f"{launch['name']}{unit}: {launch['instructions']} instructions, registers {registers},"
        f" shared bytes {shared}, spilled bytes {launch['spill_bytes']}"
    )
