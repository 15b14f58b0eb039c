"""Width and colours of a stream's terminal (no-color.org)."""

from __future__ import annotations

import os
import re
from typing import TextIO

UNLIMITED = 1 << 16  # columns of a file or a pipe: nothing is broken
DEFAULT = 80  # columns of a terminal that does not say

_COLORS = {"error": "1;31", "note": "1;36", "hint": "1;32"}  # of the word that begins a line
_LABEL = re.compile(rf"^({'|'.join(_COLORS)})(?=: )", re.MULTILINE)


def width_of(stream: TextIO | None) -> int:
    """Return the columns of COLUMNS, or of the stream's terminal. A file, a pipe or a closed stream has no limit."""
    given = os.environ.get("COLUMNS", "")
    if given.isascii() and given.isdecimal() and int(given):
        return int(given)
    return (os.get_terminal_size(stream.fileno()).columns or DEFAULT) if stream is not None and stream.isatty() else UNLIMITED


def has_colors(stream: TextIO | None) -> bool:
    """Return whether text has colours: on a terminal that is not dumb, or with FORCE_COLOR, and not with NO_COLOR."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb")


def color_labels(text: str, stream: TextIO | None) -> str:
    """Return the text with `error`, `note` and the like in colour where they begin a line and the stream has colours."""
    return _LABEL.sub(lambda m: f"\x1b[{_COLORS[m[1]]}m{m[1]}\x1b[0m", text) if has_colors(stream) else text
