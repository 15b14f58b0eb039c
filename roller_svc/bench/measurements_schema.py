"""The shape of a document of measured candidates, as far as it is read again."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]


class _Read(BaseModel):
    """What is not read again may be there and is not looked at; no coercion, no NaN."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)


class MachineModel(_Read):
    cpu: str
    date: str


class SettingsModel(_Read):
    threads: Count


class KernelModel(_Read):
    """`reading`: which of the group's views; whether the tiles fit them, today's generator says."""

    reading: Annotated[int, Field(ge=0)]
    unit: str
    block: dict[str, Count]
    thread: dict[str, Count]


class CandidateModel(_Read):
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


class RowModel(_Read):
    id: str
    cls: str
    error: str | None
    candidates: list[CandidateModel]


class MeasurementsModel(_Read):
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
