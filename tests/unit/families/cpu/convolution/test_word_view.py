"""Convolutions of bytes on words of channels: exact for all strides, paddings, groups and layouts, on dot-product units."""

from __future__ import annotations

import pytest
from dot_specs import BF16_SPEC, BYTES_SPEC, DOT, PAIRS, PAIRS_SPEC, runs_bytes
from sampling import every

from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.rank import rank_units
from roller_svc.families.common.cpu.dot import dot_operands
from roller_svc.families.cpu.convolution.convolution_view import convolution_spaces
from roller_svc.families.cpu.convolution.word_view import word_spaces
from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import TileSpace
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.report import Plan
from roller_svc.runtime.cpu import CpuModule
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate
from roller_svc.toolchain import compile_source

TAPS = ".cast(`int32`) * w[f, c, kh, kw].cast(`int32`)"
PADDED = ".when([ho + kh - 1 >= 0, ho + kh - 1 < 9, wo + kw - 1 >= 0, wo + kw - 1 < 11], {})"
CASES: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "planes": (f"y[n, f, ho, wo] +=! x[n, c, ho + kh, wo + kw]{TAPS} where ho in 7, wo in 19",
               {"x": (2, 8, 9, 21), "w": (20, 8, 3, 3)}),
    "planes, zero point around": (f"y[n, f, ho, wo] +=! x[n, c, ho + kh - 1, wo + kw - 1]{PADDED.format(117)}{TAPS} "
                                  "where ho in 9, wo in 11", {"x": (1, 12, 9, 11), "w": (17, 12, 3, 3)}),
    "channels last, zero point around": (
        f"y[n, ho, wo, f] +=! x[n, ho + kh - 1, wo + kw - 1, c]{PADDED.format(255)}{TAPS} where ho in 9, wo in 11",
        {"x": (2, 9, 11, 32), "w": (21, 32, 3, 3)}),
    "channels last, strided": (f"y[ho, wo, f] +=! x[2 * ho + kh, 3 * wo + kw, c]{TAPS} where ho in 5, wo in 7",
                               {"x": (12, 23, 16), "w": (16, 16, 3, 5)}),
    "three channels": (f"y[f, ho, wo] +=! x[c, 2 * ho + kh, 2 * wo + kw]{TAPS} where ho in 8, wo in 8",
                       {"x": (3, 19, 19), "w": (24, 3, 5, 5)}),
    "grouped": ("y[n, ho, wo, f] +=! x[n, ho + kh, wo + kw, f // 8 * 4 + c].cast(`int32`) * w[f, c, kh, kw].cast(`int32`) "
                "where ho in 6, wo in 6", {"x": (2, 8, 8, 12), "w": (24, 4, 3, 3)}),
    "dilated, one dimension": ("y[f, o] +=! x[c, o + 3 * k - 3].when([o + 3 * k - 3 >= 0, o + 3 * k - 3 < 40], 3)"
                               ".cast(`int32`) * w[f, c, k].cast(`int32`) where o in 40", {"x": (20, 40), "w": (12, 20, 3)}),
    "quantized image": ("z[c, a, b] = (v[c, a, b] * 9.0).cast(`uint8`); y[f, ho, wo] +=! z[c, ho + kh, wo + kw]"
                        f"{TAPS} where ho in 6, wo in 6", {"v": (8, 8, 8), "w": (8, 8, 3, 3)}),
}  # fmt: skip


def program_of(text: str, shapes: dict[str, tuple[int, ...]], types: dict[str, str] | None = None) -> TensorProgram:
    known = {"x": "uint8", "w": "int8", "v": "float32"} | (types or {})
    return parse(text, {name: TensorType(DType(known[name]), shape) for name, shape in shapes.items()}, ("y",))


def spaces_of(program: TensorProgram, hw: HardwareSpec = BYTES_SPEC) -> tuple[TileSpace, ...]:
    group, unit = partition(program, hw)[-1], DOT if hw is BYTES_SPEC else PAIRS
    return word_spaces(group, unit, convolution_spaces(group, unit.shape[-1]))


def check_kernels(program: TensorProgram, hw: HardwareSpec, instruction: str) -> None:
    """Kernels with vectors along filters and along pixels match the interpreter."""
    groups = partition(program, hw)
    (group,) = groups
    arrays = random_inputs(program, seed=1)
    wanted = evaluate(program, arrays)
    ranked, _ = rank_units(group, hw, 200)
    spaces = spaces_of(program, hw)
    assert spaces, "the program is not seen as a convolution of words"
    for space in spaces:
        tiles = [c for c in ranked if c.program.space == space]
        assert tiles, f"no tiles with vectors along {space.vector_axis}"
        for candidate in (tiles[0], tiles[-1]):
            source = emit_plan(Plan((candidate,)), program, groups, hw)
            assert instruction in source.text
            assert agrees(program, CpuModule(compile_source(source)).run(arrays), wanted).ok, candidate.program


@runs_bytes
@pytest.mark.parametrize("name", every(2, CASES))
def test_kernels_match_the_interpreter(name: str) -> None:
    check_kernels(program_of(*CASES[name]), BYTES_SPEC, "vpdpbusd ")


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("planes, zero point around", {}),
        ("channels last, zero point around", {"w": "uint8"}),
        ("dilated, one dimension", {"x": "int8"}),
        ("quantized image", {}),
    ],
)
def test_pairs_of_channels_match_the_interpreter(name: str, types: dict[str, str]) -> None:
    """Words of two int16 take bytes of any signs, and a negative element around the image."""
    text, shapes = CASES[name]
    check_kernels(program_of(text.replace(", 3)", ", -3)"), shapes, types), PAIRS_SPEC, "pmaddwd256")


def test_words_with_channels_last_are_loaded_in_vectors() -> None:
    program = program_of(*CASES["channels last, zero point around"])
    groups = partition(program, BYTES_SPEC)
    ranked, _ = rank_units(groups[0], BYTES_SPEC, 200)
    candidate = next(c for c in ranked if c.program.space in spaces_of(program))
    text = emit_plan(Plan((candidate,)), program, groups, BYTES_SPEC).text
    stage = text[text.index("void stage") :]
    assert "vu8x32 *" in stage[: stage.index("\n}\n")]


@pytest.mark.parametrize(
    ("text", "shapes", "types"),
    [
        (*CASES["planes"], {"w": "uint8"}),  # instructions multiply unsigned by signed bytes
        (CASES["planes"][0], {"x": (2, 6, 9, 21), "w": (20, 6, 3, 3)}, {}),  # a word and a half
        (CASES["grouped"][0].replace("* 4 + c", "* 2 + c"), {"x": (2, 8, 8, 6), "w": (24, 2, 3, 3)}, {}),  # groups share words
    ],
)
def test_incomplete_words_and_equal_signs_stay(text: str, shapes: dict[str, tuple[int, ...]], types: dict[str, str]) -> None:
    assert spaces_of(program_of(text, shapes, types)) == ()


def test_words_of_other_types_than_sums_stay() -> None:
    """Two bfloat16 share a word, but their sums are float32: the family has buffers of one type."""
    text = CASES["planes"][0].replace("int32", "float32")
    program = program_of(text, CASES["planes"][1], {"x": "bfloat16", "w": "bfloat16"})
    (group,) = partition(program, BF16_SPEC)
    unit = next(unit for unit in BF16_SPEC.units if unit.in_dtype is DType.BFLOAT16)
    assert dot_operands(unit, group) is not None
    assert word_spaces(group, unit, convolution_spaces(group, unit.shape[-1])) == ()


def test_bound_counts_all_products_of_a_word() -> None:
    """A point along k is four products: the estimate is not below what the unit can do."""
    program = program_of(*CASES["planes"])
    (group,) = partition(program, BYTES_SPEC)
    ranked, _ = rank_units(group, BYTES_SPEC, 200)
    best = next(c for c in ranked if c.program.space in spaces_of(program))
    assert best.program.space.word_elements == DOT.k_group
    assert best.estimate.seconds >= program.flops / DOT.flops_per_s
