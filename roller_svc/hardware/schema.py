"""Schema of spec files: pydantic models with bounds and consistency checks.

The bounds prevent a hostile spec from overflowing the model or stalling a search. They are far from any real device.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, field_validator

from roller_svc.ir.dtype import DType, dtype_named
from roller_svc.ir.hardware import Scope, TargetKind, UnitKind, arch_named, source_matches

Rate = Annotated[float, Field(ge=1e6, le=1e18)]  # bytes or FLOPs a second
Count = Annotated[int, Field(ge=1, le=1 << 20)]
Small = Annotated[int, Field(ge=1, le=4096)]
Extents = Annotated[list[Small], Field(min_length=1, max_length=4)]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$", max_length=32)]
_SEGMENT = r"([a-z0-9_]+\*?|\*)[a-z0-9_]*"  # one * at most: matching stays linear
Pattern = Annotated[str, StringConstraints(pattern=rf"^{_SEGMENT}(\.{_SEGMENT}){{0,2}}$", max_length=100)]
Sample = Annotated[float, Field(gt=0, le=1e18)]
Feature = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]*$", max_length=32)]

# Device names of vendors, such as "Intel(R) Xeon(R) Processor @ 2.50GHz", in one line.
MAX_NAME_CHARACTERS = 120
PLAIN_NAME = re.compile(rf"(?! )[A-Za-z0-9 ._,:;()\[\]@+/&'-]{{1,{MAX_NAME_CHARACTERS}}}(?<! )")
PLAIN_NAME_RULE = f"1 to {MAX_NAME_CHARACTERS} letters and digits of ASCII, spaces inside, and ._,:;()[]@+/&'-"
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]")


def plain_name(text: str) -> str:
    """Return a valid name for a spec: other characters become single spaces, and an empty name becomes "CPU"."""
    words = re.sub(r"[^A-Za-z0-9._,:;()\[\]@+/&'-]+", " ", text).strip(" ")
    return words[:MAX_NAME_CHARACTERS].rstrip(" ") or "CPU"


def _without_controls(text: str) -> str:
    """Return the text. Raises ValueError for control characters, which terminals interpret."""
    if control := _CONTROL.search(text):
        raise ValueError(f"must be text without control characters, got {control[0]!a}: remove it")
    return text


GPU_LEVELS = ("dram", "l2", "shared", "register")
CPU_LEVELS = ("dram", "l3", "l2", "l1", "register")
IPU_LEVELS = ("dram", "sram", "register")
LEVELS_OF = {
    TargetKind.CUDA: GPU_LEVELS,
    TargetKind.AMD: GPU_LEVELS,
    TargetKind.CPU: CPU_LEVELS,
    TargetKind.IPU: IPU_LEVELS,
}
PREFIXES_OF = {
    TargetKind.CUDA: ("sm_",),
    TargetKind.AMD: ("gfx",),
    TargetKind.CPU: ("x86-64-v", "armv"),
    TargetKind.IPU: ("ipu",),
}
MATRIX_KINDS = (UnitKind.MMA, UnitKind.WGMMA, UnitKind.MFMA, UnitKind.AMP)
_EXTENTS_OF = dict.fromkeys(MATRIX_KINDS, 3) | {UnitKind.DOT: 2}
WORD_BITS = 32  # of a dot unit's sums, and of the elements that are multiplied for one of them
MAX_PATTERNS = 256  # each is matched against every field
_SCOPE_DEPTH = {Scope.DEVICE: 0, Scope.CORE: 1, Scope.THREAD: 2}
_MAX_SCOPE_BYTES = {Scope.DEVICE: 1 << 50, Scope.CORE: 1 << 34, Scope.THREAD: 1 << 20}


Text = Annotated[str, StringConstraints(min_length=1, max_length=4000), AfterValidator(_without_controls)]
How = Annotated[str, StringConstraints(min_length=1, max_length=400), AfterValidator(_without_controls)]


class _Strict(BaseModel):
    """No unknown field, no coercion ("80" is not 80), no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class LevelModel(_Strict):
    name: Name
    scope: Literal["device", "core", "thread"]
    capacity_bytes: Annotated[int, Field(ge=16, le=1 << 50)]
    bandwidth_bytes_per_s: Rate
    peak_bandwidth_bytes_per_s: Rate | None = None
    latency_s: Annotated[float, Field(ge=1e-12, le=1e-3)]
    transaction_bytes: Small
    banks: Small = 1
    bank_bytes: Small = 4
    streamed_write_gain: Annotated[float, Field(ge=0.1, le=10)] = 1.0
    streamed_copy_gain: Annotated[float, Field(ge=0.1, le=10)] = 1.0
    write_gain: Annotated[float, Field(ge=0.1, le=10)] = 1.0
    copy_gain: Annotated[float, Field(ge=0.1, le=10)] = 1.0
    hinted_gain: Annotated[float, Field(ge=0.1, le=10)] = 1.0


class UnitModel(_Strict):
    name: Name
    kind: Literal["fma", "vector", "dot", "mma", "wgmma", "mfma", "amp"]
    shape: Extents
    max_shape: Annotated[list[Small], Field(max_length=4)] = []
    in_dtype: str
    acc_dtype: str
    flops_per_s: Rate
    peak_flops_per_s: Rate | None = None
    quotients_per_s: Rate | None = None

    @field_validator("in_dtype", "acc_dtype")
    @classmethod
    def _known_dtype(cls, value: str) -> str:
        if dtype_named(value) is None:
            raise ValueError(f"must be one of {', '.join(dtype.value for dtype in DType)}")
        return value


Overhead = Annotated[float, Field(ge=0, le=1)]


class LimitsModel(_Strict):
    warp_size: Annotated[int, Field(ge=1, le=1024)]
    max_threads_per_block: Annotated[int, Field(ge=1, le=1 << 16)]
    max_threads_per_core: Annotated[int, Field(ge=1, le=1 << 16)]
    max_blocks_per_core: Small
    registers_per_core: Count
    max_registers_per_thread: Small
    shared_bytes_per_block: Annotated[int, Field(ge=256, le=1 << 34)]
    shared_bytes_per_core: Annotated[int, Field(ge=256, le=1 << 34)]
    shared_bytes_reserved_per_block: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    launch_overhead_s: Overhead
    graph_node_s: Overhead | None = None
    pdl_node_s: Overhead | None = None
    cooperative_launch_s: Overhead | None = None
    signal_s: Overhead | None = None
    wait_s: Overhead | None = None


class SourceModel(_Strict):
    fields: Annotated[list[Pattern], Field(min_length=1, max_length=32)]
    text: Text
    assumed: bool = False


class MeasuredModel(_Strict):
    name: Name
    unit: Literal["s", "Hz", "1/s", "bytes/s"]
    cores: Annotated[int, Field(ge=1, le=1_000_000)]
    min: Sample
    median: Sample
    max: Sample
    quiet: Sample
    samples: Annotated[int, Field(ge=1, le=1_000_000)]
    how: How
    figure: Pattern | None = None


class RatesForModel(_Strict):
    """The cores and the clock for which rates are stated."""

    num_cores: Annotated[int, Field(ge=1, le=1_000_000)]
    clock_hz: Annotated[float, Field(ge=1e6, le=1e11)]


class SpecModel(_Strict):
    id: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=64)]
    name: str
    vendor: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9 ._-]*$", max_length=40)]
    family: Literal["cuda", "amd", "ipu", "cpu"]
    arch: str
    num_cores: Annotated[int, Field(ge=1, le=1_000_000)]
    clock_hz: Annotated[float, Field(ge=1e6, le=1e11)]
    rates_for: RatesForModel | None = None
    vector_bytes: Literal[4, 8, 16, 32, 64, 128] = 16
    isa: Annotated[list[Feature], Field(max_length=200)] = []
    tile_levels: Annotated[list[Name], Field(min_length=2, max_length=2)]
    levels: Annotated[list[LevelModel], Field(min_length=2, max_length=8)]
    units: Annotated[list[UnitModel], Field(min_length=1, max_length=40)]
    limits: LimitsModel
    sources: Annotated[list[SourceModel], Field(max_length=32)] = []
    measured: Annotated[list[MeasuredModel], Field(max_length=256)] = []

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not PLAIN_NAME.fullmatch(value):
            raise ValueError(f"must be {PLAIN_NAME_RULE}, is {value[:MAX_NAME_CHARACTERS]!a}; leave the others out")
        return value

    @field_validator("arch")
    @classmethod
    def _known_arch(cls, value: str) -> str:
        if arch_named(value) is None:
            raise ValueError("must be an architecture (such as sm_90a, gfx942, x86-64-v3, armv8, ipu2)")
        return value


Problem = tuple[str, str]  # the field's path and what is wrong with it


def field_paths(spec: SpecModel) -> tuple[str, ...]:
    """Return the dotted path of every field of a spec: 'levels.l2.latency_s', 'limits.warp_size', ..."""
    paths = ["num_cores", "clock_hz", "vector_bytes"]
    for level in spec.levels:
        stated = level.model_dump(exclude={"name", "scope"})
        paths += [f"levels.{level.name}.{field}" for field in stated]
    for unit in spec.units:
        stated = unit.model_dump(exclude={"name", "kind", "in_dtype", "acc_dtype"})
        paths += [f"units.{unit.name}.{field}" for field in stated]
    paths += [f"limits.{field}" for field in spec.limits.model_dump()]
    return tuple(paths)


def find_inconsistencies(spec: SpecModel) -> list[Problem]:
    """Return inconsistencies between fields: order, missing names, parts larger than their whole."""
    parts = (_identity, _levels, _tile_levels, _units, _limits, _sources, _measured)
    return [problem for part in parts for problem in part(spec)]


def _identity(spec: SpecModel) -> list[Problem]:
    arch, family = arch_named(spec.arch), TargetKind(spec.family)
    if arch is not None and arch.prefix not in PREFIXES_OF[family]:
        return [("arch", f"{spec.arch} is not a {family.value} architecture")]
    return []


def _levels(spec: SpecModel) -> list[Problem]:
    problems: list[Problem] = []
    names = tuple(level.name for level in spec.levels)
    if names != LEVELS_OF[TargetKind(spec.family)]:
        expected = ", ".join(LEVELS_OF[TargetKind(spec.family)])
        problems.append(("levels", f"must be {expected} in this order for family {spec.family}, are {', '.join(names)}"))
    for index, level in enumerate(spec.levels):
        path = f"levels.{index}"
        scope = Scope(level.scope)
        if level.capacity_bytes > _MAX_SCOPE_BYTES[scope]:
            problems.append((f"{path}.capacity_bytes", f"more than any {scope.value} holds"))
        if level.transaction_bytes > level.capacity_bytes:
            problems.append((f"{path}.transaction_bytes", "more than capacity_bytes"))
        rate, peak = level.bandwidth_bytes_per_s, level.peak_bandwidth_bytes_per_s
        problems += _below_peak(path, "bandwidth_bytes_per_s", rate, peak)
    for index, (outer, inner) in enumerate(zip(spec.levels, spec.levels[1:], strict=False), start=1):
        if _SCOPE_DEPTH[Scope(inner.scope)] < _SCOPE_DEPTH[Scope(outer.scope)]:
            problems.append((f"levels.{index}.scope", f"wider than the scope of {outer.name} around it"))
        if inner.latency_s > outer.latency_s:
            problems.append((f"levels.{index}.latency_s", f"longer than that of {outer.name} around it"))
    return problems


def _tile_levels(spec: SpecModel) -> list[Problem]:
    names = [level.name for level in spec.levels]
    missing = [name for name in spec.tile_levels if name not in names]
    if missing:
        return [("tile_levels", f"there is no level {', '.join(missing)}; levels are {', '.join(names)}")]
    if names.index(spec.tile_levels[0]) >= names.index(spec.tile_levels[1]):
        return [("tile_levels", "must name the outer level first")]
    return []


def _units(spec: SpecModel) -> list[Problem]:
    problems: list[Problem] = []
    names = [unit.name for unit in spec.units]
    for index, unit in enumerate(spec.units):
        path = f"units.{index}"
        if unit.name in names[:index]:
            problems.append((f"{path}.name", f"{unit.name} is named twice"))
        if len(unit.shape) != _EXTENTS_OF.get(UnitKind(unit.kind), 1):
            expected = "must be [m, n, k] for a matrix unit, [k, lanes] for dot, [lanes] for fma and vector"
            problems.append((f"{path}.shape", expected))
        elif unit.kind == UnitKind.DOT.value:
            problems += _dot_unit(path, unit, spec.vector_bytes)
        if unit.max_shape and (
            len(unit.max_shape) != len(unit.shape)
            or any(most % least for most, least in zip(unit.max_shape, unit.shape, strict=True))
        ):
            problems.append((f"{path}.max_shape", "must be a multiple of shape in every extent"))
        problems += _below_peak(path, "flops_per_s", unit.flops_per_s, unit.peak_flops_per_s)
    if not any(UnitKind(unit.kind) in (UnitKind.FMA, UnitKind.VECTOR) for unit in spec.units):
        problems.append(("units", "must hold an fma or vector unit"))
    return problems


def _dot_unit(path: str, unit: UnitModel, vector_bytes: int) -> list[Problem]:
    """Check that a dot unit multiplies whole vectors of words, each with k elements."""
    k, lanes = unit.shape
    element = dtype_named(unit.in_dtype)
    if element is None or k * element.bits != WORD_BITS:
        return [(f"{path}.shape", f"must have {WORD_BITS} bits of {unit.in_dtype} in k")]
    if lanes * WORD_BITS != vector_bytes * 8:
        return [(f"{path}.shape", f"must have the {vector_bytes * 8 // WORD_BITS} lanes of a vector of {vector_bytes} bytes")]
    return []


def _below_peak(path: str, field: str, achievable: float, peak: float | None) -> list[Problem]:
    if peak is not None and achievable > peak:
        return [(f"{path}.{field}", f"above peak_{field}")]
    return []


def _limits(spec: SpecModel) -> list[Problem]:
    limits = spec.limits
    problems: list[Problem] = []
    if limits.max_threads_per_block % limits.warp_size:
        problems.append(("limits.max_threads_per_block", "must be a multiple of warp_size"))
    if limits.max_threads_per_block > limits.max_threads_per_core:
        problems.append(("limits.max_threads_per_block", "more than max_threads_per_core"))
    if limits.shared_bytes_per_block + limits.shared_bytes_reserved_per_block > limits.shared_bytes_per_core:
        problems.append(("limits.shared_bytes_per_block", "more than shared_bytes_per_core less the reserved"))
    if limits.max_registers_per_thread > limits.registers_per_core:
        problems.append(("limits.max_registers_per_thread", "more than registers_per_core"))
    block_level = next((level for level in spec.levels if level.name == spec.tile_levels[0]), None)
    if block_level is not None and limits.shared_bytes_per_core > block_level.capacity_bytes:
        problems.append(("limits.shared_bytes_per_core", f"more than {block_level.name} holds"))
    return problems


def _sources(spec: SpecModel) -> list[Problem]:
    if sum(len(source.fields) for source in spec.sources) > MAX_PATTERNS:
        return [("sources", f"more than {MAX_PATTERNS} field patterns in all")]
    paths = field_paths(spec)
    return [
        (f"sources.{index}.fields", f"{pattern} matches no field of this spec")
        for index, source in enumerate(spec.sources)
        for pattern in source.fields
        if not any(source_matches(pattern, path) for path in paths)
    ]


def _measured(spec: SpecModel) -> list[Problem]:
    paths = set(field_paths(spec))
    problems: list[Problem] = []
    for index, one in enumerate(spec.measured):
        path = f"measured.{index}"
        if not (one.min <= one.median <= one.max and one.min <= one.quiet <= one.max):
            problems.append((f"{path}.median", "min, median and max must be in this order, and quiet between them"))
        if one.figure is not None and one.figure not in paths:
            problems.append((f"{path}.figure", f"{one.figure} is not a field of this spec"))
    return problems
