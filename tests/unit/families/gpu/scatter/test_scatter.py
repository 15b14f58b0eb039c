"""Scatters on GPUs: small targets reduced in shared memory first, and the model's choice between the two kernels."""

from __future__ import annotations

import numpy as np
import pytest
from cases_gpu import ONE_CORE, Case, Types, case

from roller_svc import hardware
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.donation import donate_targets
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.plans import best_plans, rank_best_partition
from roller_svc.errors import IndexRangeError
from roller_svc.families import model_of
from roller_svc.families.gpu.scatter.cost import expected_maximum
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import Candidate
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.program import TensorType
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import RProgram
from roller_svc.runtime.emulator import EmulatorModule
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate

UPDATES = 5003  # more than one round of a block, and a rest
AT = ("int32", (UPDATES,))
CASES: dict[str, tuple[str, Types]] = {
    "histogram": ("grid[at[n]] +=. 1", {"grid": ("int32", (64,)), "at": AT}),
    "several rounds": ("grid[at[n]] +=. 1", {"grid": ("int32", (7,)), "at": ("int32", (30011,))}),
    "no rest": ("grid[at[n]] +=. 1", {"grid": ("uint32", (600,)), "at": ("int32", (8192,))}),
    "no loads": ("grid[n % 64] +=. 1 where n in 5003", {"grid": ("int32", (64,))}),
    "floats": ("grid[at[n]] +=. x[n]", {"grid": ("float32", (700,)), "at": AT, "x": ("float32", (UPDATES,))}),
    "doubles": ("grid[at[n]] +=. x[n]", {"grid": ("float64", (33,)), "at": AT, "x": ("float64", (UPDATES,))}),
    "long integers": ("grid[at[n]] +=. x[n]", {"grid": ("int64", (33,)), "at": AT, "x": ("int64", (UPDATES,))}),
    "greatest": ("grid[at[n]] >=. x[n]", {"grid": ("float32", (50,)), "at": AT, "x": ("float32", (UPDATES,))}),
    "product": ("grid[at[n]] *=. x[n]", {"grid": ("int32", (50,)), "at": AT, "x": ("int32", (UPDATES,))}),
    "least": ("grid[at[n]] <=. x[n]", {"grid": ("int32", (50,)), "at": AT, "x": ("int32", (UPDATES,))}),
    "rows": ("grid[at[n], c] +=. x[n, c]",
             {"grid": ("float32", (9, 24)), "at": ("int32", (211,)), "x": ("float32", (211, 24))}),
    "conditional": ("grid[at[n]] +=. (x[n]).when([n % 3 == 0])",
                    {"grid": ("int32", (50,)), "at": AT, "x": ("int32", (UPDATES,))}),
}  # fmt: skip


def private(found: Case) -> list[RProgram]:
    """Return the programs that reduce in shared memory, one for each number of blocks."""
    programs = [p for p in found.ranked if p.pipeline.persistent_blocks]
    return list({p.pipeline.persistent_blocks: p for p in programs}.values())


@pytest.mark.emulator
@pytest.mark.parametrize("name", CASES)
def test_private_targets_match_the_interpreter(name: str) -> None:
    found = case(*CASES[name])
    programs = private(found)
    assert programs
    for tiles in programs:
        found.check(tiles)


@pytest.mark.parametrize(
    ("expression", "dtype", "extent"),
    [("grid[at[n]] +=. x[n]", "int32", 12289), ("grid[at[n]] = x[n]", "int32", 5003), ("grid[at[n]] +=. x[n]", "float16", 64)],
)
def test_other_targets_are_updated_in_memory(expression: str, dtype: str, extent: int) -> None:
    types: Types = {"grid": (dtype, (extent,)), "at": AT, "x": (dtype, (UPDATES,))}
    assert private(case(expression, types)) == []


def emulated(found: Case, tiles: RProgram, *, races: bool = False) -> EmulatorModule:
    plan = Plan((Candidate(tiles, model_of(found.group, tiles, ONE_CORE).estimate(tiles)),))
    source = emit_plan(plan, found.program, (found.group,), ONE_CORE)
    return load_emulated(CompiledKernel(source, b"", "", ()), 1, races=races)


@pytest.mark.emulator
def test_an_index_out_of_range_names_the_target() -> None:
    found = case(*CASES["histogram"])
    arrays = {"grid": np.zeros(64, np.int32), "at": np.full(UPDATES, 64, np.int32)}
    with pytest.raises(IndexRangeError, match=r"index 64 is outside dimension 0 \(axis n\) of grid, which has extent 64"):
        emulated(found, private(found)[0]).run(arrays)


@pytest.mark.emulator
@pytest.mark.parametrize("name", ["histogram", "rows"])
def test_private_targets_have_no_races(name: str) -> None:
    found = case(*CASES[name])
    arrays = random_inputs(found.program, 1)
    result = emulated(found, private(found)[0], races=True).run(arrays)
    assert agrees(found.program, result, evaluate(found.program, arrays)).ok


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int64"])
@pytest.mark.parametrize("expression", ["grid[at[n]] >=. x[n]", "grid[at[n]] +=. x[n]"])
def test_updates_in_memory_have_no_races(expression: str, dtype: str) -> None:
    """The race detector knows the atomics of every width."""
    found = case(expression, {"grid": (dtype, (8,)), "at": ("int32", (50,)), "x": (dtype, (50,))})
    arrays = random_inputs(found.program, 1, {"at": {"range": [0, 8]}})
    in_memory = next(tiles for tiles in found.ranked if not tiles.pipeline.persistent_blocks)
    result = emulated(found, in_memory, races=True).run(arrays)
    agreement = agrees(found.program, result, evaluate(found.program, arrays))
    assert agreement.ok, agreement.detail


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_updates_of_a_donated_target_leave_the_bytes_after_it(dtype: str) -> None:
    """Pairs of elements are added at once, and an odd number of them ends within a pair."""
    types = {"grid": (dtype, (7,)), "at": ("int32", (50,)), "x": (dtype, (50,))}
    program = parse("grid[at[n]] +=. x[n]", {n: TensorType(DType(d), shape) for n, (d, shape) in types.items()})
    program = donate_targets(program, ["grid"])
    hw = hardware.load("nvidia-h200-sxm")
    groups, ranked, _ = rank_best_partition(program, hw, 1)
    source = emit_plan(best_plans(ranked, 1)[0], program, groups, hw)
    arrays = random_inputs(program, 1, {"at": {"range": [0, 7]}})
    expected = evaluate(program, arrays)
    result = load_emulated(CompiledKernel(source, b"", "", ()), 1, races=True).run(arrays)
    agreement = agrees(program, result, expected)
    assert agreement.ok, agreement.detail


def chosen(expression: str, types: Types, target: str) -> RProgram:
    program = parse(expression, {name: TensorType(DType(d), shape) for name, (d, shape) in types.items()})
    _, ranked, _ = rank_best_partition(program, hardware.load(target), 1)
    return best_plans(ranked, 1)[0].choices[0].program


@pytest.mark.parametrize("target", ["nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "nvidia-v100-sxm2", "amd-mi250x"])
@pytest.mark.parametrize(
    ("expression", "extent", "updates", "is_private"),
    [
        ("grid[at[n]] +=. 1", 64, 4_000_001, True),
        ("grid[at[n]] +=. 1", 4096, 4_000_001, True),
        ("grid[at[n]] +=. 1", 64, 500, False),  # the passes over a private target take longer than the updates
        ("grid[at[n]] +=. 1", 1 << 20, 4_000_001, False),
    ],
)
def test_the_model_reduces_crowded_updates_in_shared_memory(
    expression: str, extent: int, updates: int, is_private: bool, target: str
) -> None:
    program = chosen(expression, {"grid": ("int32", (extent,)), "at": ("int32", (updates,))}, target)
    assert bool(program.pipeline.persistent_blocks) is is_private


def test_updates_of_one_sector_wait_for_each_other() -> None:
    """The same updates take longer in memory if they meet in fewer sectors."""
    seconds = []
    for extent in (8, 64, 512):
        found = case("grid[at[n]] +=. 1", {"grid": ("int32", (extent,)), "at": ("int32", (1 << 20,))})
        tiles = next(p for p in found.ranked if not p.pipeline.persistent_blocks)
        estimate = model_of(found.group, tiles, ONE_CORE).estimate(tiles)
        seconds.append(next(s.seconds for s in estimate.stages if s.name == "atomics"))
    assert seconds[0] == pytest.approx(8 * seconds[1])
    assert seconds[1] > seconds[2]


@pytest.mark.parametrize("boxes", [1, 2, 8, 32, 64, 1000])
def test_the_fullest_box_is_that_of_a_simulation(boxes: int) -> None:
    thrown = np.random.default_rng(1).integers(0, boxes, (2000, 32))
    fullest = np.mean([np.bincount(row, minlength=boxes).max() for row in thrown])
    assert expected_maximum(32, boxes) == pytest.approx(fullest, rel=0.1)
