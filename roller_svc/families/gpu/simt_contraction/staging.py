"""Copy of a SIMT contraction's operand to shared memory, [buffer, row along k, column], one k-tile at a time.

Columns of m or n are contiguous there, so that threads read vectors. Operands contiguous along k are transposed on the
way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from roller_svc.analysis.fused_axis import member_values
from roller_svc.analysis.operand import Operand
from roller_svc.errors import require
from roller_svc.families.common.gpu.matrix.tile import StagedTile
from roller_svc.families.gpu.simt_contraction.copy_rounds import DividedThreads, divide_threads
from roller_svc.families.gpu.simt_contraction.workload import (
    K_ELEMENTS_PER_TRANSACTION,
    SimtOperandLoad,
    fused_stride,
    staged_row,
)
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Expr, Load, Select, axes_of, substitute
from roller_svc.ir.group import TileAxis
from roller_svc.ir.index import add, ceil_div, div, logical_and, lt, mod, mul, num, ref
from roller_svc.ir.program import Axis, Combine, TensorType, identity
from roller_svc.ir.schedule import Branch, Compute, CpAsync, Let, Loop, LoopKind, Node, Scope, Storage
from roller_svc.perf.machine import register_words


@dataclass(frozen=True, slots=True)
class ReductionSteps:
    """k-tiles of the reduced axis, `rows` points each.

    With `inner`, the rows of a k-tile vary this member of the axis and all others are fixed; these others then vary
    fastest from k-tile to k-tile, so the k-tiles of a window read the same elements from L1 or L2. Without it (None),
    rows are consecutive points of the fused axis.
    """

    axis: TileAxis
    rows: int
    inner: Axis | None

    @property
    def count(self) -> int:
        return ceil_div(self.axis.extent, self.rows)

    @property
    def has_tail(self) -> bool:
        return self.axis.extent % self.rows > 0

    @property
    def is_fused(self) -> bool:
        """Return whether a row is a position on several axes."""
        return self.inner is None and len(self.axis.members) > 1

    def position(self, step: Expr, row: Expr) -> Expr:
        """Return the position of a row on the fused axis; valid without `inner`."""
        return add(mul(step, num(self.rows)), row)

    def values(self, step: Expr, row: Expr) -> dict[str, Expr]:
        """Return the value of each reduced axis at a row of a k-tile."""
        if self.inner is None:
            return member_values(self.axis, self.position(step, row))
        others = TileAxis(self.axis.name, self.axis.role, tuple(a for a in self.axis.members if a is not self.inner))
        num_positions = math.prod(a.extent for a in others.members)
        values = member_values(others, mod(step, num_positions))
        return values | {self.inner.name: add(mul(div(step, num_positions), num(self.rows)), row)}


THREAD = ".thread"
MAX_UNROLLED_COPIES = 8  # more copies of one thread only lengthen the code


@dataclass(frozen=True, slots=True)
class SimtOperandCopy:
    """Copy of one operand into `buffer`; `columns` is the block's tile along `axis`, which is m or n."""

    buffer: str
    load: SimtOperandLoad
    axis: TileAxis
    columns: int
    steps: ReductionSteps
    threads: int
    warp: int
    types: Mapping[str, TensorType]

    @property
    def is_async(self) -> bool:
        return self.load.is_async(self.columns)

    @property
    def width(self) -> int:
        """Return the elements of one copy of a thread."""
        return self.load.width(self.columns, self.steps.rows, self.steps.inner)

    @property
    def operand(self) -> Operand:
        return self.load.operand

    @property
    def dtype(self) -> DType:
        return self.load.dtype

    # memory ----------------------------------------------------------------------------------------------------------
    @property
    def staged(self) -> StagedTile:
        """Return a stage: rows along k."""
        pad = staged_row(self.columns, self.dtype.bytes) - self.columns
        return StagedTile(self.dtype, k_major=False, rows=self.steps.rows, row=self.columns, pad=pad, swizzled=False)

    @property
    def is_prefetched(self) -> bool:
        return not self.is_async

    def allocate_registers(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Allocate a thread's elements in flight around the nodes; `cp.async` needs none."""
        if self.is_async:
            return nodes
        return (Storage(self._fetched, self._register_dtype, (self._rounds * self.width,), Scope.REGISTER, nodes),)

    @property
    def _fetched(self) -> str:
        return f"{self.buffer}.fetched"

    @property
    def _register_dtype(self) -> DType:
        """Return the type in registers.

        Vectors are converted when stored, so loads stay in flight. Single narrow floats are converted at once.
        """
        return self.operand.memory_dtype if self.width > 1 else self.dtype

    # nodes -----------------------------------------------------------------------------------------------------------
    def cp_async(self, step: Expr, buffer: Expr) -> tuple[Node, ...]:
        """Start asynchronous copies of a k-tile to a buffer."""
        source = require(self._source(step, num(0)), "source of a copied operand")
        guard = logical_and(self._inside(step), self.operand.guard)
        node = CpAsync(self.buffer, (buffer, ref(".row"), ref(".column")), source, self.width, guard)
        unroll = max(n for n in range(1, MAX_UNROLLED_COPIES + 1) if self._rounds % n == 0)
        return self._for_each_item(self._bind_axes(step, (source, guard), node), unroll)

    def load_to_registers(self, step: Expr) -> tuple[Node, ...]:
        """Load a k-tile to registers, 0 beyond the edges."""
        lane: Expr = ref(".lane") if self.width > 1 else num(0)
        source = self._source(step, lane)
        value: Expr = source or self.operand.expr
        guard = logical_and(self._inside(step), self.operand.guard if source else None)
        used = (value, guard)
        if value.dtype is not self._register_dtype:
            value = Cast(value, self._register_dtype, implicit=True)
        if guard is not None:
            value = Select(guard, value, identity(Combine.SUM, self._register_dtype), self._register_dtype)
        node: Node = Compute(self._fetched, (add(mul(ref(".round"), num(self.width)), lane),), value)
        if self.width > 1:
            node = Loop(".lane", self.width, LoopKind.VECTOR, (node,))
        return self._for_each_item(self._bind_axes(step, used, node), self._rounds)

    def store_to_shared(self, buffer: Expr) -> tuple[Node, ...]:
        """Store the loaded elements to a buffer."""
        value: Expr = Load(self._fetched, (add(mul(ref(".round"), num(self.width)), ref(".lane")),), self._register_dtype)
        if self._register_dtype is not self.dtype:
            value = Cast(value, self.dtype, implicit=True)
        row, column = ref(".row"), ref(".column")
        if self.operand.k_major:
            node = Compute(self.buffer, (buffer, add(row, ref(".lane")), column), value)
            return self._for_each_item((Loop(".lane", self.width, LoopKind.UNROLL, (node,)),), self._rounds)
        node = Compute(self.buffer, (buffer, row, add(column, ref(".lane"))), value)
        return self._for_each_item((Loop(".lane", self.width, LoopKind.VECTOR, (node,)),), self._rounds)

    def copy_through_registers(self, step: Expr, buffer: Expr) -> tuple[Node, ...]:
        """Copy a k-tile to a buffer."""
        return self.allocate_registers((*self.load_to_registers(step), *self.store_to_shared(buffer)))

    # positions -------------------------------------------------------------------------------------------------------
    @property
    def _items(self) -> int:
        return self.steps.rows * self.columns // self.width

    @property
    def _rounds(self) -> int:
        divided = self._divided_threads
        return ceil_div(self._items, self.threads) if divided is None else divided.rounds

    @property
    def _lead(self) -> str:
        """Return the axis along which elements are contiguous in memory."""
        return (self.steps.axis if self.operand.k_major else self.axis).members[-1].name

    def _for_each_item(self, nodes: tuple[Node, ...], unroll: int) -> tuple[Node, ...]:
        """Loop over a thread's items; bind `.row` and `.column` to the first element of each."""
        row, column = self._item_position()
        nodes = (Let(".row", row, (Let(".column", column, nodes),)),)
        nodes = self._where_items_are(nodes)
        if unroll == self._rounds:
            return (Loop(".round", unroll, LoopKind.UNROLL, nodes),)
        nodes = (Let(".round", add(mul(ref(".rounds"), num(unroll)), ref(".load")), nodes),)
        nodes = (Loop(".load", unroll, LoopKind.UNROLL, nodes),)
        return (Loop(".rounds", self._rounds // unroll, LoopKind.SERIAL, nodes),)

    def _where_items_are(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Guard nodes in rounds in which not every thread has an item."""
        divided = self._divided_threads
        if divided is None:
            item = add(mul(ref(".round"), num(self.threads)), ref(THREAD))
            return (Branch(lt(item, num(self._items)), nodes),) if self._items % self.threads else nodes
        if not divided.is_partial:
            return nodes
        has_item = divided.has_item(ref(".first"), ref(".round"))
        return (Let(".first", divided.partial_digit(ref(THREAD)), (Branch(has_item, nodes),)),)

    def _item_position(self) -> tuple[Expr, Expr]:
        """Return row and column of an item."""
        extents, divided = self._extents, self._divided_threads
        if divided is None:
            low, middle, high = self._digits(*extents[:-1])
        else:
            low, middle, high = divided.positions(ref(THREAD), ref(".round"))
        if self.operand.k_major:
            return add(mul(high, num(extents[0] * self.width)), mul(low, num(self.width))), middle
        return middle, mul(add(mul(high, num(extents[0])), low), num(self.width))

    @property
    def _divided_threads(self) -> DividedThreads | None:
        round_registers = 0 if self.is_async else self.width * register_words(self._register_dtype)
        return divide_threads(self._extents, self.threads, round_registers)

    @property
    def _extents(self) -> tuple[int, int, int]:
        """Return the extents of an item's digits.

        Adjacent threads read adjacent memory and store to different banks (`staged_row`).
        """
        if self.operand.k_major:
            group = math.gcd(K_ELEMENTS_PER_TRANSACTION, self.steps.rows)
            return group // self.width, self.columns, self.steps.rows // group
        columns = self.columns // self.width
        # if rows need divisions, a thread has many columns of few rows, else many rows of one column
        group_columns = math.gcd(columns, self.warp) if self.steps.inner is None and self.load.needs_division else columns
        return group_columns, self.steps.rows, columns // group_columns

    def _digits(self, *radices: int) -> tuple[Expr, ...]:
        """Return the number of a thread's item, threads * round + thread, in mixed radix with the least digit first.

        As far as the radices allow, a digit depends on the thread only, or on the round only, which is constant once
        unrolled. Else digits repeat after some rounds, with a carry that is constant.
        """
        digits: list[Expr] = []
        remaining: Expr = ref(THREAD)
        stride = self.threads  # step of a round in `remaining`, which is smaller; 0: `remaining` contains the round
        for radix in radices:
            if stride and stride % radix == 0:
                is_single = stride == radix
                digits.append(remaining if is_single else mod(remaining, radix))
                remaining, stride = num(0) if is_single else div(remaining, radix), stride // radix
            elif stride and radix % stride == 0:
                digits.append(add(mul(mod(ref(".round"), radix // stride), num(stride)), remaining))
                remaining, stride = div(ref(".round"), radix // stride), 0
            else:
                period = radix // math.gcd(stride, radix)
                item = add(mul(mod(ref(".round"), period), num(stride)), remaining)
                digits.append(mod(item, radix))
                carry = mul(div(ref(".round"), period), num(period * stride // radix))
                remaining, stride = add(carry, div(item, radix)), 0
        return (*digits, add(mul(ref(".round"), num(stride)), remaining))

    def _bind_axes(self, step: Expr, used: tuple[Expr | None, ...], node: Node) -> tuple[Node, ...]:
        """Bind the axes that the node uses to their values at the item."""
        at = member_values(self.axis, ref(".place")) | self.steps.values(step, ref(".row"))
        names = frozenset[str]().union(*(axes_of(e) for e in used if e is not None))
        nodes: tuple[Node, ...] = (node,)
        for name, value in at.items():
            if name in names:
                nodes = (Let(name, value, nodes),)
        block = ref(f"{self.axis.role.value}.block")
        return (Let(".place", add(mul(block, num(self.columns)), ref(".column")), nodes),)

    def _inside(self, step: Expr) -> Expr | None:
        return logical_and(
            lt(self.steps.position(step, ref(".row")), num(self.steps.axis.extent)) if self.steps.has_tail else None,
            lt(ref(".place"), num(self.axis.extent)) if self.axis.extent % self.columns else None,
        )

    def _source(self, step: Expr, lane: Expr) -> Load | None:
        """Return the load `lane` elements further; a fused axis that is contiguous counts as one axis."""
        if self.operand.source is None:
            return None
        source = _shift_axes(self.operand.source, {self._lead: add(ref(self._lead), lane)})
        shape = self.types[source.tensor].shape
        source = _collapse_axis(source, self.axis, ref(".place"), shape)
        if self.steps.is_fused:
            source = _collapse_axis(source, self.steps.axis, self.steps.position(step, ref(".row")), shape)
        return source


def _collapse_axis(load: Load, axis: TileAxis, position: Expr, shape: tuple[int, ...]) -> Load:
    """Return the load at a position of the fused axis, or the load itself if its address is not linear in that.

    Only the address counts: the last index takes the whole offset and may exceed its dimension.
    """
    step = fused_stride(load, axis, shape) if len(axis.members) > 1 else None
    if not step:
        return load
    invariant = _shift_axes(load, {a.name: num(0) for a in axis.members})
    return replace(invariant, index=(*invariant.index[:-1], add(invariant.index[-1], mul(position, num(step)))))


def _shift_axes(load: Load, at: Mapping[str, Expr]) -> Load:
    return replace(load, index=tuple(substitute(index, at) for index in load.index))
