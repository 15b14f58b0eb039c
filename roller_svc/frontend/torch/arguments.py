"""torch's tensors as arguments of kernels and models for CPUs, without a copy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

Run = Callable[[Mapping[str, object], Mapping[str, object] | None], dict[str, Any]]


def run_with_tensors(run: Run, arrays: Mapping[str, object], out: Mapping[str, object] | None) -> dict[str, Any]:
    """Run on arrays of numpy and tensors. If one is a tensor, new results are tensors.

    Args:
        run: takes arrays of numpy by name, and those that it writes.
        arrays: the arguments.
        out: where results are written.

    Raises:
        ArgumentError: a tensor is not in this machine's memory, not dense, or would need a gradient.
    """
    plain = share_arrays("argument", arrays)
    written = None if out is None else share_arrays("output", out, written=True)
    results = run(plain, written)
    if plain is arrays and written is out:
        return results
    from roller_svc.frontend.torch import tensors  # noqa: PLC0415 - loads the torch package

    given = {**tensors.find_updated(arrays, plain, results), **(out or {})}
    tensors.note_writes(given.values())
    return {name: given[name] if name in given else tensors.tensor_of(array) for name, array in results.items()}


def share_arrays(what: str, given: Mapping[str, object], *, written: bool = False) -> Mapping[str, object]:
    """Return the arguments with arrays that share the memory of tensors; the same mapping if there are none.

    Args:
        what: what a refusal calls them.
        given: the arguments by name.
        written: whether results are written to them.

    Raises ArgumentError as run_with_tensors does.
    """
    kind = getattr(sys.modules.get("torch"), "Tensor", ())  # without torch, nothing is a tensor
    for value in given.values():  # in less than a microsecond
        if isinstance(value, kind):
            break
    else:
        return given
    from roller_svc.frontend.torch import tensors  # noqa: PLC0415 - loads the torch package

    return {
        name: tensors.argument_of(f"{what} {name!r}", value, written=written) if isinstance(value, kind) else value
        for name, value in given.items()
    }
