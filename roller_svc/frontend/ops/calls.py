"""Expand operator calls, such as `Y = conv2d(X, W, stride=2)`, to statements of the language.

Calls are read from tokens: a name, names of tensors, literals. Nothing is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

from roller_svc.errors import ArgumentError, InputError
from roller_svc.frontend.lang import parse
from roller_svc.frontend.lang.equation import einsum_statement, output_name
from roller_svc.frontend.lang.grammar import parse_statement
from roller_svc.frontend.lang.limits import MAX_EXPANDED_STATEMENTS, MAX_STATEMENTS
from roller_svc.frontend.lang.names import did_you_mean, known_names
from roller_svc.frontend.lang.source import Source, Span, Spanned
from roller_svc.frontend.lang.tokens import ENDS_OPERAND, Tok, check_text, match_brackets, scan, statements
from roller_svc.frontend.ops import operator_named
from roller_svc.frontend.ops.operator import Operand
from roller_svc.ir.program import TensorProgram, TensorType

WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None}
NUMBER_CHARACTERS = 40
_CALL_HINT = 'a call of an operator is written `Y = conv2d(X, W, stride=2, padding="same")`'


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a call."""

    keyword: str | None  # None: positional
    value: object
    is_name: bool  # the value is a name without quotes
    span: Span


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One operator call in the text."""

    output: str | None  # None: the text is the call alone
    name: str
    name_span: Span
    arguments: tuple[Argument, ...]
    span: Span


def find_calls(tokens: Sequence[Tok], source: Source) -> list[OperatorCall]:
    """Return every statement `name = operator(...)`, or the single `operator(...)` that is the whole text."""
    calls: list[OperatorCall] = []
    depth = i = 0
    while i < len(tokens):
        named = _is_named_call(tokens, i, source) if depth == 0 else False
        if named or (i == 0 and _kinds(tokens, 0, 2) == ["NAME", "LPAR"]):
            reader = _Reader(tokens, i + 2 if named else i, source)
            calls.append(reader.call(tokens[i] if named else None))
            i = reader.at
            continue
        depth += {"LPAR": 1, "LSQB": 1, "RPAR": -1, "RSQB": -1}.get(tokens[i].kind, 0)
        i += 1
    return calls


def check_untyped(source: Source, inputs: Sequence[str]) -> None:
    """Check what needs no types: the syntax, operators' names, and that a text reads no tensor but inputs and results.

    Raises an InputError that points into the text.
    """
    check_text(source)
    tokens = scan(source)
    closing = match_brackets(tokens, source)
    calls = find_calls(tokens, source)
    for call in calls:
        if call.name != _EINSUM:
            with _located(source, call.name_span):
                operator_named(call.name)
    rest = source.text
    for call in calls:  # blanks, so that positions stay
        rest = f"{rest[: call.span.start]}{';':{call.span.end - call.span.start}}{rest[call.span.end :]}"
    if rest.strip("; \n") or not calls:
        for statement in statements(Source(rest), MAX_STATEMENTS):
            parse_statement(statement, source)
    read: list[Spanned] = []
    written = set(inputs)
    for i, (token, after) in enumerate(pairwise(tokens)):
        if token.kind == "NAME" and after.kind == "LSQB":
            end = closing[i + 1]
            is_target = end < len(tokens) - 1 and tokens[end + 1].kind in {"COLON", "EQUAL", "ASSIGN", "REDUCE", "CMP"}
            written |= {token.text} if is_target else set()
            read.append(token)
    for call in calls:
        written |= {call.output} if call.output is not None else set()
        read += [argument.span for argument in call.arguments if argument.keyword is None and argument.is_name]
    for span in sorted(read, key=lambda each: each.start):
        name = source.text[span.start : span.end]
        if name not in written:
            hint = f"the inputs are {', '.join(inputs)}"
            if guess := did_you_mean(name, inputs):
                hint = f"{guess} {hint}"
            raise source.error(ArgumentError, "unknown-name", f"there is no tensor `{name}`", span, hint)


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
    """Read one call, token by token."""

    def __init__(self, tokens: Sequence[Tok], at: int, source: Source) -> None:
        self.tokens, self.at, self.source = tokens, at, source

    @property
    def kind(self) -> str:
        return self.tokens[self.at].kind if self.at < len(self.tokens) else ""

    def take(self) -> Tok:
        token = self.tokens[self.at]
        self.at += 1
        return token

    def wrong(self, message: str, hint: str = _CALL_HINT) -> Exception:
        at: Spanned = self.tokens[min(self.at, len(self.tokens) - 1)]
        return self.source.syntax_error("bad-call", message, at, hint)

    def call(self, output: Tok | None) -> OperatorCall:
        name = self.take()
        self.take()  # its bracket
        arguments: list[Argument] = []
        while self.kind != "RPAR":
            arguments.append(self.argument())
            if self.kind == "COMMA":
                self.take()
            elif self.kind == "LPAR" and arguments[-1].is_name:
                inner = str(arguments[-1].value)
                raise self.wrong("calls of operators do not nest", f"write `T = {inner}(...); Y = {name.text}(T)`")
            elif self.kind == "LSQB" and arguments[-1].is_name:
                raise self.wrong("an operator takes whole tensors", f"write `{arguments[-1].value}` without an index")
            elif self.kind != "RPAR":
                raise self.wrong("expected `,` or `)`")
        end = self.take()
        self._check_end(end)
        first = name if output is None else output
        return OperatorCall(
            None if output is None else output.text,
            name.text,
            Span(name.start, name.end),
            tuple(arguments),
            Span(first.start, end.end),
        )

    def _check_end(self, end: Tok) -> None:
        """Check that the call is a whole statement, followed by `;` or a newline."""
        if self.kind in {"", "SEMI"}:
            return
        if self.kind != "NAME" or "\n" not in self.source.text[end.end : self.tokens[self.at].start]:
            raise self.wrong("expected `;` or newline after operator call")

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
        """Read [1, 2] or (1, 2). Lists do not nest."""
        closing = "RSQB" if self.take().kind == "LSQB" else "RPAR"
        values: list[object] = []
        while self.kind != closing:
            values.append(self.literal())
            if self.kind == "COMMA":
                self.take()
            elif self.kind != closing:
                raise self.wrong("expected `,` or the end of the list")
        self.take()
        return tuple(values)

    def literal(self) -> object:
        """Read a number, a quoted string, or a word."""
        sign = self.take().text if self.kind == "ADD" else ""
        if self.kind == "NUMBER":
            return self.number(sign)
        if sign or self.kind not in {"NAME", "STRING"}:
            raise self.wrong("expected a tensor's name, a number, a string, a list of these, true or false")
        token = self.take()
        return token.text[1:-1] if token.kind == "STRING" else WORDS.get(token.text, token.text)

    def number(self, sign: str) -> int | float:
        text = self.tokens[self.at].text
        if len(text) > NUMBER_CHARACTERS:
            raise self.wrong(f"a number of {len(text)} characters")
        self.take()
        value = int(text) if text.replace("_", "").isdigit() else float(text)
        return -value if sign == "-" else value


# Prefilter: most programs have no call, and are not tokenised. The tokens decide about the others. The pattern is
# linear, because a text may be long.
_MAY_HAVE_CALLS = re.compile(
    r"(?:\A(?:\s|\#[^\n]*\n)*|[;\n][ \t\r\f]*)[A-Za-z_]\w*\s*=\s*[A-Za-z_]\w*\s*\("
    r"|\A(?:\s|\#[^\n]*\n)*[A-Za-z_]\w*\s*\(",
    re.ASCII,
)
_EINSUM = "einsum"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the expanded text: an expanded call, or a copy."""

    new: Span  # in the expanded text
    old: Span  # in the given text
    is_call: bool


@dataclass(frozen=True, slots=True)
class Expansion:
    """The expanded text, with the origin of each part."""

    source: Source
    text: str
    pieces: tuple[Piece, ...] = ()
    has_other: bool = False  # a call has other statements for the same result
    own_names: frozenset[str] = frozenset()  # of tensors in the given text: those that expanded calls add have others

    @property
    def max_statements(self) -> int:
        """Statements that the expanded text may have."""
        return MAX_EXPANDED_STATEMENTS if any(piece.is_call for piece in self.pieces) else MAX_STATEMENTS

    def with_copy(self, start: int, end: int) -> Expansion:
        return self._with(self.source.text[start:end], Span(start, end), is_call=False)

    def with_call(self, statements: str, span: Span) -> Expansion:
        return self._with(statements, span, is_call=True)

    def _with(self, text: str, old: Span, *, is_call: bool) -> Expansion:
        new = Span(len(self.text), len(self.text) + len(text))
        return replace(self, text=self.text + text, pieces=(*self.pieces, Piece(new, old, is_call)))

    def locate(self, error: InputError) -> None:
        """Map an error's position from the expanded to the given text. Inside an expanded call it maps to the call."""
        if error.line is None or error.column is None or not any(piece.is_call for piece in self.pieces):
            return
        offset = sum(len(line) + 1 for line in self.text.split("\n")[: error.line - 1]) + error.column - 1
        piece = next((p for p in self.pieces if offset < p.new.end), self.pieces[-1])
        if piece.is_call:
            _locate_error(error, self.source, piece.old)
            return
        start = piece.old.start + offset - piece.new.start
        width = (error.end_column or error.column + 1) - error.column
        _locate_error(error, self.source, Span(start, start + width))


def expand(expression: str, inputs: Mapping[str, TensorType], *, others: bool = False) -> Expansion:
    """Expand every operator call. A text without calls, or a single einsum, is unchanged.

    Args:
        others: Expand the calls that have other statements for the same result to these.
    """
    source = Source(expression)
    unchanged = Expansion(source, expression)
    if not isinstance(expression, str) or _MAY_HAVE_CALLS.search(expression) is None:
        return unchanged
    check_text(source)
    tokens = scan(source)
    if _is_lone_einsum([token.text for token in tokens]):
        return unchanged
    calls = find_calls(tokens, source)
    if len(calls) > MAX_STATEMENTS:
        message = f"{len(calls)} calls; at most {MAX_STATEMENTS} statements are allowed"
        raise source.syntax_error("too-many-statements", message, calls[MAX_STATEMENTS].span)
    used_names = set(inputs)
    for token, after in pairwise(tokens):
        if token.kind == "NAME" and after.kind in {"LSQB", "EQUAL"}:
            used_names.add(token.text)
    results = frozenset(call.output or output_name(inputs) for call in calls)
    expansion, done, types = Expansion(source, "", own_names=results | used_names), 0, _TensorTypes(inputs, dict(inputs))
    for call in calls:
        expansion = expansion.with_copy(done, call.span.start)
        done = call.span.end
        with _located(source, call.span):
            statements, other = _statements(call, inputs, frozenset(used_names), types, expansion)
        if other is not None:
            statements, expansion = other if others else statements, replace(expansion, has_other=True)
        separated = expression[done:].lstrip()[:1] in ("", ";")
        expansion = expansion.with_call(statements if separated else f"{statements};", call.span)
    return expansion.with_copy(done, len(expression))


def _is_lone_einsum(words: list[str]) -> bool:
    """Whether the text is a single einsum call, which lang.parse takes."""
    start = 2 if words[1:2] == ["="] else 0
    if words[start : start + 2] != [_EINSUM, "("]:
        return False
    end = words.index(")") if ")" in words else len(words)
    return all(word == ";" for word in words[end + 1 :])


def _statements(
    call: OperatorCall,
    inputs: Mapping[str, TensorType],
    used_names: frozenset[str],
    types: _TensorTypes,
    before: Expansion,
) -> tuple[str, str | None]:
    """Expand one call, to all its statements. Its operands are inputs or tensors that the text before it writes."""
    output = call.output or output_name(inputs)
    if call.name == _EINSUM:
        return _einsum(call, _operands(call, call.arguments[1:], inputs, types, before), output, used_names), None
    with _located(before.source, call.name_span):
        operator = operator_named(call.name)
    operands = _operands(call, call.arguments, inputs, types, before)
    parameters = {}
    for argument in call.arguments:
        if argument.keyword is None:
            continue
        with _located(before.source, argument.span):
            if argument.keyword in parameters:
                raise ArgumentError(f"`{argument.keyword}` is given twice", code="invalid-parameter")
            parameters[argument.keyword] = operator.parameter(argument.keyword).check(argument.value)
    checked = (operands, output, parameters, used_names)
    return operator.source(*checked), operator.other_source(*checked)


def _einsum(call: OperatorCall, operands: list[Operand], output: str, used_names: frozenset[str]) -> str:
    """Expand an einsum among other statements."""
    equation = call.arguments[0].value if call.arguments else None
    if not isinstance(equation, str) or call.arguments[0].is_name or any(a.keyword for a in call.arguments):
        raise ArgumentError('an einsum is written `Y = einsum("mk,kn->mn", A, B)`', code="bad-einsum")
    try:
        return einsum_statement(equation, [(o.name, o.type) for o in operands], output, used_names | {output})
    except InputError as error:
        error.line = None  # it points into the equation, not the text
        raise


def _operands(
    call: OperatorCall,
    arguments: tuple[Argument, ...],
    inputs: Mapping[str, TensorType],
    types: _TensorTypes,
    before: Expansion,
) -> list[Operand]:
    """Return the positional tensors; without any, the inputs in order."""
    positional = [argument for argument in arguments if argument.keyword is None]
    if not positional:
        return [Operand(name, kind) for name, kind in inputs.items()]
    operands = []
    for argument in positional:
        with _located(before.source, argument.span):
            if not argument.is_name:
                message = f"operands of {call.name} are names of tensors; parameters are given by name"
                raise ArgumentError(message, code="bad-call")
            name = str(argument.value)
            if name not in types.types:
                types.read(before)
            if name not in types.types:
                hint = known_names(name, types.types, "tensors")
                raise ArgumentError(f"there is no tensor `{name}`", code="unknown-name", hint=hint)
            operands.append(Operand(name, types.types[name]))
    return operands


@dataclass(slots=True)
class _TensorTypes:
    """Types of the tensors so far, extended incrementally so that each part of the text is parsed once."""

    inputs: Mapping[str, TensorType]
    types: dict[str, TensorType]
    read_to: int = 0

    def read(self, before: Expansion) -> None:
        """Add the tensors that the text before a call writes."""
        part = before.text[self.read_to :]
        self.read_to = len(before.text)
        if not part.strip(" \t\r\n;"):
            return
        try:
            program = parse(part, self.types)
        except InputError:
            program = self._parse_all(before)
        self.types |= {statement.name: statement.type for statement in program.statements}

    def _parse_all(self, before: Expansion) -> TensorProgram:
        """Parse the whole text so far. Errors point into the given text."""
        try:
            return parse(before.text, self.inputs)
        except InputError as error:
            before.locate(error)
            raise


@contextmanager
def _located(source: Source, span: Span) -> Iterator[None]:
    """Give errors without a position this one."""
    try:
        yield
    except InputError as error:
        if error.line is None:
            _locate_error(error, source, span)
        raise


def _locate_error(error: InputError, source: Source, span: Span) -> None:
    placed = source.error(InputError, error.code, error.message, span)
    error.line, error.column, error.end_column, error.text = placed.line, placed.column, placed.end_column, source.text
