"""EXPANSIONS: converters of ONNX nodes that become constants, several calls, or several results."""

from __future__ import annotations

from roller_svc.frontend.onnx.expansions.attention import ATTENTION
from roller_svc.frontend.onnx.expansions.batch_norm import BATCH_NORM
from roller_svc.frontend.onnx.expansions.bit_cast import BIT_CAST
from roller_svc.frontend.onnx.expansions.expansion import Expansion
from roller_svc.frontend.onnx.expansions.quantized import QUANTIZED
from roller_svc.frontend.onnx.expansions.recurrent import RECURRENT
from roller_svc.frontend.onnx.expansions.resize import RESIZE
from roller_svc.frontend.onnx.expansions.results import RESULTS
from roller_svc.frontend.onnx.expansions.several import SEVERAL
from roller_svc.frontend.onnx.expansions.shapes import SHAPES
from roller_svc.frontend.onnx.expansions.signal import SIGNAL

EXPANSIONS: dict[str, Expansion] = {
    **ATTENTION,
    **BATCH_NORM,
    **BIT_CAST,
    **QUANTIZED,
    **RECURRENT,
    **RESIZE,
    **RESULTS,
    **SEVERAL,
    **SHAPES,
    **SIGNAL,
}
