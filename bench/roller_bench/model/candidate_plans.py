"""Choose the plans to measure: the model's first ones and random others."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from roller_bench.cases import BenchCase
from roller_bench.model.measured_plans import candidate_of
from roller_bench.model.random_tiles import random_rprograms
from roller_svc.compiler.lower_and_emit import Groups
from roller_svc.compiler.plans import best_plans, rank_best_partition
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.report import GroupedPlan, Plan
from roller_svc.ir.rprogram import RProgram

TRIES = 10  # draws for each wanted plan: some are duplicates, some are among the model's first


@dataclass(frozen=True, slots=True)
class TrialPlans:
    """The plans of a program to measure."""

    groups: Groups
    ranked: tuple[Plan, ...]  # the model's first, in its order
    drawn: tuple[Plan, ...]  # random others; tiles of each kernel are drawn independently

    @property
    def plans(self) -> tuple[Plan, ...]:
        return (*self.ranked, *self.drawn)

    @property
    def grouped(self) -> tuple[GroupedPlan, ...]:
        return tuple(GroupedPlan(plan, self.groups) for plan in self.plans)


def sample_sizes(cases: Collection[BenchCase], of_case: int, of_class: int) -> dict[str, int]:
    """Return {class: random plans per case}: at least `of_case`, and `of_class` over all cases of the class."""
    counts = Counter(case.cls for case in cases)
    return {cls: max(of_case, math.ceil(of_class / count)) for cls, count in counts.items()}


def trial_plans(program: TensorProgram, hw: HardwareSpec, top: int, sample: int, seed: str) -> TrialPlans:
    """Return the model's `top` plans and up to `sample` random others, deterministically by seed."""
    groups, ranked, _ = rank_best_partition(program, hw, top)
    first = best_plans(ranked, top)
    rng = random.Random(seed)
    pools = [random_rprograms(group, hw, top + sample, rng) for group in groups]
    programs_by_group = [_cycle(pool or (choice.program,), rng) for pool, choice in zip(pools, first[0].choices, strict=True)]
    seen = {tuple(c.program for c in plan.choices) for plan in first}
    drawn: list[Plan] = []
    for programs in itertools.islice(zip(*programs_by_group, strict=True), TRIES * (top + sample)):
        if len(drawn) < sample and programs not in seen:
            seen.add(programs)
            drawn.append(Plan(tuple(candidate_of(p, group, hw) for p, group in zip(programs, groups, strict=True))))
    return TrialPlans(groups, first, tuple(drawn))


def _cycle(pool: Sequence[RProgram], rng: random.Random) -> Iterator[RProgram]:
    """Yield all programs repeatedly, each time in another random order."""
    while True:
        yield from rng.sample(pool, len(pool))
