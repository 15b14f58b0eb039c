"""Cuts of labelled graphs: the fewest parts, which can run one after the other."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest

from roller_svc.errors import InvariantError
from roller_svc.graph.devices.cut import Part, check_cut, cut


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
    check_cut(parts, list(devices), devices, before, ())
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
        check_cut(parts, nodes, devices, before, hosts)
        assert len(parts) == fewest(nodes, devices, before, hosts), seed


def faults(parts: Sequence[Part], before: Mapping[str, Sequence[str]], hosts: Sequence[str]) -> Iterator[tuple[str, list[Part]]]:
    """Yield wrong cuts: a part or a node is dropped, repeated, elsewhere, or too early."""
    for i, part in enumerate(parts):
        rest = [*parts[:i], *parts[i + 1 :]]
        yield "dropped", rest
        yield "repeated", [*parts, part]
        yield "elsewhere", [*parts[:i], replace(part, device=f"not {part.device}"), *parts[i + 1 :]]
        needs = {each for name in part.nodes for each in before.get(name, ())}
        if needs - set(part.nodes):
            yield "too early", [part, *rest]
        if any(set(before.get(name, ())) & set(part.nodes) for name in part.nodes):
            yield "swapped", [*parts[:i], replace(part, nodes=part.nodes[::-1]), *parts[i + 1 :]]
        for j, other in enumerate(parts[:i]):
            joined = replace(other, nodes=other.nodes + part.nodes)
            waits = needs & {name for between in parts[j + 1 : i] for name in between.nodes}
            if other.device != part.device or waits or {*hosts} & {*joined.nodes}:
                yield "joined", [*parts[:j], joined, *parts[j + 1 : i], *parts[i + 1 :]]


def test_faults_in_cuts_are_refused() -> None:
    refused: dict[str, int] = {}
    for seed in range(30):
        rng = random.Random(seed)
        nodes = [f"n{i}" for i in range(rng.randint(4, 10))]
        devices = {name: rng.choice("ab") for name in nodes}
        before = {nodes[i]: [nodes[j] for j in range(i) if rng.random() < 0.4] for i in range(len(nodes))}
        hosts = [name for name in nodes if rng.random() < 0.15]
        for kind, wrong in faults(cut(nodes, devices, before, hosts), before, hosts):
            with pytest.raises(InvariantError):
                check_cut(wrong, nodes, devices, before, hosts)
            refused[kind] = refused.get(kind, 0) + 1
    assert len(refused) == 6
    assert sum(refused.values()) > 300


def test_a_cut_is_the_same_each_time_and_stays_fast_for_large_graphs() -> None:
    rng = random.Random(1)
    nodes = [f"n{i}" for i in range(300)]
    devices = {name: rng.choice("abc") for name in nodes}
    before = {nodes[i]: [nodes[j] for j in range(max(0, i - 6), i) if rng.random() < 0.3] for i in range(300)}
    parts = cut(nodes, devices, before, ())
    check_cut(parts, nodes, devices, before, ())
    assert parts == cut(nodes, devices, before, ())
    runs = 1 + sum(devices[a] != devices[b] for a, b in itertools.pairwise(nodes))
    assert len(parts) < runs


def test_nodes_that_depend_on_later_ones_are_refused() -> None:
    with pytest.raises(InvariantError, match="comes after it"):
        cut(["a", "b"], {"a": "x", "b": "x"}, {"a": ["b"], "b": ["a"]}, ())
