"""Mapping (YAML or JSON, already parsed) ⇄ HardwareSpec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from enum import Enum
from typing import Any

from pydantic import BaseModel, ValidationError

from roller_svc.errors import SpecError, require
from roller_svc.hardware.plausibility import find_implausible
from roller_svc.hardware.rates import scale_rates
from roller_svc.hardware.schema import (
    LevelModel,
    LimitsModel,
    MeasuredModel,
    Problem,
    RatesForModel,
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

RATES_FOR = "rates_for"  # field of a spec file: a HardwareSpec has the rates of its own cores
MAX_PROBLEMS_SHOWN = 20
MAX_SUGGESTIONS = 100  # of names for unknown fields, each of which is compared with all names
_MODEL_AT: dict[str, type[BaseModel]] = {
    "rates_for": RatesForModel,
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
    spec = scale_rates(spec)
    problems = find_inconsistencies(spec) + find_implausible(spec)
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
    record: HardwareSpec = _record_of(spec)
    return record


def _record_of(value: Any) -> Any:
    """Return the record of a model, and tuples in place of lists."""
    if isinstance(value, BaseModel):
        fields = {name: _PARSERS.get(name, _record_of)(field) for name, field in value if name != RATES_FOR}
        return _RECORD_TYPES[type(value)](**fields)
    return tuple(map(_record_of, value)) if isinstance(value, list) else value


def to_mapping(spec: HardwareSpec) -> dict[str, Any]:
    """Return the spec as JSON-compatible data in the order of a spec file, the inverse of `from_mapping`."""
    mapping: dict[str, Any] = _plain_value(spec)
    return mapping


def _plain_value(value: Any) -> Any:
    if model := _MODEL_TYPES.get(type(value)):
        return {name: _rates_for(value) if name == RATES_FOR else _plain_value(getattr(value, name)) for name in model.model_fields}
    match value:
        case tuple():
            return [_plain_value(item) for item in value]
        case Enum():
            return value.value
        case Arch():
            return str(value)
        case _:
            return value


def _rates_for(spec: HardwareSpec) -> dict[str, Any]:
    """Return the cores and the clock of a spec: who changes these in its file has other rates."""
    return {"num_cores": spec.num_cores, "clock_hz": spec.clock_hz}


def _dtype(name: str) -> DType:
    return require(dtype_named(name), f"type {name}, which the schema has checked")


def _arch(name: str) -> Arch:
    return require(arch_named(name), f"architecture {name}, which the schema has checked")


# Each model has the fields of its record, as JSON has them.
_RECORD_TYPES: Mapping[type[BaseModel], Callable[..., object]] = {
    SpecModel: HardwareSpec,
    LevelModel: MemoryLevel,
    UnitModel: ComputeUnit,
    LimitsModel: Limits,
    SourceModel: Source,
    MeasuredModel: Measured,
}
_MODEL_TYPES = {record: model for model, record in _RECORD_TYPES.items()}
_PARSERS: Mapping[str, Callable[[Any], Any]] = {  # by field
    "family": TargetKind,
    "arch": _arch,
    "scope": Scope,
    "kind": UnitKind,
    "in_dtype": _dtype,
    "acc_dtype": _dtype,
}
