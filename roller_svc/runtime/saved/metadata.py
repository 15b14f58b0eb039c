"""metadata.json and report.json of a saved kernel ↔ CompiledKernel. Both are untrusted: the records state what each field may be.

metadata.json has what launching needs, report.json how the kernel came about.

Tensor maps are stored as the arguments of the driver's encoding functions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from roller_svc.errors import ArgumentError
from roller_svc.ir.canonical import FLAT, OMIT_DEFAULT, UNTAGGED, Limit, Pattern, Printable
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import arch_named
from roller_svc.ir.kernel import (
    ALIGNMENT_BYTES,
    Buffer,
    CompiledKernel,
    KernelSource,
    Language,
    LaunchSpec,
    Phase,
    Resources,
    Role,
    RuntimeCheck,
)
from roller_svc.ir.tensor_map import MAX_EXTENT, MAX_RANK, MAX_STRIDE_BYTES, MapMode, Swizzle, TensorMap

FORMAT = "roller-kernel/6"
FORMAT_WITH_REPORT = "roller-kernel/5"  # the format before: metadata.json has the fields of report.json
REPORT_FORMAT = "roller-kernel-report/1"
MAX_METADATA_BYTES = 8 << 20  # some hundred kilobytes with a hundred candidates
MAP_BYTES = 128  # size of CUtensorMap (CUDA driver API), which CUDA 13 aligns to 128
MAP_ALIGNMENT_BYTES = 128
L2_PROMOTION_BYTES = 256  # granularity of L2 fetches: rows of boxes are adjacent

# Elements are copied as unsigned integers, which preserves all bits (of a NaN, too).
_DATA_TYPES = {1: "UINT8", 2: "UINT16", 4: "UINT32", 8: "UINT64"}
_TF32 = "TFLOAT32"
_MAX_ELEMENTS = 1 << 48  # the language's own limit on a shape
_MAX_RANK = 16
_MAX_THREADS = 1024  # of a block
_MAX_CLUSTER = 8  # blocks; the portable maximum (CUDA programming guide, "Thread Block Clusters")
_MAX_WORKSPACE_BYTES = 8 * _MAX_ELEMENTS
_MAX_ITEMS = 4096  # launches, buffers, parameters of one launch
_STATUS_SHAPE = (4,)

Identifier = Annotated[str, Pattern("[A-Za-z_][A-Za-z0-9_]{0,254}", "a C identifier")]
Name = Annotated[str, Limit(1, 1024), Printable()]
Text = Annotated[str, Limit(0, 1 << 16)]
# A compiler option that generators write, without the name of a file or program.
_Option = Annotated[
    str, Pattern("-(O[0-3]|f[a-z][a-z0-9-]{0,62}|m[a-z][a-z0-9-]{0,62}(=[0-9]{1,4})?)", "a compiler option of kernels")
]
_Items = Limit(0, _MAX_ITEMS)
_Elements = Annotated[int, Limit(0, _MAX_ELEMENTS)]
_Grid = tuple[Annotated[int, Limit(1, 2**31 - 1)], Annotated[int, Limit(1, 65535)], Annotated[int, Limit(1, 65535)]]
_Block = tuple[Annotated[int, Limit(1, _MAX_THREADS)], Annotated[int, Limit(1, _MAX_THREADS)], Annotated[int, Limit(1, 64)]]
_Cluster = tuple[Annotated[int, Limit(1, _MAX_CLUSTER)], Annotated[int, Limit(1, 1)], Annotated[int, Limit(1, 1)]]
_Small = Annotated[tuple[Annotated[int, Limit(1, 1 << 16)], ...], Limit(0, MAX_RANK)]  # boxes and steps of maps
_Corner = Annotated[tuple[Annotated[int, Limit(-(1 << 16), 1 << 16)], ...], Limit(0, MAX_RANK)]
_Count = Annotated[int, Limit(0, 1 << 31)]


@dataclass(frozen=True, slots=True)
class BufferEntry:
    """A buffer. `strides` are in elements."""

    name: Name
    symbol: Identifier
    role: Role
    dtype: DType
    shape: Annotated[tuple[Annotated[int, Limit(1, _MAX_ELEMENTS)], ...], Limit(0, _MAX_RANK)]
    strides: tuple[int, ...]
    alignment: int
    bytes: int
    donated: bool

    @classmethod
    def of(cls, b: Buffer) -> BufferEntry:
        strides = tuple(math.prod(b.shape[i + 1 :]) for i in range(len(b.shape)))
        return cls(b.name, b.symbol, b.role, b.dtype, b.shape, strides, ALIGNMENT_BYTES, b.bytes, b.donated)

    def buffer(self) -> Buffer:
        if math.prod(self.shape) > _MAX_ELEMENTS:
            raise CorruptKernelError(f"shape {self.shape} is too large")
        if self.role is Role.STATUS and (self.dtype is not DType.INT64 or self.shape != _STATUS_SHAPE):
            raise CorruptKernelError(f"{self.symbol} is not a status record")
        return Buffer(self.name, self.symbol, self.role, self.dtype, self.shape, self.donated)


@dataclass(frozen=True, slots=True)
class BufferParameter:
    kind: Annotated[str, Pattern("buffer", "a buffer")]
    buffer: Annotated[BufferEntry, FLAT]


@dataclass(frozen=True, slots=True)
class MapParameter:
    """The arguments of cuTensorMapEncodeTiled or cuTensorMapEncodeIm2col.

    The address is given as `offset_bytes` into `buffer`. In im2col mode `box` is (channelsPerPixel, pixelsPerColumn)
    and corners are listed w, h, d.
    """

    kind: Annotated[str, Pattern("tensor_map", "a tensor map")]
    symbol: Identifier
    bytes: int
    alignment: int
    mode: MapMode
    buffer: Identifier
    offset_bytes: Annotated[int, Limit(0, MAX_STRIDE_BYTES)]
    dtype: DType
    data_type: str
    extents: Annotated[tuple[Annotated[int, Limit(1, MAX_EXTENT)], ...], Limit(0, MAX_RANK)]
    strides_bytes: Annotated[tuple[Annotated[int, Limit(1, MAX_STRIDE_BYTES)], ...], Limit(0, MAX_RANK)]
    box: _Small
    element_strides: _Small
    lower_corner: _Corner
    upper_corner: _Corner
    swizzle_bytes: Swizzle
    l2_promotion_bytes: int

    @classmethod
    def of(cls, view: TensorMap) -> MapParameter:
        return cls(
            "tensor_map",
            view.symbol,
            MAP_BYTES,
            MAP_ALIGNMENT_BYTES,
            view.mode,
            view.buffer,
            view.offset_bytes,
            view.dtype,
            data_type(view),
            view.extents,
            view.strides_bytes,
            view.box,
            view.element_strides,
            view.lower,
            view.upper,
            view.swizzle,
            L2_PROMOTION_BYTES,
        )

    def view(self) -> TensorMap:
        """Return the tensor map, which fulfils the driver's rules."""
        view = TensorMap(
            self.symbol,
            self.buffer,
            self.dtype,
            self.mode,
            self.extents,
            self.strides_bytes,
            self.box,
            self.element_strides,
            self.lower_corner,
            self.upper_corner,
            self.swizzle_bytes,
            self.offset_bytes,
            tf32=self.data_type == _TF32,
        )
        if self.data_type != data_type(view):
            raise CorruptKernelError(f"{self.symbol}: {self.dtype.value} elements are not {self.data_type}")
        return view


@dataclass(frozen=True, slots=True)
class PhaseEntry:
    name: Identifier
    parameters: tuple[Identifier, ...]
    tasks: _Elements


@dataclass(frozen=True, slots=True)
class LaunchEntry:
    """A launch with its parameters in order, tensor maps last, and what the compiler says that it uses."""

    entry: Identifier
    parameters: Annotated[tuple[Annotated[BufferParameter | MapParameter, UNTAGGED], ...], _Items]
    grid: _Grid
    block: _Block
    cluster: _Cluster
    dynamic_shared_bytes: Annotated[int, Limit(0, 1 << 20)]
    zeroed: tuple[Identifier, ...]
    prepares: bool
    phases: tuple[PhaseEntry, ...]
    resources: Resources
    cooperative: Annotated[bool, OMIT_DEFAULT] = False
    programmatic: Annotated[bool, OMIT_DEFAULT] = False

    @classmethod
    def of(cls, launch: LaunchSpec, buffers: Mapping[str, Buffer], used: Resources) -> LaunchEntry:
        return cls(
            launch.name,
            (
                *(BufferParameter("buffer", BufferEntry.of(buffers[symbol])) for symbol in launch.args),
                *map(MapParameter.of, launch.tensor_maps),
            ),
            launch.grid,
            launch.block,
            (launch.cluster, 1, 1),
            launch.shared_bytes,
            launch.zeroed,
            launch.is_prepack,
            tuple(PhaseEntry(each.name, each.args, each.tasks) for each in launch.phases),
            used,
            launch.cooperative,
            launch.programmatic,
        )

    def launch(self) -> LaunchSpec:
        maps = tuple(each.view() for each in self.parameters if isinstance(each, MapParameter))
        args = tuple(each.buffer.symbol for each in self.parameters if isinstance(each, BufferParameter))
        if any(isinstance(each, MapParameter) for each in self.parameters[: len(args)]):
            raise CorruptKernelError("a buffer follows a tensor map")
        phases = tuple(Phase(each.name, each.parameters, each.tasks) for each in self.phases)
        return LaunchSpec(
            self.entry,
            args,
            self.grid,
            self.block,
            self.dynamic_shared_bytes,
            self.zeroed,
            self.prepares,
            maps,
            self.cluster[0],
            phases,
            self.cooperative,
            self.programmatic,
        )


@dataclass(frozen=True, slots=True)
class FileEntry:
    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Metadata:
    """The whole metadata.json."""

    format: str
    name: Identifier
    expression: Annotated[str, Limit(0, MAX_METADATA_BYTES)]
    target: Name
    digest: Name
    language: Language
    arch: Name
    options: Annotated[tuple[_Option, ...], _Items]
    constants: Annotated[tuple[Text, ...], _Items]
    source_key: str
    estimate: Mapping[str, Any] | None
    workspace_bytes: int
    buffers: Annotated[tuple[BufferEntry, ...], _Items]
    launches: Annotated[tuple[LaunchEntry, ...], Limit(1, _MAX_ITEMS)]
    checks: Annotated[tuple[RuntimeCheck, ...], _Items]
    compile_seconds: Annotated[float, Limit(0, sys.float_info.max)]
    files: Mapping[str, FileEntry]

    def compiled(self, text: str, binary: bytes, log: str) -> CompiledKernel:
        """Return the kernel, checking what its parts say of each other and the source's key."""
        arch = arch_named(self.arch)
        if arch is None:
            raise CorruptKernelError(f"unknown arch {self.arch!r}")
        source = KernelSource(
            self.name,
            self.language,
            arch,
            text,
            tuple(each.buffer() for each in self.buffers),
            tuple(each.launch() for each in self.launches),
            self.checks,
            self.options,
            self.constants,
        )
        _check_references(source)
        if source.key != self.source_key:
            raise CorruptKernelError("source_key does not fit the rest of the metadata")
        resources = tuple(each.resources for each in self.launches)
        return CompiledKernel(source, binary, log, resources, self.compile_seconds)


@dataclass(frozen=True, slots=True)
class Report:
    """The whole report.json: what the compiler said, and the plan and the report of the build."""

    format: str
    log: str
    extra: Mapping[str, Any]


class CorruptKernelError(ArgumentError):
    """The data read differs from what save() writes."""


def data_type(view: TensorMap) -> str:
    """Return CU_TENSOR_MAP_DATA_TYPE_... of the map's elements."""
    return _TF32 if view.tf32 else _DATA_TYPES[view.dtype.bytes]


def _check_references(source: KernelSource) -> None:
    symbols = [b.symbol for b in source.buffers]
    if len(set(symbols)) != len(symbols):
        raise CorruptKernelError("two buffers have the same symbol")
    if source.workspace_bytes > _MAX_WORKSPACE_BYTES:
        raise CorruptKernelError(f"{source.workspace_bytes} bytes of workspace are more than {_MAX_WORKSPACE_BYTES}")
    if unknown := set(source.constants).difference(b.name for b in source.buffers_of(Role.INPUT)):
        raise CorruptKernelError(f"constants that are not inputs: {sorted(unknown)}")
    for launch in source.launches:
        if unknown := {*launch.args, *launch.zeroed}.difference(symbols):
            raise CorruptKernelError(f"{launch.name} uses unknown buffers: {sorted(unknown)}")
        for phase in launch.phases:
            if unknown := set(phase.args).difference(launch.args):
                raise CorruptKernelError(f"{phase.name} uses no arguments of {launch.name}: {sorted(unknown)}")
        _check_maps(source, launch)
        if math.prod(launch.block) > _MAX_THREADS:
            raise CorruptKernelError(f"{launch.name} has blocks of {math.prod(launch.block)} threads")


def _check_maps(source: KernelSource, launch: LaunchSpec) -> None:
    """Check that each map is inside its buffer. Copies through it are not checked again."""
    if source.language is not Language.CUDA and (launch.tensor_maps or launch.cluster > 1):
        raise CorruptKernelError(f"{launch.name} has tensor maps or clusters, which only CUDA has")
    sizes = {b.symbol: b.bytes for b in source.buffers}
    for view in launch.tensor_maps:
        if view.end_bytes > sizes.get(view.buffer, 0):
            raise CorruptKernelError(f"{view.symbol} of {launch.name} exceeds {view.buffer}")
