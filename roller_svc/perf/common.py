"""The values that one family's cost function takes and gives, and the terms that families share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from roller_svc.perf.footprint import Tile
from roller_svc.perf.machine import Machine
from roller_svc.perf.occupancy import BlockResources

# Waves after which blocks are no longer in step. Their times are taken to differ by a twentieth: ends of n blocks one
# after another then spread by 0.05 sqrt(n) of one, and any moment of it is as likely as another from 1 / sqrt(12) on.
DRIFTED_WAVES = 32.0


class Launch(NamedTuple):
    """An rProgram as the cost functions read it: tiles as tuples in the order of the space's axes.

    `compiled`: what a block really takes, once a compiler has said so, in place of what the model assumes.
    """

    block: Tile
    thread: Tile
    reduce_threads: int
    split_k: int
    grid: int
    threads: int
    workspace_bytes: int  # partial results of a split reduction, written once and read once
    stages: int = 1
    raster: int = 1
    stream_k_blocks: int = 0
    nontemporal: bool = False
    persistent_blocks: int = 0
    cluster: tuple[int, int] = (1, 1)
    compiled: BlockResources | None = None


class Costs(NamedTuple):
    """`core_s`: time of the cores with all that cannot overlap; `parts`: stages that overlap with it or, where no
    `core_stage` names it, are contained in it (a CPU's add up, a matrix unit's overlap step by step).
    `needs`: what the model assumes that a block takes of a SIMT core. `loads`: of a block, one after another."""

    core_s: float
    core_stage: str | None
    stage_seconds: tuple[tuple[str, float], ...]
    occupancy: float
    waves: int
    resources: BlockResources | None = None
    loads_per_block: int = 1


def simt_waves(grid: int, resident: int, cores: int, block_cycles: Callable[[float], float]) -> tuple[int, float]:
    """How often the device is filled, and the cycles of all fillings; the last one may leave cores with fewer blocks.

    `block_cycles(c)`: cycles of a block that shares its core with c - 1 others. Blocks of the first waves begin and end
    together, and what is left for the last wave takes a whole block's time. Later they have drifted apart: cores stay
    busy until no block is left to begin, and then end one by one within a block's time, half of it on average.
    """
    at_once = resident * cores
    full, rest = divmod(grid, at_once)
    whole = block_cycles(float(resident)) if full else 0.0
    cycles = full * whole + (block_cycles(float(-(-rest // cores))) if rest else 0.0)
    drifted = min(1.0, max(0, full - 1) / DRIFTED_WAVES)
    cycles += drifted * ((grid / at_once + 0.5) * whole - cycles)
    return -(-grid // at_once), cycles


def wave_rectangle(grid_m: int, grid_n: int, concurrent_blocks: int, raster: int) -> tuple[float, float]:
    """Tiles along m and n of those that are computed at once, `raster` rows of tiles being walked together; of a wave
    that ends within a row what it has of that row on average."""
    tall = max(float(min(raster, grid_m)), min(grid_m, concurrent_blocks / grid_n))
    return tall, min(grid_n, max(1.0, concurrent_blocks / tall))


def load_latency_cycles(mach: Machine, bytes_loaded: float) -> float:
    """What fits the last cache comes from it, the rest half of the time (neighbouring blocks share it)."""
    last = mach.llc
    if last is None:
        return mach.dram_latency_cycles
    if bytes_loaded <= last.total_bytes // 2:
        return last.latency_cycles
    return (last.latency_cycles + mach.dram_latency_cycles) / 2


def dram_bytes_with_reuse(mach: Machine, tensor_bytes: int, reloads: float) -> float:
    """Bytes of a tensor that DRAM delivers when it is walked `reloads` times: once while the last cache holds it."""
    last = mach.llc
    if last is None or reloads <= 1.0:
        return tensor_bytes * max(1.0, reloads)
    kept = min(1.0, 0.6 * last.total_bytes / max(1, tensor_bytes))
    return tensor_bytes * (1.0 + (reloads - 1.0) * (1.0 - kept))


def streaming_bandwidth(mach: Machine, bytes_in_flight: float) -> float:
    """DRAM bandwidth with that many bytes outstanding on the whole device (Little's law; §5, memory-bound ops)."""
    latency_s = mach.dram.latency_s
    return min(mach.dram.bandwidth_bytes_per_s, bytes_in_flight / latency_s) if latency_s else math.inf


def launch_overhead_s(mach: Machine, grid: int) -> float:
    """What starting a kernel of so many tasks takes; a CPU runs a single one on the caller's thread."""
    overhead_s = mach.hw.limits.launch_overhead_s
    return overhead_s * mach.costs.single_task if grid == 1 and not mach.is_gpu else overhead_s


def second_launch_s(mach: Machine, workspace_bytes: int) -> float:
    """The launch that joins the parts of a split reduction: it reads the workspace, from the last cache if it fits."""
    last = mach.llc
    fits = last is not None and workspace_bytes <= last.total_bytes // 2
    bandwidth = last.bytes_per_s if last is not None and fits else mach.dram.bandwidth_bytes_per_s
    latency = 2 * mach.dram.latency_s if mach.is_gpu else 0.0
    return mach.hw.limits.launch_overhead_s + latency + 2 * workspace_bytes / bandwidth
