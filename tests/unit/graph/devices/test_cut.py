"""Cuts of labelled graphs: the fewest parts, which can run one after the other."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

import pytest

from roller_svc.errors import InvariantError
from roller_svc.graph.devices.cut import Part, cut


def check(parts: Sequence[Part], nodes: Sequence[str], devices: Mapping[str, str], before: Mapping[str, Sequence[str]]) -> None:
    """Each node runs once, on its device, after all that it needs; within a part in program order."""
    order = [name for part in parts for name in part.nodes]
    assert sorted(order) == sorted(nodes)
    for part in parts:
        assert {devices[name] for name in part.nodes} == {part.device}
    for i, name in enumerate(order):
        assert set(before.get(name, ())) <= set(order[:i])


def fewest(nodes: Sequence[str], devices: Mapping[str, str], before: Mapping[str, Sequence[str]], hosts: Sequence[str]) -> int:
    """Return the least number of parts over all orders: one node after the other, by the set of nodes that have run."""
    best: dict[tuple[frozenset[str], str | None], int] = {(frozenset(), None): 0}
    for _ in nodes:
        following: dict[tuple[frozenset[str], str | None], int] = {}
        for (done, last), parts in best.items():
            for name in nodes:
                if name in done or not set(before.get(name, ())) <= done:
                    continue
                own = name if name in hosts else devices[name]
                state = done | {name}, own
                total = parts + (own != last)
                following[state] = min(total, following.get(state, total))
        best = following
    return min(best.values())


def test_row_44_nine_kernels_are_five_subgraphs() -> None:
    # a chain with a branch: in program order there would be eight
    devices = {"1": "cpu", "2": "gpu", "3": "gpu", "4": "cpu", "5": "gpu", "6": "cpu", "7": "gpu", "8": "gpu", "9": "cpu"}
    before = {"2": ["1"], "3": ["2"], "4": ["3"], "5": ["3"], "6": ["4"], "7": ["5", "6"], "8": ["7"], "9": ["8"]}
    parts = cut(list(devices), devices, before, ())
    check(parts, list(devices), devices, before)
    assert [part.nodes for part in parts] == [("1",), ("2", "3", "5"), ("4", "6"), ("7", "8"), ("9",)]


def test_row_44_random_graphs_are_cut_into_the_fewest_parts() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        count = rng.randint(1, 10)
        nodes = [f"n{i}" for i in range(count)]
        labels = ["a", "b", "c"][: rng.randint(1, 3)]
        devices = {name: rng.choice(labels) for name in nodes}
        density = rng.choice([0.1, 0.3, 0.6])
        before = {nodes[i]: [nodes[j] for j in range(i) if rng.random() < density] for i in range(count)}
        hosts = [name for name in nodes if rng.random() < 0.15]
        parts = cut(nodes, devices, before, hosts)
        check(parts, nodes, devices, before)
        assert all(len(part.nodes) == 1 for part in parts if part.nodes[0] in hosts)
        assert len(parts) == fewest(nodes, devices, before, hosts), seed


def test_a_cut_is_the_same_each_time_and_stays_fast_for_large_graphs() -> None:
    rng = random.Random(1)
    nodes = [f"n{i}" for i in range(300)]
    devices = {name: rng.choice("abc") for name in nodes}
    before = {nodes[i]: [nodes[j] for j in range(max(0, i - 6), i) if rng.random() < 0.3] for i in range(300)}
    parts = cut(nodes, devices, before, ())
    check(parts, nodes, devices, before)
    assert parts == cut(nodes, devices, before, ())
    runs = 1 + sum(devices[a] != devices[b] for a, b in itertools.pairwise(nodes))
    assert len(parts) < runs


def test_nodes_that_depend_on_later_ones_are_refused() -> None:
    with pytest.raises(InvariantError, match="comes after it"):
        cut(["a", "b"], {"a": "x", "b": "x"}, {"a": ["b"], "b": ["a"]}, ())
