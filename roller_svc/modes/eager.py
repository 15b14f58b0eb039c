"""Single operators on arrays: each call is a kernel, which is compiled once for each type of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from roller_svc.api import Kernel, compile
from roller_svc.errors import ArgumentError
from roller_svc.frontend.ops import expression, operator_named

RESULT = "y"


class Eager:
    """Named operators as functions of arrays: `e.matmul(a, b)`. Parameters are keyword arguments."""

    def __init__(self, target: str = "local", **options: Any) -> None:
        """Take a device and options of `compile`; by default kernels are chosen by the performance model."""
        self._target = target
        self._options = {"select": "model", "top_k": 1, **options}
        self._kernels: dict[object, Kernel] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._kernels.clear()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return an operator. Raises AttributeError for a name of Python, UnknownOpError for another one."""
        if name.startswith("_"):
            raise AttributeError(name)
        operator_named(name)

        def call(*arrays: Any, **parameters: Any) -> Any:
            return self._call(name, arrays, parameters)

        call.__name__ = name
        return call

    def _call(self, name: str, arrays: tuple[Any, ...], parameters: Mapping[str, Any]) -> Any:
        for position, array in enumerate(arrays):
            if not (hasattr(array, "dtype") and hasattr(array, "shape")):
                raise ArgumentError(
                    f"argument {position} of {name} must be an array, got {type(array).__name__}",
                    code="not-an-array",
                    hint=f"parameters are keywords: {name}(x, axis=1)",
                )
        types = tuple((str(array.dtype), tuple(array.shape)) for array in arrays)
        listed = sorted((key, tuple(value) if isinstance(value, list) else value) for key, value in parameters.items())
        key = name, types, tuple((parameter, repr(value)) for parameter, value in listed)
        kernel = self._kernels.get(key)
        if kernel is None:
            inputs = {f"x{i}": array for i, array in enumerate(arrays)}
            text = expression(name, inputs, output=RESULT, **dict(listed))
            kernel = compile(text, inputs, target=self._target, outputs=(RESULT,), **self._options)
            self._kernels[key] = kernel
        return kernel.run({f"x{i}": array for i, array in enumerate(arrays)})[RESULT]


def eager(target: str = "local", **options: Any) -> Eager:
    """Return the named operators as functions of arrays, for a device.

    Args:
        target: id of the device; "local" is the host CPU.
        options: those of `compile`; by default `select="model", top_k=1`.
    """
    return Eager(target, **options)
