"""Uses of the operators that resample, sample and quantize, with numpy's results or those of ONNX's evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np
from cases_ops import Case, convolved
from onnx_node_models import node_result

INTS = np.array([[-7, 6, 5], [4, -3, 2]], np.int32)
RNG = np.random.default_rng(5)
BYTES = RNG.integers(-128, 128, (5, 6)).astype(np.int8)
IMAGE = RNG.uniform(-1, 1, (1, 2, 5, 6)).astype(np.float32)
GRID = RNG.uniform(-1.4, 1.4, (1, 3, 4, 2)).astype(np.float32)
VOLUME = RNG.uniform(-1, 1, (1, 2, 3, 4, 5)).astype(np.float32)
GRIDS = RNG.uniform(-1.4, 1.4, (1, 2, 3, 2, 3)).astype(np.float32)
ROIS = np.array([[0.5, 0.5, 4.0, 3.0], [2.0, 1.0, 9.0, 8.0]], np.float32)
SHIFTS = RNG.uniform(-1.5, 1.5, (1, 8, 4, 5)).astype(np.float32)
FILTERS = RNG.uniform(-1, 1, (3, 2, 2, 2)).astype(np.float32)
CACHE = RNG.uniform(-1, 1, (2, 5, 3)).astype(np.float32)
SCALES = np.array([0.1, 0.02, 0.3], np.float32)


def sampled(x: Any, index: Any, weights: Any) -> Any:
    """Return the weighted sums of elements along the last axis, whose indices are kept inside."""
    return sum(x[..., np.clip(index + t, 0, x.shape[-1] - 1)] * row for t, row in enumerate(weights))


def by_onnx(
    operator: str, op_type: str, tensors: tuple[Any, ...], parameters: dict[str, Any], attributes: dict[str, Any], opset: int = 22
) -> Case:
    """Return a case whose result is that of the ONNX library's reference evaluator."""
    return Case(operator, tensors, lambda *_: node_result(op_type, attributes, *tensors, opset=opset), parameters)


RESAMPLED = [
    Case("resample_nearest", ((2, 5, 6),), lambda x: x[:, np.arange(10) // 2][:, :, np.arange(4) * 3 // 2],
         {"axes": [1, 2], "extents": [10, 4], "numerators": [1, 3], "offsets": [0, 0], "denominators": [2, 2]}),
    Case("resample_nearest", ((5,),), lambda x: x[np.clip((np.arange(9) * 2 - 3) // 2, 0, 4)],
         {"axes": [0], "extents": [9], "numerators": [2], "offsets": [-3], "denominators": [2]}),
    Case("resample", ((2, 5), (2, 8)), lambda x, w: sampled(x, (np.arange(8) * 2 - 1) // 4, w),
         {"numerator": 2, "offset": -1, "denominator": 4}),
    Case("resample", ((2, 5), (7, 3)), lambda x, w: sampled(x, np.arange(3) * 2 - 2, w),
         {"numerator": 2, "offset": -2}),
    Case("resample", ((4, 2), (3, 2), np.array([-1, 2])), lambda x, w, i: sampled(x.T, i, w).T, {"axis": 0}),
    *(
        by_onnx("grid_sample", "GridSample", (IMAGE, GRID), {"mode": mode, "padding": padding, "align_corners": align},
                {"mode": mode, "padding_mode": padding, "align_corners": int(align)})
        for mode in ("nearest", "linear", "cubic") for padding in ("zeros", "border", "reflection")
        for align in (False, True)
    ),
    *(
        by_onnx("grid_sample", "GridSample", (VOLUME, GRIDS), {"mode": mode, "padding": padding},
                {"mode": mode, "padding_mode": padding})
        for mode, padding in (("nearest", "border"), ("linear", "zeros"), ("cubic", "reflection"))
    ),
    *(
        by_onnx("roi_align", "RoiAlign", (IMAGE, ROIS, np.zeros(2, np.int64)),
                {"height": 2, "width": 3, "samples": 2, "spatial_scale": 0.75, "half_pixel": half, "mode": mode},
                {"output_height": 2, "output_width": 3, "sampling_ratio": 2, "spatial_scale": 0.75, "mode": mode,
                 "coordinate_transformation_mode": "half_pixel" if half else "output_half_pixel"})
        for half, mode in ((True, "avg"), (False, "max"))
    ),
    by_onnx("deform_conv2d", "DeformConv", (IMAGE, FILTERS, SHIFTS), {}, {}),
    by_onnx("local_response_norm", "LRN", (IMAGE.reshape(2, 1, 5, 6).repeat(2, 1),), {"size": 2, "alpha": 0.5},
            {"size": 2, "alpha": 0.5}),
    Case("local_response_norm", ((2, 5),), lambda x: x / (2 + 0.5 / 3 * sum(
        np.pad(x * x, ((0, 0), (1, 1)))[:, i : i + 5] for i in range(3))) ** 0.5,
        {"size": 3, "alpha": 0.5, "beta": 0.5, "bias": 2}),
    by_onnx("cache_update", "TensorScatter", (CACHE, CACHE[:, :2] + 1, np.array([3, 1])), {}, {}, 24),
    by_onnx("cache_update", "TensorScatter", (CACHE, CACHE[:, :2] + 1, np.array([4, 1])), {"circular": True},
            {"mode": "circular"}, 24),
    Case("cache_update", (CACHE, CACHE[:, :2] + 1), lambda x, y: np.concatenate([y, x[:, 2:]], 1)),
    *(Case("determinant", ((3, n, n),), np.linalg.det) for n in range(1, 7)),
    Case("determinant", ((2, 2),), np.linalg.det),
]  # fmt: skip

QUANTIZED = [
    Case("quantize_linear", ((4, 3), SCALES, np.array([1, 128, 255], np.uint8)),
         lambda x, s, z: np.clip(np.round(x / s) + z, 0, 255), {"axis": -1}),
    Case("quantize_linear", (np.array([-9, 0.5, 1.5, 9e9, np.nan], np.float32), np.float32(1)),
         lambda x, s: np.array([-9, 0, 2, 32767, 0]), {"dtype": "int16"}),
    Case("quantize_linear", ((4, 3), np.full((2, 3), 0.01, np.float32)), lambda x, s: np.round(x / 0.01),
         {"axis": 0, "block": 3, "dtype": "int8"}),
    Case("quantize_linear", (np.array([500.0, 3.3], np.float32), np.float32(1)), lambda x, s: np.array([448, 3.25]),
         {"dtype": "float8_e4m3fn"}),
    Case("quantize_linear", (np.array([500.0, 3.3], np.float32), np.float32(1)), lambda x, s: np.array([np.nan, 3.25]),
         {"dtype": "float8_e4m3fn", "saturate": False}),
    Case("quantize_linear", (INTS, np.float32(2)), lambda x, s: np.round(x / 2), {"dtype": "int8"}),
    Case("dequantize_linear", (BYTES, SCALES.repeat(2), BYTES[0]), lambda x, s, z: (x * 1.0 - z) * s, {"axis": 1}),
    Case("dequantize_linear", (BYTES, SCALES.reshape(3, 1).T.repeat(5, 0).astype(np.float16)), lambda x, s:
         x * s.repeat(2, 1), {"block": 2, "dtype": "float32"}),
    Case("dequantize_linear", (INTS, np.float32([0.5])), lambda x, s: x * 0.5),
    Case("requantize", (INTS * 100, SCALES, np.int8(3)), lambda x, s, z: np.clip(np.round(x * s) + 3, -128, 127),
         {"axis": 1}),
    Case("matmul", (BYTES, BYTES.T.astype(np.uint8)), lambda a, b: a.astype(int) @ b.astype(int), {"dtype": "int32"}),
    Case("gemm", (BYTES, BYTES.T), lambda a, b: a.astype(int) @ b.astype(int), {"dtype": "int32"}),
    Case("linear", (BYTES, BYTES), lambda a, b: a.astype(int) @ b.T.astype(int), {"dtype": "int32"}),
    Case("conv1d", (BYTES[None], BYTES[:2, :3].reshape(1, 2, 3)[:, [0, 1, 0, 1, 0]]), lambda x, w: convolved(
        x.astype(int), w.astype(int), (1,), ((0, 0),), (1,)), {"dtype": "int32"}),
]  # fmt: skip
