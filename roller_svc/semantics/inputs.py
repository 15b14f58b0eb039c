"""Random inputs of a program: in the domains of its functions, with indices inside their tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roller_svc.analysis.wide_values import Array, convert, narrow
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, Op, OpKind, Select, iter_subexpressions, loads_of
from roller_svc.ir.program import StatementKind, TensorProgram

_POSITIVE_DOMAIN = frozenset({OpKind.LOG, OpKind.LOG2, OpKind.LOG10, OpKind.SQRT, OpKind.RSQRT})
_DIVISIONS = frozenset({OpKind.FLOORDIV, OpKind.MOD, OpKind.FMOD, OpKind.REMAINDER, OpKind.TRUNC_DIV})
_SHIFTS = frozenset({OpKind.SHL, OpKind.SHR})


@dataclass(slots=True)
class _InputConstraints:
    """Constraints that the program's expressions put on its inputs, by name."""

    positive: set[str] = field(default_factory=set)
    above_one: set[str] = field(default_factory=set)
    divisors: set[str] = field(default_factory=set)
    small: set[str] = field(default_factory=set)
    shift_widths: dict[str, int] = field(default_factory=dict)
    index_sizes: dict[str, int] = field(default_factory=dict)
    scatter_indices: set[str] = field(default_factory=set)


def random_inputs(
    program: TensorProgram,
    seed: int,
    hints: Mapping[str, Mapping[str, Any]] | None = None,
    distinct: int | None = None,
) -> dict[str, Array]:
    """Draw an array for every input.

    Floats are uniform in [-1, 1], positive under logarithms and roots, above 1 under acosh. Integers are small,
    divisors are not 0, shift counts are below the width. Indices are inside the smallest dimension they index; indices
    of a scatter are distinct if the dimension is large enough.

    Args:
        hints: overrides by input: `range` [low, high), `values`, `unique`.
        distinct: number of values drawn for an array without hints, then repeated; drawing is slower than a kernel.
    """
    patterns = draw_patterns(program, seed, hints, distinct)
    return {name: _repeat(patterns[name], math.prod(kind.shape)).reshape(kind.shape) for name, kind in program.inputs}


def draw_patterns(
    program: TensorProgram,
    seed: int,
    hints: Mapping[str, Mapping[str, Any]] | None = None,
    distinct: int | None = None,
) -> dict[str, Array]:
    """Draw the values of `random_inputs` before they are repeated: flat arrays of at most `distinct` values."""
    rng = np.random.default_rng(seed)
    constraints = _infer_constraints(program)
    result = {}
    for name, type_ in program.inputs:
        hint = (hints or {}).get(name, {})
        drawn = _draw_from_hint(rng, hint, type_.dtype, type_.shape)
        if drawn is None:
            total = math.prod(type_.shape)
            repeats = distinct is not None and distinct < total and name not in constraints.scatter_indices
            shape = (distinct,) if distinct is not None and repeats else type_.shape
            drawn = _draw(rng, name, type_.dtype, shape, constraints)
        source = DType.FLOAT64 if drawn.dtype.kind == "f" else DType.INT64
        wide = convert(np.asarray(drawn), source, type_.dtype, rounded=False)
        result[name] = np.ascontiguousarray(narrow(wide, type_.dtype)).reshape(-1)
    return result


def _repeat(values: Array, total: int) -> Array:
    """Repeat the values up to `total` elements."""
    if values.size == total:
        return values
    result = np.empty(total, values.dtype)
    for start in range(0, total, values.size):
        part = result[start : start + values.size]
        part[:] = values[: part.size]
    return result


def _draw_from_hint(rng: np.random.Generator, hint: Mapping[str, Any], dtype: DType, shape: tuple[int, ...]) -> Array | None:
    total = math.prod(shape)
    values = hint.get("values")
    if values is not None and np.size(values) == total:
        return np.asarray(values, dtype=np.float64 if dtype.is_float else np.int64).reshape(shape)
    if "range" in hint:
        low, high = hint["range"]
        return rng.uniform(low, high, shape) if dtype.is_float else rng.integers(low, high, shape)
    if hint.get("unique"):
        return _draw_distinct(rng, max(int(hint["unique"]), total), shape)
    return None


def _draw_distinct(rng: np.random.Generator, size: int, shape: tuple[int, ...]) -> Array:
    return rng.permutation(size)[: math.prod(shape)].reshape(shape)


def _draw(rng: np.random.Generator, name: str, dtype: DType, shape: tuple[int, ...], constraints: _InputConstraints) -> Array:
    if dtype.is_float:
        low, high = -1.0, 1.0
        if name in constraints.positive:
            low, high = 0.1, 2.0
        if name in constraints.above_one:
            low, high = 1.1, 3.0
        return rng.uniform(low, high, shape)
    if name in constraints.index_sizes:
        size = min(constraints.index_sizes[name], dtype.integer_range[1] + 1)  # the largest int8 index is 127
        if name in constraints.scatter_indices and math.prod(shape) <= size <= 1 << 24:
            return _draw_distinct(rng, size, shape)
        return rng.integers(0, size, shape)
    if dtype is DType.BOOL:
        return rng.integers(0, 2, shape)
    if name in constraints.shift_widths:
        return rng.integers(0, min(8, constraints.shift_widths[name]), shape)
    if name in constraints.divisors:
        return rng.integers(1, 8, shape)
    if name in constraints.small or not dtype.is_signed:
        return rng.integers(0, 8, shape)
    return rng.integers(-4, 5, shape)


def _infer_constraints(program: TensorProgram) -> _InputConstraints:
    constraints = _InputConstraints()
    tracer = _Tracer(program)
    for statement in program.statements:
        scatter = statement.kind is StatementKind.SCATTER
        roots = (statement.body, *statement.index, *(() if statement.predicate is None else (statement.predicate,)))
        for node in (n for root in roots for n in iter_subexpressions(root)):
            if isinstance(node, Op):
                _constrain_operands(node, tracer, constraints)
            elif isinstance(node, Load):
                _constrain_index(node.index, program.types[node.tensor].shape, tracer, constraints)
        if scatter:
            _constrain_index(statement.index, statement.type.shape, tracer, constraints)
            for index in statement.index:
                constraints.scatter_indices |= tracer.integer_sources(index)
    return constraints


def _constrain_index(index: Sequence[Expr], shape: tuple[int, ...], tracer: _Tracer, constraints: _InputConstraints) -> None:
    for expr, size in zip(index, shape, strict=True):
        for name in tracer.integer_sources(expr):
            constraints.index_sizes[name] = min(size, constraints.index_sizes.get(name, size))


def _constrain_operands(op: Op, tracer: _Tracer, constraints: _InputConstraints) -> None:
    fractional = op.kind is OpKind.POW and op.dtype.is_float and not _is_whole(op.args[1])
    if op.kind in _POSITIVE_DOMAIN or fractional:
        constraints.positive |= tracer.summands(op.args[0])
    elif op.kind is OpKind.ACOSH:
        constraints.above_one |= tracer.summands(op.args[0])
    elif op.kind is OpKind.DIV:
        constraints.divisors |= tracer.integer_sources(op.args[1])
    elif not op.dtype.is_float and op.kind in _DIVISIONS:
        constraints.small |= tracer.integer_sources(op.args[0])
        constraints.divisors |= tracer.integer_sources(op.args[1])
    elif op.kind in _SHIFTS:
        constraints.small |= tracer.integer_sources(op.args[0])
        for name in tracer.integer_sources(op.args[1]):
            constraints.shift_widths[name] = min(op.dtype.bits, constraints.shift_widths.get(name, op.dtype.bits))


def _is_whole(expr: Expr) -> bool:
    while isinstance(expr, Cast):
        expr = expr.arg
    return isinstance(expr, Const) and float(expr.value).is_integer()


class _Tracer:
    """Trace a value to the inputs it comes from, through intermediates."""

    def __init__(self, program: TensorProgram) -> None:
        self.inputs = dict(program.inputs)
        self.bodies = {s.output: s.body for s in program.statements if s.kind is not StatementKind.SCATTER}
        self._summands: dict[str, frozenset[str]] = {}
        self._integers: dict[str, frozenset[str]] = {}

    def integer_sources(self, expr: Expr) -> frozenset[str]:
        """Return the integer inputs that the expression reads."""
        sources: frozenset[str] = frozenset()
        for load in loads_of(expr):
            sources |= self._integers_of(load.tensor)
        return sources

    def _integers_of(self, tensor: str) -> frozenset[str]:
        if tensor not in self._integers:
            self._integers[tensor] = frozenset()
            if tensor in self.inputs:
                whole = not self.inputs[tensor].dtype.is_float
                self._integers[tensor] = frozenset({tensor}) if whole else frozenset()
            elif tensor in self.bodies:
                self._integers[tensor] = self.integer_sources(self.bodies[tensor])
        return self._integers[tensor]

    def summands(self, expr: Expr) -> frozenset[str]:
        """Return the floating inputs that decide the expression's sign, through sums, scalings, selects and copies."""
        match expr:
            case Load(tensor=tensor):
                return self._summands_of(tensor)
            case Cast(arg=arg):
                return self.summands(arg)
            case Select(then=then, otherwise=otherwise):
                return self.summands(then) | self.summands(otherwise)
            case Op(kind=OpKind.ADD | OpKind.MAX | OpKind.MIN | OpKind.FMAX | OpKind.FMIN, args=args):
                return frozenset().union(*(self.summands(a) for a in args))
            case Op(kind=OpKind.DIV, args=(numerator, _)):
                return self.summands(numerator)
            case Op(kind=OpKind.MUL, args=(x, y)) if isinstance(x, Const) or isinstance(y, Const):
                return self.summands(x) | self.summands(y)
            case _:
                return frozenset()

    def _summands_of(self, tensor: str) -> frozenset[str]:
        if tensor not in self._summands:
            self._summands[tensor] = frozenset()
            if tensor in self.inputs:
                floating = self.inputs[tensor].dtype.is_float
                self._summands[tensor] = frozenset({tensor}) if floating else frozenset()
            elif tensor in self.bodies:
                self._summands[tensor] = self.summands(self.bodies[tensor])
        return self._summands[tensor]
