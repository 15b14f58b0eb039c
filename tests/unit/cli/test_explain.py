"""What `roller explain` prints of values."""

from __future__ import annotations

from typing import Any

from roller_svc.cli.explain import format_search

STEPS = [{"tile": [extent], "footprint_bytes": 4096, "traffic_bytes": 1 << 20, "outcome": "accepted"} for extent in (1, 2, 4)]
SEARCH: dict[str, Any] = {"kind": "scale-up", "level": "shared", "unit": "fma", "family": "gpu/x", "axes": ["m"], "base": [64]}


def test_search_marks_the_step_of_the_candidate_beyond_the_shown_ones() -> None:
    title, _, first, marked, rest = format_search(SEARCH | {"steps": STEPS}, 1, 2).splitlines()
    assert title == "scale-up of shared tiles on fma, gpu/x, of threads with m=64:"
    assert first.split()[0] == "m=1"
    assert marked.split()[:2] == ["→", "m=4"]
    assert rest == "... and 1 steps more (--steps)"


def test_rejected_tile_says_what_it_needs_and_what_there_is() -> None:
    step = STEPS[0] | {"outcome": "rejected", "limit": {"rule": "shared memory", "needs": 65536, "has": 49152.0}}
    said = format_search(SEARCH | {"steps": [step]}, 1).splitlines()[-1]
    assert said.endswith("rejected: shared memory, needs 65,536, has 49,152")
