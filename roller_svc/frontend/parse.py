"""Expression text in any supported form → TensorProgram. Operator calls are expanded here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roller_svc.errors import InputError
from roller_svc.frontend import lang
from roller_svc.frontend.forms import align_form
from roller_svc.frontend.lang.names import FUNCTIONS
from roller_svc.frontend.lang.synonyms import find_name, find_words
from roller_svc.frontend.ops import OPS
from roller_svc.frontend.ops.calls import Expansion, expand
from roller_svc.ir.program import Forms, TensorProgram, TensorType


def parse(expression: str, inputs: Mapping[str, TensorType], outputs: Sequence[str] | None = None) -> TensorProgram:
    """Parse and check a program of statements, an einsum, operator calls, or a mix of these.

    Raises an InputError that points into the given text.
    """
    return _parse(expand(expression, inputs), inputs, outputs)


def parse_forms(expression: str, inputs: Mapping[str, TensorType], outputs: Sequence[str] | None = None) -> Forms:
    """Parse and check a program, and the other form of it in which operators have other statements.

    There is no other form where a result is an intermediate of an operator: it may have another value, or be missing.
    Raises an InputError that points into the given text.
    """
    expansion = expand(expression, inputs)
    first = _parse(expansion, inputs, outputs)
    if not expansion.has_other or any(output.name not in expansion.own_names for output in first.outputs):
        return (first,)
    return first, align_form(_parse(expand(expression, inputs, others=True), inputs, outputs), first, expansion.own_names)


def _parse(expansion: Expansion, inputs: Mapping[str, TensorType], outputs: Sequence[str] | None) -> TensorProgram:
    try:
        return lang.parse(expansion.text, inputs, outputs, expansion.max_statements)
    except InputError as error:
        expansion.locate(error)
        if error.code == "unknown-function":
            _explain_operator(error, expansion.source.text)
        raise


def _explain_operator(error: InputError, text: str) -> None:
    """Say where an operator may stand, if the function that an error is about is the name of one."""
    line = text.split("\n")[(error.line or 1) - 1]
    name = line[(error.column or 1) - 1 : (error.end_column or 1) - 1]
    operator = None if find_words(name) or find_name(name, FUNCTIONS) else find_name(name, OPS)
    if operator is not None:
        error.hint = f"an operator is a statement of its own: `Y = {operator}(X)`"
