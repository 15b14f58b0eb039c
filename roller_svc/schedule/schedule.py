"""Schedule: the loops of each statement of a program, and the site where it is computed (Halide).

A statement is a function of one or two stages. A map has one. A reduction has a pure stage, which writes the identity,
and an `.update` that accumulates. A scatter has a pure stage, which copies its target, and an `.update` that writes. A
schedule holds decisions only; extents, regions and guards follow from it (schedule/bounds.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from roller_svc.errors import ScheduleError
from roller_svc.ir.expr import Expr
from roller_svc.ir.program import Axis, TensorExpr, TensorProgram
from roller_svc.ir.schedule import LoopKind, Scope

if TYPE_CHECKING:
    from roller_svc.schedule.bounds import Nests

UPDATE = ".update"


class StagePart(Enum):
    """The part of a statement that a stage computes."""

    VALUE = "value"  # a map's value
    INIT = "start"  # a reduction's identity, a scatter's copy of its target
    UPDATE = "update"  # the reduction, or the scatter


class Fixed(Enum):
    ROOT = "root"  # before all loops, the whole tensor
    INLINE = "inline"  # in place of every load of it: no loops, no storage


@dataclass(frozen=True, slots=True)
class At:
    """Inside a stage's loop, for the region that one iteration needs."""

    stage: str
    loop: str


Site = Fixed | At


@dataclass(frozen=True, slots=True)
class Split:
    """loop = outer * factor + inner."""

    loop: str
    outer: str
    inner: str
    factor: int


@dataclass(frozen=True, slots=True)
class Fuse:
    """outer = fused // extent of inner, inner = fused % extent of inner."""

    outer: str
    inner: str
    fused: str


@dataclass(frozen=True, slots=True)
class Rename:
    """name = loop."""

    loop: str
    name: str


@dataclass(frozen=True, slots=True)
class Repeat:
    """A loop of no axis, whose first iteration does the work of the stage."""

    name: str
    extent: int


Cut = Split | Fuse | Rename | Repeat


@dataclass(frozen=True, slots=True)
class StageLoop:
    name: str
    kind: LoopKind = LoopKind.SERIAL


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage. Its `loops`, outermost first, come from `axes` by `cuts`, in order.

    It runs where each of `limits`, an expression of axes and a size, is less than the size.
    """

    name: str
    part: StagePart
    axes: tuple[Axis, ...]
    loops: tuple[StageLoop, ...]
    cuts: tuple[Cut, ...] = ()
    limits: tuple[tuple[Expr, int], ...] = ()

    def position(self, loop: str) -> int:
        for i, stage_loop in enumerate(self.loops):
            if stage_loop.name == loop:
                return i
        loops = ", ".join(x.name for x in self.loops) or "none"
        raise ScheduleError(f"{self.name} has no loop {loop}", code="schedule-name", hint=f"its loops: {loops}")

    @property
    def loop_names(self) -> frozenset[str]:
        """Return the names of the loops that the stage has, and of those that were cut."""
        names = {axis.name for axis in self.axes}
        for cut in self.cuts:
            match cut:
                case Split():
                    names |= {cut.outer, cut.inner}
                case Fuse():
                    names.add(cut.fused)
                case Rename() | Repeat():
                    names.add(cut.name)
        return frozenset(names)

    def axes_of(self, loop: str) -> frozenset[str]:
        """Return the axes that a loop came from."""
        origin = {a.name: frozenset({a.name}) for a in self.axes}
        for cut in self.cuts:
            match cut:
                case Split():
                    origin[cut.outer] = origin[cut.inner] = origin[cut.loop]
                case Fuse():
                    origin[cut.fused] = origin[cut.outer] | origin[cut.inner]
                case Rename():
                    origin[cut.name] = origin[cut.loop]
                case Repeat():
                    origin[cut.name] = frozenset()
        return origin[loop]


@dataclass(frozen=True, slots=True)
class Function:
    """One statement. `stored` is outside of `computed` or the same; an inlined function has neither.

    `scope` is that of a tile, which is stored in a loop. What is stored at root is in memory.
    """

    statement: TensorExpr
    stages: tuple[Stage, ...]
    computed: Site = Fixed.ROOT
    stored: Site = Fixed.ROOT
    scope: Scope = Scope.STACK

    @property
    def name(self) -> str:
        return self.statement.output


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule. Each function reads only inputs and earlier functions."""

    program: TensorProgram
    functions: tuple[Function, ...]
    # Of the legal schedule that this one was made from: nests of functions that are still the same are not built again.
    nests: Nests | None = field(default=None, compare=False, repr=False)

    @property
    def outputs(self) -> frozenset[str]:
        return frozenset(o.tensor for o in self.program.outputs)

    def function(self, name: str) -> Function:
        for function in self.functions:
            if function.name == name:
                return function
        names = ", ".join(f.name for f in self.functions)
        raise ScheduleError(f"there is no function {name}", code="schedule-name", hint=f"functions: {names}")

    def owner(self, stage: str) -> Function:
        """Return the function of a stage."""
        for function in self.functions:
            if any(s.name == stage for s in function.stages):
                return function
        names = ", ".join(s.name for f in self.functions for s in f.stages)
        raise ScheduleError(f"there is no stage {stage}", code="schedule-name", hint=f"stages: {names}")

    def stage(self, name: str) -> Stage:
        return next(s for s in self.owner(name).stages if s.name == name)

    def with_function(self, new: Function) -> Schedule:
        return replace(self, functions=tuple(new if f.name == new.name else f for f in self.functions))

    def with_stage(self, new: Stage) -> Schedule:
        owner = self.owner(new.name)
        stages = tuple(new if s.name == new.name else s for s in owner.stages)
        return self.with_function(replace(owner, stages=stages))
