"""Journal of finished rows on disk, from which an interrupted run resumes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class Journal:
    """A file of JSON objects, one per line."""

    def __init__(self, path: Path, *, keep: bool) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if not keep:
            self.drop()

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))

    def rows(self) -> list[dict[str, Any]]:
        """Return the readable rows; the last line may be truncated."""
        rows = []
        for line in self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else ():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
        return rows

    def drop(self) -> None:
        self._path.unlink(missing_ok=True)
