"""Build a plan of a virtual device by hand or by a policy: RAMMER's Append and Wait (OSDI 2020, §3.2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from roller_svc.analysis.happens_before import Clock
from roller_svc.errors import ArgumentError
from roller_svc.ir.vdevice import Barrier, Execute, Instruction, VDevicePlan

Task = tuple[int, int]  # rOperator, rTask
Position = tuple[int, int]  # vEU, order


class VDevice:
    """A virtual device whose vEUs are given rTasks.

    An rTask may wait for rTasks that were appended before, so no plan has a deadlock.
    """

    def __init__(self, num_tasks: Sequence[int], num_veus: int) -> None:
        """Make a device without rTasks.

        Args:
            num_tasks: the rTasks of each rOperator.
            num_veus: the vEUs of the device, at least 1.
        """
        if num_veus < 1 or any(tasks < 1 for tasks in num_tasks):
            raise ArgumentError("a virtual device needs a vEU, and each rOperator an rTask", code="invalid-plan")
        self.num_tasks = tuple(num_tasks)
        self._programs: list[list[Instruction]] = [[] for _ in range(num_veus)]
        self._positions: list[list[Position | None]] = [[None] * tasks for tasks in num_tasks]
        self._ends: list[dict[int, int]] = [{} for _ in num_tasks]  # of each rOperator: vEU → last order
        self._waits: dict[Task, list[Position]] = {}
        self._clocks: list[list[Clock]] = [[] for _ in range(num_veus)]  # what has finished after each instruction
        self._known: list[Clock] = [(0,) * num_veus for _ in range(num_veus)]  # the last clock of each vEU

    def wait(self, task: Task, predecessors: Iterable[Task]) -> None:
        """Let an rTask wait for others: its vEU executes a barrier-rTask right before it.

        Raises ArgumentError if the rTask is appended already, or a predecessor is not.
        """
        if self._position(task) is not None:
            raise ArgumentError(f"rTask {task} is appended already: call wait before append", code="invalid-plan")
        for predecessor in predecessors:
            position = self._position(predecessor)
            if position is None:
                raise ArgumentError(f"rTask {task} waits for {predecessor}, which is not appended", code="invalid-plan")
            self._waits.setdefault(task, []).append(position)

    def wait_for_operators(self, task: Task, operators: Iterable[int]) -> None:
        """Let an rTask wait for all rTasks of rOperators. Raises as `wait` does."""
        if self._position(task) is not None:
            raise ArgumentError(f"rTask {task} is appended already: call wait before append", code="invalid-plan")
        for operator in operators:
            if None in self._positions[operator]:
                raise ArgumentError(f"rTask {task} waits for rOperator {operator}, which is not appended", code="invalid-plan")
            self._waits.setdefault(task, []).extend(self._ends[operator].items())

    def append(self, task: Task, veu: int) -> None:
        """Give an rTask to a vEU, as the last of its program. Raises ArgumentError if it has a vEU already."""
        self.append_range(task[0], task[1], 1, veu)

    def append_range(self, operator: int, first: int, count: int, veu: int) -> None:
        """Give consecutive rTasks of an rOperator to a vEU. They start together, once all that they wait for is done.

        Raises ArgumentError if one of them has a vEU already.
        """
        if not 0 <= veu < len(self._programs) or count < 1:
            raise ArgumentError(f"there is no vEU {veu}, or no rTask to append", code="invalid-plan")
        tasks = [(operator, task) for task in range(first, first + count)]
        for task in tasks:
            if self._position(task) is not None:
                raise ArgumentError(f"rTask {task} is appended twice", code="invalid-plan")
        waits = self._missing(veu, (position for task in tasks for position in self._waits.pop(task, ())))
        if waits:
            for other, order in waits:
                self._known[veu] = tuple(map(max, self._known[veu], self._clocks[other][order]))
            self._append(veu, Barrier(waits))
        for _, task_number in tasks:
            self._positions[operator][task_number] = veu, len(self._programs[veu])
        self._ends[operator][veu] = len(self._programs[veu])
        self._append(veu, Execute(operator, first, count))

    def finish(self) -> VDevicePlan:
        """Return the plan. Raises ArgumentError if an rTask has no vEU."""
        for operator, positions in enumerate(self._positions):
            if None in positions:
                raise ArgumentError(f"rTask {(operator, positions.index(None))} has no vEU", code="invalid-plan")
        return VDevicePlan(self.num_tasks, tuple(map(tuple, self._programs)))

    def _position(self, task: Task) -> Position | None:
        operator, number = task
        if not (0 <= operator < len(self.num_tasks) and 0 <= number < self.num_tasks[operator]):
            raise ArgumentError(f"there is no rTask {task}", code="invalid-plan")
        return self._positions[operator][number]

    def _append(self, veu: int, instruction: Instruction) -> None:
        self._programs[veu].append(instruction)
        known = list(self._known[veu])
        known[veu] = len(self._programs[veu])
        self._known[veu] = tuple(known)
        self._clocks[veu].append(self._known[veu])

    def _missing(self, veu: int, positions: Iterable[Position]) -> tuple[Position, ...]:
        """Return the positions that a vEU has to wait for: those that its waits so far or another one do not imply."""
        last: dict[int, int] = {}
        for other, order in positions:
            if order >= self._known[veu][other]:
                last[other] = max(order, last.get(other, -1))
        return tuple(
            (other, order)
            for other, order in sorted(last.items())
            if not any(self._clocks[each][at][other] > order for each, at in last.items() if each != other)
        )
