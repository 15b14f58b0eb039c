"""The tensor-expression language: text → TensorProgram, and what a program means."""

from __future__ import annotations

from roller_svc.lang.equation import einsum
from roller_svc.lang.parser import parse
from roller_svc.lang.source import render

__all__ = ["einsum", "parse", "render"]
