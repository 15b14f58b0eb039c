"""The reference interpreter: TensorProgram, arrays → values. It defines what a program means.

Every point of every statement is evaluated in numpy, a block of points at a time: floats in float64, integers exactly
and wrapped after each operation. Explicit casts round, and so do the arrays that `reference` gives back; between
statements floats stay wide. `evaluate` gives the wide values, each with a bound on how far a correct kernel may be from
it (`rounding`), and `sampled` the same at some elements of outputs that are too large to enumerate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from roller_svc.errors import ArgumentError, InvariantError
from roller_svc.ir.accumulation import AccumulatorPrecision
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Expr, Op, OpKind, Select
from roller_svc.ir.program import Combine, StatementKind, TensorExpr, TensorProgram
from roller_svc.reference import rounding
from roller_svc.reference.accumulate import Accumulator
from roller_svc.reference.evaluator import Evaluator, Tensors, Term, accumulation_dtype, as_dtype
from roller_svc.reference.values import (
    Array,
    least_normal,
    narrow,
    storage_dtype,
    unit_roundoff,
    wide_dtype,
    widen,
    wrap,
)

# Points evaluated at once: a few arrays of 8 B a point stay in a core's caches.
BLOCK_POINTS = 1 << 19
# A statement of at most so many points is evaluated whole even where only some elements of it are asked for.
WHOLE_POINTS = 1 << 22
# What `sampled` evaluates at most: a minute or two.
LIMIT_POINTS = 1 << 32

Block = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Value:
    """An output: float64, int64 or uint64 values before the last rounding, the type they round to, and the bound.

    `error` None: a kernel must give exactly these values. `at`: flat indices of the elements that `wide` (then
    one-dimensional) holds; None: it holds all, in the tensor's shape.
    """

    wide: Array
    dtype: DType
    error: Array | None = None
    at: Array | None = None

    @property
    def rounded(self) -> Array:
        """What a call returns."""
        return narrow(self.wide, self.dtype)


def reference(program: TensorProgram, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Every output by name, in its own type."""
    machine = _Machine(program, _checked(program, arrays), track=False)
    with np.errstate(all="ignore"):
        machine.run()
    return {out.name: machine.value(out.tensor).rounded for out in program.outputs}


def evaluate(program: TensorProgram, arrays: Mapping[str, Array], *, allow_tf32: bool = False,
             sums: AccumulatorPrecision | None = None) -> dict[str, Value]:  # fmt: skip
    """Every output by name, wide, with its bound. `allow_tf32` widens the bounds of sums of float32 products; `sums`,
    those of a matrix unit that computes some of them, the bounds of sums of products."""
    machine = _Machine(program, _checked(program, arrays), track=True, allow_tf32=allow_tf32, sums=sums)
    with np.errstate(all="ignore"):
        machine.run()
    return {out.name: machine.value(out.tensor) for out in program.outputs}


def sampled(program: TensorProgram, arrays: Mapping[str, Array], elements: int = 1024, *, seed: int = 0,
            allow_tf32: bool = False, sums: AccumulatorPrecision | None = None,
            limit_points: int = LIMIT_POINTS) -> dict[str, Value]:  # fmt: skip
    """About `elements` elements of every output, no fewer (all, where there are no more), its corners among them.

    Only what these elements need is evaluated. Scatters are evaluated whole, and so is every statement of at most
    WHOLE_POINTS points; a reduction costs its whole length for each element asked for. Where every output depends on
    everything (a mean over all of a product), that may still be too much: ArgumentError beyond `limit_points`.
    """
    machine = _Machine(program, _checked(program, arrays), track=True, allow_tf32=allow_tf32, sums=sums)
    machine.points_left = limit_points
    chosen = {}
    for out in program.outputs:
        type_ = program.types[out.tensor]
        at = sample_places(type_.shape, elements, np.random.default_rng(seed))
        with np.errstate(all="ignore"):
            term = machine.at(out.tensor, at)
        chosen[out.name] = Value(term.value, type_.dtype, term.error, at)
    return chosen


def _checked(program: TensorProgram, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays by input name; ArgumentError where they are not what the program takes."""
    known = dict(program.inputs)
    if unknown := sorted(set(arrays) - set(known)):
        raise ArgumentError(f"the program has no input {unknown[0]}", hint=f"inputs: {', '.join(known)}")
    result = {}
    for name, type_ in program.inputs:
        if name not in arrays:
            raise ArgumentError(f"input {name} is missing")
        array = np.asarray(arrays[name])
        if array.dtype != storage_dtype(type_.dtype) or array.shape != type_.shape:
            raise ArgumentError(
                f"{name} is {array.dtype}{list(array.shape)}, expected {type_.dtype.value}{list(type_.shape)}"
            )
        result[name] = array
    return result


def sample_places(shape: tuple[int, ...], elements: int, rng: np.random.Generator) -> Array:
    """Flat indices, sorted, each once: a grid of the ends and a few places between along every dimension.

    A grid shares rows: what is normalised along one costs its whole row for each of few rows, not for all elements.
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
    chosen = [_places(size, count, rng) for size, count in zip(shape, counts, strict=True)]
    return np.asarray(np.ravel_multi_index(np.ix_(*chosen), shape), dtype=np.int64).reshape(-1)


def _places(size: int, count: int, rng: np.random.Generator) -> Array:
    """`count` coordinates of a dimension, sorted: the ends, then random ones."""
    chosen = np.array([0, size - 1][:count], dtype=np.int64)
    while len(np.unique(chosen)) < count:
        chosen = np.append(chosen, rng.integers(0, size))
    return np.unique(chosen)


def blocks(extents: tuple[int, ...]) -> Iterator[Block]:
    """Boxes of at most BLOCK_POINTS points that cover the extents, in row-major order of all their points."""
    sizes = list(extents)
    for d, extent in enumerate(extents):
        inner = math.prod(sizes[d + 1 :])
        sizes[d] = max(1, min(extent, BLOCK_POINTS // max(1, inner)))
        if sizes[d] > 1:
            break
    starts = itertools.product(*(range(0, extent, size) for extent, size in zip(extents, sizes, strict=True)))
    for start in starts:
        yield tuple((s, min(s + size, extent)) for s, size, extent in zip(start, sizes, extents, strict=True))


def _along(values: Array, dim: int, dims: int) -> Array:
    """A vector laid along one dimension of a block."""
    return values.reshape((1,) * dim + (-1,) + (1,) * (dims - dim - 1))


class _Machine:
    """One run of a program: the values of tensors as far as they are known."""

    def __init__(self, program: TensorProgram, arrays: dict[str, Array], *, track: bool,
                 allow_tf32: bool = False, sums: AccumulatorPrecision | None = None) -> None:  # fmt: skip
        self.types = program.types
        self.statements = {s.output: s for s in program.statements}
        self.inputs = arrays
        self.whole: dict[str, Value] = {}
        self.partial: dict[str, tuple[Array, Term]] = {}
        self.track = track
        self.allow_tf32 = allow_tf32
        self.sums = sums
        self.points_left: int | None = None
        self.tensors = Tensors(self.types, {s.output: s.name for s in program.statements}, self._fetch)

    def run(self) -> None:
        """Every statement, whole."""
        for statement in self.statements.values():
            self._make(statement)

    def value(self, tensor: str) -> Value:
        if tensor in self.inputs:
            dtype = self.types[tensor].dtype
            return Value(widen(self.inputs[tensor], dtype), dtype)
        return self.whole[tensor]

    def at(self, tensor: str, flat: Array) -> Term:
        """Elements of a tensor by sorted, distinct flat index; what is missing is evaluated."""
        if tensor not in self.inputs and tensor not in self.whole:
            statement = self.statements[tensor]
            if statement.kind is not StatementKind.SCATTER and statement.points > WHOLE_POINTS:
                return self._some(statement, flat)
            self._make(statement)
        if tensor in self.inputs:
            return Term(widen(self.inputs[tensor].reshape(-1)[flat], self.types[tensor].dtype))
        known = self.whole[tensor]
        return Term(known.wide.reshape(-1)[flat], None if known.error is None else known.error.reshape(-1)[flat])

    def _some(self, statement: TensorExpr, flat: Array) -> Term:
        """The same for a tensor that is never evaluated whole; what was computed once is kept."""
        have, term = self.partial.get(statement.output, (np.zeros(0, np.int64), None))
        missing = np.setdiff1d(flat, have, assume_unique=True)
        if term is None or len(missing):
            new = self._points(statement, missing)
            if term is not None:
                new = Term(np.concatenate([term.value, new.value]), _joined(term, new))
            place = np.concatenate([have, missing])
            order = np.argsort(place)
            have = place[order]
            term = Term(new.value[order], None if new.error is None else new.error[order])
            self.partial[statement.output] = (have, term)
        found = np.searchsorted(have, flat)
        return Term(term.value[found], None if term.error is None else term.error[found])

    def _fetch(self, tensor: str, index: tuple[Array, ...], live: Array | None) -> Term:
        if tensor in self.inputs:
            return Term(widen(np.asarray(self.inputs[tensor][index]), self.types[tensor].dtype))
        if tensor in self.whole:
            known = self.whole[tensor]
            return Term(np.asarray(known.wide[index]), None if known.error is None else np.asarray(known.error[index]))
        return self._fetch_some(tensor, index, live)

    def _fetch_some(self, tensor: str, index: tuple[Array, ...], live: Array | None) -> Term:
        shape = self.types[tensor].shape
        flat = np.asarray(np.ravel_multi_index(np.broadcast_arrays(*index), shape) if shape else np.int64(0))
        if live is not None:
            # Where nothing is read, any element that is needed anyway stands in.
            counts = np.broadcast_to(live, np.broadcast_shapes(live.shape, flat.shape))
            flat = np.broadcast_to(flat, counts.shape)
            if not counts.any():
                return Term(np.zeros((), dtype=wide_dtype(self.types[tensor].dtype)))
            flat = np.where(counts, flat, flat[counts][0])
        needed, back = np.unique(flat, return_inverse=True)
        term = self.at(tensor, needed)
        back = back.reshape(flat.shape)
        return Term(term.value[back], None if term.error is None else term.error[back])

    def _make(self, statement: TensorExpr) -> None:
        dtype = statement.type.dtype
        term = self._scattered(statement) if statement.kind is StatementKind.SCATTER else self._dense(statement)
        error = rounding.of_store(term.value, term.error, dtype) if self.track else None
        if error is not None:
            error = error.reshape(statement.type.shape)
        self.whole[statement.output] = Value(term.value.reshape(statement.type.shape), dtype, error)

    def _dense(self, statement: TensorExpr) -> Term:
        """A map or a reduction, every element."""
        extents = tuple(axis.extent for axis in (*statement.spatial, *statement.reduced))

        def axes(block: Block) -> dict[str, Array]:
            return self._coordinates(statement, block)

        return self._sweep(statement, extents, len(statement.spatial), axes)

    def _points(self, statement: TensorExpr, flat: Array) -> Term:
        """A map or a reduction at some elements."""
        spatial = statement.spatial
        where = np.unravel_index(flat, tuple(a.extent for a in spatial)) if spatial else ()
        dims = 1 + len(statement.reduced)

        def axes(block: Block) -> dict[str, Array]:
            start, stop = block[0]
            env = {a.name: _along(w[start:stop], 0, dims) for a, w in zip(spatial, where, strict=True)}
            for d, axis in enumerate(statement.reduced, start=1):
                env[axis.name] = _along(np.arange(*block[d], dtype=np.int64), d, dims)
            return env

        extents = (len(flat), *(a.extent for a in statement.reduced))
        term = self._sweep(statement, extents, 1, axes)
        return Term(term.value, rounding.of_store(term.value, term.error, statement.type.dtype) if self.track else None)

    def _coordinates(self, statement: TensorExpr, block: Block) -> dict[str, Array]:
        axes = (*statement.spatial, *statement.reduced)
        return {axis.name: _along(np.arange(*block[d], dtype=np.int64), d, len(axes)) for d, axis in enumerate(axes)}

    def _evaluator(self, statement: TensorExpr, axes: dict[str, Array]) -> Evaluator:
        tf32 = self.allow_tf32 and statement.combine is Combine.SUM
        return Evaluator(self.tensors, axes, self.track, tf32)

    def _sweep(self, statement: TensorExpr, extents: tuple[int, ...], kept: int,
               axes: Callable[[Block], dict[str, Array]]) -> Term:  # fmt: skip
        """Evaluates the body over the box `extents` and reduces all dimensions behind the first `kept`."""
        if self.points_left is not None:
            self.points_left -= math.prod(extents)
            if self.points_left < 0:
                message = f"the elements asked for need too much of {statement.name} to be evaluated here"
                raise ArgumentError(message, code="reference-too-large", hint="use smaller shapes")
        body, dtype = statement.body.dtype, statement.type.dtype
        forming = accumulation_dtype(body, dtype, statement.combine) if statement.combine else dtype
        sums = self.sums if _is_product(statement.body) else None
        total = Accumulator(statement.combine, forming, extents[:kept], track=self.track, sums=sums)
        for block in blocks(extents):
            term = self._evaluator(statement, axes(block)).term(statement.body)
            region = tuple(slice(start, stop) for start, stop in block[:kept])
            term = as_dtype(term, body, forming, track=self.track)
            total.add(region, tuple(stop - start for start, stop in block), term)
        return as_dtype(total.result(math.prod(extents[kept:])), forming, dtype, track=self.track)

    def _scattered(self, statement: TensorExpr) -> Term:
        """The target, with the statement's values written in row-major order of its axes."""
        if statement.target is None:
            raise InvariantError(f"scatter into {statement.name} has no target")
        dtype, shape = statement.type.dtype, statement.type.shape
        before = self.at(statement.target, np.arange(math.prod(shape), dtype=np.int64))
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
            result.write(np.broadcast_to(flat, full)[written], np.broadcast_to(term.value, full)[written],
                         None if error is None else np.broadcast_to(error, full)[written])  # fmt: skip
        return result.term()


def _is_product(body: Expr) -> bool:
    """Whether a matrix unit may form sums of it."""
    match body:
        case Cast(arg=arg):
            return _is_product(arg)
        case Select(then=then):
            return _is_product(then)
        case _:
            return isinstance(body, Op) and body.kind is OpKind.MUL


def _joined(a: Term, b: Term) -> Array | None:
    """Both terms' bounds behind each other."""
    if a.error is None and b.error is None:
        return None
    parts = (np.zeros(t.value.shape) if t.error is None else t.error for t in (a, b))
    return np.concatenate(list(parts))


class _Scatter:
    """The flat target of a scatter while it is written."""

    def __init__(self, combine: Combine | None, dtype: DType, before: Term, *, track: bool) -> None:
        self.combine = combine
        self.dtype = dtype
        self.value = before.value.copy()
        self.track = track
        self.error = np.zeros(self.value.shape) if before.error is None else before.error.copy()
        self.magnitude = np.abs(self.value.astype(np.float64)) if track else np.zeros(())
        self.writes = np.zeros(self.value.shape if track else ())

    def write(self, flat: Array, value: Array, error: Array | None) -> None:
        match self.combine:
            case None:
                self.value[flat] = value  # of several values for one element numpy keeps the last
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
        else:
            np.maximum.at(self.error, flat, error)

    def term(self) -> Term:
        if not self.dtype.is_float:
            value = wrap(self.value, self.dtype)
            return Term(value, self.error if self.track and self.error.any() else None)
        if not self.track or self.combine is None or self.combine in (Combine.MAX, Combine.MIN):
            return Term(self.value, self.error if self.track else None)
        # Atomic additions happen in the target's own type, in any order.
        unit = 2.0 * unit_roundoff(self.dtype)
        bound = self.error + self.writes * (unit * self.magnitude + least_normal(self.dtype.compute))
        return Term(self.value, np.nan_to_num(bound, nan=0.0))
