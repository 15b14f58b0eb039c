"""torch's tensors as arguments of kernels and models for CPUs, without a copy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

Arrays = Mapping[str, object]
Run = Callable[[Arrays, Arrays | None], dict[str, Any]]


def run_with_tensors(
    run: Run,
    arrays: Mapping[str, object],
    out: Mapping[str, object] | None,
    donated: Collection[str] = (),
    states: Collection[str] = (),
) -> dict[str, Any]:
    """Run on arrays of numpy and tensors. If one is a tensor, new results are tensors.

    Args:
        run: takes arrays of numpy by name, and those that it writes.
        arrays: the arguments.
        out: where results are written.
        donated: names of arguments that the call may write.
        states: names of the arrays of `out` that have old values.

    Raises:
        ArgumentError: a tensor is not in this machine's memory, not dense, or would need a gradient.
    """
    plain = share_arrays("argument", arrays)
    written = None if out is None else share_arrays("output", out, written=True, states=states)
    if plain is arrays and written is out:
        return run(plain, written)
    exchange = _Exchange(arrays, plain, out, donated)
    with exchange.noted_writes():
        results = run(plain, written)
    return exchange.tensors(results)


class Call(Protocol):
    """A kernel that is bound to arrays."""

    def __call__(self) -> None: ...

    def results(self) -> dict[str, Any]: ...


def bind_tensors(
    bind: Callable[[Arrays, Arrays | None], Call], arrays: Arrays, out: Arrays | None, donated: Collection[str] = ()
) -> Call:
    """Bind a kernel that takes arrays of numpy to arrays and tensors, as run_with_tensors does."""
    plain = share_arrays("argument", arrays)
    written = None if out is None else share_arrays("output", out, written=True)
    call = bind(plain, written)
    return call if plain is arrays and written is out else _TensorCall(call, _Exchange(arrays, plain, out, donated))


class _TensorCall:
    """A call that tells torch of each write to a tensor."""

    def __init__(self, call: Call, exchange: _Exchange) -> None:
        self._call = call
        self._exchange = exchange

    def __call__(self) -> None:
        with self._exchange.noted_writes():
            self._call()

    def results(self) -> dict[str, Any]:
        return self._exchange.tensors(self._call.results())


@dataclass(frozen=True, slots=True)
class _Exchange:
    """The tensors of a call, and the arrays that it took for them."""

    arguments: Arrays
    plain: Arrays
    out: Arrays | None
    donated: Collection[str]

    @contextmanager
    def noted_writes(self) -> Iterator[None]:
        """Tell torch of the tensors that the call in the block may have written, also if it fails."""
        from roller_svc.frontend.torch import tensors  # noqa: PLC0415 - loads the torch package

        try:
            yield
        finally:
            updated = tensors.find_updated(self.arguments, self.plain, self.donated)
            tensors.note_writes((*updated.values(), *(self.out or {}).values()))

    def tensors(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """Return the results as tensors: the caller's own, where they were written."""
        from roller_svc.frontend.torch import tensors  # noqa: PLC0415 - loads the torch package

        in_place = [name for name, array in results.items() if array is self.plain.get(name)]
        given = {**tensors.find_updated(self.arguments, self.plain, in_place), **(self.out or {})}
        return {name: given[name] if name in given else tensors.tensor_of(array) for name, array in results.items()}


def share_arrays(
    what: str, given: Mapping[str, object], *, written: bool = False, states: Collection[str] = ()
) -> Mapping[str, object]:
    """Return the arguments with arrays that share the memory of tensors; the same mapping if there are none.

    Args:
        what: what a refusal calls them.
        given: the arguments by name.
        written: whether results are written to them.
        states: names of those that a refusal calls states.

    Raises ArgumentError as run_with_tensors does.
    """
    kind = getattr(sys.modules.get("torch"), "Tensor", ())  # without torch, nothing is a tensor
    for value in given.values():  # in less than a microsecond
        if isinstance(value, kind):
            break
    else:
        return given
    from roller_svc.frontend.torch import tensors  # noqa: PLC0415 - loads the torch package

    def share(name: str, value: object) -> object:
        if not isinstance(value, kind):
            return value
        return tensors.argument_of(f"{'state' if name in states else what} {name!r}", value, written=written)

    return {name: share(name, value) for name, value in given.items()}
