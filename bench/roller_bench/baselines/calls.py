"""The calls of numpy or torch that translations use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from roller_bench.baselines.library import Library, Slot
from roller_bench.baselines.translate.nest import Nest
from roller_bench.baselines.translate.pointwise import Context
from roller_bench.baselines.translate.rows import Pattern
from roller_bench.baselines.translate.windows import Convolution, Pooling


class RowCall(Protocol):
    def __call__(self, context: Context, pattern: Pattern, out: Slot, *, swapped: bool) -> Slot: ...


@dataclass(frozen=True, slots=True)
class Calls:
    """A library and its larger calls; None where it has no such call."""

    library: Library
    rows: RowCall
    convolve: Callable[[Context, Nest, Convolution, Slot | None], Slot] | None = None
    pool: Callable[[Context, Nest, Pooling, Slot], Slot] | None = None
