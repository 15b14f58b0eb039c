"""Hardware specs: memory levels, compute units, limits. A spec is data and never opens a device."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache

from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType


class TargetKind(Enum):
    """Kinds of targets. Each has one code generator, one toolchain and one runtime (compiler/backends.py)."""

    CUDA = "cuda"
    AMD = "amd"
    IPU = "ipu"
    CPU = "cpu"


_ARCH = re.compile(r"(?:(sm_|ipu|x86-64-v|armv)([1-9]\d{0,3})([a-z]?)|(gfx)([1-9][\da-f]{2,3}))")


@dataclass(frozen=True, slots=True, order=True)
class Arch:
    """An architecture, compared by number: sm_100 > sm_90.

    AMD counts in hexadecimal: gfx90a is 0x90a, between gfx906 and gfx942, and has no suffix.
    """

    prefix: str
    number: int
    suffix: str = ""  # the "a" of sm_90a

    def __str__(self) -> str:
        number = f"{self.number:x}" if self.prefix == "gfx" else str(self.number)
        return f"{self.prefix}{number}{self.suffix}"


def arch_named(text: str) -> Arch | None:
    """Parse a name such as "sm_90a"; return None if it is not the name of an architecture."""
    match = _ARCH.fullmatch(text)
    if match is None:
        return None
    return Arch(match[4], int(match[5], 16)) if match[4] else Arch(match[1], int(match[2]), match[3])


class Scope(Enum):
    """The part of the device that has one instance of a memory level."""

    DEVICE = "device"
    CORE = "core"  # an SM, a CU, a tile, a CPU core
    THREAD = "thread"


@dataclass(frozen=True, slots=True)
class MemoryLevel:
    """One memory level. Gains are ratios to the read bandwidth; reads and writes of a copy both count."""

    name: str
    scope: Scope
    capacity_bytes: int  # of one instance
    bandwidth_bytes_per_s: float  # achievable, of all instances together; of a CPU the read bandwidth
    latency_s: float
    transaction_bytes: int
    banks: int = 1
    bank_bytes: int = 4
    peak_bandwidth_bytes_per_s: float | None = None  # the vendor's, or the highest measured; None: unknown
    streamed_write_gain: float = 1.0  # bandwidth of non-temporal stores
    streamed_copy_gain: float = 1.0  # bandwidth of a copy with non-temporal stores
    write_gain: float = 1.0  # bandwidth of cached stores, with software prefetch where it is profitable
    copy_gain: float = 1.0  # bandwidth of a copy with cached stores, with software prefetch where it is profitable
    hinted_gain: float = 1.0  # read bandwidth with software prefetch


class UnitKind(Enum):
    FMA = "fma"  # FMA units of a SIMT machine
    VECTOR = "vector"  # SIMD registers of a CPU
    DOT = "dot"  # SIMD registers of a CPU, with instructions that add several products to each lane's accumulator
    MMA = "mma"
    WGMMA = "wgmma"
    MFMA = "mfma"
    AMP = "amp"  # Graphcore's accumulating matrix product


@dataclass(frozen=True, slots=True)
class ComputeUnit:
    """One kind of execution unit.

    Where an instruction comes in several sizes (n of wgmma), `shape` is the smallest, to which tiles align, and
    `max_shape` the largest. float32 in a matrix unit of NVIDIA means tf32.
    """

    name: str
    kind: UnitKind
    shape: tuple[int, ...]  # of one instruction: (m, n, k), (lanes,), or, of a dot product, (k, lanes)
    in_dtype: DType
    acc_dtype: DType
    flops_per_s: float  # achievable, of the whole device; a multiply and an add count as two
    max_shape: tuple[int, ...] = ()  # empty: `shape` is the only size
    peak_flops_per_s: float | None = None  # the vendor's; None: unknown
    quotients_per_s: float | None = None  # vector divisions of a CPU, whole device; None: not measured

    @property
    def is_matrix(self) -> bool:
        """Return whether one instruction multiplies matrices."""
        return self.kind not in (UnitKind.FMA, UnitKind.VECTOR, UnitKind.DOT)

    @property
    def k_group(self) -> int:
        """Return the consecutive elements along k that a CPU's instruction takes in each lane, packed as one word."""
        return self.shape[0] if self.kind is UnitKind.DOT else 1

    @property
    def adds_apart(self) -> bool:
        """Return whether an instruction of its own adds dot products to accumulators."""
        return self.kind is UnitKind.DOT and self.in_dtype is DType.INT16

    @property
    def takes_fragments(self) -> bool:
        """Return whether warps issue the instructions, on matrix fragments in registers."""
        return self.kind in (UnitKind.MMA, UnitKind.MFMA)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a kernel, per core unless the name says otherwise. A CPU's warp_size is 1."""

    warp_size: int
    max_threads_per_block: int
    max_threads_per_core: int
    max_blocks_per_core: int
    registers_per_core: int  # of 4 bytes; CPU: vector registers of one thread
    max_registers_per_thread: int
    shared_bytes_per_block: int  # CPU: capacity of the private caches for one task
    shared_bytes_per_core: int
    launch_overhead_s: float
    shared_bytes_reserved_per_block: int = 0  # taken by the system for each block
    # What lowerings of models cost, on GPUs that have them.
    graph_node_s: float | None = None  # from a node of a graph to the next one
    pdl_node_s: float | None = None  # the same by a programmatic edge
    cooperative_launch_s: float | None = None
    signal_s: float | None = None  # to release an event
    wait_s: float | None = None  # from the release of an event until a waiting block sees it


@dataclass(frozen=True, slots=True)
class Source:
    """The source of values of a spec."""

    fields: tuple[str, ...]  # patterns of the spec's fields
    text: str
    assumed: bool = False  # neither measured nor published


@dataclass(frozen=True, slots=True)
class Measured:
    """The samples of one micro-benchmark."""

    name: str
    unit: str  # "s", or a rate
    cores: int  # that ran it
    min: float
    median: float
    max: float
    quiet: float  # estimate without interference of other processes
    samples: int
    how: str  # method
    figure: str | None = None  # field of the spec that has the value; None: no field


def source_matches(pattern: str, path: str) -> bool:
    """Return whether a source's field pattern matches a field: the field, one that contains it, or a `*` pattern."""
    return _any_of((pattern,)).match(path) is not None


@lru_cache(maxsize=1024)
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Return an expression that matches the fields of any of the patterns."""
    alternatives = "|".join(re.escape(pattern).replace(r"\*", "[^.]*") for pattern in patterns)
    return re.compile(rf"(?:{alternatives})(?:\.|$)" if patterns else "(?!)")


@dataclass(frozen=True, slots=True)
class HardwareSpec:
    """A device."""

    id: str
    name: str
    vendor: str
    family: TargetKind
    arch: Arch
    num_cores: int
    clock_hz: float
    levels: tuple[MemoryLevel, ...]  # from dram to registers
    units: tuple[ComputeUnit, ...]
    limits: Limits
    tile_levels: tuple[str, str]  # levels that rTiles of a block (or CPU task) and of a thread fill
    sources: tuple[Source, ...] = ()
    vector_bytes: int = 16  # widest load or store of one thread
    isa: tuple[str, ...] = ()  # CPU features in the compiler's names: avx2, fma, avx512f, ...
    # not compared: specs that differ in it only are equal, and share their kernels
    measured: tuple[Measured, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        names = [level.name for level in self.levels]
        if missing := [name for name in self.tile_levels if name not in names]:
            raise InvariantError(f"{self.id}: tile_levels name {missing}, levels are {names}")

    def level(self, name: str) -> MemoryLevel:
        for level in self.levels:
            if level.name == name:
                return level
        raise InvariantError(f"{self.id} has no memory level {name}; levels are {', '.join(level.name for level in self.levels)}")

    def is_assumed(self, field: str) -> bool:
        """Return whether a field is neither measured nor published. The first source that matches decides."""
        for source in self.sources:
            if _any_of(source.fields).match(field):
                return source.assumed
        return True

    @property
    def permutes_bytes(self) -> bool:
        """Whether an instruction of a CPU looks up bytes in two registers of 64."""
        return "avx512vbmi" in self.isa and self.vector_bytes == 64

    @property
    def shuffles_bytes(self) -> bool:
        """Whether an instruction of a CPU shuffles the bytes of a register of 32, 16 at a time."""
        return "avx2" in self.isa

    @property
    def byte_group(self) -> int:
        """Return how many products of bytes along a sum one instruction of a CPU adds to an int32; 0 without one."""
        return max((unit.k_group for unit in self.units if unit.kind is UnitKind.DOT and unit.in_dtype is DType.INT8), default=0)

    @property
    def dram(self) -> MemoryLevel:
        return self.levels[0]

    @property
    def block_level(self) -> MemoryLevel:
        return self.level(self.tile_levels[0])

    def exceeds_caches(self, tensor_bytes: int, accessed_bytes: int) -> bool:
        """Return whether a tensor misses the private caches in a kernel that accesses `accessed_bytes`.

        The accessed bytes exceed the capacity, and the tensor exceeds half of it.
        """
        capacity = self.block_level.capacity_bytes
        return accessed_bytes > capacity and tensor_bytes > capacity // 2

    @property
    def thread_level(self) -> MemoryLevel:
        return self.level(self.tile_levels[1])

    def unit_for(self, dtype: DType) -> ComputeUnit:
        """Return the scalar or vector unit for the compute type of `dtype`, or the nearest one."""
        plain = [u for u in self.units if u.kind in (UnitKind.FMA, UnitKind.VECTOR)]
        exact = [u for u in plain if u.in_dtype is dtype.compute]
        if exact:
            return exact[0]
        same_width = [u for u in plain if u.in_dtype.bits == max(32, dtype.compute.bits)]
        return (same_width or plain)[0]
