"""Operators of torch from expressions: `roller_svc.torch.op("mylib::scaled", "y[i] = x[i] * s[]")`."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch

from roller_svc import api
from roller_svc.compiler.request import read_options, reject_unknown, validate_target
from roller_svc.errors import ArgumentError
from roller_svc.frontend.lang.source import Source
from roller_svc.frontend.ops.calls import check_untyped
from roller_svc.frontend.parse import parse
from roller_svc.frontend.torch.tensors import TORCH_DTYPES, dtype_of
from roller_svc.ir.options import KernelOptions, options_of
from roller_svc.ir.program import TensorProgram, TensorType

__all__ = ["op"]

_NAME = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*")
_ARGUMENTS = ("hardware", "cache")  # of `compile`, beside its options
_registered: dict[str, _Operator] = {}  # by name
_registered_lock = Lock()


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

    An equal call returns the same operator. Another definition with the same inputs replaces one that no call has
    compiled, such as one with a typing error.

    Raises:
        ArgumentError: a name is not one of an operator or an input, the program reads a tensor that is none of the
            inputs, an option is unknown or has a wrong value, an input would be donated, or there is another operator
            of that name.
        ExprSyntaxError: the program is not in the language.
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
    if not isinstance(expression, str):
        raise ArgumentError("the expression must be a string", code="invalid-argument")
    check_untyped(Source(expression), names)
    written = None if outputs is None else tuple(outputs)
    kernels = _Kernels(expression, names, written, validate_target(target), _read_options(options, names))
    with _registered_lock:
        known = _registered.get(operator)
        if known is None:
            _check_is_new(operator)
            known = _registered[operator] = _Operator(operator, kernels)
        elif known.kernels != kernels:
            known.replace(kernels)
        return known.call


def _read_options(options: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of `compile`, all of them in one form. Raises ArgumentError for one that it would refuse."""
    arguments = {name: value for name, value in options.items() if name in _ARGUMENTS}
    given = {name: value for name, value in options.items() if name not in arguments}
    reject_unknown(KernelOptions, given, "torch.op")
    read = KernelOptions(**read_options(KernelOptions, given, [(name, None) for name in names]))
    values = {name: getattr(read, name) for name in options_of(KernelOptions)}
    return {**arguments, **values, "tiles": dict(read.tiles)}


def _check_is_new(operator: str) -> None:
    """Raise ArgumentError if other code registered an operator of that name."""
    library, _, short = operator.partition("::")
    if hasattr(getattr(torch.ops, library), short):
        raise _name_error(operator, "was registered by other code")


def _name_error(operator: str, what: str) -> ArgumentError:
    return ArgumentError(
        f"there is an operator {operator!r}, which {what}",
        code="operator-exists",
        hint="choose another name: torch keeps an operator until the process ends",
    )


class _Operator:
    """A registered operator. Its definition may be replaced until a call has used it."""

    def __init__(self, name: str, kernels: _Kernels) -> None:
        self.name = name
        self.kernels = kernels
        self._is_used = False
        self.call = self._register()

    def replace(self, kernels: _Kernels) -> None:
        """Replace the definition. Raises ArgumentError if it is in use, or has other inputs."""
        if self._is_used or self.kernels.names != kernels.names:
            raise _name_error(self.name, f"computes {self.kernels.expression!r} with other arguments or options")
        self.kernels = kernels
        self._describe(self.call)

    def _run(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        kernels = self.kernels
        with torch.no_grad():
            kernel = kernels.kernel(tensors)
            self._is_used = True
            results = kernel.run(dict(zip(kernels.names, tensors, strict=True)))
        return list(results.values())

    def _infer(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        program = self.kernels.program(_types(self.kernels.names, tensors))
        self._is_used = True
        types = program.types
        return [
            tensors[0].new_empty(types[each.tensor].shape, dtype=TORCH_DTYPES[types[each.tensor].dtype]) for each in program.outputs
        ]

    def _register(self) -> Callable[..., Any]:
        """Register the operator, and return a function that calls it."""
        library, _, short = self.name.partition("::")
        arguments = ", ".join(f"Tensor {each}" for each in self.kernels.names)
        torch.library.define(self.name, f"({arguments}) -> Tensor[]")
        torch.library.impl(self.name, "CompositeExplicitAutograd", self._run)
        torch.library.register_fake(self.name, self._infer)
        registered = getattr(getattr(torch.ops, library), short)

        def call(*tensors: torch.Tensor) -> Any:
            results = registered(*tensors)
            return results[0] if len(results) == 1 else tuple(results)

        call.__name__ = short
        self._describe(call)
        return call

    def _describe(self, call: Callable[..., Any]) -> None:
        call.__doc__ = f"{self.name}: {self.kernels.expression}"


def _types(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> dict[str, TensorType]:
    """Return the types of arguments; a symbolic extent becomes that of the call. Raises ArgumentError for no elements."""
    types = {
        name: TensorType(dtype_of(tensor.dtype), tuple(int(extent) for extent in tensor.shape))
        for name, tensor in zip(names, tensors, strict=True)
    }
    if empty := [name for name, type_ in types.items() if not type_.elements]:
        raise ArgumentError(f"argument {empty[0]!r} has no elements", code="shape-mismatch")
    return types


@dataclass(frozen=True, slots=True)
class _Kernels:
    """Keep the definition of an operator, and its last kernels by the types of its arguments."""

    expression: str
    names: tuple[str, ...]
    outputs: tuple[str, ...] | None
    target: str
    options: Mapping[str, Any]
    _kernels: OrderedDict[tuple[object, ...], api.Kernel] = field(default_factory=OrderedDict, init=False, compare=False)  # by use
    _lock: Lock = field(default_factory=Lock, init=False, compare=False)

    def program(self, types: Mapping[str, TensorType]) -> TensorProgram:
        return parse(self.expression, types, self.outputs)

    def kernel(self, tensors: Sequence[torch.Tensor]) -> api.Kernel:
        key = tuple((tensor.dtype, tensor.shape) for tensor in tensors)
        with self._lock:
            found = self._kernels.get(key)
            if found is None:
                inputs = {name: (type_.dtype.value, type_.shape) for name, type_ in _types(self.names, tensors).items()}
                found = self._kernels[key] = api.compile(
                    self.expression, inputs, target=self.target, outputs=self.outputs, **self.options
                )
                if len(self._kernels) > api.MAX_CACHED_KERNELS:
                    self._kernels.popitem(last=False)
            self._kernels.move_to_end(key)
            return found


def __dir__() -> list[str]:
    return sorted(__all__)
