"""A builder that tests of the service share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from builders import Builder
from databases import new_database


@pytest.fixture
def builder() -> Iterator[Builder]:
    """A builder whose gate is open at the end, so that the service can stop."""
    builder = Builder()
    yield builder
    builder.gate.set()


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def stack_settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The settings of a service on either database; by default it is in the store's folder."""
    if request.param == "sqlite":
        return {}
    return {"database": new_database(request.getfixturevalue("postgresql"))}
