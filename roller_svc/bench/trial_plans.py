"""A program → plans to measure: the ones that the model puts first, and random ones beyond them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from roller_svc.bench.measured_plans import candidate_of
from roller_svc.construct.random_tiles import random_rprograms
from roller_svc.generate import Groups
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.report import Plan
from roller_svc.ranking import best_plans, ranked_groups


@dataclass(frozen=True, slots=True)
class TrialPlans:
    """`ranked` are the model's first, in its order; `drawn` differ from the first of these in one group each."""

    groups: Groups
    ranked: tuple[Plan, ...]
    drawn: tuple[Plan, ...]

    @property
    def plans(self) -> tuple[Plan, ...]:
        return (*self.ranked, *self.drawn)


def trial_plans(program: TensorProgram, hw: HardwareSpec, top: int, sample: int, seed: str) -> TrialPlans:
    """The model's `top` plans and `sample` others, the same ones for the same seed."""
    groups, ranked, _ = ranked_groups(program, hw, top)
    first = best_plans(ranked, top)
    rng = random.Random(seed)
    known = {tuple(c.program for c in plan.choices) for plan in first}
    drawn: list[Plan] = []
    pools = [iter(random_rprograms(group, hw, top + sample, rng)) for group in groups]
    turns = [g for g in range(len(groups)) for _ in range(top + sample)]
    rng.shuffle(turns)
    for g in turns:
        rprogram = next(pools[g], None)
        if rprogram is None or len(drawn) >= sample:
            continue
        others = first[0].choices
        plan = Plan((*others[:g], candidate_of(rprogram, groups[g], hw), *others[g + 1 :]))
        key = tuple(c.program for c in plan.choices)
        if key not in known:
            known.add(key)
            drawn.append(plan)
    return TrialPlans(groups, first, tuple(drawn))
