"""Plans with the times that they took: what the model's ranking is judged by, and its constants fitted to."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.generate import Groups
from roller_svc.ir.report import Plan


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """A plan for a program's kernel groups, and the least seconds that a call of its kernel took."""

    plan: Plan
    groups: Groups
    seconds: float


@dataclass(frozen=True, slots=True)
class FitCase:
    """One program of class `cls`: plans of it that were measured in turns, and can be compared therefore."""

    id: str
    cls: str
    plans: tuple[MeasuredPlan, ...]
