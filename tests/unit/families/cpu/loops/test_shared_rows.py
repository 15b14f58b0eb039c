"""Products of few rows with a matrix that is read once: queries over a cache of keys and values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

import roller_svc
from roller_svc.compiler.lower_and_emit import lower
from roller_svc.compiler.partition_cache import PartitionCache, partition
from roller_svc.compiler.rank import rank
from roller_svc.families.common.cpu.shared_rows import shared_axis
from roller_svc.frontend.lang.parser import parse
from roller_svc.hardware import load
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import loads_of
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.schedule import Compute, Loop, LoopKind, Node, Scope, Storage, iter_nodes

HW = load("cpu-x86-avx512")
TARGETS = ("local", "cpu-x86-avx2")
KEYS, VALUES = "s[g, r, t] +=! q[g, r, d] * k[g, t, d]", "o[g, r, d] +=! p[g, r, t] * v[g, t, d]"


def program(text: str, **shapes: tuple[int, ...]) -> TensorProgram:
    return parse(text, {name: TensorType(DType.FLOAT32, shape) for name, shape in shapes.items()})


def nodes(text: str, **shapes: tuple[int, ...]) -> list[Node]:
    (group,) = partition(program(text, **shapes), HW)
    (candidate,), _ = rank(group, HW, HW.unit_for(DType.FLOAT32), 1)
    (tree,) = lower(group, candidate.program, HW)
    return list(iter_nodes(tree.body))


def accumulators(found: list[Node]) -> list[Storage]:
    return [n for n in found if isinstance(n, Storage) and n.tensor.endswith(".acc")]


def test_values_are_read_in_memory_order_into_registers() -> None:
    found = nodes(VALUES, p=(8, 2, 512), v=(8, 512, 64))
    (sums,) = accumulators(found)
    assert sums.scope is Scope.REGISTER
    assert sums.shape == (2, 2, 64)  # rows that alternate, queries, columns
    rows = next(n for n in found if isinstance(n, Loop) and n.var == "t.piece")
    inside = [n.var for n in iter_nodes(rows.body) if isinstance(n, Loop)]
    assert inside == [".set", ".point", ".lane"]  # each row is read by all queries before the next


@pytest.mark.parametrize(("columns", "why"), [(72, "no whole vectors"), (512, "more sums than registers")])
def test_other_columns_have_an_array_of_sums(columns: int, why: str) -> None:
    found = nodes("o[g, d] +=! p[g, t] * v[g, t, d]", p=(8, 512), v=(8, 512, columns))
    assert {n.scope for n in accumulators(found)} == {Scope.STACK}, why


def test_queries_share_keys_that_are_read_in_sequence() -> None:
    found = nodes(KEYS, q=(8, 2, 128), k=(8, 4096, 128))
    products = [n for n in found if isinstance(n, Loop) and n.kind is LoopKind.UNROLL and n.var == ".point" and n.extent == 2]
    keys = [
        load
        for n in products
        for c in iter_nodes(n.body)
        if isinstance(c, Compute)
        for load in loads_of(c.value)
        if load.tensor == "k"
    ]
    assert keys


@pytest.mark.parametrize(
    ("text", "shapes", "shared"),
    [
        (VALUES, {"p": (8, 2, 512), "v": (8, 512, 64)}, "r"),
        (KEYS, {"q": (8, 3, 64), "k": (8, 512, 64)}, "r"),
        ("s[g, t] +=! q[g, d] * k[g, t, d]", {"q": (8, 64), "k": (8, 512, 64)}, None),
        ("m[i] >=! x[i, j]; s[i] +=! exp(x[i, j] - m[i])", {"x": (64, 512)}, None),
        ("y[m, n] +=! x[m, k] * w[n, i[k]]", {"x": (2, 64), "w": (512, 64)}, None),  # data select the columns
    ],
)
def test_shared_axis_is_what_the_largest_tensor_lacks(text: str, shapes: dict[str, tuple[int, ...]], shared: str | None) -> None:
    types = {name: TensorType(DType.FLOAT32, shape) for name, shape in shapes.items()}
    if "i[k]" in text:
        types["i"] = TensorType(DType.INT32, (64,))
    (group,) = partition(parse(text, types), HW)
    place = shared_axis(group.space)
    assert (None if place is None else group.space.axes[place].name) == shared


@pytest.mark.parametrize(("queries", "kinds"), [(4, {"nest", "contraction"}), (8, {"contraction"})])
def test_few_queries_over_values_are_a_nest_or_a_contraction(queries: int, kinds: set[str]) -> None:
    partitions = PartitionCache(program(VALUES, p=(8, queries, 512), v=(8, 512, 64))).partitions(HW)
    assert {groups[0].kind.value for groups in partitions} == kinds


def test_a_program_without_few_rows_has_no_other_partition() -> None:
    square = program("c[m, n] +=! a[m, k] * b[k, n]", a=(64, 64), b=(64, 64))
    assert len(PartitionCache(square).partitions(HW)) == 1


SHAPES = [
    *[(1, 3, 37, 64), (2, 1, 16, 64), (3, 5, 50, 32), (1, 2, 37, 80)],
    *[(1, 7, 33, 16), (2, 2, 41, 72), (2, 3, 40, 128), (1, 4, 64, 256)],
]


def test_a_tail_of_one_point_has_parts_of_columns_in_registers() -> None:
    (group,) = partition(program("o[g, r, d] +=! p[g, r, t] + v[g, t, d]", p=(8, 7, 512), v=(8, 512, 64)), HW)
    (candidate,), _ = rank(group, HW, HW.unit_for(DType.FLOAT32), 1)
    thread = candidate.program.thread.with_extent("r", 3).with_extent("d", 16)
    tiles = replace(candidate.program, thread=thread, block=candidate.program.block.with_extent("r", 9).with_extent("d", 32))
    (tree,) = lower(group, tiles, HW)
    assert {n.scope for n in accumulators(list(iter_nodes(tree.body)))} == {Scope.REGISTER}


def check(text: str, arrays: dict[str, NDArray[np.generic]], target: str) -> None:
    result = next(iter(roller_svc.compile(text, arrays, target=target, select="model", top_k=1)(**arrays).values()))
    want = next(iter(roller_svc.reference(text, arrays, arrays).values()))
    np.testing.assert_allclose(result, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_queries_over_a_cache_equal_the_reference(shape: tuple[int, int, int, int], target: str) -> None:
    groups, queries, keys, features = shape
    rng = np.random.default_rng(0)
    cache, q, p = (
        rng.standard_normal(s, dtype=np.float32)
        for s in ((groups, keys, features), (groups, queries, features), (groups, queries, keys))
    )
    check(KEYS, {"q": q, "k": cache}, target)
    check(VALUES, {"p": p, "v": cache}, target)


@pytest.mark.parametrize(
    "text", ["o[r, d] >=! p[r, t] + v[t, d]", "o[r, d] <=! p[r, t] * v[t, d]", "o[r, d] *=! p[r, t] + v[t, d]"]
)
def test_other_reductions_of_shared_rows_equal_the_reference(text: str) -> None:
    rng = np.random.default_rng(1)
    p, v = (rng.uniform(0.5, 0.6, s).astype(np.float32) for s in ((3, 37), (37, 32)))
    p[1, 5] = np.nan
    check(text, {"p": p, "v": v}, "local")


def test_integer_sums_of_shared_rows_wrap() -> None:
    rng = np.random.default_rng(2)
    p, v = (rng.integers(-(2**31), 2**31, s).astype(np.int32) for s in ((3, 37), (37, 32)))
    check("o[r, d] +=! p[r, t] * v[t, d]", {"p": p, "v": v}, "local")
