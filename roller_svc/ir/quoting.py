"""Text from outside → what may stand in C, C++, CUDA or HIP source: comments, string literals, identifiers.

Whatever a generator prints that is no literal of its own goes through one of these, or is a number.
"""

from __future__ import annotations

import re

from roller_svc.errors import InvariantError

# What printed programs, devices and tiles are made of. No backslash, "?" or quote, and of control characters the
# newline alone: neither a spliced line nor a trigraph can be written.
_NOT_IN_A_COMMENT = re.compile(r"[^A-Za-z0-9_ .,:;()\[\]=+*/%<>!&|^~@`\n-]|\*(?=/)|/(?=\*)|%(?=:)")
_REPLACEMENT = "_"
_NOT_IN_A_STRING = re.compile(r"[^A-Za-z0-9_ .,:;()\[\]=+*/<>!&|^~@`{}$#'-]")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def quote_comment(text: str) -> str:
    """A block comment of the text's lines, empty for no text. Other characters than a program's become underscores.

    One pass over the text decides about each character by its neighbours as given, so no replacement makes a new end.
    """
    lines = _NOT_IN_A_COMMENT.sub(_REPLACEMENT, text).split("\n")
    return "/* " + "\n * ".join(line.rstrip(" ") for line in lines) + "\n */\n" if text else ""


def quote_string(text: str) -> str:
    """A string literal with the text's UTF-8 bytes; others than plain characters as three octal digits.

    Octal escapes end after three digits, hexadecimal ones do not.
    """
    return '"' + _NOT_IN_A_STRING.sub(_octal, text) + '"'


def require_identifier(name: str) -> str:
    """The name itself, which a generator made; InvariantError for what is no identifier."""
    if not _IDENTIFIER.fullmatch(name):
        raise InvariantError(f"{name[:100]!r} was to stand in source as an identifier: letters, digits and _ make one")
    return name


def _octal(found: re.Match[str]) -> str:
    return "".join(f"\\{byte:03o}" for byte in found[0].encode("utf-8", "backslashreplace"))
