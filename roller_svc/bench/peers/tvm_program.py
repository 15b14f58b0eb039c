"""A program → a function of TVM's tensor expressions, statement by statement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import te, tirx

from roller_svc.bench.peers.library import no_peer
from roller_svc.bench.peers.tvm_expr import Point, converted, type_name
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef
from roller_svc.ir.program import Combine, StatementKind, TensorExpr, TensorProgram


def function_of(program: TensorProgram) -> Any:
    """A PrimFunc over the inputs, then the outputs, in the program's order; BuildError no-peer for what TVM's tensor
    expressions cannot say."""
    tensors: dict[str, Any] = {}
    for number, (name, kind) in enumerate(program.inputs):
        tensors[name] = te.placeholder(kind.shape, type_name(kind.dtype), f"input{number}")
    inputs = list(tensors.values())
    for number, statement in enumerate(program.statements):
        tensors[statement.output] = _computed(statement, tensors, f"statement{number}")
    outputs = [tensors[out.tensor] for out in program.outputs]
    if len({id(tensor) for tensor in (*inputs, *outputs)}) < len(inputs) + len(outputs):
        raise no_peer("an output that is an input, or twice an output, has no place of its own in TVM")
    return te.create_prim_func([*inputs, *outputs])


def _computed(statement: TensorExpr, tensors: dict[str, Any], name: str) -> Any:
    if statement.kind is StatementKind.SCATTER:
        raise no_peer("TVM's tensor expressions write every element once: they have no scatter")
    shape, stored, combine = statement.type.shape, statement.type.dtype, statement.combine
    if combine is None or not statement.reduced:
        return te.compute(shape, lambda *at: _mapped(statement, tensors, at), name)
    loops = {axis.name: te.reduce_axis((0, axis.extent), f"r{number}") for number, axis in enumerate(statement.reduced)}

    def reduced(*at: Any) -> Any:
        point = _point(statement, tensors, at, {axis: loop.var for axis, loop in loops.items()})
        body = statement.body
        if combine in (Combine.ALL, Combine.ANY):
            value = converted(point.truth(body), DType.BOOL, statement.accumulator)
        else:
            value = converted(point.value(body), body.dtype.compute, statement.accumulator)
        return _REDUCERS[combine](value, list(loops.values()))

    total = te.compute(shape, reduced, name)
    if stored is statement.accumulator:
        return total
    return te.compute(shape, lambda *at: converted(total(*at), statement.accumulator, stored), f"{name}_stored")


def _mapped(statement: TensorExpr, tensors: dict[str, Any], at: tuple[Any, ...]) -> Any:
    value = _point(statement, tensors, at, {}).value(statement.body)
    return converted(value, statement.body.dtype.compute, statement.type.dtype)


def _point(statement: TensorExpr, tensors: dict[str, Any], at: tuple[Any, ...], reduced: dict[str, Any]) -> Point:
    """The left side's axes at `at`; where it is the constant 0 there is no axis."""
    spatial = {i.name: var for i, var in zip(statement.index, at, strict=True) if isinstance(i, AxisRef)}
    return Point(tensors, spatial | reduced, statement.extents)


_product = te.comm_reducer(lambda a, b: a * b, lambda dtype: tirx.const(1, dtype), name="product")

# TVM's own, which its schedules know: a maximum starts from the least finite number, not from minus infinity.
_REDUCERS: dict[Combine, Callable[[Any, list[Any]], Any]] = {
    Combine.SUM: te.sum, Combine.MAX: te.max, Combine.MIN: te.min, Combine.ALL: te.min, Combine.ANY: te.max,
    Combine.PROD: _product,
}  # fmt: skip
