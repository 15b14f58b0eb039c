"""Several visits to each case, far apart → one row a case.

Another tenant may read memory for minutes, and all that is measured meanwhile is slow: cases are visited one after the
other, and then all of them again, so often that each is likely to meet a quiet minute.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from roller_svc.bench.cases import BenchCase
from roller_svc.bench.interleaved_timing import low_noise_mean_s

PASSES, MAX_PASSES = 4, 8
# A case is visited further while the halves of its visits are so far apart: a neighbour reads for half a minute, all
# plans of a visit take 4 % longer then, and two names of one program were 1.4 % apart after four visits.
MAX_HALF_RATIO = 1.01
Json = dict[str, Any]
PassKey = tuple[str, int]  # a case's id, and which of its visits


def pending_passes(cases: Collection[BenchCase], done: Mapping[PassKey, Json]) -> Iterator[tuple[int, int, BenchCase]]:
    """The visits that are not done, with their number and that of the case; then, once more, those that others
    disturbed, and more of the cases that took another time in every other visit than in those between."""
    for repeat_disturbed in (False, True):
        for pass_ in range(PASSES):
            for number, case in enumerate(cases, 1):
                row = done.get((case.id, pass_))
                if row is None or (repeat_disturbed and row.get("disturbed")):
                    yield pass_, number, case
    for pass_ in range(PASSES, MAX_PASSES):
        for number, case in enumerate(cases, 1):
            if (case.id, pass_) not in done and _halves_disagree(passes_of(case, done)):
                yield pass_, number, case


def passes_of(case: BenchCase, done: Mapping[PassKey, Json]) -> list[Json]:
    """All of the case so far, in their order."""
    return [done[case.id, pass_] for pass_ in range(MAX_PASSES) if (case.id, pass_) in done]


def _halves_disagree(passes: Sequence[Json]) -> bool:
    """Whether candidates take longer by one half of the visits than by the other, as a rule."""
    halves = [candidate["half_s"] for candidate in merge_passes(passes)["candidates"] if candidate["half_s"]]
    return bool(halves) and abs(statistics.median(math.log(a / b) for a, b in halves)) > math.log(MAX_HALF_RATIO)


def merge_passes(passes: Sequence[Json]) -> Json:
    """One row of a case's visits; those that failed do not count, unless all did."""
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
    """A candidate takes what its quietest calls of all visits took. `half_s`: the same of every other visit and of
    those between, two measurements: how far they agree no model can do better."""
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
