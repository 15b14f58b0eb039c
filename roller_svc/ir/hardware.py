"""What a device is: memory levels, compute units, limits. A spec is data and never opens a device."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache

from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType


class TargetKind(Enum):
    """Instruction-set families; each has one generator, one toolchain, one runtime (backends.py)."""

    CUDA = "cuda"
    AMD = "amd"
    IPU = "ipu"
    CPU = "cpu"


_ARCH = re.compile(r"(?:(sm_|ipu|x86-64-v|armv)([1-9]\d{0,3})([a-z]?)|(gfx)([1-9][\da-f]{2,3}))")


@dataclass(frozen=True, slots=True, order=True)
class Arch:
    """An architecture, parsed once and compared as numbers: sm_100 > sm_90. `suffix` is the 'a' of sm_90a.

    AMD counts in hexadecimal: gfx90a is 0x90a, between gfx906 and gfx942, and has no suffix.
    """

    prefix: str
    number: int
    suffix: str = ""

    def __str__(self) -> str:
        number = f"{self.number:x}" if self.prefix == "gfx" else str(self.number)
        return f"{self.prefix}{number}{self.suffix}"


def arch_named(text: str) -> Arch | None:
    """'sm_90a' -> Arch; None where the text is no architecture's name."""
    match = _ARCH.fullmatch(text)
    if match is None:
        return None
    return Arch(match[4], int(match[5], 16)) if match[4] else Arch(match[1], int(match[2]), match[3])


class Scope(Enum):
    """Who shares one instance of a memory level."""

    DEVICE = "device"
    CORE = "core"  # an SM, a CU, a tile, a CPU core
    THREAD = "thread"


@dataclass(frozen=True, slots=True)
class MemoryLevel:
    """One level. `capacity_bytes` is of one instance; `bandwidth_bytes_per_s` is of all instances together.

    `bandwidth_bytes_per_s` is the achievable rate, of a CPU that of reading; `peak_bandwidth_bytes_per_s` the vendor's,
    or what the fastest of all ways to move bytes there was measured at (None: not stated).
    `streamed_write_gain`: what stores past all caches are faster than reading by, where nothing holds the data.
    `streamed_copy_gain`: what a copy whose stores go past them is faster than reading alone by, both sides counted.
    `write_gain`, `copy_gain`: the same two of stores through the caches, with hints ahead where these pay.
    `hinted_gain`: what a walk with hints ahead of it (prefetch instructions) is faster than one without by.
    """

    name: str
    scope: Scope
    capacity_bytes: int
    bandwidth_bytes_per_s: float
    latency_s: float
    transaction_bytes: int
    banks: int = 1
    bank_bytes: int = 4
    peak_bandwidth_bytes_per_s: float | None = None
    streamed_write_gain: float = 1.0
    streamed_copy_gain: float = 1.0
    write_gain: float = 1.0
    copy_gain: float = 1.0
    hinted_gain: float = 1.0


class UnitKind(Enum):
    FMA = "fma"  # scalar lanes of a SIMT machine
    VECTOR = "vector"  # SIMD registers of a CPU
    DOT = "dot"  # the same where an instruction adds several products to each lane's sum
    MMA = "mma"
    WGMMA = "wgmma"
    MFMA = "mfma"
    AMP = "amp"  # Graphcore's accumulating matrix product


@dataclass(frozen=True, slots=True)
class ComputeUnit:
    """One kind of execution unit. `shape` is what one instruction computes: (m, n, k), (lanes,), or, of a dot product,
    (k, lanes).

    Where an instruction comes in sizes (wgmma's n), `shape` is the smallest, the granule tiles align to, and
    `max_shape` the largest. float32 in a matrix unit of NVIDIA means tf32. `flops_per_s`: achievable rate of the
    whole device, a multiply and an add counted as two; `peak_flops_per_s`: the vendor's, None where none is stated.
    `quotients_per_s`: of a CPU's vectors one divided by another, whole device, None where nobody measured it.
    """

    name: str
    kind: UnitKind
    shape: tuple[int, ...]
    in_dtype: DType
    acc_dtype: DType
    flops_per_s: float
    max_shape: tuple[int, ...] = ()  # empty: `shape` is the only size
    peak_flops_per_s: float | None = None
    quotients_per_s: float | None = None

    @property
    def is_matrix(self) -> bool:
        """Whether one instruction multiplies matrices."""
        return self.kind not in (UnitKind.FMA, UnitKind.VECTOR, UnitKind.DOT)

    @property
    def k_group(self) -> int:
        """Neighbours along k that a CPU's instruction multiplies at once in each lane: they are packed as one word."""
        return self.shape[0] if self.kind is UnitKind.DOT else 1

    @property
    def takes_fragments(self) -> bool:
        """Whether each warp issues its instructions, on fragments of matrices that its lanes hold in registers."""
        return self.kind in (UnitKind.MMA, UnitKind.MFMA)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a kernel must fit into, one core's share unless it says otherwise. A CPU's warp_size is 1."""

    warp_size: int
    max_threads_per_block: int
    max_threads_per_core: int
    max_blocks_per_core: int
    registers_per_core: int  # of 4 bytes; a CPU: vector registers of one thread
    max_registers_per_thread: int
    shared_bytes_per_block: int  # a CPU: what one task should keep in its private caches
    shared_bytes_per_core: int
    launch_overhead_s: float
    shared_bytes_reserved_per_block: int = 0  # what the system takes of a core's shared memory for each block


@dataclass(frozen=True, slots=True)
class Source:
    """Where figures come from. `fields` are the spec's fields that it stands for; `assumed`: nobody measured it."""

    fields: tuple[str, ...]
    text: str
    assumed: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """One micro-benchmark on so many cores: the least, the median and the most of its samples, in `unit`: seconds
    ("s"), or a rate. `quiet`: what it gives where nothing else runs, as far as the samples tell. `figure`: the field of
    the spec that was taken from it, None where none was."""

    name: str
    unit: str
    cores: int
    min: float
    median: float
    max: float
    quiet: float
    samples: int
    how: str
    figure: str | None = None


def source_matches(pattern: str, path: str) -> bool:
    """Whether a source's field pattern stands for a figure: itself, what contains it, or a `*` pattern of either."""
    return _any_of((pattern,)).match(path) is not None


@lru_cache(maxsize=1024)
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """What matches a figure that one of them stands for."""
    tried = "|".join(re.escape(pattern).replace(r"\*", "[^.]*") for pattern in patterns)
    return re.compile(rf"(?:{tried})(?:\.|$)" if patterns else "(?!)")


@dataclass(frozen=True, slots=True)
class HardwareSpec:
    """A device as the model sees it. `levels` go from the outermost (dram) to the innermost (register).

    `tile_levels` name the two levels that rTiles are built for: the one a block (or CPU task) fills and the one a
    thread fills. `toolchain` says what compiles for it; `toolchain_note` why nothing does, where nothing does.
    """

    id: str
    name: str
    vendor: str
    family: TargetKind
    arch: Arch
    num_cores: int
    clock_hz: float
    levels: tuple[MemoryLevel, ...]
    units: tuple[ComputeUnit, ...]
    limits: Limits
    tile_levels: tuple[str, str]
    sources: tuple[Source, ...] = ()
    vector_bytes: int = 16  # widest load or store of one thread
    isa: tuple[str, ...] = ()  # CPU features in the compiler's names: avx2, fma, avx512f, ...
    # how figures were found: specs that differ in nothing else are equal, and so is all that is made for them
    measured: tuple[Measured, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        names = [level.name for level in self.levels]
        if missing := [name for name in self.tile_levels if name not in names]:
            raise InvariantError(f"{self.id}: tile_levels name {missing}, levels are {names}")

    def level(self, name: str) -> MemoryLevel:
        for level in self.levels:
            if level.name == name:
                return level
        raise InvariantError(f"{self.id} has no memory level {name}")

    def is_assumed(self, field: str) -> bool:
        """Whether nobody measured or published a figure; the first source that stands for it says, as in all specs."""
        found = next((s for s in self.sources if _any_of(s.fields).match(field)), None)
        return found is None or found.assumed

    @property
    def dram(self) -> MemoryLevel:
        return self.levels[0]

    @property
    def block_level(self) -> MemoryLevel:
        return self.level(self.tile_levels[0])

    def exceeds_caches(self, tensor_bytes: int, accessed_bytes: int) -> bool:
        """Whether a tensor comes from beyond the caches of a core whose kernel touches so much: they do not hold all of
        that, nor is the tensor a small part of what they hold."""
        held = self.block_level.capacity_bytes
        return accessed_bytes > held and tensor_bytes > held // 2

    @property
    def thread_level(self) -> MemoryLevel:
        return self.level(self.tile_levels[1])

    def unit_for(self, dtype: DType) -> ComputeUnit:
        """The scalar or vector unit that computes in `dtype` (its compute type); the nearest one where none does."""
        plain = [u for u in self.units if u.kind in (UnitKind.FMA, UnitKind.VECTOR)]
        exact = [u for u in plain if u.in_dtype is dtype.compute]
        if exact:
            return exact[0]
        same_width = [u for u in plain if u.in_dtype.bits == max(32, dtype.compute.bits)]
        return (same_width or plain)[0]
