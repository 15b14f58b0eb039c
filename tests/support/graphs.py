"""Small graphs for tests, and their evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from roller_svc.codegen.c.model import MODEL
from roller_svc.frontend.graph_builder import GraphBuilder
from roller_svc.frontend.ops.operator import Operand
from roller_svc.graph.compile import BuiltModel
from roller_svc.graph.interpret import interpret
from roller_svc.graph.weights import Weights, place_weights
from roller_svc.ir.dtype import DType
from roller_svc.ir.graph import Graph, OpNode
from roller_svc.ir.program import TensorType
from roller_svc.runtime.graphs.cpu import CpuModel
from roller_svc.semantics.interpreter import reference


def builder_of(name: str = "test") -> tuple[GraphBuilder, Weights]:
    weights = Weights()
    return GraphBuilder(name, weights, reference), weights


def add_input(builder: GraphBuilder, name: str, *shape: int, dtype: DType = DType.FLOAT32) -> Operand:
    return builder.add_input(TensorType(dtype, shape), name)


def add_random(builder: GraphBuilder, seed: int, *shape: int) -> Operand:
    """Add a constant that is too large to be folded at once, if it is not small."""
    array = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return builder.add_constant(array, DType.FLOAT32)


def random_arrays(graph: Graph, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(type_.shape).astype(type_.dtype.value) for name, type_ in graph.inputs}


def operators(graph: Graph) -> list[str]:
    return [node.operator for node in graph.nodes]


def program_of(graph: Graph, operator: str) -> OpNode:
    node = next(node for node in graph.nodes if node.operator == operator)
    assert isinstance(node, OpNode)
    return node


def check_equal(before: Graph, after: Graph, weights: Weights, arrays: Mapping[str, Any] | None = None) -> None:
    """Both graphs have the same outputs, by the interpreter."""
    given = random_arrays(before) if arrays is None else arrays
    want, got = interpret(before, weights, given), interpret(after, weights, given)
    assert list(want) == list(got)
    for name, value in want.items():
        assert got[name].dtype == value.dtype
        np.testing.assert_allclose(got[name], value, rtol=2e-5, atol=2e-5, err_msg=name)


def load_linked(built: BuiltModel, weights: Weights) -> CpuModel:
    """Return a model that was built for a CPU."""
    return CpuModel(built.plan, MODEL, built.link(MODEL), place_weights(built.plan, weights))
