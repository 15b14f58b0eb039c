"""What all tests share: those that need a GPU are skipped, and so not counted as passed, where there is none."""

from __future__ import annotations

import pytest

from roller_svc.runtime.cuda import device_present


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if device_present():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="there is no NVIDIA device here"))
