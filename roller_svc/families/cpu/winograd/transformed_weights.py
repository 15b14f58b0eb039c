"""Weights of a Winograd convolution, transformed once: U = G g or G g G^T in float64, rounded to float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roller_svc.analysis.winograd import TAPS, Row
from roller_svc.errors import InvariantError
from roller_svc.families.common.view import bind_members
from roller_svc.families.cpu.winograd.workload import LINE_ELEMENTS, WinogradSpace, WinogradTask
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, Op, OpKind, substitute
from roller_svc.ir.index import add, lt, min_, mul, num, ref, sub
from roller_svc.ir.program import Axis, Combine, identity
from roller_svc.ir.schedule import Branch, Compute, Let, Loop, LoopKind, Node, Prefetch, Scope, Storage

WEIGHTS, HALF = ".weights", ".weights.half"


@dataclass(frozen=True, slots=True)
class TransformedWeights:
    """Panels of `wide` filters: U[group][position][panel of the group][row][filter], 0 beyond the last filter.

    A row is a tap of the planes and a channel.

    This is the order in which the micro-kernel reads them: a task streams through its weights once.
    """

    task: WinogradTask
    source: Expr

    @property
    def shape(self) -> tuple[int, ...]:
        task = self.task
        return task.groups, task.space.positions, task.group_panels, task.space.depth, task.wide

    def element(self, position: Expr, channel: Expr, filter_: Expr) -> Load:
        """Return an element of panel `.filters.member` of group `.filters.group`."""
        dtype = self.task.space.image.space.compute_dtype
        row = channel
        for tap in plane_taps(self.task.space):
            row = add(mul(ref(tap.name), num(self.task.space.image.depth)), channel)
        return Load(WEIGHTS, (ref(".filters.group"), position, ref(".filters.member"), row, filter_), dtype)

    @property
    def lines(self) -> int:
        """Return the cache lines of a panel's row."""
        return -(-self.task.wide // LINE_ELEMENTS)

    def prefetches(self, position: Expr, channel: Expr) -> tuple[Node, ...]:
        """Prefetch the next panel into L2, some lines with each channel of each call; none where L2 holds all."""
        task = self.task
        if task.space.transformed_bytes <= task.l2_bytes:
            return ()
        nodes: list[Node] = []
        for first in range(0, self.lines, task.calls):
            filter_ = mul(add(ref(".call"), num(first)), num(LINE_ELEMENTS))
            index = self.element(position, channel, filter_).index
            nodes.append(Prefetch(WEIGHTS, index, task.space.depth * task.wide, to_l2=True))
        return tuple(nodes)

    def fill(self) -> tuple[Node, ...]:
        """Transform the weights of the task's filters."""
        image, wide = self.task.space.image, self.task.wide
        if image.channels is None:
            raise InvariantError("a Winograd convolution has channels")
        place = add(add(ref(".filters.first"), mul(ref(".filters.panel"), num(wide))), ref(".filter"))
        nodes = bind_members(image.filters, place, bind_members(image.channels, ref(".channel"), self._transform()))
        if image.filters.extent % wide:
            nodes = (Branch(lt(place, num(image.filters.extent)), nodes, self._zeros()),)
        nodes = (Loop(".filter", wide, LoopKind.SERIAL, nodes),)
        nodes = (Loop(".channel", image.depth, LoopKind.SERIAL, nodes),)
        for tap in plane_taps(self.task.space):
            nodes = (Loop(tap.name, tap.extent, LoopKind.SERIAL, nodes),)
        return (over_groups(self.task, (over_members(self.task, nodes),)),)

    def _transform(self) -> tuple[Node, ...]:
        """Transform the taps of one filter and channel."""
        space = self.task.space
        matrices = space.transforms
        names = [slide.tap.name for slide in space.tiled if slide.tap is not None]

        def tap(*at: int) -> Expr:
            return Cast(substitute(self.source, dict(zip(names, map(num, at), strict=True))), DType.FLOAT64, implicit=True)

        def stored(at: Sequence[int], value: Expr) -> Compute:
            return self._store(space.position(at), Cast(value, space.image.space.compute_dtype, implicit=True))

        taps = range(TAPS)
        if len(names) == 1:
            return tuple(stored((a,), _dot(row, [tap(i) for i in taps])) for a, row in enumerate(matrices.filters))
        nodes: list[Node] = []
        for a, row in enumerate(matrices.filters):
            nodes += [Compute(HALF, (num(a), num(j)), _dot(row, [tap(i, j) for i in taps])) for j in taps]
        for a in range(matrices.size):
            half = [Load(HALF, (num(a), num(j)), DType.FLOAT64) for j in taps]
            nodes += [stored((a, b), _dot(row, half)) for b, row in enumerate(matrices.filters)]
        return (Storage(HALF, DType.FLOAT64, (matrices.size, TAPS), Scope.REGISTER, tuple(nodes)),)

    def _zeros(self) -> tuple[Node, ...]:
        zero = identity(Combine.SUM, self.task.space.image.space.compute_dtype)
        return tuple(self._store(position, zero) for position in range(self.task.space.positions))

    def _store(self, position: int, value: Expr) -> Compute:
        target = self.element(num(position), ref(".channel"), ref(".filter"))
        return Compute(target.tensor, target.index, value)


def plane_taps(space: WinogradSpace) -> tuple[Axis, ...]:
    """Return the axis of the taps that are summed as channels are, if any."""
    planes = space.planes
    return () if planes is None or planes.tap is None else (planes.tap,)


def over_groups(task: WinogradTask, nodes: tuple[Node, ...]) -> Node:
    """Loop over the groups of a task's panels; `.filters.members` is the number of panels of a group."""
    remaining = sub(ref(".filters.panels"), mul(ref(".filters.group"), num(task.group_panels)))
    members = num(task.group_panels) if _has_whole_blocks(task) else min_(num(task.group_panels), remaining)
    return Loop(".filters.group", task.groups, LoopKind.SERIAL, (Let(".filters.members", members, nodes),))


def over_members(task: WinogradTask, nodes: tuple[Node, ...]) -> Node:
    """Loop over the panels of a group; `.filters.panel` is the number of a panel in the task."""
    panel = add(mul(ref(".filters.group"), num(task.group_panels)), ref(".filters.member"))
    nodes = (Let(".filters.panel", panel, nodes),)
    return Loop(".filters.member", task.group_panels, LoopKind.SERIAL, nodes, ref(".filters.members"))


def _has_whole_blocks(task: WinogradTask) -> bool:
    """Return whether each task has all panels of its block."""
    return -(-task.space.image.filters.extent // task.wide) % task.panels == 0


def _dot(row: Row, values: Sequence[Expr]) -> Expr:
    """Return the sum of the row's terms in float64."""
    total: Expr | None = None
    for c, value in zip(row, values, strict=True):
        if c:
            term = Op(OpKind.MUL, (Const(float(c), DType.FLOAT64), value), DType.FLOAT64)
            total = term if total is None else Op(OpKind.ADD, (total, term), DType.FLOAT64)
    return Const(0.0, DType.FLOAT64) if total is None else total
