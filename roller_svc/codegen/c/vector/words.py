"""Elements of a packed word that lie side by side in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from roller_svc.codegen.buffer_ref import BufferRef
from roller_svc.ir.affine import Affine, affine
from roller_svc.ir.expr import Expr, Load
from roller_svc.ir.index import add, mul, num


def are_contiguous(elements: tuple[Expr, ...], buffers: Mapping[str, BufferRef], registers: Collection[str]) -> bool:
    """Return whether the elements are contiguous in memory; `registers` are tensors that are not in memory."""
    offsets = [_element_offset(x, buffers, registers) for x in elements]
    first = offsets[0]
    return first is not None and all(
        other is not None and (other[0], other[1].coeffs, other[1].offset) == (first[0], first[1].coeffs, first[1].offset + i)
        for i, other in enumerate(offsets)
    )


def _element_offset(expr: Expr, buffers: Mapping[str, BufferRef], registers: Collection[str]) -> tuple[str, Affine] | None:
    """Return (tensor, offset) of an element that is loaded without conversion, else None."""
    if not isinstance(expr, Load) or any(expr.bounds_checked) or expr.tensor in registers:
        return None
    buffer = buffers[expr.tensor]
    flat: Expr = num(0)
    for index, stride in zip(expr.index, buffer.strides, strict=True):
        flat = add(flat, mul(index, num(stride)))
    at = affine(flat)
    return (expr.tensor, at) if at is not None and buffer.dtype is expr.dtype else None
