"""Padded calls of random graphs that the proof admits equal calls without padding."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from roller_svc.frontend.graph_builder import GraphBuilder
from roller_svc.frontend.ops.operator import Operand
from roller_svc.graph.interpret import interpret
from roller_svc.graph.padding import PaddedAxes, PaddingError, padded_axes
from roller_svc.graph.weights import Weights
from roller_svc.ir.dtype import DType
from roller_svc.ir.graph import Graph
from roller_svc.ir.program import TensorType
from roller_svc.runtime.graphs.padding import Padding
from roller_svc.semantics.interpreter import reference

GRAPHS, LEAST_ADMITTED, LEAST_INSIDE = 400, 60, 20
BUCKET, NEAR, DISTANT = 4, 3, 7
Step = tuple[str, int, int]
STEPS = (
    "transpose", "merge", "split", "split_before", "regroup", "regroup_before", "add", "softmax", "cumsum", "flip", "slice", "join",
)  # fmt: skip
WEIGHTS = (6, 6, 4, 4, 2, 2, 2, 2, 1, 1, 1, 1)


def random_steps(rng: random.Random) -> list[Step]:
    return [(rng.choices(STEPS, WEIGHTS)[0], rng.randrange(1 << 20), rng.randrange(1 << 20)) for _ in range(rng.randint(2, 7))]


def build(shape: Sequence[int], batch: int, n: int, steps: Sequence[Step], weights: Weights) -> tuple[Graph, bool]:
    """Return the graph of the steps, and whether one puts the dimension n inside of another one.

    The shape's dimension `batch` has n elements.
    """
    builder = GraphBuilder("random", weights, reference)
    extents = [n if d == batch else extent for d, extent in enumerate(shape)]
    x = builder.add_input(TensorType(DType.FLOAT32, tuple(extents)), "x")
    held = [int(d == batch) for d in range(len(shape))]  # elements before one of n in a dimension; 0: it has no n
    inside = False
    for step in steps:
        x, held = apply(builder, x, held, n, step)
        inside |= max(held) > 1
    if max(held) > 1:  # to be taken out again, as the results of a model have the dimension
        at, outer = next((d, outer) for d, outer in enumerate(held) if outer)
        if x.shape[at] // n % outer == 0:
            x = reshape(builder, x, (*x.shape[:at], outer, x.shape[at] // outer, *x.shape[at + 1 :]))
    return builder.finish([("y", x)]), inside


def apply(builder: GraphBuilder, x: Operand, held: list[int], n: int, step: Step) -> tuple[Operand, list[int]]:
    kind, first, second = step
    rank, at = len(held), first % len(held)
    fixed = [extent // n if has else extent for extent, has in zip(x.shape, held, strict=True)]
    match kind:
        case "transpose":
            order = random.Random(first).sample(range(rank), rank)
            return builder.call("transpose", [x], permutation=tuple(order)), [held[d] for d in order]
        case "merge" if at + 1 < rank and not (held[at] and held[at + 1]):
            shape = (*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :])
            return reshape(builder, x, shape), [*held[:at], held[at] or held[at + 1] * x.shape[at], *held[at + 2 :]]
        case "split" | "split_before" if fixed[at] > 1 and rank < 5:
            part = random.Random(second).choice([k for k in range(2, fixed[at] + 1) if fixed[at] % k == 0])
            pair, marks = [x.shape[at] // part, part], [held[at], 0]
            if kind == "split_before":
                pair.reverse()
                marks = [0, -(-held[at] // part)]
            return reshape(builder, x, (*x.shape[:at], *pair, *x.shape[at + 1 :])), [*held[:at], *marks, *held[at + 1 :]]
        case "regroup" | "regroup_before":
            total = math.prod(fixed)
            part = random.Random(second).choice([k for k in range(1, total + 1) if total % k == 0])
            pair, marks = [total * n // part, part], [1, 0]
            if kind == "regroup_before":
                pair.reverse()
                marks.reverse()
            return reshape(builder, x, pair), marks
        case "add" if not held[-1]:
            values = np.arange(x.shape[-1], dtype=np.float32)
            return builder.call("add", [x, builder.add_constant(values, DType.FLOAT32)]), held
        case "softmax" | "cumsum":
            return builder.call(kind, [x], axis=at), held
        case "flip":
            return builder.call("flip", [x], axis=at), held
        case "slice" if fixed[at] > 1:
            unit = x.shape[at] // fixed[at]
            return builder.call("slice", [x], starts=(0,), stops=(unit * (fixed[at] - 1),), axes=(at,), steps=(1,)), held
        case "join":
            return builder.call("concat", [x, x], axis=at), held
        case _:
            return x, held


def reshape(builder: GraphBuilder, x: Operand, shape: Sequence[int]) -> Operand:
    return builder.call("reshape", [x], shape=tuple(shape))


def check_padded_calls(graphs: dict[int, Graph], shape: Sequence[int], batch: int, axes: PaddedAxes, weights: Weights) -> None:
    padding = Padding({"n": BUCKET}, {"n": axes})
    for n in range(1, BUCKET):
        extents = [n if d == batch else extent for d, extent in enumerate(shape)]
        x = np.random.default_rng(n).standard_normal(extents).astype(np.float32)
        expected = interpret(graphs[n], weights, {"x": x})["y"]
        padded = padding.pad(x, graphs[BUCKET].inputs[0][1].shape)
        found = interpret(graphs[BUCKET], weights, {"x": padded})["y"]
        np.testing.assert_array_equal(padding.slice("y", found, {"n": n}), expected)


@pytest.mark.slow
def test_admitted_graphs_give_equal_results_padded():
    rng = random.Random(0)
    admitted = inside = 0
    for _ in range(GRAPHS):
        shape = [rng.choice((2, 3, 4, 6)) for _ in range(rng.randint(2, 4))]
        batch, steps, weights = rng.randrange(len(shape)), random_steps(rng), Weights()
        built = {n: build(shape, batch, n, steps, weights) for n in (1, 2, NEAR, BUCKET, DISTANT)}
        graphs = {n: graph for n, (graph, _) in built.items()}
        try:
            axes, others = (padded_axes(graphs[BUCKET], graphs[n], (BUCKET, n), weights) for n in (NEAR, DISTANT))
        except PaddingError:
            continue
        assert axes == others
        check_padded_calls(graphs, shape, batch, axes, weights)
        admitted += 1
        inside += built[BUCKET][1]
    assert admitted >= LEAST_ADMITTED
    assert inside >= LEAST_INSIDE
