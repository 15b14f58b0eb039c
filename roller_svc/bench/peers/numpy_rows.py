"""Softmax and places of greatest elements as numpy's calls."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roller_svc.bench.peers.library import Slot, no_peer
from roller_svc.bench.peers.pointwise import Context
from roller_svc.bench.peers.rows import ArgMost, Pattern, Softmax


def row_call(context: Context, pattern: Pattern, out: Slot, *, swapped: bool) -> Slot:
    """The pattern's result; numpy has no norms, so that nothing is ever `swapped`."""
    match pattern:
        case Softmax(data=data, dims=dims) if not swapped:
            context.into("softmax", partial(_softmax, dims=dims), context.tensors[data], out=out)
            return out
        case ArgMost(data=data, dim=dim, combine=combine) if not swapped:
            name = f"arg{combine.name.lower()}"
            context.into(name, partial(context.library.argmost(combine), dim=dim), context.tensors[data], out=out)
            return out
    raise no_peer("numpy has no call for these statements")


def _softmax(x: NDArray[Any], dims: tuple[int, ...], out: NDArray[Any]) -> None:
    """Without a temporary of the size of x."""
    np.subtract(x, x.max(axis=dims, keepdims=True), out=out)
    np.exp(out, out=out)
    np.divide(out, out.sum(axis=dims, keepdims=True), out=out)
