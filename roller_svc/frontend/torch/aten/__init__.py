"""ATEN: converters of ATen operators, by the names of their overloads, to calls of named operators."""

from __future__ import annotations

from roller_svc.frontend.torch.aten import (
    elementwise,
    factories,
    indexing,
    layers,
    recurrent,
    reductions,
    shapes,
)
from roller_svc.frontend.torch.call import Converter

ATEN: dict[str, Converter] = {
    **elementwise.TABLE,
    **layers.TABLE,
    **shapes.TABLE,
    **reductions.TABLE,
    **indexing.TABLE,
    **factories.TABLE,
    **recurrent.TABLE,
}
