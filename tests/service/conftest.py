"""A builder that tests of the service share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from builders import Builder
from databases import new_database
from waiting import PATIENCE_S

from roller_svc.service import app, key_cache, oidc, readiness, server
from roller_svc.service.routes import models


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have services wait for their parts and clients as long as a test waits for them."""
    monkeypatch.setattr(app, "REQUEST_BUSY_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(oidc, "FETCH_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(readiness, "TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(key_cache, "LOAD_WAIT_S", PATIENCE_S)
    monkeypatch.setattr(models, "SLOW_START_S", PATIENCE_S)
    monkeypatch.setattr(server, "KEEP_ALIVE_S", PATIENCE_S)


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
