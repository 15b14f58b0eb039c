"""Text with calls of operators, `Y = conv2d(X, W, stride=2)` → the same text in statements of the language."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from roller_svc.errors import ArgumentError, InputError
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.lang import parse
from roller_svc.lang.equation import einsum_statement
from roller_svc.lang.limits import MAX_STATEMENTS
from roller_svc.lang.names import known_names
from roller_svc.lang.source import Source, Span
from roller_svc.lang.tokens import check_text, scan
from roller_svc.ops import operator_named, output_name
from roller_svc.ops.call_syntax import Argument, WrittenCall, written_calls
from roller_svc.ops.operator import Operand

# Most programs have no call, which this tells before a token is read. What it lets through, the tokens decide.
# No part of it runs over the same characters twice: a posted text may be long.
_MAY_HAVE_CALLS = re.compile(
    r"(?:\A(?:\s|\#[^\n]*\n)*|[;\n][ \t\r\f]*)[A-Za-z_]\w*\s*=\s*[A-Za-z_]\w*\s*\("
    r"|\A(?:\s|\#[^\n]*\n)*[A-Za-z_]\w*\s*\(",
    re.ASCII,
)
_EINSUM = "einsum"


@dataclass(frozen=True, slots=True)
class Piece:
    """`new` of the text that came out stands for `old` of the posted one: a call, or a copy."""

    new: Span
    old: Span
    is_call: bool


@dataclass(frozen=True, slots=True)
class Expansion:
    """The text in statements, and where each part of it comes from."""

    source: Source
    text: str
    pieces: tuple[Piece, ...] = ()

    def with_copy(self, start: int, end: int) -> Expansion:
        return self._with(self.source.text[start:end], Span(start, end), is_call=False)

    def with_call(self, statements: str, span: Span) -> Expansion:
        return self._with(statements, span, is_call=True)

    def _with(self, text: str, old: Span, *, is_call: bool) -> Expansion:
        new = Span(len(self.text), len(self.text) + len(text))
        return Expansion(self.source, self.text + text, (*self.pieces, Piece(new, old, is_call)))

    def locate(self, error: InputError) -> None:
        """Move an error from the text that came out to the posted one; inside of what a call became, to the call."""
        if error.line is None or error.column is None or not any(piece.is_call for piece in self.pieces):
            return
        offset = sum(len(line) + 1 for line in self.text.split("\n")[: error.line - 1]) + error.column - 1
        piece = next((p for p in self.pieces if offset < p.new.end), self.pieces[-1])
        if piece.is_call:
            _place(error, self.source, piece.old)
            return
        start = piece.old.start + offset - piece.new.start
        width = (error.end_column or error.column + 1) - error.column
        _place(error, self.source, Span(start, start + width))


def expand(expression: str, inputs: Mapping[str, TensorType]) -> Expansion:
    """Every call of an operator written out. A text without one, also one that is a lone einsum, stays as it is."""
    source = Source(expression)
    unchanged = Expansion(source, expression)
    if not isinstance(expression, str) or _MAY_HAVE_CALLS.search(expression) is None:
        return unchanged
    check_text(source)
    tokens = scan(source)
    if _is_lone_einsum([token.text for token in tokens]):
        return unchanged
    calls = written_calls(tokens, source)
    if len(calls) > MAX_STATEMENTS:
        message = f"{len(calls)} calls; at most {MAX_STATEMENTS} statements are allowed"
        raise source.syntax_error("too-many-statements", message, calls[MAX_STATEMENTS].span)
    taken = set(inputs)
    for token, after in pairwise(tokens):
        if token.kind == "NAME" and after.kind in {"LSQB", "EQUAL"}:
            taken.add(token.text)
    expansion, done, known = Expansion(source, ""), 0, _Known(inputs, dict(inputs))
    for call in calls:
        expansion = expansion.with_copy(done, call.span.start)
        done = call.span.end
        with _placed(source, call.span):
            statements = _statements(call, inputs, frozenset(taken), known, expansion)
        separated = expression[done:].lstrip()[:1] in ("", ";")
        expansion = expansion.with_call(statements if separated else f"{statements};", call.span)
    return expansion.with_copy(done, len(expression))


def _is_lone_einsum(words: list[str]) -> bool:
    """Whether lang's own front door takes the text: an einsum call, with nothing behind its closing bracket."""
    start = 2 if words[1:2] == ["="] else 0
    if words[start : start + 2] != [_EINSUM, "("]:
        return False
    end = words.index(")") if ")" in words else len(words)
    return all(word == ";" for word in words[end + 1 :])


def _statements(
    call: WrittenCall, inputs: Mapping[str, TensorType], taken: frozenset[str], known: _Known, before: Expansion
) -> str:
    """One call written out; its operands are inputs, or what the text before it writes."""
    output = call.output or output_name(inputs)
    if call.name == _EINSUM:
        return _einsum(call, _operands(call, call.arguments[1:], inputs, known, before), output, taken)
    with _placed(before.source, call.name_span):
        operator = operator_named(call.name)
    operands = _operands(call, call.arguments, inputs, known, before)
    given = {}
    for argument in call.arguments:
        if argument.keyword is None:
            continue
        with _placed(before.source, argument.span):
            if argument.keyword in given:
                raise ArgumentError(f"`{argument.keyword}` is given twice", code="invalid-parameter")
            given[argument.keyword] = operator.parameter(argument.keyword).checked(argument.value)
    return operator.text(operands, output, given, taken)


def _einsum(call: WrittenCall, operands: list[Operand], output: str, taken: frozenset[str]) -> str:
    """An einsum among other statements."""
    equation = call.arguments[0].value if call.arguments else None
    if not isinstance(equation, str) or call.arguments[0].is_name or any(a.keyword for a in call.arguments):
        raise ArgumentError('an einsum is written `Y = einsum("mk,kn->mn", A, B)`', code="bad-einsum")
    try:
        return einsum_statement(equation, [(o.name, o.type) for o in operands], output, taken | {output})
    except InputError as error:
        error.line = None  # it points into the equation alone
        raise


def _operands(
    call: WrittenCall,
    arguments: tuple[Argument, ...],
    inputs: Mapping[str, TensorType],
    known: _Known,
    before: Expansion,
) -> list[Operand]:
    """The tensors that stand by position; without any, the inputs in order."""
    positional = [argument for argument in arguments if argument.keyword is None]
    if not positional:
        return [Operand(name, kind) for name, kind in inputs.items()]
    operands = []
    for argument in positional:
        with _placed(before.source, argument.span):
            if not argument.is_name:
                message = f"operands of {call.name} are names of tensors; parameters are given by name"
                raise ArgumentError(message, code="bad-call")
            name = str(argument.value)
            if name not in known.types:
                known.read(before)
            if name not in known.types:
                hint = known_names(name, known.types, "tensors")
                raise ArgumentError(f"there is no tensor `{name}`", code="unknown-name", hint=hint)
            operands.append(Operand(name, known.types[name]))
    return operands


@dataclass(slots=True)
class _Known:
    """Types of the tensors so far. It grows, so that each part of the text is parsed once."""

    inputs: Mapping[str, TensorType]
    types: dict[str, TensorType]
    read_to: int = 0

    def read(self, before: Expansion) -> None:
        """Take in what the text before a call writes."""
        part = before.text[self.read_to :]
        self.read_to = len(before.text)
        if not part.strip(" \t\r\n;"):
            return
        try:
            program = parse(part, self.types)
        except InputError:
            program = self._whole(before)
        self.types |= {statement.name: statement.type for statement in program.statements}

    def _whole(self, before: Expansion) -> TensorProgram:
        """All of the text so far: its error says what is wrong in the posted one's words and places."""
        try:
            return parse(before.text, self.inputs)
        except InputError as error:
            before.locate(error)
            raise


@contextmanager
def _placed(source: Source, span: Span) -> Iterator[None]:
    """Errors from inside that have no place yet get this one."""
    try:
        yield
    except InputError as error:
        if error.line is None:
            _place(error, source, span)
        raise


def _place(error: InputError, source: Source, span: Span) -> None:
    placed = source.error(InputError, error.code, error.message, span)
    error.line, error.column, error.end_column = placed.line, placed.column, placed.end_column
