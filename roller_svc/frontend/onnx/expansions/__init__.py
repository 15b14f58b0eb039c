"""EXPANSIONS: converters of ONNX nodes that are no single call: constants, several calls, several results."""

from __future__ import annotations

from roller_svc.frontend.onnx.expansions.expansion import Expansion
from roller_svc.frontend.onnx.expansions.shapes import SHAPES

EXPANSIONS: dict[str, Expansion] = {
    **SHAPES,
}
