"""Convolutions on a CPU: staged patches match the interpreter for all strides, paddings and tails."""

from __future__ import annotations

import re

import pytest
from sampling import every, slow

from roller_svc import hardware
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.rank import rank_units
from roller_svc.families.cpu.convolution.convolution_view import convolution_spaces
from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import AxisRole
from roller_svc.ir.program import TensorType
from roller_svc.ir.report import Plan
from roller_svc.runtime.cpu import CpuModule
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate
from roller_svc.toolchain import compile_source

F32 = DType.FLOAT32
PADDED = ".when([ho + kh - 1 >= 0, ho + kh - 1 < 9, wo + kw - 1 >= 0, wo + kw - 1 < 11], 0.0)"
CASES: dict[str, tuple[str, dict[str, tuple[int, ...]], DType]] = {
    "3x3": ("y[n, f, ho, wo] +=! x[n, c, ho + kh, wo + kw] * w[f, c, kh, kw] where ho in 7, wo in 19",
            {"x": (2, 3, 9, 21), "w": (20, 3, 3, 3)}, F32),
    "padded": (f"y[n, f, ho, wo] +=! x[n, c, ho + kh - 1, wo + kw - 1]{PADDED} * w[f, c, kh, kw]"
    " where ho in 9, wo in 11",
               {"x": (2, 5, 9, 11), "w": (17, 5, 3, 3)}, F32),
    "strided": ("y[n, f, ho, wo] +=! x[n, c, ho * 2 + kh, wo * 3 + kw] * w[f, c, kh, kw] where ho in 5, wo in 7",
                {"x": (1, 6, 12, 23), "w": (16, 6, 3, 5)}, F32),
    "dilated": ("y[n, f, ho, wo] +=! x[n, c, ho + kh * 2, wo + kw * 3] * w[f, c, kh, kw] where ho in 5, wo in 7",
                {"x": (2, 4, 9, 13), "w": (9, 4, 3, 3)}, F32),
    "both even": ("y[n, f, ho, wo] +=! x[n, c, ho * 2 + kh * 2, wo * 4 + kw * 2] * w[f, c, kh, kw]"
                  " where ho in 5, wo in 5",
                  {"x": (1, 4, 13, 21), "w": (8, 4, 3, 3)}, F32),
    "strided, channels last to planes": (
        "y[n, f, ho, wo] +=! x[n, ho * 2 + kh, wo * 2 + kw, c] * w[f, c, kh, kw] where ho in 8, wo in 8",
        {"x": (2, 19, 19, 24), "w": (8, 24, 5, 5)}, F32,
    ),
    "strided, reflected": ("y[n, f, ho, wo] +=! x[n, c, 7 - abs(7 - abs(ho * 2 + kh - 1)), 7 - abs(7 - abs(wo * 3 + kw "
                           "- 1))] * w[f, c, kh, kw] where ho in 6, wo in 4", {"x": (2, 4, 8, 8), "w": (9, 4, 3, 3)},
                           F32),
    "1x1": ("y[n, f, a, b] +=! x[n, c, a, b] * v[f, c]", {"x": (3, 8, 5, 7), "v": (24, 8)}, F32),
    "GEMM of 7x7 pixels": ("y[n, f, a, b] +=! v[f, c] * x[n, c, a, b]", {"v": (40, 12), "x": (1, 12, 7, 7)}, F32),
    "batched GEMM": ("y[b, m, n] +=! x[b, m, k] * w[b, k, n]", {"x": (3, 21, 9), "w": (3, 9, 10)}, F32),
    "1x1 strided": ("y[n, f, ho, wo] +=! x[n, c, ho * 2, wo * 2] * v[f, c] where ho in 4, wo in 5",
                    {"x": (3, 8, 7, 9), "v": (24, 8)}, F32),
    "1x1 padded": ("y[n, f, ho, wo] +=! x[n, c, ho - 1, wo - 3].when([ho - 1 >= 0, ho - 1 < 4, wo - 3 >= 0, "
                   "wo - 3 < 37], 0.0) * v[f, c] where ho in 6, wo in 45", {"x": (2, 5, 4, 37), "v": (19, 5)}, F32),
    "1x1 padded beyond": ("y[n, f, ho, wo] +=! x[n, c, ho, wo - 4].when([wo - 4 >= 0, wo - 4 < 3], 0.0) * v[f, c] "
                          "where ho in 3, wo in 11", {"x": (2, 5, 3, 3), "v": (19, 5)}, F32),
    "one channel": ("y[n, f, ho, wo] +=! x[n, ho * 2 + kh, wo * 2 + kw] * w[f, kh, kw] where ho in 6, wo in 33",
                    {"x": (2, 15, 70), "w": (10, 5, 4)}, F32),
    "grouped": ("y[n, g, f, ho, wo] +=! x[n, g, c, ho + kh, wo + kw] * w[g, f, c, kh, kw] where ho in 6, wo in 6",
                {"x": (2, 3, 4, 8, 8), "w": (3, 8, 4, 3, 3)}, F32),
    "grouped, channels last": ("y[n, ho, wo, g, f] +=! x[n, ho + kh, wo + kw, g, c] * w[g, f, c, kh, kw] "
                               "where ho in 6, wo in 6", {"x": (2, 8, 8, 3, 4), "w": (3, 8, 4, 3, 3)}, F32),
    "channels last": ("y[n, ho, wo, f] +=! x[n, ho + kh - 1, wo + kw - 1, c].when([ho + kh - 1 >= 0, ho + kh - 1 < 6, "
                      "wo + kw - 1 >= 0, wo + kw - 1 < 7], 0.0) * w[kh, kw, c, f] where ho in 6, wo in 7",
                      {"x": (2, 6, 7, 5), "w": (3, 3, 5, 21)}, F32),
    "one dimension": ("y[n, f, o] +=! x[n, c, o + k - 2].when([o + k - 2 >= 0, o + k - 2 < 40], 0.0) * w[f, c, k] "
                      "where o in 40", {"x": (2, 4, 40), "w": (12, 4, 5)}, F32),
    "three dimensions": ("y[n, f, a, b, d] +=! x[n, c, a + p, b + q, d + r] * w[f, c, p, q, r] where a in 3, b in 4, "
                         "d in 5", {"x": (2, 3, 5, 6, 7), "w": (8, 3, 3, 3, 3)}, F32),
    "taps of conditions alone": (
        "y[n, f, ho, wo] +=! x[n, c, ho, wo + kw] * const(2.0).when([ho * 3 + kh > 4], 0.5) * w[f, c, kh, kw] "
        "where wo in 9", {"x": (2, 4, 6, 11), "w": (8, 4, 3, 3)}, F32),
    "no image at all": (
        "y[e, v, f, c] +=! w[c, f, kh, kw] * const(1.0).when([e * 3 + kh == 0], 0.5) * "
        "const(1.0).when([v * 3 + kw == 0], 0.5) where e in 4, v in 4", {"w": (16, 8, 3, 3)}, F32),
    "one position, guarded taps as channels": (
        "y[f, ho, wo] +=! x[c, ho + kh - 1, wo * 2 + kw].when([ho + kh - 1 >= 0, wo * 2 + kw < 2], 0.0) * "
        "w[f, c, kh, kw] where ho in 18, wo in 1",
        {"x": (4, 19, 2), "w": (4, 4, 3, 3)}, F32,
    ),
    "fused channels and taps": ("y[n, f, ho, wo] +=! x[n, ck // 9, ho + ck % 9 // 3, wo + ck % 9 % 3] * w[f, ck] "
                                "where ho in 6, wo in 9", {"x": (2, 4, 8, 11), "w": (20, 36)}, F32),
    "float64": ("y[n, f, ho, wo] +=! x[n, c, ho + kh, wo + kw] * w[f, c, kh, kw] where ho in 6, wo in 9",
                {"x": (2, 3, 8, 11), "w": (8, 3, 3, 3)}, DType.FLOAT64),
    "float16": ("y[n, f, ho, wo] +=! x[n, c, ho + kh, wo + kw] * w[f, c, kh, kw] where ho in 6, wo in 9",
                {"x": (2, 3, 8, 11), "w": (8, 3, 3, 3)}, DType.FLOAT16),
    "int32": ("y[n, f, ho, wo] +=! x[n, c, ho + kh, wo + kw] * w[f, c, kh, kw] where ho in 6, wo in 9",
              {"x": (2, 3, 8, 11), "w": (8, 3, 3, 3)}, DType.INT32),
    "epilogue": ("s[n, f, ho, wo] +=! x[n, c, ho + kh, wo + kw] * w[f, c, kh, kw] where ho in 6, wo in 18; "
                 "y[n, f, ho, wo] = (s[n, f, ho, wo] + b[f]).call(`max`, [0.0]) + r[n, f, ho, wo]",
                 {"x": (2, 3, 8, 20), "w": (18, 3, 3, 3), "b": (18,), "r": (2, 18, 6, 18)}, F32),
    "activated image": ("z[n, c, a, b] = (x[n, c, a, b]).call(`max`, [0.0]); "
                        "y[n, f, ho, wo] +=! z[n, c, ho + kh, wo + kw] * w[f, c, kh, kw] where ho in 6, wo in 6",
                        {"x": (2, 3, 8, 8), "w": (8, 3, 3, 3)}, F32),
}  # fmt: skip


@pytest.mark.parametrize("target", ["local", slow("cpu-x86-avx2")])
@pytest.mark.parametrize("name", every(2, CASES))
def test_kernels_match_the_interpreter(name: str, target: str) -> None:
    text, shapes, dtype = CASES[name]
    program = parse(text, {n: TensorType(dtype, shape) for n, shape in shapes.items()}, ("y",))
    hw = hardware.load(target)
    groups = partition(program, hw)
    (group,) = groups
    unit = hw.unit_for(group.space.compute_dtype)
    arrays = random_inputs(program, seed=1)
    wanted = evaluate(program, arrays)
    spaces = convolution_spaces(group, unit.shape[-1])
    assert spaces, "the program is not seen as a convolution"
    ranked, _ = rank_units(group, hw, 200)
    for space in spaces:
        tiles = [c for c in ranked if c.program.space == space]
        assert tiles, f"no tiles with vectors along {space.vector_axis}"
        assert unit is tiles[0].program.unit
        for candidate in (tiles[0], tiles[-1]):
            source = emit_plan(Plan((candidate,)), program, groups, hw)
            got = CpuModule(compile_source(source)).run(arrays)
            assert agrees(program, got, wanted).ok, candidate.program


@pytest.mark.parametrize(("columns", "views"), [(49, 1), (196, 0), (1024, 0)])
def test_gemm_has_vectors_along_rows_if_columns_waste_lanes(columns: int, views: int) -> None:
    program = parse("y[m, n] +=! x[m, k] * w[k, n]", {"x": TensorType(F32, (96, 32)), "w": TensorType(F32, (32, columns))}, ("y",))
    (group,) = partition(program, hardware.load("cpu-x86-avx512"))
    spaces = convolution_spaces(group, 16)
    assert [space.vector_axis for space in spaces] == ["m"] * views


@pytest.mark.parametrize("target", ["cpu-x86-avx2", "cpu-x86-avx512"])
def test_image_is_the_operand_in_which_a_window_slides(target: str) -> None:
    """Few filters that waste lanes do not make an image of the weights."""
    text, shapes, dtype = CASES["grouped, channels last"]
    program = parse(text, {n: TensorType(dtype, shape) for n, shape in shapes.items()}, ("y",))
    hw = hardware.load(target)
    (group,) = partition(program, hw)
    (space,) = convolution_spaces(group, hw.unit_for(dtype).shape[-1])
    assert [axis.extent for axis in space.role(AxisRole.TAP)] == [9]
    assert [axis.name for axis in space.role(AxisRole.PIXEL)] == ["n", "ho", "wo"]


@pytest.mark.parametrize(("taps", "stride"), [(3, 1), (5, 2)])
def test_pixel_vectors_are_single_loads(taps: int, stride: int) -> None:
    """Contiguous output positions of a register tile are vector loads.

    With stride 2, loops over taps that are not unrolled need none element by element either.
    """
    image = f"n, c, {stride} * ho + kh, {stride} * wo + kw"
    text = f"y[n, f, ho, wo] +=! x[{image}] * w[f, c, kh, kw] where ho in 30, wo in 30"
    size = 29 * stride + taps
    shapes = {"x": (4, 3, size, size), "w": (16, 3, taps, taps)}
    program = parse(text, {n: TensorType(F32, shape) for n, shape in shapes.items()}, ("y",))
    hw = hardware.load("cpu-x86-avx2")
    groups = partition(program, hw)
    ranked, _ = rank_units(groups[0], hw, 200)
    rows = [c for c in ranked if c.program.space.vector_axis == "wo" and c.program.thread["ho"] > 1]
    assert rows
    text = emit_plan(Plan((rows[0],)), program, groups, hw).text
    kernel = text[text.index("acc_0_0") : text.index("= acc_0_0;")]
    assert not re.search(r"\)\{\w+\[", kernel)  # (vf32x8){p0[0], p0[1], ...}


def test_weights_are_transposed_one_filter_vector_at_a_time() -> None:
    """Rows of 32 filters, 16 KiB apart, would evict each other from L1 before their next block is read."""
    program = parse(
        "y[n, f, ho, wo] +=! x[n, c, ho + kh, wo + kw] * w[f, c, kh, kw] where ho in 7, wo in 7",
        {"x": TensorType(F32, (1, 512, 9, 9)), "w": TensorType(F32, (512, 512, 3, 3))},
        ("y",),
    )
    hw = hardware.load("cpu-x86-avx512")
    groups = partition(program, hw)
    ranked, _ = rank_units(groups[0], hw, 200)
    filters = [c for c in ranked if c.program.space.vector_axis == "f" and c.program.thread["f"] == 32]
    text = emit_plan(Plan((filters[0],)), program, groups, hw).text
    transposes = text[: text.index("(&weights[")].splitlines()[-4:]
    loops = re.findall(r"for \(long (\w+)", "".join(transposes))
    assert loops[-2:] == ["vector", "block"]


def test_few_register_tiles_are_tried_for_any_image() -> None:
    """Their number follows from the registers, not from the image: 2^36 positions take no longer than 2^10."""
    text = "y[b, f, x] +=! i[b, c, x + r] * w[f, c, r] where x in {}"
    tried = []
    for extent in (1 << 10, 1 << 36):
        types = {"i": TensorType(F32, (1, 16, extent + 2)), "w": TensorType(F32, (32, 16, 3))}
        hw = hardware.load("cpu-x86-avx512")
        groups = partition(parse(text.format(extent), types), hw)
        candidates, _ = rank_units(groups[0], hw, 4)
        tried.append(len(candidates))
    assert min(tried) >= 4
