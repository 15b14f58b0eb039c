"""Accesses of consecutive iterations of a vector loop: vectors in memory, vector variables, single elements."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from roller_svc.analysis.congruences import Congruence, Known, congruence
from roller_svc.analysis.index_ranges import fold, is_within_int32, range_of
from roller_svc.codegen.buffer_ref import BufferRef
from roller_svc.codegen.c.vector.types import register_name, vector_type
from roller_svc.codegen.scalar import Scalar
from roller_svc.ir.affine import affine
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Load, Op, OpKind, axes_of, loads_of, substitute
from roller_svc.ir.index import num, sub

Guard = tuple[tuple[Expr, bool], ...]


class NotVectorizableError(Exception):
    """The statement cannot be vectorized: the loop stays a scalar loop."""


@dataclass(frozen=True, slots=True)
class VectorValue:
    """A printed value."""

    text: str
    dtype: DType
    is_vector: bool  # else one value for all lanes


@dataclass(frozen=True, slots=True)
class VectorAccess:
    """`lanes` consecutive iterations of the loop over `var`, from `first` on."""

    scalar: Scalar
    var: str
    lanes: int
    first: int
    registers: dict[str, int]  # storage nodes that are vector variables → lanes of each
    guard: Guard = ()  # (condition, outcome) under which the expression is needed; else loads may be out of bounds
    sizes: tuple[tuple[Expr, int], ...] = ()  # index expressions known to be inside dimensions of these sizes
    congruences: Known | None = None  # of Lets in scope, if adjacent lanes may share elements

    def type_of(self, dtype: DType) -> str:
        return vector_type(dtype, self.lanes)

    def splat(self, value: VectorValue) -> str:
        if value.is_vector:
            return value.text
        type_, element = self.type_of(value.dtype), self.scalar.dialect.storage_type(value.dtype)
        if value.dtype is DType.FLOAT16:  # scalar arithmetic of halves is that of floats
            return f"({{ const {element} e_f32 = {value.text}; ({type_}){{{', '.join(['e_f32'] * self.lanes)}}}; }})"
        is_value = value.dtype.is_float and not value.dtype.is_narrow_float
        text = value.text if is_value else f"({element})({value.text})"
        return f"({text} - ({type_}){{0}})"  # x - 0 keeps the sign of a zero, x + 0 does not

    def varies(self, expr: Expr) -> bool:
        return self.var in axes_of(expr)

    def element(self, tensor: str, index: tuple[Expr, ...]) -> str:
        """Return the vector in memory, or the vector variable, of the iterations."""
        if not index or self.stride(tensor, index) != 1:
            raise NotVectorizableError
        buffer, here = self.scalar.buffers[tensor], self.index_at(index, 0)
        if tensor in self.registers:
            return self._register(tensor, here)
        return f"*({self.type_of(buffer.dtype)} *)({buffer.identifier} + {self.scalar.address(buffer, here)})"

    def offset(self, load: Load, index: tuple[Expr, ...]) -> str:
        buffer = self.scalar.buffers[load.tensor]
        if not any(load.bounds_checked):
            return self.scalar.address(buffer, index)
        return self.scalar.checked_address(replace(load, index=index), buffer)

    def element_at_lane(self, buffer: BufferRef, index: tuple[Expr, ...], lane: int) -> str:
        return f"{buffer.identifier}[{self.scalar.address(buffer, self.index_at(index, lane))}]"

    def index_at(self, index: tuple[Expr, ...], lane: int) -> tuple[Expr, ...]:
        values = {self.var: num(self.first + lane)}
        return tuple(fold(substitute(i, values), self.scalar.values) for i in index)

    def stride(self, tensor: str, index: tuple[Expr, ...]) -> int | None:
        """Return the stride in elements between consecutive lanes, or None if it is not constant."""
        total = 0
        for i, stride in zip(index, self.scalar.buffers[tensor].strides, strict=True):
            step = self._step(i)
            if step is None:
                return None
            total += step * stride
        return total

    def _step(self, index: Expr) -> int | None:
        """Return the stride of an index between consecutive lanes, or None. Invariant terms need not be affine."""
        known = affine(index)
        if known is None and not self.varies(index):
            return 0
        known = known or affine(fold(index, self.scalar.values))  # unrolled variables are constants
        if known is not None:
            return known.coeff(self.var)
        if isinstance(index, Op) and index.kind is OpKind.ADD:
            steps = [self._step(term) for term in index.args]
            return None if None in steps else sum(step for step in steps if step is not None)
        return None

    def lane_offsets(self, tensor: str, index: tuple[Expr, ...]) -> tuple[int, ...] | None:
        """Return the offset of each lane's element from that of the first lane, or None if one is not known."""
        offsets = [0] * self.lanes
        for i, stride in zip(index, self.scalar.buffers[tensor].strides, strict=True):
            steps = self._steps(i)
            if steps is None:
                return None
            offsets = [offset + step * stride for offset, step in zip(offsets, steps, strict=True)]
        return tuple(offsets)

    def _steps(self, index: Expr) -> tuple[int, ...] | None:
        """Return the difference of an index in each lane from the first lane; quotients and remainders by alignment."""
        step = self._step(index)
        if step is not None:
            return tuple(step * lane for lane in range(self.lanes))
        match index:
            case Op(kind=OpKind.ADD | OpKind.SUB as kind, args=(x, y)):
                first, second = self._steps(x), self._steps(y)
                if first is None or second is None:
                    return None
                sign = 1 if kind is OpKind.ADD else -1
                return tuple(a + sign * b for a, b in zip(first, second, strict=True))
            case Op(kind=OpKind.MUL, args=(x, Const(value=int(by)))):
                steps = self._steps(x)
                return None if steps is None else tuple(by * step for step in steps)
            case Op(kind=OpKind.FLOORDIV | OpKind.MOD as kind, args=(x, Const(value=int(by)))) if by > 0:
                start, steps = self._first_congruence(x), self._steps(x)
                period = math.gcd(start.modulus, by)
                if steps is None:
                    return None
                places = [start.remainder % period + step for step in steps]
                if period != by and not all(0 <= place < period for place in places):
                    return None
                values = [place // by if kind is OpKind.FLOORDIV else place % by for place in places]
                return tuple(value - values[0] for value in values)
            case _:
                return None

    def known_lanes(self, index: Expr) -> tuple[int, ...] | None:
        """Return the value of integer arithmetic of axes in each lane, or None if it is not known."""
        if self.congruences is None or loads_of(index) or not is_within_int32(index, self.scalar.ranges):
            return None
        start, steps = self._first_congruence(index), self._steps(index)
        return None if start.modulus or steps is None else tuple(start.remainder + step for step in steps)

    def is_same_in_all_lanes(self, cond: Expr) -> bool:
        """Return whether a condition on indices holds in all lanes or in none, such as the parts of a concatenation."""
        if not self.varies(cond):
            return True
        match cond:
            case Op(kind=OpKind.LAND | OpKind.LOR | OpKind.LNOT, args=args):
                return all(map(self.is_same_in_all_lanes, args))
            case Op(kind=OpKind.LT | OpKind.LE | OpKind.GT | OpKind.GE as kind, args=(x, y)):
                if self.congruences is None or loads_of(cond) or x.dtype.is_float or y.dtype.is_float:
                    return False
                steps, others = self._steps(x), self._steps(y)
                if steps is None or others is None:
                    return False
                start = self._first_congruence(sub(x, y))
                least = 0 if kind in (OpKind.LT, OpKind.GE) else 1  # x - y from here on is on one side
                apart = [start.remainder - least + step - other for step, other in zip(steps, others, strict=True)]
                return len({place // start.modulus if start.modulus else place < 0 for place in apart}) == 1
            case _:
                return False

    def _first_congruence(self, index: Expr) -> Congruence:
        (first,) = self.index_at((index,), 0)
        return congruence(first, self.congruences or {})

    def is_in_bounds(self, load: Load) -> bool:
        """Return whether the elements of all lanes exist, whatever the guard.

        So must those that an index reads: a mask bounds the value of an index, and not where it is read.
        """
        return not any(load.bounds_checked) and all(
            self._is_inside(index, size) and all(map(self.is_in_bounds, loads_of(index)))
            for index, size in zip(load.index, self.scalar.buffers[load.tensor].shape, strict=True)
        )

    def _is_inside(self, index: Expr, size: int) -> bool:
        if any(index == known and limit <= size for known, limit in self.sizes):
            return True
        known = range_of(fold(index, self.scalar.values), self.scalar.ranges)
        return known is not None and known[0] >= 0 and known[1] < size

    def _register(self, tensor: str, index: tuple[Expr, ...]) -> str:
        known = [int(i.value) for i in index if isinstance(i, Const)]
        if len(known) != len(index) or known[-1] % self.lanes or self.registers[tensor] != self.lanes:
            raise NotVectorizableError
        return register_name(self.scalar.buffers[tensor].identifier, known, self.lanes)

    def call(self, name: str, *args: str) -> str:
        self.scalar.helper(name)
        return f"{name}({', '.join(args)})"
