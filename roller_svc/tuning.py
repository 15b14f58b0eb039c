"""Search a tree of choices by measurement: the part of online tuning that takes any measure (ASTRA, ASPLOS 2019)."""

from roller_svc.graph.wiring.explore import Assignment, explore
from roller_svc.graph.wiring.index import Origin, ProfileIndex
from roller_svc.graph.wiring.tree import Node, Variable, count_trials, tree_from_json, tree_to_json

__all__ = [
    "Assignment", "Node", "Origin", "ProfileIndex", "Variable", "count_trials", "explore", "tree_from_json", "tree_to_json",
]  # fmt: skip
