"""Convolution with bias and ReLU. On GPUs choose channels last (NHWC): channels first are transposed by kernels of their own."""

import numpy as np

import roller_svc

LAST = "Y = conv2d(X, W, bias, padding=1, layout=NHWC, weight_layout=OHWI, activation=relu)"
FIRST = "Y = conv2d(X, W, bias, padding=1, activation=relu)"


def microseconds(text, image, weight):
    inputs = {"X": ("float16", image), "W": ("float16", weight), "bias": ("float16", (64,))}
    (best,) = roller_svc.estimate(text, inputs, ["nvidia-h200-sxm"])["nvidia-h200-sxm"]
    return best.seconds * 1e6


last = microseconds(LAST, (32, 56, 56, 64), (64, 3, 3, 64))
first = microseconds(FIRST, (32, 64, 56, 56), (64, 64, 3, 3))
print(f"H200, 32 images of 56 x 56 x 64: {last:.1f} us; channels first {first:.1f} us")

rng = np.random.default_rng(0)
X, W = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 6, 7, 4), (8, 3, 3, 4)))
bias = rng.standard_normal(8).astype(np.float32)
got = roller_svc.compile(LAST, {"X": X, "W": W, "bias": bias}, select="model")(X=X, W=W, bias=bias)["Y"]
windows = np.lib.stride_tricks.sliding_window_view(np.pad(X, [(0, 0), (1, 1), (1, 1), (0, 0)]), (3, 3), axis=(1, 2))
np.testing.assert_allclose(got, np.maximum(np.einsum("nhwcij,fijc->nhwf", windows, W) + bias, 0), rtol=1e-4, atol=1e-5)
print("CPU: agrees with numpy")
