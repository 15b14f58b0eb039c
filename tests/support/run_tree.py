"""Schedule trees run point by point in Python: slow, obvious, and strict about what was never written."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, Select
from roller_svc.ir.program import Combine
from roller_svc.ir.schedule import Barrier, Branch, Compute, HorizontalReduce, Let, Loop, Node, Storage, iter_nodes

BINARY: dict[OpKind, Callable[[Any, Any], Any]] = {
    OpKind.ADD: lambda a, b: a + b, OpKind.SUB: lambda a, b: a - b, OpKind.MUL: lambda a, b: a * b,
    OpKind.DIV: lambda a, b: a / b, OpKind.FLOORDIV: lambda a, b: a // b, OpKind.MOD: lambda a, b: a % b,
    OpKind.MAX: max, OpKind.MIN: min, OpKind.LT: lambda a, b: int(a < b), OpKind.LE: lambda a, b: int(a <= b),
    OpKind.GT: lambda a, b: int(a > b), OpKind.GE: lambda a, b: int(a >= b), OpKind.EQ: lambda a, b: int(a == b),
    OpKind.NE: lambda a, b: int(a != b),
}  # fmt: skip
UNARY: dict[OpKind, Callable[[Any], Any]] = {
    OpKind.NEG: lambda a: -a, OpKind.EXP: math.exp, OpKind.RELU: lambda a: max(a, 0), OpKind.ABS: abs,
}  # fmt: skip
JOINS: dict[Combine, Callable[[Any, Any], Any]] = {
    Combine.SUM: BINARY[OpKind.ADD], Combine.PROD: BINARY[OpKind.MUL], Combine.MAX: max, Combine.MIN: min,
}  # fmt: skip


@dataclass
class Room:
    """A tensor: elements by index. Reading what nobody wrote, or outside of the shape, is an error."""

    name: str
    shape: tuple[int, ...]
    elements: dict[tuple[int, ...], Any] = field(default_factory=dict)

    def place(self, index: tuple[int, ...]) -> tuple[int, ...]:
        assert len(index) == len(self.shape), f"{self.name}{list(index)} has shape {self.shape}"
        inside = all(0 <= i < n for i, n in zip(index, self.shape, strict=True))
        assert inside, f"{self.name}{list(index)} of {self.shape}"
        return index


@dataclass
class TreeRun:
    """`visits`: the index of every write, in order. `operations`: floating operators, joining one of them."""

    rooms: dict[str, Room]
    variables: dict[str, int] = field(default_factory=dict)
    visits: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    operations: int = 0

    def run(self, nodes: tuple[Node, ...]) -> None:
        for node in nodes:
            match node:
                case Loop(var=var, extent=extent, stop=limit, body=body):
                    for i in range(extent if limit is None else min(extent, self.value(limit))):
                        with_variable(self, var, i, body)
                case Let(var=var, value=value, body=body):
                    with_variable(self, var, self.value(value), body)
                case Storage(tensor=tensor, shape=shape, body=body):
                    self.rooms[tensor] = Room(tensor, shape)
                    self.run(body)
                    del self.rooms[tensor]
                case Branch(cond=cond, then=then, otherwise=otherwise):
                    self.run(then if self.value(cond) else otherwise)
                case Compute():
                    self.compute(node)
                case HorizontalReduce():
                    self.reduce_lanes(node)
                case Barrier():
                    pass

    def reduce_lanes(self, node: HorizontalReduce) -> None:
        source = self.rooms[node.first.tensor]
        *row, lane = (self.value(i) for i in node.first.index)
        values = [source.elements[source.place((*row, lane + i))] for i in range(node.lanes)]
        index = self.rooms[node.tensor].place(tuple(self.value(i) for i in node.index))
        self.rooms[node.tensor].elements[index] = functools.reduce(JOINS[node.combine], values)
        self.visits.append((node.tensor, index))

    def compute(self, node: Compute) -> None:
        room = self.rooms[node.tensor]
        index = room.place(tuple(self.value(i) for i in node.index))
        value = self.value(node.value)
        if node.combine is not None:
            value = JOINS[node.combine](room.elements[index], value)
            self.operations += 1
        room.elements[index] = value
        self.visits.append((node.tensor, index))

    def value(self, expr: Expr) -> Any:
        match expr:
            case Const(value=value):
                return value
            case AxisRef(name=name):
                return self.variables[name]
            case Load(tensor=tensor, index=index):
                room = self.rooms[tensor]
                return room.elements[room.place(tuple(self.value(i) for i in index))]
            case Cast(arg=arg, dtype=dtype):
                found = self.value(arg)
                return float(found) if dtype.is_float else int(found)
            case Select(cond=cond, then=then, otherwise=otherwise):
                return self.value(then if self.value(cond) else otherwise)
            case Op(kind=OpKind.LAND, args=(a, b)):
                return int(bool(self.value(a)) and bool(self.value(b)))
            case Op(kind=kind, args=args, dtype=dtype):
                self.operations += dtype.is_float
                values = [self.value(a) for a in args]
                return BINARY[kind](*values) if len(values) == 2 else UNARY[kind](*values)


def with_variable(run: TreeRun, var: str, value: int, body: tuple[Node, ...]) -> None:
    saved = run.variables.get(var)
    run.variables[var] = value
    run.run(body)
    if saved is None:
        del run.variables[var]
    else:
        run.variables[var] = saved


def run_tree(
    nodes: tuple[Node, ...], inputs: Mapping[str, np.ndarray[Any, Any]], outputs: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, np.ndarray[Any, Any]], TreeRun]:
    """The outputs, every element of which must have been written, and what was done for them."""
    rooms = {name: Room(name, array.shape, {i: v.item() for i, v in np.ndenumerate(array)}) for name, array in inputs.items()}
    rooms |= {name: Room(name, shape) for name, shape in outputs.items()}
    run = TreeRun(rooms)
    run.run(nodes)
    results = {}
    for name, shape in outputs.items():
        points = list(itertools.product(*map(range, shape)))
        results[name] = np.array([float(rooms[name].elements[p]) for p in points]).reshape(shape)
    return results, run


def alloc_bytes(nodes: tuple[Node, ...]) -> int:
    """Room of all storage nodes."""
    return sum(math.prod(n.shape) * n.dtype.bytes for n in iter_nodes(nodes) if isinstance(n, Storage))
