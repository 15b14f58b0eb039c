"""The cost of a contraction on a CPU: packed panels and a micro-kernel, all terms summed.

How well the sum ranks what was measured: `docs/model.md`, "CPUs".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from roller_svc.construct.rules import extent_on
from roller_svc.families.common.cpu.memory import (
    L1_PANEL_FRACTION,
    PAGE_BYTES,
    prefetch_rampup_cycles,
    private_bandwidth,
)
from roller_svc.families.common.cpu.micro_kernel_cost import (
    _fma_ports,
    _load_cycles,
    kernel_cycles,
    smallest_cache,
    source_bandwidth,
)
from roller_svc.families.cpu.contraction.workload import (
    L1_WAYS,
    OperandLayout,
    columns_fit_l2,
    lines_per_set,
    packs_b_on_first_use,
    rows_per_block,
    skips_packing_of_a,
)
from roller_svc.perf.common import Costs, Launch
from roller_svc.perf.footprint import Tile
from roller_svc.perf.machine import Machine
from roller_svc.perf.workload import OperandFootprint, Workload

LOOP_OPERATIONS = 3  # of one k: a pointer, a counter, a branch
MIN_SEGMENT_BYTES = 256  # prefetchers follow a walk over gaps of a few lines
# Whose prefetchers into the first cache follow a panel: on Zen 4 one that passes by at two thirds of the second cache's
# bandwidth costs half a percent. Intel's there know the next line.
L1_PREFETCH_VENDORS = frozenset({"amd"})


@dataclass(frozen=True, slots=True)
class _Sizes:
    """A task's tile of C, rows x columns, cut into register tiles; `steps` of `kc` along k, in words of it."""

    rows: int
    columns: int
    mr: int
    nr: int
    kc: int
    depth: int
    steps: int


def cpu_contraction(p: Workload[Any], launch: Launch) -> Costs:
    """Micro-kernel ports + call and C update + packing + edges, for the core with the most tasks."""
    mach, costs = p.machine, p.machine.costs.contraction
    sizes = _sizes(p, launch)
    kernel = _kernel(p, sizes)
    update = _update(p, sizes)
    packing = sizes.steps * _packing(p, launch, sizes)
    store = _store(p, sizes)
    waves = -(-launch.grid // mach.cores)
    average = p.outer_points / (sizes.rows * sizes.columns) / launch.grid  # of a whole tile: those at edges are smaller
    busy = average * launch.grid / mach.cores if launch.grid >= 4 * mach.cores else max(1.0, waves * average)
    parts = (kernel, update, packing, store + costs.task_cycles)
    memory = p.compulsory_bytes / source_bandwidth(mach, p.compulsory_bytes)
    found, names = smallest_cache(mach, p.compulsory_bytes), ("compute", "update", "packing", "task")
    return Costs(
        core_s=mach.seconds(sum(parts) * busy) + costs.memory_exposed_fraction * memory,
        core_stage=None,
        stage_seconds=(
            *((n, mach.seconds(c * busy)) for n, c in zip(names, parts, strict=True)),
            (mach.dram.name if found is None else found.name, memory),
        ),
        occupancy=min(1.0, launch.grid / (waves * mach.cores)),
        waves=waves,
    )


def _sizes(p: Workload[Any], launch: Launch) -> _Sizes:
    mc, nc, kc = (extent_on(launch.block, axis) for axis in (p.m, p.n, p.k))
    depth = -(-p.extent(p.k) // launch.split_k)
    return _Sizes(
        rows=min(mc, p.extent(p.m)), columns=min(nc, p.extent(p.n)), mr=extent_on(launch.thread, p.m),
        nr=extent_on(launch.thread, p.n), kc=p.packed_words(min(kc, depth)), depth=p.packed_words(depth), steps=-(-depth // kc),
    )  # fmt: skip


def _cut(extent: int, tile: int) -> tuple[tuple[int, int], ...]:
    """(size, how many) of the tiles of an axis, the last being smaller."""
    whole, tail = divmod(extent, tile)
    return tuple((size, count) for size, count in ((tile, whole), (tail, 1)) if size and count)


def _kernel(p: Workload[Any], s: _Sizes) -> float:
    """Calls and what they multiply, with panels from where they lie: of B once for a step and block of A, or, where L2
    holds them, of A once for a step."""
    mach, costs = p.machine, p.machine.costs.contraction
    cycles = tiles_cycles(p, (s.rows, s.columns), (s.mr, s.nr), s.depth, s.steps)
    at_once = rows_per_block(s.rows, s.mr, s.kc, p.elem_bytes, _l2_bytes(p))
    hinted = False
    if _packs_on_first_use(p, s):
        streamed, sweeps = s.rows * s.kc * p.elem_bytes, float(-(-s.columns // s.nr))
    elif _loops_over_rows(p, s):
        streamed, sweeps = at_once * s.kc * p.elem_bytes, s.rows / at_once
        cycles += s.steps * max(0.0, sweeps - 1) * _reload_cycles(p, s, at_once)
    else:
        streamed, sweeps, hinted = s.columns * s.kc * p.elem_bytes, float(-(-s.rows // at_once)), True
    arrival = s.steps * sweeps * streamed / (private_bandwidth(mach, streamed) / mach.clock_hz)
    if hinted and streamed > _l2_bytes(p) // 2:
        arrival = s.steps * sweeps * streamed * sum(_spill_cycles_per_byte(p, s))
    if hinted:  # a piece of the next panel with every step: 512 x 1500 x 2560 takes 7 % longer without
        arrival *= min(1.0, arrival / (costs.prefetch_hidden_fraction * cycles))
    return cycles + costs.llc_exposed_fraction * arrival


def _reload_cycles(p: Workload[Any], s: _Sizes, at_once: int) -> float:
    """B's block from the last cache, as far as L2 lost it to other rows of A, which pass through it while they are
    packed and lie in it then."""
    if skips_packing(p, s.columns, (s.mr, s.nr, s.kc)):
        return 0.0
    mach, row = p.machine, s.kc * p.elem_bytes
    walked = s.columns * row + 2 * at_once * row + at_once * s.columns * p.elem_bytes
    lost = 1.0 - mach.costs.memory.hit_rate(_l2_bytes(p), walked)
    return lost * s.columns * row / (mach.caches[0].bytes_per_s / mach.cores / mach.clock_hz)


def _packs_on_first_use(p: Workload[Any], s: _Sizes) -> bool:
    """Whether the first panel of A that meets a panel of B packs it."""
    plain = p.k is not None and _members(p, p.k) == 1 and p.b.elem_bytes == p.elem_bytes
    if s.steps > 1 or not plain or p.b.is_constant or operand_layout(p, p.b, p.n) is not OperandLayout.PANEL_MAJOR:
        return False
    panels = -(-s.rows // s.mr)
    of_a, of_b = panels * s.mr * s.kc * p.elem_bytes, s.nr * p.elem_bytes
    return packs_b_on_first_use(panels, of_a, of_b, p.b.total_bytes, p.machine.hw)


def _loops_over_rows(p: Workload[Any], s: _Sizes) -> bool:
    return columns_fit_l2(-(-s.columns // s.nr) * s.nr, s.kc, p.elem_bytes, _l2_bytes(p))


def _l2_bytes(p: Workload[Any]) -> int:
    return p.machine.hw.block_level.capacity_bytes


def tiles_cycles(
    p: Workload[Any], extents: tuple[int, int], tile: tuple[int, int], depth: int, steps: int = 1
) -> float:
    """Calls of the micro-kernel for rows x columns of C in register tiles, less high and wide ones at the edges."""
    lanes, costs = p.machine.unit.shape[-1], p.machine.costs.contraction
    cycles, step = 0.0, -(-depth // steps)
    for height, down in _cut(extents[0], tile[0]):
        for width, across in _cut(extents[1], tile[1]):
            vectors = -(-width // lanes)
            each = kernel_cycles(p.machine, height, vectors)
            each -= _tile_overlap_cycles(p.machine, height, vectors, step) / step
            each += costs.load_cycles * _port_contention(p.machine, height, vectors, each)
            from_l2 = _l2_bytes_per_k(p, extents, (height, width), step) / p.machine.l2_bytes_per_cycle
            exposed = 0.0 if p.machine.hw.vendor in L1_PREFETCH_VENDORS else costs.l2_exposed_fraction
            each = max(each + exposed * from_l2, from_l2 / costs.l2_bandwidth_under_compute)
            call = _call_cycles(p.machine, (height * vectors + height + vectors) / each, step * each)
            call += max(0.0, p.machine.store_cycles * height * vectors - costs.hidden_store_cycles)
            cycles += down * across * (steps * call + depth * each)
    return cycles


def _call_cycles(mach: Machine, rate: float, last: float) -> float:
    """One call but for its stores, less what of it finds a place beside operations that a core still holds of the last
    one, which took `last` cycles: at a `rate` of few in a cycle they last long, and leave many places. On Zen 4 that is
    all of it: tiles of 4 x 16, 64 deep, multiply as fast as those of 14 x 32."""
    costs = mach.costs.contraction
    beside = min(last, mach.rob_ratio * costs.rob_entries / rate)
    hidden = max(0.0, 1.0 - rate / (mach.issue_width_ratio * costs.spare_issue_slots)) * beside
    return costs.call_cycles / (1.0 + (hidden / costs.call_cycles) ** 2)


def _port_contention(mach: Machine, height: int, vectors: int, each: float) -> float:
    """Loads of one k that find no free place among what a core issues: multiply-adds leave the more of them free the
    fewer it has ports for."""
    return max(
        0.0,
        height * vectors + height + vectors - mach.issue_width_ratio * mach.costs.contraction.spare_issue_slots * each,
    )


def _tile_overlap_cycles(mach: Machine, height: int, vectors: int, depth: int) -> float:
    """Cycles of a register tile in which the next one, whose sums wait for none of this one's, is multiplied already:
    while few sums wait for each other at each k, a core works on the operations that it holds of later k, and those
    are of the next tile towards the end. No more than the multiply-adds' ports have free then."""
    busy = height * vectors / _fma_ports(mach)
    ahead = mach.rob_ratio * mach.costs.contraction.rob_entries / (height * vectors + vectors + LOOP_OPERATIONS)
    latency = kernel_cycles(mach, height, vectors)
    free = min(1.0, latency / max(busy, _load_cycles(mach, height, vectors)) - 1.0)
    return latency * min(ahead, depth / 2) * free


def _l2_bytes_per_k(p: Workload[Any], extents: tuple[int, int], tile: tuple[int, int], step: int) -> float:
    """What each k of a register tile takes from the second cache. One operand's panel is kept while those of the other
    pass by, which the first cache holds only where all of them are small; beside long ones it does not keep the panel
    either."""
    (rows, columns), (height, width) = extents, tile
    row = step * p.elem_bytes
    kept, passing, block = (width, height, rows)
    if columns_fit_l2(columns, step, p.elem_bytes, _l2_bytes(p)):
        kept, passing, block = (height, width, columns)
    again, anew = _l1_miss_fraction(p, (height + width) * row), _l1_miss_fraction(p, (kept + block) * row)
    return (again * kept + anew * passing) * p.elem_bytes


def _l1_miss_fraction(p: Workload[Any], walked_bytes: int) -> float:
    """Which share of what is walked through again and again comes from the second cache: more and more from where the
    first has no room for it."""
    held = L1_PANEL_FRACTION * p.machine.caches[-1].bytes_per_core
    return min(1.0, max(0.0, walked_bytes / held - 1.0))


def _update(p: Workload[Any], s: _Sizes) -> float:
    """C, from the first cache to memory, a line's old contents coming first, most of it beside the micro-kernel;
    between steps to the cache that holds the task's tile and back."""
    mach, costs = p.machine, p.machine.costs.contraction
    vectors = s.rows * -(-s.columns // mach.unit.shape[-1])
    tile_bytes = s.rows * s.columns * p.elem_bytes
    if s.steps == 1:
        all_of_it = source_bandwidth(mach, p.outer_points * p.elem_bytes) / mach.cores / mach.clock_hz
        return costs.output_exposed_fraction * 2 * tile_bytes / all_of_it
    between = tile_bytes + (s.rows + s.columns) * s.kc * p.elem_bytes  # what a step walks through until the next one
    return s.steps * (
        vectors + costs.llc_exposed_fraction * 2 * tile_bytes / (private_bandwidth(mach, between) / mach.clock_hz)
    )


def _packing(p: Workload[Any], launch: Launch, s: _Sizes) -> float:
    """One step's blocks of A and B. A that is read where it lies comes from memory all the same, in part beside the
    micro-kernel: a core's own prefetchers follow the rows."""
    costs = p.machine.costs.contraction
    b = packing_cycles(p, p.b, launch.block, p.n, s.nr) + _panel_spill_cycles(p, s)
    if _packs_on_first_use(p, s):
        b = max(
            b - tiles_cycles(p, (min(s.mr, s.rows), s.columns), (s.mr, s.nr), s.kc), costs.exposed_packing_fraction * b
        )
    if skips_packing(p, extent_on(launch.block, p.n), (s.mr, s.nr, s.kc)):
        slower = costs.set_conflict_factor if has_set_conflicts(p, s.mr) else 1.0
        begun = _segment_start_cycles(p, p.a, launch.block, launch.block) / s.mr  # side by side
        return b + costs.llc_exposed_fraction * _arrival_cycles(p, p.a, launch.block, launch.block) * slower + begun
    return b + packing_cycles(p, p.a, launch.block, p.m, s.mr)


def _panel_spill_cycles(p: Workload[Any], s: _Sizes) -> float:
    """Packed panels of B to the last cache, as far as L2 has no room for them beside what they are packed from; and
    back, where they are taken to be in L2."""
    if p.b.is_constant or _packs_on_first_use(p, s):
        return 0.0
    mach, block = p.machine, s.columns * s.kc * p.elem_bytes
    lost = block * (1.0 - mach.costs.memory.hit_rate(_l2_bytes(p), 2 * block))
    to_cache, to_memory = _spill_cycles_per_byte(p, s)
    kept = mach.costs.contraction.llc_exposed_fraction * (2.0 if _loops_over_rows(p, s) else 1.0) * to_cache
    return lost * (kept + 2 * to_memory)  # a line of memory comes before it is written


def _spill_cycles_per_byte(p: Workload[Any], s: _Sizes) -> tuple[float, float]:
    """Of panels of B that L2 has no room for: in the last cache, as far as it holds them beside what they are packed
    from and what the task writes, and the rest in memory."""
    mach, walked = p.machine, (2 * s.kc + s.rows) * s.columns * p.elem_bytes
    last, cycles = mach.caches[0], mach.cores * mach.clock_hz
    kept = mach.costs.memory.hit_rate(last.bytes_per_core, walked, is_last=True)
    return kept / last.bytes_per_s * cycles, (1 - kept) / mach.dram.bandwidth_bytes_per_s * cycles


def skips_packing(p: Workload[Any], columns: int, tile: tuple[int, int, int]) -> bool:
    """Whether A is read where it lies, for a task of so many columns in tiles of (mr, nr, kc)."""
    along_k = operand_layout(p, p.a, p.m) is OperandLayout.K_MAJOR and p.machine.unit.k_group == 1
    return (
        along_k and not p.a.is_constant and skips_packing_of_a(columns, tile, _row_bytes(p), p.elem_bytes, _l2_bytes(p))
    )


def has_set_conflicts(p: Workload[Any], mr: int) -> bool:
    """Whether rows of A that are read side by side push each other out of the first cache: one page apart, one set."""
    return lines_per_set(mr, _row_bytes(p)) > L1_WAYS


def _row_bytes(p: Workload[Any]) -> int:
    return p.a.tensors[0].access.dims[-1].size * p.elem_bytes


def _store(p: Workload[Any], s: _Sizes) -> float:
    lanes, costs = p.machine.unit.shape[-1], p.machine.costs.contraction
    each = 2.0 * -(-s.columns // lanes)
    if _members(p, p.n) > 1:
        across = _row_crossing_fraction(p, p.n, s.nr)
        each = across * costs.scatter_cycles * s.columns + (1 - across) * each
    tensors = len(p.epilogue.tensors)
    if tensors > 1 or _members(p, p.n) > 1 or _members(p, p.m) > 1:
        return s.rows * each * max(1, tensors)
    edge = s.columns % s.nr
    return s.steps * s.rows * costs.edge_cycles * -(-edge // lanes) if edge % lanes else 0.0


def packing_cycles(
    p: Workload[Any], operand: OperandFootprint, block: Tile, panel_axis: int | None, size: int
) -> float:
    """Copying one block of an operand into panels of `size`: vectors along them, turned, or element by element. Panels
    of a constant are there, and only come from memory."""
    costs = p.machine.costs.contraction
    if operand.is_constant:
        return costs.llc_exposed_fraction * operand.requested_bytes(block) / _source_bandwidth_of(p, operand)
    lanes = p.machine.unit.shape[-1]
    along, deep = extent_on(block, panel_axis), extent_on(block, p.k)
    panels = -(-along // size)
    cycles = 0.0
    for tensor in operand.tensors:
        match operand_layout(p, operand, panel_axis):
            case OperandLayout.PANEL_MAJOR:
                cycles += costs.copy_cycles * panels * _vectors(size, lanes) * deep
            case OperandLayout.K_MAJOR:
                turned = sum(-(-min(lanes, size - first) // 4) * 4 + lanes for first in range(0, size, lanes))
                cycles += costs.transpose_cycles / 2 * panels * turned * -(-p.packed_words(deep) // lanes)
            case OperandLayout.STRIDED if _members(p, panel_axis) > 1:
                windows = sum(len(dim.dim.coeffs) > 1 for dim in tensor.dims)
                across = _row_crossing_fraction(p, panel_axis, size)
                inside = panels * deep * costs.copy_cycles * _vectors(size, lanes)
                if panel_axis is None or tensor.strides.get(panel_axis) != 1:
                    inside = costs.gather_cycles * along * deep
                looked_up = (costs.lookup_cycles + costs.window_cycles * windows) * along * deep
                cycles += across * looked_up + (1 - across) * inside
            case OperandLayout.STRIDED:
                cycles += costs.gather_cycles * along * deep
    walked = _streamed_tile(p, operand, block, (panel_axis, size))
    return cycles + _arrival_cycles(p, operand, block, walked) + _segment_start_cycles(p, operand, block, walked)


def _streamed_tile(p: Workload[Any], operand: OperandFootprint, block: Tile, panel: tuple[int | None, int]) -> Tile:
    """What of an operand is read row by row: all of its block, or, of fused axes, one panel after the other: pieces of
    rows that no prefetcher follows. What a cache holds comes as fast without one."""
    axis, size = panel
    if axis is None or _members(p, axis) == 1 or operand.total_bytes <= p.machine.caches[0].total_bytes // 2:
        return block
    return (*block[:axis], min(size, block[axis]), *block[axis + 1 :])


def _vectors(size: int, lanes: int) -> int:
    """Vectors that a row of a panel is copied in: whole ones, and what is left in ever shorter ones."""
    return size // lanes + (size % lanes).bit_count()


def _row_crossing_fraction(p: Workload[Any], panel_axis: int | None, size: int) -> float:
    """Which share of an axis' panels meets more than one row of the innermost of several fused axes."""
    members = () if panel_axis is None else p.space.axes[panel_axis].members
    if not members or members[-1].extent < size:
        return 1.0
    return min(1.0, (size - math.gcd(size, members[-1].extent)) / members[-1].extent)


def _arrival_cycles(p: Workload[Any], operand: OperandFootprint, block: Tile, walked: Tile) -> float:
    """One block of an operand from memory, or from the cache that holds all of it, run by run of what is `walked` at
    once; gaps of less than a few lines do not end one."""
    moved = sum(tensor.transferred_bytes(block) for tensor in operand.tensors)
    runs = sum(tensor.elements(block) / tensor.contiguous_elements(walked) for tensor in operand.tensors)
    runs = min(runs, moved / MIN_SEGMENT_BYTES)
    return moved / _source_bandwidth_of(p, operand) + p.machine.costs.contraction.segment_start_cycles * runs


def _segment_start_cycles(p: Workload[Any], operand: OperandFootprint, block: Tile, walked: Tile) -> float:
    """What runs wait more where they begin in memory, or in a far cache: a page and more as long as prefetchers need to
    follow them, short ones less, for others are under way beside them (64 rows of 6 KB in place of one of 800: a tenth
    longer on Zen 4)."""
    runs = [
        (tensor.elements(block) / tensor.contiguous_elements(walked), tensor.contiguous_elements(walked))
        for tensor in operand.tensors
    ]
    alone = sum(count * min(1.0, run * operand.elem_bytes / PAGE_BYTES) for count, run in runs)
    return alone * prefetch_rampup_cycles(p.machine, smallest_cache(p.machine, operand.total_bytes))


def _source_bandwidth_of(p: Workload[Any], operand: OperandFootprint) -> float:
    """Bytes a cycle for one core of what holds all of the operand."""
    return source_bandwidth(p.machine, operand.total_bytes) / p.machine.cores / p.machine.clock_hz


def operand_layout(p: Workload[Any], operand: OperandFootprint, panel_axis: int | None) -> OperandLayout:
    """How the operand's panels lie in memory, as far as the strides of its tensors tell."""
    strides = [tensor.strides for tensor in operand.tensors]
    if panel_axis is None or _members(p, panel_axis) > 1 or len(strides) != 1:
        return OperandLayout.STRIDED
    if strides[0].get(panel_axis) == 1:
        return OperandLayout.PANEL_MAJOR
    single = p.k is not None and _members(p, p.k) == 1 and operand.elem_bytes * p.machine.unit.k_group == p.elem_bytes
    return OperandLayout.K_MAJOR if single and p.k is not None and strides[0].get(p.k) == 1 else OperandLayout.STRIDED


def _members(p: Workload[Any], axis: int | None) -> int:
    return 1 if axis is None else len([m for m in p.space.axes[axis].members if m.extent > 1])
