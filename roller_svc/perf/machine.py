"""HardwareSpec, ComputeUnit → rates per core and cycle, in which the model's terms are written."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec, MemoryLevel, Scope, TargetKind
from roller_svc.perf.cpu_costs import CPU_COSTS, CpuCosts
from roller_svc.perf.uncertainty import AssumedStages, find_assumed_stages

SCHEDULERS = 4  # warp schedulers of an SM since Kepler; SIMDs of a CU in GCN and CDNA
# Cycles in which a scheduler issues one instruction of a warp. A SIMD has 16 lanes for 64 threads (AMD GCN
# Architecture whitepaper, 2012; CDNA keeps it).
ISSUE_CYCLES = {TargetKind.AMD: 4.0}
# L1 bytes per cycle: 64 on AMD, elsewhere a line (CUDA C++ Programming Guide: 128).
L1_BYTES_PER_CYCLE = {TargetKind.AMD: 64.0}
LOAD_PORTS = 2.0  # load ports of a CPU core; each loads a vector, or half of one, per cycle
# Issue width and reorder-buffer entries of a CPU core: Skylake (Agner Fog), and Zen 4 (Software Optimization Guide for
# the AMD Zen4 Microarchitecture, 57647).
ISSUE_WIDTH, ISSUE_WIDTH_OF = 4.0, {"amd": 6.0}
ROB_ENTRIES, ROB_ENTRIES_OF = 224, {"amd": 320}
LINE_BYTES, LINE_THREADS = 128.0, 32  # line of NVIDIA's L1, and the threads that read 4 bytes each of it


@dataclass(frozen=True, slots=True)
class Cache:
    """A cache level between DRAM and the registers: capacities, bandwidth, latency."""

    name: str
    bytes_per_core: int  # share of one core when all are busy
    total_bytes: int
    bytes_per_s: float  # of the whole device
    latency_cycles: float


@dataclass(frozen=True)
class Machine:
    """A device and one of its compute units, as rates per core and cycle.

    Terms read its properties for every tile, so they are cached.
    """

    hw: HardwareSpec
    unit: ComputeUnit
    is_gpu: bool
    cores: int
    clock_hz: float
    fma_per_cycle: float  # multiply-adds of one core
    issue_per_cycle: float  # warp instructions that a core issues
    l1_bytes_per_cycle: float
    staged_bytes_per_cycle: float  # bytes that a core reads from its block level (shared memory, L2)
    dram: MemoryLevel
    dram_latency_cycles: float
    caches: tuple[Cache, ...]  # outermost first; a GPU: its L2
    assumed_stages: AssumedStages
    costs: CpuCosts = CPU_COSTS

    @cached_property
    def llc(self) -> Cache | None:
        """Last-level cache: the outermost one."""
        return self.caches[0] if self.caches else None

    @cached_property
    def request_cycles(self) -> float:
        """L1 cycles of one warp request of 4 bytes per thread."""
        lines = max(1.0, self.hw.limits.warp_size / LINE_THREADS)
        return lines * LINE_BYTES / self.l1_bytes_per_cycle

    @cached_property
    def load_ports(self) -> float:
        """Vectors that a CPU core loads from L1 in a cycle."""
        return self.caches[-1].bytes_per_s / (self.cores * self.clock_hz * self.hw.vector_bytes)

    @cached_property
    def store_cycles(self) -> float:
        """Cycles in which a CPU core stores one vector to L1: twice those of a load."""
        return 2.0 / self.load_ports

    @cached_property
    def issue_width_ratio(self) -> float:
        """Issue width of a CPU core over that of Skylake, on which the constants were timed."""
        return ISSUE_WIDTH_OF.get(self.hw.vendor, ISSUE_WIDTH) / ISSUE_WIDTH

    @cached_property
    def rob_ratio(self) -> float:
        """Reorder-buffer entries of a CPU core over those of Skylake."""
        return ROB_ENTRIES_OF.get(self.hw.vendor, ROB_ENTRIES) / ROB_ENTRIES

    @cached_property
    def l2_bytes_per_cycle(self) -> float:
        """Bytes that a CPU core reads from L2 in a cycle."""
        return self.caches[-2].bytes_per_s / self.cores / self.clock_hz

    @cached_property
    def division_cycles(self) -> float:
        """Cycles of a CPU core to divide one vector: from the spec, else the constant."""
        rate = self.unit.quotients_per_s
        if rate is None:
            return self.costs.loops.division_cycles
        return self.unit.shape[-1] * self.cores * self.clock_hz / rate

    @cached_property
    def llc_bytes_per_cycle(self) -> float:
        """A core's share of the LLC bandwidth, in bytes per cycle; DRAM's where there is no LLC."""
        rate = self.dram.bandwidth_bytes_per_s if self.llc is None else self.llc.bytes_per_s
        return rate / (self.cores * self.clock_hz)

    @cached_property
    def dram_bytes_per_cycle(self) -> float:
        """A core's share of the DRAM bandwidth, in bytes per cycle."""
        return self.dram.bandwidth_bytes_per_s / (self.cores * self.clock_hz)

    def seconds(self, cycles: float) -> float:
        return cycles / self.clock_hz

    def max_bytes_per_s(self, level: str) -> float:
        """Return the rate that no kernel exceeds at a level, by name.

        The achievable rate of a CPU is that of reading; its peak is the fastest of all access patterns, such as non-
        temporal stores concurrent with reads.
        """
        found = next(lv for lv in self.hw.levels if lv.name == level)
        peak = None if self.is_gpu else found.peak_bandwidth_bytes_per_s
        return max(found.bandwidth_bytes_per_s, peak or 0.0)


def prepare_machine(hw: HardwareSpec, unit: ComputeUnit) -> Machine:
    """Derive the rates of a device and unit; none depends on the tile."""
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
    """Return the 4-byte registers that a value takes on a GPU."""
    return max(1, dtype.bytes // 4)
