"""Inputs and outputs of the cost functions, and cost terms that several families share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from roller_svc.ir.rprogram import DEFAULT_PIPELINE, PipelineOptions
from roller_svc.perf.footprint import Tile
from roller_svc.perf.machine import Machine
from roller_svc.perf.occupancy import BlockResources

# Waves after which block ends are spread evenly. Block times are assumed to differ by 5 %: the ends of n successive
# blocks spread by 0.05 sqrt(n) of a block time, which is uniform from 1 / sqrt(12) on.
DRIFTED_WAVES = 32.0


class Launch(NamedTuple):
    """An rProgram as the cost functions read it: tiles as tuples in the order of the space's axes."""

    block: Tile
    thread: Tile
    reduce_threads: int
    split_k: int
    grid: int
    threads: int
    workspace_bytes: int  # partial results of a split reduction, written once and read once
    pipeline: PipelineOptions = DEFAULT_PIPELINE
    # resources of a block from the compiled binary; None: those that the model assumes
    compiled: BlockResources | None = None


class Costs(NamedTuple):
    """Costs of one launch."""

    core_s: float  # seconds of the cores, with everything that cannot overlap
    core_stage: str | None  # stage that `core_s` is; None: it contains `stage_seconds`
    stage_seconds: tuple[tuple[str, float], ...]  # stages that overlap with `core_s`, or are contained in it
    occupancy: float
    waves: int
    resources: BlockResources | None = None  # of a block on a SIMT core, as the model assumes them
    loads_per_block: int = 1  # staged loads of a block, one after another
    # Of blocks that load everything before they compute: seconds of instructions, and the blocks that share a core.
    issue_s: float = 0.0
    resident_blocks: int = 1
    moved_bytes: tuple[tuple[str, float], ...] = ()  # of stages that do not move bytes at the rate of their level
    # Fraction of the last stage that is added to the sum of the others; None: it overlaps with them. Only where
    # `core_s` contains the stages.
    added_fraction: float | None = None


def simt_waves(grid: int, resident: int, cores: int, block_cycles: Callable[[float], float]) -> tuple[int, float]:
    """Return the number of waves, and the cycles of all of them (wave quantization).

    `block_cycles(c)`: cycles of a block that shares its core with c - 1 others. Blocks of the first waves run in
    lockstep, so that a partial last wave takes a whole block's time. After DRIFTED_WAVES waves their ends are spread
    evenly, and the tail takes half a block's time on average.
    """
    at_once = resident * cores
    full, rest = divmod(grid, at_once)
    whole = block_cycles(float(resident)) if full else 0.0
    cycles = full * whole + (block_cycles(float(-(-rest // cores))) if rest else 0.0)
    drifted = min(1.0, max(0, full - 1) / DRIFTED_WAVES)
    cycles += drifted * ((grid / at_once + 0.5) * whole - cycles)
    return -(-grid // at_once), cycles


def uneven_waves(grid: int, resident: int, cores: int, block_cycles: Callable[[float], float], longest: float) -> tuple[int, float]:
    """Return the waves and cycles of blocks of uneven work, the longest first: at least those of the longest one.

    `block_cycles` is of a block of mean work, `longest` the work of the longest over it.
    """
    waves, cycles = simt_waves(grid, resident, cores, block_cycles)
    if longest > 1.0:
        cycles = max(cycles, longest * block_cycles(float(min(resident, -(-grid // cores)))))
    return waves, cycles


def wave_rectangle(grid_m: int, grid_n: int, concurrent_blocks: int, raster: int) -> tuple[float, float]:
    """Return the tiles along m and n of the concurrent blocks, which visit `raster` rows of tiles together.

    A wave that ends within a row counts with its average part of that row.
    """
    tall = max(float(min(raster, grid_m)), min(grid_m, concurrent_blocks / grid_n))
    return tall, min(grid_n, max(1.0, concurrent_blocks / tall))


def load_latency_cycles(mach: Machine, bytes_loaded: float) -> float:
    """Return the LLC latency for data that fits half of it, else the mean of LLC and DRAM latency.

    Adjacent blocks share loads, so that about half of them hit.
    """
    last = mach.llc
    if last is None:
        return mach.dram_latency_cycles
    if bytes_loaded <= last.total_bytes // 2:
        return last.latency_cycles
    return (last.latency_cycles + mach.dram_latency_cycles) / 2


def dram_bytes_with_reuse(mach: Machine, tensor_bytes: int, reloads: float) -> float:
    """Return bytes of a tensor that DRAM delivers when it is read `reloads` times through the LLC."""
    last = mach.llc
    if last is None or reloads <= 1.0:
        return tensor_bytes * max(1.0, reloads)
    hit_rate = min(1.0, 0.6 * last.total_bytes / max(1, tensor_bytes))
    return tensor_bytes * (1.0 + (reloads - 1.0) * (1.0 - hit_rate))


def streaming_bandwidth(mach: Machine, bytes_in_flight: float) -> float:
    """Return the DRAM bandwidth with `bytes_in_flight` on the device (Little's law)."""
    latency_s = mach.dram.latency_s
    return min(mach.dram.bandwidth_bytes_per_s, bytes_in_flight / latency_s) if latency_s else math.inf


def launch_overhead_s(mach: Machine, grid: int) -> float:
    """Return the seconds to start a kernel; a CPU runs a single task on the caller's thread."""
    overhead_s = mach.hw.limits.launch_overhead_s
    return overhead_s * mach.costs.single_task_launch_fraction if grid == 1 and not mach.is_gpu else overhead_s


def second_launch_s(mach: Machine, workspace_bytes: int) -> float:
    """Return the seconds of a launch that combines partial results, read from the LLC if they fit."""
    last = mach.llc
    fits = last is not None and workspace_bytes <= last.total_bytes // 2
    bandwidth = last.bytes_per_s if last is not None and fits else mach.dram.bandwidth_bytes_per_s
    latency = 2 * mach.dram.latency_s if mach.is_gpu else 0.0
    return mach.hw.limits.launch_overhead_s + latency + 2 * workspace_bytes / bandwidth
