"""The recogniser of packed weights: which expressions it knows, and that its callers draw the same conclusions."""

from __future__ import annotations

import pytest
from schedule_support import program

from roller_svc import hardware
from roller_svc.analysis.packed_operands import unpacking_of
from roller_svc.analysis.packed_sums import packed_sum
from roller_svc.analysis.packed_values import PackedValue, Packing, packed_integer, packed_value
from roller_svc.compiler.plans import rank_best_partition
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr
from roller_svc.ir.program import TensorExpr

HOPPER = hardware.load("nvidia-h200-sxm")
FIELD = "(Q[n, k // 8] >> (k % 8 * 4)).call(`bitwise_and`, [15])"
INPUTS = {
    "Q": "int32 64 32", "B": "int8 64 256", "U": "uint8 64 256", "F": "float8_e4m3fn 64 256", "T": "float16 16",
    "Z": "int8 64", "X": "int32 64",
}  # fmt: skip


def body_of(value: str) -> Expr:
    """Return the body of a map over n and k that has one value."""
    used = {name: shape for name, shape in INPUTS.items() if f"{name}[" in value}
    (statement,) = program(f"W[n, k] = {value} where n in 64, k in 256", **used).statements
    assert isinstance(statement, TensorExpr)
    return statement.body


def value_of(value: str) -> PackedValue | None:
    body = body_of(value)
    find = packed_value if body.dtype.is_float else packed_integer
    return find(body, lambda _: True)


@pytest.mark.parametrize(
    ("text", "packing", "bits", "bounds", "zeros"),
    [
        (f"{FIELD}.cast(`float16`)", Packing.FIELD, 4, (0, 15), 0),
        (f"({FIELD} - 8).cast(`float16`)", Packing.FIELD, 4, (-8, 7), 1),
        (f"(8 + {FIELD}).cast(`float16`)", Packing.FIELD, 4, (8, 23), 1),
        (f"({FIELD}.cast(`int8`) - 8).cast(`float16`)", Packing.FIELD, 4, (-8, 7), 1),
        (f"({FIELD} - Z[n].cast(`int32`) - 1).cast(`float16`)", Packing.FIELD, 4, (-128, 142), 2),
        ("B[n, k].cast(`float16`)", Packing.BYTE, 8, (-128, 127), 0),
        ("U[n, k].cast(`float32`)", Packing.BYTE, 8, (0, 255), 0),
        ("F[n, k].cast(`float16`)", Packing.FLOAT8, 8, None, 0),
        (f"T[{FIELD}]", Packing.LOOKUP, 4, None, 0),
        (f"T[{FIELD}.cast(`int8`)].cast(`float32`)", Packing.LOOKUP, 4, None, 0),
    ],
)
def test_packed_values_are_recognised(text: str, packing: Packing, bits: int, bounds: tuple[int, int] | None, zeros: int) -> None:
    value = value_of(text)
    assert value is not None
    assert (value.packing, value.bits, value.bounds, len(value.zeros)) == (packing, bits, bounds, zeros)
    assert (value.shift is not None) == (packing in (Packing.FIELD, Packing.LOOKUP))
    assert (value.table is not None) == (packing is Packing.LOOKUP)


@pytest.mark.parametrize(
    "text",
    [
        f"({FIELD} * 2).cast(`float16`)",
        "(Q[n, k // 8] >> (k % 8 * 4)).call(`bitwise_and`, [14]).cast(`float16`)",
        "(Q[n, k // 8] >> (k % 8 * 3)).call(`bitwise_and`, [7]).cast(`float16`)",
        "X[n].cast(`float16`)",
        f"T[{FIELD}].cast(`bfloat16`)",
        "B[n, k].cast(`float16`) * 2.0",
    ],
)
def test_other_values_are_not(text: str) -> None:
    assert value_of(text) is None


@pytest.mark.parametrize("text", [f"({FIELD} - X[n])", f"({FIELD} + B[n, k]).cast(`int8`)"])
def test_integers_that_may_wrap_or_have_no_known_range_are_not_exact(text: str) -> None:
    value = value_of(f"{text}.cast(`float16`)")
    assert value is None or not value.is_exact_in(DType.FLOAT16)


@pytest.mark.parametrize(
    ("value", "is_packed"),
    [
        (f"({FIELD} - 8).cast(`float16`)", True),
        (f"({FIELD} + 3000).cast(`float16`)", False),
        (f"({FIELD} - X[n]).cast(`float16`)", False),
        (f"T[{FIELD}]", True),
    ],
)
def test_operands_and_sums_agree_which_values_are_unpacked_in_pairs(value: str, is_packed: bool) -> None:
    """An operand that no pair holds is unpacked element by element, which takes more instructions."""
    used = {name: shape for name, shape in INPUTS.items() if f"{name}[" in value}
    text = f"W[n, k] = {value} where n in 64, k in 256; y[m, n] +=! x[m, k] * W[n, k]"
    groups, _, _ = rank_best_partition(program(text, ["y"], x="float16 1 256", **used), HOPPER, 1)
    operand = unpacking_of(body_of(value), DType.FLOAT16)
    assert operand is not None
    assert (operand.slots < 3.0) == is_packed
    assert (packed_sum(groups[-1].statements[0], "k", 32) is not None) == is_packed
