"""Case files → checked programs with the fields that benchmarks need."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roller_svc.errors import ArgumentError
from roller_svc.front import parse
from roller_svc.ir.dtype import dtype_named
from roller_svc.ir.program import TensorProgram, TensorType

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One performance case, not parsed yet, so that a case that is refused can be reported by its id."""

    id: str
    cls: str
    expression: str
    inputs: Json
    outputs: tuple[str, ...] | None
    hints: Json = field(default_factory=dict)  # for random inputs

    def program(self) -> TensorProgram:
        return parse(self.expression, {n: _type(n, t) for n, t in self.inputs.items()}, self.outputs)


def performance_cases(path: Path) -> Iterator[BenchCase]:
    """Cases whose `use` has performance, and those that do not say what they are for."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        rows = document["cases"]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ArgumentError(f"{path}: not a case file: {problem}", code="unreadable-file") from problem
    for row in rows:
        if "performance" in row.get("use", ("performance",)):
            outputs = tuple(row["out_meta"]) if row.get("out_meta") else None
            yield BenchCase(str(row["id"]), str(row.get("cls", "")), row["expr"], row["inputs"], outputs,
                            dict(row.get("hints") or {}))  # fmt: skip


def _type(name: str, value: Json) -> TensorType:
    dtype = dtype_named(value["dtype"])
    if dtype is None:
        raise ArgumentError(f"input {name}: unknown dtype {value['dtype']}", code="unknown-dtype")
    return TensorType(dtype, tuple(value["shape"]))
