"""The tree of choices: variables, and how each group of them is explored (ASTRA, ASPLOS 2019)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from roller_svc.errors import ArgumentError

FORMAT = "roller-wiring/1"
KINDS = ("kernel", "fusion", "plan", "cut", "streams", "buffers", "threads")
Mode = Literal["parallel", "exhaustive", "prefix"]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice that measurement decides.

    Args:
        name: unique in its tree.
        kind: one of KINDS.
        choices: what each choice is, in words or digests.
        default: index of the choice that wins ties, and that is used where nothing was measured.
        key: digest of what the seconds depend on, other than the choice; equal in other trees that measure the same.
        regions: numbers of the parts of a call that the variable's seconds cover; () if they are its own.
    """

    name: str
    kind: str
    choices: tuple[str, ...]
    default: int = 0
    key: str = ""
    regions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ArgumentError(f"variable {self.name}: expected a kind of {', '.join(KINDS)}, got {self.kind!r}")
        if not self.choices or len(set(self.choices)) < len(self.choices):
            raise ArgumentError(f"variable {self.name}: expected different choices, got {list(self.choices)}")
        if not 0 <= self.default < len(self.choices):
            raise ArgumentError(f"variable {self.name}: expected a default of 0 to {len(self.choices) - 1}, got {self.default}")


@dataclass(frozen=True, slots=True)
class Node:
    """A group of variables and of other groups.

    "parallel" explores its children in the same trials, "exhaustive" each combination of theirs, "prefix" one after
    another, with the best choices of those before it.
    """

    mode: Mode
    children: tuple[Node | Variable, ...]

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ArgumentError(f"expected a mode of {', '.join(get_args(Mode))}, got {self.mode!r}")
        names = [variable.name for variable in find_variables(self)]
        repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if repeated:
            raise ArgumentError(f"expected a name once in a tree, got {', '.join(repeated)} again")


Tree = Node | Variable


def find_variables(tree: Tree) -> Iterator[Variable]:
    """Return the variables of a tree, in order."""
    if isinstance(tree, Variable):
        yield tree
    else:
        for child in tree.children:
            yield from find_variables(child)


def count_trials(tree: Tree) -> int:
    """Return how many trials explore a tree: the greatest of parallel children, a sum by prefix, else a product."""
    if isinstance(tree, Variable):
        return len(tree.choices)
    counts = [count_trials(child) for child in tree.children]
    match tree.mode:
        case "parallel":
            return max(counts, default=0)
        case "prefix":
            return sum(counts)
        case "exhaustive":
            return math.prod(counts)


def tree_to_json(tree: Tree) -> dict[str, Any]:
    """Return a tree as JSON, in the format `roller-wiring/1`."""
    return {"format": FORMAT, **_to_json(tree)}


def _to_json(tree: Tree) -> dict[str, Any]:
    if isinstance(tree, Node):
        return {"mode": tree.mode, "children": [_to_json(child) for child in tree.children]}
    content: dict[str, Any] = {
        "variable": tree.name, "kind": tree.kind, "choices": list(tree.choices), "default": tree.default,
    }  # fmt: skip
    if tree.key:
        content["key"] = tree.key
    if tree.regions:
        content["regions"] = list(tree.regions)
    return content


def tree_from_json(content: Mapping[str, Any]) -> Tree:
    """Return the tree of a JSON text of `tree_to_json`.

    Raises:
        ArgumentError: the text is not one.
    """
    if content.get("format") != FORMAT:
        raise ArgumentError(f"expected a tree of the format {FORMAT}, got {content.get('format')!r}")
    return _from_json(content)


def _from_json(content: Mapping[str, Any]) -> Tree:
    try:
        if "variable" not in content:
            return Node(content["mode"], tuple(map(_from_json, content["children"])))
        return Variable(
            content["variable"],
            content["kind"],
            tuple(map(str, content["choices"])),
            int(content.get("default", 0)),
            content.get("key", ""),
            tuple(map(int, content.get("regions", ()))),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArgumentError(f"not a tree of the format {FORMAT}: {error!r}") from error
