"""Translate a program to library calls, one for a statement or for a pattern of several statements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from roller_bench.baselines.calls import Calls
from roller_bench.baselines.library import Slot, Trace, no_baseline
from roller_bench.baselines.translate.nest import Nest, nest_of
from roller_bench.baselines.translate.pointwise import Context, Pointwise
from roller_bench.baselines.translate.products import contract, multiply, product_of, scaled, several_of
from roller_bench.baselines.translate.rows import is_whole, patterns_of
from roller_bench.baselines.translate.windows import convolution_of, pooling_of
from roller_svc.errors import BuildError
from roller_svc.ir.expr import Expr, Load, Op, OpKind, rewrite
from roller_svc.ir.program import StatementKind, TensorExpr, TensorProgram

_MAX_PATTERN_STATEMENTS = 7  # statements: attention with its scores scaled
_MAX_UNROLLED_POINTS = 1 << 26  # of a reduction that is evaluated point by point
_SMALL = 4  # limit of a temporary array, times the largest tensor of the statement


@dataclass(frozen=True, slots=True)
class Style:
    """The choices of a translation."""

    patterns: bool = True  # several statements as one call
    trusting: bool = True  # treat guards that look like padding as padding
    windows: bool = True  # products as convolutions where possible
    vectors: bool = False  # a call of its own for matrix times vector
    swapped: bool = False  # the first of a norm's two vectors is the shift
    written_out: bool = False  # reductions may use temporaries much larger than their operands


@dataclass(frozen=True, slots=True)
class Translation:
    """The recorded calls, which ran once; `run` repeats them."""

    trace: Trace
    outputs: tuple[tuple[str, Slot], ...]

    def results(self, calls: Calls) -> dict[str, NDArray[Any]]:
        return {name: calls.library.numpy(slot.value) for name, slot in self.outputs}


def translate(program: TensorProgram, arrays: Mapping[str, NDArray[Any]], calls: Calls, style: Style) -> Translation:
    """Translate a program on these arrays. Raises BuildError (no-peer) without an efficient call."""
    tensors = {name: Slot(calls.library.place(array), fixed=True) for name, array in arrays.items()}
    context = Context(calls.library, Trace(), tensors, style.trusting)
    _Translator(program, calls, context, style).run()
    outputs = tuple((out.name, context.tensors[out.tensor]) for out in program.outputs)
    return Translation(context.trace, outputs)


class _Translator:
    def __init__(self, program: TensorProgram, calls: Calls, context: Context, style: Style) -> None:
        self.program = program
        self.calls = calls
        self.context = context
        self.style = style
        self.statements = list(program.statements)

    def run(self) -> None:
        at = 0
        while at < len(self.statements):
            at += self._several(at) or self._one(at)

    def _several(self, at: int) -> int:
        """Translate a pattern at `at`; return its number of statements."""
        if not self.style.patterns:
            return 0
        for count in range(min(_MAX_PATTERN_STATEMENTS, len(self.statements) - at), 0, -1):
            segment = self.statements[at : at + count]
            if not all(self._is_private(s.output, at, at + count) for s in segment[:-1]):
                continue
            last = segment[-1]
            for pattern in patterns_of(segment, dict(self.program.types)):
                trace = self.context.trace
                steps, names = len(trace.steps), len(trace.names)
                out = self.context.empty(last.type.shape, last.type.dtype)
                try:
                    result = self.calls.rows(self.context, pattern, out, swapped=self.style.swapped)
                except BuildError:
                    del trace.steps[steps:], trace.names[names:]
                    continue
                self.context.tensors[last.output] = result
                return count
        return 0

    def _one(self, at: int) -> int:
        statement = self.statements[at]
        if statement.kind is StatementKind.SCATTER:
            self._scatter(statement)
            return 1
        nest = nest_of(statement)
        if statement.kind is StatementKind.MAP:
            out = self._dying(at) or self.context.empty(statement.type.shape, statement.type.dtype)
            self._map(nest, out)
            self.context.tensors[statement.output] = out
        else:
            self.context.tensors[statement.output] = self._reduction(at, nest)
        return 1

    def _map(self, nest: Nest, out: Slot) -> None:
        shaped = self._shaped(out, nest.shape)
        Pointwise(self.context, nest).store(nest.body, shaped)

    def _shaped(self, value: Slot, shape: tuple[int, ...]) -> Slot:
        """Return a value with split axes."""
        if tuple(value.value.shape) == shape:
            return value
        return self.context.trace.view(lambda v: v.reshape(shape), value)

    def _reduction(self, at: int, nest: Nest) -> Slot:
        statement, context = self.statements[at], self.context
        shapes = {name: tuple(slot.value.shape) for name, slot in context.tensors.items()}
        shape = statement.type.shape
        if self.style.windows and self.calls.convolve and (conv := convolution_of(nest, shapes)) is not None:
            bias = self._bias(at, nest, conv.filters) if not conv.scales and not conv.divisors else None
            result = self.calls.convolve(context, nest, conv, bias)
            self._factors(nest, (conv.scales, conv.divisors), result)
            return self._shaped(result, shape)
        out = context.empty(shape, statement.type.dtype)
        shaped = self._shaped(out, nest.shape)
        if (product := product_of(nest)) is not None:
            multiply(context, nest, product, shaped, vectors=self.style.vectors)
            scaled(context, nest, product, shaped)
            return out
        if self.style.patterns and (factors := several_of(nest)) is not None:
            return self._shaped(contract(context, nest, factors), shape)
        if self.calls.pool and (pooling := pooling_of(nest, shapes)) is not None:
            return self._shaped(self.calls.pool(context, nest, pooling, shaped), shape)
        self._written_out(statement, nest, shaped)
        return out

    def _factors(self, nest: Nest, factors: tuple[Sequence[Expr], Sequence[Expr]], out: Slot) -> None:
        loops = Pointwise(self.context, Nest(nest.output, nest.dtype, nest.spatial, nest.body, None))
        for kind, exprs in zip((OpKind.MUL, OpKind.DIV), factors, strict=True):
            for expr in exprs:
                call = self.calls.library.pointwise(kind)
                self.context.into(kind.name.lower(), call, out, loops.value(expr), out=out)

    def _written_out(self, statement: TensorExpr, nest: Nest, out: Slot) -> None:
        """Compute the body at every point, then reduce it."""
        points = math.prod(a.extent for a in nest.axes)
        tensors = self.context.tensors
        known = [statement.type.elements, *(math.prod(tensors[n].value.shape) for n in statement.reads_tensors)]
        small = points <= _SMALL * max(known) or isinstance(nest.body, Load)
        if nest.combine is None or points > _MAX_UNROLLED_POINTS or not (small or self.style.written_out):
            raise no_baseline("the reduction is too large to be written out")
        loops = Pointwise(self.context, nest)
        body = nest.body
        full = tuple(a.extent for a in nest.axes)
        if isinstance(body, Load):
            value = loops.load(body)
        else:
            value = self.context.empty(full, body.dtype)
            loops.store(body, value)
        if tuple(value.value.shape) != full:
            value = self.context.copied(value, full, body.dtype)
        dims = tuple(range(len(nest.spatial), len(nest.axes)))
        reduce = self.calls.library.reduce(nest.combine)
        same = statement.type.dtype is body.dtype
        target = out if same else self.context.empty(nest.shape, body.dtype)
        self.context.into(nest.combine.name.lower(), lambda x, out: reduce(x, dims, out=out), value, out=target)
        if not same:
            self.context.into("cast", self.calls.library.convert, target, out=out)

    def _scatter(self, statement: TensorExpr) -> None:
        """Copy the target and scatter into it."""
        if statement.target is None or statement.combine is not None or statement.predicate is not None:
            raise no_baseline("only plain scatters are translated")
        context, library = self.context, self.calls.library
        out = context.copied(context.tensors[statement.target], statement.type.shape, statement.type.dtype)
        loops = Pointwise(context, Nest(statement.output, statement.type.dtype, statement.axes, statement.body, None))
        index = [loops.whole(part) for part in statement.index]
        values = loops.value(statement.body)
        put = library.put
        context.into("put", lambda v, *i, out: put(out, i, v), values, *index, out=out)
        context.tensors[statement.output] = out

    def _is_private(self, tensor: str, start: int, stop: int) -> bool:
        """Return whether only statements from `start` to `stop` read a tensor that is not an output."""
        outside = [*self.statements[:start], *self.statements[stop:]]
        return all(tensor not in s.reads_tensors for s in outside) and all(o.tensor != tensor for o in self.program.outputs)

    def _dying(self, at: int) -> Slot | None:
        """Return the memory of an intermediate that only this statement reads elementwise, for reuse."""
        statement = self.statements[at]
        for load in statement.reads:
            same_type = load.dtype is statement.type.dtype and load.tensor not in dict(self.program.inputs)
            whole = all(is_whole(x, statement) for x in statement.reads if x.tensor == load.tensor)
            made = next((i for i, s in enumerate(self.statements) if s.output == load.tensor), at)
            if same_type and whole and self._is_private(load.tensor, made, at + 1):
                readers = [s for s in self.statements[made + 1 : at] if load.tensor in s.reads_tensors]
                slot = self.context.tensors[load.tensor]
                if not readers and tuple(slot.value.shape) == statement.type.shape:
                    return slot
        return None

    def _bias(self, at: int, nest: Nest, filters: tuple[str, ...]) -> Slot | None:
        """Return the bias that the next statement adds, to fuse it into the convolution."""
        statement = self.statements[at]
        if not self.style.patterns or at + 1 == len(self.statements) or len(filters) != 1:
            return None
        following = self.statements[at + 1]
        if following.kind is not StatementKind.MAP or not self._is_private(statement.output, at, at + 2):
            return None
        dim = [a.name for a in nest.spatial].index(filters[0])
        found: list[Load] = []

        def change(node: Expr) -> Expr:
            if isinstance(node, Op) and node.kind is OpKind.ADD and dim < len(following.spatial):
                for whole, vector in (node.args, node.args[::-1]):
                    if (added := _added(whole, vector, statement.output, following, dim)) is not None:
                        found.append(added)
                        return whole
            return node

        body = rewrite(following.body, change)
        left = sum(load.tensor == statement.output for load in following.reads)
        if len({f.tensor for f in found}) != 1 or len(found) != left:
            return None
        self.statements[at + 1] = replace(following, body=body)
        return self.context.tensors[found[0].tensor]


def _added(whole: Expr, vector: Expr, tensor: str, statement: TensorExpr, dim: int) -> Load | None:
    """Return the second operand if it is a vector along one dimension of the first, a full tensor."""
    if not isinstance(whole, Load) or not isinstance(vector, Load) or whole.tensor != tensor:
        return None
    along = is_whole(whole, statement) and vector.index == (statement.index[dim],)
    return vector if along else None
