"""Happens-before between the instructions of a virtual device's plan, by vector clocks."""

from __future__ import annotations

from roller_svc.errors import InvariantError
from roller_svc.ir.vdevice import Barrier, Execute, VDevicePlan, executes

Clock = tuple[int, ...]  # for each vEU, how many of its instructions have finished


def check_plan(plan: VDevicePlan) -> None:
    """Check that every rTask is executed once and no vEU waits for ever. Raises InvariantError that names it."""
    executed = [[0] * tasks for tasks in plan.num_tasks]
    for veu, order, instruction in executes(plan):
        tasks = executed[instruction.operator] if 0 <= instruction.operator < len(executed) else []
        if instruction.first < 0 or instruction.count < 1 or instruction.first + instruction.count > len(tasks):
            raise InvariantError(f"instruction {order} of vEU {veu} executes rTasks that do not exist")
        for task in range(instruction.first, instruction.first + instruction.count):
            tasks[task] += 1
    for operator, counts in enumerate(executed):
        for task, times in enumerate(counts):
            if times != 1:
                raise InvariantError(f"rTask {task} of rOperator {operator} is executed {times} times, expected once")
    start_clocks(plan)


def start_clocks(plan: VDevicePlan) -> list[list[Clock]]:
    """Return [vEU][order]: what has certainly finished before each instruction starts.

    Raises InvariantError if vEUs wait for each other, or for an instruction that does not exist.
    """
    _check_waits(plan)
    num_veus = plan.num_veus
    clocks: list[list[Clock]] = [[] for _ in range(num_veus)]
    current = [[0] * num_veus for _ in range(num_veus)]
    progressed = True
    while progressed:
        progressed = False
        for veu, program in enumerate(plan.programs):
            while len(clocks[veu]) < len(program):
                order = len(clocks[veu])
                instruction = program[order]
                waits = instruction.waits if isinstance(instruction, Barrier) else ()
                if any(awaited >= len(clocks[other]) for other, awaited in waits):
                    break
                clocks[veu].append(tuple(current[veu]))
                for other, awaited in waits:
                    current[veu] = list(map(max, current[veu], clocks[other][awaited]))
                    current[veu][other] = max(current[veu][other], awaited + 1)
                current[veu][veu] = order + 1
                progressed = True
    stuck = [veu for veu, program in enumerate(plan.programs) if len(clocks[veu]) < len(program)]
    if stuck:
        raise InvariantError(f"deadlock: vEUs {stuck} wait for each other")
    return clocks


def _check_waits(plan: VDevicePlan) -> None:
    for veu, program in enumerate(plan.programs):
        for instruction in program:
            for other, order in instruction.waits if isinstance(instruction, Barrier) else ():
                if not (0 <= other < plan.num_veus and 0 <= order < len(plan.programs[other])):
                    raise InvariantError(f"vEU {veu} waits for instruction {order} of vEU {other}: there is none")


class HappensBefore:
    """Whether all rTasks of one rOperator finish before any of another starts."""

    def __init__(self, plan: VDevicePlan) -> None:
        """Compute clocks of all rOperators. Raises InvariantError for a deadlock."""
        clocks = start_clocks(plan)
        zero, most = (0,) * plan.num_veus, tuple(map(len, plan.programs))
        self.starts: list[Clock] = [most] * len(plan.num_tasks)  # what has finished before its first rTask
        self.ends: list[Clock] = [zero] * len(plan.num_tasks)  # what has to finish for its last rTask
        for veu, program in enumerate(plan.programs):
            for order, instruction in enumerate(program):
                if isinstance(instruction, Execute):
                    operator = instruction.operator
                    start = zip(self.starts[operator], clocks[veu][order], strict=True)
                    self.starts[operator] = tuple(min(a, b) for a, b in start)
                    end = list(self.ends[operator])
                    end[veu] = max(end[veu], order + 1)
                    self.ends[operator] = tuple(end)

    def before(self, first: int, second: int) -> bool:
        """Return whether rOperator `first` happens before `second`."""
        return precedes(self.ends[first], self.starts[second])


def precedes(end: Clock, start: Clock) -> bool:
    """Return whether what ends at one clock has finished when another starts."""
    return all(a <= b for a, b in zip(end, start, strict=True))
