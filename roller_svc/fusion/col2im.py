"""Transposed convolutions → a GEMM and col2im (Chellapilla et al., 2006, in the opposite direction).

O[n, f, h, w] += X[n, c, (h + p - k) // s, ...] * W[c, f, k, l] where s divides h + p - k: of s * s taps that a result
tests, one is a product. Without a stride, most taps of a small image are outside. The GEMM
Z[n, f, k, l, y, x] += W[c, f, k, l] * X[n, c, y, x] computes each product once, and col2im adds the products of a
result over the taps k = s * j + (h + p) % s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from roller_svc.analysis.sum_of_products import is_window, sum_of_products
from roller_svc.fusion.contraction import MIN_K
from roller_svc.ir.affine import Affine, affine, slack
from roller_svc.ir.expr import (
    AxisRef,
    Const,
    Expr,
    Load,
    Op,
    OpKind,
    Select,
    axes_of,
    loads_of,
    rewrite,
    substitute,
)
from roller_svc.ir.index import add, conjuncts, div, le, logical_and, lt, mod, mul, num, ref, sub
from roller_svc.ir.program import Axis, AxisKind, Combine, StatementKind, TensorExpr, TensorType

MIN_EXPANSION = 2.0  # results for each point of the data, below which few of the tests fail


def insert_col2im(statements: Sequence[TensorExpr], types: Mapping[str, TensorType], *, in_phases: bool) -> tuple[TensorExpr, ...]:
    """Return the statements with each transposed convolution as a GEMM and col2im.

    `in_phases`: where rows of the result are contiguous along the window, results of one remainder modulo the stride
    are computed side by side and then interleaved, so that vectors read adjacent products.
    """
    result: list[TensorExpr] = []
    for statement in statements:
        found = _match(statement, types)
        result += (statement,) if found is None else found.statements(in_phases=in_phases)
    return tuple(result)


def is_transposed_convolution(statement: TensorExpr, types: Mapping[str, TensorType]) -> bool:
    """Return whether a statement is a sum of guarded products with more results than points of the data."""
    return _guarded_windows(statement, types) is not None


def _guarded_windows(statement: TensorExpr, types: Mapping[str, TensorType]) -> tuple[Select, tuple[_Window, ...]] | None:
    """Return the one factor with a guard and windows, where it is 0 outside of them, and these windows."""
    form = sum_of_products(statement)
    if form is None or len(form.selects) != 1:
        return None
    (select,) = form.selects
    windows = _windows(statement, select, types)
    if not (isinstance(select.otherwise, Const) and select.otherwise.value == 0) or windows is None:
        return None
    expansion = math.prod(w.out.extent for w in windows) / math.prod(w.size for w in windows)
    return (select, windows) if expansion >= MIN_EXPANSION else None


def _divided(condition: Expr) -> tuple[Expr, int] | None:
    """Return the expression and its divisor if the condition is that a number > 1 divides it."""
    match condition:
        case Op(kind=OpKind.EQ, args=(Op(kind=OpKind.MOD, args=(x, Const(value=int(by)))), Const(value=0))) if by > 1:
            return x, by
        case _:
            return None


@dataclass(frozen=True, slots=True)
class _Window:
    """A dimension whose index is (out + padding - tap) // stride, and needs no other tap than the stride divides."""

    out: Axis
    tap: Axis
    padding: int
    stride: int
    size: int  # of the dimension

    @property
    def taps(self) -> int:
        """Return the taps of one result, at most."""
        return -(-self.tap.extent // self.stride)

    @property
    def data(self) -> Axis:
        return Axis(f"{self.out.name}.data", self.size, AxisKind.SPATIAL)

    @property
    def phase(self) -> Axis:
        return Axis(f"{self.out.name}.phase", self.stride, AxisKind.SPATIAL)

    @property
    def quotient(self) -> Axis:
        extent = (self.out.extent - 1 + self.padding) // self.stride + 1
        return Axis(f"{self.out.name}.quotient", extent, AxisKind.SPATIAL)

    @property
    def short_tap(self) -> Axis:
        return Axis(f"{self.tap.name}.short", self.taps, AxisKind.REDUCE)

    def matches(self, form: Affine | None) -> bool:
        """Return whether the affine function is out - tap with some offset."""
        return form is not None and form.coeffs == tuple(sorted(((self.out.name, 1), (self.tap.name, -1))))


@dataclass(frozen=True)
class _TransposedConvolution:
    statement: TensorExpr
    windows: tuple[_Window, ...]
    bounds: tuple[tuple[int, int], ...]  # of the index of each window, inclusive, by the guard
    product: Expr  # of a point of the data: windows' indices are data axes

    @cached_property
    def _has_channels(self) -> bool:
        """Return whether the products are sums over other axes than taps, which a GEMM computes."""
        taps = {window.tap.name for window in self.windows}
        return math.prod(a.extent for a in self.statement.reduced if a.name not in taps) >= MIN_K

    def statements(self, *, in_phases: bool) -> tuple[TensorExpr, ...]:
        last = next((i for i in reversed(self.statement.index) if isinstance(i, AxisRef)), None)
        is_contiguous = any(w.stride > 1 and last == AxisRef(w.out.name) for w in self.windows)
        before, product, reduced = self._products() if self._has_channels else ((), self.product, self._other_reduced)
        if in_phases and is_contiguous:
            return (*before, *self._in_phases(product, reduced))
        return (*before, self._col2im(product, reduced))

    @property
    def _other_reduced(self) -> tuple[Axis, ...]:
        taps = {window.tap.name for window in self.windows}
        return tuple(a for a in self.statement.reduced if a.name not in taps)

    def _products(self) -> tuple[tuple[TensorExpr, ...], Expr, tuple[Axis, ...]]:
        """Return the GEMM, the load of its result at a tap and a point of the data, and the axes that remain."""
        axes = self._spatial_with([replace(w.tap, kind=AxisKind.SPATIAL) for w in self.windows])
        statement, dtype = self.statement, self.statement.type.dtype
        index = tuple(ref(a.name) for a in axes)
        name = f"{statement.output}.products"
        type_ = TensorType(dtype, tuple(a.extent for a in axes))
        gemm = TensorExpr(name, name, StatementKind.REDUCE, type_, (*axes, *self._other_reduced), index, self.product, Combine.SUM)
        return (gemm,), Load(name, index, dtype), ()

    def _spatial_with(self, taps: Sequence[Axis]) -> tuple[Axis, ...]:
        """Return the axes of the result over the data, with those of taps beside its windows, never innermost."""
        windows = {w.out.name: w.data for w in self.windows}
        result: list[Axis] = []
        outs = [a.name in windows for a in self.statement.spatial]
        place = outs.index(True) if outs[-1] else len(outs) - outs[::-1].index(True)
        for number, axis in enumerate(self.statement.spatial):
            if number == place:
                result += taps
            result.append(windows.get(axis.name, axis))
        return tuple(result)

    def _col2im(self, product: Expr, reduced: tuple[Axis, ...]) -> TensorExpr:
        """Return the sum over the taps of each result."""
        values: dict[str, Expr] = {}
        guard: Expr | None = None
        for w, (low, high) in zip(self.windows, self.bounds, strict=True):
            at = add(ref(w.out.name), num(w.padding))
            first = w.padding // w.stride - (w.taps - 1)
            last = (w.out.extent - 1 + w.padding) // w.stride
            guard = self._place(w, values, guard, (div(at, w.stride), mod(at, w.stride)))
            guard = _inside(guard, values[w.data.name], (low, first), (high, last))
        statement = self.statement
        axes = (*statement.spatial, *reduced, *(w.short_tap for w in self.windows))
        return replace(statement, axes=axes, body=self._guarded(product, guard, values))

    def _in_phases(self, product: Expr, reduced: tuple[Axis, ...]) -> tuple[TensorExpr, ...]:
        """Return the sums of all results with one remainder side by side, and the map that interleaves them."""
        values: dict[str, Expr] = {}
        guard: Expr | None = None
        strided = [w for w in self.windows if w.stride > 1]
        for w, (low, high) in zip(self.windows, self.bounds, strict=True):
            at = (ref(w.quotient.name), ref(w.phase.name) if w.stride > 1 else num(0))
            guard = self._place(w, values, guard, at)
            guard = _inside(guard, values[w.data.name], (low, 1 - w.taps), (high, w.quotient.extent - 1))
        quotients = {w.out.name: w.quotient for w in self.windows}
        phases = tuple(w.phase for w in strided)
        inner = tuple(quotients.get(a.name, a) for a in self.statement.spatial)
        axes = (*phases, *inner)
        name, dtype = f"{self.statement.output}.phases", self.statement.type.dtype
        sums = replace(
            self.statement,
            output=name,
            name=name,
            type=TensorType(dtype, tuple(a.extent for a in axes)),
            axes=(*axes, *reduced, *(w.short_tap for w in self.windows)),
            index=tuple(ref(a.name) for a in axes),
            body=self._guarded(product, guard, values),
        )
        shifted = {w.out.name: add(ref(w.out.name), num(w.padding)) for w in self.windows}
        stride = {w.out.name: w.stride for w in self.windows}
        index = (
            *(mod(shifted[w.out.name], w.stride) for w in strided),
            *(div(shifted.get(a.name, ref(a.name)), stride.get(a.name, 1)) for a in self.statement.spatial),
        )
        interleave = replace(
            self.statement,
            kind=StatementKind.MAP,
            combine=None,
            axes=self.statement.spatial,
            body=Load(name, index, dtype),
        )
        return sums, interleave

    def _place(self, w: _Window, values: dict[str, Expr], guard: Expr | None, at: tuple[Expr, Expr]) -> Expr | None:
        """Set the tap and the place in the data of one of a result's taps; `at` is its quotient and its phase."""
        short, (quotient, phase) = ref(w.short_tap.name), at
        tap = add(mul(short, num(w.stride)), phase)
        values |= {w.tap.name: tap, w.data.name: sub(quotient, short) if w.taps > 1 else quotient}
        return guard if w.tap.extent % w.stride == 0 else logical_and(guard, lt(tap, num(w.tap.extent)))

    def _guarded(self, product: Expr, guard: Expr | None, values: Mapping[str, Expr]) -> Expr:
        value = substitute(product, values)
        if guard is None:
            return value
        dtype = value.dtype
        return Select(guard, value, Const(0.0 if dtype.is_float else 0, dtype), dtype)


def _inside(guard: Expr | None, index: Expr, low: tuple[int, int], high: tuple[int, int]) -> Expr | None:
    """Add the bounds of an index; of each bound `low` and `high` have the needed and the known one."""
    if low[1] < low[0]:
        guard = logical_and(guard, le(num(low[0]), index))
    if high[1] > high[0]:
        guard = logical_and(guard, lt(index, num(high[0] + 1)))
    return guard


def _match(statement: TensorExpr, types: Mapping[str, TensorType]) -> _TransposedConvolution | None:
    """Return the statement as a transposed convolution; None if anything else depends on its windows' axes."""
    found = _guarded_windows(statement, types)
    if found is None or any(any(load.bounds_checked) for load in statement.reads):
        return None
    select, windows = found
    names = {name for w in windows for name in (w.out.name, w.tap.name)}
    data = rewrite(select.then, lambda node: _read_data(node, windows))
    of_windows: list[Expr] = []
    for condition in conjuncts(select.cond):
        if axes_of(condition) & names:
            of_windows.append(condition)
        else:
            data = Select(condition, data, select.otherwise, select.dtype)
    product = _replace_node(statement.body, select, data)
    bounds = _index_bounds(of_windows, windows)
    if bounds is None or axes_of(data) & names or axes_of(product) & {w.out.name for w in windows}:
        return None
    return _TransposedConvolution(statement, windows, bounds, product)


def _index_bounds(conditions: Sequence[Expr], windows: Sequence[_Window]) -> tuple[tuple[int, int], ...] | None:
    """Return the bounds of each window's index; None if a condition is none of them and no test of a stride.

    Every stride must be tested.
    """
    bounds = {w: (0, w.size - 1) for w in windows}
    untested = {w for w in windows if w.stride > 1}
    for condition in conditions:
        if (divided := _divided(condition)) is not None:
            x, by = divided
            tested = {w for w in windows if w.stride == by and _is_index(w, affine(x))}
            if not tested:
                return None
            untested -= tested
            continue
        window = next((w for w in windows if axes_of(condition) <= {w.out.name, w.tap.name}), None)
        limits = None if window is None else _limits(condition, window)
        if window is None or limits is None:
            return None
        low, high = bounds[window]
        bounds[window] = max(low, limits[0]), min(high, limits[1])
    return None if untested else tuple(bounds.values())


def _windows(statement: TensorExpr, select: Select, types: Mapping[str, TensorType]) -> tuple[_Window, ...] | None:
    """Return the windows of what the guard selects; None if there is an index that is none."""
    found: dict[Expr, _Window] = {}
    spatial = {a.name: a for a in statement.spatial}
    reduced = {a.name: a for a in statement.reduced}
    for load in loads_of(select.then):
        for index, size in zip(load.index, types[load.tensor].shape, strict=True):
            if not is_window(index, reduced) or loads_of(index):
                continue
            window = _window(index, size, spatial, reduced)
            if window is None:
                continue  # such as the channel of a group: an axis of a window is found in it later
            if found.setdefault(index, window) != window:
                return None
    windows = tuple(dict.fromkeys(found.values()))
    names = [name for w in windows for name in (w.out.name, w.tap.name)]
    return windows if windows and len(set(names)) == len(names) else None


def _window(index: Expr, size: int, spatial: Mapping[str, Axis], reduced: Mapping[str, Axis]) -> _Window | None:
    match index:
        case Op(kind=OpKind.FLOORDIV, args=(x, Const(value=int(stride)))) if stride > 0:
            form = affine(x)
        case _:
            form, stride = affine(index), 1
    if form is None or form.offset < 0 or len(form.coeffs) != 2:
        return None
    out = next((spatial[name] for name, c in form.coeffs if c == 1 and name in spatial), None)
    tap = next((reduced[name] for name, c in form.coeffs if c == -1 and name in reduced), None)
    return None if out is None or tap is None else _Window(out, tap, form.offset, stride, size)


def _is_index(window: _Window, form: Affine | None) -> bool:
    return window.matches(form) and form is not None and form.offset == window.padding


def _read_data(node: Expr, windows: Sequence[_Window]) -> Expr:
    """Replace a window's index by the axis of the data."""
    if isinstance(node, Load):
        index = tuple(_data_index(i, windows) for i in node.index)
        return node if index == node.index else replace(node, index=index)
    return node


def _data_index(index: Expr, windows: Sequence[_Window]) -> Expr:
    for w in windows:
        match index:
            case Op(kind=OpKind.FLOORDIV, args=(x, Const(value=int(by)))) if by == w.stride > 1:
                form = affine(x)
            case _:
                form = affine(index) if w.stride == 1 else None
        if _is_index(w, form):
            return ref(w.data.name)
    return index


def _limits(condition: Expr, window: _Window) -> tuple[int, int] | None:
    """Return the least and the largest index in the data that a comparison allows; None if it is something else.

    Where the stride divides it, out + padding - tap is the index times the stride.
    """
    place = f"{window.data.name}.index"

    def by_place(node: Expr) -> Expr:
        match node:
            case Op(kind=OpKind.FLOORDIV, args=(x, Const(value=int(by)))) if by == window.stride:
                return ref(place) if _is_index(window, affine(x)) else node
            case _:
                return node

    form = slack(rewrite(condition, by_place))
    if form is None:
        return None
    scale = 1
    if window.matches(form) or window.matches(Affine(tuple((n, -c) for n, c in form.coeffs), form.offset)):
        sign = form.coeff(window.out.name)
        offset, scale = form.offset - sign * window.padding, sign * window.stride
    elif form.coeffs in (((place, 1),), ((place, -1),)):
        offset, scale = form.offset, form.coeff(place)
    else:
        return None
    # scale * index + offset >= 0
    unbounded = window.size + window.tap.extent + window.out.extent
    if scale > 0:
        return -(offset // scale), unbounded
    return -unbounded, offset // -scale


def _replace_node(expr: Expr, old: Expr, new: Expr) -> Expr:
    return rewrite(expr, lambda node: new if node is old else node)
