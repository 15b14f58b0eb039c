"""Measure each case in several passes, far apart, and merge them into one row per case.

A noisy neighbour may use memory bandwidth for minutes and slow down everything measured meanwhile. A pass measures all
cases once. With several passes each case is likely to have an undisturbed one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from roller_bench.cases import BenchCase
from roller_bench.interleaved_timing import low_noise_mean_s

PASSES = 4  # by default
EXTRA_PASSES = 4  # for cases whose halves disagree
# A case gets further passes while its even and odd passes differ by more than this ratio.
MAX_HALF_RATIO = 1.01
Json = dict[str, Any]
PassKey = tuple[str, int]  # case id, number of the pass


def pending_passes(
    cases: Collection[BenchCase], done: Mapping[PassKey, Json], passes: int = PASSES, extra: int = EXTRA_PASSES
) -> Iterator[tuple[int, int, BenchCase]]:
    """Yield pending passes as (pass, case number, case).

    Then repeat disturbed passes, then add passes for cases whose even and odd passes disagree.
    """
    for repeat_disturbed in (False, True):
        for pass_ in range(passes):
            for number, case in enumerate(cases, 1):
                row = done.get((case.id, pass_))
                if row is None or (repeat_disturbed and row.get("disturbed")):
                    yield pass_, number, case
    for pass_ in range(passes, passes + extra):
        for number, case in enumerate(cases, 1):
            if (case.id, pass_) not in done and _halves_disagree(passes_of(case, done)):
                yield pass_, number, case


def passes_of(case: BenchCase, done: Mapping[PassKey, Json]) -> list[Json]:
    """Return the finished passes of a case in order."""
    return [row for (id_, _), row in sorted(done.items(), key=lambda item: item[0]) if id_ == case.id]


def _halves_disagree(passes: Sequence[Json]) -> bool:
    """Return whether the candidates' times differ between even and odd passes, in the median."""
    halves = [candidate["half_s"] for candidate in merge_passes(passes)["candidates"] if candidate["half_s"]]
    return bool(halves) and abs(statistics.median(math.log(a / b) for a, b in halves)) > math.log(MAX_HALF_RATIO)


def merge_passes(passes: Sequence[Json]) -> Json:
    """Merge the passes of a case into one row; failed passes count only if all failed."""
    timed = [row for row in passes if not row["error"]]
    if not timed:
        return passes[0]
    candidates = zip(*(row["candidates"] for row in timed), strict=True)
    return timed[0] | {
        "repeated": sum(row["repeated"] for row in timed),
        "disturbed": all(row["disturbed"] for row in timed),
        "candidates": [_merge_candidates(same) for same in candidates],
    }


def _merge_candidates(passes: Sequence[Json]) -> Json:
    """Merge the passes of a candidate.

    `quiet_s` is the low-noise mean over all passes. `half_s` has those of the even and the odd passes; their agreement
    bounds how well a model can do.
    """
    quantiles = [candidate["quietest_s"] for candidate in passes]
    first = {name: value for name, value in passes[0].items() if name != "quietest_s"}
    failed = next((candidate for candidate in passes if candidate["error"]), None)
    if failed is not None:
        return first | {"error": failed["error"], "quiet_s": None, "half_s": None, "min_s": None, "median_s": None}
    return first | {
        "quiet_s": low_noise_mean_s(quantiles),
        "half_s": [low_noise_mean_s(quantiles[::2]), low_noise_mean_s(quantiles[1::2])] if len(quantiles) > 1 else None,
        "min_s": min(candidate["min_s"] for candidate in passes),
        "median_s": statistics.median(candidate["median_s"] for candidate in passes),
        "samples": sum(candidate["samples"] for candidate in passes),
    }
