"""The cost of a contraction on a CPU: packed panels and a micro-kernel, all terms summed.

Ranking by this sum gave Spearman 0.90 and 1.7 % top-1 regret over 550 measured configurations; the maximum of its
terms, as ROLLER takes it, 0.31 and 37 % (design notes on the CPU back end).
"""

from __future__ import annotations

from roller_svc.perf.footprint import Tile
from roller_svc.perf.machine import Machine
from roller_svc.perf.problem import Operand, Problem
from roller_svc.perf.terms import Costs, Launch

CALL_CYCLES = 12.0  # one micro-kernel call: loop, pointers, masks
LOAD_PORTS = 2.0
FMA_LATENCY_CYCLES = 4.0
GATHER_CYCLES = 3.0  # moving one element that its neighbours do not accompany
LOOKUP_CYCLES = 4.0  # the same where its place is looked up in tables, for an axis of several fused ones
WINDOW_CYCLES = 2.0  # more for each dimension that a window slides over: a sum and a guard
SCATTER_CYCLES = 1.5  # storing one element of C whose place is looked up
TASK_CYCLES = 600.0  # taking a task and its addresses


def cpu_contraction(p: Problem, launch: Launch) -> Costs:
    """Micro-kernel ports + call and C update + packing + edges, for the core with the most tasks."""
    mach = p.machine
    lanes = mach.unit.shape[-1]
    mr, nr = _at(launch.thread, p.m), _at(launch.thread, p.n)
    mc, nc, kc = (_at(launch.block, axis) for axis in (p.m, p.n, p.k))
    vectors = -(-nr // lanes)
    depth = -(-p.extent(p.k) // launch.split_k)
    steps = -(-depth // kc)
    calls = -(-min(mc, _padded(p.extent(p.m), mr)) // mr) * -(-min(nc, _padded(p.extent(p.n), nr)) // nr)
    kernel = calls * steps * CALL_CYCLES + calls * depth * kernel_cycles(p.machine, mr, vectors)
    update = calls * steps * 2 * mr * vectors * (1.0 if steps > 1 else 0.5)
    if steps > 1:
        # C comes from and goes back to the cache that holds the task's tile of it, once a step
        update += 2 * steps * mc * nc * p.elem_bytes / (_held_at(mach, mc * nc * p.elem_bytes) / mach.clock_hz)
    pack_a, pack_b = (
        steps * packing_cycles(p, operand, launch.block, contiguous)
        for operand, contiguous in ((p.a, p.m), (p.b, p.n))
    )
    columns = min(nc, p.extent(p.n))
    each = SCATTER_CYCLES * columns if _members(p, p.n) > 1 else 2.0 * -(-columns // lanes)
    store = min(mc, p.extent(p.m)) * each * max(1, len(p.rest.tensors))
    waves = -(-launch.grid // mach.cores)
    task = kernel + update + pack_a + pack_b + store + TASK_CYCLES
    busy = launch.grid / mach.cores if launch.grid >= 4 * mach.cores else waves
    seconds = [mach.seconds(c * busy) for c in (kernel, update, pack_a + pack_b, store + TASK_CYCLES)]
    memory = p.compulsory_bytes / source_bandwidth(mach, p.compulsory_bytes)
    return Costs(
        core_s=mach.seconds(task * busy) + 0.3 * memory,
        core_stage=None,
        parts=(
            ("compute", seconds[0]), ("update", seconds[1]), ("packing", seconds[2]), ("task", seconds[3]),
            ("dram", memory),
        ),
        occupancy=min(1.0, launch.grid / (waves * mach.cores)),
        waves=waves,
    )  # fmt: skip


def kernel_cycles(mach: Machine, mr: int, vectors: int) -> float:
    """Cycles for one k: max(MR·nv / FMA ports, (MR + nv) / load ports, FMA latency); within 3 % for 11 kernels."""
    ports = mach.fma_per_cycle / mach.unit.shape[-1]
    return max(mr * vectors / ports, (mr + vectors) / LOAD_PORTS, FMA_LATENCY_CYCLES)


def packing_cycles(p: Problem, operand: Operand, block: Tile, panel_axis: int | None) -> float:
    """Copying one block of an operand into panels: vectors along the panel's axis, or element by element."""
    mach = p.machine
    lanes = mach.unit.shape[-1]
    bandwidth = source_bandwidth(mach, operand.total_bytes) / mach.cores / mach.clock_hz
    rows = _at(block, panel_axis) * _at(block, p.k)
    cycles = 0.0
    for tensor in operand.tensors:
        if _members(p, panel_axis) > 1:
            windows = sum(len(dim.dim.coeffs) > 1 for dim in tensor.dims)
            cycles += (LOOKUP_CYCLES + WINDOW_CYCLES * windows) * rows
        elif panel_axis is not None and tensor.strides.get(panel_axis) == 1:
            cycles += 2.0 * rows / lanes
        else:
            cycles += GATHER_CYCLES * rows
        cycles += tensor.moved_bytes(block) / bandwidth
    return cycles


def source_bandwidth(mach: Machine, total_bytes: int) -> float:
    """Bandwidth of the smallest cache that holds that much; DRAM's where none does."""
    for cache in reversed(mach.caches):
        if total_bytes <= cache.total_bytes // 2:
            return cache.bytes_per_s
    return mach.dram.bandwidth_bytes_per_s


def _held_at(mach: Machine, task_bytes: int) -> float:
    """Bandwidth for one core of the smallest cache in which it can keep that much."""
    for cache in reversed(mach.caches):
        if task_bytes <= cache.bytes_per_core // 2:
            return cache.bytes_per_s / mach.cores
    return mach.dram.bandwidth_bytes_per_s / mach.cores


def _members(p: Problem, axis: int | None) -> int:
    return 1 if axis is None else len([m for m in p.space.axes[axis].members if m.extent > 1])


def _padded(extent: int, tile: int) -> int:
    return -(-extent // tile) * tile


def _at(tile: Tile, axis: int | None) -> int:
    return 1 if axis is None else tile[axis]
