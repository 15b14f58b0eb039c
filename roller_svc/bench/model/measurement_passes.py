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
from roller_svc.bench.interleaved_timing import undisturbed_s

VISITS, MOST_VISITS = 4, 8
# A case is visited further while the halves of its visits are so far apart: a neighbour reads for half a minute, all
# plans of a visit take 4 % longer then, and two names of one program were 1.4 % apart after four visits.
APART = 1.01
Json = dict[str, Any]
Visit = tuple[str, int]  # a case's id, and which of its visits


def until_quiet(cases: Collection[BenchCase], done: Mapping[Visit, Json]) -> Iterator[tuple[int, int, BenchCase]]:
    """The visits that are not done, with their number and that of the case; then, once more, those that others
    disturbed, and more of the cases that took another time in every other visit than in those between."""
    for again in (False, True):
        for visit in range(VISITS):
            for number, case in enumerate(cases, 1):
                row = done.get((case.id, visit))
                if row is None or (again and row.get("disturbed")):
                    yield visit, number, case
    for visit in range(VISITS, MOST_VISITS):
        for number, case in enumerate(cases, 1):
            if (case.id, visit) not in done and _are_apart(visits_of(case, done)):
                yield visit, number, case


def visits_of(case: BenchCase, done: Mapping[Visit, Json]) -> list[Json]:
    """All of the case so far, in their order."""
    return [done[case.id, visit] for visit in range(MOST_VISITS) if (case.id, visit) in done]


def _are_apart(visits: Sequence[Json]) -> bool:
    """Whether candidates take longer by one half of the visits than by the other, as a rule."""
    halves = [candidate["half_s"] for candidate in joined(visits)["candidates"] if candidate["half_s"]]
    return bool(halves) and abs(statistics.median(math.log(a / b) for a, b in halves)) > math.log(APART)


def joined(visits: Sequence[Json]) -> Json:
    """One row of a case's visits; those that failed do not count, unless all did."""
    timed = [row for row in visits if not row["error"]]
    if not timed:
        return visits[0]
    candidates = zip(*(row["candidates"] for row in timed), strict=True)
    return timed[0] | {
        "repeated": sum(row["repeated"] for row in timed),
        "disturbed": all(row["disturbed"] for row in timed),
        "candidates": [_joined_candidate(same) for same in candidates],
    }


def _joined_candidate(visits: Sequence[Json]) -> Json:
    """A candidate takes what its quietest calls of all visits took. `half_s`: the same of every other visit and of
    those between, two measurements: how far they agree no model can do better."""
    quietest = [candidate["quietest_s"] for candidate in visits]
    first = {name: value for name, value in visits[0].items() if name != "quietest_s"}
    failed = next((candidate for candidate in visits if candidate["error"]), None)
    if failed is not None:
        return first | {"error": failed["error"], "quiet_s": None, "half_s": None, "min_s": None, "median_s": None}
    return first | {
        "quiet_s": undisturbed_s(quietest),
        "half_s": [undisturbed_s(quietest[::2]), undisturbed_s(quietest[1::2])] if len(quietest) > 1 else None,
        "min_s": min(candidate["min_s"] for candidate in visits),
        "median_s": statistics.median(candidate["median_s"] for candidate in visits),
        "samples": sum(candidate["samples"] for candidate in visits),
    }
