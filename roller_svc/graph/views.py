"""Nodes that are views: their result is their input's memory, at an offset."""

from __future__ import annotations

import math

from roller_svc.ir.affine import affine
from roller_svc.ir.expr import AxisRef, Cast, Load
from roller_svc.ir.graph import Node, OpNode
from roller_svc.ir.program import StatementKind

_RESHAPES = frozenset({"reshape", "squeeze", "unsqueeze", "identity"})


def view_offset_elements(node: Node) -> int | None:
    """Return the elements of the input before the first of the result; None if the node is not a view.

    A view reads one tensor, whose elements follow each other in memory as those of the result do.
    """
    if not isinstance(node, OpNode) or len(node.inputs) != 1 or len(node.outputs) != 1:
        return None
    ((_, source),) = node.program.inputs
    (result,) = node.output_types
    if source.dtype is not result.dtype:
        return None
    if node.operator in _RESHAPES and source.elements == result.elements:
        return 0
    return _offset(node, source.shape, result.shape)


def _offset(node: OpNode, source: tuple[int, ...], result: tuple[int, ...]) -> int | None:
    if len(node.program.statements) != 1:
        return None
    (statement,) = node.program.statements
    body = statement.body
    while isinstance(body, Cast) and body.implicit and body.arg.dtype is body.dtype:
        body = body.arg
    if statement.kind is not StatementKind.MAP or not isinstance(body, Load) or any(body.bounds_checked):
        return None
    strides: dict[str, int] = {}
    offset = 0
    for d, index in enumerate(body.index):
        form, step = affine(index), math.prod(source[d + 1 :])
        if form is None:
            return None
        offset += form.offset * step
        for name, factor in form.coeffs:
            strides[name] = strides.get(name, 0) + factor * step
    for d, index in enumerate(statement.index):
        if result[d] > 1 and (not isinstance(index, AxisRef) or strides.get(index.name, 0) != math.prod(result[d + 1 :])):
            return None
    return offset
