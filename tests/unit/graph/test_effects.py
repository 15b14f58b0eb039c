"""Effects: writes of a resource are ordered with all other uses, and a missing edge is refused."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from roller_svc.errors import InvariantError
from roller_svc.graph.effects import check_order, order_effects
from roller_svc.graph.passes.dead import remove_dead_nodes
from roller_svc.graph.passes.duplicates import merge_duplicates
from roller_svc.ir.dtype import DType
from roller_svc.ir.graph import ANYTHING, Effects, Graph, HostNode, Node
from roller_svc.ir.program import TensorType

SCALAR = TensorType(DType.FLOAT32, ())


def host(name: str, reads: str = "", writes: str = "", inputs: Sequence[str] = ()) -> HostNode:
    effects = Effects(frozenset(reads.split()), frozenset(writes.split()))
    return HostNode(name, name, tuple(inputs), (f"{name}_done",), (SCALAR,) * len(inputs), (SCALAR,), effects)


# x <- y; x <- z; r = x - y
ASSIGNS = [host("assign_y", writes="x"), host("assign_z", writes="x"), host("sub", reads="x")]


def test_row_47_writes_and_reads_of_a_resource_are_ordered() -> None:
    assert order_effects(ASSIGNS) == {"assign_z": ("assign_y",), "sub": ("assign_z",)}
    reads = [host("w", writes="x"), host("a", reads="x"), host("b", reads="x"), host("v", writes="x"), host("other", writes="y")]
    assert order_effects(reads) == {"a": ("w",), "b": ("w",), "v": ("a", "b")}
    everything = [host("a", writes="x"), host("all", writes=ANYTHING), host("b", reads="y"), host("pure")]
    assert order_effects(everything) == {"all": ("a",), "b": ("all",)}


def any_order(nodes: Sequence[Node], before: Mapping[str, Sequence[str]], rng: random.Random) -> list[str]:
    order: list[str] = []
    while len(order) < len(nodes):
        order.append(rng.choice([n.name for n in nodes if n.name not in order and set(before.get(n.name, ())) <= set(order)]))
    return order


def test_row_47_assign_assign_sub_under_a_thousand_interleavings() -> None:
    edges = order_effects(ASSIGNS)
    y, z = 0.2, 0.3
    for seed in range(1000):
        memory = {"x": 0.0}
        actions = {
            "assign_y": lambda memory=memory: memory.update(x=y),
            "assign_z": lambda memory=memory: memory.update(x=z),
            "sub": lambda memory=memory: memory.update(r=memory["x"] - y),
        }
        for name in any_order(ASSIGNS, edges, random.Random(seed)):
            actions[name]()
        assert memory == {"x": z, "r": z - y}


def test_row_47_each_removed_edge_is_refused() -> None:
    removed = 0
    for seed in range(100):
        rng = random.Random(seed)
        nodes = [
            host(f"n{i}", *(" ".join(each for each in "xyz" if rng.random() < 0.3) for _ in range(2)))
            for i in range(rng.randint(2, 8))
        ]
        edges = order_effects(nodes)
        check_order(nodes, edges)
        for name, after in edges.items():
            for each in after:
                with pytest.raises(InvariantError, match=f"nothing orders .* before {name},"):
                    check_order(nodes, {**edges, name: set(after) - {each}})
                removed += 1
    assert removed > 300
    with pytest.raises(InvariantError, match="nothing orders assign_y before assign_z"):
        check_order(ASSIGNS, {"sub": ["assign_z"]})
    with pytest.raises(InvariantError, match="nothing orders assign_y before assign_z"):
        check_order(ASSIGNS, {"assign_y": ["assign_z"], "sub": ["assign_y"]})
    with pytest.raises(InvariantError, match="a and b wait for each other"):
        check_order([host("a", writes="x"), host("b", writes="x")], {"a": ["b"], "b": ["a"]})


def test_row_47_data_is_ordered_too() -> None:
    nodes = [host("a"), host("b", inputs=["a_done"])]
    check_order(nodes, {"b": ["a"]})
    with pytest.raises(InvariantError, match="nothing orders a before b, which reads its result"):
        check_order(nodes, {})


def test_row_47_passes_keep_nodes_with_effects() -> None:
    nodes = (host("w", writes="x"), host("v", writes="x"), host("unused"))
    graph = Graph("g", (), {}, nodes, ())
    assert [n.name for n in remove_dead_nodes(graph).nodes] == ["w", "v"]
    assert len(merge_duplicates(graph).nodes) == 3
