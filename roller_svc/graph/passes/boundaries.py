"""Boundaries of fusion: where nodes become one, or stay apart, and the performance model may be wrong about it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from roller_svc.ir.program import TensorProgram

# Median error of a kernel's estimate on that of four CPUs where it is the greatest: docs/model.md#four-machines.
ERROR_RATIO = 1.13


@dataclass(frozen=True, slots=True)
class Boundary:
    """Nodes that fusion merges or leaves apart, with the estimates of both."""

    program: TensorProgram  # of the merged node
    is_merged: bool  # by the estimates
    merged_s: float
    apart_s: float

    @property
    def possible_gain_s(self) -> float:
        """Seconds that the other form saves if the estimate of this one is too small by the model's error."""
        used_s, other_s = (self.merged_s, self.apart_s) if self.is_merged else (self.apart_s, self.merged_s)
        return ERROR_RATIO * used_s - other_s


class Boundaries:
    """The boundaries that fusion meets. Some that the model cannot decide may be taken the other way."""

    def __init__(self, flipped: Collection[TensorProgram] = ()) -> None:
        """Take the programs of the merged nodes whose boundaries are the other way."""
        self._flipped = frozenset(flipped)
        self._met: dict[TensorProgram, dict[frozenset[str], tuple[Boundary, int]]] = {}

    def decide(self, boundary: Boundary, nodes: Collection[str], runs: int) -> bool:
        """Return whether nodes become one. `runs` says how often a call runs them."""
        if boundary.possible_gain_s <= 0:
            return boundary.is_merged
        self._met.setdefault(boundary.program, {})[frozenset(nodes)] = boundary, runs
        return boundary.is_merged != (boundary.program in self._flipped)

    def list_unsure(self, min_gain_s: float, limit: int) -> list[Boundary]:
        """Return at most that many boundaries, one for equal ones, by what the other form may save in a call.

        It is at least `min_gain_s` for each.
        """
        gains = {
            program: sum(runs * boundary.possible_gain_s for boundary, runs in places.values())
            for program, places in self._met.items()
        }
        longest = sorted((program for program in gains if gains[program] >= min_gain_s), key=lambda program: -gains[program])
        return [next(iter(self._met[program].values()))[0] for program in longest[:limit]]
