"""A builder that tests of the service share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from builders import Builder


@pytest.fixture
def builder() -> Iterator[Builder]:
    """A builder whose gate is open at the end, so that the service can stop."""
    builder = Builder()
    yield builder
    builder.gate.set()
