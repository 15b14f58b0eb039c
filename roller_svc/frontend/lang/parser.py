"""Expression text and input types → TensorProgram: the language's front door."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roller_svc.errors import ArgumentError
from roller_svc.frontend.lang import equation
from roller_svc.frontend.lang.checker import check_program, checked_inputs
from roller_svc.frontend.lang.grammar import parse_statement
from roller_svc.frontend.lang.source import Source
from roller_svc.frontend.lang.tokens import check_text, statements
from roller_svc.ir.program import TensorProgram, TensorType


def parse(expression: str, inputs: Mapping[str, TensorType], outputs: Sequence[str] | None = None) -> TensorProgram:
    """The checked program of a text; raises an InputError that points at what is wrong.

    `outputs` replaces the names that are written and never read.
    """
    if not isinstance(expression, str):
        raise ArgumentError("the expression is a text", code="invalid-argument")
    checked_inputs(inputs)
    source = Source(expression)
    check_text(source)
    if equation.is_einsum(expression):
        source = Source(equation.expression_of(source, inputs))
    trees = [parse_statement(tokens, source) for tokens in statements(source)]
    return check_program(trees, source, inputs, outputs)
