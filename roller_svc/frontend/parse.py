"""Expression text in any supported form → TensorProgram. Operator calls are expanded here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roller_svc.errors import InputError
from roller_svc.frontend import lang
from roller_svc.frontend.ops.calls import expand
from roller_svc.ir.program import TensorProgram, TensorType


def parse(expression: str, inputs: Mapping[str, TensorType], outputs: Sequence[str] | None = None) -> TensorProgram:
    """Parse and check a program of statements, an einsum, operator calls, or a mix of these.

    Raises an InputError that points into the given text.
    """
    expansion = expand(expression, inputs)
    try:
        return lang.parse(expansion.text, inputs, outputs)
    except InputError as error:
        expansion.locate(error)
        raise
