"""RAMMER's wavefront policy (OSDI 2020, Algorithm 1): operators → plans of a virtual device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from roller_svc.graph.rammer.vdevice import VDevice
from roller_svc.ir.vdevice import VDevicePlan

MIN_TASK_S = 1e-12


@dataclass(frozen=True, slots=True)
class RKernel:
    """One implementation of an rOperator."""

    tasks: int
    task_s: float  # of one rTask on a vEU, while others execute the rest
    together_s: float | None = None  # of all rTasks on one vEU, whose caches have the inputs; None: tasks * task_s

    @property
    def alone_s(self) -> float:
        """Return the seconds of all rTasks on one vEU."""
        return self.tasks * self.task_s if self.together_s is None else self.together_s


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator of a graph: one rOperator, or several that depend on each other, as homogeneous rTasks."""

    roperators: tuple[tuple[RKernel, ...], ...]  # of each: the fastest rKernel first, the most efficient one last
    predecessors: tuple[int, ...]
    launch_s: float  # in a launch of its own, on all workers
    has_rtasks: bool = True  # otherwise it has to be a launch of its own


@dataclass(frozen=True, slots=True)
class Overheads:
    """Costs of synchronization on a device."""

    wait_s: float  # from the end of an rTask to the start of one on another vEU that waits for it
    launch_s: float  # to start and to end a plan


ROperator = tuple[int, int]  # operator, its rOperator


@dataclass(frozen=True, slots=True)
class Segment:
    """Operators in one launch by a plan, or in launches of their own one after the other."""

    operators: tuple[int, ...]
    plan: VDevicePlan | None  # None: a launch for each operator
    roperators: tuple[ROperator, ...]  # of the plan
    rkernels: tuple[int, ...]  # the number of the rKernel of each rOperator
    seconds: float


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive rTasks on a vEU."""

    first: int
    count: int
    veu: int
    end_s: float


@dataclass(slots=True)
class _Partial:
    """A plan that grows by waves."""

    available_s: list[float]  # of each vEU
    parts: dict[ROperator, tuple[_Part, ...]] = field(default_factory=dict)
    rkernels: dict[ROperator, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return max(self.available_s)

    def copy(self) -> _Partial:
        return _Partial(list(self.available_s), dict(self.parts), dict(self.rkernels))


def find_waves(predecessors: Sequence[Iterable[int]]) -> list[list[int]]:
    """Return operators by level, so that a wave depends on earlier waves alone. They come in dependency order."""
    levels: list[int] = []
    for before in predecessors:
        levels.append(1 + max((levels[each] for each in before), default=-1))
    waves: list[list[int]] = [[] for _ in range(max(levels, default=-1) + 1)]
    for operator, level in enumerate(levels):
        waves[level].append(operator)
    return waves


@dataclass(frozen=True, slots=True)
class _Launches:
    """Operators in launches of their own."""

    operators: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class _Schedule:
    """Launches so far: `done` and then `last`, a plan that may grow or launches."""

    done: _Schedule | None
    done_s: float
    last: _Partial | _Launches

    @property
    def seconds(self) -> float:
        return self.done_s + self.last.seconds

    def then(self, last: _Partial | _Launches) -> _Schedule:
        return _Schedule(self, self.seconds, last)


def schedule_by_waves(operators: Sequence[Operator], num_veus: int, overheads: Overheads) -> tuple[Segment, ...]:
    """Return the launches of a graph, in order.

    A wave extends the current plan, begins another, or runs in launches of its own. The best schedule that ends in a
    plan and the best that ends in launches are kept. Of equal times, launches win over plans.
    """
    empty = _Partial([overheads.launch_s] * num_veus)
    start = _Schedule(None, 0.0, _Launches((), 0.0))
    apart, planned = start, None  # schedules that end in launches and in a plan
    for wave in find_waves([operator.predecessors for operator in operators]):
        divisible = [each for each in wave if operators[each].has_rtasks]
        if divisible:
            before = [apart] if planned is None else [apart, planned]
            launches = _Launches(tuple(divisible), sum(operators[each].launch_s for each in divisible))
            new = _schedule_wave(operators, divisible, empty, overheads)
            choices = [each.then(new) for each in before]
            if planned is not None and isinstance(planned.last, _Partial):
                longer = _schedule_wave(operators, divisible, planned.last, overheads)
                choices.append(_Schedule(planned.done, planned.done_s, longer))
            apart = min((each.then(launches) for each in before), key=lambda each: each.seconds)
            planned = min(choices, key=lambda each: each.seconds)
        whole = tuple(each for each in wave if not operators[each].has_rtasks)
        if whole:
            launches = _Launches(whole, sum(operators[each].launch_s for each in whole))
            best = apart if planned is None or apart.seconds <= planned.seconds else planned
            apart, planned = best.then(launches), None
    best = apart if planned is None or apart.seconds <= planned.seconds else planned
    return _segments(operators, best)


def _segments(operators: Sequence[Operator], schedule: _Schedule | None) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    while schedule is not None:
        if isinstance(schedule.last, _Partial):
            segments += _cut(operators, schedule.last)
        elif schedule.last.operators:
            segments.append(Segment(schedule.last.operators, None, (), (), schedule.last.seconds))
        schedule = schedule.done
    return tuple(reversed(segments))


def schedule_side_by_side(operators: Sequence[Operator], num_veus: int, overheads: Overheads) -> tuple[Segment, ...]:
    """Return plans in which each operator runs on one vEU, by waves. It takes its most efficient rKernel."""
    one_task = [
        replace(each, roperators=tuple(tuple(map(_as_one_task, rkernels)) for rkernels in each.roperators)) for each in operators
    ]
    segments: list[Segment] = []
    empty = _Partial([overheads.launch_s] * num_veus)
    current = empty

    def cut() -> list[Segment]:
        for (operator, number), (part,) in current.parts.items():
            tasks = operators[operator].roperators[number][-1].tasks
            current.parts[operator, number] = (replace(part, count=tasks),)
        return _cut(operators, current)

    for wave in find_waves([operator.predecessors for operator in operators]):
        current = _place_wave(one_task, [each for each in wave if operators[each].has_rtasks], current, overheads, -1)
        whole = tuple(each for each in wave if not operators[each].has_rtasks)
        if whole:
            segments += cut()
            current = empty
            segments.append(Segment(whole, None, (), (), sum(operators[each].launch_s for each in whole)))
    return (*segments, *cut())


def _as_one_task(rkernel: RKernel) -> RKernel:
    return RKernel(1, rkernel.alone_s)


def _schedule_wave(operators: Sequence[Operator], wave: Sequence[int], current: _Partial, overheads: Overheads) -> _Partial:
    """Return the plan with a wave appended, by the fastest rKernels or by the most efficient ones.

    The fastest are taken if they do not fill all vEUs: the most efficient ones have no more rTasks.
    """
    fastest = _place_wave(operators, wave, current, overheads, 0)
    chosen = [rkernels for each in wave for rkernels in operators[each].roperators]
    if sum(rkernels[0].tasks for rkernels in chosen) < len(current.available_s):
        return fastest
    if all(len(rkernels) == 1 for rkernels in chosen):
        return fastest
    efficient = _place_wave(operators, wave, current, overheads, -1)
    return efficient if efficient.seconds < fastest.seconds else fastest


def _place_wave(
    operators: Sequence[Operator], wave: Sequence[int], current: _Partial, overheads: Overheads, choice: int
) -> _Partial:
    result = current.copy()
    for operator in wave:
        for number, rkernels in enumerate(operators[operator].roperators):
            rkernel = rkernels[choice]
            before = _predecessors(operators, operator, number)
            starts = _earliest_starts(before, result, overheads)
            first = 0
            parts: list[_Part] = []
            for veu, count in enumerate(_distribute(rkernel, starts, overheads)):
                if count:
                    seconds = rkernel.alone_s if count == rkernel.tasks else count * rkernel.task_s
                    result.available_s[veu] = starts[veu] + seconds
                    parts.append(_Part(first, count, veu, result.available_s[veu]))
                    first += count
            result.parts[operator, number] = tuple(parts)
            result.rkernels[operator, number] = choice % len(rkernels)
    return result


def _predecessors(operators: Sequence[Operator], operator: int, number: int) -> list[ROperator]:
    """Return the rOperators that one depends on: the one before in its operator, or the last ones of others."""
    if number:
        return [(operator, number - 1)]
    return [(each, len(operators[each].roperators) - 1) for each in operators[operator].predecessors]


def _earliest_starts(before: Iterable[ROperator], partial: _Partial, overheads: Overheads) -> list[float]:
    """Return when an rTask could start on each vEU."""
    starts = list(partial.available_s)
    for part in (part for each in before for part in partial.parts.get(each, ())):
        for veu in range(len(starts)):
            starts[veu] = max(starts[veu], part.end_s + (overheads.wait_s if part.veu != veu else 0.0))
    return starts


def _distribute(rkernel: RKernel, starts: Sequence[float], overheads: Overheads) -> list[int]:
    """Return the number of rTasks for each vEU, so that all end early.

    One vEU takes them all unless several are faster by the cost of another wait.
    """
    tasks, task_s, veus = rkernel.tasks, max(rkernel.task_s, MIN_TASK_S), range(len(starts))
    best = min(veus, key=lambda veu: starts[veu])
    alone = [tasks if veu == best else 0 for veu in veus]
    if tasks == 1 or len(starts) == 1:
        return alone
    level = _fill_level(sorted(starts), tasks * task_s)
    counts = [max(0, int((level - start) / task_s)) for start in starts]
    while sum(counts) < tasks:
        counts[min(veus, key=lambda veu: starts[veu] + (counts[veu] + 1) * task_s)] += 1
    while sum(counts) > tasks:  # by rounding
        counts[max((veu for veu in veus if counts[veu]), key=lambda veu: starts[veu] + counts[veu] * task_s)] -= 1
    end = max(start + count * task_s for start, count in zip(starts, counts, strict=True) if count)
    return counts if end + overheads.wait_s < starts[best] + rkernel.alone_s else alone


def _fill_level(starts: Sequence[float], work_s: float) -> float:
    """Return the time at which vEUs end that share work evenly. `starts` are sorted."""
    level = 0.0
    for used in range(1, len(starts) + 1):
        level = (sum(starts[:used]) + work_s) / used
        if used == len(starts) or level <= starts[used]:
            break
    return level


def _cut(operators: Sequence[Operator], partial: _Partial) -> list[Segment]:
    """Return the segment of a plan: append its rTasks to a virtual device, with their waits."""
    if not partial.parts:
        return []
    roperators = tuple(partial.parts)
    position = {each: i for i, each in enumerate(roperators)}
    tasks = [operators[operator].roperators[number][partial.rkernels[operator, number]].tasks for operator, number in roperators]
    device = VDevice(tasks, len(partial.available_s))
    for (operator, number), parts in partial.parts.items():
        before = [position[each] for each in _predecessors(operators, operator, number) if each in position]
        for part in parts:
            device.wait_for_operators((position[operator, number], part.first), before)
            device.append_range(position[operator, number], part.first, part.count, part.veu)
    rkernels = tuple(partial.rkernels[each] for each in roperators)
    listed = tuple(dict.fromkeys(operator for operator, _ in roperators))
    return [Segment(listed, device.finish(), roperators, rkernels, partial.seconds)]
