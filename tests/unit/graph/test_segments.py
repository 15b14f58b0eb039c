"""Segments of a call: random graphs with steps that cannot join."""

from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

from roller_svc.graph.lowerings.segments import MIN_JOINED, Segment, cut_into_segments


def test_segments_execute_every_step_once_and_after_those_that_it_depends_on() -> None:
    rng = random.Random(5)
    launches_alone = 0
    for _ in range(500):
        count = rng.randint(1, 20)
        predecessors = [tuple(sorted(rng.sample(range(i), min(i, rng.choice([0, 1, 1, 2]))))) for i in range(count)]
        joins = [rng.random() < 0.7 for _ in range(count)]
        segments = cut_into_segments(predecessors, joins)
        assert sorted(step for segment in segments for step in segment.steps) == list(range(count))
        place = {step: number for number, segment in enumerate(segments) for step in segment.steps}
        for segment in segments:
            assert list(segment.steps) == sorted(segment.steps)
            assert not segment.is_joined or all(joins[step] for step in segment.steps)
            for step in segment.steps:
                assert all(place[each] <= place[step] for each in predecessors[step])
                # a step that joins does not wait for launches that it does not depend on
                behind = [place[each] for each in predecessors[step] if not joins[each]]
                others = [place[each] for each in predecessors[step] if joins[each]]
                if joins[step] and behind + others:
                    earliest = max([*(each + 1 for each in behind), *others])
                    between = segments[earliest : place[step]]
                    assert all(not joins[each] for part in between for each in part.steps)
            if len(segment.steps) < MIN_JOINED and all(joins[step] for step in segment.steps) and count > 1:
                assert not segment.is_joined
                launches_alone += 1
    assert launches_alone > 50


def test_steps_that_join_are_executed_together_around_launches() -> None:
    # 0 and 1 join, 2 cannot, 3 and 4 need it, 5 needs none of them
    predecessors = [(), (0,), (1,), (2,), (3,), (0,)]
    joins = [True, True, False, True, True, True]
    assert cut_into_segments(predecessors, joins) == (
        Segment((0, 1, 5), is_joined=True),
        Segment((2,), is_joined=False),
        Segment((3, 4), is_joined=True),
    )


def test_the_work_is_linear_in_the_steps_whatever_the_number_of_levels() -> None:
    def count_lines(count: int) -> int:
        """Return how many lines are executed for a chain with a segment and a launch a level."""
        predecessors = [(number - 1,) if number else () for number in range(count)]
        joins = [number % 3 != 2 for number in range(count)]
        lines = 0

        def trace(_: FrameType, event: str, __: object) -> Any:
            nonlocal lines
            lines += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            segments = cut_into_segments(predecessors, joins)
        finally:
            sys.settrace(before)
        assert len(segments) == 2 * count // 3
        return lines

    assert count_lines(30) > 90
    assert count_lines(300) < 15 * count_lines(30)


def test_a_single_step_is_a_launch_unless_it_is_the_whole_call() -> None:
    assert cut_into_segments([()], [True]) == (Segment((0,), is_joined=True),)
    assert cut_into_segments([(), (0,)], [True, False]) == (Segment((0,), is_joined=False), Segment((1,), is_joined=False))
    assert cut_into_segments([], []) == ()
