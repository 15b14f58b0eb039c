"""Estimates remembered by what they follow from, as bytes within bounds, and rooflines beside them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from roller_svc import hardware
from roller_svc.compiler.estimates.batch import EstimateCache, Item, estimate_item
from roller_svc.compiler.estimates.cache import LruCache
from roller_svc.compiler.estimates.worker import (
    Deadline,
    EstimateResult,
    EstimateTask,
    compute_estimates,
    estimate_slice,
)
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import estimate_program
from roller_svc.errors import ArgumentError
from roller_svc.frontend.parse import parse, parse_forms
from roller_svc.graph.costs import CostTable
from roller_svc.ir.dtype import DType
from roller_svc.ir.graph import Constant, OpNode
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorType

H200 = hardware.load("nvidia-h200-sxm")
SIDE = {"A": ("float32", (512, 512)), "B": ("float32", (512, 512))}
MATMUL = Item("C[m, n] +=! A[m, k] * B[k, n]", SIDE)
WRONG = Item("C[m, n] +=! A[m, k] * Q[k, n]", SIDE)


class Counted:
    """How many outcomes were computed."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, works: Sequence[EstimateTask], patience: Deadline) -> list[EstimateResult]:
        self.count += sum(len(work.specs) for work in works)
        return compute_estimates(works, patience)


def faster(spec: HardwareSpec) -> HardwareSpec:
    """The device with one figure changed, and the same id."""
    dram = replace(spec.dram, bandwidth_bytes_per_s=spec.dram.bandwidth_bytes_per_s * 2)
    return replace(spec, levels=(dram, *spec.levels[1:]))


def test_a_text_is_computed_once_for_all_that_ask() -> None:
    counted = Counted()
    estimates = EstimateCache(counted)
    first = estimates.estimates([MATMUL], ["nvidia-h200-sxm"], 1)
    assert estimates.estimates([MATMUL], ["nvidia-h200-sxm"], 1) == first
    assert counted.count == 1
    estimates.estimates([MATMUL, replace(MATMUL), MATMUL], [H200, "nvidia-h200-sxm"], 1)
    assert counted.count == 1


def test_donated_targets_are_not_copied() -> None:
    scatter = Item("g[at[n]] +=. x[n]", {"g": ("float32", (1 << 28,)), "at": ("int32", (64,)), "x": ("float32", (64,))})
    donated = replace(scatter, options={"donate": ["g"]})
    estimates = EstimateCache()
    copied, updated = (each["candidates"][0] for each in estimates.estimates([scatter, donated], [H200], 1))
    assert copied["seconds"] > 5 * updated["seconds"]
    (found,) = estimate_item(donated, [H200], 1)
    assert found.plans[0].estimate.seconds == updated["seconds"]


def test_an_input_that_cannot_be_donated_is_refused_for_its_item_alone() -> None:
    wrong = replace(MATMUL, options={"donate": ["A"]})
    refused, estimated = EstimateCache().estimates([wrong, MATMUL], [H200], 1)
    assert "donate: A must be the target of one scatter" in refused["error"]["message"]
    assert estimated["candidates"]
    with pytest.raises(ArgumentError, match="must be the target of one scatter"):
        estimate_item(wrong, [H200], 1)


def test_two_texts_of_one_program_have_one_answer() -> None:
    spaced = Item("C[m,n]  +=!\n A[m,k]*B[k,n]  where k in 512", SIDE)
    found = EstimateCache().estimates([MATMUL, spaced], ["nvidia-h200-sxm"], 1)
    assert found[0] | {"item": 1} == found[1]


@pytest.mark.parametrize(
    ("item", "spec", "top_k"),
    [
        (MATMUL, faster(H200), 1),
        (MATMUL, replace(H200, num_cores=H200.num_cores - 1), 1),
        (MATMUL, H200, 2),
        (replace(MATMUL, options={"allow_tf32": True}), H200, 1),
        (replace(MATMUL, inputs=SIDE | {"B": ("float32", (512, 513))}), H200, 1),
        (Item("D[m, n] +=! A[m, k] * B[k, n]", SIDE), H200, 1),
    ],
)
def test_what_differs_in_one_figure_is_not_shared(item: Item, spec: HardwareSpec, top_k: int) -> None:
    counted = Counted()
    estimates = EstimateCache(counted)
    estimates.estimates([MATMUL], [H200], 1)
    asked_after = estimates.estimates([item], [spec], top_k)
    assert counted.count == 2
    assert asked_after == EstimateCache().estimates([item], [spec], top_k)


def test_refusals_stand_in_their_places_whatever_is_remembered() -> None:
    estimates = EstimateCache()
    for _ in range(2):
        found = estimates.estimates([WRONG, MATMUL], ["no-such-device", "nvidia-h200-sxm"], 1)
        assert [(one["item"], one["target"]) for one in found] == [
            (i, t) for i in (0, 1) for t in ("no-such-device", "nvidia-h200-sxm")
        ]
        codes = [one["error"]["code"] if isinstance(one.get("error"), dict) else None for one in found]
        assert codes == ["unknown-hardware", "unknown-name", "unknown-hardware", None]


def test_a_text_that_is_refused_is_read_once_for_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def counted(*program: Any) -> Any:
        read.append(program)
        return parse_forms(*program)

    monkeypatch.setattr("roller_svc.compiler.estimates.worker.parse_forms", counted)
    estimates = EstimateCache()
    assert len(estimates.estimates([WRONG], ["nvidia-h200-sxm", "nvidia-v100-sxm2", "local"], 1)) == 3
    assert len(estimates.estimates([WRONG], ["nvidia-h100-sxm", "nvidia-v100-sxm2"], 2)) == 2
    assert len(read) == 1


def test_what_there_is_no_time_for_says_so_and_is_not_remembered() -> None:
    estimates = EstimateCache()
    (late,) = estimates.estimates([MATMUL], ["nvidia-h200-sxm"], 1, limit_s=0.0)
    assert late["error"]["code"] == "estimates-timeout"
    (found,) = estimates.estimates([MATMUL], ["nvidia-h200-sxm"], 1, limit_s=60.0)
    assert found["candidates"]
    assert estimates.estimates([MATMUL], ["nvidia-h200-sxm"], 1, limit_s=0.0) == [found]


def held_bytes(memo: LruCache[bytes, bytes]) -> int:
    """What CPython takes for a memo's entries."""
    entries = memo._entries.items()
    parts = sum(sys.getsizeof(part) for key, entry in entries for part in (key, entry, *entry))
    return sys.getsizeof(memo._entries) + parts


@pytest.mark.parametrize("content_bytes", [2, 1500])
def test_the_bound_of_what_is_remembered_is_what_it_takes(monkeypatch: pytest.MonkeyPatch, content_bytes: int) -> None:
    monkeypatch.setattr("roller_svc.compiler.estimates.batch.MAX_RESULT_BYTES", 1 << 16)
    monkeypatch.setattr("roller_svc.compiler.estimates.batch.MAX_REJECTION_BYTES", 1 << 16)

    def compute(works: Sequence[EstimateTask], _: Deadline) -> list[EstimateResult]:
        def content(work: EstimateTask) -> bytes:
            return json.dumps({"text": work.program.expression.ljust(content_bytes)}).encode()

        return [EstimateResult([content(work)] if n % 2 else [], None if n % 2 else content(work)) for n, work in enumerate(works)]

    estimates = EstimateCache(compute)
    estimates.estimates([Item(f"C[i] = A[i] + {n}", SIDE) for n in range(1000)], [H200], 1)
    for memo in (estimates._results, estimates._rejections):
        assert 0 < held_bytes(memo) <= 1 << 16
        assert len(memo) >= (1 << 16) // (content_bytes + 1000)


def test_a_memo_forgets_what_was_used_longest_ago() -> None:
    memo: LruCache[str, int] = LruCache(2)
    memo.put("a", 1)
    memo.put("b", 2)
    assert memo.get("a") == 1
    memo.put("c", 3)
    assert (memo.get("a"), memo.get("b"), memo.get("c"), len(memo)) == (1, None, 3, 2)


# rooflines --------------------------------------------------------------------------------------------------------
def test_the_roofline_follows_from_the_problem_alone() -> None:
    (found,) = estimate_item(MATMUL, ["nvidia-h200-sxm"], 3)
    compute, dram, *inner = found.roofline
    assert (compute.level, compute.amount) == ("compute", 2 * 512**3)
    assert (dram.level, dram.amount) == ("dram", 3 * 512 * 512 * 4)
    assert dram.seconds == dram.amount / H200.dram.bandwidth_bytes_per_s
    assert [roof.level for roof in inner] == [lv.name for lv in H200.levels[1:] if lv.name != H200.tile_levels[1]]
    assert all(plan.estimate.seconds > max(roof.seconds for roof in found.roofline) for plan in found.plans)


def test_kernels_one_after_another_add_up() -> None:
    chain = Item("T[m, n] +=! A[m, k] * B[k, n]\nC[m, n] +=! T[m, k] * B[k, n]", SIDE, ["C"])
    (one,), (two,) = (estimate_item(item, ["nvidia-v100-sxm2"], 1) for item in (MATMUL, chain))
    assert [roof.amount for roof in two.roofline] == [2 * roof.amount for roof in one.roofline]


def test_what_a_cpu_keeps_in_its_caches_leaves_nothing_to_memory() -> None:
    (small,) = estimate_item(Item("C[i] = A[i]", {"A": ("float32", (1024,))}), ["cpu-x86-avx2"], 1)
    (large,) = estimate_item(Item("C[i] = A[i]", {"A": ("float32", (1 << 28,))}), ["cpu-x86-avx2"], 1)
    assert [roof.amount > 0 for roof in small.roofline if roof.level == "dram"] == [False]
    assert [roof.amount for roof in large.roofline if roof.level == "dram"] == [2 << 30]


# floor ------------------------------------------------------------------------------------------------------------
HALF = {"a": ("float16", (2048, 2048)), "b": ("float16", (2048, 2048))}
PLAIN = "y[m, n]: float32 +=! a[m, k] * b[k, n]"


def test_the_floor_has_the_traffic_of_the_program_and_the_best_unit_of_its_types() -> None:
    (found,) = estimate_item(Item(PLAIN, HALF), ["nvidia-h200-sxm"], 1)
    (unit,) = [unit for unit in H200.units if unit.name == "wgmma_f16"]
    floor = found.floor
    assert (floor.unit, floor.operations) == ("wgmma_f16", 2 * 2048**3)
    assert floor.traffic_bytes == 2048 * 2048 * (2 + 2 + 4)
    assert floor.seconds == max(floor.operations / unit.flops_per_s, floor.traffic_bytes / 4.3e12) + 2e-6
    assert found.reasons == ("",)


@pytest.mark.parametrize(("types", "unit"), [(("uint8", "int8"), "dot_i16"), (("int32", "int8"), "vector_i32")])
def test_the_floor_multiplies_bytes_as_pairs_where_a_cpu_has_them(types: tuple[str, str], unit: str) -> None:
    text = "y[m, n] +=! a[m, k].cast(int32) * b[k, n].cast(int32)"
    item = Item(text, {name: (dtype, (512, 512)) for name, dtype in zip("ab", types, strict=True)})
    (found,) = estimate_item(item, ["cpu-x86-avx2"], 1)
    assert found.floor.unit == unit


@pytest.mark.parametrize(
    "text",
    [
        "y[m, n]: float32 +=! -(a[m, k] * b[k, n])",
        "y[m, n]: float32 +=! (a[m, k] * b[k, n]).when([(k + m) % 2 == 0], 0.0)",
        "t[m, n]: float32 +=! a[m, k] * b[k, n]\ny[m, n] = t[m, n] + 1.0",  # the intermediate is no traffic
        "y[m, n]: float32 +=! a[m, k] * b[k, n] * a[m, n]",
    ],
)
def test_the_floor_does_not_depend_on_the_spelling(text: str) -> None:
    (plain,), (other,) = (estimate_item(Item(t, HALF, ["y"]), ["nvidia-h200-sxm"], 1) for t in (PLAIN, text))
    assert other.floor.seconds == pytest.approx(plain.floor.seconds, rel=0.01)


def test_the_floor_has_the_points_that_a_guard_leaves() -> None:
    guarded = "y[m, n]: float32 +=! where(k <= m, a[m, k] * b[k, n], 0.0)"
    (plain,), (other,) = (estimate_item(Item(t, HALF, ["y"]), ["nvidia-h200-sxm"], 1) for t in (PLAIN, guarded))
    assert other.floor.operations == pytest.approx(plain.floor.operations / 2, rel=0.02)


@pytest.mark.parametrize(
    ("text", "inputs", "reason"),
    [
        ("y[r, n] +=! x[i[r, z], n]", {"x": ("float32", (4096, 128)), "i": ("int32", (65536, 32))}, "`l2` of kernel0"),
        (PLAIN, {"a": ("float64", (64, 64)), "b": ("float64", (64, 64))}, ""),
        (
            "t[m, n] = exp(a[m, n]); s[m] +=! t[m, n]; y[m] = s[m] + t[m, 0]",
            {"a": ("float32", (1024, 1024))},
            "",
        ),
    ],
)
def test_an_estimate_says_why_it_is_far_above_the_floor(text: str, inputs: dict[str, Any], reason: str) -> None:
    (found,) = estimate_item(Item(text, inputs, ["y"]), ["nvidia-h200-sxm"], 1)
    is_above = found.plans[0].estimate.seconds > 3 * found.floor.seconds
    assert bool(found.reasons[0]) == is_above == bool(reason)
    assert reason in found.reasons[0]


def test_of_a_target_only_what_a_scatter_writes_is_traffic() -> None:
    inputs = {"t": ("float32", (1 << 20,)), "x": ("float32", (16,)), "a": ("int32", (16,))}
    (found,) = estimate_item(Item("t[a[i]] =. x[i]", inputs), ["nvidia-h200-sxm"], 1)
    assert found.floor.traffic_bytes == 16 * (4 + 4 + 4)


# slices -----------------------------------------------------------------------------------------------------------
def work(item: Item, *devices: str) -> EstimateTask:
    asked: list[EstimateTask] = []

    def compute(works: Sequence[EstimateTask], _: Deadline) -> list[EstimateResult]:
        asked.extend(works)
        return [EstimateResult() for _ in works]

    EstimateCache(compute).estimates([item], devices, 1)
    return asked[0]


def test_a_slice_that_is_over_has_one_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roller_svc.compiler.estimates.worker.SLICE_S", 0.0)
    devices = ("nvidia-h200-sxm", "nvidia-v100-sxm2")
    whole = compute_estimates([work(MATMUL, *devices)], Deadline())[0].device_results
    assert [part.device_results for part in estimate_slice([work(MATMUL, *devices), work(MATMUL, *devices)])] == [whole[:1]]
    (refused,) = estimate_slice([work(WRONG, *devices), work(MATMUL, *devices)])
    assert refused.rejection is not None
    assert not refused.device_results


def test_a_slice_has_all_that_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roller_svc.compiler.estimates.worker.SLICE_S", 600.0)
    works = [work(MATMUL, "nvidia-h200-sxm", "nvidia-v100-sxm2"), work(WRONG, "nvidia-h200-sxm")]
    assert estimate_slice(works) == compute_estimates(works, Deadline())


def test_processes_for_estimates_load_no_compilers_texts() -> None:
    stages = ("roller_svc.schedule", "roller_svc.codegen", "roller_svc.compiler.lower_and_emit")
    heavy = ("pydantic", "yaml", "fastapi", *stages)
    modules = "roller_svc.compiler.estimates.worker, roller_svc.farm.workers"
    code = f"import sys, {modules}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_launches_that_read_constants_alone_are_no_part_of_a_call() -> None:
    types = {"a": TensorType(DType.FLOAT16, (4096, 4096)), "b": TensorType(DType.FLOAT16, (4096, 4096))}
    each_call = parse("y[m, n] +=! a[m, k] * where(k <= n, b[k, n], 0.0)", types)
    prepared = replace(each_call, constants=("b",))
    (before, after) = (estimate_program(PartitionCache(program), H200).plans[0] for program in (each_call, prepared))
    assert [choice.runs_once for choice in before.choices] == [False, False]
    assert [choice.runs_once for choice in after.choices] == [True, False]
    assert before.estimate.once_s == 0.0 < after.estimate.once_s
    assert after.estimate.seconds + after.estimate.once_s == pytest.approx(before.estimate.seconds)
    assert after.estimate.seconds == after.ranking_seconds == after.dominant_choice.estimate.seconds
    stages = {stage.name: stage.seconds for stage in after.estimate.stages}
    assert stages == {stage.name: stage.seconds for stage in after.choices[1].estimate.stages}
    node = OpNode("product", "fused", each_call, ("a", "b"), ("y",))
    cost = CostTable(H200).cost(node, {"b": Constant("", types["b"])})
    assert cost is not None
    assert (cost.kernels, cost.seconds) == (1, after.estimate.seconds)
