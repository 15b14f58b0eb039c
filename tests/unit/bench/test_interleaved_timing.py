"""Candidates are timed in turns, and what is said of them is what they take undisturbed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from roller_bench.interleaved_timing import (
    MAX_HALF_RATIO,
    MAX_REPEATED,
    MAX_ROUNDS,
    MIN_ROUNDS,
    SLOW_RATIO,
    SLOW_ROUNDS,
    low_noise_s,
    split_half_s,
    time_interleaved,
)
from roller_bench.timing_worker import Sample, time_calls

UNDISTURBED, DISTURBED = Sample(1.0, 1, 0.0, 0.0, call_seconds=(1.0,)), Sample(1.0, 1, 0.5, 0.0, call_seconds=(1.0,))


class Script:
    """Seconds of each candidate's samples, of one call, in order; the last one again and again."""

    def __init__(self, *seconds: list[float]) -> None:
        self.seconds = seconds
        self.taken: list[int] = []

    def take(self, number: int) -> Sample:
        before = self.taken.count(number)
        self.taken.append(number)
        seconds = self.seconds[number]
        return replace(UNDISTURBED, call_seconds=(seconds[min(before, len(seconds) - 1)],))


def test_candidates_take_turns_and_slow_ones_leave() -> None:
    script = Script([1.0], [SLOW_RATIO * 1.1], [SLOW_RATIO * 0.9])
    interleaved = time_interleaved(3, script.take)
    assert script.taken[: 3 * SLOW_ROUNDS] == [0, 1, 2] * SLOW_ROUNDS
    assert [len(rounds) for rounds in interleaved.samples] == [MIN_ROUNDS, SLOW_ROUNDS, MIN_ROUNDS]


def test_who_met_neighbours_in_every_round_so_far_is_not_taken_to_be_slow() -> None:
    """Memory is busy, but for one call of the best."""
    best, other = [1.5, 0.5, *[1.5] * 20], [SLOW_RATIO * 0.5 * 1.1]
    interleaved = time_interleaved(2, Script(best, other).take)
    assert len(interleaved.samples[1]) == len(interleaved.samples[0]) >= MIN_ROUNDS
    assert [len(rounds) for rounds in time_interleaved(2, Script([0.5], other).take).samples] == [
        MIN_ROUNDS,
        SLOW_ROUNDS,
    ]


def test_all_that_are_near_the_best_are_timed_until_their_halves_agree() -> None:
    falling = [2.0, 1.9, 1.8, 1.7, 1.6, 1.5, 1.0, 1.0 * MAX_HALF_RATIO]
    interleaved = time_interleaved(2, Script([1.0], falling).take)
    assert [len(rounds) for rounds in interleaved.samples] == [len(falling)] * 2
    assert interleaved.samples[1] == tuple((seconds,) for seconds in falling)
    never = [2.0 * 0.9**n for n in range(2 * MAX_ROUNDS)]
    assert len(time_interleaved(1, Script(never).take).samples[0]) == MAX_ROUNDS


def test_candidates_that_take_almost_the_same_are_timed_until_their_order_is_clear() -> None:
    """Three within a percent of each other, whose samples are in another order in every other round at first."""
    even, odd = [1.000, 1.004, 1.008], [1.008, 1.004, 1.000]
    seconds = [[even[i] if n % 2 else odd[i] for n in range(20)] + [0.9 * even[i]] for i in range(3)]
    assert [len(rounds) for rounds in time_interleaved(3, Script(*seconds).take).samples] == [24] * 3


def test_disturbed_samples_are_taken_again_but_not_for_ever() -> None:
    answers = [DISTURBED] * (MAX_REPEATED + 1) + [UNDISTURBED] * MIN_ROUNDS
    pauses: list[float] = []
    interleaved = time_interleaved(1, lambda _: answers.pop(0), pauses.append)
    assert interleaved.repeated == len(pauses) == MAX_REPEATED
    assert interleaved.is_disturbed
    assert (len(interleaved.samples[0]), len(answers)) == (MIN_ROUNDS, 1)


def test_plans_are_told_apart_on_a_machine_whose_memory_is_busy_at_times() -> None:
    """Each is a twentieth faster than the next, and most samples take half as long again."""
    rng = np.random.default_rng(0)
    truth = 1e-3 * 1.05 ** np.arange(5)
    busy = np.where(rng.random((5, 20, 1)) < 0.6, 1.5, 1.0)
    samples = truth[:, None, None] * busy * rng.uniform(1.0, 1.02, (5, 20, 10))
    assert [low_noise_s(rounds.tolist()) for rounds in samples] == pytest.approx(truth.tolist(), rel=0.01)
    assert min(sample.mean() for sample in samples[4]) < max(sample.mean() for sample in samples[0])
    for rounds in samples:
        first, second = split_half_s(rounds.tolist()) or (0.0, 1.0)
        assert first == pytest.approx(second, rel=0.02)


def test_without_samples_nothing_is_said() -> None:
    assert (low_noise_s([]), split_half_s([]), split_half_s([(1.0,)])) == (None, None, None)
    assert low_noise_s([(3.0,)]) == 3.0


@pytest.mark.parametrize(("calls", "together", "looks"), [(6, 1, 6), (6, 4, 2), (1, 5, 1), (6, None, 1)])
def test_calls_are_timed_apart_or_few_together(calls: int, together: int | None, looks: int) -> None:
    made: list[int] = []
    sample = time_calls(lambda: made.append(1), calls, together)
    assert (len(sample.call_seconds), sample.calls) == (looks, len(made))
    assert sample.seconds == pytest.approx(sum(sample.call_seconds) / looks)
