"""What the translation asks of numpy and of torch, and the calls it strings together."""

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
    """The library has no sensible call for this."""
    return BuildError(reason, code="no-peer")


class Library(Protocol):
    """Arrays are numpy's or torch's; functions with `out` write there."""

    name: str
    versions: dict[str, str]

    def place(self, array: NDArray[Any]) -> Any:
        """The array as the library's, over the same memory."""

    def numpy(self, value: Any) -> NDArray[Any]: ...

    def constant(self, value: float, dtype: DType) -> Any: ...

    def strides(self, value: Any) -> tuple[int, ...]:
        """In elements."""

    def strided(self, value: Any, shape: Sequence[int], strides: Sequence[int], offset: int) -> Any:
        """A view; strides and offset in elements from the value's own start."""

    def permuted(self, value: Any, order: Sequence[int]) -> Any: ...

    def pointwise(self, kind: OpKind) -> Function:
        """A function of the operator's arguments with `out`; comparisons give bools. Raises no_peer."""

    def where(self, cond: Any, then: Any, otherwise: Any, out: Any) -> None: ...

    def convert(self, value: Any, out: Any) -> None:
        """Copy, broadcast and convert."""

    def reduce(self, combine: Combine) -> Function:
        """A function (x, dims, *, out)."""

    def take(self, value: Any, index: tuple[Any, ...], out: Any) -> None:
        """value[index], index by index, as numpy's integer indexing."""

    def take_along(self, value: Any, dim: int, index: Any, out: Any) -> None:
        """Slices of one dimension by a one-dimensional index."""

    def put(self, target: Any, index: tuple[Any, ...], values: Any) -> None: ...

    def matmul(self) -> Function:
        """(a, b, out) of matrices or of stacks of them."""

    def matvec(self) -> Function: ...

    def einsum(self, equation: str) -> Function:
        """A function of the equation's operands; the result is a new array."""

    def argmost(self, combine: Combine) -> Function:
        """(x, dim, out): the first place of the greatest or least element."""


class Slot:
    """A value of one call. `fixed`: it lies in the same memory at every call; else a step sets it anew."""

    __slots__ = ("fixed", "value")

    def __init__(self, value: Any, *, fixed: bool) -> None:
        self.value = value
        self.fixed = fixed


class Trace:
    """Calls as they are made for the first time, kept to be made again."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.names: list[str] = []

    def into(self, name: str, function: Function, *args: Slot, out: Slot, **more: Any) -> None:
        """function(*args, out=out), at every call."""
        if out.fixed and all(a.fixed for a in args):
            self._add(name, partial(function, *(a.value for a in args), out=out.value, **more))
        else:
            self._add(name, lambda: function(*(a.value for a in args), out=out.value, **more))

    def new(self, name: str, function: Function, *args: Slot, **more: Any) -> Slot:
        """What function(*args) returns, an array of its own at every call."""
        result = Slot(None, fixed=False)

        def step() -> None:
            result.value = function(*(a.value for a in args), **more)

        self._add(name, step)
        return result

    def view(self, function: Function, *args: Slot) -> Slot:
        """What function(*args) returns: a view, made once where its array stays in its place."""
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
