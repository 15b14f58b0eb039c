"""docs/modes.md: its examples print what they show."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roller_svc.settings import read_settings, use

PAGE = (Path(__file__).parents[2] / "docs" / "modes.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path) -> Iterator[None]:
    use(read_settings(cache=tmp_path))
    yield
    use(read_settings())


def test_the_examples_print_what_is_shown() -> None:
    names: dict[str, Any] = {}
    examples = re.findall(r"^```python\n(.*?)^```\n\n```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(examples) == PAGE.count("```python")
    for code, shown in examples:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)  # the page's own example
        assert printed.getvalue() == shown
