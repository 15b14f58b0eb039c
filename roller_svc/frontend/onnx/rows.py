"""Rows of the table of ONNX nodes: the parameters of an operator, each read from one attribute or input of a node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from roller_svc.frontend.onnx.use import Node, Use

T = TypeVar("T")
Reader = Callable[[Node], Use]
Read = Callable[[Node], object]


def call(operator: str, operands: int | None = None, /, **parameters: object) -> Reader:
    """Return the converter of a node that is one call of an operator.

    Args:
        operator: its name, with `{}` for the number of spatial dimensions.
        operands: how many of the node's inputs it takes; None: all.
        parameters: a reader of each, or its value.
    """

    def convert(node: Node) -> Use:
        read = {name: value(node) if callable(value) else value for name, value in parameters.items()}
        name = operator.format(node.spatial_rank) if "{}" in operator else operator
        return Use(name, node.all() if operands is None else node.leading(operands), read)

    return convert


def integer(name: str, default: int) -> Read:
    return lambda node: node.integer(name, default)


def number(name: str, default: float) -> Read:
    return lambda node: node.number(name, default)


def flag(name: str, *, default: bool = False) -> Read:
    return lambda node: bool(node.integer(name, default))


def text(name: str, default: str) -> Read:
    return lambda node: node.text(name, default)


def integers(name: str, default: int) -> Read:
    return lambda node: node.integers(name) or default


def required(name: str, position: int) -> Read:
    """Return the reader of integers that are an attribute or an input, and must be present."""
    return lambda node: node.required(name, position)


def named(name: str, default: str, values: Mapping[str, T]) -> Callable[[Node], T]:
    """Return the reader of the value that an attribute names."""
    return lambda node: values[node.choice(name, default, values)]
