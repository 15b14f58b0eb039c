"""Constant columns as unsigned integers that dot products of bytes multiply: which operands have them, and values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from dot_specs import DOTS, runs, spec_with

from roller_svc.compiler.lower_and_emit import emit_plan, lower
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import rank_partitions
from roller_svc.families import model_of
from roller_svc.families.common.cpu.dot import dot_operands
from roller_svc.families.cpu.contraction.packed_words import packed_words
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import Candidate
from roller_svc.ir.group import AxisRole, KernelGroup
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import RProgram, RTile
from roller_svc.ir.schedule import Storage, iter_nodes
from roller_svc.runtime.cpu import CpuModule
from roller_svc.toolchain import compile_source

SPEC = spec_with(DOTS)
DOT = next(unit for unit in SPEC.units if unit.name == "dot_i8")
Size = tuple[int, int, int, int]  # rows, columns, depth and points along k with one scale
FIELD = "bitwise_and(w[n, k // 2] >> k % 2 * 4, 15)"
BYTES = "w[n, k]"
TEXT = "y[m, n]: float32 +=! (a[m, k].cast(float32) * sa[m, k // {r}]) * (({b}).cast(float32) * s[n, k // {r}])"


def product(size: Size, b: str = f"{FIELD} - 8", a: DType = DType.INT8) -> TensorProgram:
    rows, columns, depth, run = size
    blocks = -(-depth // run)
    types = {
        "z": TensorType(DType.UINT8, (columns, depth if "z[n, k // 2]" in b else blocks)),
        "a": TensorType(a, (rows, depth)),
        "sa": TensorType(DType.FLOAT32, (rows, blocks)),
        "w": TensorType(DType.INT8, (columns, depth)) if b == BYTES else TensorType(DType.UINT8, (columns, -(-depth // 2))),
        "s": TensorType(DType.FLOAT32, (columns, blocks)),
    }
    used = {name: type_ for name, type_ in types.items() if name != "z" or "z[" in b}
    return replace(parse(TEXT.format(r=run, b=b.format(r=run)), used), constants=tuple(used.keys() & {"w", "s", "z"}))


def scaled_group(program: TensorProgram) -> KernelGroup:
    """Return the group of the first partition with one kernel that scales sums."""
    return next(groups[0] for groups in PartitionCache(program).partitions(SPEC) if groups[0].space.scale_runs is not None)


def bits_of(program: TensorProgram) -> int | None:
    """Return the bits of an integer in panels of few rows; None where signs of the other operand are flipped."""
    group = scaled_group(program)
    assert group.operands is not None
    found = packed_words(group.operands.b, group.space.role(AxisRole.K)[0], dot_operands(DOT, group))
    return None if found is None else found.bits


def panel_shape(program: TensorProgram) -> tuple[int, ...]:
    """Return the shape of the panels of the first plan of dot products."""
    ranked = next(each for each in rank_partitions(PartitionCache(program), SPEC, 1) if each.groups[0].space.scale_runs is not None)
    chosen = ranked.candidates[0][0].program
    assert chosen.unit == DOT
    (tree,) = lower(ranked.groups[0], chosen, SPEC)
    return next(node.shape for node in iter_nodes(tree.body) if isinstance(node, Storage) and node.tensor == ".b_packed")


ZERO = "bitwise_and(z[n, k // {r}].cast(int32), 15)"


@pytest.mark.parametrize(
    "b", [f"{FIELD} - 8", f"{FIELD} + 3", f"({FIELD} - 8).cast(int8)", f"{FIELD} - 111", f"{FIELD} - {ZERO}", f"{FIELD} + {ZERO}"]
)
def test_fields_with_a_number_are_words(b: str) -> None:
    assert bits_of(product((8, 32, 64, 32), b)) == 4


@pytest.mark.parametrize(
    ("size", "b", "a"),
    [
        ((8, 32, 68, 32), f"{FIELD} - 8", DType.INT8),  # half of a word
        ((8, 32, 64, 32), f"{FIELD} - 8", DType.UINT8),  # both operands of an instruction would be unsigned
        ((8, 32, 64, 32), f"{FIELD} - bitwise_and(z[n, k // 2].cast(int32), 15)", DType.INT8),  # numbers of each k
        ((8, 32, 64, 32), "w[n, k // 2].cast(int32) // 16 - 8", DType.INT8),
        ((8, 32, 64, 32), f"({FIELD} + 120).cast(int8)", DType.INT8),  # some of which wrap
    ],
)
def test_other_operands_have_bytes(size: Size, b: str, a: DType) -> None:
    assert bits_of(product(size, b, a)) == (None if a is DType.UINT8 else 8)


def test_rows_of_floats_have_no_sums_of_bytes() -> None:
    """Panels of such sums would have floats: only the other form has panels of 4 bits."""
    partitions = PartitionCache(product((8, 32, 64, 32), a=DType.FLOAT16)).partitions(SPEC)
    assert [groups for groups in partitions if groups[0].space.scale_runs is not None] == []


def test_panels_of_few_rows_have_fields() -> None:
    words = 256 // 8
    assert panel_shape(product((1, 96, 256, 32)))[1] == words
    assert panel_shape(product((8, 96, 256, 32)))[1] == words
    assert panel_shape(product((256, 96, 256, 32)))[1] == 2 * words, "bytes are read by many rows"


@runs
@pytest.mark.parametrize(
    ("size", "tiles", "b"),
    [
        ((1, 100, 1184, 32), (96, 192, 1184), f"{FIELD} - 8"),
        ((3, 33, 96, 16), (16, 48, 96), f"{FIELD} - {ZERO}"),
        ((8, 40, 320, 32), (32, 64, 128), f"{FIELD} + 3"),  # three blocks of k, the last one shorter
        ((8, 40, 320, 32), (32, 64, 128), f"{FIELD} - {ZERO}"),
        ((2, 17, 256, 64), (16, 32, 32), f"{FIELD} - {ZERO}"),  # two blocks of k in each run
        ((4, 20, 80, 32), (32, 32, 80), f"{FIELD} - 8"),  # the last run is shorter
        ((5, 48, 120, 40), (48, 48, 120), BYTES),
        ((3, 20, 92, 16), (16, 48, 48), BYTES),
    ],
    ids=str,
)
def test_results(size: Size, tiles: tuple[int, int, int], b: str) -> None:
    rows, columns, depth, run = size
    program = product(size, b)
    group = scaled_group(program)
    block, (nr, nc, kc) = {}, tiles
    for axis in group.space.axes:
        block[axis.name] = {AxisRole.M: (rows, rows), AxisRole.N: (nr, nc), AxisRole.K: (1, kc)}[axis.role]
    thread, task = (RTile(tuple((name, sizes[i]) for name, sizes in block.items())) for i in (0, 1))
    chosen = RProgram(group.space, DOT, task, thread)
    plan = Plan((Candidate(chosen, model_of(group, chosen, SPEC).estimate(chosen)),))
    random, blocks = np.random.default_rng(0), -(-depth // run)
    arrays = {
        "a": random.integers(-128, 128, (rows, depth)).astype(np.int8),
        "sa": random.standard_normal((rows, blocks), np.float32),
        "w": random.integers(0, 256, (columns, depth // 2)).astype(np.uint8),
        "s": random.standard_normal((columns, blocks), np.float32),
    }
    if b is BYTES:
        arrays["w"] = random.integers(-128, 128, (columns, depth)).astype(np.int8)
    zeros = {f"{FIELD} - 8": np.array(8), f"{FIELD} + 3": np.array(-3), BYTES: np.array(0)}.get(b)
    if zeros is None:
        zeros = arrays["z"] = random.integers(0, 16, (columns, blocks)).astype(np.uint8)
    source = emit_plan(plan, program, (group,), SPEC)
    assert "a_sums" in source.text
    module = CpuModule(compile_source(source))
    (found,) = module.run(arrays).values()
    of_run = np.arange(depth) // run
    fields = arrays["w"] if b is BYTES else np.stack([arrays["w"] & 15, arrays["w"] >> 4], -1).reshape(columns, depth)
    fields = fields.astype(np.int64) - (zeros[:, of_run] if zeros.ndim else zeros).astype(np.int64)
    rounded, weights = (
        arrays["a"] * arrays["sa"].astype(np.float64)[:, of_run],
        fields * arrays["s"].astype(np.float64)[:, of_run],
    )
    bound = 2.0**-20 * (np.abs(rounded) @ np.abs(weights).T)
    assert (np.abs(found - rounded @ weights.T) <= bound).all()
    large = np.float32(2.0**118)  # times a sum of integers, it is beyond float32
    (scaled,) = module.run(arrays | {"sa": arrays["sa"] * large, "s": arrays["s"] / large}).values()
    assert (np.abs(scaled - rounded @ weights.T) <= bound).all(), "scales are multiplied by each other first"
