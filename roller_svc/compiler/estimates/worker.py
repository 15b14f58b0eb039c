"""Programs' texts on devices → what the model says of them, as JSON: the work of a service's estimating processes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from roller_svc.compiler.partition_cache import Shared
from roller_svc.compiler.plans import Estimated, estimate_program
from roller_svc.compiler.serialize import Json, error_json, plan_json, roofline_json
from roller_svc.errors import RollerError
from roller_svc.frontend.parse import parse
from roller_svc.ir.constraints import Demands
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorProgram, TensorType

SLICE_S = 0.05  # after which a process begins no other outcome: somebody else's turn
PROGRAMS_KEPT = 4  # that were read last: the devices of one program may come in several slices
ERROR_START = b'{"error":'  # of an outcome that is an error


@dataclass(frozen=True, slots=True)
class ProgramText:
    """A program as it was posted, its parts checked for their types alone."""

    expression: str
    inputs: tuple[tuple[str, TensorType], ...]
    outputs: tuple[str, ...] | None

    def parsed(self) -> TensorProgram:
        """The checked program. Raises the InputError that it is refused with."""
        return parse(self.expression, dict(self.inputs), self.outputs)


@dataclass(frozen=True, slots=True)
class Work:
    """One program to estimate on several devices."""

    program: ProgramText
    specs: tuple[HardwareSpec, ...]
    top_k: int
    demands: Demands


@dataclass(slots=True)
class Found:
    """What is known of one Work: `outcomes` of its first devices, in order, each a JSON object.

    `refusal` is the program's error on every device that is left. `fault` is an error of this attempt alone.
    Where neither is there and devices are left, there was no time for these.
    """

    outcomes: list[bytes] = field(default_factory=list)
    refusal: bytes | None = None
    fault: bytes | None = None

    @property
    def is_begun(self) -> bool:
        return bool(self.outcomes) or self.refusal is not None

    def add(self, more: Found) -> None:
        """Take in what was found of the devices that were left."""
        self.outcomes += more.outcomes
        self.refusal, self.fault = more.refusal, more.fault


class Patience:
    """How long somebody waits for outcomes; safe for threads."""

    def __init__(self, within_s: float = math.inf) -> None:
        self._until_s = time.monotonic() + within_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._until_s - time.monotonic())

    @property
    def is_over(self) -> bool:
        return self.left_s == 0.0

    def end(self) -> None:
        """Let it be over now: nobody waits any more."""
        self._until_s = -math.inf


def compute_outcomes(works: Sequence[Work], patience: Patience) -> list[Found]:
    """Estimate each program in this process, until the patience is over."""
    found = [Found() for _ in works]
    for work, one in zip(works, found, strict=True):
        if not patience.is_over:
            _fill(one, work, _shared, lambda: not patience.is_over)
    return found


def estimate_slice(works: Sequence[Work]) -> list[Found]:
    """Estimate the first programs for a slice of time: one outcome at least."""
    until_s = time.monotonic() + SLICE_S
    found: list[Found] = []

    def may_begin() -> bool:
        return time.monotonic() < until_s or not found[0].is_begun

    for work in works:
        if found and not may_begin():
            break
        found.append(one := Found())
        _fill(one, work, _kept, may_begin)
    return found


def estimated_json(found: Estimated) -> Json:
    """The answer for one item on one device, less what names these."""
    return {
        "roofline": roofline_json(found.roofline),
        "candidates": [plan_json(plan, found.spec) for plan in found.plans],
    }


def error_outcome(error: RollerError) -> bytes:
    return compact_json({"error": error_json(error)})


def compact_json(value: Json) -> bytes:
    """A value as it stands in an answer. Raises ValueError for infinities and NaN."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _fill(found: Found, work: Work, shared_of: Callable[[ProgramText], Shared], may_begin: Callable[[], bool]) -> None:
    """Add the program's refusal, or outcomes of its devices as long as they may begin."""
    try:
        shared = shared_of(work.program)
    except RollerError as refusal:
        found.refusal = error_outcome(refusal)
        return
    for spec in work.specs:
        if not may_begin():
            return
        found.outcomes.append(_outcome(shared, spec, work))


def _outcome(shared: Shared, spec: HardwareSpec, work: Work) -> bytes:
    try:
        return compact_json(estimated_json(estimate_program(shared, spec, work.top_k, work.demands)))
    except RollerError as error:
        return error_outcome(error)


def _shared(program: ProgramText) -> Shared:
    return Shared(program.parsed())


_kept = lru_cache(maxsize=PROGRAMS_KEPT)(_shared)  # in a process that estimates, whose work has one thread
