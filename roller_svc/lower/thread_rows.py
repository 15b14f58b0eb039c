"""Reducing group and its rProgram → which rows a thread works on, and which part of each.

A row is one outer point with all inner points behind it. `lanes` threads share a row. Where memory runs along the row
they are neighbours; where it runs along an outer axis the neighbours are rows, and lanes stand a row of threads apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from roller_svc.ir.build import add, both, ceil_div, least, less, mul, num, ref
from roller_svc.ir.expr import AxisRef, Expr
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.program import Axis
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Branch, Let, Loop, LoopKind, Node

LANE, POINT = ".lane", ".point"


@dataclass(frozen=True, slots=True)
class ThreadRows:
    """`along`: whether lanes of a row are neighbouring threads. `warp`: threads that shuffles reach."""

    group: KernelGroup
    program: RProgram
    warp: int

    @property
    def lanes(self) -> int:
        return self.program.lanes

    @property
    def points(self) -> int:
        """Threads of a block that work on the same part of different rows."""
        return self.program.threads // self.lanes

    @property
    def along(self) -> bool:
        return self.program.space.vector_axis not in {a.name for a in self.group.outer}

    @property
    def vector(self) -> str | None:
        """The outer axis of which a thread has neighbouring points."""
        for axis in self.group.outer:
            width = self.program.thread[axis.name]
            if axis.name == self.program.space.vector_axis and width > 1 and axis.extent % width == 0:
                return axis.name
        return None

    @property
    def several(self) -> tuple[Axis, ...]:
        """Outer axes of which a thread has several points, the one of neighbours last."""
        wide = [a for a in self.group.outer if self.program.thread[a.name] > 1]
        return tuple(sorted(wide, key=lambda a: a.name == self.vector))

    @property
    def elements(self) -> tuple[AxisRef, ...]:
        """Which of the thread's rows this one is."""
        return tuple(ref(_element(a)) for a in self.several)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.program.thread[a.name] for a in self.several)

    @property
    def flat_element(self) -> Expr:
        flat: Expr = num(0)
        for var, extent in zip(self.elements, self.shape, strict=True):
            flat = add(mul(flat, num(extent)), var)
        return flat

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    # loops ----------------------------------------------------------------------------------------------------------
    def around(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """The nodes of one thread in the loops over blocks and threads, below the Lets that say where it stands."""
        for axis in reversed(self.group.outer):
            nodes = (Let(_first(axis), self._first_of(axis), nodes),)
        threads = [(_thread(a), self._threads(a)) for a in self._by_speed()]
        point: Expr = num(0)
        for var, extent in threads:
            point = add(mul(point, num(extent)), ref(var))
        nodes = (Let(POINT, point, nodes),)
        order = [*threads, (LANE, self.lanes)] if self.along else [(LANE, self.lanes), *threads]
        for var, extent in reversed(order):
            nodes = (Loop(var, extent, LoopKind.THREAD, nodes),)
        for axis in reversed(self.group.outer):
            blocks = ceil_div(axis.extent, self.program.block[axis.name])
            nodes = (Loop(f"{axis.name}.block", blocks, LoopKind.BLOCK, nodes),)
        return nodes

    def each(self, nodes: tuple[Node, ...], *, guarded: bool = False, vector: bool = True) -> tuple[Node, ...]:
        """The nodes for each of the thread's rows; `guarded`: only for those that exist. `vector`: neighbouring rows
        are lanes of a vector loop, for which the nodes are a straight line."""
        for axis in reversed(self.several):
            kind = LoopKind.VECTOR if vector and axis.name == self.vector else LoopKind.UNROLL
            if guarded and axis.name != self.vector:
                nodes = _branch(self._inside(axis), nodes)
            nodes = (Loop(_element(axis), self.program.thread[axis.name], kind, nodes),)
            if guarded and axis.name == self.vector:
                nodes = _branch(self._inside(axis), nodes)
        if guarded:
            inside: Expr | None = None
            for axis in self.group.outer:
                inside = both(inside, None if axis in self.several else self._inside(axis))
            nodes = _branch(inside, nodes)
        return nodes

    # places ---------------------------------------------------------------------------------------------------------
    @property
    def read_at(self) -> dict[str, Expr]:
        """Where the outer axes stand. Beyond the edge the last row is read again: lanes must meet."""
        return {a.name: self._at(a, clamped=self._is_ragged(a)) for a in self.group.outer}

    @property
    def write_at(self) -> dict[str, Expr]:
        return {a.name: self._at(a, clamped=False) for a in self.group.outer}

    @property
    def places(self) -> dict[str, int]:
        """Variables of loops over a thread's rows."""
        return {_element(a): self.program.thread[a.name] for a in self.several}

    def _at(self, axis: Axis, *, clamped: bool) -> Expr:
        first, unit = ref(_first(axis)), self._unit(axis)
        if unit > 1:
            chunk = least(first, num(axis.extent // unit - 1)) if clamped else first
            return add(mul(chunk, num(unit)), ref(_element(axis)))
        place: Expr = first
        if axis in self.several:
            place = add(first, mul(ref(_element(axis)), num(self._threads(axis))))
        return least(place, num(axis.extent - 1)) if clamped else place

    def _inside(self, axis: Axis) -> Expr | None:
        if not self._is_ragged(axis):
            return None
        if (unit := self._unit(axis)) > 1:
            return less(ref(_first(axis)), num(axis.extent // unit))
        return less(self._at(axis, clamped=False), num(axis.extent))

    def _first_of(self, axis: Axis) -> Expr:
        """The thread's first place; of neighbours: the number of its run."""
        block = self.program.block[axis.name] // self._unit(axis)
        return add(mul(ref(f"{axis.name}.block"), num(block)), ref(_thread(axis)))

    def _unit(self, axis: Axis) -> int:
        return self.program.thread[axis.name] if axis.name == self.vector else 1

    def _is_ragged(self, axis: Axis) -> bool:
        return axis.extent % self.program.block[axis.name] != 0

    def _threads(self, axis: Axis) -> int:
        return self.program.block[axis.name] // self.program.thread[axis.name]

    def _by_speed(self) -> list[Axis]:
        """Outer axes, the one that neighbouring threads walk last."""
        return sorted(self.group.outer, key=lambda a: a.name == self.program.space.vector_axis)


def _branch(cond: Expr | None, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    return nodes if cond is None else (Branch(cond, nodes),)


def _element(axis: Axis) -> str:
    return f"{axis.name}.element"


def _first(axis: Axis) -> str:
    return f"{axis.name}.first"


def _thread(axis: Axis) -> str:
    return f"{axis.name}.thread"
