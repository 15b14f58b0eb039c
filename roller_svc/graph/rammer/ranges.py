"""Wavefront policy for GPUs: contiguous ranges of rTasks a vEU, one event an rOperator."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from roller_svc.errors import ArgumentError
from roller_svc.graph.rammer.wavefront import find_waves
from roller_svc.ir.vdevice import Execute, Instruction, Stream, VDevicePlan, WaitEvent


def schedule_by_ranges(
    num_tasks: Sequence[int],
    predecessors: Sequence[Sequence[int]],
    num_veus: int,
    task_s: Sequence[float] = (),
) -> VDevicePlan:
    """Return a plan that divides the work of each wave evenly among the vEUs.

    A wave is a level of the graph. Its rTasks are cut into contiguous ranges of equal time. An rTask waits for all rTasks
    of its predecessors, unless an earlier wait of its vEU implies them, or its vEU has executed them all.

    Args:
        num_tasks: the rTasks of each rOperator.
        predecessors: the rOperators that each one depends on. They come before it.
        num_veus: the vEUs of the device, at least 1.
        task_s: the seconds of one rTask of each rOperator. Without them all rTasks take the same time.
    """
    if num_veus < 1 or any(tasks < 1 for tasks in num_tasks):
        raise ArgumentError("a virtual device needs a vEU, and each rOperator an rTask", code="invalid-plan")
    if any(each >= operator for operator, before in enumerate(predecessors) for each in before):
        raise ArgumentError("rOperators must come after those that they depend on", code="invalid-plan")
    return _Plan(num_tasks, predecessors, num_veus).build(task_s or [1.0] * len(num_tasks))


def add_streams(plan: VDevicePlan, operators: Collection[int]) -> VDevicePlan:
    """Return the plan whose vEUs stream the rTasks of these rOperators from their start on."""

    def streams(program: tuple[Instruction, ...]) -> Iterator[Stream]:
        for each in program:
            if isinstance(each, Execute) and each.operator in operators:
                yield Stream(each.operator, each.first, each.count)

    return replace(plan, programs=tuple((*streams(program), *program) for program in plan.programs))


class _Plan:
    """Programs that grow wave by wave, with vector clocks as in analysis/happens_before.py."""

    def __init__(self, num_tasks: Sequence[int], predecessors: Sequence[Sequence[int]], num_veus: int) -> None:
        self.num_tasks, self.predecessors, self.num_veus = num_tasks, predecessors, num_veus
        self.programs: list[list[Instruction]] = [[] for _ in range(num_veus)]
        self.now = np.zeros((num_veus, num_veus), np.int32)  # the clock of each vEU after its last instruction
        shape = len(num_tasks), num_veus
        self.ends = np.zeros(shape, np.int32)  # instructions of each vEU up to the last that executes the rOperator
        self.arrived = np.zeros(shape, np.int32)  # the clock of each rOperator's event
        self.placed: dict[int, int] = {}  # rOperator → its place in the order of all waves

    def build(self, task_s: Sequence[float]) -> VDevicePlan:
        for wave in find_waves([tuple(before) for before in self.predecessors]):
            ends_s = [0.0, *accumulate(self.num_tasks[each] * task_s[each] for each in wave)]
            share_s = ends_s[-1] / self.num_veus
            for operator, start_s in zip(wave, ends_s, strict=False):
                self._place(operator, start_s, task_s[operator], share_s)
        return self._with_events()

    def _place(self, operator: int, start_s: float, task_s: float, share_s: float) -> None:
        """Give each vEU the rTasks whose middle lies in its share of the wave's time."""
        tasks, first = self.num_tasks[operator], 0
        veu = min(self.num_veus - 1, int((start_s + task_s / 2) / share_s)) if share_s else 0
        while first < tasks:
            end_s = (veu + 1) * share_s
            end = min(tasks, math.ceil((end_s - start_s) / task_s - 0.5)) if task_s and veu + 1 < self.num_veus else tasks
            if end > first:
                self._execute(veu, operator, first, end - first)
                first = end
            veu += 1

    def _execute(self, veu: int, operator: int, first: int, count: int) -> None:
        now = self.now[veu]
        # latest first: its event implies earlier ones, and none of these implies it
        for each in sorted(set(self.predecessors[operator]), key=self.placed.__getitem__, reverse=True):
            if (self.ends[each] > now).any():
                self._append(veu, WaitEvent(each))
                np.maximum(now, self.arrived[each], out=now)
        self._append(veu, Execute(operator, first, count))
        self.ends[operator, veu] = len(self.programs[veu])
        np.maximum(self.arrived[operator], now, out=self.arrived[operator])
        self.placed.setdefault(operator, len(self.placed))

    def _append(self, veu: int, instruction: Instruction) -> None:
        self.programs[veu].append(instruction)
        self.now[veu, veu] = len(self.programs[veu])

    def _with_events(self) -> VDevicePlan:
        """Return the plan with an event for each rOperator that is waited for."""
        programs = [instruction for program in self.programs for instruction in program]
        awaited = sorted({each.event for each in programs if isinstance(each, WaitEvent)})
        events = {operator: event for event, operator in enumerate(awaited)}

        def numbered(instruction: Instruction) -> Instruction:
            if isinstance(instruction, WaitEvent):
                return WaitEvent(events[instruction.event])
            if isinstance(instruction, Execute) and instruction.operator in events:
                return Execute(instruction.operator, instruction.first, instruction.count, events[instruction.operator])
            return instruction

        return VDevicePlan(
            tuple(self.num_tasks),
            tuple(tuple(map(numbered, program)) for program in self.programs),
            tuple(self.num_tasks[operator] for operator in awaited),
        )
