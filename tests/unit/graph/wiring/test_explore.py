"""The search of choices by trials, against oracles of latencies."""

import functools
import itertools
import json
import math
import os
import random
import sqlite3
import subprocess
import sys
import textwrap
import warnings
from contextlib import closing
from dataclasses import replace

import pytest
from gpu_models import MATMUL, constant, node, tensor
from gpu_models import graph as json_graph

from roller_svc import tuning
from roller_svc.errors import ArgumentError, RollerWarning
from roller_svc.graph.classes import find_classes
from roller_svc.graph.load import load_graph
from roller_svc.graph.weights import Weights
from roller_svc.graph.wiring.explore import find_dependences
from roller_svc.graph.wiring.index import export_profiles
from roller_svc.graph.wiring.tree import Node, Variable, count_trials, find_variables
from roller_svc.tuning import Origin, ProfileIndex, explore

ORIGIN = Origin("device", "driver", "generator")


def variable(name, choices, regions=(), default=0):
    return Variable(name, "kernel", tuple(f"c{number}" for number in range(choices)), default, f"key of {name}", regions)


class Oracle:
    """Seconds of each choice of a variable, by the choices that it depends on; random, but the same every time."""

    def __init__(self, tree, seed=0, noise=0.0):
        self.dependences = find_dependences(tree)
        self.seed, self.noise, self.asked = seed, random.Random(seed) if noise else None, []
        self.ratio = noise

    def cost(self, name, choices):
        context = [(other, choices[other]) for other in (name, *self.dependences[name])]
        return random.Random(repr((self.seed, name, context))).uniform(1.0, 2.0)

    def __call__(self, choices):
        self.asked.append(dict(choices))
        slower = 1.0 if self.noise is None else 1.0 + self.noise.uniform(0.0, self.ratio)
        return {name: slower * self.cost(name, choices) for name in choices}


def draw_tree(order, names, depth=3):
    """Return a random tree; a combination has at most one node, whose best choices it needs."""
    if depth == 0 or order.random() < 0.3:
        return variable(f"v{next(names)}", order.randint(1, 4))
    mode = order.choice(["parallel", "exhaustive", "prefix"])
    if mode == "exhaustive":
        children = [variable(f"v{next(names)}", order.randint(1, 3)) for _ in range(order.randint(1, 2))]
        if order.random() < 0.5:
            children.append(Node(order.choice(["parallel", "prefix"]), (draw_tree(order, names, depth - 1),)))
        return Node(mode, tuple(children))
    return Node(mode, tuple(draw_tree(order, names, depth - 1) for _ in range(order.randint(1, 3))))


def best(tree, oracle, context):
    """Return the best choices of a tree by the definition of its modes, and the sum of their seconds."""
    if isinstance(tree, Variable):
        costs = [oracle.cost(tree.name, context | {tree.name: choice}) for choice in range(len(tree.choices))]
        choice = costs.index(min(costs))
        return {tree.name: choice}, costs[choice]
    if tree.mode == "exhaustive":
        variables = [child for child in tree.children if isinstance(child, Variable)]
        nodes = [child for child in tree.children if isinstance(child, Node)]
        found = []
        for choices in itertools.product(*(range(len(each.choices)) for each in variables)):
            joint = context | {each.name: choice for each, choice in zip(variables, choices, strict=True)}
            inner, seconds = best(nodes[0], oracle, joint) if nodes else ({}, 0.0)
            total = seconds + sum(oracle.cost(each.name, joint) for each in variables)
            found.append((total, {each.name: joint[each.name] for each in variables} | inner))
        total, chosen = min(found, key=lambda each: each[0])
        return chosen, total
    chosen, total = {}, 0.0
    for child in tree.children:
        inner, seconds = best(child, oracle, context | (chosen if tree.mode == "prefix" else {}))
        chosen, total = chosen | inner, total + seconds
    return chosen, total


@pytest.mark.parametrize(("mode", "trials"), [("parallel", 5), ("prefix", 30), ("exhaustive", 15625)])
def test_row_8_trials_are_a_maximum_a_sum_or_a_product(mode, trials):
    tree = Node(mode, tuple(variable(f"v{number}", 5) for number in range(6)))
    assert count_trials(tree) == trials
    if mode == "exhaustive":
        with pytest.raises(ArgumentError, match="take 15625 trials: expected at most 2000") as error:
            explore(tree, lambda choices: pytest.fail("a trial was made"), budget_trials=2000)
        assert error.value.code == "tuning-budget"
    else:
        oracle = Oracle(tree)
        found = explore(tree, oracle, budget_trials=2000)
        assert found.trials == len(oracle.asked) == trials
        assert dict(found) == best(tree, oracle, {})[0]


def test_row_7_random_trees_end_at_the_optimum_of_their_modes():
    for seed in range(200):
        tree = draw_tree(random.Random(seed), itertools.count())
        oracle = Oracle(tree, seed)
        found = explore(tree, oracle, budget_trials=10**6, seed=seed)
        assert dict(found) == best(tree, oracle, {})[0], tree
        assert found.trials == len(oracle.asked) == count_trials(tree)
        assert all(asked.keys() == found.keys() for asked in oracle.asked)


def test_noise_of_five_percent_is_outlasted_by_rounds():
    right = 0
    for seed in range(200):
        tree = draw_tree(random.Random(seed), itertools.count(), depth=2)
        found = explore(tree, Oracle(tree, seed, noise=0.05), budget_trials=10**6, rounds=5, seed=seed)
        exact = Oracle(tree, seed)
        total = sum(exact.cost(name, found) for name in found)
        right += total <= 1.01 * best(tree, exact, {})[1]
    assert right >= 190


def test_row_10_an_outer_choice_explores_the_inner_ones_anew():
    buffers = Variable("buffers", "buffers", ("lowest", "apart"))
    tree = Node("exhaustive", (buffers, Node("parallel", (variable("k0", 3), variable("k1", 2)))))
    seconds = {
        "buffers": lambda choices: 1.0,
        "k0": lambda choices: [[3.0, 4.0, 5.0], [5.0, 4.0, 1.0]][choices["buffers"]][choices["k0"]],
        "k1": lambda choices: [[2.0, 3.0], [3.0, 2.0]][choices["buffers"]][choices["k1"]],
    }
    found = explore(tree, lambda choices: {name: seconds[name](choices) for name in choices}, budget_trials=10)
    assert dict(found) == {"buffers": 1, "k0": 2, "k1": 1}
    assert found.trials == 6


def test_row_9_regions_that_interfere_are_explored_together_only_with_barriers():
    """Without a barrier, a kernel of the second region pays for the cache that the first one leaves."""
    tree = Node("parallel", (variable("first", 2, regions=(0,)), variable("second", 3, regions=(1,))))

    def measure(choices, *, barrier):
        second = [3.0, 2.0, 2.5][choices["second"]]
        return {"first": [2.0, 1.0][choices["first"]], "second": second if barrier else second + 2.0 * choices["first"]}

    chosen = {
        barrier: dict(explore(tree, functools.partial(measure, barrier=barrier), budget_trials=99)) for barrier in (True, False)
    }
    assert chosen[True] == {"first": 1, "second": 1}
    assert chosen[False]["second"] != 1  # it was tried together with the first one's second choice alone


def test_row_11_equal_nodes_are_one_variable():
    """Eighty cells with weights of their own are three classes."""
    cells = []
    for i in range(80):
        state = f"h{i - 1}" if i else "x"
        cells += [
            node(f"p{i}", MATMUL, A=state, B=f"w{i % 2}"),
            node(f"s{i}", "C[i, j] = 1 / (1 + exp(0 - A[i, j]))", A=f"p{i}"),
            node(f"h{i}", "C[i, j] = A[i, j] * B[i, j]", A=f"p{i}", B=f"s{i}"),
        ]
    source = json_graph({"x": tensor(2, 8)}, {"w0": constant(8, 8), "w1": constant(8, 8)}, cells, "h79")
    classes = find_classes(load_graph(source, Weights()))
    assert len(classes) <= 3
    assert sum(len(each.nodes) for each in classes) == 240


def test_row_13_a_fusion_that_is_slower_is_not_chosen():
    fusion = Variable("fusion", "fusion", ("fused", "apart"), regions=(0, 1))
    kernels = (variable("k0", 2, (0,)), variable("k1", 2, (1,)))
    tree = Node("exhaustive", (fusion, Node("parallel", kernels)))

    def measure(choices):
        k0, k1 = ([4.0, 3.0][choices["k0"]], [2.0, 1.0][choices["k1"]]) if choices["fusion"] else (4.5, 1.5)
        return {"fusion": k0 + k1, "k0": k0, "k1": k1}

    assert dict(explore(tree, measure, budget_trials=10)) == {"fusion": 1, "k0": 1, "k1": 1}


def test_regions_that_two_variables_share_count_once():
    tree = Node("exhaustive", (variable("a", 2, (0,)), variable("b", 2, (0,)), variable("c", 2, (1,))))
    region = {(0, 0): 3.0, (0, 1): 2.0, (1, 0): 2.9, (1, 1): 5.0}

    def measure(choices):
        shared = region[choices["a"], choices["b"]]
        return {"a": shared, "b": shared, "c": 1.0 + (0.9 if choices["b"] == choices["c"] else 0.0)}

    assert dict(explore(tree, measure, budget_trials=8)) == {"a": 0, "b": 1, "c": 0}


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, None])
def test_a_failed_trial_never_wins(seconds):
    def measure(choices):
        if choices["v"] == 2:
            return {} if seconds is None else {"v": seconds}
        return {"v": [3.0, 2.0][choices["v"]]}

    assert dict(explore(variable("v", 3), measure, budget_trials=10)) == {"v": 1}
    assert dict(explore(variable("v", 3, default=2), lambda choices: {}, budget_trials=10)) == {"v": 2}


def test_ties_go_to_the_default_and_a_spent_budget_to_what_was_measured():
    tree = Node("prefix", (variable("a", 4, default=2), variable("b", 4, default=1)))
    found = explore(tree, lambda choices: dict.fromkeys(choices, 1.0), budget_trials=100)
    assert dict(found) == {"a": 2, "b": 1}
    oracle = Oracle(tree)
    found = explore(tree, oracle, budget_trials=5)
    assert found.trials == len(oracle.asked) == 5
    assert found["a"] == best(tree, oracle, {})[0]["a"]
    assert found["b"] == 1


def test_nested_nodes_of_a_combination_take_the_product_of_their_trials():
    parallel = Node("parallel", (variable("a", 3), variable("b", 2)))
    tree = Node("exhaustive", (parallel, Node("prefix", (variable("c", 2), variable("d", 2))), variable("e", 2)))
    oracle = Oracle(tree)
    found = explore(tree, oracle, budget_trials=100)
    assert found.trials == count_trials(tree) == 24
    assert set(found) == {"a", "b", "c", "d", "e"}


def test_trees_survive_json_and_bad_ones_are_refused():
    for seed in range(20):
        tree = draw_tree(random.Random(seed), itertools.count())
        content = json.loads(json.dumps(tuning.tree_to_json(tree)))
        assert tuning.tree_from_json(content) == tree
    bad = [
        {},
        {"format": "roller-wiring/2"},
        {"format": "roller-wiring/1", "mode": "random", "children": []},
        {"format": "roller-wiring/1", "mode": "prefix", "children": [{"variable": "a", "kind": "kernel"}]},
        {"format": "roller-wiring/1", "mode": "prefix", "children": 3},
        {"format": "roller-wiring/1", "mode": "prefix", "children": ["a"]},
        {"format": "roller-wiring/1", "variable": "a", "kind": "colour", "choices": ["red"]},
        {"format": "roller-wiring/1", "variable": "a", "kind": "kernel", "choices": []},
        {"format": "roller-wiring/1", "variable": "a", "kind": "kernel", "choices": ["x", "x"]},
        {"format": "roller-wiring/1", "variable": "a", "kind": "kernel", "choices": ["x"], "default": 1},
    ]
    for content in bad:
        with pytest.raises(ArgumentError):
            tuning.tree_from_json(content)
    with pytest.raises(ArgumentError, match="got a again"):
        Node("prefix", (variable("a", 1), variable("a", 2)))


def test_row_12_a_second_search_makes_no_trial(tmp_path):
    path = tmp_path / "wiring.sqlite"
    for seed in range(30):
        tree = draw_tree(random.Random(seed), itertools.count())
        origin = replace(ORIGIN, bucket=str(seed))
        first = explore(tree, Oracle(tree, seed), budget_trials=10**6, index=ProfileIndex(path, origin))
        oracle = Oracle(tree, seed)
        second = explore(tree, oracle, budget_trials=10**6, index=ProfileIndex(path, origin))
        assert second.trials == len(oracle.asked) == 0
        assert dict(second) == dict(first)
    for changed in ({"device": "another"}, {"driver": "another"}, {"generator": "another"}, {"bucket": "another"}):
        index = ProfileIndex(path, replace(origin, **changed))
        assert explore(tree, oracle, budget_trials=10**6, index=index).trials == count_trials(tree)


def test_rounds_are_measured_though_the_index_has_the_first(tmp_path):
    tree = Node("parallel", (variable("a", 3), variable("b", 2)))
    index = ProfileIndex(tmp_path / "i", ORIGIN, min_samples=5)
    found = explore(tree, Oracle(tree), budget_trials=100, rounds=5, index=index)
    assert found.trials == 15
    assert explore(tree, Oracle(tree), budget_trials=100, rounds=5, index=index).trials == 0


def test_fields_of_the_index_are_kept_apart(tmp_path):
    """Joined names of a class and a choice would be equal (defect 10 of the earlier system)."""
    index = ProfileIndex(tmp_path / "i", ORIGIN)
    a, b = Variable("x", "kernel", ("1,128",), key="k1"), Variable("x", "kernel", ("28",), key="k1,1")
    index.record(a, 0, {}, 1.0)
    assert index.look_up(a, 0, {}) == 1.0
    assert index.look_up(b, 0, {}) is None
    assert index.look_up(a, 0, {"fusion": "fused"}) is None


def count_made_trials(tree, path):
    return explore(tree, Oracle(tree), budget_trials=10, index=ProfileIndex(path, ORIGIN)).trials


@pytest.mark.parametrize("damage", ["text", "another table", "torn"])
def test_a_damaged_index_is_set_aside_and_the_search_goes_on(tmp_path, damage):
    path = tmp_path / "folder" / "wiring.sqlite"
    index = ProfileIndex(path, ORIGIN)
    index.record(variable("v", 2), 0, {}, 1.0)
    index.close()
    if damage == "text":
        path.write_bytes(b"not a database, but a text that is long enough to be taken for one" * 100)
    elif damage == "torn":
        path.write_bytes(path.read_bytes()[:4096] + os.urandom(4096))
    else:
        path.unlink()
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE profile (a)")
    tree = variable("v", 2)
    with pytest.warns(RollerWarning, match=r"renamed to wiring\.sqlite\.broken"):
        trials = count_made_trials(tree, path)
    assert trials == 2
    assert path.with_name("wiring.sqlite.broken").exists()
    assert count_made_trials(tree, path) == 0


NO_SECONDS = ("0.0", "-1.0", "9e999", "-9e999", "'fast'", "''", "x'00'", "x'312e30'", "CAST(x'ff' AS TEXT)")
NO_COUNTS = ("'abc'", "0", "-1", "1e300", "x'ff'", "CAST(x'ff' AS TEXT)")
DAMAGES = [*(f"least_s = {value}" for value in NO_SECONDS), *(f"samples = {value}" for value in NO_COUNTS)]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_row_never_wins_and_is_measured_again(tmp_path, damage):
    path, tree = tmp_path / "wiring.sqlite", variable("v", 4)
    assert count_made_trials(tree, path) == 4
    slowest = max(range(4), key=lambda choice: Oracle(tree).cost("v", {"v": choice}))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE profile SET {damage} WHERE choice = ?", (tree.choices[slowest],))
    assert len(export_profiles(path)["profiles"]) == 3
    oracle = Oracle(tree)
    found = explore(tree, oracle, budget_trials=10, index=ProfileIndex(path, ORIGIN))
    assert found.trials == 1
    assert dict(found) == best(tree, oracle, {})[0]
    assert count_made_trials(tree, path) == 0


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0, -1.0])
def test_what_is_no_time_is_not_recorded(tmp_path, seconds, recwarn):
    path, tree = tmp_path / "wiring.sqlite", variable("v", 2)
    index = ProfileIndex(path, ORIGIN)
    index.record(tree, 0, {}, 1.0)
    for choice in (0, 1):
        index.record(tree, choice, {}, seconds)
    assert (index.look_up(tree, 0, {}), index.look_up(tree, 1, {})) == (1.0, None)
    assert [profile["samples"] for profile in export_profiles(path)["profiles"]] == [1]
    assert not recwarn.list


def test_sixty_damages_of_an_index_end_no_search(tmp_path):
    """Pages are overwritten at random. What is left is used, or the file is set aside."""
    tree = variable("v", 6)
    whole = tmp_path / "whole.sqlite"
    count_made_trials(tree, whole)
    content = whole.read_bytes()
    set_aside = 0
    for seed in range(60):
        drawn, path = random.Random(seed), tmp_path / f"{seed}" / "wiring.sqlite"
        damaged = bytearray(content)
        first = drawn.randrange(len(damaged) - 1)
        length = drawn.choice((1, 16, 512, 4096))
        damaged[first : first + length] = drawn.randbytes(len(damaged[first : first + length]))
        path.parent.mkdir()
        path.write_bytes(damaged[: len(damaged) if seed % 4 else drawn.randrange(len(damaged))])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RollerWarning)
            found = explore(tree, Oracle(tree), budget_trials=10, index=ProfileIndex(path, ORIGIN))
            assert found["v"] in range(6)
            assert count_made_trials(tree, path) == 0
        set_aside += path.with_name("wiring.sqlite.broken").exists()
    assert set_aside


def test_an_index_that_cannot_be_written_keeps_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    tree = variable("v", 3)
    with pytest.warns(RollerWarning, match="seconds of trials are not kept") as caught:
        trials = count_made_trials(tree, tmp_path / "file" / "wiring.sqlite")
    assert trials == 3
    assert len(caught) == 1


def test_an_index_whose_disk_is_full_keeps_nothing(tmp_path):
    tree = variable("v", 3)
    index = ProfileIndex(tmp_path / "wiring.sqlite", ORIGIN)
    index._connection.execute("PRAGMA max_page_count = 1")  # SQLite takes the pages that there are
    with pytest.warns(RollerWarning, match=r"are not kept in .*: database or disk is full"):
        all(index.record(tree, 0, {"context": f"{number:0500}"}, 1.0) is None for number in range(1000))
    oracle = Oracle(tree)
    found = explore(tree, oracle, budget_trials=10, index=index)
    assert found.trials == 3
    assert dict(found) == best(tree, oracle, {})[0]


WRITER = """
    import sys
    from pathlib import Path
    from roller_svc.tuning import Origin, ProfileIndex, Variable
    index = ProfileIndex(Path(sys.argv[1]), Origin("device", "driver", "generator"))
    v = Variable("v", "kernel", tuple(map(str, range(10_000))))
    for number in range(10_000):
        index.record(v, number, {"process": sys.argv[2]}, 1.0 + number)
        print(number, flush=True)
"""


def test_two_writers_and_a_killed_one_leave_what_they_wrote(tmp_path):
    path = tmp_path / "wiring.sqlite"
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(path)]
    last = []
    with (
        subprocess.Popen([*command, "a"], stdout=subprocess.PIPE, text=True) as a,
        subprocess.Popen([*command, "b"], stdout=subprocess.PIPE, text=True) as b,
    ):
        for writer in (a, b):
            last.append([int(writer.stdout.readline()) for _ in range(200)][-1])
            writer.kill()
    index = ProfileIndex(path, ORIGIN)
    v = Variable("v", "kernel", tuple(map(str, range(10_000))))
    for name, number in zip("ab", last, strict=True):
        assert all(index.look_up(v, each, {"process": name}) == 1.0 + each for each in range(number + 1))


def test_names_of_a_tree_are_those_of_its_assignments():
    tree = Node("parallel", ())
    assert dict(explore(tree, Oracle(tree), budget_trials=1)) == {} == dict.fromkeys(find_variables(tree))
