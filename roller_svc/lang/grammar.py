"""Tokens of one statement → syntax tree: the LALR grammar."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import cast

from lark import Lark, Token
from lark.exceptions import UnexpectedToken
from lark.lexer import Lexer

from roller_svc.errors import ExprSyntaxError
from roller_svc.lang import names
from roller_svc.lang.calls import Fault
from roller_svc.lang.source import Source, Span
from roller_svc.lang.syntax import Statement
from roller_svc.lang.tokens import Tok
from roller_svc.lang.tree import TreeBuilder

# Python's operators and precedence; a comparison does not chain.
_GRAMMAR = r"""
statement: NAME LSQB [indices] RSQB [COLON NAME] assign expr [where]
assign: EQUAL | ASSIGN | REDUCE | CMP
where: WHERE where_item (COMMA where_item)* [COMMA]
where_item: NAME IN expr
indices: expr (COMMA expr)* [COMMA]

?expr: bitor
     | bitor CMP bitor                       -> binary
?bitor: bitxor
     | bitor OR bitxor                       -> binary
?bitxor: bitand
     | bitxor XOR bitand                     -> binary
?bitand: shift
     | bitand AND shift                      -> binary
?shift: sum
     | shift SHIFT sum                       -> binary
?sum: term
     | sum ADD term                          -> binary
?term: factor
     | term MUL factor                       -> binary
?factor: power
     | ADD factor                            -> unary
     | TILDE factor                          -> unary
?power: postfix
     | postfix POW factor                    -> binary
?postfix: atom
     | postfix DOT NAME LPAR [arguments] RPAR -> method
?atom: NUMBER                                -> number
     | NAME                                  -> ref
     | NAME LSQB [indices] RSQB              -> get
     | NAME LPAR [arguments] RPAR            -> call
     | LPAR expr RPAR                        -> parenthesis
     | LPAR expr COMMA [indices] RPAR        -> group

arguments: argument (COMMA argument)* [COMMA]
?argument: value
     | NAME EQUAL value                      -> keyword
?value: expr
     | STRING                                -> text
     | LSQB [values] RSQB                    -> group_list
values: value (COMMA value)* [COMMA]

%declare NAME NUMBER STRING LPAR RPAR LSQB RSQB COMMA COLON DOT EQUAL ASSIGN REDUCE CMP OR XOR AND SHIFT ADD MUL POW
%declare TILDE WHERE IN
"""


class _TokenFeed(Lexer):
    """Hands lark the tokens that are already there."""

    def __init__(self, lexer_conf: object) -> None:
        """Lark's lexers take its configuration; this one needs none of it."""

    def lex(self, data: list[Tok]) -> Iterator[Token]:  # type: ignore[override]  # a feed takes no lexer state
        for tok in data:
            yield Token(tok.kind, tok.text, tok.start, end_pos=tok.end)


@cache
def _parser() -> Lark:
    return Lark(
        _GRAMMAR,
        start="statement",
        parser="lalr",
        lexer=_TokenFeed,
        transformer=TreeBuilder(),
        maybe_placeholders=False,
    )


def parse_statement(tokens: list[Tok], source: Source) -> Statement:
    """The tree of one statement's tokens."""
    try:
        # A feed of tokens is no str, and with a transformer the result is what that makes.
        return cast(Statement, _parser().parse(cast(str, tokens)))
    except Fault as fault:
        raise source.syntax_error(fault.code, fault.message, fault.at, fault.hint) from None
    except UnexpectedToken as unexpected:
        raise _syntax_error(tokens, unexpected, source) from None


def _syntax_error(tokens: list[Tok], unexpected: UnexpectedToken, source: Source) -> ExprSyntaxError:
    """What is wrong at the token that does not fit, and what would have fitted."""
    expected = set(unexpected.expected)
    found = unexpected.token
    if found.type == "$END":
        at = Span(tokens[-1].end, tokens[-1].end + 1)
        return source.syntax_error("syntax-error", f"the statement ends where {_wanted(expected)} should follow", at)
    at = Span(found.start_pos or 0, found.end_pos or 0)
    before = [tok for tok in tokens if tok.end <= at.start]
    special = _known_mistake(found, before, expected)
    if special is not None:
        code, message, hint = special
        return source.syntax_error(code, message, at, hint)
    hint = names.PYTHON_WORDS.get(str(found)) or (names.PYTHON_WORDS.get(before[-1].text) if before else None)
    return source.syntax_error("syntax-error", f"`{source.cut(at)}` where {_wanted(expected)} should stand", at, hint)


def _known_mistake(found: Token, before: list[Tok], expected: set[str]) -> tuple[str, str, str | None] | None:
    """(code, message, hint) for what people often write and the language does not have."""
    if found.type == "CMP" and "NUMBER" not in expected and "ASSIGN" not in expected:
        hint = "write both: `a <= b, b < c` or `(a <= b) & (b < c)`"
        return "chained-comparison", "a comparison after a comparison", hint
    if "ASSIGN" in expected and found.type == "NAME":
        return "unknown-reduction", f"`{found}` is no reduction", "the reductions are +=! *=! >=! <=! &=! |=!"
    if expected == {"LPAR"} and len(before) > 1 and before[-2].kind == "DOT":
        return "unknown-attribute", f"`.{before[-1].text}` is an attribute; there are only methods", None
    if found.type == "STRING" and before and before[-1].kind == "NAME":
        return "syntax-error", "a text in quotes is no value", None
    if found.type in ("ASSIGN", "REDUCE", "EQUAL") and "NUMBER" not in expected and before:
        return "syntax-error", f"a second `{found}` in one statement", "end a statement with `;` or a line break"
    return None


def _wanted(expected: set[str]) -> str:
    """The expected terminals in words."""
    if "NUMBER" in expected:
        return "a value"
    if "ASSIGN" in expected:
        return "`=` or a reduction such as `+=!`"
    for kind, words in _WORDS:
        if kind in expected:
            return words
    return "the statement's end"


_WORDS = (
    ("IN", "`in`"),
    ("RPAR", "an operator, `,` or `)`"),
    ("RSQB", "an operator, `,` or `]`"),
    ("LSQB", "`[`"),
    ("LPAR", "`(`"),
    ("NAME", "a name"),
    ("ADD", "an operator or the statement's end"),
)
