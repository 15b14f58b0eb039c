"""The shape of a document of measured candidates, as far as it is read again."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from roller_svc.bench.documents import Read

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
