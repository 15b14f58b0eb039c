"""Expressions of vector loops → text on vectors.

Statements of vector loops → text on vectors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeGuard

from roller_svc.analysis.congruences import congruence
from roller_svc.analysis.index_ranges import fold, is_within_int32, range_of
from roller_svc.analysis.lookup_tables import (
    BYTE_ENTRIES,
    LookupTables,
    TableIndex,
    find_byte_index,
    is_float_product,
    without_casts,
)
from roller_svc.analysis.operand import can_represent_all
from roller_svc.analysis.unconditional import unconditional_loads
from roller_svc.codegen.buffer_ref import BufferRef
from roller_svc.codegen.c.vector.access import NotVectorizableError, VectorAccess, VectorValue
from roller_svc.codegen.c.vector.elementary import has_function
from roller_svc.codegen.c.vector.helpers import (
    BUILTIN,
    INTEGERS,
    LIBRARY_ARITY,
    UNSIGNED,
    WORD_BYTES,
    has_nontemporal_store,
)
from roller_svc.codegen.c.vector.types import vector_type
from roller_svc.codegen.c.vector.window_loads import (
    count_elements,
    find_lane_ranges,
    find_quotient,
    find_total_growth,
)
from roller_svc.codegen.c.vector.words import are_contiguous
from roller_svc.codegen.dialect import HELPER_FUNCTIONS, LIBRARY, SHORT, exceeds_type
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import (
    COMPARISONS,
    AxisRef,
    Cast,
    Const,
    Expr,
    Load,
    Op,
    OpKind,
    Select,
    children,
    iter_subexpressions,
    loads_of,
    rewrite,
    substitute,
)
from roller_svc.ir.index import add, div, mul, num
from roller_svc.ir.program import COMBINE_OPS
from roller_svc.ir.schedule import Compute

SHORT_INTEGERS = (DType.INT8, DType.UINT8, DType.INT16, DType.UINT16)
# A conditional load repeats its conditions; with more of them the source would grow too fast.
MAX_GUARDS = 4
# Lanes that are loaded or stored one by one are unrolled; with more of them they stay a loop.
MAX_UNROLLED_LANES = 16
# Narrower vectors have no permutation by variable lanes.
MIN_PERMUTED_LANES = 8
MIN_PERMUTED_BYTES = 16  # of a register
_SIGNS = {
    OpKind.ADD: "+", OpKind.SUB: "-", OpKind.MUL: "*", OpKind.DIV: "/", OpKind.BITAND: "&", OpKind.BITOR: "|",
    OpKind.BITXOR: "^",
}  # fmt: skip
_TRUTHS = COMPARISONS | {OpKind.LAND, OpKind.LOR, OpKind.LNOT, OpKind.ISNAN, OpKind.ISINF}
_INTEGER_HELPERS = frozenset({OpKind.MAX, OpKind.MIN, OpKind.RELU, OpKind.SQUARE, OpKind.ABS, OpKind.SIGN})
_SAME_OR_HELPER = {OpKind.ABS: "abs", OpKind.FMAX: "fmax", OpKind.FMIN: "fmin"}


@dataclass(frozen=True, slots=True)
class Vector(VectorAccess):
    """Prints `lanes` consecutive iterations of the loop over `var`, from `first` on, as vectors."""

    table: TableIndex | None = None  # prints a lookup table over this index instead, one entry a lane
    first_entry: int = 0  # of the table
    permutes_bytes: bool = False  # an instruction looks up bytes in two registers

    def to_elements(self, value: Expr, dtype: DType) -> str:
        """Print an expression as elements in memory of a type."""
        if not self.varies(value):
            text = self._if_needed(value, self.scalar.to_element(value, dtype))
            return self.splat(VectorValue(text, dtype, is_vector=False))
        if dtype.is_narrow_float:
            value = self.scalar.skip_casts(value, dtype)
            if (copied := self._copied_bits(value, dtype)) is not None:
                return f"({self.type_of(dtype)}){copied}"
            wide = self._as_float32(value, dtype)
            return self.call(f"from_f32_{self.type_of(dtype)}", self.splat(wide))
        piece = self.value(value)
        if value.dtype.compute is not dtype.compute:
            piece = self.convert(piece, dtype)
        return self.splat(piece)

    def _copied_bits(self, value: Expr, dtype: DType) -> str | None:
        """Print the elements' bits in memory if values of that type are only loaded or selected, else return None."""
        bits = UNSIGNED[dtype.bits]
        match value:
            case Load(tensor=tensor) if self.scalar.buffers[tensor].dtype is dtype and self.varies(value):
                return f"({self.type_of(bits)}){self._elements(value)}"
            case Const(value=0.0) if str(value.value) == "0.0":
                return f"({self.type_of(bits)}){{0}}"
            case Select(cond=cond, then=then, otherwise=otherwise) if self.varies(cond):
                a = self._under_condition(cond, holds=True)._copied_bits(then, dtype)
                b = self._under_condition(cond, holds=False)._copied_bits(otherwise, dtype)
                if a is None or b is None:
                    return None
                return self.call(f"select_{self.type_of(bits)}", self.mask(cond, dtype.bits), a, b)
            case _:
                return None

    # values -----------------------------------------------------------------------------------------------------------
    def value(self, expr: Expr) -> VectorValue:
        """Print an expression in the value type of its dtype."""
        dtype = expr.dtype.compute
        if not self.varies(expr):
            return VectorValue(self._if_needed(expr, self.scalar.value(expr)), dtype, is_vector=False)
        if self.table is not None and (entries := self._entries(expr, self.table)) is not None:
            return entries
        if self.congruences is not None and not self.guard and self._is_uniform(expr):
            text = self.splat(VectorValue(self.scalar.value(self._first_value(expr)), dtype, is_vector=False))
            return VectorValue(text, dtype, is_vector=True)
        if (looked_up := self._lookup(expr)) is not None:
            return looked_up
        match expr:
            case Load():
                buffer = self.scalar.buffers[expr.tensor]
                return self.convert(VectorValue(self._elements(expr), buffer.dtype, is_vector=True), dtype)
            case AxisRef():
                if self.scalar.exceeds_int32(expr):
                    raise NotVectorizableError
                return self._integers(dtype, range(self.first, self.first + self.lanes))
            case Cast(arg=arg):
                return self._cast(expr, arg)
            case Select():
                return self._select(expr)
            case Op(kind=kind) if kind in _TRUTHS:
                return self._truth(expr)
            case Op():
                return self._op(expr)
            case _:
                raise NotVectorizableError

    def _entries(self, expr: Expr, table: TableIndex) -> VectorValue | None:
        """Print the table's index, or elements of a tensor at it, for the entries of a register; None for others."""
        dtype = expr.dtype.compute
        if expr == table.value:
            return self._integers(dtype, (self.first_entry + i & table.mask for i in range(self.lanes)))
        match expr:
            case Load(index=(index,)) if without_casts(index) == table.value:
                buffer = self.scalar.buffers[expr.tensor]
                at = f" + {self.first_entry}" if self.first_entry else ""
                text = f"*({self.type_of(buffer.dtype)} *)({buffer.identifier}{at})"
                return self.convert(VectorValue(text, buffer.dtype, is_vector=True), dtype)
            case _:
                return None

    def _integers(self, dtype: DType, numbers: Iterable[int]) -> VectorValue:
        """Print a vector of known integers."""
        return VectorValue(f"({self.type_of(dtype)}){{{', '.join(map(str, numbers))}}}", dtype, is_vector=True)

    def convert(self, piece: VectorValue, dtype: DType) -> VectorValue:
        """Convert a value to another value type, or an element in memory to a value."""
        if piece.dtype is dtype:
            return piece
        if dtype is DType.BOOL:
            return self._truth_of(f"({self.splat(piece)} != 0)", piece.dtype.bits, DType.BOOL)
        source = DType.UINT8 if piece.dtype is DType.BOOL else piece.dtype
        name = f"from_{SHORT[source]}_{self.type_of(dtype)}"
        text = self.splat(piece)
        if piece.dtype is DType.BOOL:
            text = f"({self.type_of(DType.UINT8)}){text}"
        return VectorValue(self.call(name, text), dtype, is_vector=True)

    def _cast(self, cast: Cast, arg: Expr) -> VectorValue:
        dtype = cast.dtype
        if (quantized := self._quantized(cast)) is not None:
            return self.convert(quantized, dtype)
        if dtype is DType.INT32 and isinstance(arg, Cast) and arg.dtype in SHORT_INTEGERS and arg.arg.dtype.compute.is_float:
            return self._whole_number(arg)
        if not dtype.is_narrow_float or cast.implicit or self.scalar.is_rounded_to(dtype, arg):
            return self.convert(self.value(arg), dtype.compute)
        narrow = self.call(f"from_f32_{self.type_of(dtype)}", self._as_float32(arg, dtype).text)
        return VectorValue(self.call(f"from_{SHORT[dtype]}_{self.type_of(DType.FLOAT32)}", narrow), DType.FLOAT32, is_vector=True)

    def _whole_number(self, cast: Cast) -> VectorValue:
        """Convert a float to a short integer whose value is needed in 32 bits: without the elements between."""
        if (quantized := self._quantized(cast)) is not None:
            return quantized
        piece = self.value(cast.arg)
        clamped = self.call(f"clamped_{SHORT[cast.dtype]}_{self.type_of(piece.dtype)}", self.splat(piece))
        return VectorValue(f"__builtin_convertvector({clamped}, {self.type_of(DType.INT32)})", DType.INT32, is_vector=True)

    def _quantized(self, cast: Cast) -> VectorValue | None:
        """Print a float that is rounded, plus a byte, as a byte's value in 32 bits; None for other casts to bytes."""
        match cast:
            case Cast(dtype=DType.INT8 | DType.UINT8, arg=Op(OpKind.ADD, (Op(OpKind.ROUND, (x,)), Cast(zero, DType.FLOAT32)))) if (
                x.dtype is DType.FLOAT32 and zero.dtype in (DType.INT8, DType.UINT8)
            ):
                added = self.splat(self.convert(self.value(zero), DType.INT32))
                name = f"quantized_{SHORT[cast.dtype]}_{self.type_of(DType.FLOAT32)}"
                return VectorValue(self.call(name, self.splat(self.value(x)), added), DType.INT32, is_vector=True)
            case _:
                return None

    def _as_float32(self, value: Expr, dtype: DType) -> VectorValue:
        """Convert a value to the float32 that is rounded to a narrow type."""
        piece = self.value(value)
        if not self.scalar.needs_odd(value, dtype):
            return self.convert(piece, DType.FLOAT32)
        name = f"odd_{SHORT[piece.dtype]}_{self.type_of(DType.FLOAT32)}"
        return VectorValue(self.call(name, self.splat(piece)), DType.FLOAT32, is_vector=True)

    def _select(self, select: Select) -> VectorValue:
        dtype = select.dtype.compute
        if self.is_same_in_all_lanes(select.cond):
            a, b = self.splat(self.value(select.then)), self.splat(self.value(select.otherwise))
            type_ = self.type_of(dtype)  # the type of an arithmetic result lacks the typedef's alignment
            chosen = self._if_needed(select.cond, self.scalar.value(self._first_value(select.cond)))
            return VectorValue(f"({chosen} ? ({type_}){a} : ({type_}){b})", dtype, is_vector=True)
        a = self.splat(self._under_condition(select.cond, holds=True).value(select.then))
        b = self.splat(self._under_condition(select.cond, holds=False).value(select.otherwise))
        mask = self.mask(select.cond, dtype.bits)
        return VectorValue(self.call(f"select_{self.type_of(dtype)}", mask, a, b), dtype, is_vector=True)

    # conditions -------------------------------------------------------------------------------------------------------
    def mask(self, expr: Expr, bits: int) -> str:
        """Print a condition as a mask of integers of `bits` bits: all ones where it holds, else 0."""
        target = INTEGERS[bits]
        if not self.varies(expr):
            text = self._if_needed(expr, self.scalar.value(expr))
            return self.splat(VectorValue(f"-(({text}) != 0)", target, is_vector=False))
        match expr:
            case Op(kind=OpKind.LAND | OpKind.LOR as kind, args=(x, y)):
                right = self._under_condition(x, holds=kind is OpKind.LAND)
                return f"({self.mask(x, bits)} {'&' if kind is OpKind.LAND else '|'} {right.mask(y, bits)})"
            case Op(kind=OpKind.LNOT, args=(x,)):
                return f"~{self.mask(x, bits)}"
            case Op(kind=OpKind.ISNAN | OpKind.ISINF as kind, args=(x,)):
                piece = self.value(x)
                if not piece.dtype.is_float:
                    return f"({self.type_of(target)}){{0}}"
                text = self.call(f"{kind.value}_{self.type_of(piece.dtype)}", piece.text)
            case Op(kind=kind, args=(x, y)) if kind in COMPARISONS:
                if any(exceeds_type(arg) or self.scalar.may_exceed_int32(arg) for arg in expr.args):
                    raise NotVectorizableError
                a, piece = self.value(x), self.value(y)
                text = f"({self.splat(a)} {kind.value} {self.splat(piece)})"
            case _:
                piece = self.value(expr)
                text = f"({piece.text} != 0)"
        natural = INTEGERS[piece.dtype.bits]
        if natural is target:
            return text
        return self.call(f"from_{SHORT[natural]}_{self.type_of(target)}", f"({self.type_of(natural)}){text}")

    def _truth(self, op: Op) -> VectorValue:
        bits = _natural_bits(op)
        return self._truth_of(self.mask(op, bits), bits, op.dtype)

    def _truth_of(self, mask: str, bits: int, dtype: DType) -> VectorValue:
        """Convert a mask to 0 and 1."""
        natural, target = INTEGERS[bits], INTEGERS[dtype.bits]
        if natural is not target:
            mask = self.call(f"from_{SHORT[natural]}_{self.type_of(target)}", f"({self.type_of(natural)}){mask}")
        return VectorValue(f"(({self.type_of(dtype)}){mask} & 1)", dtype, is_vector=True)

    def _under_condition(self, cond: Expr, *, holds: bool) -> Vector:
        return replace(self, guard=(*self.guard, (cond, holds))) if self.varies(cond) else self

    # operators --------------------------------------------------------------------------------------------------------
    def _op(self, op: Op) -> VectorValue:
        if op.kind is OpKind.WORD:
            return self._word(op)
        if op.kind in (OpKind.DOT, OpKind.DOT_PAIRS):
            return self._helper_call(op.kind.value, op.dtype, op.args)
        operand = op.args[0].dtype.compute
        if op.kind in (OpKind.FLOOR, OpKind.CEIL):
            whole = self._helper_call("floor" if op.kind is OpKind.FLOOR else "ceil", operand, op.args)
            return self.convert(whole, DType.INT32)
        if operand.is_float and op.dtype.is_float:
            return self._float_op(op, operand)
        if operand.is_float:
            return self._per_lane(op)
        piece = self._integer_op(op, op.dtype)
        return self.convert(replace(piece, dtype=DType.UINT8), DType.BOOL) if op.dtype is DType.BOOL else piece

    def _float_op(self, op: Op, operand: DType) -> VectorValue:
        match op.kind:
            case OpKind.MUL if not loads_of(op):  # rounded separately: see codegen/helpers.py
                return self._per_lane(op)
            case kind if kind in _SIGNS:
                return self._binary(op)
            case OpKind.NEG:
                return VectorValue(f"(-{self.value(op.args[0]).text})", operand, is_vector=True)
            case OpKind.RSQRT:
                return VectorValue(f"(1 / {self._helper_call('sqrt', operand, op.args).text})", operand, is_vector=True)
            case OpKind.RECIPROCAL:
                return VectorValue(f"(1 / {self.value(op.args[0]).text})", operand, is_vector=True)
            case OpKind.CLIP:
                return self._clip(op)
            case OpKind.MAX | OpKind.MIN:
                return self._min_max(op)
            case kind if kind in _SAME_OR_HELPER:
                return self._helper_call(_SAME_OR_HELPER[kind], operand, op.args)
            case kind if kind in HELPER_FUNCTIONS:
                base = HELPER_FUNCTIONS[kind]
                plain = kind in (OpKind.SQUARE, OpKind.SIGN, OpKind.RELU)
                return self._helper_call(base, operand, op.args) if plain or has_function(base, operand) else self._per_lane(op)
            case kind if kind in LIBRARY:
                return self._library(op, LIBRARY[kind], operand)
            case _:
                return self._per_lane(op)

    def _library(self, op: Op, name: str, operand: DType) -> VectorValue:
        if has_function(name, operand) or name in BUILTIN:
            return self._helper_call(name, operand, op.args)
        if LIBRARY_ARITY.get(name, 1) != len(op.args):
            return self._per_lane(op)
        self.scalar.library[name if operand is DType.FLOAT64 else f"{name}f"] = None
        return self._helper_call(name, operand, op.args)

    def _integer_op(self, op: Op, dtype: DType) -> VectorValue:
        match op.kind:
            case kind if kind in _SIGNS:
                return self._binary(op)
            case OpKind.NEG | OpKind.BITNOT as kind:
                return VectorValue(f"({'-' if kind is OpKind.NEG else '~'}{self.value(op.args[0]).text})", dtype, is_vector=True)
            case OpKind.FMA:
                product = Op(OpKind.MUL, op.args[:2], op.dtype)
                return self._binary(Op(OpKind.ADD, (product, op.args[2]), op.dtype))
            case OpKind.SHL | OpKind.SHR as kind if 0 <= (by := _number(self._folded(op.args[1]))) < dtype.bits:
                return VectorValue(f"({self.value(op.args[0]).text} {kind.value} {int(by)})", dtype, is_vector=True)
            case OpKind.SHL | OpKind.SHR as kind if self._is_shift(op.args[1], dtype.bits):
                return VectorValue(
                    f"({self.splat(self.value(op.args[0]))} {kind.value} {self.splat(self.value(op.args[1]))})",
                    dtype,
                    is_vector=True,
                )
            case OpKind.MOD if (known := self.known_lanes(op)) is not None:
                return self._integers(dtype, known)
            case OpKind.FLOORDIV | OpKind.MOD as kind if _is_power_of_two(op.args[1]):
                by = int(_number(op.args[1]))
                shift = f">> {by.bit_length() - 1}" if kind is OpKind.FLOORDIV else f"& {by - 1}"
                return VectorValue(f"({self.splat(self.value(op.args[0]))} {shift})", dtype, is_vector=True)
            case OpKind.FLOORDIV | OpKind.MOD if (quotient := self._constant_division(op)) is not None:
                return quotient
            case OpKind.CLIP:
                return self._clip(op)
            case kind if kind in _INTEGER_HELPERS and dtype is not DType.BOOL:
                return self._helper_call(kind.value, dtype, op.args)
            case _:
                return self._per_lane(op)

    def _constant_division(self, op: Op) -> VectorValue | None:
        """Print a quotient or remainder by a constant as a product and a shift, or return None if it may overflow."""
        x, by = op.args
        if op.dtype is not DType.INT32 or not isinstance(by, Const) or by.value < 1 or loads_of(x):
            return None
        ranges = find_lane_ranges(self.scalar.ranges, self.var, self.first, self.lanes)
        interval = range_of(x, ranges)
        if interval is None or not is_within_int32(x, ranges):
            return None
        divisor = int(by.value)
        quotient = find_quotient(interval, divisor)
        if quotient is None:
            return None
        value = self.splat(self.value(x))
        moved = f"({value} + {quotient.offset})" if quotient.offset else value
        text = f"({moved} * {quotient.factor} >> {quotient.shift})"
        if quotient.quotient_offset:
            text = f"({text} - {quotient.quotient_offset})"
        if op.kind is OpKind.MOD:
            text = f"({value} - {text} * {divisor})"
        return VectorValue(text, DType.INT32, is_vector=True)

    def _is_shift(self, by: Expr, bits: int) -> bool:
        """Return whether a shift is by less than the width, and of its type's vectors."""
        known = range_of(by, self.scalar.ranges) if not loads_of(by) and by.dtype.bits == bits else None
        return known is not None and is_within_int32(by, self.scalar.ranges) and 0 <= known[0] <= known[1] < bits

    def _word(self, op: Op) -> VectorValue:
        """Print a word; missing elements are zeros."""
        bits = UNSIGNED[op.args[0].dtype.bits]
        if (loaded := self._adjacent_words(op, bits)) is not None:
            return VectorValue(loaded, op.dtype, is_vector=True)
        elements = [f"({self.type_of(bits)}){self.to_elements(arg, arg.dtype)}" for arg in op.args]
        elements += [f"({self.type_of(bits)}){{0}}"] * (op.dtype.bits // bits.bits - len(elements))
        return VectorValue(self.call(f"word{len(elements)}_{self.type_of(op.dtype)}", *elements), op.dtype, is_vector=True)

    def _adjacent_words(self, op: Op, bits: DType) -> str | None:
        """Print words whose elements lie in memory as they do in the vector, as one load; None for others.

        Bytes that are elements of 16 bits are widened.
        """
        count = op.dtype.bits // bits.bits
        sources = tuple(arg.arg if _is_widened_byte(arg) else arg for arg in op.args)
        first = sources[0]
        if not isinstance(first, Load) or len(op.args) < count or self.guard:
            return None
        if not are_contiguous(sources, self.scalar.buffers, self.registers):
            return None
        if self.stride(first.tensor, first.index) != count:
            return None
        address = f"{self.scalar.buffers[first.tensor].identifier} + {self.offset(first, self.index_at(first.index, 0))}"
        stored, lanes = bits if first.dtype.bits == bits.bits else first.dtype, count * self.lanes
        loaded = f"*(const {vector_type(stored, lanes)} *)({address})"
        if stored is not bits:
            loaded = self.call(f"from_{SHORT[stored]}_{vector_type(bits, lanes)}", loaded)
        return f"({self.type_of(op.dtype)}){loaded}"

    def _folded(self, expr: Expr) -> Expr:
        """Fold an expression: unrolled variables are constants."""
        return fold(expr, self.scalar.values)

    def _lookup(self, expr: Expr, *, is_factor: bool = False) -> VectorValue | None:
        """Print a table lookup if the expression is a function that a table has, else return None."""
        index = LookupTables(self.lanes, {self.var}).find_index(expr, is_factor=is_factor) if self.table is None else None
        if index is None:
            return None
        dtype = expr.dtype.compute
        starts = range(0, index.mask + 1, self.lanes)
        tables = [replace(self, table=index, first_entry=start).value(expr).text for start in starts]
        chosen = self.convert(self.value(index.source), DType.INT32)
        name = "looked_up" if len(tables) == 1 else f"looked_up{len(tables)}"
        text = self.call(f"{name}_{self.type_of(dtype)}", *tables, self.splat(chosen))
        return VectorValue(text, dtype, is_vector=True)

    def _binary(self, op: Op) -> VectorValue:
        a, b = ((is_float_product(op) and self._lookup(arg, is_factor=True)) or self.value(arg) for arg in op.args)
        if not (a.is_vector or b.is_vector):
            raise NotVectorizableError
        return VectorValue(f"({self.operand(a)} {_SIGNS[op.kind]} {self.operand(b)})", op.dtype.compute, is_vector=True)

    def operand(self, piece: VectorValue) -> str:
        """Print an operand. Scalar floats mix with vectors; scalar integers are splat, because C widens narrow ones."""
        return piece.text if piece.is_vector or piece.dtype.is_float else self.splat(piece)

    def _min_max(self, op: Op) -> VectorValue:
        """Print max or min with a constant first: it is not a NaN, and a NaN of the other side propagates."""
        x, y = op.args
        return self._helper_call(op.kind.value, op.dtype.compute, (y, x) if isinstance(y, Const) else (x, y))

    def _clip(self, op: Op) -> VectorValue:
        value, low, high = op.args
        return self.value(Op(OpKind.MIN, (Op(OpKind.MAX, (value, low), op.dtype), high), op.dtype))

    def _helper_call(self, name: str, dtype: DType, args: tuple[Expr, ...]) -> VectorValue:
        """Print a call of a vector helper."""
        pieces = [self.splat(self.value(arg)) for arg in args]
        return VectorValue(self.call(f"{name}_{self.type_of(dtype)}", *pieces), dtype, is_vector=True)

    def _per_lane(self, op: Op) -> VectorValue:
        """Print an operator without a vector form lane by lane."""
        dtype, lines = op.dtype.compute, list[str]()
        stand_ins: dict[str, tuple[Load, BufferRef]] = {}
        pieces = [self.value(arg) for arg in op.args]  # before the stand-ins: operators in them have the same names
        for i, piece in enumerate(pieces):
            name = f"a{i}_f32"
            lines.append(f"const {self.type_of(piece.dtype)} {name} = {self.splat(piece)};")
            stand_ins[f".{name}"] = Load(f".{name}", (), piece.dtype), BufferRef(f"{name}[i_i32]", piece.dtype, ())
        self.scalar.buffers.update({tensor: place for tensor, (_, place) in stand_ins.items()})
        text = self.scalar.value(Op(op.kind, tuple(load for load, _ in stand_ins.values()), op.dtype))
        for tensor in stand_ins:
            del self.scalar.buffers[tensor]
        loop = f"for (int i_i32 = 0; i_i32 < {self.lanes}; i_i32++) r_f32[i_i32] = {text};"
        # An array, as gcc 12 converts truth values that it puts together in a vector (of x // x) to 0 and -1.
        results = f"{self.scalar.dialect.storage_type(dtype)} r_f32[{self.lanes}];"
        text = f"({{ {' '.join(lines)} {results} {loop} *({self.type_of(dtype)} *)r_f32; }})"
        return VectorValue(text, dtype, is_vector=True)

    # memory -----------------------------------------------------------------------------------------------------------
    def _elements(self, load: Load) -> str:
        """Print the elements of a load, in their type in memory."""
        buffer = self.scalar.buffers[load.tensor]
        if any(c and self.varies(i) for c, i in zip(load.bounds_checked, load.index, strict=False)):
            masked = self._gathered_elements(load, buffer) if self.guard else None
            if masked is None:
                raise NotVectorizableError
            return masked
        if (looked_up := self._bytes_of_table(load, buffer)) is not None:
            return looked_up
        guarded = bool(self.guard) and load.tensor not in self.registers and not self.is_in_bounds(load)
        is_plain = not guarded and not any(load.bounds_checked)
        stride = self.stride(load.tensor, load.index)
        if stride == 1 and is_plain:
            return self.element(load.tensor, load.index)
        if load.tensor in self.registers:
            raise NotVectorizableError
        address = self.offset(load, self.index_at(load.index, 0))
        type_ = self.type_of(buffer.dtype)
        if stride == 1 and not guarded:
            return f"*({type_} *)({buffer.identifier} + {address})"
        if stride == 1:
            return self._masked_elements(buffer, address)
        if stride == 2 and is_plain:
            return self.call(f"even_{type_}", f"{buffer.identifier} + {address}")
        if is_plain and (together := self._shared_elements(load, buffer) or self._permuted_elements(load, buffer)):
            return together
        if guarded and (masked := self._gathered_elements(load, buffer)) is not None:
            return masked
        if self.lanes > MAX_UNROLLED_LANES:
            raise NotVectorizableError
        lanes = [self._lane(load, buffer, i, guarded=guarded) for i in range(self.lanes)]
        return f"({type_}){{{', '.join(lanes)}}}"

    def _bytes_of_table(self, load: Load, buffer: BufferRef) -> str | None:
        """Print elements that bytes choose from a table of bytes, which all exist whatever the guard; None for others."""
        index = find_byte_index(load)
        is_table = buffer.dtype.bits == DType.UINT8.bits and buffer.strides == (1,) and buffer.shape[0] >= BYTE_ENTRIES
        if index is None or not is_table or load.tensor in self.registers or not self.varies(index):
            return None
        vector = self.type_of(DType.UINT8)
        is_permuted = self.permutes_bytes and self.lanes >= MIN_PERMUTED_BYTES
        name = "permuted_entries" if is_permuted else "entries"
        text = self.call(f"{name}_{vector}", f"(const unsigned char *){buffer.identifier}", self.splat(self.value(index)))
        return text if buffer.dtype is DType.UINT8 else f"({self.type_of(buffer.dtype)}){text}"

    def _permuted_elements(self, load: Load, buffer: BufferRef) -> str | None:
        """Print elements within a vector's width of memory as one load and one permutation; None for others.

        The vector ends at the tensor's last element at the latest.
        """
        lanes, strides = self.lanes, buffer.strides
        if buffer.dtype.bits != DType.INT32.bits or lanes < MIN_PERMUTED_LANES or any(map(loads_of, load.index)):
            return None
        last = count_elements(buffer.shape, strides) - lanes
        growth = find_total_growth(load.index, strides, self.var, lanes)
        if last < 0 or growth is None or growth >= lanes:
            return None
        ranges = find_lane_ranges(self.scalar.ranges, self.var, self.first, lanes)
        varying = [(i, stride) for i, stride in zip(load.index, strides, strict=True) if self.varies(i)]
        terms, greatest = list[str](), 0
        for index, stride in varying:
            interval = range_of(mul(index, num(stride)), ranges)
            folded = self._folded(index)
            if index.dtype is not DType.INT32 or interval is None or not is_within_int32(index, ranges):
                return None
            greatest += max(map(abs, interval))
            terms.append(f"{self.splat(self.value(folded))} * {stride}")
        if greatest > DType.INT32.integer_range[1]:
            return None
        first = self.offset(load, self.index_at(load.index, 0))
        name = f"permuted_{self.type_of(buffer.dtype)}"
        return self.call(name, buffer.identifier, first, str(last), " + ".join(terms))

    def _shared_elements(self, load: Load, buffer: BufferRef) -> str | None:
        """Print elements in order that some adjacent lanes share, such as words of packed values; None for others."""
        offsets = None if self.congruences is None else self.lane_offsets(load.tensor, load.index)
        if offsets is None:
            return None
        at, dtype = f"{buffer.identifier} + {self.offset(load, self.index_at(load.index, 0))}", buffer.dtype
        if offsets == tuple(range(self.lanes)):
            return f"*({self.type_of(dtype)} *)({at})"
        shared = next((n for n in range(2, self.lanes) if offsets[n - 1] == 0 and offsets[n] == 1), 1)
        is_word = self.lanes % shared == 0 and self.lanes // shared * dtype.bytes in WORD_BYTES
        if not is_word or offsets != tuple(lane // shared for lane in range(self.lanes)):
            return None
        bits = UNSIGNED[dtype.bits] if dtype.is_float else dtype
        text = self.call(f"repeat{shared}_{self.type_of(bits)}", at)
        return text if bits is dtype else f"({self.type_of(dtype)}){text}"

    def _is_uniform(self, expr: Expr) -> bool:
        """Return whether all lanes have the value of one element: a scale of a group."""
        if not self.varies(expr):
            return True
        if not isinstance(expr, Load):
            return not isinstance(expr, AxisRef) and all(map(self._is_uniform, children(expr)))
        if any(expr.bounds_checked) or expr.tensor in self.registers or any(map(loads_of, expr.index)):
            return False
        if self.stride(expr.tensor, expr.index) is not None:
            return False  # varies by an affine index
        offsets = self.lane_offsets(expr.tensor, expr.index)
        return offsets is not None and not any(offsets)

    def _first_value(self, expr: Expr) -> Expr:
        """Return the value in the first lane. Groups that contain several vectors have one text in all of them."""

        def split_quotient(node: Expr) -> Expr:
            match node:
                case Op(
                    kind=OpKind.FLOORDIV,
                    args=(Op(kind=OpKind.ADD, args=(x, Const(value=int(c)))), Const(value=int(by))),
                ):
                    is_aligned = by > 0 and congruence(x, self.congruences or {}).divisor % by == 0
                    return add(div(x, by), num(c // by)) if is_aligned else node
                case _:
                    return node

        values = {self.var: num(self.first)}
        return rewrite(fold(substitute(expr, values), self.scalar.values), split_quotient)

    def _masked_elements(self, buffer: BufferRef, address: str) -> str:
        """Print adjacent elements that are loaded only where the guard holds."""
        bits = UNSIGNED[buffer.dtype.bits] if buffer.dtype.is_narrow_float else buffer.dtype
        pointer = f"(const {self.scalar.dialect.storage_type(bits)} *){buffer.identifier} + {address}"
        masked = self.call(f"masked_{self.type_of(bits)}", self._guard_mask(bits.bits), pointer)
        return masked if bits is buffer.dtype else f"({self.type_of(buffer.dtype)}){masked}"

    def _gathered_elements(self, load: Load, buffer: BufferRef) -> str | None:
        """Print elements at any places that are loaded only where the guard holds; None if there is no such vector.

        Places are sums of products modulo 2**32. Where the guard holds they are exact, as the tensor has fewer elements.
        """
        checked = load.bounds_checked or (False,) * len(load.index)
        shared = tuple(num(0) if self.varies(i) else i for i in load.index)
        is_short = count_elements(buffer.shape, buffer.strides) <= DType.INT32.integer_range[1]
        is_known = all(self.is_in_bounds(inner) for i in shared for inner in loads_of(i))
        if not is_short or not is_known or any(c and not self.varies(i) for c, i in zip(checked, load.index, strict=True)):
            return None
        bits = UNSIGNED[buffer.dtype.bits] if buffer.dtype.is_narrow_float else buffer.dtype
        lines, terms, masks = list[str](), list[str](), list[str]()
        try:
            for d, index in enumerate(load.index):
                if not self.varies(index):
                    continue
                place = self._place(index)
                if checked[d]:
                    name = f"at{d}_{SHORT[place.dtype]}"
                    lines.append(f"const {self.type_of(place.dtype)} {name} = {self.splat(place)};")
                    place = replace(place, text=name)
                    masks.append(self._in_range(load, d, place, bits))
                terms.append(f"{self.splat(self.convert(place, DType.INT32))} * {buffer.strides[d]}")
            mask = " & ".join(masks) or self._guard_mask(bits.bits)
        except NotVectorizableError:
            return None
        pointer = f"(const {self.scalar.dialect.storage_type(bits)} *){buffer.identifier} + {self.scalar.address(buffer, shared)}"
        text = self.call(f"gathered_{self.type_of(bits)}", mask, pointer, " + ".join(terms))
        text = text if bits is buffer.dtype else f"({self.type_of(buffer.dtype)}){text}"
        return f"({{ {' '.join(lines)} {text}; }})" if lines else text

    def _place(self, index: Expr) -> VectorValue:
        """Print an index in each lane, in 32 or 64 bits: data as its type computes it, arithmetic of axes exactly."""
        index = uncast = self._folded(index)
        while isinstance(uncast, Cast):
            uncast = uncast.arg
        is_data = isinstance(uncast, Load | Op) and self.scalar.comes_from_data(index)
        ranges = find_lane_ranges(self.scalar.ranges, self.var, self.first, self.lanes)
        if not is_data and not is_within_int32(index, ranges):
            raise NotVectorizableError
        piece = self.value(index)
        return self.convert(piece, DType.INT32 if can_represent_all(DType.INT32, piece.dtype) else DType.INT64)

    def _in_range(self, load: Load, d: int, place: VectorValue, element: DType) -> str:
        """Print the mask of the lanes whose guard holds and whose index is in range; others with a guard are recorded."""
        size = self.scalar.buffers[load.tensor].shape[d]
        number = self.scalar.add_index_check(load.tensor, d, size, load.index[d])
        guard = self._guard_mask(place.dtype.bits)
        text = self.call(f"checked_{self.type_of(place.dtype)}", guard, place.text, str(size), str(number), "status")
        target = INTEGERS[element.bits]
        return text if place.dtype is target else self.call(f"from_{SHORT[place.dtype]}_{self.type_of(target)}", text)

    def _if_needed(self, expr: Expr, text: str) -> str:
        """Print a value that all lanes share and that may not exist where the guard fails: 0 if it does in all lanes."""
        if not self.guard or all(map(self.is_in_bounds, loads_of(expr))):
            return text
        return f"({self.call(f'any_{self.type_of(DType.INT32)}', self._guard_mask(DType.INT32.bits))} ? {text} : 0)"

    def _guard_mask(self, bits: int) -> str:
        if len(self.guard) > MAX_GUARDS:
            raise NotVectorizableError
        plain = replace(self, guard=())
        parts = []
        for i, (cond, holds) in enumerate(self.guard):
            mask = replace(plain, guard=self.guard[:i]).mask(cond, bits)
            parts.append(mask if holds else f"~{mask}")
        return " & ".join(parts)

    def _lane(self, load: Load, buffer: BufferRef, lane: int, *, guarded: bool) -> str:
        index = self.index_at(load.index, lane)
        text = f"{buffer.identifier}[{self.offset(load, index)}]"
        if not guarded:
            return text
        conds = []
        for cond, holds in self.guard:
            value = self.scalar.value(substitute(cond, {self.var: num(self.first + lane)}))
            conds.append(value if holds else f"!{value}")
        return f"({' && '.join(conds)} ? {text} : 0)"


def _natural_bits(cond: Expr) -> int:
    """Return the bits of the operands of a condition."""
    match cond:
        case Op(kind=OpKind.LAND | OpKind.LOR | OpKind.LNOT, args=args):
            return max(_natural_bits(arg) for arg in args)
        case Op(kind=kind, args=args) if kind in _TRUTHS:
            return max(arg.dtype.compute.bits for arg in args)
        case _:
            return cond.dtype.compute.bits


def _number(expr: Expr) -> float:
    return expr.value if isinstance(expr, Const) else -1


def _is_power_of_two(expr: Expr) -> bool:
    value = int(_number(expr))
    return value > 0 and value & (value - 1) == 0


def statement(vector: Vector, node: Compute) -> str:
    """Print one assignment or reduction of all lanes. Raises NotVectorizableError if it has no vector form."""
    if not any(vector.varies(i) for i in node.index):
        raise NotVectorizableError
    return _text(replace(vector, sizes=_sizes(vector, node)), node)


def _sizes(vector: Vector, node: Compute) -> tuple[tuple[Expr, int], ...]:
    """Return (index, dimension size) of the statement's unconditional accesses."""
    accesses = [(node.tensor, node.index)]
    loads = unconditional_loads(node.value, in_indices=True)
    accesses += [(load.tensor, load.index) for load in loads if not any(load.bounds_checked)]
    places = vector.scalar.buffers
    return tuple(pair for name, index in accesses for pair in zip(index, places[name].shape, strict=True))


def _text(vector: Vector, node: Compute) -> str:
    buffer = vector.scalar.buffers[node.tensor]
    if node.combine is None:
        return _assigned(vector, node, vector.to_elements(node.value, buffer.dtype))
    target = vector.element(node.tensor, node.index)
    kind = COMBINE_OPS[node.combine]
    value: Expr = node.value
    if value.dtype.compute is not buffer.dtype.compute:
        value = Cast(value, buffer.dtype, implicit=True)
    if kind in (OpKind.ADD, OpKind.MUL) and buffer.dtype.compute is buffer.dtype is not DType.BOOL:
        return f"{target} {kind.value}= {vector.operand(vector.value(value))};"
    old = Load(node.tensor, node.index, buffer.dtype)
    return f"{target} = {vector.to_elements(Op(kind, (old, value), buffer.dtype), buffer.dtype)};"


def _assigned(vector: Vector, node: Compute, value: str) -> str:
    buffer = vector.scalar.buffers[node.tensor]
    if vector.stride(node.tensor, node.index) == 1:
        target = vector.element(node.tensor, node.index)
        if node.nontemporal and has_nontemporal_store(buffer.dtype, vector.lanes):
            return f"{vector.call(f'stream_{vector.type_of(buffer.dtype)}', f'&{target}', value)};"
        return f"{target} = {value};"
    if node.tensor in vector.registers or vector.lanes > MAX_UNROLLED_LANES or any(node.bounds_checked):
        raise NotVectorizableError
    if _is_scattered_copy(vector, node):
        raise NotVectorizableError
    name = "r_f32"  # no name of a program ends in a type
    puts = " ".join(f"{vector.element_at_lane(buffer, node.index, i)} = {name}[{i}];" for i in range(vector.lanes))
    return f"{{ const {vector.type_of(buffer.dtype)} {name} = {value}; {puts} }}"


def _is_scattered_copy(vector: Vector, node: Compute) -> bool:
    """Return whether elements are only copied to indices from a table.

    A scalar loop is as fast, and unrolling the lanes took half of the compile time of a strided convolution.
    """
    value = node.value.arg if isinstance(node.value, Cast) and node.value.implicit else node.value
    if not isinstance(value, Load) or value.tensor in vector.registers:
        return False
    return any(isinstance(x, Load) for i in node.index for x in iter_subexpressions(i))


def _is_widened_byte(expr: Expr) -> TypeGuard[Cast]:
    """Return whether an expression is an int16 that is converted from a byte."""
    return isinstance(expr, Cast) and expr.dtype is DType.INT16 and expr.arg.dtype in (DType.INT8, DType.UINT8)
