"""Scans on GPUs: every kind of block against the interpreter, without races; rows in pieces; the model's choice."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from cases_gpu import Types

from roller_svc import hardware
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.rank import construct
from roller_svc.families import model_of
from roller_svc.families.gpu.scan.workload import prepare
from roller_svc.frontend.lang import parse
from roller_svc.fusion.split.scan import may_split_scan
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import Candidate
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import RProgram
from roller_svc.perf.workload import prepare_workload
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate

TARGETS = ("nvidia-a100-sxm-80gb", "nvidia-h200-sxm", "amd-mi250x")
CASES: dict[str, tuple[str, Types]] = {
    "rows": ("y[i, j] +=! x[i, o].when([o <= j], 0.0) where j in 67", {"x": ("float32", (5, 67))}),
    "columns": ("y[j, i] +=! x[o, i].when([o <= j], 0.0) where j in 67", {"x": ("float32", (67, 70))}),
    "maps": ("y[i, j] +=! (x[i, o] * x[i, o]).when([o <= j], 0.0) where j in 64; z[i, j] = y[i, j] / (j + 1) + x[i, j]",
             {"x": ("float32", (5, 64))}),
    "reversed product": ("y[i, j] *=! x[i, o].when([j < o], 1) where j in 37", {"x": ("int32", (3, 37))}),
    "recurrence": ("h[i, t] = a[i, t] * h[i, t - 1].when([t > 0], s[i]) + x[i, t]; y[i, t] = h[i, t] * a[i, t]",
                   {"a": ("float32", (3, 67)), "x": ("float32", (3, 67)), "s": ("float32", (3,))}),
    "recurrences of columns": ("h[t, i] = a[t, i] * h[t - 1, i].when([t > 0], s[i]) + x[t, i]",
                               {"a": ("float16", (67, 70)), "x": ("float16", (67, 70)), "s": ("float16", (70,))}),
    "no inputs": ("h[t] = 0.5 * h[t - 1].when([t > 0], 1.0) where t in 64", {}),
}  # fmt: skip
MORE: dict[str, tuple[str, Types]] = {
    "vectors": ("y[i, j] +=! x[i, o].when([o <= j], 0.0) where j in 256", {"x": ("float32", (5, 256))}),
    "exclusive": ("y[i, j] +=! x[i, o].when([o < j], 0.0) where j in 64", {"x": ("float32", (3, 64))}),
    "doubles": ("y[i, j] +=! x[i, o].when([o >= j], 0.0) where j in 100", {"x": ("float64", (3, 100))}),
    "few columns": ("y[b, j, i] >=! x[b, o, i].when([o <= j], const(`-inf`)) where j in 40", {"x": ("float32", (2, 40, 9))}),
    "reversed columns": ("y[j, i] <=! x[o, i].when([o >= j], const(`inf`)) where j in 67", {"x": ("float16", (67, 33))}),
    "one row": ("y[j] +=! x[o].when([o <= j], 0) where j in 1537", {"x": ("int8", (1537,))}),
    "tiny": ("y[j] +=! x[o].when([o <= j], 0) where j in 5", {"x": ("int8", (5,))}),
    "guards": ("y[i, j] +=! (x[i, o] * w[o]).when([o <= j, o > 3, i < 4], 0.0) where j in 65",
               {"x": ("bfloat16", (5, 65)), "w": ("float32", (65,))}),
    "lowest": ("y[i, j] >=! x[i, o].when([o < j], -128) where j in 65", {"x": ("int8", (5, 65))}),
    "segments": ("h[t, i] = where(f[t] != 0, 0.0, h[t - 1, i].when([t > 0], 0.0)) + x[t, i]",
                 {"f": ("bool", (67,)), "x": ("float32", (67, 33))}),
    "segments of a row": ("h[t] = x[t] + h[t - 1].when([t > 0, f[t] == f[max(t - 1, 0)]], 0.0)",
                          {"f": ("int32", (777,)), "x": ("float64", (777,))}),
    "reversed recurrence": ("h[i, t] = a[i, t] * h[i, t + 1].when([t < 64], 0.0) + (1.0 - a[i, t]) * x[i, t]",
                            {"a": ("bfloat16", (5, 65)), "x": ("bfloat16", (5, 65))}),
    "congruences": ("h[i, t] = a[t] * h[i, t - 1].when([t > 0], 1) + x[i, t]",
                    {"a": ("int32", (300,)), "x": ("int32", (3, 300))}),
    "short recurrence": ("h[i, t] = 0.5 * h[i, t - 1].when([t > 0], 0.0) + x[i, t]", {"x": ("float32", (1000, 3))}),
    "no inputs along columns": ("h[t, i] = 0.75 * h[t - 1, i].when([t > 0], s[i]) + i where t in 67", {"s": ("float32", (5,))}),
    "short": ("y[i, j] +=! x[i, o].when([o <= j], 0.0) where j in 3", {"x": ("float32", (1000, 3))}),
}  # fmt: skip
PIECES: dict[str, tuple[str, Types]] = {
    "integers": ("y[j] +=! x[o].when([o <= j], 0) where j in 1536", {"x": ("int32", (1536,))}),
    "reversed": ("y[i, j] +=! x[i, o].when([o > j], 0.0) where j in 1024; z[i, j] = y[i, j] + x[i, j] + w[j]",
                 {"x": ("float32", (2, 1024)), "w": ("float16", (1024,))}),
    "columns": ("y[j, i] >=! (x[o, i] * s[i]).when([o < j], const(`-inf`)) where j in 1024",
                {"x": ("float32", (1024, 5)), "s": ("float32", (5,))}),
    "guard": ("y[i, j] *=! x[i, o].when([o <= j, o > 700], 1) where j in 1024; z[i, j] = y[i, j] + j",
              {"x": ("int16", (2, 1024))}),
    "narrow": ("y[i, j] +=! x[i, o].when([o <= j], 0.0) where j in 1024", {"x": ("float16", (2, 1024))}),
    "recurrences of columns": ("h[t, i] = a[t, i] * h[t - 1, i].when([t > 0], s[i]) + x[t, i]; y[t, i] = h[t, i] + t",
                               {"a": ("float16", (1024, 5)), "x": ("float16", (1024, 5)), "s": ("float16", (5,))}),
    "reversed recurrence": ("h[i, t] = a[i, t] * h[i, t + 1].when([t < 1023], 0.0) + (1.0 - a[i, t]) * x[i, t]",
                            {"a": ("bfloat16", (2, 1024)), "x": ("bfloat16", (2, 1024))}),
    "segments": ("h[t] = where(f[t] != 0, 0.0, a[t] * h[t - 1].when([t > 0], 0.0)) + x[t]",
                 {"f": ("bool", (2048,)), "a": ("float32", (2048,)), "x": ("float32", (2048,))}),
    "congruences": ("h[i, t] = a[t] * h[i, t - 1].when([t > 0], 1) + x[i, t]",
                    {"a": ("int32", (1536,)), "x": ("int32", (3, 1536))}),
    "recurrence without inputs": ("h[t] = 0.99 * h[t - 1].when([t > 0], 1.0) + 0.5 where t in 2048", {}),
}  # fmt: skip


def scan_case(expression: str, types: Types, hw: HardwareSpec) -> tuple[TensorProgram, KernelGroup, list[RProgram]]:
    program = parse(expression, {name: TensorType(DType(d), shape) for name, (d, shape) in types.items()})
    (group,) = partition(program, hw)
    assert group.kind is GroupKind.SCAN
    found = construct(group, hw, hw.unit_for(group.space.compute_dtype)).programs
    return program, group, sorted(found, key=lambda p: model_of(group, p, hw).estimate(p).seconds)


def check(program: TensorProgram, group: KernelGroup, tiles: list[RProgram], hw: HardwareSpec) -> None:
    arrays = random_inputs(program, 1)
    expected = evaluate(program, arrays)
    for each in tiles:
        plan = Plan((Candidate(each, model_of(group, each, hw).estimate(each)),))
        source = emit_plan(plan, program, (group,), hw)
        assert source.main_launch(group.name) == (2 if each.split_k > 1 else 0)
        found = load_emulated(CompiledKernel(source, b"", "", ()), 1, races=True).run(arrays)
        agreement = agrees(program, found, expected)
        assert agreement.ok, f"{agreement}\n{source.text}"


def check_blocks(case: tuple[str, Types], target: str, count: int) -> None:
    hw = dataclasses.replace(hardware.load(target), num_cores=1)
    program, group, ranked = scan_case(*case, hw)
    check(program, group, list(dict.fromkeys([ranked[0], *ranked[1 :: max(1, -(-len(ranked) // count))]])), hw)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("step", "a", "x", "flags"),
    [
        ("a[t] * h[t - 1].when([t > 0], 0.0) + x[t]", 9.0, {900: 1.0}, ()),  # products of gates overflow, states do not
        ("where(f[t] != 0, 0.0, h[t - 1].when([t > 0], 0.0)) + x[t] * a[t]", 1.0, {10: math.nan, 400: math.inf}, (256, 411)),
        ("where(f[t] != 0, 0.0, a[t] * h[t - 1].when([t > 0], 0.0)) + x[t]", 2.0, {0: 1.0, 700: math.nan}, (99, 200, 710)),
        ("a[t] * h[t - 1].when([t > 0], 0.0) + x[t]", math.nan, {}, ()),
    ],
)
def test_special_values_of_recurrences_are_those_of_the_steps(
    step: str, a: float, x: dict[int, float], flags: tuple[int, ...]
) -> None:
    hw = dataclasses.replace(hardware.load(TARGETS[1]), num_cores=1)
    types: Types = dict.fromkeys("axf", ("float32", (910,)))
    types = {name: type_ for name, type_ in types.items() if f"{name}[" in step}
    program, group, ranked = scan_case(f"h[t] = {step}", types, hw)
    arrays = {"a": np.full(910, a, np.float32), "x": np.zeros(910, np.float32), "f": np.zeros(910, np.float32)}
    for at, value in x.items():
        arrays["x"][at] = value
    arrays["f"][list(flags)] = 1.0
    arrays = {name: arrays[name] for name in types}
    expected = evaluate(program, arrays)
    sure = expected["h"].error
    assert sure is not None
    assert np.isfinite(sure).mean() > 0.4
    for chosen in (ranked[0], dataclasses.replace(ranked[0], split_k=7)):
        plan = Plan((Candidate(chosen, model_of(group, chosen, hw).estimate(chosen)),))
        found = load_emulated(CompiledKernel(emit_plan(plan, program, (group,), hw), b"", "", ()), 1, races=True).run(arrays)
        assert agrees(program, found, expected).ok


@pytest.mark.emulator
@pytest.mark.parametrize("name", CASES)
def test_blocks_match_the_interpreter(name: str) -> None:
    check_blocks(CASES[name], TARGETS[0], 2)


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_blocks_of_every_device_match_the_interpreter(name: str, target: str) -> None:
    check_blocks((CASES | MORE)[name], target, 4)


def check_pieces(case: tuple[str, Types], target: str) -> None:
    hw = dataclasses.replace(hardware.load(target), num_cores=16)
    program, group, ranked = scan_case(*case, hw)
    split = list({p.split_k: p for p in ranked if p.split_k > 1}.values())
    assert split
    check(program, group, split[:2], hw)


@pytest.mark.emulator
@pytest.mark.parametrize("name", ["reversed", "recurrences of columns"])
def test_pieces_of_rows_match_the_interpreter(name: str) -> None:
    check_pieces(PIECES[name], TARGETS[0])


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("name", PIECES)
def test_pieces_on_every_device_match_the_interpreter(name: str, target: str) -> None:
    check_pieces(PIECES[name], target)


@pytest.mark.parametrize(
    ("body", "splits"),
    [
        ("x[o].when([o <= j], 0.0)", True),
        ("(x[o] * w[o]).when([o <= j], 0.0)", True),
        ("(x[o] * x[4095 - o]).when([o <= j], 0.0)", False),  # one tensor in two views
        ("w[j] * y[j - 1].when([j > 0], 0.0) + x[j]", True),
        ("w[j] * y[j - 1].when([j > 0], x[0]) + x[j]", False),
        ("d[j] * y[j - 1].when([j > 0], 0.0)", False),  # no type is wider than float64
        ("n[j] * y[j - 1].when([j > 0], 1)", True),
    ],
)
def test_rows_of_tensors_with_one_view_are_split(body: str, splits: bool) -> None:
    hw = hardware.load(TARGETS[1])
    types: Types = {"x": ("float32", (4096,)), "w": ("float32", (4096,)), "d": ("float64", (4096,)), "n": ("int64", (4096,))}
    used = {name: types[name] for name in types if f"{name}[" in body}
    sign = "+=!" if "[o]" in body else "="
    _, group, ranked = scan_case(f"y[j] {sign} {body} where j in 4096", used, hw)
    workload = prepare(group, prepare_workload(group.space, hw, hw.unit_for(group.space.compute_dtype)))
    assert workload is not None
    assert may_split_scan(workload.facts.scan, group) is splits
    assert any(p.split_k > 1 for p in ranked) is splits


@pytest.mark.parametrize("target", ["nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "amd-mi300x"])
def test_a_scan_is_near_the_time_of_a_copy(target: str) -> None:
    """Each element is read once and written once, and operations are counted once."""
    hw = hardware.load(target)
    types: Types = {"x": ("float32", (2048, 8192))}
    _, group, ranked = scan_case("y[i, j] +=! x[i, o].when([o <= j], 0.0) where j in 8192", types, hw)
    assert group.space.flops == 2048 * 8192
    best = model_of(group, ranked[0], hw).estimate(ranked[0]).seconds
    assert best < 2 * 2 * 4 * 2048 * 8192 / hw.dram.bandwidth_bytes_per_s


@pytest.mark.parametrize("target", ["nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "amd-mi300x"])
@pytest.mark.parametrize("shape", [(1, 1 << 26), (4, 1 << 24)])
def test_few_long_rows_are_near_the_time_of_a_copy(shape: tuple[int, int], target: str) -> None:
    """A row of 2^26 elements is cut into pieces, and read twice."""
    hw = hardware.load(target)
    sums = f"y[i, j] +=! x[i, o].when([o <= j], 0.0) where j in {shape[1]}"
    recurrence = "h[i, t] = a[i, t] * h[i, t - 1].when([t > 0], 0.0) + x[i, t]"
    for text, names in ((sums, "x"), (recurrence, "ax")):
        _, group, ranked = scan_case(text, dict.fromkeys(names, ("float32", shape)), hw)
        best = model_of(group, ranked[0], hw).estimate(ranked[0]).seconds
        assert best < 2 * (1 + len(names)) * 4 * math.prod(shape) / hw.dram.bandwidth_bytes_per_s
