"""Gathers on CPUs: where an index from data is checked, and which rows are prefetched."""

from __future__ import annotations

import numpy as np
import pytest

import roller_svc
from roller_svc import hardware
from roller_svc.compiler.lower_and_emit import lower
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.rank import rank
from roller_svc.errors import IndexRangeError
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Load, loads_of
from roller_svc.ir.program import TensorType
from roller_svc.ir.schedule import Compute, Let, Node, Prefetch, iter_nodes

HW = hardware.load("cpu-x86-avx512")
TABLE, ROWS = (30000, 1024), 3072


def nodes(text: str, **inputs: tuple[str, tuple[int, ...]]) -> list[Node]:
    program = parse(text, {name: TensorType(DType(dtype), shape) for name, (dtype, shape) in inputs.items()})
    (group,) = partition(program, HW)
    (candidate,), _ = rank(group, HW, HW.unit_for(DType.FLOAT32), 1)
    (tree,) = lower(group, candidate.program, HW)
    return list(iter_nodes(tree.body))


def gather(text: str = "y[n,c] = t[i[n],c]", rows: int = ROWS) -> list[Node]:
    return nodes(text, t=("float32", TABLE), i=("int32", (rows,)))


def checked_loads(found: list[Node]) -> list[Load]:
    return [x for n in found if isinstance(n, Compute) for x in loads_of(n.value) if any(x.bounds_checked)]


def checking(found: list[Node]) -> list[Let]:
    return [n for n in found if isinstance(n, Let) and n.bounds_check is not None]


def test_index_is_checked_once_per_row() -> None:
    found = gather()
    (let,) = checking(found)
    assert let.bounds_check == ("t", 0)
    assert not checked_loads(found)
    assert all(n.var != "n" for n in iter_nodes(let.body) if isinstance(n, Let))  # below the row, above its columns
    assert any(isinstance(n, Let) and n.var == "c.first" for n in iter_nodes(let.body))


def test_prefetches_row_of_a_later_index() -> None:
    found = gather()
    hints = [n for n in found if isinstance(n, Prefetch)]
    (later,) = [n for n in found if isinstance(n, Let) and n.var.endswith(".later")]
    assert hints
    assert {h.tensor for h in hints} == {"t"}
    assert later.bounds_check is None
    (read,) = loads_of(later.value)
    assert read.tensor == "i"  # prefetched rows exist, the last one's too: min(n + 2, 3071)
    assert "3071" in repr(read.index)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("y[n,c] = t[i[n],c]", 2),  # too few to be ahead of one
        ("y[n,c] = t[i[n],c]", 16),  # a core's own cache has them
        ("y[c] +=! t[i[n],c]", ROWS),  # no map
    ],
)
def test_no_prefetch_without_measured_gain(text: str, rows: int) -> None:
    assert not [n for n in gather(text, rows) if isinstance(n, Let) and n.var.endswith(".later")]


def test_conditional_read_is_checked_in_its_branch() -> None:
    found = gather("y[n,c] = t[i[n],c].when([i[n] > 0], 0.0)")
    assert not checking(found)
    assert checked_loads(found)


def test_computed_index_is_checked_at_its_use() -> None:
    inputs = {"t": ("float32", (5000, 64)), "x": ("float32", (300,)), "w": ("float32", (300, 64))}
    program = "p[n] = x[n].cast(`int32`); y[n,c] = t[p[n],c] + w[n,c]"
    x = np.arange(300, dtype=np.float32)[::-1].copy()
    t, w = (np.random.default_rng(1).random(shape, np.float32) for shape in ((5000, 64), (300, 64)))
    kernel = roller_svc.compile(program, inputs, select="model", top_k=1)
    np.testing.assert_array_equal(kernel(t=t, x=x, w=w)["y"], t[x.astype(int)] + w)


@pytest.mark.parametrize("columns", [1, 5, 37, 64, 1000])
@pytest.mark.parametrize("text", ["y[n,c] = t[i[n],c]", "y[n,c] = t[i[n],c] * t[j[n],c]", "y[n,c] = t[i[j[n]],c]"])
def test_gathers_match_numpy_and_report_bad_indices(text: str, columns: int) -> None:
    rng = np.random.default_rng(columns)
    t = rng.random((700, columns), np.float32)
    i, j = (rng.integers(0, 601, 601).astype(np.int32) for _ in range(2))
    inputs = {"t": ("float32", t.shape), "i": ("int32", (601,)), "j": ("int32", (601,))}
    inputs = {name: given for name, given in inputs.items() if f"{name}[" in text}
    arrays = {name: {"t": t, "i": i, "j": j}[name] for name in inputs}
    want = {"y[n,c] = t[i[n],c]": t[i], "y[n,c] = t[i[n],c] * t[j[n],c]": t[i] * t[j]}.get(text)
    kernel = roller_svc.compile(text, inputs, select="model", top_k=1)
    np.testing.assert_array_equal(kernel(**arrays)["y"], t[i[j]] if want is None else want)
    i[j[600]] = i[600] = 700
    with pytest.raises(IndexRangeError, match="index 700 is outside dimension 0"):
        kernel(**arrays)


def test_unevaluated_bad_index_is_not_an_error() -> None:
    inputs = {"t": ("float32", (40, 64)), "i": ("int32", (9,))}
    kernel = roller_svc.compile("y[n,c] = t[i[n],c].when([i[n] >= 0], 0.0)", inputs, select="model", top_k=1)
    t, i = np.random.default_rng(2).random((40, 64), np.float32), np.arange(-4, 5, dtype=np.int32)
    np.testing.assert_array_equal(kernel(t=t, i=i)["y"], np.where(i[:, None] >= 0, t[i], 0))


def test_one_index_gathers_from_tensors_of_different_ranks() -> None:
    kernel = roller_svc.compile(
        "y[n] +=! x[n, t[n, d], d] * w[t[n, d]] where n in 3, d in 40",
        {"x": ("float32", (3, 5, 40)), "t": ("int64", (3, 40)), "w": ("float32", (5,))},
        select="model",
        top_k=1,
    )
    rng = np.random.default_rng(0)
    x, t, w = rng.random((3, 5, 40), np.float32), rng.integers(0, 5, (3, 40)), rng.random(5, np.float32)
    expected = (np.take_along_axis(x, t[:, None, :], 1)[:, 0] * w[t]).sum(-1)
    np.testing.assert_allclose(kernel(x=x, t=t, w=w)["y"], expected, rtol=1e-5)
