"""Kernels as source and as binaries: code generator → toolchain → runtime."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import Enum
from typing import Annotated

from roller_svc.errors import InvariantError
from roller_svc.ir.canonical import Limit, Printable
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch
from roller_svc.ir.tensor_map import TensorMap

ALIGNMENT_BYTES = 64  # of each workspace in the allocation for all


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
    """A tensor in memory, dense and row-major. CPU: element alignment; GPU: alignment of the allocator.

    A STATUS buffer is int64[4], zero before the call. A kernel that meets an index out of range stores
    [1, check, value, 0] there and reads nothing outside; `check` is an index into KernelSource.checks.
    """

    name: str  # the caller's; an output of a scatter may share an input's name
    symbol: str  # C identifier, unique in the source
    role: Role
    dtype: DType
    shape: tuple[int, ...]
    donated: bool = False  # an input whose memory becomes that of the output of its name

    @property
    def bytes(self) -> int:
        size = self.dtype.bytes
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True, slots=True)
class RuntimeCheck:
    """The run-time check of an index that a STATUS record refers to."""

    tensor: Annotated[str, Limit(1, 1024), Printable()]
    dimension: Annotated[int, Limit(0, 16)]
    size: Annotated[int, Limit(0, 1 << 48)]  # of the dimension
    index: str  # as text
    axis: str = ""


@dataclass(frozen=True, slots=True)
class Phase:
    """Part of a C launch: a function of the launch's args and the number of a task. Its tasks are independent."""

    name: str
    args: tuple[str, ...]
    tasks: int  # 0: one call, without a task's number


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One kernel launch; launches run in order.

    In C it is `void name(T0 *arg0, T1 *arg1, ...)`, called once; it starts its own threads, and grid and block are
    (1, 1, 1). In CUDA it is an extern "C" __global__ function. A prepacking launch reads constants alone and fills
    workspace that later launches only read. Such launches come first, and run once while the workspace is kept.
    """

    name: str
    args: tuple[str, ...]  # symbols of buffers, in the order of the parameters
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0  # dynamic shared memory
    zeroed: tuple[str, ...] = ()  # args that the runtime fills with zero bytes before the launch
    is_prepack: bool = False
    tensor_maps: tuple[TensorMap, ...] = ()  # parameters of 128 bytes after `args` (`const __grid_constant__`)
    cluster: int = 1  # consecutive blocks of a cluster; it divides the grid's x
    phases: tuple[Phase, ...] = ()  # C: what the launch does, one after the other; empty if it cannot be divided
    cooperative: bool = False  # all blocks must be resident at once, because they wait for each other
    # each thread waits for the launches before this one, before it accesses memory other than that of constants
    programmatic: bool = False

    def __post_init__(self) -> None:
        if self.cluster < 1 or self.grid[0] % self.cluster:
            raise InvariantError(
                f"{self.name}: the grid must be a multiple of the cluster, {self.cluster} blocks, got {self.grid[0]}"
            )

    @property
    def operands(self) -> tuple[str, ...]:
        """Return the symbols of the buffers whose addresses a launch needs: `args`, then those of tensor maps alone."""
        return tuple(dict.fromkeys((*self.args, *(view.buffer for view in self.tensor_maps))))


@dataclass(frozen=True, slots=True)
class KernelSource:
    """Kernel source and everything that determines its binary.

    A program that links kernels tells their symbols apart by the names: each is `name`, or begins with `name` and "_".
    """

    name: str
    language: Language
    arch: Arch
    text: str
    buffers: tuple[Buffer, ...]
    launches: tuple[LaunchSpec, ...]
    checks: tuple[RuntimeCheck, ...] = ()
    options: tuple[str, ...] = ()  # compiler flags beyond the toolchain's own
    constants: tuple[str, ...] = ()  # names of inputs that are the same in every call
    scratch_definition: str = ""  # C: the definition of thread-local scratch in the text, without its linkage
    run_definition: str = ""  # C: the end of the text, a function that runs all launches

    @property
    def key(self) -> str:
        """Return the sha256 of everything that determines the binary, as hex."""
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

    @property
    def is_parallel(self) -> bool:
        """Return whether C source has a parallel region."""
        return "omp parallel" in self.text

    @property
    def run_buffers(self) -> tuple[Buffer, ...]:
        """Return the parameters of a C kernel's function that makes all launches: inputs, then outputs.

        A donated input has none, because its output has its memory.
        """
        inputs = tuple(b for b in self.buffers_of(Role.INPUT) if not b.donated)
        return (*inputs, *self.buffers_of(Role.OUTPUT))

    @property
    def updated_buffers(self) -> tuple[Buffer, ...]:
        """Return the outputs that have the memory of donated inputs."""
        donated = [b.name for b in self.buffers_of(Role.INPUT) if b.donated]
        return tuple(b for b in self.buffers_of(Role.OUTPUT) if b.name in donated)

    def main_launch(self, group: str) -> int:
        """Return the index of a kernel group's main launch.

        It has the group's name, perhaps behind the kernel's. Launches that prepack or combine have a suffix; of a split
        reduction the partial launch is the main one. That of a split scan, which comes last, has no suffix.
        """
        names = [launch.name.removeprefix(f"{self.name}_") for launch in self.launches]
        for name in (group, f"{group}_partial"):
            if name in names:
                return names.index(name)
        raise InvariantError(f"{self.name} has no launch for {group}")

    @property
    def prepacked_buffers(self) -> tuple[Buffer, ...]:
        """Return the workspaces that prepacking launches fill. They are kept between calls."""
        symbols = {symbol for launch in self.launches if launch.is_prepack for symbol in launch.operands}
        return tuple(b for b in self.buffers_of(Role.WORKSPACE) if b.symbol in symbols)

    @property
    def num_tasks(self) -> tuple[tuple[int, ...], ...]:
        """Return the tasks of each phase of each launch."""
        return tuple(tuple(max(1, phase.tasks) for phase in launch.phases) for launch in self.launches)

    @property
    def workspace_bytes(self) -> int:
        return align_blocks(self.buffers_of(Role.WORKSPACE))[1]


def align_blocks(buffers: Iterable[Buffer]) -> tuple[dict[str, int], int]:
    """Return the offset of each buffer in one allocation for all, by symbol, and the size of that allocation."""
    offsets, end = {}, 0
    for buffer in buffers:
        offsets[buffer.symbol] = end
        end += -(-buffer.bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, end


def _launch_key(launch: LaunchSpec) -> tuple[object, ...]:
    plain = (
        launch.name, launch.args, launch.grid, launch.block, launch.shared_bytes, launch.zeroed, launch.is_prepack,
    )  # fmt: skip
    phases = tuple((phase.name, phase.args, phase.tasks) for phase in launch.phases)
    kinds = tuple(kind for kind in ("cooperative", "programmatic") if getattr(launch, kind))
    return (*plain, launch.cluster, tuple(_map_key(view) for view in launch.tensor_maps), *phases, *kinds)


def _map_key(view: TensorMap) -> tuple[object, ...]:
    values = (getattr(view, each.name) for each in fields(view))
    return tuple(value.value if isinstance(value, Enum) else value for value in values)


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of one launch, as the compiler reports them. All are 0 on a CPU."""

    registers_per_thread: Annotated[int, Limit(0, 1 << 31)] = 0
    shared_bytes: Annotated[int, Limit(0, 1 << 31)] = 0  # static and dynamic
    spill_bytes: Annotated[int, Limit(0, 1 << 31)] = 0


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A binary: a shared object for a CPU, one cubin with all launches for CUDA.

    It is empty where no compiler is installed, and of a kernel of a model for a CPU that has not been linked alone.
    """

    source: KernelSource
    binary: bytes
    log: str
    resources: tuple[Resources, ...]  # one for each launch
    compile_seconds: float = 0.0
    object_code: bytes = b""  # C: the object that one of several programs, or a model, can be linked from


@dataclass(frozen=True, slots=True)
class Measurement:
    """Times of one call with all launches."""

    median_s: float
    min_s: float
    samples: int
    device_name: str
    max_abs_error: float | None = None
