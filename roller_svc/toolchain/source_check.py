"""Reject kernel source that generators do not write or that could make a compiler read other files.

Generators write few headers, few pragmas, and string literals of few characters. Anything else comes from outside.
Source is read as a compiler reads it: lines spliced, comments removed, literals separated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from roller_svc.errors import CompileError
from roller_svc.ir.kernel import KernelSource, Language

# Characters that disguise others: trigraphs, a digraph of "#", and anything except printable ASCII.
_DISGUISE = re.compile(r"\?\?[=/'()!<>-]|%:|[^\t\n -~]")
_SPLICE = re.compile(r"\\[ \t]*\n")
_TOKEN = re.compile(
    r"(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<string>\"(?:\\.|[^\"\\\n])*\")|(?P<open>[\"']|/\*)|(?P<code>[^/\"']+|/)",
    re.DOTALL,
)
_HASH = re.compile(r"^[ \t]*#[ \t]*([^\n]*)$|#", re.MULTILINE)
_DIRECTIVE = re.compile(
    r"(?!.*\b__has_)(?:define|undef|if|ifdef|ifndef|elif|else|endif|error)\b[^#]*"
    r"|include[ \t]*<(?:features|stdint|string|time)\.h>[ \t]*"
    r"|pragma[ \t]+(?:omp|unroll|clang[ \t]+fp)\b[^#]*"
)
_PRAGMA = re.compile(r"\b_Pragma\b(?!\s*\(\s*\"omp [^\"]*\"\s*\))")
# Assembler directives start with a dot. PTX uses dots everywhere, but has no directive that reads a file.
_PLAIN_STRING = re.compile(r'"[\w ,%+=&()\[\]{}-]*"')
_PTX_STRING = re.compile(r'"(?:[\w .,;:%+=&$!()\[\]{}|@<>-]|\\n)*"')
_PREFIX = re.compile(r"\w")  # of a raw string, which ends differently from a plain one
_LITERALS = {Language.C: _PLAIN_STRING, Language.HIP: _PLAIN_STRING, Language.CUDA: _PTX_STRING}


def check_source(source: KernelSource) -> None:
    """Raise CompileError for source that no generator writes."""
    for fault in _find_faults(source.text, _LITERALS[source.language]):
        raise CompileError(
            f"{source.name}: the {source.language.value} source is rejected: no generator writes {fault}",
            code="refused-source",
        )


def _find_faults(text: str, literal: re.Pattern[str]) -> Iterator[str]:
    """Yield what is wrong with the source, in order."""
    if disguise := _DISGUISE.search(text):
        yield f"the characters {disguise[0]!r}"
    pieces = [""]
    for token in _TOKEN.finditer(_SPLICE.sub("", text)):
        kind, word = token.lastgroup, token[0]
        if kind == "open":
            yield f"{word} here: a quotation or comment without an end, or a character in quotes"
        if kind == "string" and (not literal.fullmatch(word) or _PREFIX.fullmatch(pieces[-1][-1:])):
            yield f"the string {word[:60]}"
        pieces.append(" " if kind == "comment" else word)
    code = "".join(pieces)
    for line in _HASH.finditer(code):
        if line[1] is None or not _DIRECTIVE.fullmatch(line[1]):
            yield f"the directive {line[0].strip()[:60]!r}"
    if pragma := _PRAGMA.search(code):
        yield f"the operator {pragma[0]}"
