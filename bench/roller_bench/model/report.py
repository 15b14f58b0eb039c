"""Read documents of measured candidates and evaluate the model on them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from roller_bench.cases import BenchCase
from roller_bench.input_files import Kind, Read, checked, read_json
from roller_bench.model.regret import EvaluatedCase, case_json, evaluation
from roller_bench.model.run import evaluate_case
from roller_svc.calibration import recompute_derived
from roller_svc.errors import ArgumentError, SpecError
from roller_svc.hardware import from_mapping, to_mapping
from roller_svc.ir.hardware import HardwareSpec

Count = Annotated[int, Field(ge=1)]


class MachineModel(Read):
    cpu: str
    date: str


class SettingsModel(Read):
    threads: Count


class KernelModel(Read):
    """The tiles of a kernel; whether they fit the group is checked later."""

    reading: Annotated[int, Field(ge=0)]  # index of the group's view: direct convolution or implicit GEMM
    unit: str
    block: dict[str, Count]
    thread: dict[str, Count]


class CandidateModel(Read):
    error: str | None
    min_s: Annotated[float, Field(gt=0)] | None
    quiet_s: Annotated[float, Field(gt=0)] | None = None  # missing in earlier documents
    half_s: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None  # missing in earlier documents
    kernels: list[KernelModel]

    @model_validator(mode="after")
    def _timed_or_wrong(self) -> CandidateModel:
        if self.error is None and self.min_s is None:
            raise ValueError("expected a time or an error")
        return self


class RowModel(Read):
    """The row of a case."""

    id: str
    cls: str
    program: str | None = None  # digest of expression and inputs; missing in earlier documents
    error: str | None
    candidates: list[CandidateModel]


class MeasurementsModel(Read):
    """A document of measurements; `hardware` is validated separately."""

    machine: MachineModel
    settings: SettingsModel
    hardware: dict[str, Any]
    cases: list[RowModel]

    @model_validator(mode="after")
    def _each_case_once(self) -> MeasurementsModel:
        if len({row.id for row in self.cases}) < len(self.cases):
            raise ValueError("duplicate case id")
        return self


Json = dict[str, Any]
MEASUREMENTS = Kind("no measurements of candidates", "roller bench model --json writes such a file")


def read_measurements(path: Path) -> Json:
    """Read the document of an earlier run; raise ArgumentError for an invalid file."""
    document: Json = read_json(path, MEASUREMENTS)
    checked(path, MEASUREMENTS, MeasurementsModel, document)
    try:
        from_mapping(document["hardware"], "hardware")
    except SpecError as invalid:
        raise MEASUREMENTS.refusal(path, invalid.message) from invalid
    return document


def report(document: Json, cases: Mapping[str, BenchCase]) -> Json:
    """Evaluate the rows of a document.

    Each timed candidate of a row gets `predicted_s`. Raises ArgumentError if no row belongs to one of the cases.
    """
    hw = recompute_derived(from_mapping(document["hardware"]))  # values derived from the micro-benchmarks, by today's rules
    rows = [row for row in document["cases"] if row["id"] in cases]
    if not rows:
        raise ArgumentError(
            "no measured program is among the cases", code="stale-measurements", hint="--cases FILE: the measured cases"
        )
    results = {row["id"]: _evaluate(row, cases[row["id"]], hw) for row in rows}
    return {
        **{key: document[key] for key in ("machine", "settings")},
        **evaluation([result for result in results.values() if isinstance(result, EvaluatedCase)]),
        "hardware": to_mapping(hw),
        "cases": [_row(row, results[row["id"]]) for row in rows],
    }


def _evaluate(row: Json, case: BenchCase, hw: HardwareSpec) -> EvaluatedCase | str:
    """Return the row with the estimates of today's model, or why it does not count."""
    if row["error"]:
        return str(row["error"])
    if (row.get("program") or case.digest) != case.digest:
        return "stale-measurements: expression or inputs of the case have changed"
    if all(candidate["error"] is not None for candidate in row["candidates"]):
        return "no candidate could be timed"
    try:
        return evaluate_case(row, case, hw)
    except ArgumentError as stale:
        return f"{stale.code}: {stale.message}"


def _row(row: Json, result: EvaluatedCase | str) -> Json:
    if isinstance(result, str):
        return row | {"error": result}
    seconds = iter(predicted_s for predicted_s, _ in result.pairs)
    candidates = [c if c["error"] is not None else c | {"predicted_s": next(seconds)} for c in row["candidates"]]
    return row | case_json(result) | {"candidates": candidates}
