"""A TVM function → schedules of it, without tuning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import s_tir
from tvm.s_tir import dlight
from tvm.target import Target
from tvm.target.codegen import llvm_get_system_cpu, llvm_get_vector_width

from roller_svc.bench.peers.library import no_peer

# The tile of a sum: 12 chains of multiply-adds hide their latency of 4 cycles at 2 a cycle, and fit 16 registers.
_COLUMNS, _ROWS = 2, 6
_FLOAT_BITS = 32


@dataclass(frozen=True, slots=True)
class Schedule:
    """A module that can be compiled, and how it came about."""

    name: str
    module: Any


def host_target(threads: int) -> Any:
    """This CPU."""
    return Target({"kind": "llvm", "mcpu": llvm_get_system_cpu(), "num-cores": threads})


def schedules(function: Any, target: Any) -> tuple[Callable[[], Schedule], ...]:
    """Makers of the schedules without tuning; each raises no_peer where it does not apply.

    The loops as stated, which LLVM alone improves: all that TVM's own pipeline for CPUs does. DLight's rule for rows
    on CPUs. And what DLight's fallback does for a GPU's threads, done for vectors and cores. DLight's other rule for
    CPUs, for matrix times vector, is left out: it unrolls so far that LLVM takes a minute and more, for a slower
    kernel (3072 x 1024 on Skylake-SP: 95 s, 5.6 ms beside 2.9).
    """
    return (
        lambda: Schedule("as stated", function),
        lambda: _rows(function, target),
        lambda: Schedule("parallel, vectorized", _parallel_vectorized(function, target)),
    )


def _rows(function: Any, target: Any) -> Schedule:
    schedule = dlight.cpu.Reduction().apply(function, target, _=False)
    if schedule is None:
        raise no_peer("DLight's Reduction does not apply")
    return Schedule("DLight's Reduction", schedule.mod)


def _parallel_vectorized(function: Any, target: Any) -> Any:
    """Maps inlined; of each block the last spatial axis in vectors, the others parallel, sums of a tile between them.
    Where no vector divides the last axis, the inner loops are left to LLVM."""
    schedule = s_tir.Schedule(function)
    blocks = dlight.normalize_prim_func(schedule)
    if blocks is None:
        raise no_peer("DLight does not normalise the blocks")
    lanes = max(1, llvm_get_vector_width(target) // _FLOAT_BITS)
    for block in dlight.try_inline(schedule, blocks):
        _schedule_block(schedule, block, lanes)
    return schedule.mod


def _schedule_block(schedule: Any, block: Any, lanes: int) -> None:
    kinds, loops = block.dom_kind(), list(schedule.get_loops(block.block_rv))
    if len(kinds) != len(loops) or set(kinds) - {"S", "R"} or "S" not in kinds:
        return
    spatial = [loop for kind, loop in zip(kinds, loops, strict=True) if kind == "S"]
    reduced = [loop for kind, loop in zip(kinds, loops, strict=True) if kind == "R"]
    last = int(schedule.get(spatial[-1]).extent)
    width = next(w for w in (lanes, lanes // 2, lanes // 4, 1) if w and last % w == 0)
    if width == 1:
        schedule.reorder(*spatial, *reduced)
        schedule.parallel(schedule.fuse(*spatial[:-1]) if len(spatial) > 1 else spatial[0])
        return
    spatial[-1], column, vector = schedule.split(spatial[-1], [None, _divisor(last // width, _COLUMNS), width])
    tile = [column]
    if reduced and len(spatial) > 1:
        rows = _divisor(int(schedule.get(spatial[-2]).extent), _ROWS)
        spatial[-2], row = schedule.split(spatial[-2], [None, rows])
        tile = [row, column]
    schedule.reorder(*spatial, *reduced, *tile, vector)
    whole = schedule.fuse(*spatial)
    schedule.parallel(whole)
    _in_registers(schedule, tile, vector)
    if reduced:
        _keep_sums(schedule, block.block_rv, whole, reduced[0])


def _in_registers(schedule: Any, tile: list[Any], vector: Any) -> None:
    for loop in tile:
        schedule.unroll(loop)
    schedule.vectorize(vector)


def _keep_sums(schedule: Any, block: Any, whole: Any, first: Any) -> None:
    """Sums of a tile stay in registers until they are done."""
    stored = schedule.cache_write(block, 0, "local")
    schedule.reverse_compute_at(stored, whole)
    *inner, last = schedule.get_loops(stored)[1:]
    _in_registers(schedule, inner, last)
    schedule.decompose_reduction(block, first)


def _divisor(extent: int, most: int) -> int:
    return next(n for n in range(most, 0, -1) if extent % n == 0)
