"""Kernels as text and as binaries: what the code generators give to the toolchains and these to the runtimes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import Enum

from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch
from roller_svc.ir.tensor_map import TensorMap


class Language(Enum):
    C = "c"
    CUDA = "cuda"
    HIP = "hip"

    @property
    def suffix(self) -> str:
        return {"c": ".c", "cuda": ".cu", "hip": ".hip"}[self.value]


class Role(Enum):
    INPUT = "input"
    OUTPUT = "output"
    WORKSPACE = "workspace"  # allocated by the runtime for the length of one call, contents undefined
    STATUS = "status"  # CPU only: four int64, see Buffer


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor in memory, dense and row-major, aligned as its elements are (a GPU's: as its allocator aligns).

    `name` is the caller's name for an input or an output (an output may share an input's name: a scatter);
    `symbol` is its name in the kernel text, a C identifier, unique in the source.
    A STATUS buffer is int64[4], zero before the call; a kernel that meets an index out of range stores
    [1, check, value, 0] there, `check` an index into KernelSource.checks, and reads nothing outside.
    """

    name: str
    symbol: str
    role: Role
    dtype: DType
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        size = self.dtype.bytes
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True, slots=True)
class RuntimeCheck:
    """What a STATUS record refers to: dimension `dimension` (of extent `size`) of `tensor`, indexed by `index`."""

    tensor: str
    dimension: int
    size: int
    index: str
    axis: str = ""


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One kernel launch; launches run in order. `args` are Buffer symbols, in the order of the parameters.

    In C it is `void name(T0 *arg0, T1 *arg1, ...)`, called once, and grid and block are (1, 1, 1): it runs its own
    threads. In CUDA it is an extern "C" __global__ function. `shared_bytes` is dynamic shared memory.
    `zeroed` are symbols of args that the runtime fills with zero bytes just before this launch. `prepares`: it reads
    constants alone and fills workspace that later launches only read; such launches come first, and as long as that
    workspace is kept they need to run but once.
    `maps` are parameters of 128 bytes each behind `args`, made of their buffers' addresses (`const __grid_constant__`).
    `cluster`: neighbouring blocks that run together on one GPC, as the text says too; the grid's x is a multiple.
    """

    name: str
    args: tuple[str, ...]
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    zeroed: tuple[str, ...] = ()
    is_prepack: bool = False
    tensor_maps: tuple[TensorMap, ...] = ()
    cluster: int = 1

    def __post_init__(self) -> None:
        if self.cluster < 1 or self.grid[0] % self.cluster:
            raise InvariantError(f"{self.name}: {self.grid[0]} blocks do not make clusters of {self.cluster}")


@dataclass(frozen=True, slots=True)
class KernelSource:
    """Kernel text and all that decides its binary. `options` are flags for the compiler beyond the toolchain's own.
    `constants` are names of inputs that stay the same from call to call. `rooms`: of C text, the definition in it of
    what each thread has for itself, without its linkage."""

    name: str
    language: Language
    arch: Arch
    text: str
    buffers: tuple[Buffer, ...]
    launches: tuple[LaunchSpec, ...]
    checks: tuple[RuntimeCheck, ...] = ()
    options: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    scratch_definition: str = ""

    @property
    def key(self) -> str:
        """sha256 of everything that decides the binary, as hex."""
        parts = {
            "language": self.language.value,
            "arch": str(self.arch),
            "text": self.text,
            "options": self.options,
            "launches": [_launch_key(x) for x in self.launches],
            "buffers": [(b.name, b.symbol, b.role.value, b.dtype.value, b.shape) for b in self.buffers],
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def buffers_of(self, role: Role) -> tuple[Buffer, ...]:
        return tuple(b for b in self.buffers if b.role is role)

    def main_launch(self, group: str) -> int:
        """Position of the launch that does a kernel group's work. A group's launches bear its name; where there are
        several, those that prepare or join have a suffix, and of a split reduction the partial one works."""
        names = [launch.name for launch in self.launches]
        for name in (group, f"{group}_partial"):
            if name in names:
                return names.index(name)
        raise InvariantError(f"{self.name} has no launch for {group}")

    @property
    def prepacked_buffers(self) -> tuple[Buffer, ...]:
        """Workspace that launches which prepare fill, and that is to be kept between calls."""
        touched = {symbol for launch in self.launches if launch.is_prepack for symbol in launch.args}
        return tuple(b for b in self.buffers_of(Role.WORKSPACE) if b.symbol in touched)

    @property
    def workspace_bytes(self) -> int:
        return sum(b.bytes for b in self.buffers_of(Role.WORKSPACE))


def _launch_key(launch: LaunchSpec) -> tuple[object, ...]:
    plain = (
        launch.name, launch.args, launch.grid, launch.block, launch.shared_bytes, launch.zeroed, launch.is_prepack,
    )  # fmt: skip
    return (*plain, launch.cluster, tuple(_map_key(view) for view in launch.tensor_maps))


def _map_key(view: TensorMap) -> tuple[object, ...]:
    return (
        view.symbol, view.buffer, view.dtype.value, view.mode.value, view.extents, view.strides_bytes, view.box,
        view.element_strides, view.lower, view.upper, view.swizzle.value, view.offset_bytes, view.tf32,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Resources:
    """What one launch takes, as the compiler reports it. `shared_bytes` is static plus dynamic. A CPU's are 0."""

    registers_per_thread: int = 0
    shared_bytes: int = 0
    spill_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A binary for the device: a shared object for a CPU, one cubin with all launches for CUDA. `unlinked`: of a C text
    with several programs the object that the shared object of one of them can be linked from."""

    source: KernelSource
    binary: bytes
    log: str
    resources: tuple[Resources, ...]  # one a launch
    compile_seconds: float = 0.0
    unlinked: bytes = b""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Times of one call of the whole kernel, all launches."""

    median_s: float
    min_s: float
    samples: int
    device_name: str
    max_abs_error: float | None = None
