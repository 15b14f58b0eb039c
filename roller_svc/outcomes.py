"""Programs on devices → what the model says of them, in plain values: the work of the processes beside a service.

They start with the first large batch, which waits for what is imported here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from roller_svc.construct.shared import Shared
from roller_svc.describe import Json, error_json, plan_json, roofline_json
from roller_svc.errors import EstimatesTimeoutError, RollerError
from roller_svc.ir.demands import Demands
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorProgram
from roller_svc.ranking import Estimated, estimate_program


@dataclass(frozen=True, slots=True)
class Work:
    """One program to estimate on several devices. `until_s`: by when, on the clock of `time.monotonic`, which all
    processes of a machine share."""

    program: TensorProgram
    specs: tuple[HardwareSpec, ...]
    top_k: int
    demands: Demands
    until_s: float = math.inf


def outcomes(works: Sequence[Work]) -> list[list[Json]]:
    """Of each program, for each of its devices: roofline and candidates, or the error."""
    return [list(_outcomes(work)) for work in works]


def _outcomes(work: Work) -> Iterator[Json]:
    shared = Shared(work.program)
    for spec in work.specs:
        try:
            if time.monotonic() >= work.until_s:
                raise EstimatesTimeoutError("the time for the estimates of one request was over")
            yield estimated_json(estimate_program(shared, spec, work.top_k, work.demands))
        except RollerError as error:
            yield {"error": error_json(error)}


def estimated_json(found: Estimated) -> Json:
    """The answer for one item on one device, less what names these."""
    return {
        "roofline": roofline_json(found.roofline),
        "candidates": [plan_json(plan, found.spec) for plan in found.plans],
    }
