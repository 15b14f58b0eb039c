"""EXPANSIONS: converters of ONNX nodes that become constants, several calls, or several results."""

from __future__ import annotations

from roller_svc.frontend.onnx.expansions.attention import ATTENTION
from roller_svc.frontend.onnx.expansions.expansion import Expansion
from roller_svc.frontend.onnx.expansions.recurrent import RECURRENT
from roller_svc.frontend.onnx.expansions.results import RESULTS
from roller_svc.frontend.onnx.expansions.several import SEVERAL
from roller_svc.frontend.onnx.expansions.shapes import SHAPES

EXPANSIONS: dict[str, Expansion] = {
    **ATTENTION,
    **RECURRENT,
    **RESULTS,
    **SEVERAL,
    **SHAPES,
}
