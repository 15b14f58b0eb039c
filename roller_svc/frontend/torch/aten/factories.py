"""ATen operators that make tensors from numbers."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from roller_svc.frontend.graph_builder import MAX_GENERATED_ELEMENTS
from roller_svc.frontend.ops.operator import Operand
from roller_svc.frontend.torch.call import AtenCall, Converter, Scalar


def _fill(call: AtenCall, value: Scalar | None = None) -> Operand:
    """Convert a tensor of one number: a constant that is broadcast."""
    for name in ("self", "stride", "layout"):
        if name in call.arguments:
            call.value(name)
    if value is None:
        name = next(name for name in ("fill_value", "value", "s") if name in call.arguments)
        value = call.number(name)
    return call.expand(call.scalar(value, call.dtype), call.shape)


def _arange(call: AtenCall) -> Operand:
    call.value("layout")
    start = call.number("start") if "start" in call.arguments else 0
    step = call.number("step") if "step" in call.arguments else 1
    end = call.number("end")
    count = math.ceil((end - start) / step)
    if count > MAX_GENERATED_ELEMENTS:
        raise call.unsupported(f"a range of {count} elements")
    return call.constant(start + np.arange(count) * step, call.dtype)


def _eye(call: AtenCall) -> Operand:
    call.value("layout")
    if math.prod(call.shape) > MAX_GENERATED_ELEMENTS:
        raise call.unsupported(f"a matrix of {call.shape[0]} x {call.shape[1]}")
    return call.constant(np.eye(call.shape[0], call.shape[1]), call.dtype)


def _triangle(call: AtenCall, *, upper: bool) -> Operand:
    return call.run("trilu", call.x, diagonal=call.integer("diagonal"), upper=upper)


TABLE: dict[str, Converter] = {
    **{f"aten.{name}.default": partial(_fill, value=0) for name in ("zeros", "zeros_like", "new_zeros")},
    **{f"aten.{name}.default": partial(_fill, value=1) for name in ("ones", "ones_like", "new_ones")},
    **{f"aten.{name}.default": _fill for name in ("full", "full_like", "new_full", "scalar_tensor")},
    "aten.fill.Scalar": _fill,
    # Their elements are arbitrary: zeros are as good.
    **{f"aten.{name}": partial(_fill, value=0)
       for name in ("empty.memory_format", "empty_like.default", "empty_strided.default", "new_empty.default")},
    "aten.arange.default": _arange,
    "aten.arange.start": _arange,
    "aten.arange.start_step": _arange,
    "aten.eye.default": _eye,
    "aten.eye.m": _eye,
    "aten.tril.default": partial(_triangle, upper=False),
    "aten.triu.default": partial(_triangle, upper=True),
}  # fmt: skip
