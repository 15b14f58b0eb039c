"""Tensor expressions in, fast kernels out.

    kernel = roller_svc.compile("C[m, n] +=! A[m, k] * B[k, n]", inputs={...}, target="local")
    result = kernel(A=a, B=b)

    model = roller_svc.compile_model("model.onnx")
    outputs = model(x=array)

Importing the package loads only the errors; everything else is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from roller_svc import errors
from roller_svc.errors import RollerWarning
from roller_svc.version import __version__

if TYPE_CHECKING:
    from roller_svc.api import (
        Estimate,
        Kernel,
        compile,
        estimate,
        explain,
        get_num_threads,
        load,
        reference,
        set_num_threads,
        targets,
    )
    from roller_svc.frontend import ops
    from roller_svc.graph.python_ops import python_op
    from roller_svc.ir.hardware import HardwareSpec
    from roller_svc.model import Model, compile_model, load_model
    from roller_svc.modes.eager import eager
    from roller_svc.schedules import Schedule, tune

__all__ = [
    "Estimate", "HardwareSpec", "Kernel", "Model", "RollerWarning", "Schedule", "__version__", "compile", "compile_model", "eager",
    "errors", "estimate", "explain", "get_num_threads", "load", "load_model", "ops", "python_op", "reference", "set_num_threads",
    "targets", "tune",
]  # fmt: skip

_SUBMODULES = frozenset({"onnx_backend", "torch", "torch_backend", "tuning"})
_FROM_MODEL = frozenset({"Model", "compile_model", "load_model"})
_MODULES = {  # of names that are in neither roller_svc.model nor roller_svc.api
    "Schedule": "roller_svc.schedules", "tune": "roller_svc.schedules", "eager": "roller_svc.modes.eager",
    "python_op": "roller_svc.graph.python_ops",
}  # fmt: skip
_FROM_API = frozenset(__all__) - {"RollerWarning", "__version__", "errors", "ops", *_MODULES} - _FROM_MODEL


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return import_module(f"roller_svc.{name}")
    if name == "ops":
        return import_module("roller_svc.frontend.ops")
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if name in _FROM_MODEL:
        return getattr(import_module("roller_svc.model"), name)
    if name not in _FROM_API:
        raise AttributeError(f"module 'roller_svc' has no attribute {name!r}")
    return getattr(import_module("roller_svc.api"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
