"""Inputs that stay the same from call to call: what is made of them alone is made once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import roller_svc
from roller_svc.errors import ArgumentError, ScheduleError
from roller_svc.frontend.lang.input_types import tensor_types
from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Load
from roller_svc.ir.index import num, ref
from roller_svc.ir.program import Combine
from roller_svc.ir.schedule import Compute, Loop, LoopKind, Node, Prefetch, ScheduleTree, Scope, Storage, iter_nodes
from roller_svc.schedule.legality import check
from roller_svc.schedule.prepack import prepack
from roller_svc.semantics.inputs import random_inputs

Inputs = dict[str, tuple[str, tuple[int, ...]]]

GEMM = "C[m, n] +=! A[m, k] * B[k, n]"
CONV = (
    "Y[n, f, h, w] +=! X[n, c, h + r - 1, w + s - 1].when([h + r > 0, h + r < 14, w + s > 0, w + s < 14], 0.0)"
    " * W[f, c, r, s] where h in 13, w in 13, r in 3, s in 3"
)
DEQUANTISED = "D[k, n] = (Q[k, n].cast(`float32`) - 8.0) * S[n]; C[m, n] +=! A[m, k] * D[k, n]"
# The table of weights is a launch of its own: every row of C needs all of it.
TABLE = "T[k] +=! W[k, j] * W[k, j]; C[m] +=! A[m, k] * T[k]"
# The sum of squares is split among the cores, and its halves are launches, too.
NORMALISED = "S[g] +=! W[k, n] * W[k, n] where g in 1; C[m, n] +=! A[m, k] * (W[k, n] / S[0])"

# The last is the number of launches that prepare; None: it depends on the cores.
CASES: list[tuple[str, Inputs, tuple[str, ...], int | None]] = [
    (GEMM, {"A": ("float32", (70, 50)), "B": ("float32", (50, 130))}, ("B",), 1),
    (GEMM, {"A": ("float32", (70, 50)), "B": ("float32", (50, 130))}, ("A", "B"), 2),
    ("C[m, n] +=! A[m, k] * B[n, k]", {"A": ("float32", (70, 600)), "B": ("float32", (131, 600))}, ("B",), 1),
    ("C[b, m, n] +=! A[b, m, k] * B[b, k, n]", {"A": ("float32", (3, 40, 50)), "B": ("float32", (3, 50, 30))}, ("B",), 1),
    (DEQUANTISED, {"A": ("float32", (40, 96)), "Q": ("int8", (96, 80)), "S": ("float32", (80,))}, ("Q", "S"), 1),
    (CONV, {"X": ("float32", (1, 24, 13, 13)), "W": ("float32", (40, 24, 3, 3))}, ("W",), 1),
    (TABLE, {"A": ("float32", (30, 40)), "W": ("float32", (40, 50))}, ("W",), 1),
    (NORMALISED, {"A": ("float32", (40, 1024)), "W": ("float32", (1024, 1024))}, ("W",), None),
    ("Y[m, n] = A[m, n] * S[n]", {"A": ("float32", (30, 40)), "S": ("float32", (40,))}, ("S",), 0),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0][:24]}-{'-'.join(case[2])}")
def test_a_kernel_with_constants_gives_the_same_bits(case: tuple[str, Inputs, tuple[str, ...], int | None]) -> None:
    expression, inputs, constants, launches = case
    plain = roller_svc.compile(expression, inputs, select="model")
    kernel = roller_svc.compile(expression, inputs, select="model", constants=constants, winograd="never")
    assert launches in (None, sum(launch.is_prepack for launch in kernel.launches))
    first, second = (_arrays(expression, inputs, seed) for seed in (1, 2))
    ready = kernel.prepare(**{name: first[name] for name in constants})
    others = [{name: array for name, array in arrays.items() if name not in constants} for arrays in (first, second)]
    calls = [ready.run(arrays) for arrays in others]
    for arrays, got in zip(others, calls, strict=True):
        want, whole = plain.run(first | arrays), kernel.run(first | arrays)
        for name, expected in want.items():
            np.testing.assert_allclose(got[name], expected, rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(got[name], whole[name])


def _arrays(expression: str, inputs: Inputs, seed: int) -> dict[str, Any]:
    return dict(random_inputs(parse(expression, dict(tensor_types(inputs))), seed=seed))


# saved kernels, errors ------------------------------------------------------------------------------------------------
def test_a_saved_kernel_knows_its_constants(tmp_path: Path) -> None:
    expression, inputs, constants, _ = CASES[0]
    kernel = roller_svc.compile(expression, inputs, select="model", constants=constants)
    arrays = _arrays(expression, inputs, 1)
    again = roller_svc.load(kernel.save(tmp_path / "kernel"))
    got = again.prepare(B=arrays["B"])(A=arrays["A"])
    np.testing.assert_array_equal(got["C"], kernel.run(arrays)["C"])
    marked = [line for line in (tmp_path / "kernel" / "kernel.h").read_text().splitlines() if "/* once */" in line]
    assert len(marked) == 1


def test_measuring_times_what_is_left_to_do() -> None:
    expression, inputs, constants, _ = CASES[0]
    kernel = roller_svc.compile(expression, inputs, select="measure", top_k=3, constants=constants)
    arrays = _arrays(expression, inputs, 1)
    call = kernel.runner().bind(arrays)
    arrays["B"][...] = 0  # too late for what has been packed
    call()
    want = _arrays(expression, inputs, 1)
    np.testing.assert_allclose(call.results()["C"], want["A"] @ want["B"], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_results_may_go_where_a_constant_lies() -> None:
    expression, inputs, constants, _ = CASES[-1]
    kernel = roller_svc.compile(expression, inputs, select="model", constants=constants)
    arrays = _arrays(expression, inputs, 1)
    want = arrays["A"] * arrays["S"]
    memory = np.zeros((30, 40), np.float32)
    memory[3] = arrays["S"]
    kernel.prepare(S=memory[3])(A=arrays["A"], out={"Y": memory})
    np.testing.assert_array_equal(memory, want)


def test_one_prepared_kernel_serves_several_threads() -> None:
    expression, inputs, constants, _ = CASES[0]
    kernel = roller_svc.compile(expression, inputs, select="model", constants=constants)
    arrays = [_arrays(expression, inputs, seed) for seed in range(16)]
    ready = kernel.prepare(B=arrays[0]["B"])
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda one: ready(A=one["A"])["C"], arrays))
    for one, got in zip(arrays, results, strict=True):
        np.testing.assert_allclose(got, one["A"] @ arrays[0]["B"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("constants", ["B", ["X"], [1], 5])
def test_constants_must_be_inputs(constants: Any) -> None:
    with pytest.raises(ArgumentError, match="constants"):
        roller_svc.compile(GEMM, CASES[0][1], select="model", constants=constants)


def test_a_prepared_kernel_wants_all_constants_and_nothing_else() -> None:
    expression, inputs, constants, _ = CASES[0]
    kernel = roller_svc.compile(expression, inputs, select="model", constants=constants)
    arrays = _arrays(expression, inputs, 1)
    with pytest.raises(ArgumentError, match="missing argument: B"):
        kernel.prepare()
    with pytest.raises(ArgumentError, match="unknown argument 'A'"):
        kernel.prepare(**arrays)
    with pytest.raises(ArgumentError, match="unknown argument 'B'"):
        kernel.prepare(B=arrays["B"])(**arrays)
    with pytest.raises(ArgumentError, match="missing argument: A"):
        kernel.prepare(B=arrays["B"])()


# trees ----------------------------------------------------------------------------------------------------------------
def _tree(*, late_read: bool = False, filled_from: str = "W") -> ScheduleTree:
    """C[i, j] = packed[j] with packed filled from W in a loop over i and a loop over steps."""
    fill = Loop("x", 4, LoopKind.SERIAL, (Compute(".packed", (ref("x"),), _load(filled_from, ref("s"), ref("x"))),))
    use = Loop("y", 4, LoopKind.SERIAL, (Compute("C", (ref("i"), ref("s"), ref("y")), _load(".packed", ref("y"))),))
    steps: tuple[Node, ...] = (Loop("s", 3, LoopKind.SERIAL, (fill, use)),)
    if late_read:
        steps = (*steps, Compute("D", (ref("i"),), _load(".packed", num(0))))
    room = Storage(".packed", DType.FLOAT32, (4,), Scope.STACK, steps)
    return ScheduleTree("kernel0", (Loop("i", 5, LoopKind.PARALLEL, (room,)),))


def _load(tensor: str, *index: Any) -> Load:
    return Load(tensor, index, DType.FLOAT32)


def test_only_loops_that_the_contents_depend_on_are_repeated() -> None:
    found = prepack(_tree(), frozenset({"W"}))
    ((room, type_),) = found.workspaces
    assert type_.shape == (3, 4)
    (launch,) = found.launches
    check(launch.body, {"W", room})
    check(found.tree.body, {"C", room})


def test_prepacking_prefetches_no_results() -> None:
    """A micro-kernel of two constants is hoisted whole; its launch does not know the results."""
    prefetch = Loop("line", 2, LoopKind.UNROLL, (Prefetch("C", (ref("i"), ref("line")), 0, for_write=True),))
    nearby = Prefetch("W", (ref("i"), ref("x")), 16)
    fill = Loop("x", 4, LoopKind.SERIAL, (prefetch, nearby, Compute(".sums", (ref("x"),), _load("W", num(0), ref("x")))))
    use = Loop("y", 4, LoopKind.SERIAL, (Compute("C", (ref("i"), ref("y")), _load(".sums", ref("y"))),))
    sums = Storage(".sums", DType.FLOAT32, (4,), Scope.STACK, (fill, use))
    found = prepack(ScheduleTree("kernel0", (Loop("i", 5, LoopKind.PARALLEL, (sums,)),)), frozenset({"W"}))
    (launch,) = found.launches
    assert [node for node in iter_nodes(launch.body) if isinstance(node, Prefetch)] == [nearby]
    assert "line" not in {node.var for node in iter_nodes(launch.body) if isinstance(node, Loop)}


def _growing() -> ScheduleTree:
    """A room that grows from step to step."""
    sum_ = Compute(".packed", (ref("x"),), _load("W", ref("s"), ref("x")), Combine.SUM)
    use = Compute("C", (ref("i"), ref("s")), _load(".packed", num(0)))
    steps = Loop("s", 3, LoopKind.SERIAL, (Loop("x", 4, LoopKind.SERIAL, (sum_,)), use))
    return ScheduleTree("kernel0", (Storage(".packed", DType.FLOAT32, (4,), Scope.STACK, (steps,)),))


def _twice() -> ScheduleTree:
    """A room that is filled, used, and filled again."""
    fill = Compute(".packed", (num(0),), _load("W", ref("i"), num(0)))
    use = Compute("C", (ref("i"),), _load(".packed", num(0)))
    room = Storage(".packed", DType.FLOAT32, (4,), Scope.STACK, (fill, use, fill, use))
    return ScheduleTree("kernel0", (Loop("i", 5, LoopKind.PARALLEL, (room,)),))


@pytest.mark.parametrize("tree", [_tree(late_read=True), _tree(filled_from="A"), _growing(), _twice()])
def test_what_is_read_elsewhere_or_filled_from_something_else_stays(tree: ScheduleTree) -> None:
    found = prepack(tree, frozenset({"W"}))
    assert found.tree == tree
    assert not found.launches


def test_a_part_of_memory_that_iterations_share_may_not_be_written() -> None:
    fill = Loop("x", 4, LoopKind.SERIAL, (Compute(".packed", (ref("x"),), _load("W", ref("x"))),))
    shared = Storage(".packed", DType.FLOAT32, (4,), Scope.STACK, (fill,), subview_of=_load("room", num(0)))
    with pytest.raises(ScheduleError, match="write the same elements of room"):
        check((Loop("i", 5, LoopKind.PARALLEL, (shared,)),), {"W", "room"})


# the model ------------------------------------------------------------------------------------------------------------
def test_packing_that_is_done_ahead_costs_nothing() -> None:
    inputs: Inputs = {"A": ("float32", (64, 1500)), "B": ("float32", (1500, 700))}
    plain, constant = (roller_svc.compile(GEMM, inputs, select="model", constants=constants) for constants in ((), ("B",)))
    assert plain.estimate is not None
    assert constant.estimate is not None
    assert constant.estimate.seconds < plain.estimate.seconds
