"""top_k_indices in rounds: one launch on every device, the order of ties and of NaN, a router's softmax before it."""

from __future__ import annotations

from typing import Any

import cases_gpu
import numpy as np
import pytest
from cases_cpu import cpu_case

import roller_svc
from roller_svc.compiler.estimates.batch import Item, estimate_item
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import PartitionCache, partition
from roller_svc.compiler.plans import best_plans, estimate_program, rank_partitions
from roller_svc.errors import InvariantError, ShapeError
from roller_svc.frontend.forms import align_form
from roller_svc.frontend.ops.calls import expand
from roller_svc.frontend.parse import parse, parse_forms
from roller_svc.fusion import attention
from roller_svc.hardware import load
from roller_svc.ir.constraints import ScheduleConstraints
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorExpr, TensorType
from roller_svc.runtime.cpu import CpuModule
from roller_svc.semantics.interpreter import evaluate
from roller_svc.toolchain import compile_source

TARGETS = ("nvidia-a100-sxm-80gb", "nvidia-h200-sxm", "amd-mi250x")


def expanded(call: str, dtype: str, shape: tuple[int, ...]) -> str:
    return expand(call, {"x": TensorType(DType(dtype), shape)}).text


def values(dtype: str, shape: tuple[int, ...]) -> Any:
    """Values with many ties, NaN and infinities."""
    found = np.random.default_rng(4).integers(-4, 5, shape).astype(dtype)
    if np.issubdtype(found.dtype, np.floating):
        found[0, ::3], found[1, ::2], found[2, :] = np.nan, np.inf, -np.inf
        found[-1, ::2], found[-1, 1::2] = np.nan, np.inf
    return found


def ordered(x: Any, k: int, *, largest: bool) -> Any:
    """The stable order, in which NaN is the greatest."""
    wide = x.astype(np.float64)
    keys = np.where(np.isnan(wide), 0.0, wide)
    return np.lexsort((-keys if largest else keys, np.isnan(wide) ^ largest), axis=1)[:, :k]


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(("dtype", "shape", "k"), [("float32", (9, 67), 5), ("float16", (5, 8), 8), ("int16", (3, 300), 2)])
def test_ties_keep_their_order_and_nan_is_the_greatest(dtype: str, shape: tuple[int, ...], k: int, *, largest: bool) -> None:
    x = values(dtype, shape)
    call = f"I = top_k_indices(x, k={k}, largest={str(largest).lower()})"
    kernel = roller_svc.compile(call, inputs={"x": (dtype, shape)}, target="local", select="model", top_k=1)
    assert len(kernel.launches) == 1
    np.testing.assert_array_equal(kernel.run({"x": x})["I"], ordered(x, k, largest=largest))


def kinds_of_rows(dtype: str, extent: int) -> Any:
    """Rows of random bits, of ties, of extremes, of one sign, of zeros of both signs, of denormal numbers."""
    random = np.random.default_rng(7)
    found = random.integers(0, 256, (7, extent * np.dtype(dtype).itemsize)).astype(np.uint8).view(dtype)
    found[1] = random.integers(0, 4, extent)
    if np.issubdtype(found.dtype, np.floating):
        found[np.isnan(found)] = np.nan  # a signalling one warns when it is converted
        found[2, ::3], found[2, 1::3], found[2, 2::3] = np.nan, np.inf, -np.inf
        found[3], found[4] = np.abs(found[3]), -np.abs(found[4])
        found[5], found[5, ::5] = -0.0, 0.0
        found[6] = random.normal(size=extent) * float(np.finfo(dtype).smallest_subnormal) * 40
    else:
        found[2, ::2], found[3], found[4] = np.iinfo(dtype).min, np.iinfo(dtype).max, np.iinfo(dtype).min
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "k", "largest"),
    [("float32", 20, True), ("float32", 690, False), ("float16", 20, False), ("int8", 40, True), ("uint32", 20, False)],
)
def test_a_selection_finds_more_elements_in_order(dtype: str, k: int, largest: bool) -> None:
    x = kinds_of_rows(dtype, 700 if k < 100 else 20_000)
    call = f"I = top_k_indices(x, k={k}, largest={str(largest).lower()})"
    assert "I_chosen" in expanded(call, dtype, x.shape)
    kernel = roller_svc.compile(call, inputs={"x": (dtype, x.shape)}, target="local", select="model", top_k=1)
    np.testing.assert_array_equal(kernel.run({"x": x})["I"], ordered(x, k, largest=largest))


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("target", TARGETS)
def test_every_device_selects_and_ranks(target: str) -> None:
    for dtype, largest in (("float32", True), ("float16", False), ("int8", True)):
        x = kinds_of_rows(dtype, 700)
        call = f"I = top_k_indices(x, k=20, largest={str(largest).lower()})"
        for text, is_selection in ((call, False), (expanded(call, dtype, x.shape), True)):
            kernel = roller_svc.compile(
                text, inputs={"x": (dtype, x.shape)}, target=target, select="model", top_k=1, runtime="emulator"
            )  # fmt: skip
            assert (len(kernel.launches) > 4) is is_selection
            np.testing.assert_array_equal(kernel.run({"x": x})["I"], ordered(x, 20, largest=largest))


CALLS = (
    ("I = top_k_indices(x, k=20)", "float32", ("I",)),
    ("I = top_k_indices(x, k=11, largest=false); V = top_k_values(x, k=11, largest=false)", "float16", ("I", "V")),
    ("y[i, j] = x[i, j] + 1; V = top_k_values(y, k=9); s[i] +=! y[i, j]", "int32", ("V", "s")),
)


@pytest.mark.parametrize(("text", "dtype", "outputs"), CALLS)
def test_both_forms_compute_the_same_under_names_of_their_own(text: str, dtype: str, outputs: tuple[str, ...]) -> None:
    x = kinds_of_rows(dtype, 300)
    first, other = parse_forms(text, {"x": TensorType(DType(dtype), x.shape)}, outputs)
    assert first == parse(text, {"x": TensorType(DType(dtype), x.shape)}, outputs)
    results = {output.tensor for output in first.outputs}
    ids, other_ids = ({s.output for s in form.statements} for form in (first, other))
    assert ids & other_ids == results | ({"y"} & ids)
    assert len(other_ids) == len(other.statements)
    expected, found = evaluate(first, {"x": x}), evaluate(other, {"x": x})
    for name in outputs:
        np.testing.assert_array_equal(found[name].wide, expected[name].wide)


@pytest.mark.parametrize(
    ("text", "extent"),
    [("I = top_k_indices(x, k=8)", 300), ("I = top_k_indices(x, k=20)", 40), ("I = top_k_indices(x, k=9)", 1 << 15)],
)
def test_programs_with_one_form(text: str, extent: int) -> None:
    assert len(parse_forms(text, {"x": TensorType(DType.FLOAT32, (2, extent))})) == 1


@pytest.mark.parametrize("outputs", [("I", "I_rank"), ("I", "I_nans")])
def test_an_intermediate_of_an_operator_as_a_result_has_the_first_form_alone(outputs: tuple[str, ...]) -> None:
    text, x = "I = top_k_indices(x, k=16)", kinds_of_rows("float32", 300)
    (form,) = parse_forms(text, {"x": TensorType(DType.FLOAT32, x.shape)}, outputs)
    assert tuple(output.name for output in form.outputs) == outputs
    assert len(parse_forms("top_k_indices(x, k=16)", {"x": TensorType(DType.FLOAT32, x.shape)})) == 2


def test_results_of_forms_have_one_type() -> None:
    narrow, wide = (parse("y[i] = x[i]", {"x": TensorType(DType.FLOAT32, (extent,))}) for extent in (4, 5))
    with pytest.raises(InvariantError, match="y has another type"):
        align_form(wide, narrow, "y")


@pytest.mark.slow
def test_the_other_form_is_constrained_and_noted_as_the_first() -> None:
    """A note finds the sum of squares by its id, and shows no id."""
    types = {"x": TensorType(DType.FLOAT32, (64, 128)), **dict.fromkeys("pq", TensorType(DType.FLOAT16, (2048, 256)))}
    squares = "D[i, j]: float32 +=! square(p[i, k] - q[j, k]); y[i, j] = exp(-D[i, j]); s[i] +=! D[i, j]"
    text, hw = f"I = top_k_indices(x, k=16); {squares}", load("nvidia-h200-sxm")
    forms, allowing = parse_forms(text, types, ("I", "y", "s")), ScheduleConstraints(allow_expanded_squares=True)
    cache, alone = PartitionCache.of_forms(forms), PartitionCache(forms[1])
    assert set(alone.partitions(hw, allowing)) <= set(cache.partitions(hw, allowing))
    assert len(alone.partitions(hw, allowing)) > len(alone.partitions(hw))
    (found,) = estimate_item(Item(text, types, ("I", "y", "s")), [hw.id], 1)
    (note,) = found.notes
    assert note.startswith("D: squares of differences are not expanded; allow_expanded_squares: ")


def test_reasons_name_the_tensors_of_the_other_form_without_numbers() -> None:
    forms = parse_forms("I = top_k_indices(x, k=100)", {"x": TensorType(DType.FLOAT32, (1, 16384))})
    estimate = estimate_program(PartitionCache.of_forms(forms), load("nvidia-h200-sxm"))
    assert "I_rank__1" in {s.output for group in estimate.ranked.groups for s in group.statements}
    assert "kernels pass on I_rank, " in estimate.reasons[0]


def test_the_model_chooses_the_form_of_a_device() -> None:
    forms = parse_forms("I = top_k_indices(x, k=50)", {"x": TensorType(DType.FLOAT32, (64, 1024))})
    cache = PartitionCache.of_forms(forms)
    seconds = {}
    for target in ("nvidia-h200-sxm", "cpu-x86-avx512"):
        estimate = estimate_program(cache, load(target))
        own = [estimate_program(PartitionCache(form), load(target)).plans[0].estimate.seconds for form in forms]
        assert estimate.plans[0].estimate.seconds == min(own)
        seconds[target] = own
    selected, ranked = zip(*seconds.values(), strict=True)
    assert ranked[0] < selected[0]
    assert selected[1] < ranked[1]


def test_the_other_form_is_emitted_for_the_program() -> None:
    """Both forms have a tensor I_rank, of other shapes."""
    x, local = kinds_of_rows("float32", 90), load("local")
    forms = parse_forms("I = top_k_indices(x, k=12)", {"x": TensorType(DType.FLOAT32, x.shape)})
    partitions = rank_partitions(PartitionCache.of_forms(forms), local, 1)
    ranks = next(ranked for ranked in partitions if len(ranked.groups) == len(forms[1].statements))
    source = emit_plan(best_plans(ranks.candidates, 1)[0], forms[0], ranks.groups, local)
    np.testing.assert_array_equal(CpuModule(compile_source(source)).run({"x": x})["I"], ordered(x, 12, largest=True))


def test_rounds_are_refused_as_attention_before_maps_are_inlined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each count of a round is a sum of products that all later rounds read."""

    def refuse(statement: TensorExpr, _: object) -> None:
        raise AssertionError(f"{statement.output} is inlined")

    monkeypatch.setattr(attention, "inline_loads", refuse)
    program = parse("I = top_k_indices(x, k=20)", {"x": TensorType(DType.FLOAT32, (64, 4096))})
    assert partition(program, load("nvidia-h200-sxm"))


@pytest.mark.slow
def test_an_axis_along_columns_is_selected() -> None:
    x = np.random.default_rng(3).integers(-9, 9, (800, 5)).astype(np.float32)
    kernel = roller_svc.compile(
        "I = top_k_indices(x, k=12, axis=0)", inputs={"x": ("float32", x.shape)}, target="local", select="model", top_k=1
    )  # fmt: skip
    np.testing.assert_array_equal(kernel.run({"x": x})["I"], ordered(x.T, 12, largest=True).T)


@pytest.mark.parametrize(
    ("dtype", "extent", "k", "message"),
    [
        ("float32", 1 << 21, 9, "more than 1048576"),
        ("int64", 1 << 15, 9, "more than 16384"),
        ("float32", 1 << 15, 20_000, "at most 16384 are found"),
    ],
)
def test_what_is_neither_selected_nor_ranked_is_refused(dtype: str, extent: int, k: int, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        expanded(f"I = top_k_indices(x, k={k})", dtype, (2, extent))


@pytest.mark.slow
@pytest.mark.emulator
def test_a_block_finds_the_first_elements_of_its_rows() -> None:
    cases_gpu.case(expanded("I = top_k_indices(x, k=2)", "float32", (5, 67)), {"x": ("float32", (5, 67))}).check_some(1)


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("target", TARGETS)
def test_every_device_finds_them_in_one_launch(target: str, *, largest: bool) -> None:
    for dtype, shape, k in (("float32", (5, 67), 4), ("float16", (33, 8), 2), ("int8", (3, 2100), 3)):
        call = f"I = top_k_indices(x, k={k}, largest={str(largest).lower()})"
        kernel = roller_svc.compile(
            call, inputs={"x": (dtype, shape)}, target=target, select="model", top_k=1, runtime="emulator"
        )  # fmt: skip
        assert len(kernel.launches) == 1
        x = values(dtype, shape)
        np.testing.assert_array_equal(kernel.run({"x": x})["I"], ordered(x, k, largest=largest))


@pytest.mark.slow
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(
    ("dtype", "shape", "k", "axis"),
    [
        ("float32", (9, 40), 20, 1),  # ranks
        ("float32", (4, 700), 11, 1),  # selection
        ("float16", (12, 5), 9, 0),
        ("int16", (4, 300), 9, 1),
        ("int64", (4, 40), 9, 1),
        ("bool", (4, 12), 3, 1),  # ranks, since it has no extrema
    ],
)
def test_values_beyond_the_rounds_are_those_at_the_positions(
    dtype: str, shape: tuple[int, ...], k: int, axis: int, *, largest: bool
) -> None:
    x = np.moveaxis(values("int8" if dtype == "bool" else dtype, tuple(np.roll(shape, 1 - axis))), -1, axis)
    x = np.ascontiguousarray(x > 0 if dtype == "bool" else x)
    call = f"V = top_k_values(x, k={k}, axis={axis}, largest={str(largest).lower()})"
    kernel = roller_svc.compile(call, inputs={"x": (dtype, shape)}, target="local", select="model", top_k=1)
    places = np.moveaxis(ordered(np.moveaxis(x, axis, 1), k, largest=largest), 1, axis)
    np.testing.assert_array_equal(kernel.run({"x": x})["V"], np.take_along_axis(x, places, axis))


@pytest.mark.slow
@pytest.mark.emulator
def test_blocks_of_all_kinds_find_the_same() -> None:
    cases_gpu.case(expanded("I = top_k_indices(x, k=3)", "float32", (3, 130)), {"x": ("float32", (3, 130))}).check_some(4)
    cpu_case(expanded("I = top_k_indices(x, k=3)", "float32", (3, 130)), {"x": ("float32", (3, 130))}).check_some(4)


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("target", [*TARGETS, "local"])
def test_a_router_is_one_launch(target: str) -> None:
    """Experts of each token with weights by a softmax over all, or over the chosen ones."""
    x = np.random.default_rng(2).normal(size=(5, 64)).astype(np.float32)
    text = (
        "I = top_k_indices(x, k=3); V = top_k_values(x, k=3); C = softmax(V); "
        "m[i] >=! x[i, j]; s[i] +=! exp(x[i, j] - m[i]); A[i, q] = exp(V[i, q] - m[i]) / s[i]"
    )
    kernel = roller_svc.compile(
        text, inputs={"x": ("float32", (5, 64))}, outputs=["I", "C", "A"], target=target, select="model", top_k=1,
        **({} if target == "local" else {"runtime": "emulator"}),
    )  # fmt: skip
    assert len(kernel.launches) == 1
    found, chosen = kernel.run({"x": x}), ordered(x, 3, largest=True)
    np.testing.assert_array_equal(found["I"], chosen)
    exponentials = np.exp(x.astype(np.float64))
    picked = np.take_along_axis(exponentials, chosen, 1)
    np.testing.assert_allclose(found["C"], picked / picked.sum(1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(found["A"], picked / exponentials.sum(1, keepdims=True), rtol=1e-5)
