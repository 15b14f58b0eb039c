"""LALR grammar: tokens of one statement → syntax tree."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from keyword import iskeyword
from typing import cast

from lark import Lark, Token
from lark.exceptions import UnexpectedToken
from lark.lexer import Lexer

from roller_svc.errors import ExprSyntaxError
from roller_svc.frontend.lang import names
from roller_svc.frontend.lang.calls import SyntaxFault
from roller_svc.frontend.lang.equation import is_equation
from roller_svc.frontend.lang.nodes import Statement
from roller_svc.frontend.lang.source import Source, Span
from roller_svc.frontend.lang.synonyms import find_words
from roller_svc.frontend.lang.tokens import Tok
from roller_svc.frontend.lang.tree import TreeBuilder

# Operator precedence is Python's and resolved in tree.py: one rule per level would cost one reduction per level.
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
    """Pass existing tokens to lark."""

    def __init__(self, lexer_conf: object) -> None:
        """Ignore the configuration that lark passes to lexers."""

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
    """Parse the tokens of one statement."""
    try:
        # lark's types: the input is not a str, and with a transformer the result is the transformer's.
        return cast(Statement, _parser().parse(cast(str, tokens)))
    except SyntaxFault as fault:
        raise source.syntax_error(fault.code, fault.message, fault.span, fault.hint) from None
    except UnexpectedToken as unexpected:
        raise _syntax_error(tokens, unexpected, source) from None


def _syntax_error(tokens: list[Tok], unexpected: UnexpectedToken, source: Source) -> ExprSyntaxError:
    """Return the error at an unexpected token, naming what was expected."""
    expected = set(unexpected.expected)
    token = unexpected.token
    ended = token.type == "$END"
    span = Span(tokens[-1].start, tokens[-1].end) if ended else Span(token.start_pos or 0, token.end_pos or 0)
    before = tokens if ended else [tok for tok in tokens if tok.end <= span.start]
    mistake = _known_mistake(token, before, expected, source, span)
    if mistake is not None:
        return mistake
    expected_words = _describe_expected(expected, inside=_brackets_open(before))
    if ended:
        message = f"the statement ends after `{tokens[-1].text}`: expected {expected_words}"
        return source.syntax_error("syntax-error", message, span)
    hint = _hint_at(token, before) or (_EINSUM_HINT if is_equation(source.text) else None)
    return source.syntax_error("syntax-error", f"`{source.quote(span)}`: expected {expected_words}", span, hint)


_EINSUM_HINT = 'write an equation in a call: `einsum("mk,kn->mn")`'


def _hint_at(token: Token, before: list[Tok]) -> str | None:
    """Return the right form of what this token, or the one before it, writes in another language."""
    previous = before[-1].text if before else ""
    if token.type == "LSQB" and previous == ")":
        return "name the result of a call, then index it: `T = softmax(A); Y[m] = T[m, 0]`"
    sign = "..." if token.type == "DOT" else str(token)
    return next((hint for word in (previous + sign, sign, previous) if not _is_name(word) and (hint := find_words(word))), None)


def _is_name(word: str) -> bool:
    return word.isidentifier() and not iskeyword(word)


def _brackets_open(before: list[Tok]) -> bool:
    """Whether the position after these tokens is inside brackets."""
    kinds = [tok.kind for tok in before]
    return sum(kind in ("LPAR", "LSQB") for kind in kinds) > sum(kind in ("RPAR", "RSQB") for kind in kinds)


def _known_mistake(token: Token, before: list[Tok], expected: set[str], source: Source, span: Span) -> ExprSyntaxError | None:
    """Return the error for a common mistake, or None."""
    if "ASSIGN" in expected and token.type == "NAME":
        hint = "the reductions are +=! *=! >=! (maximum) <=! (minimum) &=! |=!"
        return source.syntax_error("unknown-reduction", f"`{token}` is not a reduction", span, hint)
    if expected == {"LPAR"} and len(before) > 1 and before[-2].kind == "DOT":
        message = f"`.{before[-1].text}` is an attribute; there are only methods"
        return source.syntax_error("unknown-attribute", message, span, names.find_right_form(before[-1].text, names.METHODS))
    if token.type == "STRING" and before and before[-1].kind == "NAME":
        return source.syntax_error("syntax-error", "a quoted text is not a value", span)
    if token.type in ("ASSIGN", "REDUCE", "EQUAL") and "NUMBER" not in expected and before:
        if len(before) == 1:
            name = before[0].text
            hint = f"write `{name}[...] {token} ...`, `{name}[]` for a scalar"
            return source.syntax_error("syntax-error", f"`{name}` on the left has no index", span, hint)
        if _brackets_open(before):
            hint = "close the bracket before it; `==` compares"
            return source.syntax_error("syntax-error", f"`{token}` inside brackets", span, hint)
        hint = "end a statement with `;` or a line break"
        return source.syntax_error("syntax-error", f"a second `{token}` in one statement", span, hint)
    if token.type == "NAME" and "ADD" in expected and not iskeyword(before[-1].text):
        hint = _hint_at(token, before) or "an operator is missing, or a `;` between two statements"
        return source.syntax_error("syntax-error", f"`{token}` right after `{before[-1].text}`", span, hint)
    return None


def _describe_expected(expected: set[str], *, inside: bool) -> str:
    """Describe the expected terminals in words."""
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
