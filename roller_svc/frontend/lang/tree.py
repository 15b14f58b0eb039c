"""Transformer of the grammar: build a syntax node at each reduction of the parser."""

from __future__ import annotations

import math
from dataclasses import replace

from lark import Token

from roller_svc.frontend.lang import names
from roller_svc.frontend.lang.calls import Keyword, ParsedCall, SyntaxFault, depth_above, function_call, method_call
from roller_svc.frontend.lang.nodes import (
    Assign,
    Binary,
    Get,
    Group,
    Node,
    Num,
    Ref,
    Statement,
    Text,
    Unary,
    When,
    WhereItem,
)
from roller_svc.frontend.lang.source import Span
from roller_svc.frontend.lang.synonyms import find_words
from roller_svc.ir.dtype import dtype_named

_COMBINES = frozenset({"", "+", "*", ">", "<", "&", "|"})
_SCATTERS = frozenset({"", "+", "*", ">", "<"})

# The parts of a rule: tokens that the grammar keeps, and results of other rules.
Parts = list[object]


def _span(token: object) -> Span:
    assert isinstance(token, Token)  # the grammar puts one there
    return Span(token.start_pos or 0, token.end_pos or 0)


class TreeBuilder:
    """One method per rule of the grammar. Stateless, so parses may run concurrently."""

    def number(self, parts: list[Token]) -> Num:
        text, span = str(parts[0]), _span(parts[0])
        try:
            value = _number(text)
        except ValueError:
            raise SyntaxFault("bad-number", f"`{text[:40]}` is not a decimal number", span) from None
        if value is None or math.isinf(value):
            raise SyntaxFault("literal-out-of-range", f"no type can hold `{text[:40]}`", span)
        return Num(value, start=span.start, end=span.end)

    def ref(self, parts: list[Token]) -> Ref:
        span = _span(parts[0])
        return Ref(str(parts[0]), start=span.start, end=span.end)

    def text(self, parts: list[Token]) -> Text:
        span = _span(parts[0])
        return Text(str(parts[0])[1:-1], start=span.start, end=span.end)

    def chain(self, parts: Parts) -> Node:
        """Build a chain of binary operators with Python's precedence, left to right, by the shunting-yard algorithm."""
        operands, operators = [_node(parts[0])], list[object]()
        for sign, operand in zip(parts[1::2], parts[2::2], strict=True):
            level = _LEVELS[str(sign)]
            while operators and _LEVELS[str(operators[-1])] >= level:
                if level == _COMPARISON and _LEVELS[str(operators[-1])] == _COMPARISON:
                    hint = "write both: `a <= b, b < c` or `(a <= b) & (b < c)`"
                    raise SyntaxFault("chained-comparison", "a comparison after a comparison", _span(sign), hint)
                _reduce_top(operands, operators)
            operators.append(sign)
            operands.append(_node(operand))
        while operators:
            _reduce_top(operands, operators)
        return operands[0]

    def power(self, parts: Parts) -> Node:
        operands = [_node(parts[0]), _node(parts[2])]
        _reduce_top(operands, [parts[1]])
        return operands[0]

    def unary(self, parts: Parts) -> Node:
        sign, arg = parts
        start, node = _span(sign).start, _node(arg)
        if sign == "+":
            return node
        if sign == "-" and isinstance(node, Num):
            return Num(-node.value, start=start, end=node.end)
        return Unary(str(sign), node, start=start, end=node.end, depth=depth_above((node,), node))

    def parenthesis(self, parts: Parts) -> Node:
        """Extend the span of an operation over its brackets, but not that of a tensor or a name."""
        node = _node(parts[1])
        if isinstance(node, (Binary, Unary, When)):
            return replace(node, start=_span(parts[0]).start, end=_span(parts[2]).end)
        return node

    def group(self, parts: Parts) -> Group:
        """Build a group from ( expr , ... )."""
        rest = parts[3] if isinstance(parts[3], tuple) else ()
        return self._make_group((_node(parts[1]), *rest), parts)

    def group_list(self, parts: Parts) -> Group:
        """Build a group from [ value, ... ]."""
        items = parts[1] if isinstance(parts[1], tuple) else ()
        return self._make_group(items, parts)

    def _make_group(self, items: tuple[Node, ...], parts: Parts) -> Group:
        span = Span(_span(parts[0]).start, _span(parts[-1]).end)
        return Group(items, start=span.start, end=span.end, depth=depth_above(items, span))

    def indices(self, parts: Parts) -> tuple[Node, ...]:
        return tuple(_node(part) for part in parts if not isinstance(part, Token))

    values = indices

    def get(self, parts: Parts) -> Get:
        name, last = _span(parts[0]), _span(parts[-1])
        index = parts[2] if isinstance(parts[2], tuple) else ()
        span = Span(name.start, last.end)
        return Get(str(parts[0]), index, name.end, start=span.start, end=span.end, depth=depth_above(index, span))

    def arguments(self, parts: Parts) -> tuple[object, ...]:
        return tuple(part for part in parts if not isinstance(part, Token))

    def keyword(self, parts: Parts) -> Keyword:
        value = _node(parts[2])
        return Keyword(str(parts[0]), value, _span(parts[0]).start, value.end)

    def call(self, parts: Parts) -> Node:
        return function_call(_parse_call(parts, _span(parts[0]).start))

    def method(self, parts: Parts) -> Node:
        receiver = _node(parts[0])
        return method_call(receiver, _parse_call(parts[2:], receiver.start))

    def assign(self, parts: list[Token]) -> tuple[Assign, str, Span]:
        text = str(parts[0])
        span = _span(parts[0])
        if text in ("<", ">", "==", "!="):
            raise SyntaxFault("syntax-error", f"`{text}`: expected `=` or a reduction such as `+=!`", span)
        sign, _, mode = text.partition("=")
        if sign not in _COMBINES:
            raise SyntaxFault("unknown-reduction", f"`{text}` is not a reduction", span, "they are +=! *=! >=! <=! &=! |=!")
        if mode == ".":
            if sign not in _SCATTERS:
                raise SyntaxFault("unknown-reduction", f"`{text}` is not a scatter", span, "scatters are =. +=. *=. >=. <=.")
            return Assign.SCATTER, sign, span
        return (Assign.REDUCE if sign else Assign.PLAIN), sign, span

    def where(self, parts: Parts) -> list[WhereItem]:
        return [part for part in parts if isinstance(part, WhereItem)]

    def where_item(self, parts: Parts) -> WhereItem:
        span = _span(parts[0])
        return WhereItem(str(parts[0]), _node(parts[2]), span.start, span.end)

    def statement(self, parts: Parts) -> Statement:
        where = parts.pop() if isinstance(parts[-1], list) else []
        assert isinstance(where, list)  # what `where` made
        value = _node(parts.pop())
        assigned = parts.pop()
        assert isinstance(assigned, tuple)  # what `assign` made
        name, end = _span(parts[0]), len(parts) - 1
        type_ = None
        before = parts[end - 1]
        if isinstance(before, Token) and before.type == "COLON":
            type_ = _type_name(parts[end])
            end -= 2
        index = parts[2] if isinstance(parts[2], tuple) else ()
        stop = _span(parts[end]).end
        return Statement(str(parts[0]), index, type_, assigned[0], assigned[1], value, tuple(where), name.start, stop, name.end)


# Python's precedence, loosest first.
_COMPARISON = 0
_PRECEDENCE = (
    ("<", "<=", ">", ">=", "==", "!="),
    ("|",),
    ("^",),
    ("&",),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "//", "%"),
)
_LEVELS = {sign: level for level, signs in enumerate(_PRECEDENCE) for sign in signs}


def _reduce_top(operands: list[Node], operators: list[object]) -> None:
    """Replace the last two operands and the last operator by one node."""
    right, left, sign = operands.pop(), operands.pop(), operators.pop()
    if sign == "^":
        raise SyntaxFault("xor-operator", "`^` is not in the language", _span(sign), find_words("^"))
    span = Span(left.start, right.end)
    operands.append(Binary(str(sign), left, right, start=span.start, end=span.end, depth=depth_above((left, right), span)))


def _node(part: object) -> Node:
    """Return a part that the grammar guarantees to be a value, not a keyword argument."""
    assert isinstance(part, Node)
    return part


def _type_name(part: object) -> Text:
    name, span = str(part), _span(part)
    if dtype_named(name) is None:
        raise SyntaxFault("unknown-type", f"`{name}` is not a type", span, names.find_right_form(name, names.TYPE_NAMES))
    return Text(name, start=span.start, end=span.end)


def _number(text: str) -> int | float | None:
    """Return the value of a decimal literal; None for an integer too long for every type."""
    if text.endswith("f"):
        return float(text[:-1])
    if text.replace("_", "").isdigit():
        if len(text) > 1 and text[0] == "0" and text.strip("0_"):
            raise ValueError("leading zeros")
        return int(text) if len(text) <= 40 else None
    return float(text)


def _parse_call(parts: Parts, start: int) -> ParsedCall:
    """Parse the parts NAME LPAR [arguments] RPAR."""
    name = _span(parts[0])
    positional: list[Node] = []
    keywords: dict[str, Node] = {}
    arguments = parts[2] if isinstance(parts[2], tuple) else ()
    for argument in arguments:
        if isinstance(argument, Keyword):
            if argument.name in keywords:
                raise SyntaxFault("wrong-arguments", f"`{argument.name}` is given twice", argument)
            keywords[argument.name] = argument.value
        elif keywords:
            raise SyntaxFault("wrong-arguments", "an argument without a name after one with a name", argument)
        else:
            positional.append(argument)
    return ParsedCall(str(parts[0]), name.start, name.end, tuple(positional), keywords, start, _span(parts[-1]).end)
