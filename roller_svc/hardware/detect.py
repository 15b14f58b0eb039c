"""Host CPU, from /proc and /sys in milliseconds → HardwareSpec with id `local`.

Values that the system does not report (load bandwidths, latencies, FMA ports) are scaled from the nearest shipped spec
and marked as assumed; calibration measures them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from roller_svc.hardware.schema import plain_name
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch, ComputeUnit, HardwareSpec, MemoryLevel, Source, UnitKind

PROC = Path("/proc")
SYS = Path("/sys")
AVX2_BASE, AVX512_BASE, NEON_BASE = "cpu-x86-avx2", "cpu-x86-avx512", "cpu-arm-neon"
_X86_MACHINES = ("x86_64", "amd64", "AMD64")
_ARM_MACHINES = ("aarch64", "arm64")
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})  # the x86-64-v4 set

# /proc/cpuinfo's name -> the compiler's (-m... on x86, +... in -march on Arm)
_ISA_BY_FLAG = {
    "sse4_2": "sse4.2", "avx": "avx", "avx2": "avx2", "fma": "fma", "f16c": "f16c", "bmi1": "bmi", "bmi2": "bmi2",
    "avx_vnni": "avxvnni", "avx512f": "avx512f", "avx512bw": "avx512bw", "avx512cd": "avx512cd",
    "avx512dq": "avx512dq", "avx512vl": "avx512vl", "avx512vbmi": "avx512vbmi", "avx512_vbmi2": "avx512vbmi2",
    "avx512_vnni": "avx512vnni", "avx512_bf16": "avx512bf16", "avx512_fp16": "avx512fp16", "amx_tile": "amx-tile",
    "amx_int8": "amx-int8", "amx_bf16": "amx-bf16", "asimd": "simd", "asimdhp": "fp16", "asimddp": "dotprod",
    "i8mm": "i8mm", "bf16": "bf16", "sve": "sve", "sve2": "sve2",
}  # fmt: skip
# Features with dot products: bytes of vectors, name, operand type, accumulator type.
_DOTS = {
    "avxvnni": (32, "dot_i8", DType.INT8, DType.INT32),
    "avx512vnni": (64, "dot_i8", DType.INT8, DType.INT32),
    "avx512bf16": (64, "dot_bf16", DType.BFLOAT16, DType.FLOAT32),
}
_WORD_BYTES = 4  # of a lane's operands
_VENDORS = {"GenuineIntel": "intel", "AuthenticAMD": "amd", "HygonGenuine": "hygon", "CentaurHauls": "zhaoxin"}

_MHZ = re.compile(r"[1-9]\d{0,5}(\.\d+)?")

# DRAM channels are invisible to software: bandwidth of one core, and of a socket.
_CORE_DRAM_BYTES_PER_S = 12e9
_SOCKET_DRAM_BYTES_PER_S = 300e9
# Non-temporal bandwidth over read bandwidth on Skylake-SP: 6.8 GB/s written, 9.8 copied, 12.2 read.
_NONTEMPORAL_WRITE_RATIO, _NONTEMPORAL_COPY_RATIO = 0.56, 0.8
# Bandwidth with software prefetch over without on Skylake-SP: a map in DRAM 12.4 over 8.9 GB/s, a sum in L3 20 over 13.
_PREFETCH_SPEEDUP = {"dram": 1.4, "l3": 1.5}
# A core of an Intel server chip, whose LLC is sliced on a mesh: 10 to 20 GB/s from L3, measured on Skylake-SP.
_CORE_MESH_L3_BYTES_PER_S = 15e9


@dataclass(frozen=True, slots=True)
class Machine:
    """CPU properties that the system reports; None or empty if it does not report them."""

    machine: str
    vendor: str
    model_name: str
    cpu_family: int
    flags: frozenset[str]
    cores: int
    clock_hz: float | None
    cache_bytes: tuple[tuple[int, int], ...]  # (level, bytes of one data or unified cache)
    memory_bytes: int | None

    @property
    def is_mesh(self) -> bool:
        """Whether the cores share a sliced LLC on a mesh, as in Intel's server chips since Skylake-SP."""
        return self.vendor == "intel" and "Xeon" in self.model_name and "avx512f" in self.flags

    def cache(self, level: int) -> int | None:
        return dict(self.cache_bytes).get(level)


def probe(proc: Path = PROC, sys: Path = SYS) -> Machine:
    """Read the properties of this machine. Opens no device and starts no process."""
    info = _cpuinfo(proc)
    flags = info.get("flags") or info.get("Features") or ""
    vendor = info.get("vendor_id", "")
    machine = os.uname().machine
    return Machine(
        machine=machine,
        vendor=_VENDORS.get(vendor, "arm" if machine in _ARM_MACHINES else "unknown"),
        model_name=plain_name(info.get("model name", machine)[:80]),
        cpu_family=int(info["cpu family"]) if info.get("cpu family", "").isdecimal() else 0,
        flags=frozenset(flags.split()),
        cores=_usable_cores(sys),
        clock_hz=_clock_hz(info, sys),
        cache_bytes=_caches(sys),
        memory_bytes=_memory_bytes(),
    )


def base_id(machine: Machine) -> str | None:
    """Return the id of the shipped spec that is nearest to the CPU; None for a family without one."""
    if machine.machine in _ARM_MACHINES:
        return NEON_BASE
    if machine.machine in _X86_MACHINES:
        return AVX512_BASE if machine.flags >= _AVX512 else AVX2_BASE
    return None


def adapt_to_machine(base: HardwareSpec, machine: Machine) -> HardwareSpec:
    """Return the base spec with this machine's cores, clock, caches and the rates derived from them."""
    clock_hz = machine.clock_hz or base.clock_hz
    isa = tuple(name for flag, name in _ISA_BY_FLAG.items() if flag in machine.flags) or base.isa
    has_avx2 = base.id != AVX2_BASE or "avx2" in isa
    vector_bytes = base.vector_bytes if has_avx2 else 16
    ports = _fma_ports(base, machine)
    l2_bytes = machine.cache(2) or base.level("l2").capacity_bytes
    units = tuple(_unit(unit, base, machine.cores * clock_hz, vector_bytes, ports) for unit in base.units)
    dram, *caches = (_level(level, base, machine, clock_hz) for level in base.levels[:-1])
    through_caches = min(dram.bandwidth_bytes_per_s, caches[0].bandwidth_bytes_per_s)
    return replace(
        base,
        id="local",
        name=machine.model_name,
        vendor=machine.vendor,
        arch=base.arch if has_avx2 else Arch("x86-64-v", 2),
        num_cores=machine.cores,
        clock_hz=clock_hz,
        vector_bytes=vector_bytes,
        isa=isa,
        levels=(
            replace(dram, bandwidth_bytes_per_s=through_caches),
            *caches,
            _registers(base, machine, clock_hz, vector_bytes),
        ),
        units=(*units, *_dot_units(units, isa, vector_bytes)),
        limits=replace(base.limits, shared_bytes_per_core=l2_bytes, shared_bytes_per_block=l2_bytes * 3 // 4),
        sources=_sources(base, ports),
    )


def _level(level: MemoryLevel, base: HardwareSpec, machine: Machine, clock_hz: float) -> MemoryLevel:
    if machine.vendor != base.vendor:
        level = replace(level, hinted_gain=_PREFETCH_SPEEDUP.get(level.name, 1.0))
    if level.name == "dram":
        if machine.vendor != base.vendor:
            level = replace(
                level,
                streamed_write_gain=_NONTEMPORAL_WRITE_RATIO,
                streamed_copy_gain=_NONTEMPORAL_COPY_RATIO,
                write_gain=1.0,
                copy_gain=1.0,
            )
        rate = _CORE_DRAM_BYTES_PER_S * machine.cores
        rate = rate if machine.is_mesh else max(level.bandwidth_bytes_per_s, rate)
        return replace(
            level,
            capacity_bytes=machine.memory_bytes or level.capacity_bytes,
            bandwidth_bytes_per_s=min(rate, _SOCKET_DRAM_BYTES_PER_S),
            peak_bandwidth_bytes_per_s=None,
        )
    scale = machine.cores * clock_hz / (base.num_cores * base.clock_hz)
    capacity = level.capacity_bytes
    if level.name in ("l1", "l2"):
        capacity = machine.cache(int(level.name[1])) or capacity
    elif level.name == "l3" and machine.cache_bytes:
        # Without an L3, the capacity outside a core is that of all L2 caches together.
        capacity = machine.cache(3) or machine.cores * (machine.cache(2) or base.level("l2").capacity_bytes)
    peak = level.peak_bandwidth_bytes_per_s
    rate = level.bandwidth_bytes_per_s * scale
    if level.name == "l3" and machine.is_mesh:
        rate = min(rate, _CORE_MESH_L3_BYTES_PER_S * machine.cores)
    return replace(
        level,
        capacity_bytes=capacity,
        bandwidth_bytes_per_s=rate,
        peak_bandwidth_bytes_per_s=None if peak is None else peak * scale,
        latency_s=level.latency_s * base.clock_hz / clock_hz,
    )


def _registers(base: HardwareSpec, machine: Machine, clock_hz: float, vector_bytes: int) -> MemoryLevel:
    scaled = _level(base.levels[-1], base, machine, clock_hz)
    return replace(
        scaled,
        capacity_bytes=base.limits.registers_per_core * vector_bytes,
        bandwidth_bytes_per_s=scaled.bandwidth_bytes_per_s * vector_bytes / base.vector_bytes,
        transaction_bytes=vector_bytes,
    )


def _unit(unit: ComputeUnit, base: HardwareSpec, clocks_per_s: float, vector_bytes: int, ports: int) -> ComputeUnit:
    """Return a unit with a peak of core-clocks x lanes x 2 x ports, and the base's ratios of types and to the peak."""
    lanes = vector_bytes // unit.acc_dtype.bytes
    reference = next(u for u in base.units if u.in_dtype is DType.FLOAT32)
    relative = (unit.flops_per_s / unit.shape[-1]) / (reference.flops_per_s / reference.shape[-1])
    efficiency = reference.flops_per_s / (reference.peak_flops_per_s or reference.flops_per_s)
    peak = clocks_per_s * lanes * 2 * ports * relative
    return replace(
        unit, shape=(*unit.shape[:-1], lanes), flops_per_s=peak * efficiency, peak_flops_per_s=peak, quotients_per_s=None
    )


def _dot_units(units: tuple[ComputeUnit, ...], isa: tuple[str, ...], vector_bytes: int) -> tuple[ComputeUnit, ...]:
    """Return dot-product units, which issue as many instructions per clock as FMA (measured on Zen 4)."""
    fma = next(u for u in units if u.in_dtype is DType.FLOAT32)
    dot_units = []
    for dot_bytes, name, operand_dtype, acc_dtype in (dot for feature, dot in _DOTS.items() if feature in isa):
        if dot_bytes != vector_bytes:
            continue
        group = _WORD_BYTES // operand_dtype.bytes
        peak = None if fma.peak_flops_per_s is None else group * fma.peak_flops_per_s
        shape, rate = (group, *fma.shape), group * fma.flops_per_s
        dot_units.append(ComputeUnit(name, UnitKind.DOT, shape, operand_dtype, acc_dtype, rate, peak_flops_per_s=peak))
    return tuple(dot_units)


def _fma_ports(base: HardwareSpec, machine: Machine) -> int:
    """Return the number of vector FMA instructions that can start in one clock."""
    if base.id == AVX512_BASE:
        zen4 = machine.vendor == "amd" and machine.cpu_family == 25  # 512-bit operations take two passes
        small_intel = machine.vendor == "intel" and "Xeon" not in machine.model_name
        return 1 if zen4 or small_intel else 2
    return 2 if base.id == NEON_BASE or "fma" in machine.flags or not machine.flags else 1


def _sources(base: HardwareSpec, ports: int) -> tuple[Source, ...]:
    return (
        Source(
            ("num_cores", "levels.*.capacity_bytes", "limits.shared_bytes_*"),
            "This machine: sched_getaffinity, the cgroup's CPU quota, /sys/devices/system/cpu, sysconf; a task keeps"
            " to three quarters of L2.",
        ),
        Source(("vector_bytes", "units.*.shape"), "This machine: feature flags in /proc/cpuinfo."),
        Source(
            ("clock_hz",),
            "This machine: cpufreq's maximum or /proc/cpuinfo's MHz, which a virtual machine may report lower than the cores run.",
            assumed=True,
        ),
        Source(
            ("units.*",),
            f"Cores x clock x lanes x 2 x {ports} FMA ports, and {base.id}'s share of that peak; on a"
            " shared machine a neighbour on the same physical core takes up to half. Dot products: as many"
            " instructions a clock.",
            assumed=True,
        ),
        Source(
            ("levels", "limits"),
            f"{base.id}, per core and clock: a bandwidth scaled by cores and clock, a latency"
            " by clock; DRAM 12 GB/s a core, L3 of Intel servers 15; on other vendors' CPUs non-temporal"
            " stores and prefetch as on Skylake-SP.",
            assumed=True,
        ),
    )


def _cpuinfo(proc: Path) -> dict[str, str]:
    """Return the first processor's fields; empty without /proc."""
    text = _read(proc / "cpuinfo") or ""
    fields = (line.partition(":") for line in text.split("\n\n", 1)[0].splitlines())
    return {key.strip(): value.strip() for key, colon, value in fields if colon}


def _usable_cores(sys: Path) -> int:
    """Return the number of cores that this process may use.

    Hardware threads of one core count once. A container's quota is an upper bound.
    """
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    topology = sys / "devices/system/cpu"
    cores = {_read(topology / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus}
    quota = _quota_cores(sys)
    return max(1, min(len(cores), quota or len(cores)))


def _quota_cores(sys: Path) -> int | None:
    quota, _, period = (_read(sys / "fs/cgroup/cpu.max") or "").partition(" ")
    if not (quota.isdecimal() and period.isdecimal() and int(period)):
        return None
    return max(1, round(int(quota) / int(period)))


def _clock_hz(info: dict[str, str], sys: Path) -> float | None:
    fastest_khz = _read(sys / "devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq") or ""
    if fastest_khz.isdecimal() and int(fastest_khz):
        return int(fastest_khz) * 1e3
    now_mhz = _MHZ.fullmatch(info.get("cpu MHz", ""))
    return round(float(now_mhz[0])) * 1e6 if now_mhz else None


def _caches(sys: Path) -> tuple[tuple[int, int], ...]:
    directory = sys / "devices/system/cpu/cpu0/cache"
    sizes: dict[int, int] = {}
    for index in sorted(directory.glob("index*")):
        level, kind, size = (_read(index / field) or "" for field in ("level", "type", "size"))
        if kind != "Instruction" and level.isdecimal() and size[:-1].isdecimal():
            sizes[int(level)] = int(size[:-1]) * {"K": 1 << 10, "M": 1 << 20}.get(size[-1], 1)
    return tuple(sorted((level, size) for level, size in sizes.items() if size))


def _memory_bytes() -> int | None:
    names = os.sysconf_names
    if "SC_PHYS_PAGES" not in names or "SC_PAGE_SIZE" not in names:
        return None
    pages = os.sysconf("SC_PHYS_PAGES")
    return pages * os.sysconf("SC_PAGE_SIZE") if pages > 0 else None


def _read(path: Path) -> str | None:
    """Return a small file's text; None if it is missing or unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
