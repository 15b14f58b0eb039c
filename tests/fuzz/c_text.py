"""C, CUDA or HIP text → what of it a compiler sees, comments gone; and whether a stranger's text is in that."""

from __future__ import annotations

import re
from collections.abc import Iterable

_TRIGRAPHS = {"=": "#", "/": "\\", "'": "^", "(": "[", ")": "]", "!": "|", "<": "{", ">": "}", "-": "~"}
_TRIGRAPH = re.compile(r"\?\?([=/'()!<>-])")
_SPLICE = re.compile(r"\\[ \t\v\f]*(?:\r\n|\n|\r)")  # gcc joins lines over blanks, too
# a quoted text that is not closed in its line is no text: what follows it is read as code
_PIECE = re.compile(
    r"""(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(?P<block>/\*.*?(?:\*/|\Z))|(?P<line>//[^\n\r]*)""", re.DOTALL
)
# no generator of ours writes these
_NEVER = ("incbin", "/etc/", "constructor", "system(", ".include", "python/")


def readings(text: str) -> tuple[str, ...]:
    """The text without comments, with trigraphs and without: a compiler may read it either way."""
    return tuple(_code(one) for one in {text, _TRIGRAPH.sub(lambda found: _TRIGRAPHS[found[1]], text)})


def leaks(text: str, texts: Iterable[str], names: Iterable[str]) -> list[str]:
    """What of the request is in the code: a text at all, or a name that is more than an identifier."""
    found = []
    for code in readings(text):
        found += [marker for marker in texts if marker in code]
        found += [marker for marker in names if not _is_identifier(marker, code)]
        found += [word for word in _NEVER if word in code]
    return found


def _code(text: str) -> str:
    return _PIECE.sub(lambda found: found[0] if found["text"] else " ", _SPLICE.sub("", text))


def _is_identifier(name: str, code: str) -> bool:
    """Whether a name stands nowhere in the code but in identifiers, and in none of its quoted texts."""
    quoted = (found["text"] for found in _PIECE.finditer(code) if found["text"])
    return not any(name in one for one in quoted)
