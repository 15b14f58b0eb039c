"""Accumulator precision of matrix units: of each unit, in the emulator, and in error bounds."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import tensor_cores as tensorcores
from cases_matrix import unit
from contractions import matmul
from emulator_support import module, words
from hopper import hopper
from reference_kernels import tensor
from schedule_support import program

from roller_svc import hardware
from roller_svc.analysis.operand import operands
from roller_svc.codegen.cuda.hopper_instructions import wgmma_shape
from roller_svc.errors import InvariantError
from roller_svc.families.common.gpu.warpgroups.tile import plan_wgmma_loads
from roller_svc.families.matching import units_for
from roller_svc.ir.accumulation import AccumulatorPrecision, accumulator_precision, least_precise
from roller_svc.ir.constraints import ScheduleConstraints
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import LaunchSpec, Role
from roller_svc.ir.rprogram import PipelineOptions
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.interpreter import evaluate
from tests.unit.runtime.emulator.test_warpgroups import ROOM, laid_out, results, strides, text_of

H200, B200, A100 = (hardware.load(f"nvidia-{name}") for name in ("h200-sxm", "b200", "a100-sxm-80gb"))
L40S, RTX5090, T4 = (hardware.load(f"nvidia-{name}") for name in ("l40s", "rtx5090", "t4"))
SHORT = AccumulatorPrecision(13, 13, 32, 128)
HALVES = "C[m, n] +=! A[m, k].cast(`float32`) * B[n, k].cast(`float32`)"


@pytest.mark.parametrize(
    ("hw", "name", "precision"),
    [
        (H200, "wgmma_e4m3", SHORT),
        (H200, "wgmma_e5m2", SHORT),
        (H200, "mma_e4m3", AccumulatorPrecision(25, 23, 16)),  # products of float16 to the assembler
        (H200, "wgmma_f16", AccumulatorPrecision(25, 23, 16)),
        (H200, "wgmma_tf32", AccumulatorPrecision(25, 23, 8)),
        (H200, "wgmma_s8", None),
        (H200, "mma_f64", None),
        (L40S, "mma_e5m2", replace(SHORT, products_per_add=16)),
        (L40S, "mma_f16", AccumulatorPrecision(24, 23, 8)),
        (RTX5090, "mma_e4m3", AccumulatorPrecision(25, 23, 32)),
        (B200, "mma_e4m3", AccumulatorPrecision(25, 23, 16)),
        (A100, "mma_bf16", AccumulatorPrecision(24, 23, 8)),
        (A100, "mma_tf32", AccumulatorPrecision(24, 23, 4)),
        (T4, "mma_f16", AccumulatorPrecision(24, 23, 8)),
        (A100, "fma_f32", None),
        (replace(T4, arch=hardware.load("nvidia-v100-sxm2").arch), "mma_f16", AccumulatorPrecision(23, 23, 4)),
        (hardware.load("amd-mi250x"), "mfma_f16", None),
    ],
)
def test_precision_of_units(hw: hardware.HardwareSpec, name: str, precision: AccumulatorPrecision | None) -> None:
    assert accumulator_precision(unit(hw, name), hw.arch) == precision


def test_least_precise_unit_is_chosen() -> None:
    assert least_precise((unit(H200, name) for name in ("fma_f32", "wgmma_f16", "wgmma_e4m3")), H200.arch) == SHORT
    assert least_precise((unit(H200, name) for name in ("fma_f32", "wgmma_s8")), H200.arch) is None


@pytest.mark.parametrize(
    ("hw", "tf32", "taken", "refused"),
    [
        (H200, False, ["wgmma_f16", "mma_f16"], "wgmma_e4m3: its sums keep 13 bits, which takes allow_tf32"),
        (H200, True, ["wgmma_e4m3", "mma_f16"], ""),
        (L40S, False, ["mma_f16"], "mma_e4m3: its sums keep 13 bits, and nobody adds them up in float32"),
        (L40S, True, ["mma_f16"], "mma_e4m3: its sums keep 13 bits, and nobody adds them up in float32"),
        (RTX5090, False, ["mma_e4m3"], ""),
    ],
)
def test_float8_needs_precise_or_promoted_accumulators(
    hw: hardware.HardwareSpec, tf32: bool, taken: list[str], refused: str
) -> None:
    group = matmul(256, 256, 256, "float8_e4m3fn", layout="nt", hw=hw)
    found = units_for(group, hw, ScheduleConstraints(allow_tf32=tf32))
    assert [u.name for u in found.units if u.is_matrix] == taken
    assert [text for text in found.unsupported_units if "its sums" in text][:1] == ([refused] if refused else [])


@pytest.mark.parametrize("name", ["wgmma_e4m3", "wgmma_f16"])
def test_float8_accumulators_are_promoted_within_the_interval(name: str) -> None:
    on = unit(H200, name)
    group = matmul(256, 256, 512, on.in_dtype.value, layout="nt", hw=H200)
    feeds = plan_wgmma_loads(group.space, on, operands(group), H200.arch)
    tile = feeds.tile((64, 64, 128), (64, 64), PipelineOptions(2))
    added = accumulator_precision(on, H200.arch)
    assert added is not None
    assert tile.promotes_accumulators == added.is_reduced_precision
    assert tile.accumulator_registers == (1 + added.is_reduced_precision) * tile.accumulator_set_registers
    if added.is_reduced_precision:
        with pytest.raises(InvariantError, match="take in 128 products, not 256"):
            feeds.tile((64, 64, 256), (64, 64), PipelineOptions(2))
    else:
        assert feeds.tile((64, 64, 256), (64, 64), PipelineOptions(2)).k == 256


# in the emulator ------------------------------------------------------------------------------------------------------
TYPES = {"e4m3": (ml_dtypes.float8_e4m3fn, -6), "e5m2": (ml_dtypes.float8_e5m2, -14)}


def product_of(name: str, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(sums before, after) of one instruction in the emulator."""
    product = wgmma_shape(name)
    assert product is not None
    rooms = np.concatenate([laid_out(x, "k", 128, *strides(x.shape[0], "k", 128), 0) for x in (a, b)])
    buffers = (
        tensor("R", "rooms", Role.INPUT, DType.UINT32, (ROOM // 2,)),
        tensor("H", "held", Role.INPUT, DType.UINT32, (513,)),
        tensor("D", "d", Role.OUTPUT, DType.FLOAT32, (128, product.registers)),
    )
    launch = LaunchSpec("one", ("rooms", "held", "d"), (1, 1, 1), (128, 1, 1), 2 * ROOM)
    source = hopper(text_of(name, product, 128, 0), buffers, launch, (name, f"hold_results_{product.registers}"))
    held = np.ones(513, np.uint32)
    before = results(3 * np.arange(128)[:, None] + np.arange(product.registers))
    return before, results(module(source).run({"R": words(rooms), "H": held})["D"])


@pytest.mark.emulator
@pytest.mark.parametrize("types", ["e4m3e4m3", "e5m2e4m3", "e5m2e5m2"])
@pytest.mark.parametrize("scale", [0.02, 1.0, 30.0])
def test_emulator_accumulates_float8_like_hopper(types: str, scale: float) -> None:
    """From subnormal operands to products that are greater than the sum before."""
    (one, least), (other, _) = TYPES[types[:4]], TYPES[types[4:]]
    rng = np.random.default_rng(11)
    a = (rng.standard_normal((64, 32)) * scale).astype(one)
    b = (rng.standard_normal((16, 32)) * scale).astype(other)
    a[:, ::5] = 0
    before, found = product_of(f"wgmma_m64n16k32_{types}_kk", a, b)
    wide = a.astype(np.float64), b.astype(np.float64)
    exact = before + wide[0] @ wide[1].T
    if types[:4] == types[4:]:  # else subnormal numbers of the two types have different powers
        unpromoted = replace(SHORT, promotion_interval=None)
        expected = tensorcores.product(*wide, unpromoted, least=least, start=before.astype(np.float64))
        np.testing.assert_array_equal(found, expected)
    assert (found != exact.astype(np.float32)).any()
    np.testing.assert_allclose(found, exact, atol=34 * 2.0**-13 * max(512.0, 16 * scale * scale))


@pytest.mark.emulator
def test_infinities_and_nan_of_float8_stay() -> None:
    a, b = np.ones((64, 32), ml_dtypes.float8_e5m2), np.ones((16, 32), ml_dtypes.float8_e5m2)
    a[3, 5], a[7, 31], b[4, 5] = np.inf, np.nan, 0
    _, found = product_of("wgmma_m64n16k32_e5m2e5m2_kk", a, b)
    assert np.isinf(np.delete(found[3], 4)).all()
    assert np.isnan(found[3, 4])
    assert np.isnan(found[7]).all()
    assert np.isfinite(np.delete(found, [3, 7], axis=0)).all()


# bounds ---------------------------------------------------------------------------------------------------------------
def verdict(dtype: type, k: int, low: float, of_device: AccumulatorPrecision, allowed: AccumulatorPrecision | None) -> bool:
    """Whether what such sums give of operands from `low` to 1 is within bounds for others."""
    name = np.dtype(dtype).name
    found, rng = program(HALVES, A=f"{name} 8 {k}", B=f"{name} 8 {k}"), np.random.default_rng(k)
    arrays = {each: rng.uniform(low, 1, (8, k)).astype(dtype) for each in "AB"}
    a, b = (arrays[each].astype(np.float64) for each in "AB")
    got = tensorcores.product(a, b, of_device, least=-6 if dtype is ml_dtypes.float8_e4m3fn else -14)
    return agrees(found, {"C": got.astype(np.float32)}, evaluate(found, arrays, accumulation=allowed)).ok


@pytest.mark.parametrize("low", [-1.0, 0.0])
@pytest.mark.parametrize("k", [64, 1000, 8192])
@pytest.mark.parametrize(
    "sums", [AccumulatorPrecision(25, 23, 16), AccumulatorPrecision(24, 23, 8), AccumulatorPrecision(23, 23, 4)]
)
def test_long_float16_accumulations_stay_within_bounds(sums: AccumulatorPrecision, k: int, low: float) -> None:
    assert verdict(np.float16, k, low, sums, sums)


def test_bounds_of_other_kernels_do_not_follow() -> None:
    """All the terms lose: 8192 of them, more than a float32 sum may."""
    assert not verdict(np.float16, 8192, 0.0, AccumulatorPrecision(24, 23, 8), None)


@pytest.mark.parametrize("low", [-1.0, 0.0])
@pytest.mark.parametrize("k", [32, 512, 4096])
def test_promoted_float8_accumulations_stay_within_bounds(k: int, low: float) -> None:
    assert verdict(ml_dtypes.float8_e4m3fn, k, low, SHORT, SHORT)


def test_float8_accumulators_are_not_float32() -> None:
    """Not even of one instruction: why allow_tf32 must be given."""
    assert not verdict(ml_dtypes.float8_e4m3fn, 32, -1.0, SHORT, None)
    assert not verdict(ml_dtypes.float8_e4m3fn, 512, -1.0, SHORT, AccumulatorPrecision(25, 23, 16))


def test_unpromoted_float8_accumulators_are_wrong() -> None:
    assert not verdict(ml_dtypes.float8_e4m3fn, 2048, 0.0, replace(SHORT, promotion_interval=None), SHORT)
