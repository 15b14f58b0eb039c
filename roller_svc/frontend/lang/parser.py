"""Parser entry point: expression text and input types → TensorProgram."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roller_svc.errors import ArgumentError
from roller_svc.frontend.lang import equation
from roller_svc.frontend.lang.checker import check_inputs, check_program
from roller_svc.frontend.lang.grammar import parse_statement
from roller_svc.frontend.lang.limits import MAX_STATEMENTS
from roller_svc.frontend.lang.source import Source
from roller_svc.frontend.lang.tokens import check_text, statements
from roller_svc.ir.program import TensorProgram, TensorType


def parse(
    expression: str,
    inputs: Mapping[str, TensorType],
    outputs: Sequence[str] | None = None,
    max_statements: int = MAX_STATEMENTS,
) -> TensorProgram:
    """Parse and check a program. Raises an InputError that points into the text.

    `outputs` replaces the default: tensors that are written and never read.
    """
    if not isinstance(expression, str):
        raise ArgumentError("the expression must be a string", code="invalid-argument")
    check_inputs(inputs)
    source = Source(expression)
    check_text(source)
    if equation.is_einsum(expression):
        source = Source(equation.statement_of_call(source, inputs))
    trees = [parse_statement(tokens, source) for tokens in statements(source, max_statements)]
    return check_program(trees, source, inputs, outputs)
