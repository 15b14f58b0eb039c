"""Software prefetch of the tensors that a statement streams through in memory order.

Hardware prefetchers follow reads within a page and hardly follow writes. Software prefetch therefore speeds up
streaming from memory on Skylake-SP and slows down rows on Zen 4; calibration decides by the ratio `prefetch_speedup` of
each level.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from roller_svc.families.common.cpu.memory import MIN_PREFETCH_SEGMENT_BYTES
from roller_svc.families.common.cpu.shared_rows import in_flight
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Const, Expr, substitute
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec, Scope
from roller_svc.ir.index import num
from roller_svc.ir.program import Axis, TensorExpr, TensorType
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Node, Prefetch

PREFETCH_DISTANCE_BYTES = 2048  # 32 lines: more than a core and its L2 have in flight


@dataclass(frozen=True, slots=True)
class Stream:
    """A tensor that a statement streams through from end to end; its first index is the row."""

    tensor: str
    index: tuple[Expr, ...]
    dtype: DType
    for_write: bool

    def prefetches(self, lane: str, lanes: int, line_bytes: int, at: Mapping[str, Expr]) -> tuple[Node, ...]:
        """Return prefetches for the lines that `lanes` contiguous elements fill; `at` gives their position."""
        step = line_bytes // self.dtype.bytes
        prefetches = []
        for first in range(0, lanes, step):
            current = {name: substitute(value, {lane: num(first)}) for name, value in at.items()}
            index = tuple(substitute(i, current) for i in self.index)
            prefetches.append(Prefetch(self.tensor, index, PREFETCH_DISTANCE_BYTES // self.dtype.bytes, self.for_write))
        return tuple(prefetches)


def prefetch_is_profitable(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> bool:
    """Return whether to prefetch the group's streams.

    Maps with non-temporal stores always gain. Others gain where calibration measured a prefetch speed-up for the level
    that holds the data.
    """
    shared = [level for level in reversed(hw.levels) if level.scope is Scope.DEVICE]
    source = next((level for level in shared if level.capacity_bytes >= group.space.compulsory_bytes), hw.dram)
    return (program.pipeline.nontemporal and program.reduce_threads == 1) or source.hinted_gain >= 1.0


def find_streams(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> dict[str, tuple[Stream, ...]]:
    """Return the tensors that each statement, by its output, is the first to stream through.

    Points in flight that share rows count as one. Groups that fit a private cache have none. An output whose tasks write
    short contiguous runs is left out, since most prefetched lines would belong to another task.
    """
    types = {**dict(group.inputs), **dict(group.stored)}
    shared = in_flight(group.space, program.thread)
    streamed: set[str] = set()
    streams: dict[str, tuple[Stream, ...]] = {}
    for statement in group.statements:
        own = []
        for tensor, index, for_write in _accesses(statement):
            if (
                tensor in streamed
                or tensor not in types
                or not hw.exceeds_caches(types[tensor].bytes, group.space.compulsory_bytes)
            ):
                continue
            if for_write and _contiguous_results(statement, program) * types[tensor].dtype.bytes < MIN_PREFETCH_SEGMENT_BYTES:
                continue
            axes = statement.spatial if for_write else tuple(a for a in statement.axes if a.name != shared)
            if _is_sequential(axes, types[tensor], index):
                streamed.add(tensor)
                own.append(Stream(tensor, index, types[tensor].dtype, for_write))
        streams[statement.output] = tuple(own)
    return streams


def _contiguous_results(statement: TensorExpr, program: RProgram) -> int:
    """Return the number of contiguous results that one task computes."""
    run, blocks = 1, program.block.as_dict()
    for axis in reversed(statement.spatial):
        tile = min(blocks.get(axis.name, axis.extent), axis.extent)
        run *= tile
        if tile < axis.extent:
            break
    return run


def _accesses(statement: TensorExpr) -> list[tuple[str, tuple[Expr, ...], bool]]:
    reads = [(load.tensor, load.index, False) for load in statement.reads if not any(load.bounds_checked)]
    return [*reads, (statement.output, statement.index, True)]


def _is_sequential(axes: tuple[Axis, ...], type_: TensorType, index: tuple[Expr, ...]) -> bool:
    """Return whether loops over the axes access each element of the tensor once, in memory order."""
    order = [a.name for a in axes if a.extent > 1]
    indexed = [i.name for i in index if isinstance(i, AxisRef) and i.name in order]
    plain = all(isinstance(i, AxisRef | Const) for i in index)
    return plain and indexed == order and math.prod(type_.shape) == math.prod(a.extent for a in axes)
