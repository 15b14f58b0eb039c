"""ROLLER's rules for a contraction on a SIMT machine: register tiles of threads, staged tiles of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roller_svc.construct.align import counts, powers
from roller_svc.construct.rules import Base, at, replaced
from roller_svc.construct.scale_up import Grown, Stage
from roller_svc.perf.banks import staged_bytes
from roller_svc.perf.footprint import Tile
from roller_svc.perf.machine import register_words
from roller_svc.perf.occupancy import contraction_registers
from roller_svc.perf.problem import Problem

MAX_THREAD_TILE = 16
MAX_THREADS = 512  # beyond that a block's barriers cost more than its reuse saves
K_STEPS = (8, 16, 32)
MAX_BASES = 6
SPARE_REGISTERS = 24  # what compilers add on top of the count before they spill


@dataclass(frozen=True, slots=True)
class SimtContraction:
    problem: Problem

    def lane_choices(self) -> tuple[int, ...]:
        return (1,)

    def thread_stage(self, lanes: int) -> Stage:
        p = self.problem
        steps = self._steps({
            axis: powers(min(MAX_THREAD_TILE, p.extent(axis))) for axis in (p.m, p.n) if axis is not None
        })  # fmt: skip
        words = p.elem_bytes
        return Stage(
            level=p.machine.hw.thread_level.name,
            names=self._names(),
            steps=steps,
            rank=tuple(range(len(steps))),
            too_large=self._register_rule,
            misaligned=lambda _tile: "",
            footprint=lambda t: (at(t, p.m) * at(t, p.n) + at(t, p.m) + at(t, p.n)) * words,
            traffic=lambda t: words / at(t, p.m) + words / at(t, p.n),
            saturates=self._feeds_the_unit,
        )

    def preferred(self, grown: Grown, lanes: int) -> Sequence[Tile]:
        """Highest reuse first; among equals the wider along n, whose stores are longer."""
        p = self.problem
        tiles = grown.large or grown.border
        ordered = sorted(tiles, key=lambda t: (1 / at(t, p.m) + 1 / at(t, p.n), -at(t, p.n)))
        return ordered[:MAX_BASES]

    def block_stage(self, base: Base, epsilon: float) -> Stage:
        p = self.problem
        axes = {p.k: self._k_steps()} if p.k is not None else {}
        for axis in (p.m, p.n):
            if axis is not None:
                unit = base.thread[axis]
                fitting = [unit * c for c in counts(p.extents[axis], unit, epsilon, MAX_THREADS // 4)]
                enough = [s for s in fitting if s >= self._least_count() * unit]
                axes[axis] = tuple(enough or fitting[-1:] or [unit])
        return Stage(
            level=p.machine.hw.block_level.name,
            names=self._names(),
            steps=self._steps(axes),
            rank=tuple(range(len(p.extents))),
            too_large=lambda t: self.too_large(t, base),
            misaligned=lambda t: self.misaligned(t, base),
            footprint=lambda t: self._staged(t, base),
            traffic=self._traffic,
            saturates=self._covers_memory,
        )

    def too_large(self, block: Tile, base: Base) -> str:
        limits = self.problem.machine.hw.limits
        threads = self._threads(block, base)
        if threads > min(limits.max_threads_per_block, limits.max_threads_per_core):
            return "threads per block"
        if threads > MAX_THREADS:
            return "barrier cost"
        if -(-(self._registers(base.thread) + SPARE_REGISTERS) // 8) * 8 * threads > limits.registers_per_core:
            return "registers per core"
        if self._staged(block, base) > limits.shared_bytes_per_block:
            return "shared memory"
        return self._register_rule(base.thread)

    def misaligned(self, block: Tile, base: Base) -> str:
        return "execution unit" if self._threads(block, base) % self.problem.machine.hw.limits.warp_size else ""

    def fallback(self) -> Sequence[tuple[Tile, Base]]:
        """One point a thread, a warp of threads along n, then along m."""
        p = self.problem
        one = tuple([1] * len(p.extents))
        warp = p.machine.hw.limits.warp_size
        k = K_STEPS[0] if p.k is not None else 1
        small = replaced(one, p.k, k)
        return [(replaced(small, axis, warp), Base(one)) for axis in (p.n, p.m) if axis is not None]

    def _registers(self, thread: Tile) -> int:
        p = self.problem
        return contraction_registers(at(thread, p.m), at(thread, p.n), register_words(p.space.compute_dtype))

    def _register_rule(self, thread: Tile) -> str:
        fits = self._registers(thread) + SPARE_REGISTERS <= self.problem.machine.hw.limits.max_registers_per_thread
        return "" if fits else "registers per thread"

    def _feeds_the_unit(self, thread: Tile) -> bool:
        """Multiply-adds take as long as reading their operands from the staged tile."""
        mach = self.problem.machine
        m, n = at(thread, self.problem.m), at(thread, self.problem.n)
        operands = (m + n) * self.problem.elem_bytes / mach.staged_bytes_per_cycle
        return m * n / mach.fma_per_cycle >= 0.95 * operands

    def _covers_memory(self, block: Tile) -> bool:
        """Multiply-adds take as long as loading their operands from the level outside."""
        p, mach = self.problem, self.problem.machine
        bandwidth = mach.last_cache.bytes_per_s if mach.last_cache else mach.dram.bandwidth_bytes_per_s
        flops = 2.0 * at(block, p.m) * at(block, p.n) * at(block, p.k)
        return flops / mach.unit.flops_per_s >= self._moved(block) / bandwidth

    def _moved(self, block: Tile) -> float:
        p = self.problem
        transaction = p.machine.dram.transaction_bytes
        return p.a.moved_bytes(block, transaction) + p.b.moved_bytes(block, transaction)

    def _traffic(self, block: Tile) -> float:
        p = self.problem
        return self._moved(block) / (at(block, p.m) * at(block, p.n) * at(block, p.k))

    def _staged(self, block: Tile, base: Base) -> int:
        p = self.problem
        level = p.machine.hw.block_level
        bk = at(block, p.k)
        a = staged_bytes(bk, at(block, p.m), at(base.thread, p.m), level, p.elem_bytes)
        return a + staged_bytes(bk, at(block, p.n), at(base.thread, p.n), level, p.elem_bytes)

    def _threads(self, block: Tile, base: Base) -> int:
        p = self.problem
        return (at(block, p.m) // at(base.thread, p.m)) * (at(block, p.n) // at(base.thread, p.n))

    def _least_count(self) -> int:
        """Threads along m and along n from which growth starts: a quarter warp, where blocks hold several warps."""
        return 4 if self.problem.machine.hw.limits.max_threads_per_block >= 64 else 1

    def _k_steps(self) -> Tile:
        """Second alignment: a step along k is at least one transaction of the narrowest factor."""
        p = self.problem
        narrow = min((t.elem_bytes for t in (*p.a.tensors, *p.b.tensors)), default=4)
        least = min(K_STEPS[-1], max(K_STEPS[0], p.machine.dram.transaction_bytes // (4 * narrow)))
        depth = p.extent(p.k)
        steps = [k for k in K_STEPS if k >= least and k <= max(least, depth)]
        return tuple(steps)

    def _steps(self, chosen: dict[int, Tile]) -> tuple[Tile, ...]:
        return tuple([chosen.get(i, (1,)) for i in range(len(self.problem.extents))])

    def _names(self) -> tuple[str, ...]:
        return tuple([a.name for a in self.problem.space.axes])
