"""Programs that numpy computes in one call."""

import pytest

from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType
from roller_svc.verify.run_and_verify import Einsum, einsum_equation

A, B = TensorType(DType.FLOAT32, (4, 6)), TensorType(DType.FLOAT32, (6, 5))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("C[m, n] +=! A[m, k] * B[k, n]", Einsum("ab,bc->ac", ("A", "B"))),
        ("C[n] +=! B[k, n]", Einsum("ab->b", ("B",))),
        ("C[m, n] >=! A[m, k] * B[k, n]", None),  # no sum
        ("C[m, n] +=! A[m, k + 1] * B[k, n] where k in 5", None),  # no plain axis
        ("C[m, n] +=! A[m, k] * B[k, n] where k in 3", None),  # a part of the operands
        ("C[m, n] +=! A[m, k] where n in 5", None),  # an axis of no operand
    ],
)
def test_a_sum_of_products_over_plain_axes_is_an_einsum(text: str, expected: Einsum | None) -> None:
    assert einsum_equation(parse(text, {"A": A, "B": B})) == expected
