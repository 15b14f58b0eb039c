"""What `roller explain` prints of values."""

from __future__ import annotations

import pytest

from roller_svc.cli.explain import format_steps


@pytest.mark.parametrize(("reuse", "said"), [(0.12345, "0.123"), (None, "free")])
def test_steps_say_what_they_reuse(reuse: float | None, said: str) -> None:
    """JSON has no infinity: traffic that is saved at no cost is null there."""
    step = {"level": "shared", "tile": {"m": 64}, "footprint_bytes": 4096, "reuse": reuse, "outcome": "kept"}
    assert said in format_steps([step]).splitlines()[-1].split()
