"""Many programs on many devices → the answer of POST /v1/estimates, also what `roller estimate --json` prints."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from roller_svc import hardware
from roller_svc.compiler.estimates.cache import Memo
from roller_svc.compiler.estimates.worker import Found, Patience, ProgramText, Work, compute_outcomes, error_outcome
from roller_svc.compiler.partition_cache import Shared
from roller_svc.compiler.plans import Estimated, estimate_program
from roller_svc.compiler.request import checked_expression, checked_flag, checked_outputs, checked_target, checked_top_k
from roller_svc.compiler.sensitivity import sensitivities
from roller_svc.compiler.serialize import Json, sensitivity_json
from roller_svc.errors import EstimatesTimeoutError, RollerError
from roller_svc.frontend.lang.input_types import tensor_types
from roller_svc.ir.canonical import digest
from roller_svc.ir.constraints import Demands
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.report import Plan

# What the memos keep: devices, and bytes of refused programs' errors and of outcomes, of one program on one device
# each. ENTRY_BYTES is what CPython takes for an entry beside the content: key, dictionary, links, headers.
SPECS_MOST, REFUSALS_MOST, OUTCOMES_MOST = 256, 4 << 20, 24 << 20
ENTRY_BYTES = 512

LATE = error_outcome(EstimatesTimeoutError("the time for the estimates of one request was over"))

T = TypeVar("T")
R = TypeVar("R")
Compute = Callable[[Sequence[Work], Patience], list[Found]]


@dataclass(frozen=True, slots=True)
class Item:
    """One program to estimate, in plain values, not yet checked."""

    expression: object
    inputs: Mapping[str, object] | None
    outputs: Sequence[str] | None = None
    allow_tf32: object = False


class Answer(NamedTuple):
    """Of one item on one target: the outcome, a JSON object with `roofline` and `candidates`, or with `error`."""

    item: int
    target: str
    outcome: bytes


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A program, what is demanded of its kernels, and the digest of its text."""

    program: ProgramText
    demands: Demands
    digest: bytes


@dataclass(frozen=True, slots=True)
class _Device:
    """A device, and the digest of its figures."""

    spec: HardwareSpec
    digest: str


@dataclass(frozen=True, slots=True)
class _Asked:
    """One outcome that is wanted; `key` is the digest of all that it follows from."""

    key: bytes
    wanted: _Wanted
    device: _Device


class Estimates:
    """Answers, remembered by what they follow from, and so the same whatever was asked before.

    `compute` is how outcomes come about that are not known yet: in this process, or in others.
    """

    def __init__(self, compute: Compute = compute_outcomes) -> None:
        self._compute = compute
        self._specs: Memo[str, _Device] = Memo(SPECS_MOST)
        self._refusals: Memo[bytes, bytes] = Memo(REFUSALS_MOST)
        self._outcomes: Memo[bytes, bytes] = Memo(OUTCOMES_MOST)

    def answers(
        self, items: Iterable[Item], targets: Sequence[str | HardwareSpec], top_k: object, within_s: float = math.inf
    ) -> list[Json]:
        """In order of items, then targets. What is refused, or not begun `within_s`, stands in its place as `error`."""
        return [
            {"item": one.item, "target": one.target} | json.loads(one.outcome)
            for one in self.encoded_answers(items, targets, top_k, Patience(within_s))
        ]

    def encoded_answers(
        self, items: Iterable[Item], targets: Sequence[str | HardwareSpec], top_k: object, patience: Patience
    ) -> list[Answer]:
        """The same with outcomes as JSON text, as they are remembered."""
        count = checked_top_k(top_k)
        programs = [_or_refusal(_wanted, item) for item in items]
        devices = [_or_refusal(self._device, target) for target in targets]
        asked = [
            (index, _name(target), _asked(program, device, count))
            for index, program in enumerate(programs)
            for target, device in zip(targets, devices, strict=True)
        ]
        known = self._known([one for _, _, one in asked if isinstance(one, _Asked)], count, patience)
        return [
            Answer(index, target, known[one.key] if isinstance(one, _Asked) else one) for index, target, one in asked
        ]

    def _known(self, asked: Sequence[_Asked], top_k: int, patience: Patience) -> dict[bytes, bytes]:
        """The outcome of each; what is not remembered is computed, all devices of one program together."""
        known: dict[bytes, bytes] = {}
        missing: dict[tuple[bytes, Demands], dict[bytes, _Asked]] = {}
        for one in asked:
            if (outcome := self._remembered(one)) is not None:
                known[one.key] = outcome
            else:
                missing.setdefault((one.wanted.digest, one.wanted.demands), {})[one.key] = one
        groups = [tuple(group.values()) for group in missing.values()]
        works = [_work(group, top_k) for group in groups]
        for group, found in zip(groups, self._compute(works, patience), strict=True):
            known |= self._remember(group, found)
        return known

    def _remembered(self, asked: _Asked) -> bytes | None:
        outcome = self._outcomes.get(asked.key)
        return self._refusals.get(asked.wanted.digest) if outcome is None else outcome

    def _remember(self, group: Sequence[_Asked], found: Found) -> dict[bytes, bytes]:
        """The outcome of each device of one program; what holds for this attempt alone is not kept."""
        if found.refusal is not None:
            self._refusals.put(group[0].wanted.digest, found.refusal, _weight(found.refusal))
        left = found.refusal or found.fault or LATE
        known = {one.key: left for one in group}
        for one, outcome in zip(group, found.outcomes, strict=False):
            self._outcomes.put(one.key, outcome, _weight(outcome))
            known[one.key] = outcome
        return known

    def _device(self, target: str | HardwareSpec) -> _Device:
        """An id always means the same figures while a process runs; a spec is what it says."""
        if isinstance(target, HardwareSpec):
            return _Device(target, digest(target))
        if (known := self._specs.get(checked_target(target))) is not None:
            return known
        spec = hardware.load(target)
        self._specs.put(target, found := _Device(spec, digest(spec)))
        return found


def estimates_json(items: Iterable[Item], targets: Sequence[str | HardwareSpec], top_k: object) -> list[Json]:
    """The answers, nothing being remembered."""
    return Estimates().answers(items, targets, top_k)


def estimated(item: Item, targets: Sequence[str | HardwareSpec], top_k: int) -> list[Estimated]:
    """The best plans for each device. What is wrong with the program or a device's name is an error here."""
    specs = [t if isinstance(t, HardwareSpec) else hardware.load(checked_target(t)) for t in targets]
    shared, demands = Shared(_text(item).parsed()), _demands(item)
    return [estimate_program(shared, spec, top_k, demands) for spec in specs]


def what_if_json(item: Item, spec: HardwareSpec, plan: Plan) -> list[Json]:
    """What a tenth more of each resource of the device would save of that plan of the item."""
    groups = Shared(_text(item).parsed()).grouping_of(plan, spec)
    return sensitivity_json(sensitivities(plan, groups, spec))


def _or_refusal(resolve: Callable[[T], R], given: T) -> R | bytes:
    try:
        return resolve(given)
    except RollerError as error:
        return error_outcome(error)


def _wanted(item: Item) -> _Wanted:
    text = _text(item)
    return _Wanted(text, _demands(item), _digest_of(text))


def _asked(wanted: _Wanted | bytes, device: _Device | bytes, top_k: int) -> _Asked | bytes:
    """The outcome that is wanted, or why there is none."""
    if isinstance(device, bytes):
        return device
    if isinstance(wanted, bytes):
        return wanted
    rest = f"{device.digest} {top_k} {wanted.demands}"
    return _Asked(_hashed(wanted.digest + rest.encode()), wanted, device)


def _work(group: Sequence[_Asked], top_k: int) -> Work:
    """All devices of one program."""
    wanted = group[0].wanted
    return Work(wanted.program, tuple(one.device.spec for one in group), top_k, wanted.demands)


def _text(item: Item) -> ProgramText:
    return ProgramText(checked_expression(item.expression), tensor_types(item.inputs), checked_outputs(item.outputs))


def _digest_of(text: ProgramText) -> bytes:
    """Of the text as it stands: the same program written otherwise has another digest."""
    inputs = [(name, type_.dtype.value, type_.shape) for name, type_ in text.inputs]
    return _hashed(repr((text.expression, inputs, text.outputs)).encode())


def _hashed(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=32).digest()


def _weight(content: bytes) -> int:
    return len(content) + ENTRY_BYTES


def _demands(item: Item) -> Demands:
    return Demands(checked_flag("allow_tf32", item.allow_tf32))


def _name(target: str | HardwareSpec) -> str:
    return target.id if isinstance(target, HardwareSpec) else target
