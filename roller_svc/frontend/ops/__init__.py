"""Named operators, in the table OPS. A call expands to statements of the language."""

from __future__ import annotations

from importlib import import_module

from roller_svc.frontend.ops.table import OPS, expression, operator_named

__all__ = ["OPS", "expression", "operator_named"]


def __getattr__(name: str) -> object:
    """Load `onnx_nodes` on first use: the public name of `roller_svc.frontend.onnx.nodes`."""
    if name != "onnx_nodes":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("roller_svc.frontend.onnx.nodes")


def __dir__() -> list[str]:
    return sorted([*__all__, "onnx_nodes"])
