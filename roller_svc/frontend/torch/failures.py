"""Failures of torch.export in words. Exceptions of torch, and built-in ones of the module, become an ArgumentError.

A class of the module's own that derives from Exception alone passes through: its caller knows it.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from roller_svc.errors import ArgumentError, UnsupportedModelError, UnsupportedNode

# What torch.export raises, and what a module's own code may: torch's classes derive from these.
_FAILURES = (
    ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError, NameError, OSError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip
# Folders without code of the module: torch, this package, the standard library.
_OTHERS = (Path(torch.__file__).parent, Path(__file__).parents[2], Path(sysconfig.get_path("stdlib")))
MAX_SHOWN = 300  # characters of torch's message


@contextmanager
def translated_failures() -> Iterator[None]:
    """Raise ArgumentError for _FAILURES. It names the line of the module's code."""
    try:
        yield
    except GuardOnDataDependentSymNode as error:
        raise ArgumentError(
            f"the module decides by a value of its inputs{_place(error)}; shapes and branches are static",
            code="data-dependent",
            hint="use torch.where in place of the branch, or give the value as an example input "
            "that is a Python number, which is a constant",
        ) from error
    except _FAILURES as error:
        text = " ".join(str(error).split("\n\n")[0].split())[:MAX_SHOWN]
        raise ArgumentError(
            f"torch.export cannot export the module{_place(error)}: {type(error).__name__}: {text}",
            code="not-exportable",
            hint="call module(*inputs) to see whether the example inputs fit; "
            "torch.export.export(module, inputs) shows all of the message",
        ) from error


def check_module(module: torch.nn.Module) -> None:
    """Raise an InputError for modules that torch.export refuses: scripted and quantized ones."""
    if isinstance(module, torch.jit.ScriptModule):
        raise ArgumentError(
            "a scripted or traced module cannot be exported",
            code="not-exportable",
            hint="pass the torch.nn.Module that it was made of, or export it to ONNX",
        )
    listed = {name: part for name, part in module.named_modules() if _is_quantized(type(part).__module__)}
    quantized = [
        UnsupportedNode(type(part).__name__, name or "the module", "it is quantized for torch's own kernels")
        for name, part in listed.items()
        if not name or name.rpartition(".")[0] not in listed
    ]
    if quantized:
        raise UnsupportedModelError(
            tuple(quantized),
            hint="pass the module before its quantization, or an ONNX file with QuantizeLinear and "
            "DequantizeLinear nodes, as torch.onnx.export writes it for a module quantized by torchao",
        )


def _is_quantized(module: str) -> bool:
    """Return whether a Python module has classes of torch for quantized tensors."""
    return module.startswith("torch.") and ".quantized." in f"{module}."


def _place(error: BaseException) -> str:
    """Return where the module's code is, by the last frame outside of _OTHERS."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(Path(frame.filename).is_relative_to(folder) for folder in _OTHERS)
    ]
    own = [frame for frame in frames if Path(frame.filename).exists() and "site-packages" not in frame.filename]
    if not own or own[-1].name == "<module>":
        return ""
    return f", in {own[-1].name} ({Path(own[-1].filename).name}, line {own[-1].lineno})"
