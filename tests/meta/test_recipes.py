"""docs/recipes.md shows the files of examples/ as they are, and what they print."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from sampling import slow

from roller_svc.settings import read_settings, use

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
FILES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
ROWS = dict(re.findall(r"^\| \[([^\]]+)\]\([^)]*\) \| `examples/(\w+)\.py` \|$", PAGE, re.MULTILINE))
SHOWN = re.findall(r"^## (.*)\n\n.*\n\n```python\n((?:.*\n)*?)```\n\n```\n((?:.*\n)*?)```$", PAGE, re.MULTILINE)
QUICK = ["own_device"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path) -> Iterator[None]:
    use(read_settings(cache=tmp_path))
    yield
    use(read_settings())


def without_numbers(text: str) -> list[str]:
    return [" ".join(re.sub(r"\d+(\.\d+)?", "N", line).split()) for line in text.splitlines()]


def test_every_example_has_a_row_and_a_section() -> None:
    assert sorted(ROWS.values()) == list(FILES)
    assert [heading for heading, _, _ in SHOWN] == list(ROWS)
    assert [heading for heading in re.findall(r"^## (.*)$", PAGE, re.MULTILINE) if heading not in ROWS] == []


@pytest.mark.parametrize(("heading", "code"), [shown[:2] for shown in SHOWN], ids=ROWS.values())
def test_the_page_shows_the_files(heading: str, code: str) -> None:
    assert code == FILES[ROWS[heading]].read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("heading", "printed"), [(h, out) if ROWS[h] in QUICK else slow((h, out)) for h, _, out in SHOWN], ids=ROWS.values()
)
def test_examples_print_what_is_shown(heading: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(FILES[ROWS[heading]]))
    assert without_numbers(capsys.readouterr().out) == without_numbers(printed)
