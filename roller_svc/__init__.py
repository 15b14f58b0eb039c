"""Tensor expressions in, fast kernels out.

    kernel = roller_svc.compile("C[m, n] +=! A[m, k] * B[k, n]", inputs={...}, target="local")
    result = kernel(A=a, B=b)

Importing the package loads only the errors; everything else is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from roller_svc import errors
from roller_svc.version import __version__

if TYPE_CHECKING:
    from roller_svc.api import Estimate, Kernel, compile, estimate, load, reference, targets
    from roller_svc.frontend import ops

__all__ = [
    "Estimate", "Kernel", "__version__", "compile", "errors", "estimate", "load", "ops", "reference",
    "targets",
]  # fmt: skip

_FROM_API = frozenset(__all__) - {"__version__", "errors", "ops"}


def __getattr__(name: str) -> object:
    if name == "ops":
        return import_module("roller_svc.frontend.ops")
    if name not in _FROM_API:
        raise AttributeError(f"module 'roller_svc' has no attribute {name!r}")
    return getattr(import_module("roller_svc.api"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
