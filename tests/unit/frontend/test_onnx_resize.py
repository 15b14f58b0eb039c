"""Resize and Upsample of ONNX against the library's reference evaluator; the formulas of indices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx_node_models import check_node, import_node, model_of, run_node

from roller_svc.errors import UnsupportedModelError
from roller_svc.frontend.resampling import fit_index

RNG = np.random.default_rng(3)
IMAGE = RNG.uniform(-1, 1, (1, 2, 6, 5)).astype(np.float32)
LARGER = np.array([1, 1, 1.5, 2.4], np.float32)
SMALLER = np.array([1, 1, 0.5, 0.61], np.float32)
MODES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")


def scaled(scales: Any, roi: Any = None) -> list[Any]:
    return [IMAGE, roi, np.asarray(scales, np.float32)]


@pytest.mark.parametrize("transformation", MODES)
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("scales", [LARGER, SMALLER], ids=["larger", "smaller"])
def test_every_transformation(mode: str, transformation: str, scales: Any) -> None:
    attributes = {"mode": mode, "coordinate_transformation_mode": transformation}
    check_node("Resize", attributes, scaled(scales), constants=(2,), opset=19)


@pytest.mark.parametrize("rounding", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
@pytest.mark.parametrize("transformation", MODES)
def test_every_rounding(rounding: str, transformation: str) -> None:
    attributes = {"nearest_mode": rounding, "coordinate_transformation_mode": transformation}
    sizes = np.array([1, 2, 7, 8], np.int64)
    check_node("Resize", attributes, [IMAGE, None, None, sizes], constants=(3,), opset=19)


@pytest.mark.parametrize(
    "attributes",
    [
        {"mode": "linear", "antialias": 1},
        {"mode": "cubic", "antialias": 1},
        {"mode": "cubic", "antialias": 1, "exclude_outside": 1},
        {"mode": "cubic", "exclude_outside": 1, "cubic_coeff_a": -0.5},
        {"mode": "linear", "exclude_outside": 1},
    ],
)
@pytest.mark.parametrize("scales", [LARGER, SMALLER], ids=["larger", "smaller"])
def test_filters(attributes: dict[str, Any], scales: Any) -> None:
    check_node("Resize", attributes, scaled(scales), constants=(2,), opset=19)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_a_region(mode: str) -> None:
    attributes = {"mode": mode, "coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 7.0}
    roi = np.array([0, 0, 0.4, 0.3, 1, 1, 1.2, 0.8], np.float32)
    check_node("Resize", attributes, [IMAGE, roi, None, np.array([1, 2, 3, 4], np.int64)], constants=(1, 3), opset=19)


@pytest.mark.parametrize("policy", ["stretch", "not_larger", "not_smaller"])
def test_axes_and_policies(policy: str) -> None:
    attributes = {"axes": [3, 2], "keep_aspect_ratio_policy": policy, "mode": "linear"}
    check_node("Resize", attributes, [IMAGE, None, None, np.array([9, 4], np.int64)], constants=(3,), opset=19)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_floats(dtype: Any) -> None:
    check_node("Resize", {"mode": "linear"}, [IMAGE.astype(dtype), None, LARGER], constants=(2,), opset=19)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_integers_are_rounded(dtype: Any) -> None:
    image = (IMAGE * 100).astype(dtype)
    (found,) = run_node(model_of("Resize", {"mode": "linear"}, [image, None, LARGER], constants=(2,)), [image])
    wide = image.astype(np.float64)
    (exact,) = run_node(model_of("Resize", {"mode": "linear"}, [wide, None, LARGER], constants=(2,)), [wide])
    assert found.dtype == dtype
    assert np.abs(found - exact).max() < 0.501


def test_older_operator_sets() -> None:
    scales = np.array([1, 1, 2, 3], np.float32)
    check_node("Upsample", {"mode": "nearest"}, [IMAGE, scales], constants=(1,), opset=9)
    expected = IMAGE.repeat(2, 2).repeat(3, 3)
    np.testing.assert_array_equal(
        run_node(model_of("Upsample", {"scales": [1.0, 1.0, 2.0, 3.0]}, [IMAGE], opset=7), [IMAGE])[0], expected
    )
    (found,) = run_node(model_of("Resize", {}, [IMAGE, scales], constants=(1,), opset=10), [IMAGE, scales])
    np.testing.assert_array_equal(found, expected)
    nearest = {"coordinate_transformation_mode": "tf_half_pixel_for_nn", "nearest_mode": "floor"}
    (found,) = run_node(model_of("Resize", nearest, scaled([1, 1, 2, 1]), constants=(2,), opset=11), scaled(scales))
    np.testing.assert_array_equal(found[0, 0, :, 0], IMAGE[0, 0, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5], 0])


def test_an_extent_is_rounded_like_the_scale() -> None:
    """0.7 in float32 is less than 0.7, and yet 0.7 times 10 is 7."""
    image = np.ones((1, 10), np.float32)
    graph, _ = import_node(model_of("Resize", {}, [image, None, np.array([1, 0.7], np.float32)], constants=(2,)))
    assert graph.types[graph.outputs[0][1]].shape == (1, 7)


def test_a_resize_has_no_gather() -> None:
    """Common scales become index arithmetic, which fuses with the neighbours."""
    for mode, scales in (("nearest", [1, 1, 2, 2]), ("linear", [1, 1, 2, 2]), ("cubic", [1, 1, 0.5, 1.5])):
        graph, _ = import_node(model_of("Resize", {"mode": mode}, scaled(scales), constants=(2,)))
        assert {node.operator for node in graph.nodes} == {"resample_nearest" if mode == "nearest" else "resample"}
        assert all(len(node.inputs) <= 2 for node in graph.nodes)


def test_formulas_of_indices() -> None:
    """Every pair of extents has a formula for the floor and for the nearest of half-pixel positions."""
    for size in range(1, 30):
        for out in range(1, 30):
            i = np.arange(out)
            for index in (i * size // out, np.clip(np.ceil((i + 0.5) * size / out - 1).astype(int), 0, size - 1)):
                formula = fit_index(index, size, out / size)
                assert formula is not None
                a, b, c = formula
                np.testing.assert_array_equal(np.clip((i * a + b) // c, 0, size - 1), index)


def test_indices_without_a_formula() -> None:
    assert fit_index(np.array([0, 3, 3, 4, 9]), 10, 2.0) is None
    index = np.array([0, 1, 1, 1])
    a, b, c = fit_index(index, 2, 2.0) or (0, 0, 1)
    np.testing.assert_array_equal(np.clip((np.arange(4) * a + b) // c, 0, 1), index)


@pytest.mark.parametrize(
    ("attributes", "tensors", "match"),
    [
        ({"mode": "sinc"}, scaled(LARGER), "mode is 'sinc'"),
        ({"nearest_mode": "up"}, scaled(LARGER), "nearest_mode is 'up'"),
        ({"coordinate_transformation_mode": "x"}, scaled(LARGER), "coordinate_transformation_mode is 'x'"),
        ({"keep_aspect_ratio_policy": "x"}, scaled(LARGER), "policy is 'x'"),
        ({"antialias": 1}, scaled(LARGER), "antialias is for linear and cubic"),
        ({"coordinate_transformation_mode": "tf_crop_and_resize"}, scaled(LARGER), "needs roi"),
        ({}, [IMAGE, None, LARGER, np.array([1, 2, 3, 4])], "one of scales and sizes"),
        ({}, [IMAGE], "one of scales and sizes"),
        ({}, scaled([1, 2]), "must have 4 numbers"),
        ({"axes": [7]}, scaled([1]), "axes has 7"),
        ({}, scaled([1, 1, 0, 1]), "must be positive"),
        ({}, scaled([1, 1, 0.01, 1]), "nothing is left"),
        ({}, scaled([1, 1, 1e9, 1]), "must not exceed 1048576"),
        ({}, scaled([1, 1, 3e38, 1]), "must not exceed 1048576"),
        ({}, [IMAGE, np.full(8, np.nan, np.float32), LARGER], "roi must be finite"),
        ({"surprise": 1}, scaled(LARGER), "surprise"),
    ],
)
def test_wrong_options_are_refused(attributes: dict[str, Any], tensors: list[Any], match: str) -> None:
    constants = [i for i in range(1, len(tensors)) if tensors[i] is not None]
    with pytest.raises(UnsupportedModelError, match=match):
        import_node(model_of("Resize", attributes, tensors, constants=constants, opset=19))


def test_scales_must_be_constant() -> None:
    with pytest.raises(UnsupportedModelError, match="must be a constant"):
        import_node(model_of("Resize", {}, scaled(LARGER), opset=19))
