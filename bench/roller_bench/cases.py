"""Read case files into checked programs with the fields that benchmarks need."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from roller_bench.input_files import CaseModel, InputModel, Kind, checked, read_json
from roller_svc.errors import ArgumentError
from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import dtype_named
from roller_svc.ir.program import TensorProgram, TensorType

Json = dict[str, Any]
CASES = Kind("not a case file", hint="--cases FILE names one")


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One performance case; not parsed yet, so that an invalid case can be reported by its id."""

    id: str
    cls: str
    expression: str
    inputs: Json
    outputs: tuple[str, ...] | None
    hints: Json = field(default_factory=dict)  # for random inputs

    def program(self) -> TensorProgram:
        return parse(self.expression, {n: _type(n, t) for n, t in self.inputs.items()}, self.outputs)

    @property
    def digest(self) -> str:
        """Return the digest of the expression and its inputs."""
        parts = {name: value for name, value in asdict(self).items() if name not in ("id", "cls")}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def performance_cases(path: Path) -> tuple[BenchCase, ...]:
    """Return the cases whose `use` has "performance", and those without `use`.

    Raises ArgumentError for another kind of file and for duplicate ids.
    """
    document = read_json(path, CASES)
    rows = document.get("cases") if isinstance(document, dict) else None
    if not isinstance(rows, list):
        raise CASES.refusal(path, "expected a list `cases`")
    numbered = [(number, row) for number, row in enumerate(rows) if _is_for_performance(row)]
    cases = tuple(_case(checked(path, CASES, CaseModel, row, f"cases.{number}")) for number, row in numbered)
    if duplicates := [id_ for id_, count in Counter(case.id for case in cases).items() if count > 1]:
        raise CASES.refusal(path, f"duplicate case id {duplicates[0]}")
    return cases


def _is_for_performance(row: object) -> bool:
    """Return whether a row is for performance or does not state a use."""
    uses = row.get("use") if isinstance(row, dict) else None
    return not isinstance(uses, list) or "performance" in uses


def _case(row: CaseModel) -> BenchCase:
    outputs = tuple(row.outputs or row.out_meta or ()) or None
    return BenchCase(row.id, row.cls, row.expr, typed(row.inputs), outputs, row.hints or {})


def typed(inputs: dict[str, InputModel]) -> Json:
    """Return the inputs in the form of a case."""
    return {name: value.model_dump() for name, value in inputs.items()}


def _type(name: str, value: Json) -> TensorType:
    dtype = dtype_named(value["dtype"])
    if dtype is None:
        raise ArgumentError(f"input {name}: unknown dtype {value['dtype']}", code="unknown-dtype")
    return TensorType(dtype, tuple(value["shape"]))
