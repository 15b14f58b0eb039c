"""The tensor-expression language: text → TensorProgram."""

from __future__ import annotations

from roller_svc.frontend.lang.equation import einsum
from roller_svc.frontend.lang.parser import parse

__all__ = ["einsum", "parse"]
