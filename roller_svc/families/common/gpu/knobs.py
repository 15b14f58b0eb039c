"""Fields of an rProgram that a caller may set on GPU contractions: the nearest valid value, and the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roller_svc.construct.rules import MIN_MATRIX_STAGES
from roller_svc.families.common.gpu.matrix.stream_k import stream_k_partition
from roller_svc.families.family import Knob, Nearest
from roller_svc.ir.group import AxisRole, KernelGroup
from roller_svc.ir.rprogram import RProgram
from roller_svc.perf.model import Model
from roller_svc.perf.occupancy import exceeded_limits


def nearest_stages(group: KernelGroup, model: Model[Any], program: RProgram, wanted: int) -> Nearest:
    is_matrix = program.unit.is_matrix
    least = MIN_MATRIX_STAGES if is_matrix else 1
    if wanted < least:
        return Nearest(least, f"a pipeline on {program.unit.name} has at least {least} stages")
    most = wanted if is_matrix else min(wanted, program.steps)
    fitting = least
    while fitting < most and not _exceeded(model, program.with_pipeline(stages=fitting + 1)):
        fitting += 1
    if fitting < most:
        limits = " and ".join(_exceeded(model, program.with_pipeline(stages=most)))
        return Nearest(fitting, f"{most} stages of {program.tile_text} take {limits}")
    return Nearest(most, "" if most == wanted else f"{program.tile_text} makes {program.steps} steps to stage")


def _exceeded(model: Model[Any], program: RProgram) -> tuple[str, ...]:
    needs = model.resources(program)
    return exceeded_limits(needs, model.workload.machine.hw) if needs is not None else ()


def nearest_raster(group: KernelGroup, model: Model[Any], program: RProgram, wanted: int) -> Nearest:
    if wanted == 1:
        return Nearest(1)
    if program.pipeline.stream_k_blocks:
        return Nearest(1, "stream-K tiles have a fixed order")
    (m,) = program.space.role(AxisRole.M)
    rows = -(-m.extent // program.block[m.name])
    together = program.pipeline.cluster_m
    if 1 <= wanted <= rows and wanted % together == 0:
        return Nearest(wanted)
    near = max(1, min(rows, wanted) // together * together)
    return Nearest(near, f"blocks of {program.tile_text} make {rows} rows, {together} of them in a cluster")


def nearest_stream_k(group: KernelGroup, model: Model[Any], program: RProgram, wanted: int) -> Nearest:
    if wanted == 0:
        return Nearest(0)
    if program.split_k > 1:
        return Nearest(0, "split-K and stream-K are exclusive")
    if group.is_dual_gemm:
        return Nearest(0, "a dual GEMM does not support stream-K")
    if group.row_reduction is not None:
        return Nearest(0, "stream-K does not support row reductions")
    if group.space.k_bounds is not None:
        return Nearest(0, "tiles under a guard along k have different numbers of steps, which stream-K does not share")
    work = stream_k_partition(program.with_pipeline(stream_k_blocks=1))
    steps = work.tiles * work.k_tiles
    if wanted <= steps:
        return Nearest(wanted)
    return Nearest(steps, f"tiles of {program.tile_text} make {steps} steps, one for each of as many blocks")


SIMT_KNOBS: Mapping[str, Knob[Any]] = {"stages": nearest_stages, "raster": nearest_raster}
MATRIX_KNOBS: Mapping[str, Knob[Any]] = {**SIMT_KNOBS, "stream_k": nearest_stream_k}
