"""Segments of a call: steps that one kernel executes, between steps that cannot be rTasks of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIN_JOINED = 2  # a kernel of one operator saves no launch


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps, by number. They come after those of the segments before."""

    steps: tuple[int, ...]
    is_joined: bool  # into one kernel; otherwise they are launches, one after the other


def cut_into_segments(predecessors: Sequence[Sequence[int]], joins: Sequence[bool]) -> tuple[Segment, ...]:
    """Return the segments of a call in an order of execution.

    The level of a step is the largest number of steps that cannot join on a path to it, each behind one that can.
    Steps of a level that join are a segment, and the others of the level follow. A step that joins is therefore
    executed with all others that wait for the same launches. A single one is a launch, unless it is the whole call.

    Args:
        predecessors: the steps that have to finish before each one.
        joins: whether each step can be rTasks of a kernel with others.
    """
    levels: list[int] = []
    for number, before in enumerate(predecessors):
        levels.append(max((levels[each] + (joins[number] and not joins[each]) for each in before), default=0))
    segments: list[Segment] = []
    for level in range(max(levels, default=-1) + 1):
        of_level = [number for number, each in enumerate(levels) if each == level]
        for is_joined in (True, False):
            steps = tuple(number for number in of_level if joins[number] is is_joined)
            if steps:
                segments.append(Segment(steps, is_joined and (len(steps) >= MIN_JOINED or len(joins) == 1)))
    return tuple(segments)
