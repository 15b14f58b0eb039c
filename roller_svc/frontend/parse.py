"""Text in any form that a caller may post → TensorProgram. The one place where calls of operators are written out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roller_svc.errors import InputError
from roller_svc.frontend import lang
from roller_svc.frontend.ops.calls import expand
from roller_svc.ir.program import TensorProgram, TensorType


def parse(expression: str, inputs: Mapping[str, TensorType], outputs: Sequence[str] | None = None) -> TensorProgram:
    """The checked program of statements, of an einsum, of calls of operators, or of all of these together.

    Raises an InputError that points into the text as it was posted.
    """
    expansion = expand(expression, inputs)
    try:
        return lang.parse(expansion.text, inputs, outputs)
    except InputError as error:
        expansion.locate(error)
        raise
