"""Mapping (YAML or JSON, already parsed) ⇄ HardwareSpec."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from roller_svc.errors import SpecError, require
from roller_svc.hardware.schema import (
    LevelModel,
    LimitsModel,
    MeasuredModel,
    Problem,
    SourceModel,
    SpecModel,
    UnitModel,
    find_inconsistencies,
)
from roller_svc.ir.dtype import DType, dtype_named
from roller_svc.ir.hardware import (
    Arch,
    ComputeUnit,
    HardwareSpec,
    Limits,
    Measured,
    MemoryLevel,
    Scope,
    Source,
    TargetKind,
    UnitKind,
    arch_named,
)

MAX_PROBLEMS_SHOWN = 20
MAX_SUGGESTIONS = 100  # of names for unknown fields, each of which is compared with all names
_MODEL_AT: dict[str, type[BaseModel]] = {
    "levels": LevelModel,
    "units": UnitModel,
    "limits": LimitsModel,
    "sources": SourceModel,
    "measured": MeasuredModel,
}
_WORDS = {"extra_forbidden": "unknown field", "missing": "missing"}


def from_mapping(data: object, where: str = "request") -> HardwareSpec:
    """Return a validated spec. Raises SpecError, which lists every problem as `where: field: what is wrong`."""
    spec, problems = validate(data)
    if spec is None:
        raise spec_error(problems, where)
    return spec_of(spec)


def validate(data: object) -> tuple[SpecModel | None, list[Problem]]:
    """Return the model, or None and the problems of the data."""
    if not isinstance(data, Mapping):
        return None, [("", "a spec is a mapping of fields to values")]
    try:
        spec = SpecModel.model_validate(dict(data))
    except ValidationError as invalid:
        errors = invalid.errors(include_url=False, include_input=True)
        return None, [_problem(dict(error), suggests=n < MAX_SUGGESTIONS) for n, error in enumerate(errors)]
    problems = find_inconsistencies(spec)
    return (None if problems else spec), problems


def spec_error(problems: list[Problem], where: str, line: int | None = None, column: int | None = None) -> SpecError:
    """Return one error for all problems, at the position of the first one."""
    shown = [f"{where}: {path}: {what}" if path else f"{where}: {what}" for path, what in problems[:MAX_PROBLEMS_SHOWN]]
    if hidden := len(problems) - len(shown):
        shown.append(f"{where}: and {hidden} more")
    return SpecError("\n".join(shown), line=line, column=column, hint="docs/hardware.md explains every field")


def _problem(error: dict[str, Any], *, suggests: bool) -> Problem:
    location = tuple(error["loc"])
    path = ".".join(str(part) for part in location)[:200]
    what = _WORDS.get(error["type"]) or str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden" and suggests:
        model = _MODEL_AT.get(str(location[0]), SpecModel) if len(location) > 1 else SpecModel
        suggestions = get_close_matches(str(location[-1])[:64], model.model_fields, n=1)
        what += f"; did you mean {suggestions[0]}?" if suggestions else ""
    elif error["type"] == "int_type" and isinstance(error.get("input"), float):
        what += "; write it out, such as 80_000_000_000"
    return path, what


def spec_of(spec: SpecModel) -> HardwareSpec:
    """Return the HardwareSpec of a validated model."""
    return HardwareSpec(
        id=spec.id,
        name=spec.name,
        vendor=spec.vendor,
        family=TargetKind(spec.family),
        arch=_arch(spec.arch),
        num_cores=spec.num_cores,
        clock_hz=spec.clock_hz,
        levels=tuple(_level_of(level) for level in spec.levels),
        units=tuple(_unit_of(unit) for unit in spec.units),
        limits=Limits(**spec.limits.model_dump()),
        tile_levels=(spec.tile_levels[0], spec.tile_levels[1]),
        sources=tuple(Source(tuple(s.fields), s.text, s.assumed) for s in spec.sources),
        vector_bytes=spec.vector_bytes,
        isa=tuple(spec.isa),
        measured=tuple(Measured(**one.model_dump()) for one in spec.measured),
    )


def _level_of(level: LevelModel) -> MemoryLevel:
    return MemoryLevel(**{**level.model_dump(), "scope": Scope(level.scope)})


def _unit_of(unit: UnitModel) -> ComputeUnit:
    return ComputeUnit(
        name=unit.name,
        kind=UnitKind(unit.kind),
        shape=tuple(unit.shape),
        in_dtype=_dtype(unit.in_dtype),
        acc_dtype=_dtype(unit.acc_dtype),
        flops_per_s=unit.flops_per_s,
        max_shape=tuple(unit.max_shape),
        peak_flops_per_s=unit.peak_flops_per_s,
        quotients_per_s=unit.quotients_per_s,
    )


def _dtype(name: str) -> DType:
    return require(dtype_named(name), f"type {name}, which the schema has checked")


def _arch(name: str) -> Arch:
    return require(arch_named(name), f"architecture {name}, which the schema has checked")


def to_mapping(spec: HardwareSpec) -> dict[str, Any]:
    """Return the spec as JSON-compatible data in the order of a spec file, the inverse of `from_mapping`."""
    return {
        "id": spec.id,
        "name": spec.name,
        "vendor": spec.vendor,
        "family": spec.family.value,
        "arch": str(spec.arch),
        "num_cores": spec.num_cores,
        "clock_hz": spec.clock_hz,
        "vector_bytes": spec.vector_bytes,
        "isa": list(spec.isa),
        "tile_levels": list(spec.tile_levels),
        "levels": [_level_mapping(level) for level in spec.levels],
        "units": [_unit_mapping(unit) for unit in spec.units],
        "limits": {field: getattr(spec.limits, field) for field in LimitsModel.model_fields},
        "sources": [{"fields": list(s.fields), "text": s.text, "assumed": s.assumed} for s in spec.sources],
        "measured": [{field: getattr(m, field) for field in MeasuredModel.model_fields} for m in spec.measured],
    }


def _level_mapping(level: MemoryLevel) -> dict[str, Any]:
    return {**{field: getattr(level, field) for field in LevelModel.model_fields}, "scope": level.scope.value}


def _unit_mapping(unit: ComputeUnit) -> dict[str, Any]:
    return {
        "name": unit.name,
        "kind": unit.kind.value,
        "shape": list(unit.shape),
        "max_shape": list(unit.max_shape),
        "in_dtype": unit.in_dtype.value,
        "acc_dtype": unit.acc_dtype.value,
        "flops_per_s": unit.flops_per_s,
        "peak_flops_per_s": unit.peak_flops_per_s,
        "quotients_per_s": unit.quotients_per_s,
    }
