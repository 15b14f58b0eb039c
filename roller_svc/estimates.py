"""Many programs on many devices → the answer of POST /v1/estimates, also what `roller estimate --json` prints."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from roller_svc import hardware
from roller_svc.ask import checked_expression, checked_flag, checked_outputs, checked_target, checked_top_k
from roller_svc.construct.shared import Shared
from roller_svc.construct.what_if import sensitivities
from roller_svc.describe import Json, error_json, sensitivity_json
from roller_svc.errors import EstimatesTimeoutError, InputError, RollerError
from roller_svc.front import parse
from roller_svc.ir.canonical import digest, digest_and_length
from roller_svc.ir.demands import Demands
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.report import Plan
from roller_svc.lang.input_types import tensor_types
from roller_svc.memo import Memo
from roller_svc.outcomes import Work, outcomes
from roller_svc.ranking import Estimated, estimate_program

# What a memo keeps: characters of programs, as text and as JSON; devices; and characters of outcomes, of one program on
# one device each, as JSON: several bytes each as values.
PROGRAMS_MOST, SPECS_MOST, OUTCOMES_MOST = 16 << 20, 256, 32 << 20

T = TypeVar("T")
R = TypeVar("R")
TextKey = tuple[str, tuple[tuple[str, TensorType], ...], tuple[str, ...] | None]


@dataclass(frozen=True, slots=True)
class Item:
    """One program to estimate, in plain values, not yet checked."""

    expression: object
    inputs: Mapping[str, object] | None
    outputs: Sequence[str] | None = None
    allow_tf32: object = False


@dataclass(frozen=True, slots=True)
class OutcomeKey:
    """All that an outcome follows from, by content."""

    program: str
    spec: str
    top_k: int
    demands: Demands


@dataclass(frozen=True, slots=True)
class Named:
    """A program with the digest of its content."""

    noun: TensorProgram
    digest: str


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A program, and what is demanded of its kernels."""

    program: Named
    demands: Demands


@dataclass(frozen=True, slots=True)
class _Asked:
    """One outcome that is wanted."""

    key: OutcomeKey
    program: TensorProgram
    spec: HardwareSpec


class Estimates:
    """Answers, remembered by what they follow from, and so the same whatever was asked before.

    `compute` is how outcomes come about that are not known yet: here, or by several processes.
    """

    def __init__(self, compute: Callable[[Sequence[Work]], list[list[Json]]] = outcomes) -> None:
        self._compute = compute
        self._programs: Memo[TextKey, Named | InputError] = Memo(PROGRAMS_MOST)
        self._specs: Memo[str, tuple[HardwareSpec, str]] = Memo(SPECS_MOST)
        self._outcomes: Memo[OutcomeKey, Json] = Memo(OUTCOMES_MOST)

    def answers(
        self, items: Iterable[Item], targets: Sequence[str | HardwareSpec], top_k: object, within_s: float = math.inf
    ) -> list[Json]:
        """In order of items, then targets. What is refused, or not begun `within_s`, stands in its place as `error`."""
        until_s = time.monotonic() + within_s
        count = checked_top_k(top_k)
        programs = [_or_refusal(partial(self._wanted, until_s=until_s), item) for item in items]
        devices = [_or_refusal(self._spec, target) for target in targets]
        asked = [
            (index, target, _asked(program, device, count))
            for index, program in enumerate(programs)
            for target, device in zip(targets, devices, strict=True)
        ]
        known = self._known([one for _, _, one in asked if isinstance(one, _Asked)], until_s)
        return [
            {"item": index, "target": _name(target)} | (known[one.key] if isinstance(one, _Asked) else one)
            for index, target, one in asked
        ]

    def _known(self, asked: Sequence[_Asked], until_s: float) -> dict[OutcomeKey, Json]:
        """The outcome of each; what is not remembered is computed, all devices of one program together."""
        known: dict[OutcomeKey, Json] = {}
        missing: dict[tuple[str, Demands], dict[str, _Asked]] = {}
        for one in asked:
            key = one.key
            if (outcome := self._outcomes.get(key)) is not None:
                known[key] = outcome
            else:
                missing.setdefault((key.program, key.demands), {})[key.spec] = one
        groups = [tuple(group.values()) for group in missing.values()]
        works = [
            Work(group[0].program, tuple(one.spec for one in group), group[0].key.top_k, group[0].key.demands, until_s)
            for group in groups
        ]
        for group, found in zip(groups, self._compute(works), strict=True):
            for one, outcome in zip(group, found, strict=True):
                known[one.key] = outcome
                if not _is_late(outcome):
                    self._outcomes.put(one.key, outcome, len(json.dumps(outcome)))
        return known

    def _wanted(self, item: Item, until_s: float = math.inf) -> _Wanted:
        """Raises the program's InputError, remembered too, and EstimatesTimeoutError for one that is not begun."""
        key, demands = _text_key(item), _demands(item)
        if (known := self._programs.get(key)) is None:
            if time.monotonic() >= until_s:
                raise EstimatesTimeoutError("the time for the estimates of one request was over")
            known, weight = _read(key)
            self._programs.put(key, known, weight)
        if isinstance(known, InputError):
            raise known.with_traceback(None)
        return _Wanted(known, demands)

    def _spec(self, target: str | HardwareSpec) -> tuple[HardwareSpec, str]:
        """An id always means the same figures while a process runs; a spec is what it says."""
        if isinstance(target, HardwareSpec):
            return target, digest(target)

        if (known := self._specs.get(checked_target(target))) is not None:
            return known
        spec = hardware.load(target)
        self._specs.put(target, found := (spec, digest(spec)))
        return found


def estimates_json(items: Iterable[Item], targets: Sequence[str | HardwareSpec], top_k: object) -> list[Json]:
    """The answers, nothing being remembered."""
    return Estimates().answers(items, targets, top_k)


def estimated(item: Item, targets: Sequence[str | HardwareSpec], top_k: int) -> list[Estimated]:
    """The best plans for each device. What is wrong with the program or a device's name is an error here."""
    specs = [t if isinstance(t, HardwareSpec) else hardware.load(checked_target(t)) for t in targets]
    shared, demands = Shared(_parsed(_text_key(item))), _demands(item)
    return [estimate_program(shared, spec, top_k, demands) for spec in specs]


def what_if_json(item: Item, spec: HardwareSpec, plan: Plan) -> list[Json]:
    """What a tenth more of each resource of the device would save of that plan of the item."""
    groups = Shared(_parsed(_text_key(item))).grouping_of(plan, spec)
    return sensitivity_json(sensitivities(plan, groups, spec))


def _is_late(outcome: Json) -> bool:
    """Whether it says no more than that there was no time for it."""
    error = outcome.get("error")
    return isinstance(error, dict) and error["code"] == EstimatesTimeoutError.default_code


def _or_refusal(resolve: Callable[[T], R], given: T) -> R | Json:
    try:
        return resolve(given)
    except RollerError as error:
        return {"error": error_json(error)}


def _asked(wanted: _Wanted | Json, device: tuple[HardwareSpec, str] | Json, top_k: int) -> _Asked | Json:
    """The outcome that is wanted, or why there is none."""
    if isinstance(device, dict):
        return device
    if isinstance(wanted, dict):
        return wanted
    spec, of_spec = device
    named = wanted.program
    return _Asked(OutcomeKey(named.digest, of_spec, top_k, wanted.demands), named.noun, spec)


def _text_key(item: Item) -> TextKey:
    return checked_expression(item.expression), tensor_types(item.inputs), checked_outputs(item.outputs)


def _read(key: TextKey) -> tuple[Named | InputError, int]:
    """The program of a text, or why it is refused, and how much a memo holds of it, in characters."""
    try:
        program = _parsed(key)
    except InputError as refusal:
        return refusal.with_traceback(None), len(key[0]) + len(refusal.message)
    name, length = digest_and_length(program)
    return Named(program, name), len(key[0]) + length


def _parsed(key: TextKey) -> TensorProgram:
    expression, inputs, outputs = key
    return parse(expression, dict(inputs), outputs)


def _demands(item: Item) -> Demands:
    return Demands(checked_flag("allow_tf32", item.allow_tf32))


def _name(target: str | HardwareSpec) -> str:
    return target.id if isinstance(target, HardwareSpec) else target
