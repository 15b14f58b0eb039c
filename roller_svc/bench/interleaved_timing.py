"""Candidates timed in turns → what each of them takes while nothing disturbs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from roller_svc.bench.model.regret import spearman
from roller_svc.bench.timing_worker import Sample

# A call that meets a neighbour on the same memory takes half as long again, and the next may meet none: of all calls of
# a candidate, each timed by itself, one in five is taken to have met nobody, whatever visit it was made in. Their mean
# says more than the slowest or the fastest of them: of plans that differ by a percent, ten seconds tell the order that
# a minute tells with a rank correlation of 0.82, by the second percentile 0.74, by the median 0.73.
LOW_NOISE_FRACTION = 0.2
QUANTILES = 20  # of a visit's calls, each told by the quantile in its middle
# Each candidate has so many samples, and more until one half of them says what the other does: each candidate's time
# within two percent, and so the order of all, which differ by less at times (a rank correlation).
MIN_ROUNDS, MAX_ROUNDS = 6, 240
MAX_HALF_RATIO, MIN_HALF_SPEARMAN = 1.02, 0.95
# Samples of a visit take no longer than this for each candidate, or for all of few, but for LEAST_ROUNDS: what reads a
# matrix once takes about the same in any tiles, and which are a percent faster shows after seconds.
CANDIDATE_S, CASE_S = 0.25, 8.0
# A candidate so many times slower than the best is not near it, whatever else is measured: so many rounds will do. Its
# least is put beside the best one's median, for its rounds may all have met neighbours where the best one's least call
# met none: of 70 plans of a gather 23 looked three to six times slower than the best, and were one to three times.
SLOW_RATIO, SLOW_ROUNDS = 3.0, 2
# Samples that others disturbed are taken again after a pause, so often for a whole case; then the case is disturbed.
MAX_REPEATED = 60
PAUSE_S = 0.1

Rounds = Sequence[Sequence[float]]  # seconds of each call of a candidate's first sample, of its second, ...


@dataclass(frozen=True, slots=True)
class InterleavedSamples:
    """The accepted samples of each candidate, and how many were taken again."""

    samples: tuple[Rounds, ...]
    repeated: int

    @property
    def is_disturbed(self) -> bool:
        """Whether samples had to be taken although others ran."""
        return self.repeated >= MAX_REPEATED


def time_interleaved(
    count: int, take: Callable[[int], Sample], pause: Callable[[float], None] = time.sleep
) -> InterleavedSamples:
    """Rounds of one sample for each that is near the best. A disturbed sample is taken again as long as there are
    repetitions left."""
    samples: list[list[tuple[float, ...]]] = [[] for _ in range(count)]
    repeated, start = 0, time.perf_counter()
    for number in range(MAX_ROUNDS):
        near = list(range(count)) if number < SLOW_ROUNDS else _near(samples)
        is_late = time.perf_counter() - start > max(CASE_S, CANDIDATE_S * count)
        if number >= MIN_ROUNDS and (is_late or _halves_agree([samples[i] for i in near])):
            break
        for i in near:
            sample = take(i)
            while sample.is_disturbed and repeated < MAX_REPEATED:
                repeated += 1
                pause(PAUSE_S)
                sample = take(i)
            samples[i].append(sample.call_seconds)
    return InterleavedSamples(tuple(map(tuple, samples)), repeated)


def fast_quantiles_s(rounds: Rounds) -> tuple[float, ...]:
    """Seconds of each twentieth of the calls, of the quieter half of them; empty without samples."""
    calls = [seconds for sample in rounds for seconds in sample]
    middles = (np.arange(QUANTILES // 2) + 0.5) / QUANTILES
    return tuple(map(float, np.quantile(calls, middles))) if calls else ()


def low_noise_mean_s(passes: Sequence[Sequence[float]]) -> float | None:
    """Seconds of a call that met nobody, by the quietest parts of one visit or several; None without samples."""
    quantiles = sorted(quantile for pass_ in passes for quantile in pass_)
    count = round(LOW_NOISE_FRACTION * QUANTILES * len(passes))
    return float(np.mean(quantiles[:count])) if quantiles else None


def low_noise_s(rounds: Rounds) -> float | None:
    """The same by one visit's samples."""
    return low_noise_mean_s([fast_quantiles_s(rounds)])


def split_half_s(rounds: Rounds) -> tuple[float, float] | None:
    """The same from every other sample and from those between: two measurements, None where there are not two."""
    first, second = low_noise_s(rounds[::2]), low_noise_s(rounds[1::2])
    return None if first is None or second is None else (first, second)


def _near(samples: Sequence[Rounds]) -> list[int]:
    """Which of the candidates are not slow."""
    medians = (float(np.median([seconds for sample in rounds for seconds in sample])) for rounds in samples)
    best = min(medians, default=0.0)
    return [i for i, rounds in enumerate(samples) if min(map(min, rounds)) <= SLOW_RATIO * best]


def _halves_agree(candidates: Sequence[Rounds]) -> bool:
    """Whether the halves of samples tell the same of each candidate, and the same order of them."""
    halves = [halves_of_candidate for rounds in candidates if (halves_of_candidate := split_half_s(rounds)) is not None]
    order = spearman(halves)
    return all(max(pair) <= MAX_HALF_RATIO * min(pair) for pair in halves) and (
        order is None or order >= MIN_HALF_SPEARMAN
    )
