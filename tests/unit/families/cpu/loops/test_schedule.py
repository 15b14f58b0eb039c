"""Memory-bound loop nests on CPUs: column reductions, rows in flight, prefetches, arg-reductions."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from cases_cpu import hinting

import roller_svc
from roller_svc.compiler.backends import backend_for
from roller_svc.compiler.lower_and_emit import emit_plan, lower
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.rank import rank
from roller_svc.families.common.cpu.column_reduction import ACCUMULATOR_BYTES, MANY_TERMS_ACCUMULATOR_BYTES
from roller_svc.frontend.lang.parser import parse
from roller_svc.hardware import detect_local, load
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import loads_of
from roller_svc.ir.program import TensorType
from roller_svc.ir.report import Plan
from roller_svc.ir.schedule import Compute, HorizontalReduce, Loop, LoopKind, Node, Prefetch, Storage, iter_nodes
from roller_svc.toolchain import compile_source

HW = hinting(load("cpu-x86-avx512"))
TARGETS = ("local", "cpu-x86-avx2")


def nodes(text: str, **shapes: tuple[int, ...]) -> list[Node]:
    program = parse(text, {name: TensorType(DType.FLOAT32, shape) for name, shape in shapes.items()})
    (group,) = partition(program, HW)
    (candidate,), _ = rank(group, HW, HW.unit_for(DType.FLOAT32), 1)
    (tree,) = lower(group, candidate.program, HW)
    return list(iter_nodes(tree.body))


def test_column_accumulators_are_on_the_stack() -> None:
    found = nodes("y[j] +=! x[i, j]", x=(64, 4096))
    (cached,) = [n for n in found if isinstance(n, Storage)]
    assert cached.shape[0] > 64
    rows = next(n for n in found if isinstance(n, Loop) and n.var == "i.piece")
    assert any(isinstance(n, Loop) and n.kind is LoopKind.VECTOR for n in iter_nodes(rows.body))


def test_column_accumulators_of_few_steps_are_registers() -> None:
    assert not [n for n in nodes("y[j] +=! x[i, j]", x=(4, 4096)) if isinstance(n, Loop) and n.var == "i.piece"]


@pytest.mark.parametrize(("elements", "prefetched"), [(1 << 12, set()), (1 << 22, {"x", "y"})])
def test_prefetches_only_data_beyond_private_caches(elements: int, prefetched: set[str]) -> None:
    found = nodes("y[i] = x[i] * 2.0", x=(elements,))
    nontemporal = {n.tensor for n in found if isinstance(n, Compute) and n.nontemporal}  # needs no line to be there
    assert {n.tensor for n in found if isinstance(n, Prefetch)} == prefetched - nontemporal
    assert all(n.for_write == (n.tensor == "y") for n in found if isinstance(n, Prefetch))


def test_second_pass_over_a_row_is_not_prefetched() -> None:
    found = nodes("s[i] +=! x[i, j]; y[i, j] = x[i, j] / s[i]", x=(4096, 1024))
    reading = [n for n in found if isinstance(n, Prefetch) and n.tensor == "x"]
    pieces = [n for n in found if isinstance(n, Loop) and n.var.endswith(".piece")]
    assert reading
    assert sum(any(n in reading for n in iter_nodes(loop.body)) for loop in pieces) == 1


@pytest.mark.parametrize(("rows", "in_order"), [(64, False), (1 << 16, True)])
def test_rows_from_memory_are_reduced_in_memory_order(rows: int, in_order: bool) -> None:
    """Loads of several rows, all in one block of code, are moved among each other else."""
    program = parse("y[i] +=! x[i, j]", {"x": TensorType(DType.FLOAT32, (rows, 121))})
    (group,) = partition(program, HW)
    candidates, _ = rank(group, HW, HW.unit_for(DType.FLOAT32), 40)
    four = next(c for c in candidates if c.program.thread["i"] == 4 and c.program.reduce_threads == 64)
    text = emit_plan(Plan((four,)), program, (group,), HW).text
    joins = re.findall(r"y_acc_(\d)_\d \+= \*\(vf32x16 \*\).*\n(?=(.*))", text)
    assert ["__asm__ volatile" in after for _, after in joins] == [in_order] * 4 * 7
    assert ([row for row, _ in joins] == sorted(row for row, _ in joins)) == in_order


def test_lanes_of_a_sum_are_reduced_horizontally() -> None:
    assert any(isinstance(n, HorizontalReduce) for n in nodes("y[i] +=! x[i, j]", x=(64, 1024)))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", [(1, 5), (7, 16), (33, 121), (130, 67), (9, 1000)])
def test_row_and_column_reductions_match_the_interpreter(target: str, shape: tuple[int, int]) -> None:
    x = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
    x[0, -1] = np.nan
    text = "a[i] +=! x[i, j]; b[j] +=! x[i, j]; c[i] >=! x[i, j]; d[j] <=! x[i, j]"
    kernel = roller_svc.compile(text, {"x": ("float32", shape)}, target=target, outputs=list("abcd"))
    got = kernel(x=x)
    for name, want in zip("abcd", (x.sum(1), x.sum(0), x.max(1), x.min(0)), strict=True):
        np.testing.assert_allclose(got[name], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("body", ["a[k, m] * b[k] // 3", "(a[k, m] - b[k]) % 3", "(a[k, m] + k * 1000003) // 5"])
def test_column_sums_of_quotients_of_data_are_exact(body: str) -> None:
    inputs = {"a": ("int64", (65, 24)), "b": ("int64", (65,))}
    rng = np.random.default_rng(0)
    arrays = {name: rng.integers(-(1 << 63), (1 << 63) - 1, shape) for name, (_, shape) in inputs.items() if name in body}
    inputs = {name: inputs[name] for name in arrays}
    text = f"y[m] +=! {body}"
    got = roller_svc.compile(text, inputs, select="model", top_k=1)(**arrays)["y"]
    assert (got == roller_svc.reference(text, inputs, arrays)["y"]).all()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", [(1, 200_000), (3, 7), (5, 100), (64, 1000)])
def test_argmax_returns_the_first_index(target: str, shape: tuple[int, int]) -> None:
    x = np.floor(np.random.default_rng(1).uniform(0, 50, shape)).astype(np.float32)
    x[0, shape[1] // 2] = np.nan
    text = "m[i] >=! x[i, j]; y[i] <=! j.when([m[i] == x[i, j]], j.val())"
    kernel = roller_svc.compile(text, {"x": ("float32", shape)}, target=target, outputs=["y"])
    want = np.where(np.isnan(x).any(1), shape[1], x.argmax(1))
    np.testing.assert_array_equal(kernel(x=x)["y"], want)


NORM = "s[i] +=! x[i, j]; y[i, j] = (x[i, j] - s[i] / 4096.0) * w[j]"
EXPONENTIALS = "s[i] +=! x[i, j].call(`exp`); y[i, j] = x[i, j].call(`exp`) / s[i]"


@pytest.mark.parametrize(("text", "rows", "past"), [(NORM, 4096, True), (NORM, 64, False), (EXPONENTIALS, 4096, False)])
def test_nontemporal_stores_only_for_tensors_not_read_back(text: str, rows: int, past: bool) -> None:
    """Few rows stay in a cache; exponentials wait where the quotients will be."""
    shapes = {"x": (rows, 4096)} | ({"w": (4096,)} if "w[" in text else {})
    program = parse(text, {name: TensorType(DType.FLOAT32, shape) for name, shape in shapes.items()})
    (group,) = partition(program, HW)
    candidates, _ = rank(group, HW, HW.unit_for(DType.FLOAT32), 40)
    assert {c.program.pipeline.nontemporal for c in candidates} == {False, past}
    for candidate in candidates:
        way = candidate.program.with_pipeline(nontemporal=True)
        (tree,) = lower(group, way, HW)
        stored = [n for n in iter_nodes(tree.body) if isinstance(n, Compute) and n.tensor == "y"]
        assert any(n.nontemporal for n in stored) == (text is NORM and way.reduce_threads > 1)


def test_nontemporal_rows_match_the_interpreter() -> None:
    """Vectors of rows that begin within a line are tested one by one, and rows have ends."""
    x = np.random.default_rng(0).uniform(-1, 1, (33, 1001)).astype(np.float32)
    program = parse("s[i] +=! x[i, j]; y[i, j] = x[i, j] - s[i]", {"x": TensorType(DType.FLOAT32, x.shape)})
    local = detect_local()
    (group,) = partition(program, local)
    candidates, _ = rank(group, local, local.unit_for(DType.FLOAT32), 40)
    rows = next(c for c in candidates if c.program.reduce_threads > 1)
    plan = Plan((replace(rows, program=rows.program.with_pipeline(nontemporal=True)),))
    compiled = compile_source(emit_plan(plan, program, (group,), local))
    assert "stream_" in compiled.source.text
    got = backend_for(local).load(compiled).run({"x": x})["y"]
    np.testing.assert_allclose(got, x - x.sum(1, keepdims=True), rtol=1e-4, atol=1e-4)


def test_vector_copies_do_not_become_string_instructions() -> None:
    hw = hinting(HW, 0.7)  # nothing but copies in their loops
    program = parse("y[i, j, k] = x[i, k] where j in 512", {"x": TensorType(DType.FLOAT32, (128, 512))})
    (group,) = partition(program, hw)
    ranked, _ = rank(group, hw, hw.unit_for(DType.FLOAT32), 1000)
    whole = [c for c in ranked if not c.program.pipeline.nontemporal and c.program.block.as_dict()["k"] == 512]
    one = next(c for c in whole if c.program.thread.as_dict()["k"] == hw.unit_for(DType.FLOAT32).shape[-1])
    kernel = compile_source(emit_plan(Plan((one,)), program, (group,), hw))
    assert b"\xf3\x48\xa5" not in kernel.binary  # rep movsq


@pytest.mark.parametrize(("words", "at_once"), [(32, 8), (18, 8), (2, 2)])
def test_packed_words_are_reduced_several_rows_at_a_time(words: int, at_once: int) -> None:
    """Steps that take other bits of the same row have no stream of their own."""
    text = "y[j] +=! x[i] * bitwise_and(q[i // 8, j] >> i % 8 * 4, 15).cast(`float32`)"
    rng = np.random.default_rng(words)
    x = rng.standard_normal(8 * words).astype(np.float32)
    q = rng.integers(-(2**31), 2**31, (words, 4096 - 16)).astype(np.int32)
    inputs = {"x": ("float32", x.shape), "q": ("int32", q.shape)}
    kernel = roller_svc.compile(text, inputs, select="model", top_k=1, target="cpu-x86-avx2")
    joined = next(line for line in kernel.source.splitlines() if "y_acc" in line and "+=" in line)
    assert joined.count("x[") == 8 * at_once
    weights = (q[np.arange(8 * words) // 8] >> (np.arange(8 * words) % 8 * 4)[:, None]) & 15
    np.testing.assert_allclose(kernel(x=x, q=q)["y"], x @ weights.astype(np.float32), rtol=1e-4, atol=1e-3)


QUANTISED = "y[j] +=! x[i] * {}(bitwise_and(q[i // 8, j] >> i % 8 * 4, 15).cast(`float32`) - 8.0)"


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "in_table"), [("", False), ("s[i // 32, j] * ", True)])
def test_lookup_table_absorbs_factors_shared_by_columns(scale: str, in_table: bool) -> None:
    rng = np.random.default_rng(3)
    arrays = {
        "x": rng.standard_normal(256).astype(np.float32),
        "q": rng.integers(-(2**31), 2**31, (32, 1000)).astype(np.int32),
    }
    if scale:
        arrays["s"] = rng.uniform(0.5, 2, (8, 1000)).astype(np.float32)
    inputs = {name: (str(array.dtype), array.shape) for name, array in arrays.items()}
    source = roller_svc.compile(QUANTISED.format(scale), inputs, select="model", target="cpu-x86-avx512").source
    assert "looked_up_v" in source
    assert ("looked_up_vf32x16((x[" in source) is in_table
    kernel = roller_svc.compile(QUANTISED.format(scale), inputs, select="model", top_k=1)
    i = np.arange(256)
    weights = ((arrays["q"][i // 8] >> (i % 8 * 4)[:, None]) & 15) - 8.0
    want = arrays["x"] @ (weights * (arrays["s"][i // 32] if scale else 1.0))
    np.testing.assert_allclose(kernel(**arrays)["y"], want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("text", "storage"), [("q[i // 8, j]", MANY_TERMS_ACCUMULATOR_BYTES), ("q[i, j]", ACCUMULATOR_BYTES)])
def test_column_accumulators_use_l2_for_many_terms(text: str, storage: int) -> None:
    program = parse(
        f"y[j] +=! x[i] * {text} where i in 512",
        {
            "x": TensorType(DType.FLOAT32, (512,)),
            "q": TensorType(DType.FLOAT32, (512, 12288)),
        },
    )
    (group,) = partition(program, HW)
    (candidate,), _ = rank(group, HW, HW.unit_for(DType.FLOAT32), 1)
    whole = replace(candidate.program, block=candidate.program.block.with_extent("j", 12288))
    (tree,) = lower(group, whole, HW)
    (cached,) = (n for n in iter_nodes(tree.body) if isinstance(n, Storage))
    assert cached.shape == (min(12288, storage // DType.FLOAT32.bytes),)


def test_streamed_rows_keep_their_number_in_flight() -> None:
    found = nodes("y[j] +=! x[a, b, j] * w[b]", x=(64, 3, 4096), w=(3,))
    (joined,) = (n for n in found if isinstance(n, Compute) and n.combine is not None)
    assert sum(load.tensor == "x" for load in loads_of(joined.value)) == 6
