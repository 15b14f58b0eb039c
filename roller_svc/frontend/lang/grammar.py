"""Tokens of one statement → syntax tree: the LALR grammar."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import cast

from lark import Lark, Token
from lark.exceptions import UnexpectedToken
from lark.lexer import Lexer

from roller_svc.errors import ExprSyntaxError
from roller_svc.frontend.lang import names
from roller_svc.frontend.lang.calls import Fault
from roller_svc.frontend.lang.nodes import Statement
from roller_svc.frontend.lang.source import Source, Span
from roller_svc.frontend.lang.tokens import Tok
from roller_svc.frontend.lang.tree import TreeBuilder

# A chain's operators get Python's precedence in tree.py: rules of one level each would cost a reduction a level.
_GRAMMAR = r"""
statement: NAME LSQB [indices] RSQB [COLON NAME] assign expr [where]
assign: EQUAL | ASSIGN | REDUCE | CMP
where: WHERE where_item (COMMA where_item)* [COMMA]
where_item: NAME IN expr
indices: expr (COMMA expr)* [COMMA]

?expr: chain
?chain: factor (_operator factor)*
_operator: CMP | OR | XOR | AND | SHIFT | ADD | MUL
?factor: power
     | ADD factor                            -> unary
     | TILDE factor                          -> unary
?power: postfix
     | postfix POW factor                    -> power
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
    ended = found.type == "$END"
    at = Span(tokens[-1].start, tokens[-1].end) if ended else Span(found.start_pos or 0, found.end_pos or 0)
    before = tokens if ended else [tok for tok in tokens if tok.end <= at.start]
    mistake = _known_mistake(found, before, expected, source, at)
    if mistake is not None:
        return mistake
    wanted = _wanted(expected, inside=_brackets_open(before))
    if ended:
        message = f"the statement ends after `{tokens[-1].text}`, where {wanted} should follow"
        return source.syntax_error("syntax-error", message, at)
    hint = names.PYTHON_WORDS.get(str(found)) or (names.PYTHON_WORDS.get(before[-1].text) if before else None)
    return source.syntax_error("syntax-error", f"`{source.cut(at)}` where {wanted} should stand", at, hint)


def _brackets_open(before: list[Tok]) -> bool:
    """Whether the place after these tokens is inside brackets."""
    kinds = [tok.kind for tok in before]
    return sum(kind in ("LPAR", "LSQB") for kind in kinds) > sum(kind in ("RPAR", "RSQB") for kind in kinds)


def _known_mistake(
    found: Token, before: list[Tok], expected: set[str], source: Source, at: Span
) -> ExprSyntaxError | None:
    """The error for what people often write and the language does not have."""
    if "ASSIGN" in expected and found.type == "NAME":
        hint = "the reductions are +=! *=! >=! <=! &=! |=!"
        return source.syntax_error("unknown-reduction", f"`{found}` is no reduction", at, hint)
    if expected == {"LPAR"} and len(before) > 1 and before[-2].kind == "DOT":
        message = f"`.{before[-1].text}` is an attribute; there are only methods"
        return source.syntax_error("unknown-attribute", message, at)
    if found.type == "STRING" and before and before[-1].kind == "NAME":
        return source.syntax_error("syntax-error", "a text in quotes is no value", at)
    if found.type in ("ASSIGN", "REDUCE", "EQUAL") and "NUMBER" not in expected and before:
        if len(before) == 1:
            name = before[0].text
            hint = f"write `{name}[...] {found} ...`, `{name}[]` for a scalar"
            return source.syntax_error("syntax-error", f"`{name}` on the left has no index", at, hint)
        hint = "end a statement with `;` or a line break"
        return source.syntax_error("syntax-error", f"a second `{found}` in one statement", at, hint)
    if found.type == "NAME" and "ADD" in expected and before[-1].text not in names.PYTHON_WORDS:
        hint = names.PYTHON_WORDS.get(str(found), "an operator is missing, or a `;` between two statements")
        return source.syntax_error("syntax-error", f"`{found}` right after `{before[-1].text}`", at, hint)
    return None


def _wanted(expected: set[str], *, inside: bool) -> str:
    """The expected terminals in words."""
    if "ADD" in expected and "NUMBER" not in expected:
        return "an operator, `,` or the closing bracket" if inside else "an operator or the statement's end"
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
    ("RPAR", "`,` or `)`"),
    ("RSQB", "`,` or `]`"),
    ("LSQB", "`[`"),
    ("LPAR", "`(`"),
    ("NAME", "a name"),
)
