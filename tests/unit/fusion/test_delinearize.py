"""Delinearization of reduced axes: split where their divisors divide each other, unchanged elsewhere."""

from __future__ import annotations

import pytest

from roller_svc.frontend.parse import parse
from roller_svc.fusion.delinearize import delinearize_reduced_axes
from roller_svc.ir.affine import affine
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorExpr, TensorType


def _statement(text: str, columns: int) -> TensorExpr:
    types = {"x": TensorType(DType.FLOAT32, (64, 64)), "w": TensorType(DType.FLOAT32, (8, columns))}
    return parse(text, types, ("y",)).statements[0]


@pytest.mark.parametrize(
    ("index", "extents"),
    [
        ("k // 9, o + k % 9 // 3 + k % 9 % 3", (4, 3, 3)),
        ("k // 9, o + k % 3", (4, 3, 3)),
        ("k % 6, o + k // 6", (6, 6)),
        ("k // 3 // 4, o + k // 3 % 4", (3, 4, 3)),
    ],
)
def test_quotients_and_remainders_become_axes(index: str, extents: tuple[int, ...]) -> None:
    found = delinearize_reduced_axes(_statement(f"y[f, o] +=! x[{index}] * w[f, k] where o in 20", 36))
    assert tuple(a.extent for a in found.reduced) == extents
    assert all(affine(i) is not None for load in found.reads for i in load.index)


def test_rows_of_words_stay_for_vectors_along_them() -> None:
    types = {"x": TensorType(DType.FLOAT32, (64,)), "q": TensorType(DType.INT32, (8, 64))}
    text = "y[n] +=! x[k] * (q[{word}] >> k % 8 * 4).call(`bitwise_and`, [15]).cast(`float32`) where k in 64"
    along, across = (parse(text.format(word=word), types).statements[0] for word in ("n, k // 8", "k // 8, n"))
    assert delinearize_reduced_axes(along) is along
    assert [a.extent for a in delinearize_reduced_axes(across).reduced] == [8, 8]


@pytest.mark.parametrize(
    ("index", "columns"),
    [("k // 9, o + k % 9", 37), ("k // 4, o + k % 6", 36), ("(k + 1) // 9, o + k % 9", 36)],
    ids=["rest", "coprime", "shifted"],
)
def test_other_axes_stay(index: str, columns: int) -> None:
    statement = _statement(f"y[f, o] +=! x[{index}] * w[f, k] where o in 20", columns)
    assert delinearize_reduced_axes(statement) is statement


@pytest.mark.parametrize(
    "text",
    ["y[t, f] = w[f, t // 9] * y[t - 1, f].when([t > 0], 0.0) + x[t, f] where t in 36, f in 8",
     "y[t] = w[0, t % 9] * y[t - 1].when([t > 0], 0.0) + x[t, t // 9] where t in 36",
     "y[t, f] +=! (w[f, o // 9] * x[o, f]).when([o <= t], 0.0) where t in 36, o in 36, f in 8"],
)  # fmt: skip
def test_the_axis_of_a_scan_stays(text: str) -> None:
    statement = _statement(text, 36)
    assert delinearize_reduced_axes(statement) is statement
