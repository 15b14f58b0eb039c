"""Happens-before between the instructions of a virtual device's plan, by vector clocks.

A barrier-rTask takes the clocks of the instructions that it waits for. An event has one clock: the maximum over its
arrivals, which a wait takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from roller_svc.errors import InvariantError
from roller_svc.ir.vdevice import Barrier, Execute, Instruction, Stream, VDevicePlan, WaitEvent, executes

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
    veus = plan.num_veus
    clocks = [np.zeros((len(program), veus), np.int32) for program in plan.programs]
    now = np.zeros((veus, veus), np.int32)  # the clock of each vEU after its last instruction
    events = np.zeros((len(plan.events), veus), np.int32)
    for veu, order, instruction in execution_order(plan):
        mine = now[veu]
        clocks[veu][order] = mine
        if isinstance(instruction, WaitEvent):
            np.maximum(mine, events[instruction.event], out=mine)
        elif isinstance(instruction, Barrier):
            for other, awaited in instruction.waits:
                np.maximum(mine, clocks[other][awaited], out=mine)
                mine[other] = max(mine[other], awaited + 1)
        mine[veu] = order + 1
        if isinstance(instruction, Execute) and instruction.arrives is not None:
            np.maximum(events[instruction.arrives], mine, out=events[instruction.arrives])
    return clocks


def execution_order(plan: VDevicePlan) -> Iterator[tuple[int, int, Instruction]]:
    """Yield (vEU, order, instruction) in an order in which vEUs may execute them: each behind all that it waits for.

    A vEU that has to wait is woken by the instruction, or the event, that it waits for. So the time grows with the
    instructions and their waits. Raises InvariantError, behind the last one, if vEUs wait for each other.
    """
    execution = _Execution(plan)
    while execution.ready:
        yield from execution.advance(execution.ready.pop())
    execution.check_end()


class _Execution:
    """Executes the instructions of all vEUs, each as soon as what it waits for has finished."""

    def __init__(self, plan: VDevicePlan) -> None:
        self.plan = plan
        veus = plan.num_veus
        self.done = [0] * veus  # instructions of each vEU
        self.met = [0] * veus  # waits of its next instruction that have ended, the first ones
        self.missing = list(plan.events)  # arrivals of each event
        self.waiting_for_veu: list[list[tuple[int, int]]] = [[] for _ in range(veus)]  # heaps of (order, vEU that waits)
        self.waiting_for_event: dict[int, list[int]] = defaultdict(list)
        self.ready = list(range(veus))

    def advance(self, veu: int) -> Iterator[tuple[int, int, Instruction]]:
        """Execute instructions of a vEU until one has to wait."""
        program, waiting = self.plan.programs[veu], self.waiting_for_veu[veu]
        for order in range(self.done[veu], len(program)):
            instruction = program[order]
            if not isinstance(instruction, Execute | Stream) and self._must_wait(veu, instruction):
                break
            yield veu, order, instruction
            self.done[veu], self.met[veu] = order + 1, 0
            if isinstance(instruction, Execute) and instruction.arrives is not None:
                self._arrive(instruction.arrives, instruction.count)
        while waiting and waiting[0][0] < self.done[veu]:
            self.ready.append(heappop(waiting)[1])

    def check_end(self) -> None:
        """Raise InvariantError if instructions are left."""
        programs = self.plan.programs
        stuck = [veu for veu, program in enumerate(programs) if self.done[veu] < len(program)]
        if stuck:
            order = self.done[stuck[0]]
            instruction = programs[stuck[0]][order]
            what = f"event {instruction.event}" if isinstance(instruction, WaitEvent) else "other vEUs"
            raise InvariantError(
                f"deadlock: vEUs {stuck} wait for each other. Instruction {order} of vEU {stuck[0]} waits for {what}"
            )

    def _must_wait(self, veu: int, instruction: Barrier | WaitEvent) -> bool:
        if isinstance(instruction, WaitEvent):
            if self.missing[instruction.event]:
                self.waiting_for_event[instruction.event].append(veu)
                return True
            return False
        for place in range(self.met[veu], len(instruction.waits)):
            other, awaited = instruction.waits[place]
            if awaited >= self.done[other]:
                self.met[veu] = place
                heappush(self.waiting_for_veu[other], (awaited, veu))
                return True
        return False

    def _arrive(self, event: int, count: int) -> None:
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
