"""Sources whose numbers know where they come from: the text stays what it is, and what is said is the tile's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roller_svc.compiler.annotate import BY_HAND, NO_REQUEST, NOT_WRITTEN, OTHER_TEXT, Annotations, WrittenKernel, annotate
from roller_svc.compiler.as_schedule import ConstructedPlan, first_plan
from roller_svc.compiler.estimates.batch import Item, plan_sensitivity_json
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.request import build_request, request_body
from roller_svc.compiler.sensitivity import analyze_sensitivity
from roller_svc.compiler.serialize import sensitivity_json
from roller_svc.errors import InvariantError
from roller_svc.ir.canonical import to_json
from roller_svc.ir.report import BuildRequest

GEMM = "C[m, n] +=! A[m, k] * B[k, n]"
HALVES = {"A": ("float16", (512, 256)), "B": ("float16", (256, 384))}
FLOATS = {"A": ("float32", (512, 256)), "B": ("float32", (256, 384))}
ATTENTION = "Y = attention(Q, K, V, causal=true)"
HEADS = dict.fromkeys("QKV", ("bfloat16", (1, 4, 256, 64)))
ROWS = "y[i] +=! x[i, j]"
# A program, a device, and parts of its source.
CASES: list[tuple[str, dict[str, Any], str, set[str]]] = [
    (GEMM, HALVES, "nvidia-h200-sxm", {"producer", "consumer", "main loop", "epilogue"}),
    (GEMM, HALVES, "nvidia-a100-sxm-80gb", {"prologue", "main loop", "epilogue"}),
    (GEMM, FLOATS, "nvidia-a100-sxm-80gb", {"prologue", "main loop", "epilogue"}),
    (GEMM, HALVES, "amd-mi300x", {"prologue", "main loop", "epilogue"}),
    (GEMM, FLOATS, "cpu-x86-avx2", {"multiply"}),
    (ATTENTION, HEADS, "nvidia-h200-sxm", {"producer", "consumer", "main loop", "epilogue"}),
    (ATTENTION, HEADS, "nvidia-a100-sxm-80gb", {"main loop", "epilogue"}),
    (ROWS, {"x": ("float32", (300, 500))}, "nvidia-h200-sxm", set()),
    (ROWS, {"x": ("float32", (300, 500))}, "cpu-x86-avx2", set()),
    ("y[i] = exp(x[i])", {"x": ("float32", (100000,))}, "nvidia-h200-sxm", set()),
]


def written(expression: str, inputs: dict[str, Any], target: str) -> tuple[WrittenKernel, ConstructedPlan]:
    request = build_request(expression, inputs, target=target)
    chosen = first_plan(request)
    return saved(request, chosen), chosen


def saved(request: BuildRequest, chosen: ConstructedPlan) -> WrittenKernel:
    """The kernel as it comes from a store."""
    source = emit_plan(chosen.plan, chosen.program, chosen.groups, chosen.hardware)
    plan, body = json.loads(json.dumps([to_json(chosen.plan), request_body(request)]))
    return WrittenKernel(source.text, source.name, plan, body, any(launch.programmatic for launch in source.launches))


@pytest.mark.parametrize(("expression", "inputs", "target", "parts"), CASES)
def test_numbers_and_parts_are_those_of_the_tiles(expression: str, inputs: dict[str, Any], target: str, parts: set[str]) -> None:
    kernel, chosen = written(expression, inputs, target)
    found = annotate(kernel)
    assert found.note == ""
    assert {part.name for part in found.parts} >= parts
    lines = kernel.source.split("\n")
    assert all(1 <= part.first <= part.last <= len(lines) for part in found.parts)
    assert found.numbers
    (program,) = (choice.program for choice in chosen.plan.choices)
    values = {axis.name: axis.extent for axis in program.space.axes}
    values |= {member.name: member.extent for axis in program.space.axes for member in axis.members}
    for level, tile in zip(chosen.hardware.tile_levels, (program.block, program.thread), strict=True):
        values |= {f"{level}.{name}": extent for name, extent in tile.extents}
    values |= {"stages": program.pipeline.stages}
    for number in found.numbers:
        text = lines[number.line - 1][number.column :][: number.length]
        assert text.isdecimal()
        if number.formula in values:  # a name alone
            assert int(text) == values[number.formula]
    assert any(number.sources[0].startswith(chosen.hardware.tile_levels) for number in found.numbers)


def test_a_kernel_of_a_model_that_may_start_early_is_annotated() -> None:
    request = build_request(ROWS, {"x": ("float32", (300, 500))}, target="nvidia-h200-sxm")
    early = replace(request, programmatic=True)
    kernel = saved(early, first_plan(early))
    assert "grid_wait" in kernel.source
    assert annotate(kernel).numbers
    assert annotate(replace(kernel, programmatic=False)).note == OTHER_TEXT


@pytest.mark.slow
def test_two_processes_say_the_same() -> None:
    """Names in sets have another order in each process."""
    program = "import test_annotate as t; print([t.annotate(t.written(*case[:3])[0]) for case in t.CASES])"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    printed = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "9")  # they order the names of tiles in shared memory differently
    ]
    assert printed[0] == printed[1]
    assert "Number(" in printed[0]


WINDOW = "y[n, f, h, w] +=! x[n, c, h + r, w + s] * W[f, c, r, s] where h in 7, w in 7; z[n, f, h, w] = relu(y[n, f, h, w])"
IMAGES = {"x": ("float32", (1, 5, 9, 9)), "W": ("float32", (6, 5, 3, 3))}


def test_a_plan_of_a_view_finds_its_own_kernel_groups() -> None:
    """A partition whose contractions are nests has as many kernels, and not the tile space of the convolution."""
    kernel, chosen = written(WINDOW, IMAGES, "cpu-x86-avx2")
    cache = PartitionCache(chosen.program)
    assert len({len(groups) for groups in cache.partitions(chosen.hardware)}) == 1
    assert cache.partitions(chosen.hardware)[0] != chosen.groups
    assert cache.partition_of_plan(chosen.plan, chosen.hardware) == chosen.groups
    assert annotate(kernel).note == ""
    assert annotate(kernel).numbers
    item = Item(WINDOW, IMAGES, None, {})
    assert plan_sensitivity_json(item, chosen.hardware, chosen.plan) == sensitivity_json(
        analyze_sensitivity(chosen.plan, chosen.groups, chosen.hardware)
    )


def test_a_fault_of_the_generator_is_called_no_other_version(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, _ = written(ROWS, {"x": ("float32", (300, 500))}, "cpu-x86-avx2")

    def fail(*_: object) -> None:
        raise InvariantError("expected a contraction")

    monkeypatch.setattr("roller_svc.compiler.annotate.emit_plan", fail)
    assert annotate(kernel) == Annotations(note=f"{NOT_WRITTEN}: expected a contraction")


def test_the_same_digits_are_told_apart() -> None:
    """A descriptor's stride of 1024 bytes is no tile, in a kernel whose tiles have strides of 1024 elements."""
    kernel, _ = written(GEMM, HALVES, "nvidia-h200-sxm")
    lines = kernel.source.split("\n")
    calls = [number for number in annotate(kernel).numbers if "matrix_descriptor" in lines[number.line - 1]]
    said = {number.formula for number in calls}
    assert "stride_bytes" in said
    assert any("shared.k" in formula for formula in said)


def test_annotating_leaves_no_marks_in_later_texts() -> None:
    kernel, chosen = written(GEMM, FLOATS, "cpu-x86-avx2")
    before = annotate(kernel)
    again = emit_plan(chosen.plan, chosen.program, chosen.groups, chosen.hardware)
    assert again.text == kernel.source
    assert annotate(kernel) == before


def test_what_cannot_be_annotated_says_why() -> None:
    kernel, _ = written(ROWS, {"x": ("float32", (300, 500))}, "cpu-x86-avx2")
    assert kernel.request is not None
    by_hand = {**kernel.request, "options": {"schedule": "y: parallel i"}}
    other = {**kernel.request, "expression": "y[i] +=! x[i, j] * z[i, j]"}
    assert annotate(replace(kernel, request=None)) == Annotations(note=NO_REQUEST)
    assert annotate(replace(kernel, request=by_hand)) == Annotations(note=BY_HAND)
    for changed in (
        replace(kernel, request=other),
        replace(kernel, plan={"choices": [{}]}),
        replace(kernel, plan=None),
        replace(kernel, source=kernel.source.replace("300", "301")),
    ):
        assert annotate(changed) == Annotations(note=OTHER_TEXT)
