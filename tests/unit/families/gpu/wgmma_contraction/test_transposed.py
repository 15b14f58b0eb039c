"""Products of few rows whose columns of B are the rows of the unit: which, results, reports."""

from __future__ import annotations

import pytest
from cases_matrix import chosen, contraction, tiles, unit
from schedule_support import program

from roller_svc import hardware
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import PartitionCache, partition
from roller_svc.compiler.plans import best_plans, rank_best_partition
from roller_svc.families.common.gpu.warpgroups.staged_operands import wgmma_operands
from roller_svc.families.matching import transpose_space, transposed_view
from roller_svc.ir.constraints import ScheduleConstraints
from roller_svc.ir.group import AxisRole
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import RProgram
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate
from roller_svc.toolchain import compile_source

HOPPER = hardware.load("nvidia-h200-sxm")
BIAS = "; Y[m, n] = relu(C[m, n] + v[n])"


def int4(m: int, n: int, k: int, group: int) -> tuple[str, dict[str, str]]:
    """A product with weights of four bits along k."""
    value = "((Q[n, k // 8] >> (k % 8 * 4)).call(`bitwise_and`, [15]) - 8).cast(`float16`)"
    text = f"W[n, k] = {value} * S[n, k // {group}] where n in {n}, k in {k}; C[m, n] +=! A[m, k] * W[n, k]"
    return text, {
        "A": f"float16 {m} {k}",
        "Q": f"int32 {n} {k // 8}",
        "S": f"float16 {n} {k // group}",
        "v": f"float16 {n}",
    }


# text, inputs, block, warpgroup, more of the rProgram
CASES: dict[str, tuple[str, dict[str, str], tuple[int, int, int], tuple[int, int], dict[str, object]]] = {
    "two consumers": (*int4(13, 200, 264, 24), (128, 16, 64), (64, 16), {"stages": 3}),
    "k split": (*int4(13, 200, 712, 8), (64, 16, 64), (64, 16), {"stages": 4, "cluster_k": 4}),
    "shared along m": (*int4(30, 256, 264, 24), (64, 32, 64), (64, 32), {"cluster": (2, 1), "cluster_k": 2}),
    "persistent": (*int4(30, 200, 264, 24), (64, 16, 64), (64, 16), {"stages": 3, "persistent_blocks": 3}),
    "streamed": (*int4(30, 200, 512, 128), (64, 16, 64), (64, 16), {"stages": 3, "stream_k_blocks": 5}),
}


def transposed(name: str, more_text: str = "") -> tuple[str, dict[str, str], RProgram]:
    """The program of a case, and its tiles in the transposed view."""
    text, inputs, block, part, more = CASES[name]
    text += more_text
    inputs = {key: value for key, value in inputs.items() if key != "v" or more_text}
    view = transposed_view(contraction(text, HOPPER, **inputs))
    assert view is not None
    by_hand = tiles(view, unit(HOPPER, "wgmma_f16"), block, part, reduce_threads=128, stages=3)
    return text, inputs, by_hand.with_pipeline(**more)


@pytest.mark.emulator
@pytest.mark.parametrize("more_text", ["", BIAS])
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_product(name: str, more_text: str) -> None:
    text, inputs, by_hand = transposed(name, more_text)
    compute = program(text, **inputs)
    groups = partition(compute, HOPPER)
    source = emit_plan(Plan((chosen(by_hand),)), compute, groups, HOPPER)
    arrays = random_inputs(compute, 1)
    got = load_emulated(CompiledKernel(source, b"", "", ()), 1, races=True).run(arrays)
    assert agrees(compute, got, evaluate(compute, arrays)).ok


def test_compiled_without_spills() -> None:
    text, inputs, by_hand = transposed("k split", BIAS)
    compute = program(text, **inputs)
    source = emit_plan(Plan((chosen(by_hand),)), compute, partition(compute, HOPPER), HOPPER)
    assert [launch.spill_bytes for launch in compile_source(source).resources] == [0]


def test_packed_weights_of_few_rows_are_rows_of_the_unit() -> None:
    text, inputs = int4(16, 4096, 4096, 128)
    inputs.pop("v")
    compute = program(text, **inputs)
    ranked = rank_best_partition(compute, HOPPER, 1)
    (choice,) = best_plans(ranked.candidates, 1)[0].choices
    assert choice.program.space.transposed
    assert choice.estimate.seconds < 7.6e-6
    assert PartitionCache(compute).partition_of_plan(best_plans(ranked.candidates, 1)[0], HOPPER) == ranked.groups
    asked = rank_best_partition(compute, HOPPER, 1, ScheduleConstraints(tiles=(("stages", 4),)))
    (choice,) = best_plans(asked.candidates, 1)[0].choices
    assert not choice.program.space.transposed


@pytest.mark.parametrize(
    ("text", "inputs"),
    [
        ("C[m, n] +=! A[m, k] * B[n, k]", {"A": "float16 16 256", "B": "float16 512 256"}),  # DRAM limits it
        int4(40, 256, 256, 32),  # rows fill the unit's
        int4(30, 16, 256, 32),
    ],
)
def test_other_products_keep_their_rows(text: str, inputs: dict[str, str]) -> None:
    inputs = {key: value for key, value in inputs.items() if key != "v"}
    assert transposed_view(contraction(text, HOPPER, **inputs)) is None


def test_reports_name_operands_in_the_order_of_the_product() -> None:
    text, inputs, by_hand = transposed("k split")
    group = contraction(text, HOPPER, **inputs)
    a, b = wgmma_operands(group, by_hand, HOPPER)
    assert (a.load, b.load) == ("tma", "unpack")


def test_transposing_twice_changes_nothing() -> None:
    text, inputs = int4(16, 256, 256, 32)
    inputs.pop("v")
    space = contraction(text, HOPPER, **inputs).space
    other = transpose_space(space)
    assert other.role(AxisRole.M)[0].name == space.role(AxisRole.N)[0].name
    assert transpose_space(other) == space
