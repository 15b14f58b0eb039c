"""Values of a vector loop's lanes → words of two 16-bit floats: packed integers, float8, looked-up values; scales.

An integer v in the low bits of the float16 1024, or of the bfloat16 128, is 1024 + v, or 128 + v. One `prmt` moves the
integers of two lanes to the halves of a word, one `lop3` adds the exponent, and one subtraction removes it with the
zero point (CUTLASS, NumericArrayConverter). Elements one by one would take about ten instructions each.

Integers that are 16 bits apart need no `prmt`. Four bits further up in the half, v is 1024 + 16 v, which one fused
multiply-add scales, so that eight integers of a word take one shift (Marlin, Frantar et al., 2024).

A table of 16 floats is in registers, a word for four of their low or high bytes. `prmt` looks up four bytes of eight
entries by three bits of four indices, and one more takes the fourth bit's half of the table (Marlin, bitsandbytes).

The result has the bits of the unpacked computation in float32: differences of small integers are exact, and a product
of two 16-bit floats is rounded once. Other scales, and offsets in float, are applied in float32, and rounded then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from roller_svc.analysis.congruences import LaneStrideAnalysis, congruence
from roller_svc.analysis.index_ranges import range_of
from roller_svc.analysis.packed_values import (
    BYTE_BITS,
    BYTES,
    FLOAT8,
    TABLE_BITS,
    WORD_BITS,
    PackedValue,
    integer_bounds,
    keeps_value,
    packed_field,
    table_field,
)
from roller_svc.codegen.buffer_ref import BufferRef
from roller_svc.codegen.cuda.instructions import instruction
from roller_svc.codegen.dialect import EXACT_INTEGERS, SHORT
from roller_svc.codegen.visitor import CodeGenVisitor
from roller_svc.errors import require
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, Select, loads_of, rewrite, substitute
from roller_svc.ir.index import num

_EXPONENT_BIAS = 15  # of float16
# Bits of the float that has the unit 1 in its last place, and its value.
_EXPONENT = {DType.FLOAT16: (0x64006400, 1024), DType.BFLOAT16: (0x43004300, 128)}
_FRACTION_BITS = {DType.FLOAT16: 10, DType.BFLOAT16: 7}
_HALF_BITS, WIDEST_BITS = 16, 128
_SYMBOLS = {OpKind.MUL: "*", OpKind.ADD: "+", OpKind.SUB: "-"}
# The words of one load of that many bits.
_LOADED_WORDS = {
    32: ("*(const unsigned int *){}",),
    64: tuple(f"(*(const uint2 *){{}}).{part}" for part in "xy"),
    128: tuple(f"(*(const uint4 *){{}}).{part}" for part in "xyzw"),
}

LanePairs = tuple[tuple[int, int], ...]  # the lanes in the halves of each word


@dataclass(frozen=True, slots=True)
class _Field:
    """Unsigned integers of the lanes, `bits` each, none of which crosses a byte."""

    words: tuple[str, ...]
    bits: int
    places: tuple[tuple[int, int], ...]  # of each lane: its word and its lowest bit
    bias: int = 0  # is to be subtracted from the stored integers
    in_memory: bool = False  # else the words are in local arrays


@dataclass(frozen=True, slots=True)
class _Integers:
    """A field minus a constant, and minus or plus integers: one that all lanes share, or a field."""

    field: _Field
    subtracted: int
    least: int
    greatest: int
    others: tuple[tuple[OpKind, Expr | _Integers], ...] = ()


class _Base(NamedTuple):
    """A constant to be subtracted."""

    value: int
    digits: int | None  # the float whose last digits hold the rest of it, and an integer that is subtracted too


@dataclass(frozen=True, slots=True)
class _Float8:
    words: tuple[str, ...]
    dtype: DType


@dataclass(frozen=True, slots=True)
class _LookedUp:
    """Elements of a table of 16, a 16-bit float or float8 each, at the field's integers."""

    table: BufferRef
    field: _Field


@dataclass(frozen=True, slots=True)
class _Halves:
    """Elements that are 16-bit floats in memory."""

    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Shared:
    """A 16-bit float or float8 in memory, or a value rounded to 16 bits, that all lanes share."""

    value: Expr


@dataclass(frozen=True, slots=True)
class _Product:
    factors: tuple[_Pairs, _Pairs]


@dataclass(frozen=True, slots=True)
class _Scaled:
    """Pairs of a type times, plus or minus floats that all lanes share, one after the other, in float32."""

    pairs: _Pairs
    dtype: DType
    terms: tuple[tuple[OpKind, Expr], ...]


@dataclass(frozen=True, slots=True)
class _Guarded:
    """Pairs where a condition of all lanes holds, else 0."""

    cond: Expr
    pairs: _Pairs


_Pairs = _Integers | _Float8 | _LookedUp | _Halves | _Shared | _Product | _Scaled | _Guarded


@dataclass(frozen=True, slots=True)
class PackedLanes:
    """Prints the values of the lanes in pairs, as words of two elements of `dtype`."""

    visitor: CodeGenVisitor
    lanes: LaneStrideAnalysis
    dtype: DType

    def words(self, value: Expr) -> tuple[str, ...] | None:
        """Print what the words share and return the words; None, and nothing printed, for other values."""
        if self.dtype not in _EXPONENT or self.lanes.count % 2:
            return None
        pairs = self._match(value)
        if pairs is None or not _is_packed(pairs):
            return None
        return self._print(pairs, self._adjacent)

    def unordered_words(self, value: Expr) -> tuple[tuple[str, tuple[int, int]], ...] | None:
        """Print words as `words` does, of any two lanes each, and return them with their lanes."""
        if self.dtype not in _EXPONENT or self.lanes.count % 2:
            return None
        pairs = self._match(value)
        if pairs is None or not _is_packed(pairs):
            return None
        order = self._cheapest_order(pairs)
        return tuple(zip(self._print(pairs, order), order, strict=True))

    @property
    def _adjacent(self) -> LanePairs:
        return tuple((lane, lane + 1) for lane in range(0, self.lanes.count, 2))

    def _cheapest_order(self, pairs: _Pairs) -> LanePairs:
        """Return pairs of lanes whose integers are 16 bits apart in a word, if all lanes have such pairs."""
        if not isinstance(pairs, _Integers) or pairs.field.bits == BYTE_BITS:
            return self._adjacent
        lane_at = {place: lane for lane, place in enumerate(pairs.field.places)}
        low = [(word, bit) for word, bit in pairs.field.places if bit < _HALF_BITS]
        if 2 * len(low) != self.lanes.count or any((word, bit + _HALF_BITS) not in lane_at for word, bit in low):
            return self._adjacent
        if len(lane_at) < self.lanes.count:  # lanes share an integer
            return self._adjacent
        return tuple((lane_at[word, bit], lane_at[word, bit + _HALF_BITS]) for word, bit in low)

    # recognise ------------------------------------------------------------------------------------------------------
    def _match(self, value: Expr) -> _Pairs | None:
        """Return the value as pairs whose rounding to `dtype` is that of the value."""
        match value:
            case Select(cond=cond, then=then, otherwise=Const(value=0)) if self.lanes.is_uniform(cond):
                pairs = self._match(then)
                return None if pairs is None else _Guarded(self.lanes.first_value(cond), pairs)
            case Cast(arg=arg, dtype=dtype) if dtype in (self.dtype, DType.FLOAT32) and arg.dtype.is_float:
                return self._match(arg)
            case Op(kind=OpKind.MUL, args=(x, y), dtype=dtype) if dtype in (self.dtype, DType.FLOAT32):
                a, b = self._exact(x), self._exact(y)
                return self._scaled(value) if a is None or b is None else _Product((a, b))
            case Op(kind=OpKind.ADD | OpKind.SUB, dtype=dtype) if dtype in (self.dtype, DType.FLOAT32):
                return self._scaled(value)
            case _:
                return self._exact(value)

    def _scaled(self, value: Expr) -> _Scaled | None:
        """Return packed pairs with scales and offsets that all lanes share; 16-bit floats are computed in float32."""
        match value:
            case Cast(arg=arg, dtype=DType.FLOAT32) if arg.dtype.is_float:
                return self._scaled(arg)
            case Op(kind=kind, args=(x, y), dtype=dtype) if kind in _SYMBOLS and dtype in (self.dtype, DType.FLOAT32):
                inner, term = (y, x) if self.lanes.is_uniform(x) and kind is not OpKind.SUB else (x, y)
                scaled = self._scaled(inner) if self.lanes.is_uniform(term) else None
                if scaled is None:
                    return None
                return replace(scaled, terms=(*scaled.terms, (kind, self.lanes.first_value(term))))
            case _:
                both = (self, replace(self, dtype=DType.FLOAT16))
                found = ((one._exact(value), one.dtype) for one in both)
                return next((_Scaled(x, dtype, ()) for x, dtype in found if x is not None and _is_packed(x)), None)

    def _exact(self, value: Expr) -> _Pairs | None:
        """Return the value as pairs if `dtype` represents it exactly."""
        match value:
            case Cast(arg=Load(dtype=source) as arg, dtype=dtype) if source in FLOAT8 and dtype.is_float:
                return self._exact(arg)  # every float represents float8
            case Select(cond=cond, then=then, otherwise=Const(value=0)) if self.lanes.is_uniform(cond):
                pairs = self._exact(then)
                return None if pairs is None else _Guarded(self.lanes.first_value(cond), pairs)
            case Cast(arg=arg, dtype=dtype) if dtype in (self.dtype, DType.FLOAT32):
                if dtype is self.dtype and not value.implicit and self.lanes.is_uniform(arg):
                    return _Shared(self.lanes.first_value(value))
                if arg.dtype.is_float:
                    return self._exact(arg)
                integers = self._integers(arg)
                return integers if integers is not None and self._is_exact(integers) else None
            case Load():
                return self._loaded(value)
            case _:
                return None

    def _is_exact(self, integers: _Integers) -> bool:
        """Return whether `dtype` represents the integers, what is subtracted first, and what that leaves."""
        limit, one = EXACT_INTEGERS[self.dtype], _EXPONENT[self.dtype][1]
        last = (1 << integers.field.bits) - 1 - integers.subtracted
        values = (integers.least, integers.greatest, one + integers.subtracted, -integers.subtracted, last)
        return len(integers.others) < 2 and all(-limit <= value <= limit for value in values)

    def _loaded(self, load: Load) -> _Pairs | None:
        buffer = self.visitor.scalar.buffers[load.tensor]
        if buffer.dtype is not self.dtype and not (self.dtype is DType.FLOAT16 and buffer.dtype in FLOAT8):
            return None
        if self.lanes.is_uniform(load):
            return _Shared(replace(load, index=tuple(map(self.lanes.first_value, load.index))))
        if (field := self._table_field(load, buffer)) is not None:
            return _LookedUp(buffer, field)
        words = self._array_words(load, buffer)
        if words is None:
            return None
        return _Halves(words) if buffer.dtype is self.dtype else _Float8(words, buffer.dtype)

    def _table_field(self, load: Load, buffer: BufferRef) -> _Field | None:
        """Return the indices of a table, if words of them have at least half of their places used.

        Of a table with more entries than 16, the indices reach the first ones alone.
        """
        is_table = len(buffer.shape) == 1 and buffer.shape[0] >= 1 << TABLE_BITS
        is_addressed = _is_memory(load) or buffer.shape == (1 << TABLE_BITS,)  # registers of a whole table
        if not is_table or not is_addressed or any(load.bounds_checked):
            return None
        packed = table_field(load)
        field = None if packed is None else self._packed_field(packed)
        if field is None or any(bit % TABLE_BITS for _, bit in field.places):
            return None
        return field if 2 * len(set(map(_quarter, field.places))) <= self.lanes.count else None

    def _integers(self, value: Expr) -> _Integers | None:
        match value:
            case Cast(arg=arg) if not arg.dtype.is_float and keeps_value(value):
                return self._integers(arg)
            case Op(kind=OpKind.SUB | OpKind.ADD as kind, args=(x, y)):
                integers, other = self._integers(x), y
                if integers is None and kind is OpKind.ADD:
                    integers, other = self._integers(y), x
                offset = None if integers is None else self._offset(integers, kind, other)
                return offset if offset is not None and _represents(value.dtype, offset) else None
            case _:
                field = self._field(value)
                if field is None:
                    return None
                return _Integers(field, field.bias, -field.bias, (1 << field.bits) - 1 - field.bias)

    def _offset(self, integers: _Integers, kind: OpKind, other: Expr) -> _Integers | None:
        """Return the integers minus or plus a constant, an integer of all lanes of known range, or another field."""
        is_uniform = self.lanes.is_uniform(other)
        field = None if is_uniform else self._integers(other)
        if field is not None and (field.others or not self._is_exact(field)):
            return None
        bounds = integer_bounds(other) if field is None else (field.least, field.greatest)
        if bounds is None or not (is_uniform or field is not None):
            return None
        low, high = bounds if kind is OpKind.ADD else (-bounds[1], -bounds[0])
        least, greatest = integers.least + low, integers.greatest + high
        if low == high:
            return replace(integers, subtracted=integers.subtracted - low, least=least, greatest=greatest)
        limit = EXACT_INTEGERS[self.dtype]
        if not -limit <= bounds[0] <= bounds[1] <= limit:
            return None
        others = (*integers.others, (kind, self.lanes.first_value(other) if field is None else field))
        return replace(integers, others=others, least=least, greatest=greatest)

    def _field(self, value: Expr) -> _Field | None:
        match value:
            case Load(dtype=dtype) if dtype in BYTES and self.dtype is DType.FLOAT16:
                words = self._array_words(value, self.visitor.scalar.buffers[value.tensor])
                places = self._places(BYTE_BITS)
                if words is None or dtype is DType.UINT8:
                    return None if words is None else _Field(words, BYTE_BITS, places)
                return _Field(tuple(f"({word} ^ 0x80808080u)" for word in words), BYTE_BITS, places, 128)
            case _:
                packed = packed_field(value)
                return None if packed is None else self._packed_field(packed)

    def _places(self, bits: int) -> tuple[tuple[int, int], ...]:
        """Return the places of elements in order, `bits` apart, from the lowest bit of the first word on."""
        return tuple(divmod(lane * bits, WORD_BITS) for lane in range(self.lanes.count))

    def _packed_field(self, packed: PackedValue) -> _Field | None:
        """Return the field of `word >> shift`: one word for all lanes, one for some lanes each, or one for each."""
        source, bits = packed.source, packed.bits
        if packed.shift is None or 1 << bits > _EXPONENT[self.dtype][1]:
            return None
        shift = rewrite(packed.shift, _without_cast)
        if self.lanes.is_uniform(source):
            return self._one_word(source, shift, bits)
        if self.lanes.is_uniform(shift):
            return self._word_column(source, shift, bits)
        return self._word_row(source, shift, bits)

    def _one_word(self, source: Load, shift: Expr, bits: int) -> _Field | None:
        element_bits = self.visitor.scalar.buffers[source.tensor].dtype.bits
        if element_bits > WORD_BITS:
            return None
        first = replace(source, index=tuple(map(self.lanes.first_value, source.index)))
        word = f"(unsigned int){self.visitor.scalar.value(first)}"
        if self.lanes.stride(shift) == bits:
            shifted = self._shifted_right(word, shift, element_bits - bits * self.lanes.count)
            places = self._places(bits)
            return None if shifted is None else _Field((shifted,), bits, places, in_memory=_is_memory(source))
        shifts = self._constant_shifts(shift, bits, element_bits)
        places = tuple((0, at) for at in shifts or ())
        return None if shifts is None else _Field((word,), bits, places, in_memory=_is_memory(source))

    def _shifted_right(self, word: str, shift: Expr, limit: int) -> str | None:
        """Print a word shifted by the first lane's bits; None unless these are known to be in 0 .. `limit`."""
        first = self.lanes.first_value(shift)
        known = congruence(first, self.lanes.known)
        least, greatest = known.remainder, known.remainder
        if known.modulus:
            bounds = range_of(_without_axes(first), {_ANY_AXIS: _AXIS_RANGE})
            if bounds is None:
                return None
            least, greatest = bounds[0], bounds[1] - (bounds[1] - known.remainder) % known.modulus
        if least < 0 or greatest > limit:
            return None
        is_shifted = known.modulus or known.remainder
        return f"({word} >> {self.visitor.scalar.value(first)})" if is_shifted else f"({word})"

    def _constant_shifts(self, shift: Expr, bits: int, element_bits: int) -> tuple[int, ...] | None:
        """Return the shift of each lane, if all are known multiples of `bits` inside an element."""
        shifts = []
        for lane in range(self.lanes.count):
            known = congruence(substitute(shift, {self.lanes.var: num(lane)}), self.lanes.known)
            if known.modulus or known.remainder % bits or not 0 <= known.remainder <= element_bits - bits:
                return None
            shifts.append(known.remainder)
        return tuple(shifts)

    def _word_column(self, source: Load, shift: Expr, bits: int) -> _Field | None:
        """Return the field of lanes that each have an element of a local array, shifted by the same bits."""
        buffer = self.visitor.scalar.buffers[source.tensor]
        words = self._array_words(source, buffer) if buffer.dtype.bits <= WORD_BITS else None
        first = congruence(self.lanes.first_value(shift), self.lanes.known)
        if words and not first.modulus and 0 <= first.remainder <= buffer.dtype.bits - bits:
            places = ((word, at + first.remainder) for word, at in self._places(buffer.dtype.bits))
            is_in_byte = first.remainder % BYTE_BITS + bits <= BYTE_BITS
            return _Field(words, bits, tuple(places), in_memory=_is_memory(source)) if is_in_byte else None
        shifted = [self._shifted_right(word, shift, buffer.dtype.bits - bits) for word in words or ()]
        texts = tuple(text for text in shifted if text is not None)
        if not texts or len(texts) < len(shifted):
            return None
        return _Field(texts, bits, self._places(buffer.dtype.bits), in_memory=_is_memory(source))

    def _word_row(self, source: Load, shift: Expr, bits: int) -> _Field | None:
        """Return the field of lanes in adjacent elements of memory, `per` lanes in each."""
        buffer = self.visitor.scalar.buffers[source.tensor]
        per, rest = divmod(buffer.dtype.bits, bits)
        total = bits * self.lanes.count
        if rest or total % WORD_BITS or any(source.bounds_checked) or not source.index:
            return None
        *outer, inner = source.index
        divided = self._divided(inner, per)
        is_row = divided is not None and self.lanes.stride(divided) == 1 and all(map(self.lanes.is_uniform, outer))
        if divided is None or not is_row or congruence(self.lanes.first_value(divided), self.lanes.known).divisor % per:
            return None
        strides = zip(outer, buffer.strides, strict=False)
        offsets = (congruence(i, self.lanes.known).divisor * stride for i, stride in strides)
        start = congruence(self.lanes.first_value(inner), self.lanes.known).divisor
        aligned_bits = math.gcd(start, *offsets) * buffer.dtype.bits
        width = math.gcd(aligned_bits, total, WIDEST_BITS)
        if width % WORD_BITS:
            return None
        shifts = self._constant_shifts(shift, bits, buffer.dtype.bits)
        if shifts is None:
            return None
        words = []
        for bit in range(0, total, width):
            index = tuple(substitute(i, {self.lanes.var: num(bit // bits)}) for i in source.index)
            at = f"&{buffer.identifier}[{self.visitor.scalar.address(buffer, index)}]"
            words += [pattern.format(at) for pattern in _LOADED_WORDS[width]]
        starts = (divmod(lane // per * buffer.dtype.bits, WORD_BITS) for lane in range(self.lanes.count))
        places = tuple((word, at + by) for (word, at), by in zip(starts, shifts, strict=True))
        return _Field(tuple(words), bits, places, in_memory=_is_memory(source))

    def _divided(self, index: Expr, per: int) -> Expr | None:
        """Return x of an index `x // per`, plus what all lanes share."""
        match index:
            case Op(kind=OpKind.FLOORDIV, args=(x, Const(value=divisor))) if divisor == per:
                return x
            case Op(kind=OpKind.ADD, args=(x, y)):
                shared, other = (x, y) if self.lanes.is_uniform(x) else (y, x)
                return self._divided(other, per) if self.lanes.is_uniform(shared) else None
            case _:
                return None

    def _array_words(self, load: Load, buffer: BufferRef) -> tuple[str, ...] | None:
        """Return the words of a local array that has one element for each lane, or of adjacent words."""
        if buffer.dtype.bits == WORD_BITS and load.index and not any(load.bounds_checked):
            *outer, inner = load.index
            if all(map(self.lanes.is_uniform, outer)) and self.lanes.stride(inner) == 1:
                lanes = ({self.lanes.var: num(lane)} for lane in range(self.lanes.count))
                indices = (tuple(substitute(i, lane) for i in load.index) for lane in lanes)
                return tuple(f"{buffer.identifier}[{self.visitor.scalar.address(buffer, i)}]" for i in indices)
        if buffer.shape != (self.lanes.count,) or load.index != (AxisRef(self.lanes.var),):
            return None
        each = WORD_BITS // buffer.dtype.bits
        if self.lanes.count % each:
            return None
        return tuple(f"*(const unsigned int *)&{buffer.identifier}[{lane}]" for lane in range(0, self.lanes.count, each))

    # print ----------------------------------------------------------------------------------------------------------
    def _print(self, pairs: _Pairs, order: LanePairs, guard: str = "") -> tuple[str, ...]:
        """Print words for the pairs of lanes; values other than integers are in adjacent lanes.

        Memory is read where the condition `guard` holds, if there is one.
        """
        match pairs:
            case _Integers():
                return self._print_integers(pairs, order, guard)
            case _Float8(words=words, dtype=dtype):
                convert = self._wrapper(f"{SHORT[dtype]}x2_to_f16x2")
                named = [self._variable(word) for word in words]
                halves = [half for word in named for half in (word, f"{word} >> 16")]
                return tuple(f"{convert}((unsigned short)({half}))" for half in halves)
            case _LookedUp():
                return self._print_looked_up(pairs, order, guard)
            case _Halves(words=words):
                return words
            case _Shared(value=value):
                return (self._print_shared(value, guard),) * len(order)
            case _Scaled():
                return self._print_scaled(pairs, order, guard)
            case _Product(factors=(a, b)):
                multiply = self._wrapper(f"mul_{SHORT[self.dtype]}x2")
                both = zip(self._print(a, order, guard), self._print(b, order, guard), strict=True)
                return tuple(f"{multiply}({x}, {y})" for x, y in both)
            case _Guarded(cond=cond, pairs=inner):
                test = self.visitor.scalar.value(cond)
                words = self._print(inner, order, f"{guard} && {test}" if guard else test)
                return tuple(f"({test} ? {word} : 0u)" for word in words)

    def _print_shared(self, value: Expr, guard: str) -> str:
        """Print a word with a float in both halves."""
        buffer = self.visitor.scalar.buffers[value.tensor] if isinstance(value, Load) else None
        bits = self.visitor.scalar.to_element(value, self.dtype) if buffer is None else self._bits(value, buffer)
        if buffer is not None and buffer.dtype in FLOAT8:
            return self._variable(f"{self._wrapper(f'{SHORT[buffer.dtype]}x2_to_f16x2')}({bits} * 0x101)", guard)
        return self._variable(f"(unsigned int){bits} * 0x10001u", guard)

    def _print_scaled(self, scaled: _Scaled, order: LanePairs, guard: str) -> tuple[str, ...]:
        """Print pairs with scales and offsets in float32, and rounded.

        Two scales are one where both orders have the same bits: where float32 has the product of any two exactly.
        """
        scalar, dtype, terms = self.visitor.scalar, scaled.dtype, scaled.terms
        words = replace(self, dtype=dtype)._print(scaled.pairs, order, guard)
        texts = [(_SYMBOLS[kind], scalar.value(term)) for kind, term in terms]
        are_scales = all(kind is OpKind.MUL and self._is_float16(term) for kind, term in terms)
        if dtype is DType.FLOAT16 and len(terms) == 2 and are_scales:
            texts = [("*", " * ".join(text for _, text in texts))]
        known = [(symbol, self._float_variable(text, guard)) for symbol, text in texts]
        to_float, pack = scalar.helper(f"{SHORT[dtype]}_to_f32"), self._wrapper(f"pack_{SHORT[self.dtype]}")
        results = []
        for text in words:
            word = self._variable(text)
            halves = (f"(unsigned short){word}", f"(unsigned short)({word} >> {_HALF_BITS})")
            low, high = (_chain(f"{to_float}({half})", known) for half in halves)
            results.append(f"{pack}({low}, {high})")
        return tuple(results)

    def _is_float16(self, factor: Expr) -> bool:
        """Return whether it is a float in memory that float16 represents."""
        while isinstance(factor, Cast) and factor.dtype.is_float and factor.arg.dtype.is_float:
            factor = factor.arg
        dtype = self.visitor.scalar.buffers[factor.tensor].dtype if isinstance(factor, Load) else factor.dtype
        return isinstance(factor, Load) and (dtype is DType.FLOAT16 or dtype in FLOAT8)

    def _print_looked_up(self, looked_up: _LookedUp, order: LanePairs, guard: str) -> tuple[str, ...]:
        """Print the words of pairs of lanes: bytes of the table by three bits of the indices, then by the fourth."""
        places, field = looked_up.field.places, looked_up.field
        words = [self._variable(word, guard if field.in_memory else "") for word in field.words]
        planes = self._table_bytes(looked_up.table)
        chosen: dict[tuple[int, int], list[str]] = {}
        for quarter in dict.fromkeys(map(_quarter, places)):
            word, number = quarter
            low = self._variable(f"({words[word]} >> {_HALF_BITS * number}) & 0x7777u")
            shifted = f"{words[word]} >> {_HALF_BITS * number + 1}"
            high = self._variable(f"{self._wrapper('and_or')}({shifted}, 0x4444u, 0x3210u)")
            chosen[quarter] = [
                self._variable(f"__byte_perm(__byte_perm({a}, {b}, {low}), __byte_perm({c}, {d}, {low}), {high})")
                for a, b, c, d in planes
            ]
        pairs = []
        for lanes in order:
            (first, at), (second, other_at) = ((_quarter(places[i]), places[i][1] // TABLE_BITS % 4) for i in lanes)
            if first == second:
                pairs.append(_join_bytes(chosen[first], (at, other_at)))
            else:  # a half each
                halves = (_join_bytes(chosen[q], (i, i)) for q, i in ((first, at), (second, other_at)))
                pairs.append(f"__byte_perm({', '.join(halves)}, 0x5410)")
        return tuple(pairs)

    def _table_bytes(self, table: BufferRef) -> list[tuple[str, ...]]:
        """Print the bytes of a table's 16 floats, four in a word: the low ones if there are any, and the high ones."""
        count = (1 << TABLE_BITS) * table.dtype.bits // WIDEST_BITS
        at = (f"&{table.identifier}[{i * WIDEST_BITS // table.dtype.bits}]" for i in range(count))
        words = [pattern.format(place) for place in at for pattern in _LOADED_WORDS[WIDEST_BITS]]
        if table.dtype is DType.FLOAT8_E5M2:  # the high byte of a float16
            return [tuple(self._variable(word) for word in words)]
        if table.dtype is DType.FLOAT8_E4M3FN:
            convert = self._wrapper("e4m3x2_to_f16x2")
            named = [self._variable(word) for word in words]
            words = [f"{convert}((unsigned short)({w}))" for word in named for w in (word, f"{word} >> {_HALF_BITS}")]
        named = [self._variable(word) for word in words]
        pairs = list(zip(named[::2], named[1::2], strict=True))
        return [tuple(self._variable(f"__byte_perm({a}, {b}, {selector})") for a, b in pairs) for selector in ("0x6420", "0x7531")]

    def _bits(self, value: Expr, buffer: BufferRef | None) -> str:
        """Print the bits of a 16-bit float in memory."""
        if not isinstance(value, Load) or buffer is None:
            raise TypeError(value)
        if not buffer.shape:
            return buffer.identifier
        return f"{buffer.identifier}[{self.visitor.scalar.address(buffer, value.index)}]"

    def _print_integers(self, integers: _Integers, order: LanePairs, guard: str) -> tuple[str, ...]:
        """Print the words of pairs of lanes: the field under an exponent, scaled, plus what the others leave."""
        field, short = integers.field, SHORT[self.dtype]
        words = [self._variable(word, guard if field.in_memory else "") for word in field.words]
        shifted: dict[tuple[int, int], str] = {}
        raw = [self._raw_pair(words, shifted, field, lanes) for lanes in order]
        bases = [self._base(integers, up) for _, up in raw]
        # the sum of the others and the exponent's value is exact, too: it is added at once
        is_exact = integers.least - _EXPONENT[self.dtype][1] >= -EXACT_INTEGERS[self.dtype]
        addends = self._addends(integers.others if is_exact else (), bases, order, guard)
        pairs = []
        for (text, up), addend in zip(raw, addends, strict=True):
            if up:
                scale = f"0x{(_EXPONENT_BIAS - up << _FRACTION_BITS[self.dtype]) * 0x10001:08x}u"
                pairs.append(f"{self._wrapper(f'fma_{short}x2')}({text}, {scale}, {addend})")
            else:
                pairs.append(f"{self._wrapper(f'add_{short}x2')}({text}, {addend})")
        if is_exact or not integers.others:
            return tuple(pairs)
        others = self._addends(integers.others, [_Base(0, None)] * len(pairs), order, guard)
        add = self._wrapper(f"add_{short}x2")
        return tuple(f"{add}({pair}, {other})" for pair, other in zip(pairs, others, strict=True))

    def _base(self, integers: _Integers, up: int) -> _Base:
        """Return what is to be subtracted from integers `up` bits above the last digit of the exponent's float."""
        one = _EXPONENT[self.dtype][1] >> up
        last = (1 << integers.field.bits) - 1 - integers.subtracted
        # the range of the constant and the integer that is subtracted
        low, high = last - integers.greatest + integers.subtracted, -integers.least
        fits = low >= 0 and high < one and all(kind is OpKind.SUB for kind, _ in integers.others)
        return _Base(one + integers.subtracted, one if fits else None)

    def _raw_pair(
        self, words: list[str], shifted: dict[tuple[int, int], str], field: _Field, lanes: tuple[int, int]
    ) -> tuple[str, int]:
        """Return the integers of two lanes with the exponent above, and how many bits up in the halves they are."""
        exponent, _ = _EXPONENT[self.dtype]
        (word, bit), (other, other_bit) = (field.places[lane] for lane in lanes)
        if field.bits == BYTE_BITS and word == other:
            moved = f"0x4{other_bit // BYTE_BITS}4{bit // BYTE_BITS}"
            return f"__byte_perm({words[word]}, 0x{(exponent >> 24) * 0x1010101:08x}u, {moved})", 0

        def shift(word: int, by: int) -> str:
            if (word, by) not in shifted:
                shifted[word, by] = self._variable(f"{words[word]} >> {by}") if by else words[word]
            return shifted[word, by]

        mask, and_or = ((1 << field.bits) - 1) * 0x10001, self._wrapper("and_or")
        if word == other and other_bit == bit + _HALF_BITS:
            up = bit % BYTE_BITS if self.dtype is DType.FLOAT16 else 0
            up = up if up + field.bits <= _FRACTION_BITS[self.dtype] else 0
            return f"{and_or}({shift(word, bit - up)}, 0x{mask << up:08x}u, 0x{exponent:08x}u)", up
        first, second = shift(word, bit % BYTE_BITS), shift(other, other_bit % BYTE_BITS)
        at, other_at = bit // BYTE_BITS, other_bit // BYTE_BITS
        moved = f"__byte_perm({first}, {second}, 0x{other_at + 4}{other_at + 4}{at}{at})"
        return f"{and_or}({moved}, 0x{mask:08x}u, 0x{exponent:08x}u)", 0

    def _addends(
        self, others: tuple[tuple[OpKind, Expr | _Integers], ...], bases: Sequence[_Base], order: LanePairs, guard: str
    ) -> list[str]:
        """Return the word to add to each pair: the other integers less a constant."""
        if not others:
            return [self._constant(-base.value) for base in bases]
        ((kind, value),) = others
        if isinstance(value, _Integers):
            combine = self._wrapper(f"{'add' if kind is OpKind.ADD else 'sub'}_{SHORT[self.dtype]}x2")
            words = self._print_integers(value, order, guard)
            both = zip(bases, words, strict=True)
            return [f"{combine}({self._constant(-base.value)}, {word})" for base, word in both]
        text = self.visitor.scalar.value(value)
        if guard and loads_of(value):
            text = f"({guard} ? {text} : 0)"
        known = {base: self._splat(kind, text, base) for base in dict.fromkeys(bases)}
        return [known[base] for base in bases]

    def _constant(self, value: int) -> str:
        """Return a word with both halves equal to an integer."""
        return f"0x{_float_bits(value, self.dtype) * 0x10001:08x}u"

    def _splat(self, kind: OpKind, integer: str, base: _Base) -> str:
        """Print an integer of all lanes less a constant as a word of two floats."""
        if base.digits is not None:  # the integer is in the last digits of a negative float
            bits = _float_bits(-base.digits, self.dtype) * 0x10001
            unit = 0x10001 * (_EXPONENT[self.dtype][1] // base.digits)
            return self._variable(f"(unsigned int)({integer} + {base.value - base.digits}) * {unit}u + 0x{bits:08x}u")
        convert = self.visitor.scalar.helper(f"f32_to_{SHORT[self.dtype]}")
        sign = "" if kind is OpKind.ADD else "-"
        return self._variable(f"{convert}((float)({sign}{integer} - {base.value})) * 0x10001u")

    def _wrapper(self, name: str) -> str:
        """Return the name of a wrapper, and emit it with the helpers it needs."""
        for needed in require(instruction(name), name).needs:
            self.visitor.scalar.helper(needed)
        self.visitor.scalar.helpers[name] = None
        return name

    def _variable(self, text: str, guard: str = "") -> str:
        return self._new_variable("packed.word", DType.UINT32, f"{guard} ? {text} : 0u" if guard else text)

    def _float_variable(self, text: str, guard: str) -> str:
        return self._new_variable("packed.scale", DType.FLOAT32, f"{guard} ? {text} : 0.0f" if guard else text)

    def _new_variable(self, base: str, dtype: DType, text: str) -> str:
        number = 0
        while (name := f"{base}{number}") in self.visitor.scalar.buffers:
            number += 1
        identifier = self.visitor.names.of(name)
        self.visitor.emit_line(f"const {self.visitor.dialect.value_type(dtype)} {identifier} = {text};")
        self.visitor.scalar.buffers[name] = BufferRef(identifier, dtype, ())
        return identifier


def _chain(value: str, terms: Sequence[tuple[str, str]]) -> str:
    """Print a value, then each operator with its operand, one after the other."""
    for symbol, operand in terms:
        value = f"({value} {symbol} {operand})"
    return value


def _is_memory(load: Load) -> bool:
    """Return whether a load reads a tensor of the program; names of local arrays and variables have dots."""
    return "." not in load.tensor


def _represents(dtype: DType, integers: _Integers) -> bool:
    """Return whether arithmetic of the type does not wrap."""
    least, greatest = dtype.integer_range
    return least <= integers.least and integers.greatest <= greatest


_ANY_AXIS, _AXIS_RANGE = ".", (0, (1 << 31) - 1)


def _without_cast(node: Expr) -> Expr:
    """Drop a conversion of an index: the range of the whole shift is checked."""
    return node.arg if isinstance(node, Cast) and not loads_of(node.arg) else node


def _without_axes(expr: Expr) -> Expr:
    """Replace all axes, which are not negative, by one."""
    return rewrite(expr, lambda node: AxisRef(_ANY_AXIS) if isinstance(node, AxisRef) else node)


def _is_packed(pairs: _Pairs) -> bool:
    match pairs:
        case _Integers() | _Float8() | _LookedUp() | _Scaled():
            return True
        case _Product(factors=factors):
            return any(map(_is_packed, factors))
        case _Guarded(pairs=inner):
            return _is_packed(inner)
        case _:
            return False


def _quarter(place: tuple[int, int]) -> tuple[int, int]:
    """Return the word of a place, and the number of its half: four indices of four bits."""
    word, bit = place
    return word, bit // _HALF_BITS


def _join_bytes(planes: Sequence[str], at: tuple[int, int]) -> str:
    """Print a word of two floats from their bytes: low and high ones, or high ones only."""
    low, high = planes if len(planes) == 2 else ("0u", *planes)
    selector = "".join(f"{4 + i}{i if len(planes) == 2 else 0}" for i in reversed(at))
    return f"__byte_perm({low}, {high}, 0x{selector})"


def _float_bits(value: int, dtype: DType) -> int:
    """Return the bits of a small integer as float16 or bfloat16."""
    if value == 0:
        return 0
    sign, magnitude = (0x8000, -value) if value < 0 else (0, value)
    fraction_bits, bias = (10, 15) if dtype is DType.FLOAT16 else (7, 127)
    exponent = magnitude.bit_length() - 1
    fraction = (magnitude << fraction_bits >> exponent) - (1 << fraction_bits)
    if (fraction + (1 << fraction_bits)) << exponent != magnitude << fraction_bits:
        raise ValueError(f"{value} is not a {dtype.value}")
    return sign | (exponent + bias) << fraction_bits | fraction
