"""Tokens → calls of operators as written: a name, tensors' names, literals. Nothing is evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roller_svc.lang.source import Source, Span, Spanned
from roller_svc.lang.tokens import ENDS_OPERAND, Tok

WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None}
NUMBER_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class Argument:
    """`keyword` is None for what stands by position; `is_name` says that the value is a name without quotes."""

    keyword: str | None
    value: object
    is_name: bool
    span: Span


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """`output` is None where the text is nothing but the call."""

    output: str | None
    name: str
    name_span: Span
    arguments: tuple[Argument, ...]
    span: Span


def written_calls(tokens: Sequence[Tok], source: Source) -> list[WrittenCall]:
    """Every `name = operator(...)` that is a statement, or the one `operator(...)` that is all there is."""
    found: list[WrittenCall] = []
    depth = i = 0
    while i < len(tokens):
        named = _is_named_call(tokens, i, source) if depth == 0 else False
        if named or (i == 0 and _kinds(tokens, 0, 2) == ["NAME", "LPAR"]):
            reader = _Reader(tokens, i + 2 if named else i, source)
            found.append(reader.call(tokens[i] if named else None))
            i = reader.at
            continue
        depth += {"LPAR": 1, "LSQB": 1, "RPAR": -1, "RSQB": -1}.get(tokens[i].kind, 0)
        i += 1
    return found


def _kinds(tokens: Sequence[Tok], start: int, count: int) -> list[str]:
    return [token.kind for token in tokens[start : start + count]]


def _is_named_call(tokens: Sequence[Tok], i: int, source: Source) -> bool:
    if _kinds(tokens, i, 4) != ["NAME", "EQUAL", "NAME", "LPAR"]:
        return False
    if i == 0 or tokens[i - 1].kind == "SEMI":
        return True
    before = tokens[i - 1]
    return before.kind in ENDS_OPERAND and "\n" in source.text[before.end : tokens[i].start]


class _Reader:
    """Goes through one call, token by token."""

    def __init__(self, tokens: Sequence[Tok], at: int, source: Source) -> None:
        self.tokens, self.at, self.source = tokens, at, source

    @property
    def kind(self) -> str:
        return self.tokens[self.at].kind if self.at < len(self.tokens) else ""

    def take(self) -> Tok:
        token = self.tokens[self.at]
        self.at += 1
        return token

    def wrong(self, message: str) -> Exception:
        at: Spanned = self.tokens[min(self.at, len(self.tokens) - 1)]
        hint = 'a call of an operator is written `Y = conv2d(X, W, stride=2, padding="same")`'
        return self.source.syntax_error("bad-call", message, at, hint)

    def call(self, output: Tok | None) -> WrittenCall:
        name = self.take()
        self.take()  # its bracket
        arguments: list[Argument] = []
        while self.kind != "RPAR":
            arguments.append(self.argument())
            if self.kind == "COMMA":
                self.take()
            elif self.kind != "RPAR":
                raise self.wrong("`,` or `)` should follow here")
        end = self.take()
        self._check_end(end)
        first = name if output is None else output
        return WrittenCall(
            None if output is None else output.text, name.text, Span(name.start, name.end), tuple(arguments),
            Span(first.start, end.end),
        )  # fmt: skip

    def _check_end(self, end: Tok) -> None:
        """A call is a whole statement: what follows stands behind `;` or on another line."""
        if self.kind in {"", "SEMI"}:
            return
        if self.kind != "NAME" or "\n" not in self.source.text[end.end : self.tokens[self.at].start]:
            raise self.wrong("a call of an operator is a statement of its own; `;` or a new line should follow")

    def argument(self) -> Argument:
        start = self.at
        keyword = None
        if _kinds(self.tokens, self.at, 2) == ["NAME", "EQUAL"]:
            keyword = self.take().text
            self.take()
        is_name = self.kind == "NAME" and self.tokens[self.at].text not in WORDS
        value = self.items() if self.kind in {"LSQB", "LPAR"} else self.literal()
        return Argument(keyword, value, is_name, Span(self.tokens[start].start, self.tokens[self.at - 1].end))

    def items(self) -> tuple[object, ...]:
        """[1, 2] or (1, 2); lists do not nest."""
        closing = "RSQB" if self.take().kind == "LSQB" else "RPAR"
        found: list[object] = []
        while self.kind != closing:
            found.append(self.literal())
            if self.kind == "COMMA":
                self.take()
            elif self.kind != closing:
                raise self.wrong("`,` or the list's end should follow here")
        self.take()
        return tuple(found)

    def literal(self) -> object:
        """A number, a text in quotes, or a word."""
        sign = self.take().text if self.kind == "ADD" else ""
        if self.kind == "NUMBER":
            return self.number(sign)
        if sign or self.kind not in {"NAME", "STRING"}:
            raise self.wrong("an argument is a tensor's name, a number, a text, a list of them, or true or false")
        token = self.take()
        return token.text[1:-1] if token.kind == "STRING" else WORDS.get(token.text, token.text)

    def number(self, sign: str) -> int | float:
        text = self.tokens[self.at].text
        if len(text) > NUMBER_CHARACTERS:
            raise self.wrong(f"a number of {len(text)} characters")
        self.take()
        value = int(text) if text.replace("_", "").isdigit() else float(text)
        return -value if sign == "-" else value
