"""Happens-before between the instructions of a virtual device's plan, by vector clocks.

A barrier-rTask takes the clocks of the instructions that it waits for. An event has one clock: the maximum over its
arrivals, which a wait takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roller_svc.errors import InvariantError
from roller_svc.ir.vdevice import Barrier, Execute, Stream, VDevicePlan, WaitEvent, executes

Clock = tuple[int, ...]  # for each vEU, how many of its instructions have finished
Clocks = NDArray[np.int32]  # [order, vEU]


def check_plan(plan: VDevicePlan) -> list[Clocks]:
    """Return the clocks of a plan that executes every rTask once and has no vEU that waits for ever.

    Raises InvariantError that names the rTask or the vEU otherwise.
    """
    _check_executed_once(plan)
    _check_streams(plan)
    return start_clocks(plan)


def _check_executed_once(plan: VDevicePlan) -> None:
    executed: list[list[tuple[int, int]]] = [[] for _ in plan.num_tasks]
    for veu, order, instruction in executes(plan):
        operator, first, count = instruction.operator, instruction.first, instruction.count
        tasks = plan.num_tasks[operator] if 0 <= operator < len(executed) else 0
        if first < 0 or count < 1 or first + count > tasks:
            raise InvariantError(f"instruction {order} of vEU {veu} executes rTasks that do not exist")
        executed[operator].append((first, first + count))
    for operator, ranges in enumerate(executed):
        ranges.sort()
        ends = [0, *(end for _, end in ranges)]
        starts = [*(first for first, _ in ranges), plan.num_tasks[operator]]
        for end, start in zip(ends, starts, strict=True):
            if end != start:
                times = "never" if end < start else "twice"
                raise InvariantError(
                    f"rTask {min(end, start)} of rOperator {operator} is executed {times}, expected once"
                )  # fmt: skip


def _check_streams(plan: VDevicePlan) -> None:
    """Check that each vEU streams the rTasks that it executes later, all of an rOperator, in the same order."""
    streamed = plan.streamed
    for veu, program in enumerate(plan.programs):
        coming: list[Stream] = []
        for order, instruction in enumerate(program):
            if isinstance(instruction, Stream):
                coming.append(instruction)
            elif isinstance(instruction, Execute) and instruction.operator in streamed:
                expected = Stream(instruction.operator, instruction.first, instruction.count)
                if not coming or coming.pop(0) != expected:
                    raise InvariantError(
                        f"vEU {veu} executes rTasks by instruction {order} that it does not stream before, in order"
                    )
        if coming:
            raise InvariantError(f"vEU {veu} streams rTasks of rOperator {coming[0].operator} that it does not execute")


def start_clocks(plan: VDevicePlan) -> list[Clocks]:
    """Return [vEU][order]: what has certainly finished before each instruction starts.

    Raises InvariantError if vEUs wait for each other, or for an instruction or an event that does not exist.
    """
    _check_waits(plan)
    return _Execution(plan).run()


class _Execution:
    """Executes the instructions of all vEUs, each as soon as what it waits for has finished."""

    def __init__(self, plan: VDevicePlan) -> None:
        self.plan = plan
        veus = plan.num_veus
        self.clocks: list[Clocks] = [np.zeros((len(program), veus), np.int32) for program in plan.programs]
        self.now = np.zeros((veus, veus), np.int32)  # the clock of each vEU after its last instruction
        self.done = [0] * veus  # instructions of each vEU
        self.events = np.zeros((len(plan.events), veus), np.int32)
        self.missing = list(plan.events)  # arrivals of each event
        self.waiting_for_veu: dict[int, list[int]] = defaultdict(list)  # vEUs that wait for an instruction of one
        self.waiting_for_event: dict[int, list[int]] = defaultdict(list)
        self.ready = list(range(veus))

    def run(self) -> list[Clocks]:
        while self.ready:
            self._advance(self.ready.pop())
        programs = self.plan.programs
        stuck = [veu for veu, program in enumerate(programs) if self.done[veu] < len(program)]
        if stuck:
            order = self.done[stuck[0]]
            instruction = programs[stuck[0]][order]
            what = f"event {instruction.event}" if isinstance(instruction, WaitEvent) else "other vEUs"
            raise InvariantError(
                f"deadlock: vEUs {stuck} wait for each other. Instruction {order} of vEU {stuck[0]} waits for {what}"
            )
        return self.clocks

    def _advance(self, veu: int) -> None:
        """Execute instructions of a vEU until one has to wait."""
        program, now, clocks = self.plan.programs[veu], self.now[veu], self.clocks[veu]
        first = self.done[veu]
        for order in range(first, len(program)):
            instruction = program[order]
            if not isinstance(instruction, Execute | Stream) and self._must_wait(veu, instruction):
                break
            clocks[order] = now
            if isinstance(instruction, WaitEvent):
                np.maximum(now, self.events[instruction.event], out=now)
            elif isinstance(instruction, Barrier):
                for other, awaited in instruction.waits:
                    np.maximum(now, self.clocks[other][awaited], out=now)
                    now[other] = max(now[other], awaited + 1)
            now[veu] = self.done[veu] = order + 1
            if isinstance(instruction, Execute) and instruction.arrives is not None:
                self._arrive(instruction.arrives, instruction.count, now)
        if self.done[veu] > first:
            self.ready += self.waiting_for_veu.pop(veu, ())

    def _must_wait(self, veu: int, instruction: Barrier | WaitEvent) -> bool:
        if isinstance(instruction, WaitEvent):
            if self.missing[instruction.event]:
                self.waiting_for_event[instruction.event].append(veu)
                return True
            return False
        for other, awaited in instruction.waits:
            if awaited >= self.done[other]:
                self.waiting_for_veu[other].append(veu)
                return True
        return False

    def _arrive(self, event: int, count: int, now: NDArray[np.int32]) -> None:
        np.maximum(self.events[event], now, out=self.events[event])
        self.missing[event] -= count
        if not self.missing[event]:
            self.ready += self.waiting_for_event.pop(event, ())


def _check_waits(plan: VDevicePlan) -> None:
    """Check that what is waited for exists, and that an event's arrivals are as many as the plan says.

    With fewer arrivals the wait never ends, with more it may end too early.
    """
    arrivals = [0] * len(plan.events)
    for veu, program in enumerate(plan.programs):
        for instruction in program:
            event = instruction.event if isinstance(instruction, WaitEvent) else None
            if isinstance(instruction, Execute):
                event = instruction.arrives
            elif isinstance(instruction, Barrier):
                for other, order in instruction.waits:
                    if not (0 <= other < plan.num_veus and 0 <= order < len(plan.programs[other])):
                        raise InvariantError(f"vEU {veu} waits for instruction {order} of vEU {other}: there is none")
            if event is not None and not 0 <= event < len(arrivals):
                raise InvariantError(f"vEU {veu} uses event {event}: there is none")
            if event is not None and isinstance(instruction, Execute):
                arrivals[event] += instruction.count
    for event, (expected, actual) in enumerate(zip(plan.events, arrivals, strict=True)):
        if expected != actual or expected < 1:
            raise InvariantError(f"event {event} has {actual} arrivals, expected {expected}")


class HappensBefore:
    """Whether all rTasks of one rOperator finish before any of another starts."""

    def __init__(self, plan: VDevicePlan, clocks: Sequence[Clocks] | None = None) -> None:
        """Compute clocks of all rOperators. Raises InvariantError for a deadlock.

        Args:
            plan: the plan.
            clocks: what `check_plan` has returned for it.
        """
        clocks = start_clocks(plan) if clocks is None else clocks
        shape = len(plan.num_tasks), plan.num_veus
        starts = np.tile(np.array([*map(len, plan.programs)], np.int32), (shape[0], 1))
        ends = np.zeros(shape, np.int32)
        for veu, order, instruction in executes(plan):
            start = starts[instruction.operator]
            np.minimum(start, clocks[veu][order], out=start)
            ends[instruction.operator, veu] = order + 1  # orders increase
        self.starts: list[Clock] = [*map(tuple, starts.tolist())]  # what has finished before its first rTask
        self.ends: list[Clock] = [*map(tuple, ends.tolist())]  # what has to finish for its last rTask

    def before(self, first: int, second: int) -> bool:
        """Return whether rOperator `first` happens before `second`."""
        return precedes(self.ends[first], self.starts[second])


def precedes(end: Clock, start: Clock) -> bool:
    """Return whether what ends at one clock has finished when another starts."""
    return all(a <= b for a, b in zip(end, start, strict=True))


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes that an rOperator reads or writes behind a slot."""

    operator: int
    slot: int
    first: int
    end: int
    is_write: bool


def unordered_accesses(
    accesses: Iterable[Access], order: HappensBefore, position: Callable[[int], tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Yield pairs of rOperators that use the same memory, one of them to write, in an order that nothing guarantees.

    Args:
        accesses: the bytes that rOperators use.
        order: the happens-before of their plan.
        position: the place of an rOperator in an order of execution that is right.
    """
    by_slot: dict[int, list[Access]] = defaultdict(list)
    for access in accesses:
        by_slot[access.slot].append(access)
    for listed in by_slot.values():
        yield from _unordered_of_slot(sorted(listed, key=lambda each: each.first), order, position)


def _unordered_of_slot(
    accesses: Sequence[Access], order: HappensBefore, position: Callable[[int], tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    alive: list[Access] = []
    for access in accesses:
        alive = [each for each in alive if each.end > access.first]
        for other in alive:
            if other.operator == access.operator or not (other.is_write or access.is_write):
                continue
            first, second = sorted((other.operator, access.operator), key=position)
            if not order.before(first, second):
                yield first, second
        alive.append(access)
