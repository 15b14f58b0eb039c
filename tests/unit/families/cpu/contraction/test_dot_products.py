"""Contractions of bytes and bfloat16 by dot-product instructions: support, VNNI packing, results."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from dot_specs import DOTS, PAIRS_SPEC, VEX_SPEC, machine, runs, runs_bytes, spec_with
from sampling import every

from roller_svc import hardware
from roller_svc.compiler.lower_and_emit import emit_plan, lower
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.rank import rank
from roller_svc.families import model_of
from roller_svc.families.common.cpu.dot import DotOperands, cast_element, dot_operands
from roller_svc.families.matching import units_for
from roller_svc.frontend.lang import parse
from roller_svc.hardware.detect import adapt_to_machine
from roller_svc.ir.constraints import NO_CONSTRAINTS
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import Candidate
from roller_svc.ir.expr import Cast, Load
from roller_svc.ir.group import AxisRole, KernelGroup
from roller_svc.ir.hardware import UnitKind
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import RProgram, RTile
from roller_svc.ir.schedule import Storage, Transpose, iter_nodes
from roller_svc.runtime.cpu import CpuModule
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.interpreter import evaluate
from roller_svc.toolchain import compile_source

Tiles = tuple[int, int, int, int, int]  # mr, nr, mc, nc, kc
Arrays = dict[str, np.ndarray]
SPEC = spec_with(DOTS)
UNITS = {unit.name: unit for unit in (*PAIRS_SPEC.units, *SPEC.units)}
SPECS = {"dot_i16": PAIRS_SPEC}  # of units that SPEC does not have
INSTRUCTIONS = {"dot_i8": "vpdpbusd ", "dot_bf16": "vdpbf16ps ", "dot_i16": "pmaddwd256"}


def program_of(text: str, **inputs: tuple[str, tuple[int, ...]]) -> TensorProgram:
    return parse(text, {name: TensorType(DType(dtype), shape) for name, (dtype, shape) in inputs.items()})


def product_of(extents: tuple[int, int, int], types: tuple[str, str], layout: str = "mk kn") -> TensorProgram:
    size = dict(zip("mnk", extents, strict=True))
    sums = "float32" if "bfloat16" in types else "int32"
    (a, b) = layout.split()
    text = f"C[m, n] +=! A[{a[0]}, {a[1]}].cast(`{sums}`) * B[{b[0]}, {b[1]}].cast(`{sums}`)"
    shapes = [tuple(size[x] for x in layout_) for layout_ in (a, b)]
    return program_of(text, A=(types[0], shapes[0]), B=(types[1], shapes[1]))


def group_of(program: TensorProgram) -> KernelGroup:
    (group,) = partition(program, SPEC)
    return group


def dot_of(program: TensorProgram, unit: str = "dot_i8") -> DotOperands | None:
    return dot_operands(UNITS[unit], group_of(program))


def all_values(program: TensorProgram) -> Arrays:
    """Bytes of all values, bfloat16 of either sign and a few sizes."""
    rng = np.random.default_rng(1)
    arrays: Arrays = {}
    for name, type_ in program.inputs:
        if type_.dtype.is_float:
            values = rng.standard_normal(type_.shape).astype(np.float32)
            arrays[name] = values.astype(ml_dtypes.bfloat16) if type_.dtype is DType.BFLOAT16 else values
        else:
            least, greatest = type_.dtype.integer_range
            arrays[name] = rng.integers(least, greatest + 1, type_.shape).astype(type_.dtype.value)
    return arrays


def tiled(group: KernelGroup, unit: str, tiles: Tiles) -> RProgram:
    mr, nr, mc, nc, kc = tiles
    sizes = {AxisRole.M: (mr, mc), AxisRole.N: (nr, nc), AxisRole.K: (1, kc), AxisRole.BATCH: (1, 1)}
    thread = tuple((axis.name, sizes[axis.role][0]) for axis in group.space.axes)
    block = tuple((axis.name, sizes[axis.role][1]) for axis in group.space.axes)
    return RProgram(group.space, UNITS[unit], RTile(block), RTile(thread))


def run(program: TensorProgram, unit: str, arrays: Arrays, tiles: Tiles | None = None) -> Arrays:
    """The results in those tiles; None: the first that the model has for the unit."""
    group, spec = group_of(program), SPECS.get(unit, SPEC)
    if tiles is None:
        candidate = rank(group, spec, UNITS[unit], 1)[0][0]
    else:
        chosen = tiled(group, unit, tiles)
        candidate = Candidate(chosen, model_of(group, chosen, spec).estimate(chosen))
    source = emit_plan(Plan((candidate,)), program, (group,), spec)
    assert INSTRUCTIONS[unit] in source.text
    return CpuModule(compile_source(source)).run(arrays)


def check(program: TensorProgram, unit: str, arrays: Arrays | None = None, tiles: Tiles | None = None) -> None:
    """Integers to the last bit, floats within the reference's bounds."""
    arrays = all_values(program) if arrays is None else arrays
    agreement = agrees(program, run(program, unit, arrays, tiles), evaluate(program, arrays))
    assert agreement.ok, str(agreement)


# which units there are ------------------------------------------------------------------------------------------------


def test_units_follow_from_the_flags_of_the_cpu() -> None:
    fma, bytes_, halves = (UNITS[name] for name in ("vector_f32", "dot_i8", "dot_bf16"))
    assert (bytes_.kind, bytes_.shape, bytes_.k_group) == (UnitKind.DOT, (4, 16), 4)
    assert (halves.kind, halves.shape, halves.k_group) == (UnitKind.DOT, (2, 16), 2)
    assert (bytes_.flops_per_s, halves.flops_per_s) == (4 * fma.flops_per_s, 2 * fma.flops_per_s)
    assert [unit.kind for unit in spec_with(frozenset()).units] == [UnitKind.VECTOR] * 4
    assert [u.name for u in spec_with(frozenset({"avx512_vnni"})).units if u.kind is UnitKind.DOT] == ["dot_i8"]


@pytest.mark.parametrize(
    ("flags", "shapes"),
    [
        ({"avx", "avx2", "fma", "avx_vnni"}, {"dot_i16": (2, 8), "dot_i8": (4, 8)}),
        ({"avx", "avx2", "fma"}, {"dot_i16": (2, 8)}),
        ({"sse4_2"}, {"dot_i16": (2, 4)}),
    ],
)
def test_narrow_vectors_multiply_pairs(flags: set[str], shapes: dict[str, tuple[int, int]]) -> None:
    narrow = adapt_to_machine(PAIRS_SPEC, machine(frozenset(flags)))
    dots = {unit.name: unit for unit in narrow.units if unit.kind is UnitKind.DOT}
    assert {name: unit.shape for name, unit in dots.items()} == shapes
    ratio = UNITS["dot_i16"].flops_per_s / PAIRS_SPEC.unit_for(DType.FLOAT32).flops_per_s
    assert dots["dot_i16"].flops_per_s == pytest.approx(ratio * narrow.unit_for(DType.FLOAT32).flops_per_s)


@runs_bytes
def test_avx_vnni_has_the_instruction_in_its_own_encoding() -> None:
    """Its text is compiled; with the encoding of AVX-512, which has the same operation, it runs."""
    program = product_of((21, 40, 71), ("uint8", "int8"))
    (group,) = partition(program, VEX_SPEC)
    unit = next(unit for unit in VEX_SPEC.units if unit.name == "dot_i8")
    source = emit_plan(Plan((rank(group, VEX_SPEC, unit, 1)[0][0],)), program, (group,), VEX_SPEC)
    assert "%{vex%} vpdpbusd " in source.text
    assert "-mavxvnni" in source.options
    compile_source(source)
    options = tuple(option for option in source.options if option != "-mavxvnni")
    wide = replace(source, text=source.text.replace("%{vex%} vpdpbusd", "vpdpbusd"), options=options)
    arrays = all_values(program)
    assert agrees(program, CpuModule(compile_source(wide)).run(arrays), evaluate(program, arrays)).ok


def test_a_spec_with_such_units_is_read_as_it_was_written() -> None:
    assert hardware.from_mapping(hardware.to_mapping(SPEC)) == SPEC


def test_vector_unit_has_no_dot_operands() -> None:
    assert SPEC.unit_for(DType.BFLOAT16).name == "vector_f32"
    assert SPEC.unit_for(DType.INT32).name == "vector_i32"


# which contractions they take -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("types", "flips_a", "a_is_first"),
    [
        (("int8", "int8"), True, True),
        (("uint8", "int8"), False, True),
        (("int8", "uint8"), False, False),
        (("uint8", "uint8"), True, False),
        (("bool", "int8"), False, True),
    ],
)
def test_one_operand_is_unsigned_and_one_signed(types: tuple[str, str], flips_a: bool, a_is_first: bool) -> None:
    found = dot_of(product_of((8, 16, 8), types))
    assert found is not None
    assert (found.flips_sign_of_a, found.a_is_first) == (flips_a, a_is_first)


def test_unsupported_dot_product_operands() -> None:
    sixteen = product_of((8, 16, 8), ("int16", "int8"))
    singles = product_of((8, 16, 8), ("float32", "bfloat16"))
    # computed in float32, and not rounded before it is multiplied
    sums = program_of("C[m, n] +=! (A[m, k] + A[m, k]) * B[k, n]", A=("bfloat16", (8, 8)), B=("bfloat16", (8, 16)))
    assert dot_of(sixteen) is None
    for program in (singles, sums):
        assert dot_of(program, "dot_bf16") is None
    rounded = "C[m, n] +=! (A[m, k] + A[m, k]).cast(`bfloat16`) * B[k, n]"
    halves = program_of(rounded, A=("bfloat16", (8, 8)), B=("bfloat16", (8, 16)))
    assert dot_of(halves, "dot_bf16") is not None


def test_bytes_are_packed_as_bfloat16_for_float_accumulators() -> None:
    assert dot_of(product_of((8, 16, 8), ("bfloat16", "int8")), "dot_bf16") == DotOperands(2, DType.BFLOAT16, DType.BFLOAT16)


def test_vector_unit_stays_a_candidate() -> None:
    taken = units_for(group_of(product_of((64, 64, 64), ("int8", "int8"))), SPEC, NO_CONSTRAINTS).units
    assert [unit.name for unit in taken] == ["dot_i8", "vector_i32"]
    floats = units_for(
        group_of(program_of("C[m, n] +=! A[m, k] * B[k, n]", A=("float32", (8, 8)), B=("float32", (8, 8)))), SPEC, NO_CONSTRAINTS
    ).units
    assert [unit.name for unit in floats] == ["vector_f32"]


def test_cast_element_skips_wider_types() -> None:
    byte = Load("x", (), DType.INT8)
    assert cast_element(Cast(byte, DType.INT32), DType.INT8) == byte
    wrapped = Cast(byte, DType.UINT8)  # -1 becomes 255
    assert cast_element(Cast(wrapped, DType.FLOAT32), DType.BFLOAT16) == Cast(wrapped, DType.BFLOAT16, implicit=True)


# how they are packed --------------------------------------------------------------------------------------------------


def storages(program: TensorProgram, tiles: Tiles) -> dict[str, tuple[int, ...]]:
    group = group_of(program)
    nodes = lower(group, tiled(group, "dot_i8", tiles), SPEC)[0].body
    return {node.tensor: node.shape for node in iter_nodes(nodes) if isinstance(node, Storage)}


def test_k_is_counted_in_words() -> None:
    found = storages(product_of((12, 32, 70), ("int8", "int8")), (6, 16, 12, 32, 70))
    assert found[".b_packed"] == (2, 18, 16)
    assert found[".b_flipped"] == (2, 16)
    assert ".b_flipped" not in storages(product_of((12, 32, 70), ("uint8", "int8")), (6, 16, 12, 32, 70))


@pytest.mark.parametrize(("depth", "transposed"), [(128, 2), (126, 0)])
def test_contiguous_words_are_transposed_directly(depth: int, transposed: int) -> None:
    """Rows of 126 bytes do not begin at whole words."""
    group = group_of(product_of((12, 32, depth), ("uint8", "int8"), "mk nk"))
    nodes = lower(group, tiled(group, "dot_i8", (6, 16, 12, 32, depth)), SPEC)[0].body
    found = [node for node in iter_nodes(nodes) if isinstance(node, Transpose)]
    assert len(found) == transposed
    assert all(node.dtype is DType.INT32 for node in found)


def test_sources_use_no_saturating_instruction() -> None:
    program = product_of((64, 64, 64), ("int8", "int8"))
    plan = Plan((rank(group_of(program), SPEC, UNITS["dot_i8"], 1)[0][0],))
    text = emit_plan(plan, program, (group_of(program),), SPEC).text
    assert re.findall(r"vpdpbusds?", text) == ["vpdpbusd"]


@pytest.mark.parametrize(("depth", "at_once"), [(126, True), (128, False)])
def test_adjacent_elements_are_one_load(depth: int, at_once: bool) -> None:
    """Words may begin anywhere, but B must be contiguous along k."""
    program = product_of((64, 64, depth), ("uint8", "int8"), "mk kn" if at_once else "km kn")
    plan = Plan((rank(group_of(program), SPEC, UNITS["dot_i8"], 1)[0][0],))
    text = emit_plan(plan, program, (group_of(program),), SPEC).text
    assert ("word_at(p1 + " in text) == at_once


# what comes out -------------------------------------------------------------------------------------------------------

BYTES = list(product(("int8", "uint8"), repeat=2))


@runs
@pytest.mark.parametrize(("types", "layout"), every(3, product(BYTES, ["mk kn", "mk nk", "km kn", "km nk"])))
def test_bytes_are_exact_in_every_layout(types: tuple[str, str], layout: str) -> None:
    """Every edge is ragged: rows, columns, the last step and its last word."""
    check(product_of((37, 45, 139), types, layout), "dot_i8", tiles=(5, 32, 20, 64, 72))
    check(product_of((37, 45, 140), types, layout), "dot_i8", tiles=(9, 48, 18, 48, 140))


@pytest.mark.parametrize(("types", "layout"), every(3, product([*BYTES, ("int16", "int8")], ["mk kn", "mk nk", "km kn", "km nk"])))
def test_pairs_are_exact_in_every_layout(types: tuple[str, str], layout: str) -> None:
    """Bytes of either sign are int16, and int16 themselves wrap as int32."""
    check(product_of((37, 45, 139), types, layout), "dot_i16", tiles=(5, 16, 20, 64, 72))
    check(product_of((37, 45, 140), types, layout), "dot_i16", tiles=(6, 16, 18, 48, 140))


@pytest.mark.parametrize("types", [*BYTES, ("int16", "int16")])
def test_sums_of_pairs_wrap(types: tuple[str, str]) -> None:
    """The two products of a pair of the least int16 add up to 2^31."""
    program = product_of((4, 16, 140_001), types)
    largest = {"int8": -128, "uint8": 255, "int16": -(1 << 15)}
    arrays = {name: np.full(type_.shape, largest[type_.dtype.value], type_.dtype.value) for name, type_ in program.inputs}
    check(program, "dot_i16", arrays)


@pytest.mark.parametrize("unit", [pytest.param("dot_i8", marks=runs), "dot_i16"])
@pytest.mark.parametrize(
    ("text", "inputs"),
    [
        ("C[b, m, n] +=! A[b, m, k].cast(`int32`) * B[b, n, k].cast(`int32`)",
         {"A": ("int8", (3, 10, 68)), "B": ("int8", (3, 33, 68))}),
        ("C[m, n] +=! A[m + k - 2].when([m + k >= 2, m + k < 42], const(0).cast(`int8`)).cast(`int32`) *"
         " B[k, n].cast(`int32`) where m in 40", {"A": ("int8", (40,)), "B": ("uint8", (5, 20))}),
        ("C[m, n] +=! A[at[m], k].cast(`int32`) * B[k, n].cast(`int32`)",
         {"A": ("uint8", (256, 9)), "B": ("int8", (9, 20)), "at": ("uint8", (13,))}),
        ("C[m, n] +=! A[m, i, j].cast(`int32`) * B[j, n, i].cast(`int32`)",
         {"A": ("int8", (7, 5, 6)), "B": ("int8", (6, 20, 5))}),
        ("s[m, n] +=! A[m, k].cast(`int32`) * B[n, k].cast(`int32`); Y[m, n] = (s[m, n].cast(`float32`) * scale[n]"
         " + bias[n]).call(`relu`)",
         {"A": ("int8", (21, 72)), "B": ("int8", (50, 72)), "scale": ("float32", (50,)), "bias": ("float32", (50,))}),
        ("C[m, n] +=! A[m, k].cast(`uint8`).cast(`int32`) * B[n, k].cast(`int32`)",
         {"A": ("int8", (9, 70)), "B": ("int8", (50, 70))}),
    ],
)  # fmt: skip
def test_batches_epilogues_guards_and_tables(unit: str, text: str, inputs: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    check(program_of(text, **inputs), unit)


@runs
@pytest.mark.parametrize("layout", ["mk kn", "mk nk", "km kn", "km nk"])
def test_bfloat16_is_within_bounds_in_every_layout(layout: str) -> None:
    types = ("bfloat16", "bfloat16")
    check(product_of((37, 45, 139), types, layout), "dot_bf16", tiles=(5, 32, 20, 64, 72))
    check(product_of((37, 45, 140), types, layout), "dot_bf16", tiles=(9, 48, 18, 48, 140))


@runs
@pytest.mark.parametrize("depth", [4, 5, 6, 7])
def test_short_sums(depth: int) -> None:
    for types in BYTES:
        check(product_of((9, 17, depth), types), "dot_i8", tiles=(2, 16, 10, 32, depth))
    check(product_of((9, 17, depth), ("uint8", "int8")), "dot_i16", tiles=(2, 16, 10, 32, depth))
    check(product_of((9, 17, depth), ("bfloat16", "bfloat16")), "dot_bf16", tiles=(2, 16, 10, 32, depth))


@runs
@pytest.mark.parametrize("types", BYTES)
def test_sums_wrap(types: tuple[str, str]) -> None:
    """Products of maximal size and equal sign exceed 2^31, unsigned ones 2^32."""
    program = product_of((4, 16, 140_001), types)
    largest = {"int8": -128, "uint8": 255}
    arrays = {name: np.full(type_.shape, largest[type_.dtype.value], type_.dtype.value) for name, type_ in program.inputs}
    assert abs(140_001 * largest[types[0]] * largest[types[1]]) >= 1 << 31
    check(program, "dot_i8", arrays)


@runs
def test_products_of_bytes_that_wrap_as_bytes() -> None:
    program = program_of("C[m, n] +=! A[m, k] * B[k, n]", A=("int8", (9, 30)), B=("int8", (30, 20)))
    check(program, "dot_i8")


@runs
@pytest.mark.parametrize("constants", ["A", "B", "AB"])
def test_constant_words_and_compensation_are_prepacked(constants: str) -> None:
    program = replace(product_of((20, 50, 72), ("int8", "int8"), "mk nk"), constants=frozenset(constants))
    group = group_of(program)
    plan = Plan((rank(group, SPEC, UNITS["dot_i8"], 1)[0][0],))
    source = emit_plan(plan, program, (group,), SPEC)
    assert sum(launch.is_prepack for launch in source.launches) == {"A": 1, "B": 2, "AB": 3}[constants]
    arrays = all_values(program)
    agreement = agrees(program, CpuModule(compile_source(source)).run(arrays), evaluate(program, arrays))
    assert agreement.ok, str(agreement)


@runs
def test_infinities_and_nans_go_on_and_subnormals_are_zeros() -> None:
    program = product_of((4, 16, 6), ("bfloat16", "bfloat16"))
    arrays: Arrays = {
        "A": np.ones((4, 6), ml_dtypes.bfloat16), "B": np.ones((6, 16), ml_dtypes.bfloat16),
    }  # fmt: skip
    arrays["A"][0, 1], arrays["A"][1, 2], arrays["A"][2] = np.inf, np.nan, 2.0**-130
    arrays["B"][:, 3] = 2.0**127
    found = run(program, "dot_bf16", arrays)["C"]
    assert np.all(np.isposinf(found[0]))
    assert np.all(np.isnan(found[1]))
    assert not found[2].any()
    np.testing.assert_array_equal(found[3], np.where(np.arange(16) == 3, np.float32(np.inf), np.float32(6)))


def control_register() -> int:
    """MXCSR of this thread, where fenv_t of x86-64 has it, but for the flags of what has happened."""
    environment = ctypes.create_string_buffer(32)
    ctypes.CDLL("libm.so.6").fegetenv(environment)
    return int.from_bytes(environment.raw[28:], "little") & ~0x3F


@runs
def test_the_control_register_stays_as_it_was() -> None:
    program = product_of((4, 16, 6), ("bfloat16", "bfloat16"))
    before = control_register()
    run(program, "dot_bf16", all_values(program))
    assert control_register() == before
