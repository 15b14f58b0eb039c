"""Time candidates interleaved and estimate the low-noise time of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from roller_bench.model.regret import spearman
from roller_bench.timing_worker import Sample

# Calls are timed one by one. The fastest fifth of all calls counts as undisturbed by noisy neighbours; its mean
# reproduces an order better than a low percentile or the median does (docs/adr/0026).
LOW_NOISE_FRACTION = 0.2
QUANTILES = 20  # equal parts of the calls of a pass, each represented by its middle quantile
# Sampling continues until two halves of the samples agree: in each candidate's time (ratio), and in the order of all
# candidates (rank correlation).
MIN_ROUNDS, MAX_ROUNDS = 6, 240
MAX_HALF_RATIO, MIN_HALF_SPEARMAN = 1.02, 0.95
# Time limit of a pass for each candidate, or for all of few, after MIN_ROUNDS. Candidates of memory-bound cases differ
# by a percent, which takes seconds to resolve.
CANDIDATE_S, CASE_S = 0.25, 8.0
# A candidate slower than the best by SLOW_RATIO gets SLOW_ROUNDS only. Its fastest call is compared with the median of
# the best candidate, for all its rounds may have been disturbed.
SLOW_RATIO, SLOW_ROUNDS = 3.0, 2
# A disturbed sample is repeated after a pause, up to this often for a case; then the case counts as disturbed.
MAX_REPEATED = 60
PAUSE_S = 0.1

Rounds = Sequence[Sequence[float]]  # for each sample of a candidate the seconds of its calls


@dataclass(frozen=True, slots=True)
class InterleavedSamples:
    """The accepted samples of each candidate, and the number of repeated samples."""

    samples: tuple[Rounds, ...]
    repeated: int

    @property
    def is_disturbed(self) -> bool:
        """Return whether disturbed samples had to be accepted."""
        return self.repeated >= MAX_REPEATED


def time_interleaved(count: int, take: Callable[[int], Sample], pause: Callable[[float], None] = time.sleep) -> InterleavedSamples:
    """Take rounds of one sample of each candidate that is not slow, repeating disturbed samples."""
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
    """Return quantiles of the faster half of all calls; empty without samples."""
    calls = [seconds for sample in rounds for seconds in sample]
    middles = (np.arange(QUANTILES // 2) + 0.5) / QUANTILES
    return tuple(map(float, np.quantile(calls, middles))) if calls else ()


def low_noise_mean_s(passes: Sequence[Sequence[float]]) -> float | None:
    """Return the mean of the fastest fifth of the calls of one or several passes; None without samples."""
    quantiles = sorted(quantile for pass_ in passes for quantile in pass_)
    count = round(LOW_NOISE_FRACTION * QUANTILES * len(passes))
    return float(np.mean(quantiles[:count])) if quantiles else None


def low_noise_s(rounds: Rounds) -> float | None:
    """Return the low-noise mean of one pass."""
    return low_noise_mean_s([fast_quantiles_s(rounds)])


def split_half_s(rounds: Rounds) -> tuple[float, float] | None:
    """Return the low-noise means of the even and the odd samples; None if there is only one sample."""
    first, second = low_noise_s(rounds[::2]), low_noise_s(rounds[1::2])
    return None if first is None or second is None else (first, second)


def _near(samples: Sequence[Rounds]) -> list[int]:
    """Return the candidates that are not slow."""
    medians = (float(np.median([seconds for sample in rounds for seconds in sample])) for rounds in samples)
    best = min(medians, default=0.0)
    return [i for i, rounds in enumerate(samples) if min(map(min, rounds)) <= SLOW_RATIO * best]


def _halves_agree(candidates: Sequence[Rounds]) -> bool:
    """Return whether the halves of the samples agree in each candidate's time and in their order."""
    halves = [half for rounds in candidates if (half := split_half_s(rounds)) is not None]
    order = spearman(halves)
    return all(max(pair) <= MAX_HALF_RATIO * min(pair) for pair in halves) and (order is None or order >= MIN_HALF_SPEARMAN)
