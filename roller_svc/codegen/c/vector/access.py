"""Where neighbouring iterations of a loop read and write: vectors in memory, vector variables, single elements."""

from __future__ import annotations

from dataclasses import dataclass, replace

from roller_svc.analysis.index_ranges import fold, range_of
from roller_svc.codegen.buffer_ref import BufferRef
from roller_svc.codegen.c.vector.types import register_name, vector_type
from roller_svc.codegen.scalar import Scalar
from roller_svc.ir.affine import affine
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Load, Op, OpKind, axes_of, substitute
from roller_svc.ir.index import num

Guard = tuple[tuple[Expr, bool], ...]


class NotVectorizableError(Exception):
    """This statement has no vector form here: the loop is printed as a loop."""


@dataclass(frozen=True, slots=True)
class VectorValue:
    """Text of a value of that type; `wide`: a vector, else one value for all lanes."""

    text: str
    dtype: DType
    is_vector: bool


@dataclass(frozen=True, slots=True)
class VectorAccess:
    """`lanes` neighbouring iterations of the loop over `var`, from `first` on.

    `guard`: conditions, each with the outcome, under which the expression at hand is wanted. What is read where they
    fail need not exist. `sizes`: index expressions that are inside dimensions of these sizes in any case.
    """

    scalar: Scalar
    var: str
    lanes: int
    first: int
    registers: dict[str, int]  # storage nodes that are vector variables → lanes of each
    guard: Guard = ()
    sizes: tuple[tuple[Expr, int], ...] = ()

    def type_of(self, dtype: DType) -> str:
        return vector_type(dtype, self.lanes)

    def splat(self, value: VectorValue) -> str:
        if value.is_vector:
            return value.text
        type_, element = self.type_of(value.dtype), self.scalar.dialect.storage_type(value.dtype)
        if value.dtype is DType.FLOAT16:  # arithmetic of single halves is that of floats
            return f"({{ const {element} e_f32 = {value.text}; ({type_}){{{', '.join(['e_f32'] * self.lanes)}}}; }})"
        is_value = value.dtype.is_float and not value.dtype.is_narrow_float
        text = value.text if is_value else f"({element})({value.text})"
        return f"({text} - ({type_}){{0}})"  # x - 0 keeps the sign of a zero, x + 0 does not

    def varies(self, expr: Expr) -> bool:
        return self.var in axes_of(expr)

    def element(self, tensor: str, index: tuple[Expr, ...]) -> str:
        """The vector in memory, or the vector variable, that these neighbours are."""
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
        """Elements from each lane's place to the next lane's; None where that is no constant."""
        total = 0
        for i, stride in zip(index, self.scalar.buffers[tensor].strides, strict=True):
            step = self._step(i)
            if step is None:
                return None
            total += step * stride
        return total

    def _step(self, index: Expr) -> int | None:
        """How much an index grows from each lane to the next; what does not move may be any sum of remainders."""
        known = affine(index)
        if known is None and not self.varies(index):
            return 0
        known = known or affine(fold(index, self.scalar.values))  # what is unrolled is a number by now
        if known is not None:
            return known.coeff(self.var)
        if isinstance(index, Op) and index.kind is OpKind.ADD:
            steps = [self._step(term) for term in index.args]
            return None if None in steps else sum(step for step in steps if step is not None)
        return None

    def is_in_bounds(self, load: Load) -> bool:
        """Whether every lane's element exists, wanted or not."""
        return not any(load.bounds_checked) and all(
            self._is_inside(index, size)
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
