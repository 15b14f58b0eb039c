"""Plans of a virtual device (RAMMER, OSDI 2020, §3): which vEU executes which rTasks, in which order.

RAMMER calls such a plan an rProgram. Here RProgram is ROLLER's: the tiles of one kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Execute:
    """Execute `count` consecutive rTasks of an rOperator."""

    operator: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Barrier:
    """A barrier-rTask: wait until each vEU has finished its instruction number `order`."""

    waits: tuple[tuple[int, int], ...]  # (vEU, order)


Instruction = Execute | Barrier


@dataclass(frozen=True, slots=True)
class VDevicePlan:
    """prog[vEU][order] for rOperators that have `num_tasks` independent, homogeneous rTasks each."""

    num_tasks: tuple[int, ...]
    programs: tuple[tuple[Instruction, ...], ...]

    @property
    def num_veus(self) -> int:
        return len(self.programs)


def executes(plan: VDevicePlan) -> Iterator[tuple[int, int, Execute]]:
    """Yield (vEU, order, instruction) of every Execute, vEU by vEU."""
    for veu, program in enumerate(plan.programs):
        for order, instruction in enumerate(program):
            if isinstance(instruction, Execute):
                yield veu, order, instruction
