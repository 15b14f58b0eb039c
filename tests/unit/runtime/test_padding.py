"""Calls with extents between buckets: padded inputs, sliced results."""

from __future__ import annotations

import numpy as np
import pytest

from roller_svc.errors import ArgumentError
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType
from roller_svc.runtime.graphs.padding import Padding, check_dtypes, write_results

INPUTS = (("x", TensorType(DType.FLOAT32, (4, 6))), ("w", TensorType(DType.FLOAT32, (3,))))
PADDING = Padding({"batch": 4, "half": 3}, {"batch": {"x": 0, "y": 1}, "half": {"x": 1}})


@pytest.mark.parametrize(
    ("x", "w", "extents"),
    [
        ((3, 4), (3,), {"batch": 3, "half": 2}),
        ((4, 6), (3,), {"batch": 4, "half": 3}),
        ((3, 5), (3,), None),  # no multiple
        ((5, 6), (3,), None),
        ((0, 6), (3,), None),
        ((3, 6), (2,), None),
        ((3,), (3,), None),
    ],
)
def test_extents_of_a_call(x, w, extents):
    assert PADDING.extents_of({"x": x, "w": w}, INPUTS) == extents


def test_dimensions_of_two_inputs_agree():
    padding = Padding({"n": 4}, {"n": {"x": 0, "y": 0}})
    inputs = (("x", TensorType(DType.FLOAT32, (4,))), ("y", TensorType(DType.FLOAT32, (4,))))
    assert padding.extents_of({"x": (2,), "y": (3,)}, inputs) is None


def test_inputs_are_padded_with_their_first_elements_and_results_sliced():
    padded = PADDING.pad(np.arange(6).reshape(2, 3), (4, 5))
    assert padded.tolist() == [[0, 1, 2, 0, 0], [3, 4, 5, 3, 3], [0, 1, 2, 0, 0], [0, 1, 2, 0, 0]]
    assert PADDING.slice("y", np.zeros((5, 8)), {"batch": 3}).shape == (5, 6)


def test_results_are_written_where_they_fit():
    results = {"y": np.ones(2, np.float32)}
    out = np.zeros(2, np.float32)
    assert write_results(results, {"y": out})["y"] is out
    assert out.tolist() == [1, 1]
    out.flags.writeable = False
    for wrong, message in (({"z": out}, "unknown output"), ({"y": np.zeros(3)}, "must be an array"), ({"y": out}, "read-only")):
        with pytest.raises(ArgumentError, match=message):
            write_results(results, wrong)
    with pytest.raises(ArgumentError, match="dtype int64, expected float32"):
        check_dtypes({"x": np.zeros((4, 6), np.int64)}, INPUTS)
