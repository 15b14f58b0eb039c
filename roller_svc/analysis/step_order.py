"""Which steps of a model have to run before others: what is written before it is read, and read before it is written."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from roller_svc.errors import InvariantError
from roller_svc.ir.kernel import Role
from roller_svc.ir.model_plan import PACKED, WEIGHTS, CopyStep, KernelStep, ModelPlan

MAX_DISTANCE = 1 << 10  # of steps: an edge between more distant ones may be implied by others
_NOBODY = -1


@dataclass(frozen=True, slots=True)
class _Access:
    """Bytes that a step reads or writes."""

    first: int
    end: int
    is_write: bool


class _Readers(NamedTuple):
    """Steps in a list that segments share."""

    step: int
    others: _Readers | None


class _Segment(NamedTuple):
    """Bytes with the step that wrote them last, and those that have read them since."""

    first: int
    end: int
    writer: int
    readers: _Readers | None


def find_predecessors(plan: ModelPlan, steps: Sequence[KernelStep | CopyStep]) -> tuple[tuple[int, ...], ...]:
    """Return for each step the steps that have to finish before it starts.

    An edge that others imply is left out if it spans at most MAX_DISTANCE steps.

    Args:
        plan: the plan of the steps.
        steps: unrolled steps in an order in which they may run one after the other. None writes weights.
    """
    accesses = [
        [(slot, each) for slot, each in _accesses(plan, step) if slot not in (WEIGHTS, PACKED) and each.end > each.first]
        for step in steps
    ]
    written = {slot for listed in accesses for slot, each in listed if each.is_write}
    memory: dict[int, list[_Segment]] = {slot: [] for slot in written}
    predecessors: list[tuple[int, ...]] = []
    ancestors: list[int] = []  # of each step, as bits: bit k is the step k + 1 before it
    for number, listed in enumerate(accesses):
        direct: set[int] = set()
        for slot, each in listed:
            if slot in written:
                direct.update(_record(memory[slot], each, number))
        direct -= {number, _NOBODY}
        implied = reached = 0
        for other in direct:
            distance = number - other
            if distance <= MAX_DISTANCE:
                implied |= ancestors[other] << distance
                reached |= 1 << distance - 1
        predecessors.append(tuple(sorted(each for each in direct if not implied >> number - each - 1 & 1)))
        ancestors.append((implied | reached) & (1 << MAX_DISTANCE) - 1)
        if number >= MAX_DISTANCE:
            ancestors[number - MAX_DISTANCE] = 0
    return tuple(predecessors)


def find_early_starts(
    plan: ModelPlan, steps: Sequence[KernelStep | CopyStep], predecessors: Sequence[Sequence[int]]
) -> tuple[bool, ...]:
    """Return whether each step may start while those before it run, because its threads wait for them.

    All of these must be kernels. A thread that has waited for them has also waited for what they have waited for. What
    the step reads before it waits must be memory that no step writes.
    """
    return tuple(
        bool(before) and _waits_for_launches(plan, step) and all(isinstance(steps[each], KernelStep) for each in before)
        for step, before in zip(steps, predecessors, strict=True)
    )


def _waits_for_launches(plan: ModelPlan, step: KernelStep | CopyStep) -> bool:
    """Return whether the threads of a step wait before they access what other steps may write or read."""
    if isinstance(step, CopyStep) or step.zeroed:
        return False
    source = plan.kernels[step.kernel].source
    launch = source.launches[step.launch]
    early = {each.symbol for each in source.buffers_of(Role.INPUT) if each.name in source.constants}
    places = (place for symbol, place in zip(launch.operands, step.arguments, strict=True) if symbol in early)
    return launch.programmatic and all(place is not None and place.slot in (WEIGHTS, PACKED) for place in places)


def check_operands(plan: ModelPlan, steps: Sequence[KernelStep | CopyStep]) -> None:
    """Raise InvariantError for a step that writes bytes of another operand: its threads and copies have no order.

    Hazards within a step have no edges, and a launch in the emulator has memory of its own.
    """
    for step in steps:
        accesses = _accesses(plan, step)
        zeros = len(step.zeroed) if isinstance(step, KernelStep) else 0  # they are the memory of operands
        operands = accesses[: len(accesses) - zeros]
        for i, (slot, each) in enumerate(operands):
            for other_slot, other in operands[:i]:
                overlap = slot == other_slot and each.first < other.end and other.first < each.end
                if overlap and (each.is_write or other.is_write):
                    raise InvariantError(
                        f"node {step.node!r} of {plan.name} writes bytes of another operand: slot {slot} has "
                        f"{other.first}..{other.end} and {each.first}..{each.end}"
                    )


def _record(segments: list[_Segment], access: _Access, step: int) -> Iterator[int]:
    """Record an access of a slot, and yield the steps that it has to wait for.

    `segments` are disjoint and in order. A write waits for the last writer and its readers: they wait for all before.
    """
    first, end, is_write = access.first, access.end, access.is_write
    low = bisect_right(segments, first, key=lambda each: each.end)
    high = bisect_left(segments, end, key=lambda each: each.first)
    old = segments[low:high]
    new = [old[0]._replace(end=first)] if old and old[0].first < first else []
    at = first
    for each in old:
        yield each.writer
        readers = each.readers
        while is_write and readers is not None:
            yield readers.step
            readers = readers.others
        if not is_write:
            start, stop = max(first, each.first), min(end, each.end)
            if at < start:
                new.append(_Segment(at, start, _NOBODY, _Readers(step, None)))
            new.append(_Segment(start, stop, each.writer, _Readers(step, each.readers)))
            at = stop
    if is_write:
        new.append(_Segment(first, end, step, None))
    elif at < end:
        new.append(_Segment(at, end, _NOBODY, _Readers(step, None)))
    if old and old[-1].end > end:
        new.append(old[-1]._replace(first=end))
    segments[low:high] = new


def _accesses(plan: ModelPlan, step: KernelStep | CopyStep) -> list[tuple[int, _Access]]:
    """Return the slot and bytes of each operand, then of each fill. An operand that is not an input may be written."""
    if isinstance(step, CopyStep):
        listed = [(step.target, step.bytes, True), (step.source, step.bytes, False)]
    else:
        source = plan.kernels[step.kernel].source
        buffers = {buffer.symbol: buffer for buffer in source.buffers}
        operands = source.launches[step.launch].operands
        listed = [
            (address, buffers[symbol].bytes, buffers[symbol].role is not Role.INPUT)
            for symbol, address in zip(operands, step.arguments, strict=True)
            if address is not None
        ]
        listed += [(address, size, True) for address, size in step.zeroed]
    return [
        (address.slot, _Access(address.offset_bytes, address.offset_bytes + size, is_write)) for address, size, is_write in listed
    ]
