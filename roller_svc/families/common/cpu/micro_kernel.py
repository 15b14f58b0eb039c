"""Micro-kernel of a contraction on a CPU: a register tile of C accumulated over loops along k (BLIS)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roller_svc.families.common.cpu.dot import WORD, DotOperands
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Expr, Load, Op, OpKind
from roller_svc.ir.index import add, mul, num, ref
from roller_svc.ir.program import Combine, identity
from roller_svc.ir.schedule import Branch, Compute, Let, Loop, LoopKind, Node, Routine, Scope, Storage

LANE = ".lane"
ACC, ROW_B = ".acc", ".b"
ROW, VECTOR = ".row", ".vector"
SCARCE_REGISTERS = 16  # vector registers of AVX2; AVX-512, NEON and SVE have more


@dataclass(frozen=True, slots=True)
class CTile:
    """Destination of a register tile: a tensor, and the index of (row, column) in it."""

    tensor: str
    index: Callable[[Expr, Expr], tuple[Expr, ...]]


@dataclass(frozen=True, slots=True)
class KLoop:
    """One loop along k: `var` from 0 to extent - 1, below `limit`; with `first` from there, at most `limit` times."""

    var: str
    extent: int
    limit: Expr | None = None
    first: Expr | None = None
    kind: LoopKind = LoopKind.SERIAL

    def nodes(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        """Return the loop around the nodes."""
        if self.first is None:
            return (Loop(self.var, self.extent, self.kind, body, self.limit),)
        number = self.number
        return (Loop(number.name, self.extent, self.kind, (Let(self.var, add(self.first, number), body),), self.limit),)

    @property
    def number(self) -> AxisRef:
        """Number of the current step, if the loop has a first one."""
        return ref(f"{self.var}.number")


@dataclass(frozen=True, slots=True)
class MicroKernel:
    """C[row, column] += sum of a(row) * b(column) over `k_loops`, outermost first, in rows x columns registers.

    `a` returns one element of A, broadcast to the lanes of a row. `b` returns one element of B; adjacent columns are
    contiguous. Both may use the variables of `k_loops`.
    """

    rows: int
    columns: int  # a multiple of `lanes`
    lanes: int
    dtype: DType
    k_loops: tuple[KLoop, ...]
    a: Callable[[Expr], Expr]
    b: Callable[[Expr], Expr]
    registers: int  # vector registers of the CPU
    prefetches: tuple[Node, ...] = ()  # executed in each innermost step
    packs_b: Callable[[Expr], Load] | None = None  # where to store the row of B that a step has loaded
    dot: DotOperands | None = None  # elements are words, multiplied by dot-product instructions
    initial: Callable[[Expr, Expr], Expr] | None = None  # initial accumulator at (row, column), 0 by default
    scaled: Callable[[Expr, Expr, Expr], Expr] | None = None  # a sum at (row, column) times its scale, which is stored

    def nodes(self, tile: CTile, fresh: Expr | None = None) -> tuple[Node, ...]:
        """Initialise the accumulators, loop over k and store the tile.

        The store overwrites where `fresh` holds (None: always) and accumulates into the tile elsewhere. Partial sums of
        one k block are added to C only at its end: a sum of K terms in blocks of kc then errs by kc + K / kc roundings
        instead of K (blocked summation; Higham, Accuracy and Stability, 2002, section 4.2).
        """
        acc_index = (ref(ROW), self._column())
        zero = identity(Combine.SUM, self.dtype)
        zeros = self._over_tile(Compute(ACC, acc_index, zero if self.initial is None else self.initial(*acc_index)))
        loops = self._step()
        for step in reversed(self.k_loops):
            loops = step.nodes(loops)
        body = (zeros, *loops, self._store(tile, fresh))
        accumulators = Storage(ACC, self.dtype, (self.rows, self.columns), Scope.REGISTER, body)
        return (Routine("multiply", (accumulators,)),)

    def _store(self, tile: CTile, fresh: Expr | None) -> Node:
        acc_index = (ref(ROW), self._column())
        c_index, total = tile.index(*acc_index), self._total(*acc_index)
        store = self._over_tile(Compute(tile.tensor, c_index, total))
        if fresh is None:
            return store
        accumulate = self._over_tile(Compute(tile.tensor, c_index, total, Combine.SUM))
        return Branch(fresh, (store,), (accumulate,))

    def _total(self, row: Expr, column: Expr) -> Expr:
        total = Load(ACC, (row, column), self.dtype)
        return total if self.scaled is None else self.scaled(total, row, column)

    def _step(self) -> tuple[Node, ...]:
        """Load one row of B into registers, then multiply-add each element of A with each vector."""
        column = self._column()
        loads = self._over_columns(Compute(ROW_B, (column,), self.b(column)))
        sums = self._over_tile(self._multiply_add(column))
        nodes = (loads, *self._pack_b(column), sums)
        row_b = Storage(ROW_B, self._operand_dtype, (self.columns,), Scope.REGISTER, nodes, no_rematerialize=self._pins_b())
        return (*self.prefetches, row_b)

    @property
    def _operand_dtype(self) -> DType:
        return self.dtype if self.dot is None else WORD

    def _multiply_add(self, column: Expr) -> Compute:
        a, b = self.a(ref(ROW)), Load(ROW_B, (column,), self._operand_dtype)
        acc_index = (ref(ROW), column)
        if self.dot is None:
            return Compute(ACC, acc_index, Op(OpKind.MUL, (a, b), self.dtype), Combine.SUM)
        words = (a, b) if self.dot.a_is_first else (b, a)
        return Compute(ACC, acc_index, Op(self.dot.operator, (Load(ACC, acc_index, self.dtype), *words), self.dtype))

    def _pack_b(self, column: Expr) -> tuple[Node, ...]:
        if self.packs_b is None:
            return ()
        packed = self.packs_b(column)
        return (self._over_columns(Compute(packed.tensor, packed.index, Load(ROW_B, (column,), self._operand_dtype))),)

    def _pins_b(self) -> bool:
        """Return whether to pin the loads of B in registers.

        gcc otherwise folds the loads into the multiply-adds, once for each row, if registers seem scarce or rows are
        few.
        """
        vectors = self.columns // self.lanes
        if self.packs_b is not None:
            return True
        return self.rows > 1 and self.rows * vectors + vectors + 1 <= self.registers

    def _column(self) -> Expr:
        return add(mul(ref(VECTOR), num(self.lanes)), ref(LANE))

    def _over_tile(self, *nodes: Node) -> Node:
        return Loop(ROW, self.rows, LoopKind.UNROLL, (self._over_columns(*nodes),))

    def _over_columns(self, *nodes: Node) -> Node:
        lanes = Loop(LANE, self.lanes, LoopKind.VECTOR, nodes)
        return Loop(VECTOR, self.columns // self.lanes, LoopKind.UNROLL, (lanes,))
