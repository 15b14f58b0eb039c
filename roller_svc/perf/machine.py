"""HardwareSpec, ComputeUnit → the rates per core and cycle that the model's terms are written in."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec, MemoryLevel, Scope, TargetKind
from roller_svc.perf.cpu_costs import CpuCosts
from roller_svc.perf.cpu_costs_fitted import FITTED
from roller_svc.perf.uncertainty import AssumedStages, find_assumed_stages

SCHEDULERS = 4  # parts of a core that warps stay on: four schedulers since Kepler, four SIMDs in GCN and CDNA
# Cycles that such a part takes to issue one instruction of a warp. A SIMD has 16 lanes for 64 threads (AMD GCN
# Architecture whitepaper, 2012; CDNA keeps it).
ISSUE_CYCLES = {TargetKind.AMD: 4.0}
# What the first cache of a core gives in a cycle: there 64 bytes, elsewhere a line (CUDA C++ Programming Guide: 128).
L1_BYTES_PER_CYCLE = {TargetKind.AMD: 64.0}
LOAD_PORTS = 2.0  # of a CPU's core; each takes a vector a cycle, or a half of one
# Operations that a CPU's core issues in a cycle, and holds until the oldest is done: Skylake (Agner Fog), and Zen 4
# (Software Optimization Guide for the AMD Zen4 Microarchitecture, 57647).
ISSUE_WIDTH, ISSUE_WIDTH_OF = 4.0, {"amd": 6.0}
ROB_ENTRIES, ROB_ENTRIES_OF = 224, {"amd": 320}
LINE_BYTES, LINE_THREADS = 128.0, 32  # of NVIDIA's first cache, and the threads that take 4 bytes each of it


@dataclass(frozen=True, slots=True)
class Cache:
    """A level between DRAM and the registers, as one core sees it."""

    name: str
    bytes_per_core: int  # what one core can use when all are busy
    total_bytes: int
    bytes_per_s: float  # of the whole device
    latency_cycles: float


@dataclass(frozen=True, slots=True)
class Machine:
    """`fma_per_cycle`: multiply-adds of one core. `staged_bytes_per_cycle`: what a core reads of its block level."""

    hw: HardwareSpec
    unit: ComputeUnit
    is_gpu: bool
    cores: int
    clock_hz: float
    fma_per_cycle: float
    issue_per_cycle: float  # instructions of warps that a core issues
    l1_bytes_per_cycle: float
    staged_bytes_per_cycle: float
    dram: MemoryLevel
    dram_latency_cycles: float
    caches: tuple[Cache, ...]  # outermost first; a GPU: its L2
    assumed_stages: AssumedStages
    costs: CpuCosts = FITTED

    @property
    def llc(self) -> Cache | None:
        return self.caches[0] if self.caches else None

    @property
    def request_cycles(self) -> float:
        """Of the first cache, for 4 bytes to each thread of a warp."""
        lines = max(1.0, self.hw.limits.warp_size / LINE_THREADS)
        return lines * LINE_BYTES / self.l1_bytes_per_cycle

    @property
    def load_ports(self) -> float:
        """Vectors that a CPU's core reads of its first cache in a cycle."""
        return self.caches[-1].bytes_per_s / (self.cores * self.clock_hz * self.hw.vector_bytes)

    @property
    def store_cycles(self) -> float:
        """Of a CPU's core, for one vector into its first cache: half as fast as vectors are read."""
        return 2.0 / self.load_ports

    @property
    def issue_width_ratio(self) -> float:
        """What a CPU's core issues in a cycle, in parts of what one does that the constants were written down for."""
        return ISSUE_WIDTH_OF.get(self.hw.vendor, ISSUE_WIDTH) / ISSUE_WIDTH

    @property
    def rob_ratio(self) -> float:
        """The same of the operations that it holds."""
        return ROB_ENTRIES_OF.get(self.hw.vendor, ROB_ENTRIES) / ROB_ENTRIES

    @property
    def l2_bytes_per_cycle(self) -> float:
        """What a CPU's core reads of its second cache."""
        return self.caches[-2].bytes_per_s / self.cores / self.clock_hz

    @property
    def division_cycles(self) -> float:
        """Of a CPU's core, for one vector divided by another: what the spec has, or else the constant."""
        rate = self.unit.quotients_per_s
        if rate is None:
            return self.costs.loops.quotient_cycles
        return self.unit.shape[-1] * self.cores * self.clock_hz / rate

    def seconds(self, cycles: float) -> float:
        return cycles / self.clock_hz

    def max_bytes_per_s(self, level: str) -> float:
        """What no kernel surpasses at a level, by name. A CPU's achievable rate is that of reading; other ways, as
        stores past the caches beside reads, may be faster, and its peak is the fastest of them."""
        found = next(lv for lv in self.hw.levels if lv.name == level)
        peak = None if self.is_gpu else found.peak_bandwidth_bytes_per_s
        return max(found.bandwidth_bytes_per_s, peak or 0.0)


def prepare_machine(hw: HardwareSpec, unit: ComputeUnit) -> Machine:
    """Everything that does not depend on the tile."""
    simt = hw.family is not TargetKind.CPU
    staged = hw.tile_levels[0] if simt else ""
    between = [lv for lv in hw.levels[1:] if lv.scope is not Scope.THREAD and lv.name != staged]
    return Machine(
        hw=hw,
        unit=unit,
        is_gpu=simt,
        cores=hw.num_cores,
        clock_hz=hw.clock_hz,
        fma_per_cycle=unit.flops_per_s / (2 * hw.num_cores * hw.clock_hz),
        issue_per_cycle=SCHEDULERS / ISSUE_CYCLES.get(hw.family, 1.0),
        l1_bytes_per_cycle=L1_BYTES_PER_CYCLE.get(hw.family, LINE_BYTES),
        staged_bytes_per_cycle=hw.block_level.bandwidth_bytes_per_s / (hw.num_cores * hw.clock_hz),
        dram=hw.dram,
        dram_latency_cycles=hw.dram.latency_s * hw.clock_hz,
        caches=tuple(_cache(hw, lv) for lv in between),
        assumed_stages=find_assumed_stages(hw, unit),
    )


def _cache(hw: HardwareSpec, level: MemoryLevel) -> Cache:
    shared = level.scope is Scope.DEVICE
    return Cache(
        name=level.name,
        bytes_per_core=level.capacity_bytes // hw.num_cores if shared else level.capacity_bytes,
        total_bytes=level.capacity_bytes if shared else level.capacity_bytes * hw.num_cores,
        bytes_per_s=level.bandwidth_bytes_per_s,
        latency_cycles=level.latency_s * hw.clock_hz,
    )


def register_words(dtype: DType) -> int:
    """4-byte registers that a value takes on a GPU."""
    return max(1, dtype.bytes // 4)
