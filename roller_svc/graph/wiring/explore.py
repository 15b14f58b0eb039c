"""Search a tree of choices by trials, each of which measures one choice of every variable (ASTRA, ASPLOS 2019).

A search is a generator of assignments that takes the seconds of each. So a call of a model can be a trial.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from roller_svc.errors import ArgumentError
from roller_svc.graph.wiring.tree import Node, Tree, Variable, count_trials, find_variables

Choices = dict[str, int]  # of variables, by name
Seconds = Mapping[str, float]  # of the regions of variables, by name
Measure = Callable[[Choices], Seconds]


class Profiles(Protocol):
    """Seconds of earlier trials, by what they depend on."""

    def look_up(self, variable: Variable, choice: int, context: Mapping[str, str]) -> float | None: ...
    def record(self, variable: Variable, choice: int, context: Mapping[str, str], seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Assignment(Mapping[str, int]):
    """The choice of each variable, by name."""

    choices: Choices
    trials: int  # that were measured: what the index had is not counted

    def __getitem__(self, name: str) -> int:
        return self.choices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.choices)

    def __len__(self) -> int:
        return len(self.choices)


@dataclass(frozen=True, slots=True)
class Explored:
    """The best choices of a tree, and the sum of their seconds; infinite if a variable has no valid seconds."""

    choices: Choices
    seconds: float


Search = Generator[Choices, Seconds, Explored]


def explore(
    tree: Tree,
    measure: Measure,
    *,
    budget_trials: int,
    index: Profiles | None = None,
    seed: int = 0,
    rounds: int = 1,
) -> Assignment:
    """Return the best assignment that trials find.

    Args:
        tree: variables, and how they are explored.
        measure: takes a choice of every variable, and returns the seconds of each variable's regions. A choice whose
            seconds are missing, 0, infinite or NaN has failed, and never wins.
        budget_trials: how many trials are measured at most. Choices that are not tried lose.
        index: seconds of earlier trials; a trial that it knows is not measured.
        seed: of the order in which choices are tried after the default.
        rounds: how often each choice is measured, in turns; its least seconds count.

    Raises:
        ArgumentError: combinations take more trials than the budget (`tuning-budget`).
    """
    _check_budget(tree, budget_trials, rounds)
    dependences = find_dependences(tree)
    variables = {variable.name: variable for variable in find_variables(tree)}
    search = search_tree(tree, random.Random(seed), rounds)
    trials = 0
    try:
        choices = next(search)
        while True:
            contexts = {
                name: {other: variables[other].choices[choices[other]] for other in dependences[name]} for name in variables
            }
            known = None if index is None else _look_up(index, variables, choices, contexts)
            if known is not None:
                seconds: Seconds = known
            elif trials < budget_trials:
                seconds = {name: value for name, value in measure(dict(choices)).items() if _is_valid(value)}
                trials += 1
                if index is not None:
                    for name, value in seconds.items():
                        index.record(variables[name], choices[name], contexts[name], value)
            else:
                seconds = {}
            choices = search.send(seconds)
    except StopIteration as end:
        return Assignment({name: end.value.choices[name] for name in variables}, trials)


def _check_budget(tree: Tree, budget_trials: int, rounds: int) -> None:
    if isinstance(tree, Variable):
        return
    trials = rounds * count_trials(tree)
    if tree.mode == "exhaustive" and trials > budget_trials:
        names = ", ".join(variable.name for variable in find_variables(tree))
        raise ArgumentError(
            f"combinations of {names} take {trials} trials: expected at most {budget_trials} (budget_trials)",
            code="tuning-budget",
        )
    for child in tree.children:
        _check_budget(child, budget_trials, rounds)


def _is_valid(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds > 0


def _look_up(
    index: Profiles, variables: Mapping[str, Variable], choices: Choices, contexts: Mapping[str, Mapping[str, str]]
) -> Choices | dict[str, float] | None:
    """Return the seconds of a trial that the index knows completely; otherwise None."""
    known: dict[str, float] = {}
    for name, variable in variables.items():
        seconds = index.look_up(variable, choices[name], contexts[name])
        if seconds is None:
            return None
        known[name] = seconds
    return known


def find_dependences(tree: Tree) -> dict[str, tuple[str, ...]]:
    """Return the variables that the seconds of each variable depend on, by name.

    Those are the others of its combinations, and what prefixes have chosen before it.
    """
    dependences: dict[str, tuple[str, ...]] = {}

    def visit(tree: Tree, outer: tuple[str, ...]) -> None:
        if isinstance(tree, Variable):
            dependences[tree.name] = tuple(sorted(outer))
            return
        joint = _combined_variables(tree)
        before = tuple(variable.name for variable in joint)
        for child in tree.children:
            if child in joint:
                visit(child, (*outer, *(variable.name for variable in joint if variable is not child)))
            else:
                visit(child, (*outer, *before))
                if tree.mode != "parallel":
                    before += tuple(variable.name for variable in find_variables(child))

    visit(tree, ())
    return dependences


def _combined_variables(node: Node) -> list[Variable]:
    """Return the variables whose combinations a node tries; it explores its nodes again for each of them."""
    return [child for child in node.children if isinstance(child, Variable)] if node.mode == "exhaustive" else []


def search_tree(tree: Tree, order: random.Random, rounds: int) -> Search:
    """Explore a tree: yield an assignment of all its variables for each trial, and take the seconds."""
    if isinstance(tree, Variable):
        return (yield from _search_combinations((tree,), order, rounds))
    match tree.mode:
        case "parallel":
            return (yield from _search_parallel(tree, order, rounds))
        case "prefix":
            return (yield from _search_prefix(tree, order, rounds))
        case "exhaustive":
            return (yield from _search_exhaustive(tree, order, rounds))


def _search_combinations(variables: Sequence[Variable], order: random.Random, rounds: int) -> Search:
    """Try each combination in each round, the defaults first."""
    combinations = _list_combinations(variables)
    least = [math.inf] * len(combinations)
    for _ in range(rounds):
        for number in (0, *order.sample(range(1, len(combinations)), len(combinations) - 1)):
            seconds = yield dict(combinations[number])
            least[number] = min(least[number], _sum_seconds(variables, seconds))
    best = min(range(len(combinations)), key=lambda number: least[number])  # of equal ones the first: the defaults
    return Explored(combinations[best], least[best])


def _list_combinations(variables: Sequence[Variable]) -> list[Choices]:
    """Return the combinations of choices, the defaults first."""
    sequences = [
        (variable.default, *(choice for choice in range(len(variable.choices)) if choice != variable.default))
        for variable in variables
    ]
    names = [variable.name for variable in variables]
    return [dict(zip(names, choices, strict=True)) for choices in itertools.product(*sequences)]


def _sum_seconds(variables: Sequence[Variable], seconds: Seconds, covered: frozenset[int] = frozenset()) -> float:
    """Return the sum of the seconds of variables; regions that another one has, or that are covered, count once."""
    total = 0.0
    for variable in sorted(variables, key=lambda variable: -len(variable.regions)):
        if not variable.regions or not covered.issuperset(variable.regions):
            total += seconds.get(variable.name, math.inf)
            covered |= frozenset(variable.regions)
    return total


def _search_parallel(node: Node, order: random.Random, rounds: int) -> Search:
    """Explore all children in the same trials; one that has ended stays at its best."""
    searches = [search_tree(child, order, rounds) for child in node.children]
    ended: dict[int, Explored] = {}
    choices: list[Choices] = [{}] * len(searches)
    for number, search in enumerate(searches):
        _advance(number, search, None, choices, ended)
    while len(ended) < len(searches):
        seconds = yield {name: choice for each in choices for name, choice in each.items()}
        for number, search in enumerate(searches):
            if number not in ended:
                _advance(number, search, seconds, choices, ended)
    return _join([ended[number] for number in range(len(searches))], node.children)


def _advance(number: int, search: Search, seconds: Seconds | None, choices: list[Choices], ended: dict[int, Explored]) -> None:
    """Take the next assignment of a search, or its end."""
    try:
        choices[number] = next(search) if seconds is None else search.send(seconds)
    except StopIteration as end:
        ended[number] = end.value
        choices[number] = ended[number].choices


def _search_prefix(node: Node, order: random.Random, rounds: int) -> Search:
    """Explore one child after another, those before it at their best, and those after it at their defaults."""
    choices = {variable.name: variable.default for variable in find_variables(node)}
    explored: list[Explored] = []
    for child in node.children:
        best, _ = yield from _search_given(choices, search_tree(child, order, rounds))
        choices |= best.choices
        explored.append(best)
    return _join(explored, node.children)


def _search_exhaustive(node: Node, order: random.Random, rounds: int) -> Search:
    """Explore the nodes again for each combination of the variables."""
    variables = _combined_variables(node)
    nodes = [child for child in node.children if isinstance(child, Node)]
    if not nodes:
        return (yield from _search_combinations(variables, order, rounds))
    covered = frozenset(region for each in nodes for v in find_variables(each) for region in v.regions)
    best: Explored | None = None
    for choices in _list_combinations(variables):
        inner, seconds = yield from _search_given(choices, _search_nested(nodes, order, rounds))
        total = inner.seconds + _sum_seconds(variables, seconds, covered)
        if best is None or total < best.seconds:
            best = Explored(choices | inner.choices, total)
    assert best is not None  # variables have choices
    return best


def _search_nested(nodes: Sequence[Node], order: random.Random, rounds: int) -> Search:
    """Explore the first node; each of its trials explores the others, and its seconds count with theirs."""
    first, *others = nodes
    if not others:
        return (yield from search_tree(first, order, rounds))
    search = search_tree(first, order, 1)
    results: list[tuple[Choices, Explored]] = []
    try:
        choices = next(search)
        while True:
            inner, seconds = yield from _search_given(choices, _search_nested(others, order, rounds))
            results.append((choices, inner))
            choices = search.send({name: value + inner.seconds for name, value in seconds.items()})
    except StopIteration as end:
        outer: Explored = end.value
    # a combination of parallel children may not have been tried: take the result of the trial with the most of its choices
    nearest = max(results, key=lambda each: len(each[0].items() & outer.choices.items()))[1]
    return Explored(outer.choices | nearest.choices, outer.seconds)


def _search_given(choices: Choices, search: Search) -> Generator[Choices, Seconds, tuple[Explored, dict[str, float]]]:
    """Explore with fixed choices of other variables; return also the least seconds of these."""
    least: dict[str, float] = {}
    try:
        inner = next(search)
        while True:
            seconds = yield choices | inner
            for name in choices.keys() & seconds.keys():
                least[name] = min(seconds[name], least.get(name, math.inf))
            inner = search.send(seconds)
    except StopIteration as end:
        return end.value, least


def _join(explored: Sequence[Explored], children: Sequence[Tree]) -> Explored:
    """Return the choices of all children; seconds of regions that a later child has count once."""
    covered: frozenset[int] = frozenset()
    choices: Choices = {}
    total = 0.0
    for each, child in reversed(list(zip(explored, children, strict=True))):
        regions = frozenset(region for variable in find_variables(child) for region in variable.regions)
        choices |= each.choices
        if not regions or not covered.issuperset(regions):
            total += each.seconds
            covered |= regions
    return Explored(choices, total)
