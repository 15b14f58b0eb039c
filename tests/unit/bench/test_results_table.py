"""bench/results: the table is generated from the files, and each file is named by its own date and commit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roller_bench.results_table import RESULTS, date_and_commit, table


def test_the_table_is_up_to_date() -> None:
    assert (RESULTS / "README.md").read_text(encoding="utf-8") == table(RESULTS)


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json")), ids=lambda path: path.relative_to(RESULTS).as_posix())
def test_a_file_is_named_by_its_date_and_commit(path: Path) -> None:
    date, commit = date_and_commit(json.loads(path.read_text(encoding="utf-8")))
    assert path.stem == f"{date}-{commit}"
