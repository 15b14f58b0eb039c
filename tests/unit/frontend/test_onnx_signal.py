"""Transforms, windows, ranges, batch statistics and empty inputs of ONNX against its reference evaluator."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx_node_models import check_node, import_node, model_of, run_node

from roller_svc.errors import UnsupportedModelError

RNG = np.random.default_rng(3)


def random(*shape: int, dtype: Any = np.float32) -> Any:
    return RNG.uniform(-1, 1, shape).astype(dtype)


@pytest.mark.parametrize("length", [None, 4, 9])
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize(("parts", "options"), [(1, {}), (2, {}), (1, {"onesided": 1}), (1, {"inverse": 1}), (2, {"inverse": 1})])
def test_transforms(parts: int, length: int | None, axis: int, options: dict[str, int]) -> None:
    tensors = [random(2, 6, 5, parts), None if length is None else np.array(length, np.int64), np.array(axis, np.int64)]
    check_node("DFT", options, tensors, constants=(1, 2), opset=20)


@pytest.mark.parametrize("length", [None, 5, 6, 7])
def test_real_inverse_transforms(length: int | None) -> None:
    tensors = [random(2, 4, 2), *([] if length is None else [np.array(length, np.int64)])]
    check_node("DFT", {"inverse": 1, "onesided": 1, "axis": 1}, tensors, constants=range(1, len(tensors)), opset=17)


@pytest.mark.parametrize("window", [None, random(8)])
@pytest.mark.parametrize("onesided", [0, 1])
def test_short_time_transforms(window: Any, onesided: int) -> None:
    tensors = [random(2, 30, 1), np.array(4, np.int64), window, np.array(8, np.int64)]
    check_node("STFT", {"onesided": onesided}, tensors, constants=(1, 3), opset=17)


@pytest.mark.parametrize("name", ["HannWindow", "HammingWindow", "BlackmanWindow"])
@pytest.mark.parametrize("periodic", [None, 0, 1])
def test_windows(name: str, periodic: int | None) -> None:
    attributes = {} if periodic is None else {"periodic": periodic}
    check_node(name, attributes, [np.array(10, np.int64)], constants=(0,), opset=17)


def test_mel_weights() -> None:
    numbers = [np.array(8, np.int64), np.array(16, np.int64), np.array(8192, np.int64), np.float32(0), np.float32(4096)]
    check_node("MelWeightMatrix", {}, [np.asarray(n) for n in numbers], constants=range(5), opset=17)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int32, np.int64])
@pytest.mark.parametrize("bounds", [(1, 5, 2), (10, 4, -2), (3, 3, 1)])
def test_ranges(dtype: Any, bounds: tuple[int, int, int]) -> None:
    tensors = [np.asarray(bound).astype(dtype) for bound in bounds]
    (found,) = run_node(model_of("Range", {}, tensors, constants=(0, 1, 2), opset=27), tensors)
    assert found.dtype == dtype
    assert found.tolist() == list(range(*bounds))


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (4, 3)])
def test_batch_statistics(shape: tuple[int, ...]) -> None:
    channels = [random(3), random(3), random(3), np.abs(random(3))]
    check_node(
        "BatchNormalization",
        {"training_mode": 1, "momentum": 0.8, "epsilon": 0.01},
        [random(*shape), *channels],
        results=3,
        opset=15,
    )
    check_node("BatchNormalization", {"epsilon": 0.01}, [random(*shape), *channels], opset=15)


@pytest.mark.parametrize("target", [np.float16, np.float64, np.int8, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("count", [0, 2])
def test_the_type_of_a_tensor_without_elements(target: Any, count: int) -> None:
    tensors = [random(3), np.zeros(count, target)]
    model = model_of("CastLike", {}, tensors, opset=19)
    graph, _ = import_node(model)
    assert [kind.shape for _, kind in graph.inputs] == [(3,), (count,)]
    (found,) = run_node(model, tensors)
    assert found.dtype == target
    np.testing.assert_array_equal(found, tensors[0].astype(target))


def test_casts_that_do_not_saturate() -> None:
    tensors = [np.array([500, 3], np.float32), np.zeros(0, ml_dtypes.float8_e4m3fn)]
    (found,) = run_node(model_of("CastLike", {"saturate": 0}, tensors, opset=19), tensors)
    np.testing.assert_array_equal(found.astype(np.float32), [np.nan, 3])


@pytest.mark.parametrize(
    ("op_type", "attributes", "tensors", "match"),
    [
        ("DFT", {}, [random(2, 6)], "real and imaginary part"),
        ("DFT", {}, [random(2, 6, 1), np.array(0)], "must be positive"),
        ("DFT", {}, [random(1, 9000, 2)], "a transform of 9000 elements"),
        ("STFT", {}, [random(1, 9, 1), np.array(0), None, np.array(4)], "frames of 4 elements, 0 apart"),
        ("STFT", {}, [random(1, 9, 1), np.array(1), random(3), np.array(4)], "window is"),
        ("STFT", {}, [random(1, 9), np.array(1), random(3)], "signal is"),
        ("STFT", {}, [random(1, 9, 1), np.array(1), np.float32(1)], "window is a vector"),
        ("CastLike", {}, [random(3)], "1 inputs; at least 2 are expected"),
        ("MelWeightMatrix", {}, [None, *[np.array(8)] * 3, np.float32(np.nan)], "must be numbers"),
        ("MelWeightMatrix", {}, [None, *[np.array(8)] * 4], "must be numbers"),
    ],
)
def test_what_does_not_fit_is_refused(op_type: str, attributes: Any, tensors: list[Any], match: str) -> None:
    constants = [i for i in range(1, len(tensors)) if tensors[i] is not None and tensors[i].ndim == 0]
    with pytest.raises(UnsupportedModelError, match=match):
        import_node(model_of(op_type, attributes, tensors, constants=constants, opset=20))
