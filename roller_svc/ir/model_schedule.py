"""The launches of a model's plan with what a check of an edited one needs: rTasks, their times, the memory that they use.

`POST /v1/plans:check` reads it. A worker stores it beside the story of a model that a virtual device executes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from roller_svc.ir.canonical import OMIT_DEFAULT
from roller_svc.ir.vdevice import VDevicePlan


@dataclass(frozen=True, slots=True)
class ScheduledOperator:
    """An rOperator of a launch. An access is a slot, the first byte, the end, and whether it writes."""

    node: str
    step: int  # of the story
    phase: int | None
    place: tuple[int, int]  # in an order of execution that is right
    tasks: int
    task_s: float  # of an rTask beside others
    alone_s: float  # of all rTasks on one vEU
    accesses: tuple[tuple[int, int, int, bool], ...]  # of tensors that share no memory


@dataclass(frozen=True, slots=True)
class ScheduledLaunch:
    """Steps that run one after the other, or the plan of a virtual device."""

    steps: tuple[tuple[int, float], ...]  # of the story, with seconds; none beside a plan
    operators: Annotated[tuple[ScheduledOperator, ...], OMIT_DEFAULT] = ()
    plan: Annotated[VDevicePlan | None, OMIT_DEFAULT] = None


@dataclass(frozen=True, slots=True)
class ModelSchedule:
    """The launches of a plan, in order."""

    launches: tuple[ScheduledLaunch, ...]
