"""Conversions between numbers and the integers that stand for them, as nodes of graphs."""

from __future__ import annotations

import numpy as np

from roller_svc.frontend.graph_builder import GraphBuilder
from roller_svc.frontend.ops.operator import Operand
from roller_svc.ir.dtype import DType

U8, S8, F32 = DType.UINT8, DType.INT8, DType.FLOAT32


def add_number(builder: GraphBuilder, value: object, dtype: DType) -> Operand:
    return builder.add_constant(np.asarray(value, dtype.value), dtype)


def dequantize(builder: GraphBuilder, x: Operand, scale: object, zero: object, axis: int = 1) -> Operand:
    return builder.call("dequantize_linear", [x, add_number(builder, scale, F32), add_number(builder, zero, x.dtype)], axis=axis)


def quantize(builder: GraphBuilder, x: Operand, scale: float, zero: int, dtype: DType = U8) -> Operand:
    return builder.call("quantize_linear", [x, add_number(builder, scale, F32), add_number(builder, zero, dtype)])
