"""Chunks of a sum with packed weights: unpacked in pairs, multiplied and added, then scaled once.

The weights of a chunk become float16 or bfloat16 in registers, which hold them exactly. Products are summed in float32.
Factors that the chunk shares multiply its sum. A sum that is infinite or NaN is computed again element by element:
there an infinite scale, or a large operand with a small scale, has the result of the products in their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from roller_svc.analysis.packed_sums import packed_sum
from roller_svc.analysis.unconditional import unconditional_loads
from roller_svc.errors import require
from roller_svc.families.gpu.reduction.thread_mapping import CHUNK, LANE, ROUND, VECTOR_ELEMENT, RowTiling, ThreadRows
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Load, Op, OpKind, axes_of, loads_of, rewrite, substitute
from roller_svc.ir.index import add, div, lt, mod, mul, num, ref
from roller_svc.ir.program import Combine, TensorExpr
from roller_svc.ir.schedule import Branch, Compute, Let, Loop, LoopKind, Node, Storage
from roller_svc.schedule.nest_statements import acc_name, register, wrap_in_storages

CHAINS = 4  # independent sums of a thread hide the latency of an addition
ELEMENT, TOTAL = ".element", ".total"


@dataclass(frozen=True, slots=True)
class PackedChunks:
    """The chunks of one statement, whose expressions are over loop variables."""

    statement: TensorExpr
    rows: ThreadRows
    tiling: RowTiling
    weight: Expr
    dtype: DType  # of weights in registers
    factors: tuple[Expr, ...]  # of an element
    shared: tuple[Expr, ...]  # of a chunk
    body: Expr
    is_along_row: bool  # whether pairs are elements of the chunk, rather than adjacent rows

    @property
    def _chains(self) -> int:
        return max(1, CHAINS // self.rows.count)

    def storages(self) -> list[Storage]:
        return [register(self._sums, DType.FLOAT32, *self.rows.shape, self._chains)]

    def accumulate(self) -> tuple[Node, ...]:
        """Add one chunk to the accumulators of the thread's rows."""
        chain = ref(".chain")
        zero = Compute(self._sums, (*self.rows.elements, chain), Const(0.0, DType.FLOAT32))
        start = self.rows.for_each_row((Loop(chain.name, self._chains, LoopKind.UNROLL, (zero,)),), vector=False)
        total: Expr = self._load_sum(num(0))
        for i in range(1, self._chains):
            total = Op(OpKind.ADD, (total, self._load_sum(num(i))), DType.FLOAT32)
        for factor in self.shared:
            total = _multiply(total, substitute(factor, {VECTOR_ELEMENT: num(0)}))
        finish = Compute(acc_name(self.statement.output), self.rows.elements, total, Combine.SUM)
        chunks, storages, copies = self._copied_chunks()
        products = chunks._along_row() if self.is_along_row else chunks._across_rows()
        return (
            *start,
            *wrap_in_storages(storages, (*copies, *products)),
            *self.rows.for_each_row((finish,)),
        )

    def _copied_chunks(self) -> tuple[PackedChunks, list[Storage], list[Node]]:
        """Return the chunks over elements of factors in registers, which are loaded together for all rows."""
        ranges, place = self.rows.element_ranges, ref(VECTOR_ELEMENT)
        storages: list[Storage] = []
        copies: list[Node] = []
        copied: dict[Load, Load] = {}
        for load in dict.fromkeys(load for factor in self.factors for load in unconditional_loads(factor)):
            used = axes_of(load)
            if VECTOR_ELEMENT not in used or any(x is not load for x in loads_of(load)):
                continue
            own = [(var, extent) for var, extent in ranges.items() if var in used]
            name = f"{load.tensor}.elements{len(copied)}"
            copied[load] = Load(name, (*(ref(var) for var, _ in own), place), load.dtype)
            storages.append(register(name, load.dtype, *(extent for _, extent in own), self.tiling.vector_elems))
            copy = Compute(name, copied[load].index, load)
            copies += _unrolled(own, (Loop(place.name, self.tiling.vector_elems, LoopKind.VECTOR, (copy,)),))
        factors = tuple(_replace_loads(factor, copied) for factor in self.factors)
        return replace(self, factors=factors), storages, copies

    def _along_row(self) -> tuple[Node, ...]:
        """Unpack the chunk of each row of weights, which other rows of the thread share."""
        count, (weight, storages, copies) = self.tiling.vector_elems, self._copied_words()
        own, others = self._split_elements(axes_of(weight))
        place = ref(VECTOR_ELEMENT)
        product = self._product(Load(self._weights, (place,), self.dtype))
        step = Compute(self._sums, (*self.rows.elements, mod(place, self._chains)), product, Combine.SUM)
        nodes = _unrolled(others, (Loop(place.name, count, LoopKind.UNROLL, (step,)),))
        unpack = Loop(place.name, count, LoopKind.VECTOR, (Compute(self._weights, (place,), weight),))
        nodes = wrap_in_storages((register(self._weights, self.dtype, count),), (unpack, *nodes))
        return wrap_in_storages(storages, (*copies, *_unrolled(own, nodes)))

    def _across_rows(self) -> tuple[Node, ...]:
        """Unpack the weights of the thread's adjacent rows, one element of the chunk after the other."""
        var = require(self.rows.vector_element, "vector of rows")
        count = self.rows.element_ranges[var]
        own, others = self._split_elements(axes_of(self.weight) | {var})
        own = [loop for loop in own if loop[0] != var]
        product = self._product(Load(self._weights, (ref(var),), self.dtype))
        chain = mod(ref(VECTOR_ELEMENT), self._chains)
        step = Compute(self._sums, (*self.rows.elements, chain), product, Combine.SUM)
        nodes = _unrolled(others, (Loop(var, count, LoopKind.VECTOR, (step,)),))
        unpack = Loop(var, count, LoopKind.VECTOR, (Compute(self._weights, (ref(var),), self.weight),))
        nodes = wrap_in_storages((register(self._weights, self.dtype, count),), (unpack, *nodes))
        return _unrolled([(VECTOR_ELEMENT, self.tiling.vector_elems), *own], nodes)

    def _copied_words(self) -> tuple[Expr, list[Storage], list[Node]]:
        """Return the weight over words in registers, for words of adjacent rows, which are loaded together."""
        var = self.rows.vector_element
        if var is None:
            return self.weight, [], []
        count = self.rows.element_ranges[var]
        copied: dict[Load, Load] = {}
        for load in dict.fromkeys(loads_of(self.weight)):
            if load.index and var in axes_of(load.index[-1]) and VECTOR_ELEMENT not in axes_of(load):
                copied[load] = Load(f"{load.tensor}.words{len(copied)}", (ref(var),), load.dtype)
        storages = [register(copy.tensor, load.dtype, count) for load, copy in copied.items()]
        copies: list[Node] = [
            Loop(var, count, LoopKind.VECTOR, (Compute(copy.tensor, copy.index, load),)) for load, copy in copied.items()
        ]
        return _replace_loads(self.weight, copied), storages, copies

    def redo(self) -> tuple[Node, ...]:
        """Compute the sums again from the statement's own products if one is infinite or NaN."""
        acc, elements = acc_name(self.statement.output), self.rows.elements
        tiling = self.tiling
        total = Load(TOTAL, (), DType.FLOAT32)
        size = Op(OpKind.ABS, (total,), DType.FLOAT32)
        is_finite = Op(OpKind.LT, (size, Const(math.inf, DType.FLOAT32)), DType.INT8)
        add_row = Compute(TOTAL, (), Load(acc, elements, DType.FLOAT32), Combine.SUM)
        product = self.rows.for_each_row((Compute(acc, elements, self.body, Combine.SUM),), vector=False)
        nodes: tuple[Node, ...] = (Let(VECTOR_ELEMENT, mod(ref(ELEMENT), tiling.vector_elems), product),)
        nodes = tiling.at_positions(nodes)
        if tiling.chunks % tiling.lanes:
            nodes = (Branch(lt(ref(CHUNK), num(tiling.chunks)), nodes),)
        chunk = add(mul(ref(ROUND), num(tiling.lanes)), ref(LANE))
        nodes = (Let(ROUND, div(ref(ELEMENT), tiling.vector_elems), (Let(CHUNK, chunk, nodes),)),)
        nodes = (
            *self.rows.for_each_row((Compute(acc, elements, Const(0.0, DType.FLOAT32)),), vector=False),
            Loop(ELEMENT, tiling.iterations * tiling.vector_elems, LoopKind.SERIAL, nodes),
        )
        check = (
            Compute(TOTAL, (), Const(0.0, DType.FLOAT32)),
            *self.rows.for_each_row((add_row,), vector=False),
            Branch(Op(OpKind.LNOT, (is_finite,), DType.INT8), nodes, unlikely=True),
        )
        return wrap_in_storages((register(TOTAL, DType.FLOAT32),), check)

    # parts ----------------------------------------------------------------------------------------------------------
    @property
    def _sums(self) -> str:
        return f"{self.statement.output}.chunk"

    @property
    def _weights(self) -> str:
        return f"{self.statement.output}.weights"

    def _load_sum(self, chain: Expr) -> Expr:
        return Load(self._sums, (*self.rows.elements, chain), DType.FLOAT32)

    def _product(self, weight: Expr) -> Expr:
        product = weight
        for factor in self.factors:
            product = _multiply(product, factor)
        return product

    def _split_elements(self, used: frozenset[str]) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        """Return the loops over the thread's rows that a weight depends on, and the others."""
        loops = list(self.rows.element_ranges.items())
        return [x for x in loops if x[0] in used], [x for x in loops if x[0] not in used]


def packed_chunks(statement: TensorExpr, rows: ThreadRows, tiling: RowTiling, apply: Callable[[Expr], Expr]) -> PackedChunks | None:
    """Return the chunks of a statement, or None if its weights are not packed.

    Args:
        apply: Rewrites the statement's expressions over loop variables.
    """
    along = tiling.axes[-1].name, tiling.vector_elems
    packed = packed_sum(statement, *along)
    is_along_row = packed is not None
    if packed is None and rows.vector is not None:
        packed = packed_sum(statement, rows.vector, rows.program.thread[rows.vector])
    if packed is None:
        return None
    shared = packed.shared_factors(*along)
    factors = tuple(apply(f) for f in packed.factors if f not in shared)
    return PackedChunks(
        statement,
        rows,
        tiling,
        apply(packed.weight),
        packed.dtype,
        factors,
        tuple(map(apply, shared)),
        apply(statement.body),
        is_along_row,
    )


def _multiply(a: Expr, b: Expr) -> Expr:
    return Op(OpKind.MUL, (a, b), DType.FLOAT32)


def _replace_loads(expr: Expr, copies: Mapping[Load, Load]) -> Expr:
    return rewrite(expr, lambda node: copies.get(node, node) if isinstance(node, Load) else node)


def _unrolled(loops: Sequence[tuple[str, int]], nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return the nodes in unrolled loops, the first outermost."""
    for var, extent in reversed(loops):
        nodes = (Loop(var, extent, LoopKind.UNROLL, nodes),)
    return nodes
