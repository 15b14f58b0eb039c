"""The page for operators has the limits of the settings."""

from __future__ import annotations

import re
from pathlib import Path

from roller_svc.settings import LIMITS, Settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operating.md"


def test_the_page_has_every_limit_with_its_default() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## Limits")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (\w+) \|", section, re.MULTILINE)
    assert Settings().limit_table == LIMITS
    assert rows == [(name.value, *("none" if each is None else str(each) for each in limit)) for name, limit in LIMITS.items()]
