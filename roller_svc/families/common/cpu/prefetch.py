"""Statement → the tensors it walks through once, in the order of memory, and prefetches that run ahead of it.

A core's own prefetchers follow a walk that reads only within a page, and hardly one that writes. On Skylake-SP hints
two KiB ahead bring a map from 8.9 to 12.4 GB/s out of DRAM, a fill from 6.5 to 10.5, and a sum out of L3 from 13 to 20.
On Zen 4 they are in the way: rows of 128 are summed out of DRAM at 22 GB/s with them and at 29 without, a softmax of
such rows takes 1.7 times as long with them; but for maps with stores past the caches, a tenth faster with hints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from roller_svc.families.common.cpu.memory import HINTED_RUN_BYTES
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Const, Expr, substitute
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec, Scope
from roller_svc.ir.index import num
from roller_svc.ir.program import Axis, TensorExpr, TensorType
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Node, Prefetch

AHEAD_BYTES = 2048  # 32 lines: what is under way in a core and its L2 at once, and then some


@dataclass(frozen=True, slots=True)
class Stream:
    """A tensor that a statement walks from end to end, its first index the row's."""

    tensor: str
    index: tuple[Expr, ...]
    dtype: DType
    for_write: bool

    def ahead(self, lane: str, lanes: int, line_bytes: int, at: Mapping[str, Expr]) -> tuple[Node, ...]:
        """Hints for as many lines as `lanes` neighbours fill, `at` saying where they are."""
        step = line_bytes // self.dtype.bytes
        hints = []
        for first in range(0, lanes, step):
            here = {name: substitute(place, {lane: num(first)}) for name, place in at.items()}
            index = tuple(substitute(i, here) for i in self.index)
            hints.append(Prefetch(self.tensor, index, AHEAD_BYTES // self.dtype.bytes, self.for_write))
        return tuple(hints)


def hints_pay(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> bool:
    """Whether hints run ahead of the group's streams: beside stores past the caches they do in a map, in rows only
    where plain reading is faster with them (on Zen 4 rows of 4 KiB take a third longer with hints)."""
    shared = [level for level in reversed(hw.levels) if level.scope is Scope.DEVICE]
    held = next((level for level in shared if level.capacity_bytes >= group.space.compulsory_bytes), hw.dram)
    return (program.nontemporal and program.reduce_threads == 1) or held.hinted_gain >= 1.0


def streams(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> dict[str, tuple[Stream, ...]]:
    """For each statement, by its output, the streams that it is the first to walk: none where a core's own cache holds
    all that the group touches; of results, none whose lines ahead are mostly another task's."""
    types = {**dict(group.inputs), **dict(group.stored)}
    known: set[str] = set()
    found: dict[str, tuple[Stream, ...]] = {}
    for statement in group.statements:
        mine = []
        for tensor, index, for_write in _accesses(statement):
            if (
                tensor in known
                or tensor not in types
                or not hw.exceeds_caches(types[tensor].bytes, group.space.compulsory_bytes)
            ):
                continue
            if for_write and _run(statement, program) * types[tensor].dtype.bytes < HINTED_RUN_BYTES:
                continue
            if _is_walk(statement.spatial if for_write else statement.axes, types[tensor], index):
                known.add(tensor)
                mine.append(Stream(tensor, index, types[tensor].dtype, for_write))
        found[statement.output] = tuple(mine)
    return found


def _run(statement: TensorExpr, program: RProgram) -> int:
    """Neighbouring results that one task computes."""
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


def _is_walk(axes: tuple[Axis, ...], type_: TensorType, index: tuple[Expr, ...]) -> bool:
    """Whether loops over the axes, in their order, touch the tensor's elements in the order of memory, each once."""
    order = [a.name for a in axes if a.extent > 1]
    walked = [i.name for i in index if isinstance(i, AxisRef) and i.name in order]
    plain = all(isinstance(i, AxisRef | Const) for i in index)
    return plain and walked == order and math.prod(type_.shape) == math.prod(a.extent for a in axes)
