"""Contraction group and its rProgram → schedule tree for a CPU: packed blocks around a register micro-kernel.

A task owns an MC x NC tile of C. For every KC step it packs A into panels of MR rows and B into panels of NR columns
(ROLLER's tile load: any index arithmetic, guard or inlined producer is evaluated there, once), then runs the
micro-kernel over all pairs of panels. The tile of C stays in the accumulator's type until its last step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roller_svc.ir.build import add, ceil_div, equal, least, less_equal, mod, mul, num, ref, sub
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, substitute
from roller_svc.ir.group import KernelGroup, TileAxis
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Branch, Compute, Let, Loop, LoopKind, Node, ScheduleTree, Scope, Storage
from roller_svc.lower.contraction import View
from roller_svc.lower.fused_axis import decoded, member_values
from roller_svc.lower.guards import without_guards_inside
from roller_svc.lower.micro_kernel_cpu import LANE, MicroKernel, Start, Steps, Tile

PACKED_A, PACKED_B, TILE_C = ".a_packed", ".b_packed", ".c_tile"


def lower_contraction_cpu(group: KernelGroup, program: RProgram) -> tuple[ScheduleTree, ...]:
    """One tree: parallel tasks, each a blocked contraction."""
    view = View.of(group, program)
    return (ScheduleTree(group.name, _Blocked(view, program, _lanes(program)).tasks()),)


def _lanes(program: RProgram) -> int:
    return program.unit.shape[-1]


@dataclass(frozen=True, slots=True)
class _Blocked:
    view: View
    program: RProgram
    lanes: int

    # tile sizes -----------------------------------------------------------------------------------------------------
    @property
    def mr(self) -> int:
        return self.program.thread[self.view.m.name]

    @property
    def nr(self) -> int:
        return self.program.thread[self.view.n.name]

    @property
    def m_panels(self) -> int:
        return self.program.block[self.view.m.name] // self.mr

    @property
    def n_panels(self) -> int:
        return self.program.block[self.view.n.name] // self.nr

    @property
    def kc(self) -> int:
        return min(self.program.block[self.view.k.name], self.view.k.extent)

    @property
    def steps(self) -> int:
        return ceil_div(self.view.k.extent, self.kc)

    # the tree, from the outside in ----------------------------------------------------------------------------------
    def tasks(self) -> tuple[Node, ...]:
        view = self.view
        k_left = least(num(self.kc), sub(num(view.k.extent), mul(ref("k.step"), num(self.kc))))
        step: tuple[Node, ...] = (*self._pack_b(), *self._pack_a(), *self._multiply())
        step = (Let("k.count", k_left if view.k.extent % self.kc else num(self.kc), step),)
        nodes: tuple[Node, ...] = (Loop("k.step", self.steps, LoopKind.SERIAL, step),)
        nodes = self._storages(nodes)
        for axis, panels, size in ((view.n, self.n_panels, self.nr), (view.m, self.m_panels, self.mr)):
            role = axis.role.value
            tile = panels * size
            left = sub(num(ceil_div(axis.extent, size)), mul(ref(f"{role}.task"), num(panels)))
            nodes = (
                Let(f"{role}.first", mul(ref(f"{role}.task"), num(tile)),
                    (Let(f"{role}.panels", least(num(panels), left), nodes),)),
            )  # fmt: skip
        for axis, tile in ((view.n, self.n_panels * self.nr), (view.m, self.m_panels * self.mr)):
            nodes = (Loop(f"{axis.role.value}.task", ceil_div(axis.extent, tile), LoopKind.PARALLEL, nodes),)
        for batch in reversed(view.batch):
            nodes = (Loop(batch.name, batch.extent, LoopKind.PARALLEL, nodes),)
        return nodes

    def _storages(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        dtype = self.view.dtype
        panels = (self.m_panels, self.n_panels) if self.steps > 1 else (1, 1)
        for name, shape in (
            (TILE_C, (*panels, self.mr, self.nr)),
            (PACKED_B, (self.n_panels, self.kc, self.nr)),
            (PACKED_A, (self.m_panels, self.kc, self.mr)),
        ):
            nodes = (Storage(name, dtype, shape, Scope.STACK, nodes),)
        return nodes

    # packing --------------------------------------------------------------------------------------------------------
    def _pack_a(self) -> tuple[Node, ...]:
        return self._pack(PACKED_A, self.view.factors.a, self.view.m, self.m_panels, self.mr)

    def _pack_b(self) -> tuple[Node, ...]:
        return self._pack(PACKED_B, self.view.factors.b, self.view.n, self.n_panels, self.nr)

    def _pack(self, packed: str, factor: Expr, axis: TileAxis, panels: int, size: int) -> tuple[Node, ...]:
        """packed[panel][k][lane] = factor there; beyond the edge of the axis 0, which adds nothing."""
        panel = ref(f"{axis.role.value}.panel")
        value: Expr = Cast(factor, self.view.dtype, implicit=True)

        def rows(at: dict[str, Expr], count: int) -> tuple[Node, ...]:
            row = Compute(packed, (panel, ref("k.row"), ref(LANE)), substitute(value, at))
            filled: list[Node] = [without_guards_inside(Loop(LANE, count, LoopKind.VECTOR, (row,)))]
            if count < size:
                place = (panel, ref("k.row"), add(num(count), ref(LANE)))
                filled.append(Loop(LANE, size - count, LoopKind.VECTOR, (Compute(packed, place, _zero(self.view)),)))
            position = add(mul(ref("k.step"), num(self.kc)), ref("k.row"))
            nodes = decoded(self.view.k, position, tuple(filled))
            return (Loop("k.row", self.kc, LoopKind.SERIAL, nodes, ref("k.count")),)

        nodes = self._panels(axis, size, rows)
        role = axis.role.value
        nodes = (Let(f"{role}.place", add(ref(f"{role}.first"), mul(panel, num(size))), nodes),)
        return (Loop(panel.name, panels, LoopKind.SERIAL, nodes, ref(f"{role}.panels")),)

    def _panels(
        self, axis: TileAxis, size: int, lanes: Callable[[dict[str, Expr], int], tuple[Node, ...]]
    ) -> tuple[Node, ...]:
        """What `lanes(coordinates, count)` does for the panel at `place`: whole, or cut at the edge of the axis.

        A whole panel inside one row of the innermost member axis has neighbours in memory for neighbours.
        """
        place, tail = ref(f"{axis.role.value}.place"), axis.extent % size
        looked_up = self._coordinates(axis)
        nodes: tuple[Node, ...] = ()
        if axis.extent >= size:
            nodes = self._with_coordinates(axis, size, lanes(looked_up, size))
            innermost = axis.members[-1]
            if len(axis.members) > 1 and innermost.extent >= size:
                along = {innermost.name: add(ref(innermost.name), ref(LANE))}
                inside_row = less_equal(mod(place, innermost.extent), num(innermost.extent - size))
                nodes = (Branch(inside_row, decoded(axis, place, lanes(along, size)), nodes),)
        if not tail:
            return nodes
        edge = self._with_coordinates(axis, tail, lanes(looked_up, tail))
        inside = less_equal(add(place, num(size)), num(axis.extent))
        return (Branch(inside, nodes, edge),) if nodes else edge

    def _coordinates(self, axis: TileAxis) -> dict[str, Expr]:
        """Where lane `lane` of the panel at `place` stands: computed on the spot, or looked up where that divides."""
        if len(axis.members) == 1:
            return {axis.members[0].name: add(ref(f"{axis.role.value}.place"), ref(LANE))}
        return {a.name: Load(f"{a.name}.of", (ref(LANE),), DType.INT32) for a in axis.members}

    def _with_coordinates(self, axis: TileAxis, count: int, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """The nodes below tables of the member axes' values, lane by lane, where there are several members."""
        if len(axis.members) == 1:
            return nodes
        position = add(ref(f"{axis.role.value}.place"), ref(LANE))
        fill = tuple(
            Compute(f"{name}.of", (ref(LANE),), value) for name, value in member_values(axis, position).items()
        )
        nodes = (Loop(LANE, count, LoopKind.SERIAL, fill), *nodes)
        for member in axis.members:
            nodes = (Storage(f"{member.name}.of", DType.INT32, (count,), Scope.STACK, nodes),)
        return nodes

    # the micro-kernel -----------------------------------------------------------------------------------------------
    def _multiply(self) -> tuple[Node, ...]:
        last = equal(ref("k.step"), num(self.steps - 1))
        finish = self._finish()
        done: tuple[Node, ...] = (Branch(last, finish),) if self.steps > 1 else finish
        nodes = self._micro_kernel() + done
        nodes = (
            Let("m.place", add(ref("m.first"), mul(ref("m.panel"), num(self.mr))), nodes),
        )
        nodes = (Loop("m.panel", self.m_panels, LoopKind.SERIAL, nodes, ref("m.panels")),)
        nodes = (Let("n.place", add(ref("n.first"), mul(ref("n.panel"), num(self.nr))), nodes),)
        return (Loop("n.panel", self.n_panels, LoopKind.SERIAL, nodes, ref("n.panels")),)

    def _tile_panel(self) -> tuple[Expr, Expr]:
        return (ref("m.panel"), ref("n.panel")) if self.steps > 1 else (num(0), num(0))

    def _micro_kernel(self) -> tuple[Node, ...]:
        dtype = self.view.dtype
        kernel = MicroKernel(
            self.mr, self.nr, self.lanes, dtype, (Steps("k.row", self.kc, ref("k.count")),),
            a=lambda row: Load(PACKED_A, (ref("m.panel"), ref("k.row"), row), dtype),
            b=lambda column: Load(PACKED_B, (ref("n.panel"), ref("k.row"), column), dtype),
        )  # fmt: skip
        tile = Tile(TILE_C, lambda row, column: (*self._tile_panel(), row, column))
        return kernel.nodes(tile, Start(tile, equal(ref("k.step"), num(0))) if self.steps > 1 else None)

    def _finish(self) -> tuple[Node, ...]:
        """The finished tile of C through the epilogue to memory."""
        n, m = self.view.n, self.view.m
        row = ref("m.row")

        def columns(at: dict[str, Expr], count: int) -> tuple[Node, ...]:
            total = Load(TILE_C, (*self._tile_panel(), row, ref(LANE)), self.view.dtype)
            stores = Loop(LANE, count, LoopKind.VECTOR, self.view.epilogue(total, at))
            nodes = decoded(m, add(ref("m.place"), row), (stores,))
            limit = sub(num(m.extent), ref("m.place")) if m.extent % self.mr else None
            return (Loop(row.name, self.mr, LoopKind.SERIAL, nodes, limit),)

        return self._panels(n, self.nr, columns)


def _zero(view: View) -> Const:
    return Const(0.0 if view.dtype.is_float else 0, view.dtype)


