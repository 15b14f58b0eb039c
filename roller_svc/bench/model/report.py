"""Measured candidates of cases → the model's figures, as it is shipped and as it is fitted, in one document.

The shape of a document of measured candidates, as far as it is read again.
"""

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
from roller_svc.calibration import refigured
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
    """`reading`: which of the group's views; whether the tiles fit them, today's generator says."""

    reading: Annotated[int, Field(ge=0)]
    unit: str
    block: dict[str, Count]
    thread: dict[str, Count]


class CandidateModel(Read):
    error: str | None
    min_s: Annotated[float, Field(gt=0)] | None
    quiet_s: Annotated[float, Field(gt=0)] | None = None  # earlier documents have none
    half_s: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None  # nor these
    kernels: list[KernelModel]

    @model_validator(mode="after")
    def _timed_or_wrong(self) -> CandidateModel:
        if self.error is None and self.min_s is None:
            raise ValueError("neither a time nor an error")
        return self


class RowModel(Read):
    """`program`: the digest of its text and inputs."""

    id: str
    cls: str
    program: str | None = None  # earlier documents have none
    error: str | None
    candidates: list[CandidateModel]


class MeasurementsModel(Read):
    """`hardware` has checks of its own."""

    machine: MachineModel
    settings: SettingsModel
    hardware: dict[str, Any]
    cases: list[RowModel]

    @model_validator(mode="after")
    def _each_case_once(self) -> MeasurementsModel:
        if len({row.id for row in self.cases}) < len(self.cases):
            raise ValueError("a case is there twice")
        return self


Json = dict[str, Any]
MEASUREMENTS = Kind("no measurements of candidates", "roller bench model --json writes such a file")


def read_measurements(path: Path) -> Json:
    """The document of an earlier run; ArgumentError, with what is wrong and where, for any other file."""
    document: Json = read_json(path, MEASUREMENTS)
    checked(path, MEASUREMENTS, MeasurementsModel, document)
    try:
        from_mapping(document["hardware"], "hardware")
    except SpecError as invalid:
        raise MEASUREMENTS.refusal(path, invalid.message) from invalid
    return document


def report(document: Json, cases: Mapping[str, BenchCase]) -> Json:
    """The document with its rows judged: `overall` and `classes` with constants fitted to the other half of the rows,
    `as_shipped` the same with today's; each row gets both, each of its candidates `predicted_s` and `fitted_s`.

    Raises ArgumentError where no row is of one of the cases.
    """
    hw = spec_of(document)
    rows = [row for row in document["cases"] if row["id"] in cases]
    if not rows:
        raise ArgumentError("none of the measured programs is among the cases", code="stale-measurements",
                            hint="--cases FILE: those that were measured")  # fmt: skip
    fit_case_or_error = {row["id"]: _fit_case(row, cases[row["id"]], hw) for row in rows}
    timed = [case for case in fit_case_or_error.values() if isinstance(case, FitCase) and case.plans]
    shipped, halves = with_shipped_constants(timed, hw), cross_validate(timed, hw)
    by_id = {one.id: (one, other) for one, other in zip(shipped, halves.cases, strict=True)}
    return {
        **{key: document[key] for key in ("machine", "settings")},
        **evaluation(halves.cases),
        "as_shipped": evaluation(shipped),
        "constants": [asdict(costs) for costs in halves.constants],
        "hardware": to_mapping(hw),
        "cases": [_row(row, fit_case_or_error[row["id"]], by_id.get(row["id"])) for row in rows],
    }


def spec_of(document: Json) -> HardwareSpec:
    """The machine that was measured, with the figures that calibration takes from its micro-benchmarks today."""
    return refigured(from_mapping(document["hardware"]))


def fit_cases(document: Json, cases: Mapping[str, BenchCase]) -> tuple[FitCase, ...]:
    """What was measured of these cases, as today's model sees it."""
    hw = spec_of(document)
    fit_case_or_error = (_fit_case(row, cases[row["id"]], hw) for row in document["cases"] if row["id"] in cases)
    return tuple(case for case in fit_case_or_error if isinstance(case, FitCase) and case.plans)


def _fit_case(row: Json, case: BenchCase, hw: HardwareSpec) -> FitCase | str:
    """The row as today's model sees it, or why it does not count."""
    if row["error"]:
        return str(row["error"])
    if (row.get("program") or case.digest) != case.digest:
        return "stale-measurements: the case has another text, or other inputs, now"
    try:
        return fit_case(row, case, hw)
    except ArgumentError as stale:
        return f"{stale.code}: {stale.message}"


def _row(row: Json, fit_case_or_error: FitCase | str, evaluated: tuple[EvaluatedCase, EvaluatedCase] | None) -> Json:
    if isinstance(fit_case_or_error, str) or evaluated is None:
        return row | {
            "error": fit_case_or_error if isinstance(fit_case_or_error, str) else "no candidate could be timed"
        }
    shipped, fitted = evaluated
    timed = iter(zip(shipped.pairs, fitted.pairs, strict=True))
    candidates = []
    for candidate in row["candidates"]:
        if candidate["error"] is None:
            (predicted_s, _), (fitted_s, _) = next(timed)
            candidate = candidate | {"predicted_s": predicted_s, "fitted_s": fitted_s}
        candidates.append(candidate)
    return row | case_json(fitted) | {"as_shipped": case_json(shipped), "candidates": candidates}
