"""Operators of torch from expressions: `roller_svc.torch.op("mylib::scaled", "y[i] = x[i] * s[]")`."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

import torch

from roller_svc import api
from roller_svc.errors import ArgumentError
from roller_svc.frontend.parse import parse
from roller_svc.frontend.torch.tensors import TORCH_DTYPES, dtype_of
from roller_svc.ir.program import TensorProgram, TensorType

__all__ = ["op"]

_NAME = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*")


def op(
    operator: str,
    expression: str,
    inputs: Sequence[str],
    *,
    outputs: Sequence[str] | None = None,
    target: str = "local",
    **options: Any,
) -> Callable[..., Any]:
    """Register an operator of torch that computes an expression, and return it.

    A kernel is compiled for each set of types and shapes at its first call. The types of its results come from the
    expression, so torch.compile and torch.export keep the operator as one node. It gives no gradients: register them with
    torch.library.register_autograd.

    Args:
        operator: its name, "library::name".
        expression: the program.
        inputs: names of its inputs, in the order of the operator's arguments.
        outputs: names of its results; default: tensors that are never read. One result is a tensor, several are a tuple.
        target: id of the device.
        options: those of `compile`.

    Raises:
        ArgumentError: a name is not one of an operator or an input, or an input would be donated.
    """
    if not isinstance(operator, str) or not _NAME.fullmatch(operator):
        raise ArgumentError(f"an operator is called 'library::name', got {operator!r}", code="invalid-option")
    names = tuple(inputs)
    if isinstance(inputs, str) or not names or not all(isinstance(each, str) and each.isidentifier() for each in names):
        raise ArgumentError(f"inputs must be a list of names, got {inputs!r}", code="invalid-option")
    if len(set(names)) < len(names):
        raise ArgumentError(f"an input is named twice in {list(names)}", code="invalid-option")
    if options.get("donate"):
        raise ArgumentError("an operator of torch writes none of its inputs; leave out donate", code="invalid-option")
    kernels = _Kernels(expression, names, None if outputs is None else tuple(outputs), target, dict(options))

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            results = kernels.kernel(tensors).run(dict(zip(names, tensors, strict=True)))
        return list(results.values())

    def infer(*tensors: torch.Tensor) -> list[torch.Tensor]:
        program = kernels.program(_types(names, tensors))
        types = program.types
        return [
            tensors[0].new_empty(types[each.tensor].shape, dtype=TORCH_DTYPES[types[each.tensor].dtype]) for each in program.outputs
        ]

    library, _, short = operator.partition("::")
    arguments = ", ".join(f"Tensor {each}" for each in names)
    torch.library.define(operator, f"({arguments}) -> Tensor[]")
    torch.library.impl(operator, "CompositeExplicitAutograd", run)
    torch.library.register_fake(operator, infer)
    registered = getattr(getattr(torch.ops, library), short)

    def call(*tensors: torch.Tensor) -> Any:
        results = registered(*tensors)
        return results[0] if len(results) == 1 else tuple(results)

    call.__name__, call.__doc__ = short, f"{operator}: {expression}"
    return call


def _types(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> dict[str, TensorType]:
    """Return the types of arguments; a symbolic extent becomes that of the call. Raises ArgumentError for no elements."""
    types = {
        name: TensorType(dtype_of(tensor.dtype), tuple(int(extent) for extent in tensor.shape))
        for name, tensor in zip(names, tensors, strict=True)
    }
    if empty := [name for name, type_ in types.items() if not type_.elements]:
        raise ArgumentError(f"argument {empty[0]!r} has no elements", code="shape-mismatch")
    return types


class _Kernels:
    """The last kernels of an operator, by the types of its arguments."""

    def __init__(
        self, expression: str, names: tuple[str, ...], outputs: tuple[str, ...] | None, target: str, options: Mapping[str, Any]
    ) -> None:
        self._expression = expression
        self._names = names
        self._outputs = outputs
        self._target = target
        self._options = options
        self._kernels: OrderedDict[tuple[object, ...], api.Kernel] = OrderedDict()  # by use
        self._lock = Lock()

    def program(self, types: Mapping[str, TensorType]) -> TensorProgram:
        return parse(self._expression, types, self._outputs)

    def kernel(self, tensors: Sequence[torch.Tensor]) -> api.Kernel:
        key = tuple((tensor.dtype, tensor.shape) for tensor in tensors)
        with self._lock:
            found = self._kernels.get(key)
            if found is None:
                inputs = {name: (type_.dtype.value, type_.shape) for name, type_ in _types(self._names, tensors).items()}
                found = self._kernels[key] = api.compile(
                    self._expression, inputs, target=self._target, outputs=self._outputs, **self._options
                )
                if len(self._kernels) > api.MAX_CACHED_KERNELS:
                    self._kernels.popitem(last=False)
            self._kernels.move_to_end(key)
            return found


def __dir__() -> list[str]:
    return sorted(__all__)
