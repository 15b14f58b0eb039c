"""Statements of vector loops → text on vectors."""

from __future__ import annotations

from dataclasses import replace

from roller_svc.codegen.streaming import is_streamable
from roller_svc.codegen.vector_expr import MAX_WRITTEN_OUT, Vector
from roller_svc.codegen.vector_loops import unconditional
from roller_svc.codegen.vector_places import NotVectorError
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Expr, Load, Op, OpKind, walk
from roller_svc.ir.program import JOINS
from roller_svc.ir.schedule import Compute


def statement(vector: Vector, node: Compute) -> str:
    """One assignment or join, of all lanes; raises NotVectorError where it has no vector form."""
    if not any(vector.moves(i) for i in node.index):
        raise NotVectorError
    return _text(replace(vector, sizes=_sizes(vector, node)), node)


def _sizes(vector: Vector, node: Compute) -> tuple[tuple[Expr, int], ...]:
    """Index expressions of what the statement touches under no condition."""
    touched = [(node.tensor, node.index)]
    touched += [(load.tensor, load.index) for load in unconditional(node.value) if not any(load.checked)]
    places = vector.scalar.places
    return tuple(pair for name, index in touched for pair in zip(index, places[name].shape, strict=True))


def _text(vector: Vector, node: Compute) -> str:
    place = vector.scalar.places[node.tensor]
    if node.combine is None:
        return _assigned(vector, node, vector.stored(node.value, place.dtype))
    target = vector.element(node.tensor, node.index)
    kind = JOINS[node.combine]
    value: Expr = node.value
    if value.dtype.compute is not place.dtype.compute:
        value = Cast(value, place.dtype, implicit=True)
    if kind in (OpKind.ADD, OpKind.MUL) and place.dtype.compute is place.dtype is not DType.BOOL:
        return f"{target} {kind.value}= {vector.operand(vector.piece(value))};"
    old = Load(node.tensor, node.index, place.dtype)
    return f"{target} = {vector.stored(Op(kind, (old, value), place.dtype), place.dtype)};"


def _assigned(vector: Vector, node: Compute, value: str) -> str:
    place = vector.scalar.places[node.tensor]
    if vector.stride(node.tensor, node.index) == 1:
        target = vector.element(node.tensor, node.index)
        if node.streamed and is_streamable(place.dtype, vector.lanes):
            return f"{vector.call(f'stream_{vector.type_of(place.dtype)}', f'&{target}', value)};"
        return f"{target} = {value};"
    if node.tensor in vector.registers or vector.lanes > MAX_WRITTEN_OUT or any(node.checked):
        raise NotVectorError
    if _is_dealt(vector, node):
        raise NotVectorError
    name = "r_f32"  # no name of a program ends like this
    puts = " ".join(f"{vector.at_lane(place, node.index, i)} = {name}[{i}];" for i in range(vector.lanes))
    return f"{{ const {vector.type_of(place.dtype)} {name} = {value}; {puts} }}"


def _is_dealt(vector: Vector, node: Compute) -> bool:
    """Whether elements of memory are only copied to places that a table knows: a loop of single ones is as fast, and
    written out for each lane it took half of the time in which a strided convolution compiled."""
    value = node.value.arg if isinstance(node.value, Cast) and node.value.implicit else node.value
    if not isinstance(value, Load) or value.tensor in vector.registers:
        return False
    return any(isinstance(x, Load) for i in node.index for x in walk(i))
