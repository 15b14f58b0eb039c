"""A service with real builds, and headless Chromium looking at its page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from explorer_pages import CHROMIUM, OPTIONS, Explorer
from serving import running
from waiting import PATIENCE_S

from roller_svc.service.app import create_app
from roller_svc.settings import Settings


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a service without keys."""
    app = create_app(Settings(store=tmp_path_factory.mktemp("explorer") / "store", workers=1), ready=True)
    with running(app) as (_, port):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium. While it is there its library has a running loop in this thread, in which no other module's tests may run."""
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(OPTIONS), timeout=PATIENCE_S * 1e3)
        yield browser
        browser.close()


@pytest.fixture
def explorer(browser: Any, address: str) -> Iterator[Explorer]:
    """Tabs in which nothing may go wrong."""
    explorer = Explorer(browser, address)
    yield explorer
    for context in browser.contexts:
        context.close()
    assert explorer.faults == []


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core."""
    path = Path(__file__).resolve().parents[2] / "web" / "node_modules" / "axe-core" / "axe.min.js"
    if not path.exists():
        pytest.skip("the packages of web/ are not installed (npm ci --prefix web)")
    return path.read_text(encoding="utf-8")
