"""Quoting of untrusted text for C, C++, CUDA and HIP source: comments, string literals, identifiers.

Code generators print their own literals, numbers, and the results of these functions, and nothing else.
"""

from __future__ import annotations

import re

from roller_svc.errors import InvariantError

# Characters of printed programs, devices and tiles. Backslash, "?", quotes and control characters but the newline are
# excluded: no spliced line and no trigraph can be written.
_NOT_IN_A_COMMENT = re.compile(r"[^A-Za-z0-9_ .,:;()\[\]=+*/%<>!&|^~@`\n-]|\*(?=/)|/(?=\*)|%(?=:)")
_REPLACEMENT = "_"
_NOT_IN_A_STRING = re.compile(r"[^A-Za-z0-9_ .,:;()\[\]=+*/<>!&|^~@`{}$#'-]")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def quote_comment(text: str) -> str:
    """Return a block comment of the text's lines, or "" for no text. Excluded characters become underscores.

    One pass decides about each character by its original neighbours, so a replacement cannot form a new comment end.
    """
    lines = _NOT_IN_A_COMMENT.sub(_REPLACEMENT, text).split("\n")
    return "/* " + "\n * ".join(line.rstrip(" ") for line in lines) + "\n */\n" if text else ""


def quote_string(text: str) -> str:
    """Return a string literal with the text's UTF-8 bytes; excluded characters become three octal digits.

    Octal escapes end after three digits, hexadecimal ones do not.
    """
    return '"' + _NOT_IN_A_STRING.sub(_octal, text) + '"'


def require_identifier(name: str) -> str:
    """Return the name. Raises InvariantError if it is not an identifier."""
    if not _IDENTIFIER.fullmatch(name):
        raise InvariantError(f"invalid identifier: expected letters, digits and _, got {name[:100]!r}")
    return name


def _octal(match: re.Match[str]) -> str:
    return "".join(f"\\{byte:03o}" for byte in match[0].encode("utf-8", "backslashreplace"))
