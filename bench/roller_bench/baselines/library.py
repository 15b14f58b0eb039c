"""The interface of numpy and torch for translations, and the recorded trace of calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from numpy.typing import NDArray

from roller_svc.errors import BuildError
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import OpKind
from roller_svc.ir.program import Combine

Function = Callable[..., Any]
Step = Callable[[], object]


def no_baseline(reason: str) -> BuildError:
    """Return the error for a program without an efficient call in the library."""
    return BuildError(reason, code="no-peer")


class Library(Protocol):
    """Calls of numpy or torch. Functions with `out` write their result to it."""

    name: str
    versions: dict[str, str]

    def place(self, array: NDArray[Any]) -> Any:
        """Return an array of the library that shares the memory of `array`."""

    def numpy(self, value: Any) -> NDArray[Any]: ...

    def constant(self, value: float, dtype: DType) -> Any: ...

    def strides(self, value: Any) -> tuple[int, ...]:
        """Return the strides in elements."""

    def strided(self, value: Any, shape: Sequence[int], strides: Sequence[int], offset: int) -> Any:
        """Return a view; strides and offset are in elements from the start of the value."""

    def permuted(self, value: Any, order: Sequence[int]) -> Any: ...

    def pointwise(self, kind: OpKind) -> Function:
        """Return a function of the operator's arguments with `out`; comparisons return bools. Raises no_baseline."""

    def where(self, cond: Any, then: Any, otherwise: Any, out: Any) -> None: ...

    def convert(self, value: Any, out: Any) -> None:
        """Copy, broadcast and convert."""

    def reduce(self, combine: Combine) -> Function:
        """Return a function (x, dims, *, out)."""

    def take(self, value: Any, index: tuple[Any, ...], out: Any) -> None:
        """Write value[index] with numpy's integer indexing."""

    def take_along(self, value: Any, dim: int, index: Any, out: Any) -> None:
        """Write slices along one dimension by a one-dimensional index."""

    def put(self, target: Any, index: tuple[Any, ...], values: Any) -> None: ...

    def matmul(self) -> Function:
        """Return a function (a, b, out) of matrices or stacks of matrices."""

    def matvec(self) -> Function: ...

    def einsum(self, equation: str) -> Function:
        """Return a function of the operands that returns a new array."""

    def argmost(self, combine: Combine) -> Function:
        """Return argmax or argmin as a function (x, dim, out); ties give the first index."""


class Slot:
    """A value of a trace. `fixed`: it is in the same memory at every run; else a step replaces it."""

    __slots__ = ("fixed", "value")

    def __init__(self, value: Any, *, fixed: bool) -> None:
        self.value = value
        self.fixed = fixed


class Trace:
    """A recorded sequence of calls that can be run again."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.names: list[str] = []

    def into(self, name: str, function: Function, *args: Slot, out: Slot, **more: Any) -> None:
        """Record function(*args, out=out)."""
        if out.fixed and all(a.fixed for a in args):
            self._add(name, partial(function, *(a.value for a in args), out=out.value, **more))
        else:
            self._add(name, lambda: function(*(a.value for a in args), out=out.value, **more))

    def new(self, name: str, function: Function, *args: Slot, **more: Any) -> Slot:
        """Record function(*args), which returns a new array at every run."""
        result = Slot(None, fixed=False)

        def step() -> None:
            result.value = function(*(a.value for a in args), **more)

        self._add(name, step)
        return result

    def view(self, function: Function, *args: Slot) -> Slot:
        """Record function(*args), which returns a view; made once if its arrays are fixed."""
        if all(a.fixed for a in args):
            return Slot(function(*(a.value for a in args)), fixed=True)
        result = Slot(None, fixed=False)

        def step() -> None:
            result.value = function(*(a.value for a in args))

        self._add("", step)
        return result

    def run(self) -> None:
        for step in self.steps:
            step()

    def _add(self, name: str, step: Step) -> None:
        step()
        self.steps.append(step)
        if name:
            self.names.append(name)
