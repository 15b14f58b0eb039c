"""List every fault of a spec, with its path and its position in YAML text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roller_svc.errors import SpecError
from roller_svc.hardware.mapping import spec_of, validate
from roller_svc.hardware.yaml_text import Positions, parse_yaml
from roller_svc.ir.hardware import HardwareSpec


@dataclass(frozen=True, slots=True)
class SpecFault:
    """A fault of a spec. Line and column, from 1, are those of YAML text."""

    path: tuple[str, ...]
    message: str
    line: int | None = None
    column: int | None = None


def find_faults(source: str | Mapping[str, object]) -> tuple[HardwareSpec | None, list[SpecFault]]:
    """Validate a spec, as a mapping or as YAML text. Return it, or None and its faults."""
    try:
        data = parse_yaml(source, "hardware") if isinstance(source, str) else source
    except SpecError as broken:
        return None, [SpecFault((), broken.message, broken.line, broken.column)]
    spec, problems = validate(data)
    if spec is not None:
        return spec_of(spec), []
    positions = Positions(source) if isinstance(source, str) else None
    faults = []
    for text, message in problems:
        path = _split_path(data, text)
        faults.append(SpecFault(path, message, *(positions.locate(path) if positions else (None, None))))
    return None, faults


def _split_path(data: object, text: str) -> tuple[str, ...]:
    """Split a path at its dots, but those in the names of unknown fields."""
    parts, path = text.split(".") if text else [], []
    while parts:
        count = _length_of_name(data, parts)
        name, parts = ".".join(parts[:count]), parts[count:]
        path.append(name)
        if isinstance(data, Mapping):
            data = data.get(name)
        elif isinstance(data, list) and name.isdecimal() and int(name) < len(data):
            data = data[int(name)]
        else:
            data = None
    return tuple(path)


def _length_of_name(data: object, parts: Sequence[str]) -> int:
    """Return how many parts are the longest name of a field of the data, or 1."""
    if not isinstance(data, Mapping):
        return 1
    return next((count for count in range(len(parts), 1, -1) if ".".join(parts[:count]) in data), 1)
