"""MICROSOFT: converters of the operators of the domain com.microsoft, as onnxruntime defines them."""

from __future__ import annotations

from roller_svc.frontend.onnx.expansions.expansion import Expansion
from roller_svc.frontend.onnx.microsoft.attention import ATTENTION
from roller_svc.frontend.onnx.microsoft.blocks import BLOCKS
from roller_svc.frontend.onnx.microsoft.fused import FUSED
from roller_svc.frontend.onnx.microsoft.quantized import QUANTIZED

DOMAIN = "com.microsoft"
MICROSOFT: dict[str, Expansion] = {**ATTENTION, **BLOCKS, **FUSED, **QUANTIZED}
# Operators of the domain that are those of ONNX with the same name.
SAME = frozenset({"DequantizeLinear", "Gelu", "GridSample", "QuantizeLinear", "Trilu"})
