"""Random contractions, types, epilogues and tiles on matrix units: kernel texts, emulated, against the reference.

Tiles are drawn from all that are legal, not from those that construction would offer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from cases_matrix import chosen, tiles
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from schedule_support import program

from roller_svc import hardware
from roller_svc.analysis.operand import operands, staged_dtype
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.rank import rank
from roller_svc.errors import NoCandidateError
from roller_svc.families.common.gpu.matrix.tile import MMA_SYNC, mma_tile
from roller_svc.families.matching import units_for
from roller_svc.fusion.split.reduction import may_split
from roller_svc.ir.constraints import TILE_FIELDS, OpClass, ScheduleConstraints, tile_value
from roller_svc.ir.group import AxisRole, GroupKind, KernelGroup
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.printer import text
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import RProgram
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate

TYPES = {
    "nvidia-t4": [("float16", "float16"), ("float8_e4m3fn", "float16"), ("int8", "int8"), ("uint8", "int8")],
    "nvidia-a100-sxm-80gb": [
        ("float16", "float16"), ("bfloat16", "bfloat16"), ("int8", "bfloat16"), ("float16", "float8_e5m2"),
        ("float32", "float32"), ("float32", "float16"), ("int8", "uint8"), ("uint8", "uint8"), ("bool", "int8"),
    ],
    "nvidia-rtx4090": [
        ("float8_e4m3fn", "float8_e4m3fn"), ("float8_e5m2", "float8_e4m3fn"), ("float16", "bfloat16"),
        ("bfloat16", "float8_e5m2"),
    ],
    "nvidia-h200-sxm": [("float8_e5m2", "float8_e5m2"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")],
}  # fmt: skip
INTEGERS = ("int8", "uint8", "bool")
ACTIVATIONS = ("relu({})", "gelu({})", "sigmoid({} * 0.5)", "0.5 * {0} * (1.0 + erf({0} * 0.70710678))")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Product:
    """`left` * `right`, summed over what `out` leaves out; `shapes` of A and B, `extents` of the output."""

    out: str
    left: str
    right: str
    shapes: tuple[Shape, Shape]
    extents: Shape
    where: str = ""


extents = st.one_of(st.integers(1, 40), st.sampled_from([8, 16, 24, 32, 64]))
depths = st.one_of(st.integers(4, 70), st.sampled_from([16, 32, 48, 64, 96, 128]))


@st.composite
def matmuls(draw: st.DrawFn) -> Product:
    """All transpositions, perhaps batched, sums over one axis or two."""
    sizes = {"m": draw(extents) + 8, "n": draw(extents) + 8, "k": draw(depths)}
    batch, summed = draw(st.sampled_from(["", "", "b", "bg"])), ["k"]
    sizes |= {axis: draw(st.integers(1, 3)) for axis in batch}
    if draw(st.booleans()):
        sizes |= {"k": draw(st.integers(2, 20)), "l": draw(st.sampled_from([3, 4, 8, 16]))}
        summed = ["k", "l"]
    left = draw(st.one_of(st.just([*batch, "m", *summed]), st.permutations([*batch, "m", *summed])))
    right = draw(st.one_of(st.just([*batch, *summed, "n"]), st.permutations([*batch, *summed, "n"])))
    out = draw(st.one_of(st.just([*batch, "m", "n"]), st.permutations([*batch, "m", "n"])))
    shapes = [tuple(sizes[axis] for axis in order) for order in (left, right, out)]
    return Product(", ".join(out), f"A[{', '.join(left)}]", f"B[{', '.join(right)}]", (shapes[0], shapes[1]), shapes[2])


@st.composite
def convolutions(draw: st.DrawFn) -> Product:
    """Of one to three dimensions, channels first or last, strided, dilated, padded, in groups."""
    rank_ = draw(st.integers(1, 3))
    last, grouped = draw(st.booleans()), draw(st.booleans())
    stride, dilation, pad = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(0, 1))
    n, c, f = draw(st.integers(1, 2)), draw(st.sampled_from([3, 4, 8, 16])), draw(st.sampled_from([8, 12, 16, 40]))
    window = draw(st.integers(1, 3))
    size = draw(st.integers({1: 9, 2: 6, 3: 5}[rank_], {1: 30, 2: 9, 3: 6}[rank_]))
    o = (size + 2 * pad - dilation * (window - 1) - 1) // stride + 1
    places = [f"o{i} * {stride} + r{i} * {dilation} - {pad}" for i in range(rank_)]
    outs, taps = [f"o{i}" for i in range(rank_)], [f"r{i}" for i in range(rank_)]
    g, g_shape = (["g"], (2,)) if grouped else ([], ())
    x = ["n", *g, *places, "c"] if last else ["n", *g, "c", *places]
    x_shape = (n, *g_shape, *(size,) * rank_, c) if last else (n, *g_shape, c, *(size,) * rank_)
    w, w_shape = (
        ([*g, *taps, "c", "f"], (*g_shape, *(window,) * rank_, c, f))
        if last
        else ([*g, "f", "c", *taps], (*g_shape, f, c, *(window,) * rank_))
    )
    out = ["n", *g, *outs, "f"] if last else ["n", *g, "f", *outs]
    extents = (n, *g_shape, *(o,) * rank_, f) if last else (n, *g_shape, f, *(o,) * rank_)
    inside = ", ".join(f"{place} >= 0, {place} < {size}" for place in places)
    guard = f".when([{inside}], const(0).cast(ZERO))" if pad else ""
    where = f" where {', '.join(f'{axis} in {o}' for axis in outs)}"
    left, right = f"A[{', '.join(x)}]{guard}", f"B[{', '.join(w)}]"
    return Product(", ".join(out), left, right, (x_shape, w_shape), extents, where)


@st.composite
def programs(draw: st.DrawFn, types: tuple[str, str]) -> TensorProgram:
    """A product and its epilogue."""
    product = draw(st.one_of(matmuls(), convolutions()))
    of_integers = all(dtype in INTEGERS for dtype in types)
    sums = "int32" if of_integers else "float32"
    inputs = {name: " ".join(map(str, (dtype, *shape))) for name, dtype, shape in zip("AB", types, product.shapes, strict=True)}
    left = product.left.replace("ZERO", f"`{types[0]}`")
    # without casts the sums are of the operands' type in memory
    plain = types[0] == types[1] and types[0] in ("float16", "bfloat16", "float32") and draw(st.booleans())
    cast = "" if plain else f".cast(`{sums}`)"
    stored = types[0] if plain else sums
    right = product.right
    computed = draw(st.sampled_from(["", "", "", "left", "right"]))  # a producer that is part of the load
    left, right = (f"max({f}, 0)" if side == computed else f for side, f in (("left", left), ("right", right)))
    source = f"C[{product.out}] +=! {left}{cast} * {right}{cast}{product.where}"
    value, outputs = f"C[{product.out}]", []
    for step in range(draw(st.sampled_from([0, 1, 1, 2]))):
        kind = draw(st.sampled_from(["bias", "residual", "activation", "scale", "two outputs"]))
        if kind == "bias":
            axis = draw(st.sampled_from(product.out.split(", ")))
            inputs[f"bias{step}"] = f"{stored} {product.extents[product.out.split(', ').index(axis)]}"
            value = f"({value} + bias{step}[{axis}])"
        elif kind == "residual":
            inputs["res"] = " ".join(map(str, (stored, *product.extents)))
            value = f"({value} + res[{product.out}])"
        elif kind == "activation":
            value = f"max({value}, 0)" if of_integers else draw(st.sampled_from(ACTIVATIONS)).format(value)
        elif kind == "scale":
            value = f"({value} * {3 if of_integers else 0.125})"
        else:
            outputs = ["C"]
    if value != f"C[{product.out}]" or outputs or draw(st.booleans()):
        turned = ", ".join(draw(st.permutations(product.out.split(", ")))) if draw(st.booleans()) else product.out
        source += f"; Y[{turned}] = {value}"
        cast = draw(st.sampled_from(["", "", ".cast(`float16`)", ".cast(`float32`)"]))
        source = f"{source[: -len(value)]}({value}){cast}" if cast else source
        outputs = [*outputs, "Y"]
    elif len(product.out.split(", ")) > 1 and draw(st.booleans()):
        rows = product.out.rpartition(", ")[0]
        body = draw(st.sampled_from([f"C[{product.out}]", f"max(C[{product.out}], 0) * 2"]))
        source += f"; Y[{rows}] {draw(st.sampled_from(['+=!', '>=!', '<=!']))} {body}"
        outputs = draw(st.sampled_from([["Y"], ["C", "Y"]]))
    return program(source, outputs or None, **inputs)


@st.composite
def tilings(draw: st.DrawFn, group: KernelGroup, unit: ComputeUnit, hw: HardwareSpec) -> RProgram:
    """Any tiles of the group that fit the device, its steps split, streamed or neither."""
    (n,), (k,) = (group.space.role(role) for role in (AxisRole.N, AxisRole.K))
    fragments = draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([1, 2, 2, 3, 4]))
    warps = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (4, 1)]))
    warp = (MMA_SYNC.rows * fragments[0], MMA_SYNC.columns * fragments[1])
    block = (warp[0] * warps[0], warp[1] * warps[1])
    assume(block[1] % (2 * MMA_SYNC.columns) == 0 or n.extent <= MMA_SYNC.columns)
    size = max(staged_dtype(unit, operand).bytes for operand in operands(group))
    step = draw(st.sampled_from([1, 1, 2, 4])) * MMA_SYNC.step_bytes // size
    plain = tiles(group, unit, (*block, step), warp, stages=draw(st.integers(2, 5)), raster=draw(st.integers(1, 3)))
    staged = mma_tile(plain, *operands(group))
    assume(staged.shared_bytes <= hw.limits.shared_bytes_per_block)
    if not may_split(group):
        return plain
    way = draw(st.sampled_from(["whole", "split", "stream"]))
    if way == "split" and k.extent >= 2 * step:
        return replace(plain, split_k=draw(st.integers(2, min(4, k.extent // step))))
    if way == "stream":
        return plain.with_pipeline(raster=1, stream_k_blocks=draw(st.integers(1, min(12, plain.grid * plain.steps))))
    return plain


@dataclass(frozen=True, repr=False)
class Case:
    program: TensorProgram
    hw: HardwareSpec
    groups: tuple[KernelGroup, ...]
    plan: Plan
    allow_tf32: bool
    seed: int

    def __repr__(self) -> str:
        found = (c.program for c in self.plan.choices)
        kept = [(p.unit.name, p.block.extents, p.thread.extents, *(tile_value(p, f) for f in TILE_FIELDS)) for p in found]
        types = ", ".join(f"{name}: {type_}" for name, type_ in self.program.inputs)
        return f"{text(self.program)}\n{types}\n{self.hw.id}, seed {self.seed}\n{kept} {tuple(TILE_FIELDS)}"

    def check(self, *, races: bool = False) -> None:
        source = emit_plan(self.plan, self.program, self.groups, self.hw)
        assert "mma.sync" in source.text
        arrays = random_inputs(self.program, self.seed)
        found = load_emulated(CompiledKernel(source, b"", "", ()), self.seed, races=races).run(arrays)
        verdict = agrees(self.program, found, evaluate(self.program, arrays, allow_tf32=self.allow_tf32))
        assert verdict.ok, f"{verdict}\n{source.text}"


@st.composite
def cases(draw: st.DrawFn) -> Case:
    target = draw(st.sampled_from(sorted(TYPES)))
    types = draw(st.sampled_from(TYPES[target]))
    hw, allow_tf32 = hardware.load(target), "float32" in types or "bfloat16" in types
    found = draw(programs(types))
    groups = partition(found, hw)
    assume(any(group.kind is GroupKind.CONTRACTION for group in groups))
    choices = []
    for group in groups:
        if group.kind is GroupKind.CONTRACTION:
            try:
                units = units_for(group, hw, ScheduleConstraints(allow_tf32, OpClass.MMA)).units
            except NoCandidateError:
                assume(False)
            tiling = draw(tilings(group, draw(st.sampled_from(units)), hw))
            choices.append(chosen(tiling))
        else:
            candidates, _ = rank(group, hw, hw.unit_for(group.space.compute_dtype), 1)
            choices.append(candidates[0])
    return Case(found, hw, groups, Plan(tuple(choices)), allow_tf32, draw(st.integers(0, 3)))


@pytest.mark.slow
@pytest.mark.emulator
@given(cases())
@settings(max_examples=10, suppress_health_check=list(HealthCheck))
def test_matrix_kernels_agree_with_the_reference(case: Case) -> None:
    case.check()


@pytest.mark.slow
@pytest.mark.emulator
@given(cases())
@settings(max_examples=200, suppress_health_check=list(HealthCheck))
def test_many_matrix_kernels_agree_with_the_reference(case: Case) -> None:
    """A quarter of them is watched for races."""
    case.check(races=case.seed == 0)
