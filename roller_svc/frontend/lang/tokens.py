"""Lexer: text → tokens of each statement, by one regular expression, bracket matching and the line-break rule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from roller_svc.frontend.lang.limits import MAX_BRACKET_DEPTH, MAX_NAME_CHARACTERS, MAX_TEXT_BYTES
from roller_svc.frontend.lang.source import Source, Span
from roller_svc.frontend.lang.synonyms import explain_character


@dataclass(frozen=True, slots=True)
class Tok:
    """A token. `kind` is the grammar's name of the terminal."""

    kind: str
    text: str
    start: int
    end: int


_TOKEN = re.compile(
    r"""(?P<SPACE>[ \t\r\n\f]+|\#[^\n]*)
    |(?P<NUMBER>(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)(?:[eE][+-]?\d[\d_]*)?)
    |(?P<NAME>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<STRING>`[^`\n]*`|"[^"\n]*"|'[^'\n]*')
    |(?P<SHIFT><<|>>)
    |(?P<ASSIGN>[-+*/%^&|]?=!|[-+*/%^&|]?=\.(?!\d)|[<>]=!|[<>]=\.(?!\d))
    |(?P<CMP><=|>=|==|!=|<|>)
    |(?P<POW>\*\*)
    |(?P<REDUCE>[-+*/%^&|]=)
    |(?P<MUL>//|[*/%])
    |(?P<ADD>[-+])
    |(?P<AND>&)|(?P<OR>\|)|(?P<XOR>\^)|(?P<TILDE>~)
    |(?P<LPAR>\()|(?P<RPAR>\))|(?P<LSQB>\[)|(?P<RSQB>\])
    |(?P<COMMA>,)|(?P<DOT>\.)|(?P<EQUAL>=)|(?P<COLON>:)|(?P<SEMI>;)
    """,
    re.VERBOSE,
)
_CLOSES = {"RPAR": "LPAR", "RSQB": "LSQB"}
ENDS_OPERAND = frozenset({"NAME", "NUMBER", "STRING", "RPAR", "RSQB"})
_STARTS_VALUE = frozenset({"EQUAL", "ASSIGN", "REDUCE", "CMP", "COLON"})
_WORD_KINDS = {"in": "IN"}


def statements(source: Source, max_statements: int) -> list[list[Tok]]:
    """Return the tokens of each nonempty statement."""
    check_text(source)
    token_lists = [tokens for tokens in _split(scan(source), source) if tokens]
    if not token_lists:
        raise source.syntax_error("empty-program", "the program has no statement", Span(0, 0))
    if len(token_lists) > max_statements:
        message = f"{len(token_lists)} statements; at most {max_statements} are allowed"
        raise source.syntax_error("too-many-statements", message, token_lists[max_statements][0])
    return token_lists


def check_text(source: Source) -> None:
    """Reject a text of more than 64 KiB."""
    size = len(source.text.encode("utf-8", "surrogatepass"))
    if size > MAX_TEXT_BYTES:
        message = f"the text has {size} bytes; at most {MAX_TEXT_BYTES} are allowed"
        raise source.syntax_error("text-too-long", message, Span(0, 0))


def scan(source: Source) -> list[Tok]:
    """Return every token of the text."""
    text, tokens, offset = source.text, list[Tok](), 0
    match_at = _TOKEN.match
    while offset < len(text):
        match = match_at(text, offset)
        if match is None:
            raise _bad_character(source, offset)
        kind, end = match.lastgroup, match.end()
        if kind != "SPACE":
            word = match[0]
            if kind == "NAME":
                kind = _name_kind(source, word, end)
            elif kind == "NUMBER":
                end = _number_end(source, offset, end)
            tokens.append(Tok(kind or "", word, offset, end))
        offset = end
    return _strs_as_strings(tokens)


def _name_kind(source: Source, word: str, end: int) -> str:
    if len(word) > MAX_NAME_CHARACTERS:
        message = f"a name of {len(word)} characters; at most {MAX_NAME_CHARACTERS} are allowed"
        raise source.syntax_error("name-too-long", message, Span(end - len(word), end))
    text = source.text
    if word == "where":
        # `where(c, x, y)` is a function, `where n in 4` the clause.
        after = end
        while after < len(text) and text[after] in " \t\r\n\f":
            after += 1
        return "NAME" if text[after : after + 1] == "(" else "WHERE"
    return _WORD_KINDS.get(word, "NAME")


_AFTER_NUMBER = re.compile(r"[A-Za-z0-9_]+")


def _number_end(source: Source, start: int, end: int) -> int:
    """Return the end of a number. Antares' suffix f is a part of it; any other letter directly after is an error."""
    tail = _AFTER_NUMBER.match(source.text, end)
    if tail is None:
        return end
    if tail[0] == "f":
        return tail.end()
    message = f"`{source.quote(Span(start, tail.end()))}` is not a decimal number"
    raise source.syntax_error("bad-number", message, Span(start, tail.end()))


def _strs_as_strings(tokens: list[Tok]) -> list[Tok]:
    """Replace Antares' `strs.name` by the quoted name."""
    if not any(token.text == "strs" for token in tokens):
        return tokens
    joined: list[Tok] = []
    i = 0
    while i < len(tokens):
        a = tokens[i]
        if a.text == "strs" and [t.kind for t in tokens[i + 1 : i + 3]] == ["DOT", "NAME"]:
            name = tokens[i + 2]
            joined.append(Tok("STRING", f"`{name.text}`", a.start, name.end))
            i += 3
        else:
            joined.append(a)
            i += 1
    return joined


def _bad_character(source: Source, offset: int) -> Exception:
    char = source.text[offset]
    shown = f"`{char}`" if char.isprintable() else f"U+{ord(char):04X}"
    span = Span(offset, offset + 1)
    if char in "`\"'":
        return source.syntax_error("unterminated-string", f"the text that {shown} opens does not end on its line", span)
    hint = explain_character(char)
    if char > "\x7f" and char.isalpha():
        return source.syntax_error("bad-character", f"character {shown} in a name; names are ASCII", span, hint)
    return source.syntax_error("bad-character", f"character {shown} is not in the language", span, hint)


def _split(tokens: list[Tok], source: Source) -> Iterator[list[Tok]]:
    partner = match_brackets(tokens, source)
    current: list[Tok] = []
    depth_end = -1  # tokens up to this one are inside brackets
    for i, token in enumerate(tokens):
        if i in partner and i > depth_end:
            depth_end = partner[i]
        if token.kind == "SEMI" and i > depth_end:
            yield current
            current = []
            continue
        if current and i > depth_end - 1 and _starts_statement(tokens, i, partner, source.text):
            yield current
            current = []
        current.append(token)
    yield current


def _starts_statement(tokens: list[Tok], i: int, partner: dict[int, int], text: str) -> bool:
    """Whether a line break before token i ends a statement: `name[...] OP` follows a complete operand."""
    token, before = tokens[i], tokens[i - 1]
    if token.kind != "NAME" or before.kind not in ENDS_OPERAND:
        return False
    if i + 1 >= len(tokens) or tokens[i + 1].kind != "LSQB" or "\n" not in text[before.end : token.start]:
        return False
    after = partner[i + 1] + 1
    return after < len(tokens) and tokens[after].kind in _STARTS_VALUE


def match_brackets(tokens: list[Tok], source: Source) -> dict[int, int]:
    """Return the index of the closing bracket for the index of each opening one. Raises ExprSyntaxError if one has none."""
    partner: dict[int, int] = {}
    opened: list[int] = []
    for i, token in enumerate(tokens):
        if token.kind in {"LPAR", "LSQB"}:
            opened.append(i)
            if len(opened) > MAX_BRACKET_DEPTH:
                message = f"brackets are nested more than {MAX_BRACKET_DEPTH} deep"
                raise source.syntax_error("too-deep", message, token)
        elif token.kind in _CLOSES:
            if not opened:
                raise source.syntax_error("unbalanced-bracket", f"`{token.text}` closes nothing", token)
            if tokens[opened[-1]].kind != _CLOSES[token.kind]:
                message = f"`{token.text}` does not close the `{tokens[opened[-1]].text}` before it"
                raise source.syntax_error("unbalanced-bracket", message, token)
            partner[opened.pop()] = i
        elif token.kind == "SEMI" and opened:
            break
    if opened:
        raise source.syntax_error("unbalanced-bracket", f"`{tokens[opened[-1]].text}` is never closed", tokens[opened[-1]])
    return partner
