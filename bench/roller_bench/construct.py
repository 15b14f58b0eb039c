"""Time construction: from the kernel groups of a program to their ranked candidates."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roller_bench.cases import BenchCase, performance_cases
from roller_svc import hardware
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.rank import rank_units
from roller_svc.errors import RollerError
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorProgram

TOP_K = 10
Json = dict[str, Any]


def bench_construct(cases: Path, targets: Sequence[str]) -> Json:
    """Return `{"targets": {T: {"median_s", "p99_s", "max_s", "cases"}}}`; an invalid case has `error`."""
    programs = [(case, _program(case)) for case in performance_cases(cases)]
    return {"targets": {target: _target(hardware.load(target), programs) for target in targets}}


def _program(case: BenchCase) -> TensorProgram | RollerError:
    try:
        return case.program()
    except RollerError as problem:
        return problem


def _target(hw: HardwareSpec, programs: Sequence[tuple[BenchCase, TensorProgram | RollerError]]) -> Json:
    rows = [_row(case, program, hw) for case, program in programs]
    seconds = sorted(row["seconds"] for row in rows if "seconds" in row)
    return {
        "median_s": statistics.median(seconds) if seconds else None,
        "p99_s": seconds[min(len(seconds) - 1, math.ceil(0.99 * len(seconds)) - 1)] if seconds else None,
        "max_s": seconds[-1] if seconds else None,
        "cases": rows,
    }


def _row(case: BenchCase, program: TensorProgram | RollerError, hw: HardwareSpec) -> Json:
    if isinstance(program, RollerError):
        return {"id": case.id, "error": f"{program.code}: {program.message}"}
    try:
        groups = partition(program, hw)
        start = time.perf_counter()
        built = [_ranked(group, hw) for group in groups]
        seconds = time.perf_counter() - start
    except RollerError as problem:
        return {"id": case.id, "error": f"{problem.code}: {problem.message}"}
    return {
        "id": case.id,
        "seconds": seconds,
        "tiles_visited": sum(measure_pass for measure_pass, _ in built),
        "candidates": sum(candidates for _, candidates in built),
    }


def _ranked(group: KernelGroup, hw: HardwareSpec) -> tuple[int, int]:
    """Return the number of visited tiles and of rPrograms for one kernel group."""
    _, construction = rank_units(group, hw, TOP_K)
    return construction.tiles_visited, len(construction.programs)
