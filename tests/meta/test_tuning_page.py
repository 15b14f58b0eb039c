"""docs/tuning.md: its example prints what it shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text(encoding="utf-8")


def test_the_example_prints_what_is_shown() -> None:
    match = re.search(r"^```python\n(from roller_svc\.tuning .*?)^```\n\n```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert match is not None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(match[1], {})  # the page's own example
    assert printed.getvalue() == match[2]
