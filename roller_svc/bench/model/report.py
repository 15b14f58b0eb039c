"""Read documents of measured candidates and evaluate the model on them, with shipped and with fitted constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from roller_svc.bench.cases import BenchCase
from roller_svc.bench.input_files import Kind, Read, checked, read_json
from roller_svc.bench.model.cross_validation import cross_validate, with_shipped_constants
from roller_svc.bench.model.measured_plans import FitCase
from roller_svc.bench.model.regret import EvaluatedCase, case_json, evaluation
from roller_svc.bench.model.run import fit_case
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

    `overall` and `classes` are with constants fitted to the other half of the rows, `as_shipped` with the shipped ones.
    Each row gets both, and each of its candidates `predicted_s` (shipped) and `fitted_s`. Raises ArgumentError if no
    row belongs to one of the cases.
    """
    hw = spec_of(document)
    rows = [row for row in document["cases"] if row["id"] in cases]
    if not rows:
        raise ArgumentError("no measured program is among the cases", code="stale-measurements",
                            hint="--cases FILE: the measured cases")  # fmt: skip
    results = {row["id"]: _fit_case(row, cases[row["id"]], hw) for row in rows}
    timed = [case for case in results.values() if isinstance(case, FitCase) and case.plans]
    shipped, halves = with_shipped_constants(timed, hw), cross_validate(timed, hw)
    by_id = {one.id: (one, other) for one, other in zip(shipped, halves.cases, strict=True)}
    return {
        **{key: document[key] for key in ("machine", "settings")},
        **evaluation(halves.cases),
        "as_shipped": evaluation(shipped),
        "constants": [asdict(costs) for costs in halves.constants],
        "hardware": to_mapping(hw),
        "cases": [_row(row, results[row["id"]], by_id.get(row["id"])) for row in rows],
    }


def spec_of(document: Json) -> HardwareSpec:
    """Return the spec of the measured machine, with values re-derived from its micro-benchmarks."""
    return recompute_derived(from_mapping(document["hardware"]))


def fit_cases(document: Json, cases: Mapping[str, BenchCase]) -> tuple[FitCase, ...]:
    """Return the measured cases with the estimates of today's model."""
    hw = spec_of(document)
    results = (_fit_case(row, cases[row["id"]], hw) for row in document["cases"] if row["id"] in cases)
    return tuple(case for case in results if isinstance(case, FitCase) and case.plans)


def _fit_case(row: Json, case: BenchCase, hw: HardwareSpec) -> FitCase | str:
    """Return the row with the estimates of today's model, or why it does not count."""
    if row["error"]:
        return str(row["error"])
    if (row.get("program") or case.digest) != case.digest:
        return "stale-measurements: expression or inputs of the case have changed"
    try:
        return fit_case(row, case, hw)
    except ArgumentError as stale:
        return f"{stale.code}: {stale.message}"


def _row(row: Json, result: FitCase | str, evaluated: tuple[EvaluatedCase, EvaluatedCase] | None) -> Json:
    if isinstance(result, str) or evaluated is None:
        return row | {"error": result if isinstance(result, str) else "no candidate could be timed"}
    shipped, fitted = evaluated
    timed = iter(zip(shipped.pairs, fitted.pairs, strict=True))
    candidates = []
    for candidate in row["candidates"]:
        if candidate["error"] is None:
            (predicted_s, _), (fitted_s, _) = next(timed)
            candidate = candidate | {"predicted_s": predicted_s, "fitted_s": fitted_s}
        candidates.append(candidate)
    return row | case_json(fitted) | {"as_shipped": case_json(shipped), "candidates": candidates}
