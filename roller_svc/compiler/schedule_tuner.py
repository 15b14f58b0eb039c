"""Search of schedules by trials: seeded, within a budget, and cheap before it builds.

Illegal steps, schedules of a text that is known, and those that the model prices at a multiple of the best price are
rejected before they are built. Which schedules are built follows from the seed and the prices alone: a measurement
decides which one is the best, and never which one is next. So that a seed gives the same history on any machine.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from roller_svc.compiler.schedule_cost import price_launches
from roller_svc.compiler.scheduled import emit_launches
from roller_svc.errors import BuildError, ScheduleError, ToolchainMissingError
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.kernel import KernelSource
from roller_svc.ir.program import StatementKind
from roller_svc.ir.schedule import ScheduleTree
from roller_svc.schedule.device_launches import DeviceLaunches, build_device_launches
from roller_svc.schedule.random_steps import Steps, StepSpace
from roller_svc.schedule.schedule import Fixed, Schedule

MAX_PRICE_RATIO = 4.0  # of a schedule that is built, over the best price
PROPOSALS = 6  # that are priced for each one that is built
MAX_ROUNDS = 20  # of proposals, for one that is built
MAX_POOL = 8  # schedules of the lowest prices, which are mutated
KNOWN, EXPENSIVE, SAME_TEXT = "known", "expensive", "same text"  # why a legal proposal is not built
EXPLORED_FRACTION = 0.25  # of trials, which build a random proposal in place of the cheapest one


@dataclass(frozen=True, slots=True)
class Trial:
    """A schedule that was built, or failed to."""

    steps: Steps
    priced_s: float
    seconds: float | None  # None where nothing is measured, or where it failed
    error: str = ""  # why it failed


Measure = Callable[[Schedule, KernelSource], float | None]


@dataclass(frozen=True, slots=True)
class _Priced:
    steps: Steps
    schedule: Schedule
    launches: DeviceLaunches
    seconds: float


def search_schedules(
    space: StepSpace,
    starts: Sequence[Steps],
    hw: HardwareSpec,
    measure: Measure,
    *,
    trials: int,
    seed: int,
    has_time: Callable[[], bool],
    report: Callable[[tuple[Trial, ...]], None] = lambda _: None,
    unbuilt: Counter[str] | None = None,
) -> tuple[Trial, ...]:
    """Build schedules until there are enough trials, or the time is up, and return them in order.

    Args:
        starts: legal steps from which mutations start, and which are the first trials.
        measure: builds a schedule's source and returns its seconds, or None where nothing is measured. Raises BuildError.
        has_time: whether a further trial may begin.
        report: is called with the trials so far, after each one.
        unbuilt: counts the proposals that are not built, by the reason.

    Raises ScheduleError if no proposal is legal on the device, ToolchainMissingError.
    """
    search = _Search(space, hw, random.Random(seed), Counter() if unbuilt is None else unbuilt)
    history: list[Trial] = []
    for steps in starts:
        search.add(steps, space.apply(steps), is_start=True)
    while len(history) < trials and has_time():
        chosen = search.choose()
        if chosen is None:
            if not history:
                raise search.explain_nothing()
            break
        history.append(_try(*chosen, measure))
        report(tuple(history))
    return tuple(history)


def _try(chosen: _Priced, source: KernelSource, measure: Measure) -> Trial:
    try:
        return Trial(chosen.steps, chosen.seconds, measure(chosen.schedule, source))
    except ToolchainMissingError:
        raise
    except BuildError as failed:
        return Trial(chosen.steps, chosen.seconds, None, failed.message)


class _Search:
    """The schedules that are known, and those that are mutated."""

    def __init__(self, space: StepSpace, hw: HardwareSpec, chance: random.Random, unbuilt: Counter[str]) -> None:
        self._space = space
        self._hw = hw
        self._chance = chance
        self._unbuilt = unbuilt
        self._known: set[Steps] = set()
        self._trees: set[tuple[ScheduleTree, ...]] = set()
        self._texts: set[bytes] = set()
        self._starts: list[_Priced] = []
        self._pool: list[_Priced] = []  # of the lowest prices
        self._waiting: list[_Priced] = []  # proposals that are not built yet, the cheapest first
        self._refused = ""  # why the first schedule is not for the device

    def add(self, steps: Steps, schedule: Schedule, *, is_start: bool = False) -> None:
        """Remember legal steps, unless their trees are known, too expensive, or not for the device."""
        if steps in self._known:
            self._unbuilt[KNOWN] += 1
            return
        self._known.add(steps)
        try:
            launches = build_device_launches(schedule, self._hw)
        except ScheduleError as refused:
            self._refused = self._refused or refused.message
            self._unbuilt[refused.code] += 1
            return
        if launches[0] in self._trees:
            self._unbuilt[KNOWN] += 1
            return
        self._trees.add(launches[0])
        priced = _Priced(steps, schedule, launches, price_launches(schedule, launches, self._hw).seconds)
        if priced.seconds > self._limit_s and not is_start:
            self._unbuilt[EXPENSIVE] += 1
            return
        (self._starts if is_start else self._waiting).append(priced)
        self._pool = sorted((*self._pool, priced), key=lambda each: each.seconds)[:MAX_POOL]

    def choose(self) -> tuple[_Priced, KernelSource] | None:
        """Return the schedule to build next, of a text that is not known; None where mutations give no other one."""
        for _ in range(MAX_ROUNDS):
            if self._starts:
                chosen = self._starts.pop(0)
            else:
                self._propose()
                self._drop_expensive()
                if not self._waiting:
                    continue
                explores = self._chance.random() < EXPLORED_FRACTION
                chosen = self._waiting.pop(self._chance.randrange(len(self._waiting)) if explores else 0)
            source = emit_launches(chosen.schedule, chosen.launches, self._hw)
            text = hashlib.sha256(source.text.encode()).digest()
            if text not in self._texts:
                self._texts.add(text)
                return chosen, source
            self._unbuilt[SAME_TEXT] += 1
        return None

    def explain_nothing(self) -> ScheduleError:
        """Return the error of a search without a schedule to build."""
        stored = [f.statement for f in self._space.default.functions if f.computed is not Fixed.INLINE]
        has_no_blocks = any(each.kind is StatementKind.SCATTER or not each.spatial for each in stored)
        return ScheduleError(
            f"no schedule that the search proposes is legal on {self._hw.id}; of the first: {self._refused}",
            code="schedule-tune",
            hint="compile it without a schedule: a result of one element, and a scatter, have no loop to run on blocks"
            if has_no_blocks and self._hw.family is not TargetKind.CPU
            else "give `start`, a schedule that the device can run: on GPUs one with blocks",
        )

    @property
    def _limit_s(self) -> float:
        return MAX_PRICE_RATIO * self._pool[0].seconds if self._pool else math.inf

    def _propose(self) -> None:
        for _ in range(PROPOSALS):
            parent = self._chance.choice(self._pool).steps if self._pool else ()
            mutated = self._space.mutate(parent, self._chance, self._unbuilt)
            if mutated is not None:
                self.add(*mutated)

    def _drop_expensive(self) -> None:
        """Forget proposals that a cheaper one excludes, and sort the others."""
        cheap = [each for each in self._waiting if each.seconds <= self._limit_s]
        if excluded := len(self._waiting) - len(cheap):
            self._unbuilt[EXPENSIVE] += excluded
        self._waiting = sorted(cheap, key=lambda each: each.seconds)
