"""einsum equation → expression text, by numpy's rules."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roller_svc.errors import ArgumentError, ExprSyntaxError, InputError, ShapeError
from roller_svc.frontend.lang.source import Source, Span
from roller_svc.ir.program import TensorType

_CALL = re.compile(
    r"""\s*(?:(?P<output>[A-Za-z_]\w*)\s*=\s*)?einsum\s*\(\s*
    (?P<quote>["'`])(?P<equation>[^"'`\n]*)(?P=quote)\s*
    (?P<operands>(?:,\s*[A-Za-z_]\w*\s*)*),?\s*\)\s*;?\s*""",
    re.VERBOSE | re.ASCII,
)
_LOOKS_LIKE = re.compile(r"\s*(?:[A-Za-z_]\w*\s*=\s*)?einsum\s*\(", re.ASCII)
_EQUATION = re.compile(r"[A-Za-z.,\s]*->[A-Za-z.\s]*", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def is_einsum(expression: str) -> bool:
    """Whether the text is an einsum call, not statements."""
    return _LOOKS_LIKE.match(expression) is not None


def is_equation(expression: str) -> bool:
    """Whether the text is an equation without its call, as in mk,kn->mn."""
    return _EQUATION.fullmatch(expression) is not None


def statement_of_call(source: Source, inputs: Mapping[str, TensorType]) -> str:
    """Return the statement of an einsum call. Without operands it uses the inputs in order."""
    match = _CALL.fullmatch(source.text)
    if match is None:
        span = Span(0, len(source.text))
        raise source.syntax_error("bad-einsum", 'an einsum is written `einsum("mk,kn->mn")`', span)
    named = _NAME.findall(match["operands"])
    for name in named:
        if name not in inputs:
            span = Span(match.start("operands"), match.end("operands"))
            raise source.error(ExprSyntaxError, "unknown-name", f"there is no tensor `{name}`", span)
    operands = [(name, inputs[name]) for name in named or inputs]
    try:
        return _statement(match["equation"], operands, match["output"] or output_name(inputs), frozenset(inputs))
    except _EquationError as wrong:
        start = match.start("equation") + wrong.span.start
        span = Span(start, max(start + 1, match.start("equation") + wrong.span.end))
        raise source.error(wrong.kind, wrong.code, str(wrong), span) from None


def einsum(equation: str, inputs: Mapping[str, TensorType]) -> str:
    """Return the text of an einsum over the inputs in order, with output `output0` or the next free number."""
    return einsum_statement(equation, list(inputs.items()), output_name(inputs), frozenset(inputs))


def einsum_statement(equation: str, operands: Sequence[tuple[str, TensorType]], output: str, tensors: frozenset[str]) -> str:
    """Return the statement of an einsum over these operands. Names of axes avoid `tensors`."""
    try:
        return _statement(equation, operands, output, tensors)
    except _EquationError as wrong:
        raise Source(equation).error(wrong.kind, wrong.code, str(wrong), wrong.span) from None


class _EquationError(Exception):
    """An error at a span of the equation."""

    def __init__(self, kind: type[InputError], code: str, message: str, at: Span) -> None:
        super().__init__(message)
        self.kind, self.code, self.span = kind, code, at


@dataclass(frozen=True, slots=True)
class _Term:
    """One operand's labels before and after its ellipsis; `after` is None without an ellipsis."""

    before: str
    after: str | None
    span: Span

    @property
    def labels(self) -> str:
        return self.before + (self.after or "")


def output_name(inputs: Mapping[str, TensorType]) -> str:
    """Return the default name of an output: output0, or the next number that no input has."""
    number = 0
    while f"output{number}" in inputs:
        number += 1
    return f"output{number}"


def _statement(equation: str, operands: Sequence[tuple[str, TensorType]], output: str, tensors: frozenset[str]) -> str:
    terms, result = _terms(equation)
    if len(terms) != len(operands):
        message = f"{len(terms)} operands in the equation, {len(operands)} tensors"
        raise _EquationError(ArgumentError, "bad-einsum", message, Span(0, len(equation)))
    operand_axes = [_axes(term, name, type_) for term, (name, type_) in zip(terms, operands, strict=True)]
    extents = _extents(operand_axes, terms)
    dots = max((len([a for a in axes if a[0].isdigit()]) for axes, _ in operand_axes), default=0)
    out = _output_axes(result, terms, dots, equation)
    reads: list[str] = []
    names = _axis_names(extents, tensors | {output})
    for (name, _), (axes, shape) in zip(operands, operand_axes, strict=True):
        index = ["0" if size == 1 and extents[axis] != 1 else names[axis] for axis, size in zip(axes, shape, strict=True)]
        reads.append(f"{name}[{', '.join(index)}]")
    sign = "=" if set(extents) <= set(out) else "+=!"
    return f"{output}[{', '.join(names[axis] for axis in out)}] {sign} {' * '.join(reads)}"


def _terms(equation: str) -> tuple[list[_Term], _Term | None]:
    """Parse the operands' labels, and the result's if given."""
    left, arrow, right = equation.partition("->")
    terms: list[_Term] = []
    offset = 0
    for part in left.split(","):
        terms.append(_term(part, offset))
        offset += len(part) + 1
    result = _term(right, len(left) + 2) if arrow else None
    if result is not None:
        for i, label in enumerate(result.labels):
            if label in result.labels[:i]:
                raise _EquationError(ExprSyntaxError, "duplicate-axis", f"`{label}` is twice in the result", result.span)
            if not any(label in term.labels for term in terms):
                message = f"`{label}` of the result is in no operand"
                raise _EquationError(ExprSyntaxError, "free-axis", message, result.span)
    return terms, result


def _term(part: str, offset: int) -> _Term:
    text = part.replace(" ", "").replace("\t", "")
    before, dots, after = text.partition("...")
    span = Span(offset, offset + len(part))
    for char in before + after:
        if not (char.isascii() and char.isalpha()):
            raise _EquationError(ExprSyntaxError, "bad-einsum", f"`{char}` is not a label; labels are letters", span)
    return _Term(before, after if dots else None, span)


def _axes(term: _Term, name: str, type_: TensorType) -> tuple[list[str], tuple[int, ...]]:
    """Return one axis per dimension. Ellipsis dimensions are numbered from the last, so that shorter ones broadcast."""
    shape = type_.shape
    hidden = len(shape) - len(term.labels)
    if hidden < 0 or (term.after is None and hidden):
        message = f"`{name}` has {len(shape)} dimensions, its term {len(term.labels)} labels"
        raise _EquationError(ShapeError, "wrong-rank", message, term.span)
    dots = [str(hidden - 1 - i) for i in range(hidden)]
    return [*term.before, *dots, *(term.after or "")], shape


def _extents(operand_axes: Sequence[tuple[list[str], tuple[int, ...]]], terms: Sequence[_Term]) -> dict[str, int]:
    """Return the extent of each axis. Sizes of 1 broadcast."""
    extents: dict[str, int] = {}
    for (axes, shape), term in zip(operand_axes, terms, strict=True):
        for axis, size in zip(axes, shape, strict=True):
            extent = extents.setdefault(axis, size)
            if extent == 1:
                extents[axis] = size
            elif size not in (1, extent):
                shown = "a dimension of the ellipsis" if axis.isdigit() else f"`{axis}`"
                message = f"{shown} has extent {extent} and {size}"
                raise _EquationError(ShapeError, "extent-conflict", message, term.span)
    return extents


def _output_axes(result: _Term | None, terms: Sequence[_Term], dots: int, equation: str) -> list[str]:
    ellipsis = [str(dots - 1 - i) for i in range(dots)]
    if result is None:
        labels = "".join(term.labels for term in terms)
        once = sorted(label for label in set(labels) if labels.count(label) == 1)
        return [*ellipsis, *once]
    if dots and result.after is None:
        message = "the operands have dimensions in `...`, the result has no `...`"
        raise _EquationError(ExprSyntaxError, "bad-einsum", message, result.span)
    if result.after is None:
        return [*result.before]
    if not any(term.after is not None for term in terms):
        raise _EquationError(ExprSyntaxError, "bad-einsum", "`...` in the result, but in no operand", Span(0, len(equation)))
    return [*result.before, *ellipsis, *result.after]


def _axis_names(extents: Mapping[str, int], used_names: frozenset[str]) -> dict[str, str]:
    """Return a name for each label that is not a tensor's name: the label itself if possible."""
    names: dict[str, str] = {}
    for axis in extents:
        name = f"e{axis}" if axis.isdigit() else axis
        while name in used_names or name in names.values():
            name += "_"
        names[axis] = name
    return names
