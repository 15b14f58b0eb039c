"""Contraction group and its rProgram → schedule tree for a GPU: shared-memory tiles and register tiles (`simt`)."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.ir.affine import affine
from roller_svc.ir.build import add, both, ceil_div, div, less, mod, mul, num, ref
from roller_svc.ir.expr import Cast, Const, Expr, Load, Op, OpKind, Select, loads_of
from roller_svc.ir.group import KernelGroup, TileAxis
from roller_svc.ir.program import Combine
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Barrier, Branch, Compute, Let, Loop, LoopKind, Node, ScheduleTree, Scope, Storage
from roller_svc.lower.contraction import View
from roller_svc.lower.fused_axis import decoded

SHARED_A, SHARED_B, ACC, A, B = ".a_shared", ".b_shared", ".acc", ".a", ".b"
THREAD = ".thread"
# Loads of one thread that are issued together: more take registers for their addresses, fewer leave memory idle.
LOADS_IN_FLIGHT = 4


def lower_contraction_gpu(group: KernelGroup, program: RProgram) -> tuple[ScheduleTree, ...]:
    """One tree: a block computes block.m x block.n of C in steps of block.k, a thread thread.m x thread.n of that."""
    view = View.of(group, program)
    return (ScheduleTree(group.name, _Tiled(view, program).blocks()),)


@dataclass(frozen=True, slots=True)
class _Tiled:
    view: View
    program: RProgram

    def _block(self, axis: TileAxis) -> int:
        return self.program.block[axis.name]

    def _thread(self, axis: TileAxis) -> int:
        return self.program.thread[axis.name]

    def _threads(self, axis: TileAxis) -> int:
        return self._block(axis) // self._thread(axis)

    def blocks(self) -> tuple[Node, ...]:
        view = self.view
        m, n = view.m, view.n
        zero = Const(0.0 if view.dtype.is_float else 0, view.dtype)
        steps = ceil_div(view.k.extent, self._block(view.k))
        step = (*self._stage(SHARED_A, view.factors.a, m), *self._stage(SHARED_B, view.factors.b, n),
                Barrier(), self._multiply(), Barrier())  # fmt: skip
        nodes: tuple[Node, ...] = (
            self._over_tile((Compute(ACC, (ref("m.element"), ref("n.element")), zero),)),
            Loop("k.step", steps, LoopKind.SERIAL, step),
            self._store(),
        )
        nodes = (Storage(ACC, view.dtype, (self._thread(m), self._thread(n)), Scope.REGISTER, nodes),)
        for name, axis, factor in ((SHARED_B, n, view.factors.b), (SHARED_A, m, view.factors.a)):
            # consecutive threads that walk k write down a column: one extra element a row puts them in other banks
            pad = 1 if self._runs_along_k(factor, axis) else 0
            shape = (self._block(view.k), self._block(axis))
            nodes = (Storage(name, view.dtype, shape, Scope.SHARED, nodes, pad),)
        thread = add(mul(ref("m.thread"), num(self._threads(n))), ref("n.thread"))
        nodes = (Let(THREAD, thread, nodes),)
        nodes = (Loop("n.thread", self._threads(n), LoopKind.THREAD, nodes),)
        nodes = (Loop("m.thread", self._threads(m), LoopKind.THREAD, nodes),)
        for axis in (n, m):
            count = ceil_div(axis.extent, self._block(axis))
            nodes = (Loop(f"{axis.role.value}.block", count, LoopKind.BLOCK, nodes),)
        for batch in reversed(view.batch):
            nodes = (Loop(batch.name, batch.extent, LoopKind.BLOCK, nodes),)
        return nodes

    def _over_tile(self, nodes: tuple[Node, ...]) -> Node:
        columns = Loop("n.element", self._thread(self.view.n), LoopKind.UNROLL, nodes)
        return Loop("m.element", self._thread(self.view.m), LoopKind.UNROLL, (columns,))

    # staging --------------------------------------------------------------------------------------------------------
    def _stage(self, shared: str, factor: Expr, axis: TileAxis) -> tuple[Node, ...]:
        """All threads load the tile, neighbours along the axis that is contiguous in memory; 0 beyond the edges."""
        rows, columns = self._block(self.view.k), self._block(axis)
        threads = self._threads(self.view.m) * self._threads(self.view.n)
        item = add(mul(ref(".round"), num(threads)), ref(THREAD))
        if self._runs_along_k(factor, axis):
            k_at, at = mod(ref(".item"), rows), div(ref(".item"), rows)
        else:
            k_at, at = div(ref(".item"), columns), mod(ref(".item"), columns)
        value: Expr = Cast(factor, self.view.dtype, implicit=True)
        k_place = add(mul(ref("k.step"), num(rows)), ref(".k"))
        place = add(mul(ref(f"{axis.role.value}.block"), num(columns)), ref(".at"))
        inside = both(
            less(ref(".k_place"), num(self.view.k.extent)) if self.view.k.extent % rows else None,
            less(ref(".place"), num(axis.extent)) if axis.extent % columns else None,
        )
        if inside is not None:
            zero = Const(0.0 if self.view.dtype.is_float else 0, self.view.dtype)
            value = Select(inside, value, zero, self.view.dtype)
        nodes: tuple[Node, ...] = (Compute(shared, (ref(".k"), ref(".at")), value),)
        nodes = decoded(self.view.k, ref(".k_place"), decoded(axis, ref(".place"), nodes))
        for var, index in ((".place", place), (".k_place", k_place), (".at", at), (".k", k_at)):
            nodes = (Let(var, index, nodes),)
        items = rows * columns
        if items % threads:
            nodes = (Branch(less(ref(".item"), num(items)), nodes),)
        nodes = (Let(".item", item, nodes),)
        rounds = ceil_div(items, threads)
        together = max(n for n in range(1, LOADS_IN_FLIGHT + 1) if rounds % n == 0)
        nodes = (Let(".round", add(mul(ref(".rounds"), num(together)), ref(".load")), nodes),)
        nodes = (Loop(".load", together, LoopKind.UNROLL, nodes),)
        return (Loop(".rounds", rounds // together, LoopKind.SERIAL, nodes),)

    def _runs_along_k(self, factor: Expr, axis: TileAxis) -> bool:
        """Whether memory is contiguous along k rather than along the other axis."""
        k_member, member = self.view.k.members[-1].name, axis.members[-1].name
        for load in loads_of(factor):
            if load.index and (last := affine(load.index[-1])) is not None:
                along_k, along = abs(last.coeff(k_member)), abs(last.coeff(member))
                if along_k or along:
                    return along == 0 or (along_k != 0 and along_k < along)
        return False

    # compute --------------------------------------------------------------------------------------------------------
    def _element(self, axis: TileAxis) -> Expr:
        """Column of the tile that an element of a thread is: neighbours in neighbouring threads."""
        role = axis.role.value
        return add(mul(ref(f"{role}.element"), num(self._threads(axis))), ref(f"{role}.thread"))

    def _multiply(self) -> Node:
        view, dtype = self.view, self.view.dtype
        fetch = tuple(
            Loop(f"{axis.role.value}.element", self._thread(axis), LoopKind.UNROLL, (
                Compute(register, (ref(f"{axis.role.value}.element"),),
                        Load(shared, (ref("k.row"), self._element(axis)), dtype)),
            ))
            for register, shared, axis in ((A, SHARED_A, view.m), (B, SHARED_B, view.n))
        )  # fmt: skip
        product = Op(OpKind.MUL, (Load(A, (ref("m.element"),), dtype), Load(B, (ref("n.element"),), dtype)), dtype)
        join = Compute(ACC, (ref("m.element"), ref("n.element")), product, Combine.SUM)
        nodes: tuple[Node, ...] = (*fetch, self._over_tile((join,)))
        nodes = (Storage(B, dtype, (self._thread(view.n),), Scope.REGISTER, nodes),)
        nodes = (Storage(A, dtype, (self._thread(view.m),), Scope.REGISTER, nodes),)
        return Loop("k.row", self._block(view.k), LoopKind.UNROLL, nodes)

    def _store(self) -> Node:
        view = self.view
        total = Load(ACC, (ref("m.element"), ref("n.element")), view.dtype)
        nodes = view.epilogue(total, {})
        nodes = decoded(view.m, ref("m.place"), decoded(view.n, ref("n.place"), nodes))
        inside: Expr | None = None
        for axis in (view.m, view.n):
            if axis.extent % self._block(axis):
                inside = both(inside, less(ref(f"{axis.role.value}.place"), num(axis.extent)))
        if inside is not None:
            nodes = (Branch(inside, nodes),)
        for axis in (view.n, view.m):
            role = axis.role.value
            place = add(mul(ref(f"{role}.block"), num(self._block(axis))), self._element(axis))
            nodes = (Let(f"{role}.place", place, nodes),)
        return self._over_tile(nodes)
