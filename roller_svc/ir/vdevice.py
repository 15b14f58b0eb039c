"""Plans of a virtual device (RAMMER, OSDI 2020, §3): which vEU executes which rTasks, in which order.

RAMMER calls such a plan an rProgram. Here RProgram is ROLLER's: the tiles of one kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from roller_svc.ir.canonical import OMIT_DEFAULT, UNTAGGED, Key, Limit


@dataclass(frozen=True, slots=True)
class Execute:
    """Execute `count` consecutive rTasks of an rOperator."""

    operator: Annotated[int, Key("execute")]
    first: Annotated[int, Key("execute")]
    count: Annotated[int, Key("execute")]
    arrives: Annotated[int | None, OMIT_DEFAULT] = None  # the event at which each rTask arrives once it is done


@dataclass(frozen=True, slots=True)
class Barrier:
    """A barrier-rTask: wait until each vEU has finished its instruction number `order`."""

    waits: Annotated[tuple[tuple[int, int], ...], Key("wait"), Limit(1, 1 << 20)]  # (vEU, order)


@dataclass(frozen=True, slots=True)
class WaitEvent:
    """Wait for all arrivals at an event."""

    event: Annotated[int, Key("wait_event")]


@dataclass(frozen=True, slots=True)
class Stream:
    """Constant operands of these rTasks may be fetched from here on, in the order in which the vEU executes them."""

    operator: Annotated[int, Key("stream")]
    first: Annotated[int, Key("stream")]
    count: Annotated[int, Key("stream")]


Instruction = Annotated[Execute | Barrier | WaitEvent | Stream, UNTAGGED]


@dataclass(frozen=True, slots=True)
class VDevicePlan:
    """`prog[vEU][order]` for rOperators that have `num_tasks` independent, homogeneous rTasks each.

    Plans for CPUs order rTasks by barriers, plans for GPUs by events: one wait for all arrivals takes the place of one
    for each vEU. Plans for GPUs may stream all rTasks of an rOperator.
    """

    num_tasks: tuple[Annotated[int, Limit(1, 1 << 20)], ...]
    programs: Annotated[tuple[tuple[Instruction, ...], ...], Limit(1, 1024)]
    events: Annotated[tuple[Annotated[int, Limit(1, 1 << 30)], ...], OMIT_DEFAULT] = ()  # arrivals of each event

    @property
    def num_veus(self) -> int:
        return len(self.programs)

    @property
    def has_events(self) -> bool:
        """Return whether an instruction arrives at an event, waits for one, or streams: only plans for GPUs have these."""
        instructions = (instruction for program in self.programs for instruction in program)
        return bool(self.events) or any(
            isinstance(each, WaitEvent | Stream) or arrives_at(each) is not None for each in instructions
        )

    @property
    def streamed(self) -> frozenset[int]:
        """Return the rOperators that stream."""
        return frozenset(each.operator for program in self.programs for each in program if isinstance(each, Stream))


def arrives_at(instruction: Instruction) -> int | None:
    """Return the event at which an instruction arrives."""
    return instruction.arrives if isinstance(instruction, Execute) else None


def executes(plan: VDevicePlan) -> Iterator[tuple[int, int, Execute]]:
    """Yield (vEU, order, instruction) of every Execute, vEU by vEU."""
    for veu, program in enumerate(plan.programs):
        for order, instruction in enumerate(program):
            if isinstance(instruction, Execute):
                yield veu, order, instruction
