"""Nodes on tensors without elements, against the library's reference evaluator; BitCast."""

from __future__ import annotations

import contextlib
import tracemalloc
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper
from onnx_node_models import Array, check_node, import_node, model_of, run_node

from roller_svc.errors import UnsupportedModelError

NOTHING = np.zeros((2, 0, 4), np.float32)


def result_of_two(first: dict[str, Any], second: dict[str, Any], tensors: list[Array]) -> Array:
    """Return the result of two nodes: `first` reads the tensors, all but t0 constants, and gives `m`."""
    nodes = [helper.make_node(**first, outputs=["m"]), helper.make_node(**second, outputs=["y"])]
    declared = [
        helper.make_tensor_value_info(f"t{i}", helper.np_dtype_to_tensor_dtype(t.dtype), t.shape) for i, t in enumerate(tensors)
    ]
    kept = [numpy_helper.from_array(t, f"t{i}") for i, t in enumerate(tensors) if i]
    graph = helper.make_graph(nodes, "two", declared[:1], [helper.make_tensor_value_info("y", 1, None)], kept)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    return run_node(model, tensors)[0]


@pytest.mark.parametrize("name", ["Sum", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp"])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_reductions_of_nothing(name: str, keepdims: int) -> None:
    with np.errstate(divide="ignore"):
        check_node(f"Reduce{name}", {"keepdims": keepdims}, [NOTHING, np.array([1])], constants=(1,), opset=20)


@pytest.mark.parametrize(("dtype", "low", "high"), [(np.int32, -(2**31), 2**31 - 1), (np.uint8, 0, 255), (np.bool_, False, True)])
def test_extrema_of_nothing(dtype: Any, low: object, high: object) -> None:
    for name, value in (("ReduceMax", low), ("ReduceMin", high)):
        tensors = [np.zeros((0, 2), dtype), np.array([0])]
        (found,) = run_node(model_of(name, {}, tensors, constants=(1,), opset=20), tensors)
        assert found.tolist() == [[value, value]]


@pytest.mark.parametrize(
    ("first", "others"),
    [
        ({"op_type": "Abs", "inputs": ["t0"]}, []),
        ({"op_type": "Add", "inputs": ["t0", "t2"]}, [np.ones((1, 4), np.float32)]),
        ({"op_type": "Cast", "inputs": ["t0"], "to": 1}, []),
        ({"op_type": "Transpose", "inputs": ["t0"], "perm": [0, 1, 2]}, []),
        ({"op_type": "Reshape", "inputs": ["t0", "t2"]}, [np.array([0, 0, 4])]),
    ],
)
def test_nodes_that_read_nothing(first: dict[str, Any], others: list[Array]) -> None:
    found = result_of_two(first, {"op_type": "ReduceSum", "inputs": ["m", "t1"]}, [NOTHING, np.array([1]), *others])
    assert found.tolist() == np.zeros((2, 1, 4)).tolist()


def test_a_part_without_elements() -> None:
    """A slice and a piece of a split may have no elements, and add nothing to a concatenation."""
    x = np.arange(6, dtype=np.float32)
    slice_ = {"op_type": "Slice", "inputs": ["t0", "t1", "t2"]}
    concat = {"op_type": "Concat", "inputs": ["m", "t0"], "axis": 0}
    found = result_of_two(slice_, concat, [x, np.array([4]), np.array([2])])
    assert found.tolist() == x.tolist()
    assert result_of_two(slice_, concat, [x, np.array([4]), np.array([6])]).tolist() == [4, 5, *x.tolist()]
    tensors = [x, np.array([4]), np.array([2])]
    (nothing,) = run_node(model_of("Slice", {}, tensors, constants=(1, 2)), tensors)
    assert (nothing.shape, nothing.dtype) == ((0,), np.float32)
    tensors = [x, np.array([6, 0])]
    whole, nothing = run_node(model_of("Split", {}, tensors, constants=(1,), results=2), tensors)
    assert (whole.tolist(), nothing.shape) == (x.tolist(), (0,))


@pytest.mark.parametrize(
    ("op_type", "attributes", "tensors", "match"),
    [
        ("Add", {}, [NOTHING, np.ones(3, np.float32)], "shapes do not fit"),
        ("ReduceSum", {}, [NOTHING, np.array([5])], "shapes do not fit"),
        ("Reshape", {}, [NOTHING, np.array([2])], "shapes do not fit"),
        ("Transpose", {"perm": [0, 0, 1]}, [NOTHING], "shapes do not fit"),
        ("Cast", {"to": 99}, [NOTHING], "a cast to 99"),
        ("Abs", {"surprise": 1}, [NOTHING], "surprise"),
        ("ReduceMax", {}, [np.zeros((0, 1 << 40), np.float32), np.array([0])], "are too large"),
    ],
)
def test_what_does_not_fit_is_refused(op_type: str, attributes: Any, tensors: list[Any], match: str) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        import_node(model_of(op_type, attributes, tensors, constants=range(1, len(tensors))))


@pytest.mark.parametrize(
    ("op_type", "names"),
    [
        ("Add", ["t0", ""]),
        ("Add", ["", "t0"]),
        ("Where", ["", "t0", "t0"]),
        ("Where", ["t0", "t0", ""]),
        ("MatMul", ["t0"]),
        ("MatMul", ["t0", ""]),
        ("Gather", ["t0", ""]),
        ("Concat", ["t0", ""]),
        ("Expand", ["t0", ""]),
        ("Relu", []),
    ],
)
def test_omitted_operands_beside_nothing_are_refused(op_type: str, names: list[str]) -> None:
    model = model_of(op_type, {"axis": 0} if op_type in ("Gather", "Concat") else {}, [NOTHING])
    model.graph.node[0].input[:] = names
    with pytest.raises(UnsupportedModelError, match=r"input \d is missing|missing|expected|do not fit"):
        import_node(model)


def test_omitted_operands_of_a_sum_add_nothing() -> None:
    for op_type in ("Sum", "Max"):
        model = model_of(op_type, {}, [NOTHING])
        model.graph.node[0].input[:] = ["t0", ""]
        assert run_node(model, [NOTHING])[0].shape == NOTHING.shape


HUGE = np.broadcast_to(np.float32(0), (1 << 44,))


@pytest.mark.parametrize(
    ("op_type", "attributes", "tensors", "known"),
    [
        ("Concat", {"axis": 0}, [np.zeros(0, np.float32), HUGE], ()),
        ("Concat", {"axis": 1}, [np.zeros((0, 2), np.float32), HUGE.reshape(1, -1)[:0]], ()),
        ("Add", {}, [np.zeros((0, 1), np.float32), HUGE], ()),
        ("MatMul", {}, [np.zeros((0, 5), np.float32), np.broadcast_to(HUGE, (5, 1 << 44))], ()),
        ("MatMul", {}, [np.broadcast_to(HUGE[:1], (1 << 44, 1)), np.zeros((1, 0), np.float32)], ()),
        ("Gather", {}, [HUGE, np.zeros(0, np.int64)], (1,)),
        ("Gather", {}, [np.zeros((1, 0), np.float32), np.broadcast_to(np.int64(0), HUGE.shape)], ()),
        ("Expand", {}, [HUGE, np.zeros(0, np.int64)], (1,)),
        ("ReduceSum", {}, [HUGE, np.zeros(0, np.int64)], (1,)),
        ("ReduceMax", {}, [HUGE, np.zeros(0, np.int64)], (1,)),
        ("Squeeze", {}, [HUGE, np.zeros(0, np.int64)], (1,)),
        ("Reshape", {}, [HUGE, np.zeros(0, np.int64)], (1,)),
    ],
)
def test_huge_tensors_beside_nothing_take_no_memory(
    op_type: str, attributes: Any, tensors: list[Any], known: tuple[int, ...]
) -> None:
    model = model_of(op_type, attributes, tensors, constants=known, opset=20)
    tracemalloc.start()
    try:
        with contextlib.suppress(UnsupportedModelError):
            import_node(model)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_a_gather_of_nothing_by_unknown_indices() -> None:
    indices = np.array([[0, 1]])
    tensors = [np.zeros((2, 0), np.float32), indices]
    assert run_node(model_of("Gather", {}, tensors), tensors)[0].shape == (1, 2, 0)
    with pytest.raises(UnsupportedModelError, match="a dimension without elements"):
        import_node(model_of("Gather", {"axis": 1}, tensors))


def test_a_refusal_of_nothing_says_so() -> None:
    with pytest.raises(UnsupportedModelError, match=r"input 0 without elements \(shape \[2, 0, 4\]\).*; declare ext"):
        import_node(model_of("Det", {}, [NOTHING]))


@pytest.mark.parametrize(
    ("array", "target"),
    [
        (np.array([-1, 5], np.int32), np.uint32),
        (np.array([200, 5], np.uint8), np.int8),
        (np.array([True, False]), np.uint8),
        (np.array([1.5], np.float32), np.float32),
    ],
)
def test_other_types_for_the_same_bits(array: Array, target: Any) -> None:
    to = helper.np_dtype_to_tensor_dtype(np.dtype(target))
    (found,) = run_node(model_of("BitCast", {"to": to}, [array], opset=26), [array])
    assert found.dtype == target
    np.testing.assert_array_equal(found, array.view(target))


def test_bits_of_constants() -> None:
    x = np.array([1.5, -2.0], np.float32)
    model = model_of("BitCast", {"to": 6}, [x], constants=(0,), opset=26)
    np.testing.assert_array_equal(run_node(model, [x])[0], x.view(np.int32))
    with pytest.raises(UnsupportedModelError, match="the bits of float32 as int32"):
        import_node(model_of("BitCast", {"to": 6}, [x], opset=26))
    with pytest.raises(UnsupportedModelError, match="float32 has 32 bits, int64 64"):
        import_node(model_of("BitCast", {"to": 7}, [x], opset=26))
