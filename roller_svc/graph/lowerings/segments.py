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
    groups: dict[tuple[int, bool], list[int]] = {}  # (level, whether steps are launches) → its steps
    for number, before in enumerate(predecessors):
        level = max((levels[each] + (joins[number] and not joins[each]) for each in before), default=0)
        levels.append(level)
        groups.setdefault((level, not joins[number]), []).append(number)
    return tuple(
        Segment(tuple(steps), not is_launch and (len(steps) >= MIN_JOINED or len(joins) == 1))
        for (_, is_launch), steps in sorted(groups.items())
    )
