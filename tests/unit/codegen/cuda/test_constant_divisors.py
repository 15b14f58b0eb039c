"""Division of float32 by a constant in CUDA: by the reciprocal, with the bits of a division."""

from __future__ import annotations

import numpy as np
import pytest

from roller_svc.compiler.artifact import package_kernel
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.pipeline import build_kernel
from roller_svc.compiler.request import build_request

FINITE = np.finfo(np.float32)
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, FINITE.max, FINITE.min, FINITE.tiny, FINITE.smallest_subnormal]


def divided(values: np.ndarray, divisor: float) -> tuple[np.ndarray, str]:
    inputs = {"x": {"dtype": "float32", "shape": list(values.shape)}}
    report = build_kernel(
        build_request(
            f"y[i] = x[i] / {divisor!r}",
            inputs,
            target="nvidia-h200-sxm",
            select="model",
            top_k=1,
        )
    )
    compiled = package_kernel(report).compiled
    return load_emulated(compiled, 1).run({"x": values})["y"], compiled.source.text


@pytest.mark.emulator
@pytest.mark.parametrize("divisor", [3.0, 41.0, -47.0, 4097.0, 1.1, 1.9999999, 1e9, 7e29])
def test_quotients_are_those_of_a_division(divisor: float) -> None:
    rng = np.random.default_rng(3)
    values = np.exp2(rng.uniform(-126, 127, 20000)) * rng.choice([-1.0, 1.0], 20000)
    whole = np.float32(divisor) * rng.integers(-1000, 1000, 2000)
    values = np.concatenate([values, whole, SPECIAL]).astype(np.float32)
    found, text = divided(values, divisor)
    assert "div_const_f32(" in text
    with np.errstate(all="ignore"):
        expected = values / np.float32(divisor)
    small = (np.abs(expected) < 2.0**-100) & (expected != 0)  # whose remainders are subnormal
    np.testing.assert_array_equal(found[~small].view(np.int32), expected[~small].view(np.int32))
    np.testing.assert_array_less(np.abs(found.view(np.int32) - expected.view(np.int32))[small], 2)


@pytest.mark.parametrize("divisor", [0.3, 8.0, 1e38])
def test_other_divisors_stay(divisor: float) -> None:
    _, text = divided(np.ones(64, np.float32), divisor)
    assert "div_const_f32" not in text
