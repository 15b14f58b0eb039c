"""Reference interpreter: TensorProgram, arrays → values. It defines the semantics of a program.

Every point of every statement is evaluated in numpy, in blocks of points: floats in float64, integers exactly and
wrapped after each operation. Explicit casts round, and so do the arrays that `reference` returns; between statements
floats stay wide. `evaluate` returns the wide values, each with a bound on a correct kernel's distance from it (see
`rounding`). `evaluate_sample` does so for a sample of the elements, for outputs that are too large to enumerate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from roller_svc.analysis.scans import Scan, match_scan
from roller_svc.analysis.wide_values import (
    Array,
    min_normal,
    narrow,
    storage_dtype,
    unit_roundoff,
    wide_dtype,
    widen,
    wrap,
)
from roller_svc.errors import ArgumentError, InvariantError, require
from roller_svc.ir.accumulation import AccumulatorPrecision
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Expr, Op, OpKind, Select
from roller_svc.ir.program import Combine, StatementKind, TensorExpr, TensorProgram
from roller_svc.semantics import rounding
from roller_svc.semantics.accumulate import Accumulator
from roller_svc.semantics.evaluator import Evaluator, Tensors, Term, accumulation_dtype, as_dtype
from roller_svc.semantics.recurrence import LinearSteps

# Points evaluated at once: a few arrays of 8 B a point stay in a core's caches.
BLOCK_POINTS = 1 << 19
MAX_DENSE_SCAN_POINTS = 1 << 22
# Statements of at most this many points are evaluated whole even if only some elements are needed.
WHOLE_POINTS = 1 << 22
# Limit of `evaluate_sample`: a minute or two.
LIMIT_POINTS = 1 << 32

Block = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Value:
    """The values of an output with their error bounds."""

    wide: Array  # float64, int64 or uint64, before the last rounding
    dtype: DType  # the type that a call rounds to
    error: Array | None = None  # None: a kernel must return exactly these values
    indices: Array | None = None  # flat indices of the elements in a one-dimensional `wide`; None: `wide` has all

    @property
    def rounded(self) -> Array:
        """The values as a call returns them."""
        return narrow(self.wide, self.dtype)


def reference(program: TensorProgram, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return every output by name, in its own type."""
    interpreter = _Interpreter(program, _check_inputs(program, arrays), track=False)
    with np.errstate(all="ignore"):
        interpreter.run()
    return {out.name: interpreter.value(out.tensor).rounded for out in program.outputs}


def evaluate(
    program: TensorProgram,
    arrays: Mapping[str, Array],
    *,
    allow_tf32: bool = False,
    accumulation: AccumulatorPrecision | None = None,
) -> dict[str, Value]:
    """Return every output by name, wide, with its bound.

    Args:
        allow_tf32: widen the bounds of sums of float32 products.
        accumulation: precision of the matrix unit that may compute sums of products; widens their bounds.
    """
    interpreter = _Interpreter(
        program, _check_inputs(program, arrays), track=True, allow_tf32=allow_tf32, accumulation=accumulation
    )
    with np.errstate(all="ignore"):
        interpreter.run()
    return {out.name: interpreter.value(out.tensor) for out in program.outputs}


def evaluate_sample(
    program: TensorProgram,
    arrays: Mapping[str, Array],
    elements: int = 1024,
    *,
    seed: int = 0,
    allow_tf32: bool = False,
    accumulation: AccumulatorPrecision | None = None,
    limit_points: int = LIMIT_POINTS,
) -> dict[str, Value]:
    """Evaluate at least `elements` elements of every output (all, if it has fewer), including its corners.

    Only the points that these elements need are evaluated. Scatters and statements of at most WHOLE_POINTS points are
    evaluated whole. A reduction costs its whole length for each element.

    Raises:
        ArgumentError: more than `limit_points` points are needed, as for the mean of a large product.
    """
    interpreter = _Interpreter(
        program, _check_inputs(program, arrays), track=True, allow_tf32=allow_tf32, accumulation=accumulation
    )
    interpreter.points_left = limit_points
    values = {}
    for out in program.outputs:
        type_ = program.types[out.tensor]
        indices = sample_indices(type_.shape, elements, np.random.default_rng(seed))
        with np.errstate(all="ignore"):
            term = interpreter.elements(out.tensor, indices)
        values[out.name] = Value(term.value, type_.dtype, term.error, indices)
    return values


def _check_inputs(program: TensorProgram, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays by input name. Raises ArgumentError if they do not match the program's inputs."""
    input_types = dict(program.inputs)
    if unknown := sorted(set(arrays) - set(input_types)):
        raise ArgumentError(f"the program has no input {unknown[0]}", hint=f"inputs: {', '.join(input_types)}")
    result = {}
    for name, type_ in program.inputs:
        if name not in arrays:
            raise ArgumentError(f"input {name} is missing")
        array = np.asarray(arrays[name])
        if array.dtype != storage_dtype(type_.dtype) or array.shape != type_.shape:
            raise ArgumentError(f"{name} is {array.dtype}{list(array.shape)}, expected {type_.dtype.value}{list(type_.shape)}")
        result[name] = array
    return result


def sample_indices(shape: tuple[int, ...], elements: int, rng: np.random.Generator) -> Array:
    """Return sorted, distinct flat indices: a grid of both ends and a few coordinates between in every dimension.

    The elements of a grid share rows, so a normalisation along rows evaluates few whole rows.
    """
    if math.prod(shape) <= elements:
        return np.arange(math.prod(shape), dtype=np.int64)
    # Only in more than ten dimensions are there more than 1,024 corners; then the first dimensions keep one end.
    counts = [min(size, 2) if d >= len(shape) - 10 else 1 for d, size in enumerate(shape)]
    if 4 ** len(shape) <= elements:
        counts = [min(size, 4) for size in shape]
    for d in reversed(range(len(shape))):
        others = math.prod(counts) // counts[d]
        counts[d] = min(shape[d], max(counts[d], -(-elements // others)))
    coordinates = [_sample_coordinates(size, count, rng) for size, count in zip(shape, counts, strict=True)]
    return np.asarray(np.ravel_multi_index(np.ix_(*coordinates), shape), dtype=np.int64).reshape(-1)


def _sample_coordinates(size: int, count: int, rng: np.random.Generator) -> Array:
    """Return `count` sorted coordinates of a dimension: both ends and random ones."""
    coordinates = np.array([0, size - 1][:count], dtype=np.int64)
    while len(np.unique(coordinates)) < count:
        coordinates = np.append(coordinates, rng.integers(0, size))
    return np.unique(coordinates)


def blocks(extents: tuple[int, ...]) -> Iterator[Block]:
    """Yield boxes of at most BLOCK_POINTS points that cover the extents, in row-major order of their points."""
    sizes = list(extents)
    for d, extent in enumerate(extents):
        inner = math.prod(sizes[d + 1 :])
        sizes[d] = max(1, min(extent, BLOCK_POINTS // max(1, inner)))
        if sizes[d] > 1:
            break
    starts = itertools.product(*(range(0, extent, size) for extent, size in zip(extents, sizes, strict=True)))
    for start in starts:
        yield tuple((s, min(s + size, extent)) for s, size, extent in zip(start, sizes, extents, strict=True))


def _align_to_dim(values: Array, dim: int, dims: int) -> Array:
    """Reshape a vector to vary along one dimension of a block."""
    return values.reshape((1,) * dim + (-1,) + (1,) * (dims - dim - 1))


class _Interpreter:
    """One run of a program: the values of its tensors, evaluated on demand."""

    def __init__(
        self,
        program: TensorProgram,
        arrays: dict[str, Array],
        *,
        track: bool,
        allow_tf32: bool = False,
        accumulation: AccumulatorPrecision | None = None,
    ) -> None:
        self.types = program.types
        self.statements = {s.output: s for s in program.statements}
        self.inputs = arrays
        self.whole: dict[str, Value] = {}
        self.partial: dict[str, tuple[Array, Term]] = {}
        self.track = track
        self.allow_tf32 = allow_tf32
        self.accumulation = accumulation
        self.points_left: int | None = None
        self.tensors = Tensors(self.types, {s.output: s.name for s in program.statements}, self._fetch)

    def run(self) -> None:
        """Evaluate every statement whole."""
        for statement in self.statements.values():
            self._evaluate_whole(statement)

    def value(self, tensor: str) -> Value:
        if tensor in self.inputs:
            dtype = self.types[tensor].dtype
            return Value(widen(self.inputs[tensor], dtype), dtype)
        return self.whole[tensor]

    def elements(self, tensor: str, flat: Array) -> Term:
        """Return elements of a tensor by sorted, distinct flat index, evaluating missing ones."""
        if tensor not in self.inputs and tensor not in self.whole:
            statement = self.statements[tensor]
            is_ordered = statement.kind is StatementKind.SCATTER or statement.combine is Combine.RECURRENCE
            if not is_ordered and statement.points > WHOLE_POINTS:
                return self._computed_elements(statement, flat)
            self._evaluate_whole(statement)
        if tensor in self.inputs:
            return Term(widen(self.inputs[tensor].reshape(-1)[flat], self.types[tensor].dtype))
        value = self.whole[tensor]
        return Term(value.wide.reshape(-1)[flat], None if value.error is None else value.error.reshape(-1)[flat])

    def _computed_elements(self, statement: TensorExpr, flat: Array) -> Term:
        """Return elements of a tensor that is never evaluated whole. Computed elements are cached."""
        computed, term = self.partial.get(statement.output, (np.zeros(0, np.int64), None))
        missing = np.setdiff1d(flat, computed, assume_unique=True)
        if term is None or len(missing):
            new = self._evaluate_points(statement, missing)
            if term is not None:
                new = Term(np.concatenate([term.value, new.value]), _concatenate_errors(term, new))
            indices = np.concatenate([computed, missing])
            order = np.argsort(indices)
            computed = indices[order]
            term = Term(new.value[order], None if new.error is None else new.error[order])
            self.partial[statement.output] = (computed, term)
        positions = np.searchsorted(computed, flat)
        return Term(term.value[positions], None if term.error is None else term.error[positions])

    def _fetch(self, tensor: str, index: tuple[Array, ...], live: Array | None) -> Term:
        if tensor in self.inputs:
            return Term(widen(np.asarray(self.inputs[tensor][index]), self.types[tensor].dtype))
        if tensor in self.whole:
            value = self.whole[tensor]
            return Term(np.asarray(value.wide[index]), None if value.error is None else np.asarray(value.error[index]))
        return self._fetch_elements(tensor, index, live)

    def _fetch_elements(self, tensor: str, index: tuple[Array, ...], live: Array | None) -> Term:
        shape = self.types[tensor].shape
        flat = np.asarray(np.ravel_multi_index(np.broadcast_arrays(*index), shape) if shape else np.int64(0))
        if live is not None:
            # Points that read nothing take any element that is needed anyway.
            needed_points = np.broadcast_to(live, np.broadcast_shapes(live.shape, flat.shape))
            flat = np.broadcast_to(flat, needed_points.shape)
            if not needed_points.any():
                return Term(np.zeros((), dtype=wide_dtype(self.types[tensor].dtype)))
            flat = np.where(needed_points, flat, flat[needed_points][0])
        needed, inverse = np.unique(flat, return_inverse=True)
        term = self.elements(tensor, needed)
        inverse = inverse.reshape(flat.shape)
        return Term(term.value[inverse], None if term.error is None else term.error[inverse])

    def _evaluate_whole(self, statement: TensorExpr) -> None:
        dtype = statement.type.dtype
        term = self._evaluate_scatter(statement) if statement.kind is StatementKind.SCATTER else self._evaluate_dense(statement)
        error = rounding.store_error(term.value, term.error, dtype) if self.track else None
        if error is not None:
            error = error.reshape(statement.type.shape)
        self.whole[statement.output] = Value(term.value.reshape(statement.type.shape), dtype, error)

    def _evaluate_dense(self, statement: TensorExpr) -> Term:
        """Evaluate all elements of a map or a reduction."""
        if statement.combine is Combine.RECURRENCE:
            return self._evaluate_recurrence(require(match_scan(statement), "a recurrence"))
        # small scans are evaluated as they are written, which checks the matcher
        if statement.points > MAX_DENSE_SCAN_POINTS and (scan := match_scan(statement)) is not None:
            return self._evaluate_scan(scan)
        extents = tuple(axis.extent for axis in (*statement.spatial, *statement.reduced))

        def axes(block: Block) -> dict[str, Array]:
            return self._coordinates(statement, block)

        return self._sweep(statement, extents, len(statement.spatial), axes)

    def _evaluate_scan(self, scan: Scan) -> Term:
        """Evaluate a scan in one pass: the values of all points, then what they combine to."""
        statement = scan.statement
        body, dtype = scan.value.dtype, statement.type.dtype
        extents = tuple(axis.extent for axis in statement.spatial)
        values = replace(scan.points, combine=None, type=replace(statement.type, dtype=body))
        term = self._sweep(values, extents, len(extents), lambda block: self._coordinates(values, block))
        compute_dtype = accumulation_dtype(body, dtype, scan.combine)
        accumulator = Accumulator(scan.combine, compute_dtype, extents, track=self.track)
        along = statement.spatial.index(scan.axis)
        term = as_dtype(term, body, compute_dtype, track=self.track)
        accumulator.scan(term, along, is_reversed=scan.is_reversed, is_exclusive=scan.is_exclusive)
        return as_dtype(accumulator.result(scan.axis.extent), compute_dtype, dtype, track=self.track)

    def _evaluate_recurrence(self, scan: Scan) -> Term:
        """Evaluate a linear recurrence step by step."""
        step = require(scan.step, "a recurrence")
        statement, extents = scan.statement, tuple(axis.extent for axis in scan.statement.spatial)
        dtype = accumulation_dtype(step.value.dtype, statement.type.dtype, Combine.SUM)
        along = statement.spatial.index(scan.axis)

        def evaluated(part: Expr) -> Term:
            values = replace(scan.points, body=part, combine=None, type=replace(statement.type, dtype=part.dtype))
            term = self._sweep(values, extents, len(extents), lambda block: self._coordinates(values, block))
            return as_dtype(term, part.dtype, dtype, track=self.track)

        gate, initial, value = (evaluated(part) for part in (step.gate, step.initial, step.value))
        steps = LinearSteps(gate, initial, value, along, dtype, scan.is_reversed, step.may_reset)
        return as_dtype(steps.run(extents, track=self.track), dtype, statement.type.dtype, track=self.track)

    def _evaluate_points(self, statement: TensorExpr, flat: Array) -> Term:
        """Evaluate a map or a reduction at some elements."""
        spatial = statement.spatial
        where = np.unravel_index(flat, tuple(a.extent for a in spatial)) if spatial else ()
        dims = 1 + len(statement.reduced)

        def axes(block: Block) -> dict[str, Array]:
            start, stop = block[0]
            env = {a.name: _align_to_dim(w[start:stop], 0, dims) for a, w in zip(spatial, where, strict=True)}
            for d, axis in enumerate(statement.reduced, start=1):
                env[axis.name] = _align_to_dim(np.arange(*block[d], dtype=np.int64), d, dims)
            return env

        extents = (len(flat), *(a.extent for a in statement.reduced))
        term = self._sweep(statement, extents, 1, axes)
        return Term(term.value, rounding.store_error(term.value, term.error, statement.type.dtype) if self.track else None)

    def _coordinates(self, statement: TensorExpr, block: Block) -> dict[str, Array]:
        axes = (*statement.spatial, *statement.reduced)
        return {axis.name: _align_to_dim(np.arange(*block[d], dtype=np.int64), d, len(axes)) for d, axis in enumerate(axes)}

    def _evaluator(self, statement: TensorExpr, axes: dict[str, Array]) -> Evaluator:
        is_sum = statement.combine is Combine.SUM
        rounded = computed_factors(statement.body) if is_sum and self.track else ()
        return Evaluator(self.tensors, axes, self.track, self.allow_tf32 and is_sum, rounded=rounded)

    def _sweep(
        self, statement: TensorExpr, extents: tuple[int, ...], spatial_dims: int, axes: Callable[[Block], dict[str, Array]]
    ) -> Term:
        """Evaluate the body over the box `extents` and reduce all dimensions after the first `spatial_dims`."""
        if self.points_left is not None:
            self.points_left -= math.prod(extents)
            if self.points_left < 0:
                message = f"the sampled elements depend on too many points of {statement.name}"
                raise ArgumentError(message, code="reference-too-large", hint="use smaller shapes")
        body, dtype = statement.body.dtype, statement.type.dtype
        compute_dtype = accumulation_dtype(body, dtype, statement.combine) if statement.combine else dtype
        accumulation = self.accumulation if _is_product(statement.body) else None
        accumulator = Accumulator(
            statement.combine, compute_dtype, extents[:spatial_dims], track=self.track, accumulation=accumulation
        )
        for block in blocks(extents):
            term = self._evaluator(statement, axes(block)).term(statement.body)
            region = tuple(slice(start, stop) for start, stop in block[:spatial_dims])
            term = as_dtype(term, body, compute_dtype, track=self.track)
            accumulator.add(region, tuple(stop - start for start, stop in block), term)
        return as_dtype(accumulator.result(math.prod(extents[spatial_dims:])), compute_dtype, dtype, track=self.track)

    def _evaluate_scatter(self, statement: TensorExpr) -> Term:
        """Return the target after the statement's values are written in row-major order of its axes."""
        if statement.target is None:
            raise InvariantError(f"scatter into {statement.name} has no target")
        dtype, shape = statement.type.dtype, statement.type.shape
        before = self.elements(statement.target, np.arange(math.prod(shape), dtype=np.int64))
        result = _Scatter(statement.combine, dtype, before, track=self.track)
        for block in blocks(tuple(axis.extent for axis in statement.axes)):
            full = tuple(stop - start for start, stop in block)
            evaluator = self._evaluator(statement, self._coordinates(statement, block))
            predicate = None if statement.predicate is None else evaluator.term(statement.predicate)
            live = None if predicate is None else predicate.value != 0
            term = as_dtype(evaluator.term(statement.body, live), statement.body.dtype, dtype, track=self.track)
            index = [evaluator.index_of(statement.output, d, e, live) for d, e in enumerate(statement.index)]
            unsure = [t.error for t in (*index, *(() if predicate is None else (predicate,))) if t.error is not None]
            error = term.error
            for other in unsure:
                error = np.where(other > 0, np.inf, np.zeros(()) if error is None else error)
            flat = np.ravel_multi_index(tuple(np.broadcast_to(t.value, full) for t in index), shape) if shape else 0
            written = np.ones(full, dtype=bool) if live is None else np.broadcast_to(live, full)
            result.write(
                np.broadcast_to(flat, full)[written],
                np.broadcast_to(term.value, full)[written],
                None if error is None else np.broadcast_to(error, full)[written],
            )
        return result.term()


def _is_product(body: Expr) -> bool:
    """Whether a matrix unit may compute sums of `body`."""
    match body:
        case Cast(arg=arg):
            return _is_product(arg)
        case Select(then=then):
            return _is_product(then)
        case _:
            return isinstance(body, Op) and body.kind is OpKind.MUL


def computed_factors(body: Expr) -> frozenset[Expr]:
    """Return the operators in a product that a matrix unit may take rounded to 16 bits, their type."""
    match body:
        case Cast(arg=arg):
            return computed_factors(arg)
        case Select(then=then, otherwise=otherwise):
            return computed_factors(then) | computed_factors(otherwise)
        case Op(kind=OpKind.MUL | OpKind.DIV, args=args):
            return frozenset[Expr]().union(*map(_rounded_operators, args))
        case _:
            return frozenset()


def _rounded_operators(factor: Expr) -> frozenset[Expr]:
    match factor:
        case Cast(arg=arg):
            return _rounded_operators(arg)
        case Select(then=then, otherwise=otherwise):
            return _rounded_operators(then) | _rounded_operators(otherwise)
        case Op(dtype=dtype):
            own = {factor} if dtype in (DType.FLOAT16, DType.BFLOAT16) else frozenset[Expr]()
            return computed_factors(factor) | own
        case _:
            return frozenset()


def _concatenate_errors(a: Term, b: Term) -> Array | None:
    """Concatenate the bounds of two terms."""
    if a.error is None and b.error is None:
        return None
    parts = (np.zeros(t.value.shape) if t.error is None else t.error for t in (a, b))
    return np.concatenate(list(parts))


class _Scatter:
    """The flattened target of a scatter while it is written."""

    def __init__(self, combine: Combine | None, dtype: DType, before: Term, *, track: bool) -> None:
        self.combine = combine
        self.dtype = dtype
        self.value = before.value.copy()
        self.track = track
        self.error = np.zeros(self.value.shape) if before.error is None else before.error.copy()
        # Of a sum: the sum of absolute values. Of a product: the product of the greatest values that errors allow.
        self.magnitude = np.abs(self.value.astype(np.float64)) if track else np.zeros(())
        if combine is Combine.PROD and track:
            self.magnitude = self.magnitude + self.error
        self.writes = np.zeros(self.value.shape if track else ())

    def write(self, flat: Array, value: Array, error: Array | None) -> None:
        match self.combine:
            case None:
                self.value[flat] = value  # numpy writes the last of several values for one element
            case Combine.SUM:
                np.add.at(self.value, flat, value)
            case Combine.PROD:
                np.multiply.at(self.value, flat, value)
            case Combine.MAX:
                np.maximum.at(self.value, flat, value)
            case Combine.MIN:
                np.minimum.at(self.value, flat, value)
            case Combine.ALL | Combine.ANY:
                raise InvariantError(f"no scatter reduces with {self.combine.value}")
        if self.track:
            self._write_error(flat, value, np.zeros(value.shape) if error is None else error)

    def _write_error(self, flat: Array, value: Array, error: Array) -> None:
        np.add.at(self.writes, flat, 1.0)
        if self.combine is None:
            self.error[flat] = error
        elif self.combine is Combine.SUM:
            np.add.at(self.error, flat, error)
            np.add.at(self.magnitude, flat, np.abs(value.astype(np.float64)))
        elif self.combine is Combine.PROD:
            np.multiply.at(self.magnitude, flat, np.abs(value.astype(np.float64)) + error)
        else:
            np.maximum.at(self.error, flat, error)

    def term(self) -> Term:
        if not self.dtype.is_float:
            value = wrap(self.value, self.dtype)
            return Term(value, self.error if self.track and self.error.any() else None)
        if not self.track or self.combine is None or self.combine in (Combine.MAX, Combine.MIN):
            return Term(self.value, self.error if self.track else None)
        if self.combine is Combine.PROD:
            self.error = self.magnitude - np.abs(self.value.astype(np.float64))
        # Atomic updates use the target's own type, in any order.
        unit = 2.0 * unit_roundoff(self.dtype)
        bound = self.error + self.writes * (unit * self.magnitude + min_normal(self.dtype.compute))
        return Term(self.value, np.nan_to_num(bound, nan=0.0))
