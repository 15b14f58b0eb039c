"""Plans of a virtual device (RAMMER, OSDI 2020, §3): which vEU executes which rTasks, in which order.

RAMMER calls such a plan an rProgram. Here RProgram is ROLLER's: the tiles of one kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from roller_svc.ir.canonical import UNTAGGED, Key, Limit


@dataclass(frozen=True, slots=True)
class Execute:
    """Execute `count` consecutive rTasks of an rOperator."""

    operator: Annotated[int, Key("execute")]
    first: Annotated[int, Key("execute")]
    count: Annotated[int, Key("execute")]


@dataclass(frozen=True, slots=True)
class Barrier:
    """A barrier-rTask: wait until each vEU has finished its instruction number `order`."""

    waits: Annotated[tuple[tuple[int, int], ...], Key("wait"), Limit(1, 1 << 20)]  # (vEU, order)


Instruction = Annotated[Execute | Barrier, UNTAGGED]


@dataclass(frozen=True, slots=True)
class VDevicePlan:
    """prog[vEU][order] for rOperators that have `num_tasks` independent, homogeneous rTasks each."""

    num_tasks: tuple[Annotated[int, Limit(1, 1 << 20)], ...]
    programs: Annotated[tuple[tuple[Instruction, ...], ...], Limit(1, 1024)]

    @property
    def num_veus(self) -> int:
        return len(self.programs)


def executes(plan: VDevicePlan) -> Iterator[tuple[int, int, Execute]]:
    """Yield (vEU, order, instruction) of every Execute, vEU by vEU."""
    for veu, program in enumerate(plan.programs):
        for order, instruction in enumerate(program):
            if isinstance(instruction, Execute):
                yield veu, order, instruction
