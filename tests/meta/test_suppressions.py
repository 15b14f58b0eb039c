"""Each comment that silences ruff or mypy says why on its line. mypy does not read the tests, which need none for it.

Both tools report a comment that silences nothing: ruff by RUF100, mypy by `strict`.
"""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("roller_svc", "bench", "tools", "tests")
SILENCING = re.compile(r"#\s*(noqa|type:\s*ignore)", re.IGNORECASE)
REASON = r"\w[^#]*"
JUSTIFIED = re.compile(rf"# noqa: [A-Z]+\d+(, [A-Z]+\d+)* - {REASON}|# type: ignore\[[a-z, -]+\]  # {REASON}")


def find_faults(source: str, *, is_checked: bool) -> list[str]:
    """Return the comments without a reason, and those for mypy in a file that it does not check."""
    if not SILENCING.search(source):  # tokens of a module take long to read
        return []
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = (token.string for token in tokens if token.type == tokenize.COMMENT)
    silencing = [text for text in comments if SILENCING.match(text)]
    return [text for text in silencing if not JUSTIFIED.fullmatch(text) or ("type:" in text and not is_checked)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_suppression_has_its_reason(folder: str) -> None:
    sources = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in sorted((ROOT / folder).rglob("*.py"))}
    faults = {path: found for path, source in sources.items() if (found := find_faults(source, is_checked=folder != "tests"))}
    assert faults == {}


@pytest.mark.parametrize(
    "comment", ["# noqa", "# noqa: E402", "# noqa: E402 -", "# type: ignore", "# type: ignore[misc]", "# type: ignore[misc] # why"]
)
def test_suppressions_without_a_reason_are_found(comment: str) -> None:
    assert find_faults(f"x = 1  {comment}\n", is_checked=True) == [comment]


def test_suppressions_with_a_reason_pass_where_the_tool_reads_them() -> None:
    for_mypy = "# type: ignore[arg-type, misc]  # no types"
    source = f"x = 1  # noqa: FBT001, N812 - its own convention\ny = 2  {for_mypy}\n"
    assert find_faults(source, is_checked=True) == []
    assert find_faults(source, is_checked=False) == [for_mypy]
