"""First elements of an axis by selection: bisection finds the last one of them, a scan lists them, comparisons sort them.

A round of the bisection counts the elements that are not behind a candidate. It decides a bit of the last element's
value. All rounds read one row, which a kernel keeps on chip.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from roller_svc.frontend.ops.operator import Call
from roller_svc.frontend.ops.text import guard, join_statements, statement
from roller_svc.ir.dtype import DType

# Exponents of the least and the greatest power of two, and bits of a fraction.
_POWERS = {
    DType.FLOAT32: (-149, 127, 23),
    DType.BFLOAT16: (-133, 127, 7),
    DType.FLOAT16: (-24, 15, 10),
}
MAX_BITS = 32  # of a type: a round is a statement, of which programs have few
MAX_STEP = 126  # exponent of a factor in float32
ROUNDS_OF_MAP = 8  # rounds between values that are computed once: expressions of moderate size
COUNT_BITS = 21  # of each of three counts in an int64
MAX_SELECTED_FROM = 1 << COUNT_BITS - 1  # elements of an axis


def may_select(dtype: DType, extent: int) -> bool:
    """Return whether rounds decide values of a type, and counts hold the elements of an axis.

    Conversions of float8 would be repeated in every round.
    """
    is_decided = dtype in _POWERS if dtype.is_float else dtype.bits <= MAX_BITS
    return is_decided and extent <= MAX_SELECTED_FROM


def count_comparisons(dtype: DType, extent: int, count: int) -> int:
    """Return the comparisons of a row: all elements in each round, and those found with each other."""
    return _count_rounds(dtype) * extent + count * count


def _count_rounds(dtype: DType) -> int:
    """Return how often a selection reads a row."""
    if not dtype.is_float:
        return dtype.bits
    least, greatest, fraction = _POWERS[dtype]
    return (greatest - least).bit_length() + fraction + len(("sign", "infinity", "list"))


def select_in_order(call: Call, axis: int, count: int) -> str:
    """Return the statements that find the positions of the first `count` elements along an axis, in order."""
    selection = _Selection(call, axis, count)
    return join_statements(*selection.find_last(), *selection.list_chosen(), *selection.sort_chosen())


@dataclass(frozen=True)
class _Selection:
    call: Call
    axis: int
    count: int

    @cached_property
    def axes(self) -> tuple[str, ...]:
        return self.call.axes(self.call.x.rank)

    @cached_property
    def rows(self) -> tuple[str, ...]:
        return (*self.axes[: self.axis], *self.axes[self.axis + 1 :])

    @property
    def dtype(self) -> DType:
        return self.call.x.dtype

    @property
    def key_dtype(self) -> DType:
        """Return a type of 32 bits that has all values."""
        if self.dtype.is_float:
            return DType.FLOAT32
        return DType.UINT32 if self.dtype is DType.UINT32 else DType.INT32

    @property
    def extent(self) -> int:
        return self.call.x.shape[self.axis]

    @cached_property
    def largest(self) -> bool:
        return self.call.flag("largest")

    def name(self, role: str) -> str:
        return self.call.intermediate(role)

    def extents(self, *along: tuple[str, int]) -> list[tuple[str, int]]:
        """Return the extents of the axes of the rows, and of others."""
        shape = self.call.x.shape
        return [*zip(self.rows, (*shape[: self.axis], *shape[self.axis + 1 :]), strict=True), *along]

    def row(self, role: str) -> str:
        """Return the element of a row's tensor."""
        return f"{self.name(role)}[{', '.join(self.rows)}]"

    def along(self, *middle: str) -> tuple[str, ...]:
        return (*self.axes[: self.axis], *middle, *self.axes[self.axis + 1 :])

    def element(self, place: str) -> str:
        return self.call.x.at(*self.along(place))

    def map(self, role: str, value: str, dtype: DType = DType.INT32) -> str:
        return statement(self.name(role), self.rows, "=", value, dtype=dtype)

    def counted(self, role: str, condition: str) -> str:
        """Return the statement that counts the elements of a row for which a condition holds."""
        return statement(self.name(role), self.rows, "+=!", f"where({condition}, 1, 0)", dtype=DType.INT32)

    # the last element --------------------------------------------------------------------------------------------
    def find_last(self) -> Iterator[str]:
        """Yield the statements that compute the last one of the first elements of each row."""
        if self.dtype.is_float:
            yield from self._find_last_float()
        else:
            yield from self._find_last_integer()

    def _find_last_integer(self) -> Iterator[str]:
        """Add the bits of the value to the least one, from the highest bit on."""
        low, high = (0, 1) if self.dtype is DType.BOOL else self.dtype.integer_range
        half, dtype = 1 << (high - low).bit_length() - 1, self.key_dtype
        element, wanted = self.element(self.axes[self.axis]), str(self._place_from_greatest())

        def constant(value: int) -> str:
            return f"const({value}, `{dtype.value}`)"

        yield self.counted("first", f"{element} >= {constant(low + half)}")
        start = f"where({self.row('first')} >= {wanted}, {constant(low + half)}, {constant(low)})"
        yield self.map("start", start, dtype)
        steps = [constant(half >> n) for n in range(1, half.bit_length())]
        found = yield from _Bisection(self, "bit", element, "+", constant(0), wanted, dtype).rounds(self.row("start"), steps)
        yield self.map("last", found, dtype)

    def _place_from_greatest(self) -> int:
        """Return which of all elements in descending order is the last one."""
        return self.count if self.largest else self.extent - self.count + 1

    def _find_last_float(self) -> Iterator[str]:
        """Find the sign, then the exponent and the fraction of the magnitude.

        Powers of two begin at the least one. All candidates are values of the type, and computed without rounding.
        """
        element = self.element(self.axes[self.axis])
        least, greatest, fraction = _POWERS[self.dtype]
        yield self.counted("nans", f"isnan({element})")
        yield self.counted("positive", f"{element} > 0.0")
        yield self.counted("not_negative", f"{element} >= 0.0")
        nans, positive, needed = self.row("nans"), self.row("positive"), self.row("needed")
        wanted, rest = f"({self._place_from_greatest()} - {nans})", self.extent + 1 - self._place_from_greatest()
        yield self.map("needed", f"where({positive} >= {wanted}, {wanted}, {rest})")
        yield self.map("sign", f"where({positive} >= {wanted}, 1.0, -1.0)", DType.FLOAT32)
        magnitude = f"{element} * {self.row('sign')}"
        powers = _Bisection(self, "power", magnitude, "*", "1.0", needed, DType.FLOAT32)
        power = yield from powers.rounds(repr(2.0**least), [repr(2.0**n) for n in _exponent_steps(greatest - least)])
        yield self.map("power", power, DType.FLOAT32)
        power = self.row("power")
        parts = _Bisection(self, "part", magnitude, "+", "0.0", needed, DType.FLOAT32)
        found = yield from parts.rounds(power, [f"{power} * {2.0**-n!r}" for n in range(1, fraction + 1)])
        yield self.counted("infinite", f"{magnitude} == const(`inf`)")
        found = f"where({self.row('infinite')} >= {needed}, const(`inf`), {found})"
        is_zero = f"({positive} < {wanted}) & ({self.row('not_negative')} >= {wanted})"
        found = f"where({is_zero}, 0.0, {self.row('sign')} * {found})"
        has_nan = f"{nans} >= {self.count}" if self.largest else f"{nans} > {self.extent - self.count}"
        yield self.map("last", f"where({has_nan}, const(`inf`), {found})", DType.FLOAT32)

    # the first elements ---------------------------------------------------------------------------------------------
    def _classes(self, place: str) -> list[tuple[str, str]]:
        """Return the conditions of the classes of elements in their order, each with the elements in front of it.

        NaN is first or last. Where it is the last one of the first elements, that counts as infinity: then all others
        are before NaN, or none is found behind it.
        """
        element, last, numbers = self.element(place), self.row("last"), ""
        if self.dtype.is_float and self.largest:
            numbers = self.row("nans")
        in_front = self.row("in_front")
        found = [
            (f"{element} {'>' if self.largest else '<'} {last}", numbers or "0"),
            (f"{element} == {last}", f"{numbers} + {in_front}" if numbers else in_front),
        ]
        if not self.dtype.is_float:
            return found
        is_nan = f"isnan({element})"
        return [(is_nan, "0"), *found] if self.largest else [*found, (is_nan, f"{self.extent} - {self.row('nans')}")]

    def list_chosen(self) -> Iterator[str]:
        """Yield the statements that list the positions, class by class, each in the order of the axis."""
        here, other, slot = self.axes[self.axis], self.call.axis("other"), self.call.axis("slot")
        element, last = self.element(here), self.row("last")
        yield self.counted("in_front", f"{element} {'>' if self.largest else '<'} {last}")
        value, place = "0", str(self.count)
        found = f"{self.name('counts')}[{', '.join(self.axes)}]"
        for n, (condition, _) in reversed(list(enumerate(self._classes(other)))):
            value = f"where({condition}, const({1 << COUNT_BITS * n}, `int64`), {value})"
        for n, (condition, before) in reversed(list(enumerate(self._classes(here)))):
            own = f"{before} + ({found} // {1 << COUNT_BITS * n} % {1 << COUNT_BITS}).cast(`int32`)"
            place = f"where({condition}, {own}, {place})"
        yield statement(self.name("counts"), self.axes, "+=!", guard(value, [f"{other} < {here}"], "0"),
                        where=[(here, self.extent), (other, self.extent)], dtype=DType.INT64)  # fmt: skip
        yield statement(self.name("slots"), self.axes, "=", place, dtype=DType.INT32)
        slots, chosen = f"{self.name('slots')}[{', '.join(self.axes)}]", self.name("chosen")
        where = self.extents((slot, self.count))
        yield statement(chosen, self.along(slot), "=", "0", where=where, dtype=DType.INT32)
        yield statement(chosen, self.along(slots), "+=.", f"{here}.when([{slots} < {self.count}])")

    def sort_chosen(self) -> Iterator[str]:
        """Yield the statements that count the chosen elements before each one, and store its position behind these.

        Equal ones are listed in order, and so are NaN and infinities, which have the same key.
        """
        place, other = self.call.axis("place"), self.call.axis("other")
        chosen, key, rank = self.name("chosen"), self.name("key"), self.name("rank")
        where = self.extents((place, self.count))

        def at(tensor: str, axis: str) -> str:
            return f"{tensor}[{', '.join(self.along(axis))}]"

        element = self.element(at(chosen, place))
        if self.dtype.is_float:
            element = f"where(isnan({element}), const(`inf`), {element}.cast(`float32`))"
        yield statement(key, self.along(place), "=", element, where=where, dtype=self.key_dtype)
        a, b = at(key, other), at(key, place)
        first = ">" if self.largest else "<"
        condition = f"({a} {first} {b}) | ({a} == {b}) & ({other} < {place})"
        yield statement(rank, self.along(place), "+=!", f"where({condition}, 1, 0)", where=[(other, self.count)],
                        dtype=DType.INT32)  # fmt: skip
        yield statement(self.call.output, self.along(place), "=", "0", where=where, dtype=self.call.dtype())
        yield statement(self.call.output, self.along(at(rank, place)), "=", at(chosen, place))


@dataclass(frozen=True)
class _Bisection:
    """Rounds that add a step to a value of each row, or multiply it, where enough elements reach the result."""

    selection: _Selection
    role: str
    element: str
    sign: str
    neutral: str
    wanted: str  # how many elements must reach a candidate
    dtype: DType

    def rounds(self, value: str, steps: Sequence[str]) -> Generator[str, None, str]:
        """Yield the statements of a round for each step; return the value found."""
        for n, step in enumerate(steps):
            if n and n % ROUNDS_OF_MAP == 0:
                yield self.selection.map(f"{self.role}s{n}", value, self.dtype)
                value = self.selection.row(f"{self.role}s{n}")
            yield self.selection.counted(f"{self.role}{n}", f"{self.element} >= {value} {self.sign} {step}")
            value += f" {self.sign} where({self.selection.row(f'{self.role}{n}')} >= {self.wanted}, {step}, {self.neutral})"
        return f"({value})"


def _exponent_steps(span: int) -> Iterator[int]:
    """Yield steps of which sums reach every number up to `span`, each step if the sum before it stays below."""
    while span:
        step = min(MAX_STEP, (span + 1) // 2)
        yield step
        span -= step
