"""Indirect reads of a CPU loop nest: check each index from data once, where it is known, and prefetch later rows.

Hardware prefetchers cannot predict gathered rows, but the index tensor names them (LLVM-style indirect prefetch).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

from roller_svc.analysis.unconditional import unconditional_loads
from roller_svc.families.common.cpu.prefetch import PREFETCH_DISTANCE_BYTES
from roller_svc.ir.affine import affine
from roller_svc.ir.expr import Expr, Load, axes_of, loads_of, rewrite, substitute
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.index import add, ceil_div, min_, num, ref
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Branch, Compute, Let, Loop, LoopKind, Node, Prefetch, ScheduleTree, Storage

_MIN_PREFETCH_ROWS = 2  # a prefetch of the next row alone is late


@dataclass(frozen=True, slots=True)
class _IndirectIndex:
    """Dimension `d` of a tensor and its index read from data."""

    tensor: str
    d: int
    index: Expr

    def is_used_by(self, load: Load) -> bool:
        if load.tensor != self.tensor or not any(load.bounds_checked):
            return False
        return load.bounds_checked[self.d] and load.index[self.d] == self.index

    def bound_to(self, name: str, load: Load) -> Load:
        """Return the load with this index replaced by the variable `name` and unchecked."""
        index = (*load.index[: self.d], ref(name), *load.index[self.d + 1 :])
        checked = (*load.bounds_checked[: self.d], False, *load.bounds_checked[self.d + 1 :])
        return replace(load, index=index, bounds_checked=checked)


def prefetch_gathers(tree: ScheduleTree, group: KernelGroup, program: RProgram, hw: HardwareSpec) -> ScheduleTree:
    """Hoist the checks of indices that are inputs of the group, and prefetch the rows that they select."""
    return replace(tree, body=_GatherRewriter(group, program, hw).nodes(tree.body, frozenset()))


@dataclass(frozen=True, slots=True)
class _GatherRewriter:
    group: KernelGroup
    program: RProgram
    hw: HardwareSpec

    def nodes(self, nodes: tuple[Node, ...], bound: frozenset[str]) -> tuple[Node, ...]:
        return tuple(self._node(node, bound) for node in nodes)

    def _node(self, node: Node, bound: frozenset[str]) -> Node:
        match node:
            case Loop(kind=LoopKind.VECTOR):
                return node
            case Loop(var=var, body=body) if any(isinstance(n, Loop) and n.kind is LoopKind.PARALLEL for n in body):
                return replace(node, body=self.nodes(body, bound | {var}))
            case Loop(var=var, body=body) | Let(var=var, body=body):
                return replace(node, body=self._hoist_checks(body, bound | {var}))
            case Storage(body=body):
                return replace(node, body=self.nodes(body, bound))
            case Branch(then=then, otherwise=otherwise):
                return replace(node, then=self.nodes(then, bound), otherwise=self.nodes(otherwise, bound))
            case _:
                return node

    def _hoist_checks(self, body: tuple[Node, ...], bound: frozenset[str]) -> tuple[Node, ...]:
        """Bind and check indirect indices as soon as their variables are bound, above all nodes that use them."""
        indirect = next((p for p in _unconditional_indices(body) if axes_of(p.index) <= bound and self._is_input(p)), None)
        if indirect is None:
            return self.nodes(body, bound)
        name = next(n for i in count() if (n := f"{indirect.tensor}.place{i}") not in bound)
        prefetched = self._prefetched_index(indirect)
        if prefetched is None:
            body = _bind_index(body, indirect, name)
        else:
            prefetch = _RowPrefetch(f"{name}.later", self.hw.dram.transaction_bytes)
            body = (Let(prefetch.name, prefetched, _bind_index(body, indirect, name, prefetch)),)
        return (
            Let(
                name,
                indirect.index,
                self._hoist_checks(body, bound | {name}),
                bounds_check=(indirect.tensor, indirect.d),
            ),
        )

    def _is_input(self, indirect: _IndirectIndex) -> bool:
        inputs = dict(self.group.inputs)
        return indirect.tensor in inputs and all(load.tensor in inputs for load in loads_of(indirect.index))

    def _prefetched_index(self, indirect: _IndirectIndex) -> Expr | None:
        """Return the index of the row to prefetch while a map gathers the current one.

        None if the table fits a private cache or the group reduces.
        """
        axis = next((a for a in reversed(self.group.outer) if a.name in axes_of(indirect.index)), None)
        table_bytes = dict(self.group.inputs)[indirect.tensor].bytes
        is_far = self.hw.exceeds_caches(table_bytes, self.group.space.compulsory_bytes)
        if axis is None or not is_far or self.group.space.reduced:
            return None
        rows = max(_MIN_PREFETCH_ROWS, ceil_div(PREFETCH_DISTANCE_BYTES, self._chunk_bytes(indirect)))
        if rows >= axis.extent:
            return None
        return substitute(indirect.index, {axis.name: min_(add(ref(axis.name), num(rows)), num(axis.extent - 1))})

    def _chunk_bytes(self, indirect: _IndirectIndex) -> int:
        """Return the bytes of a row that one task reads before the next row."""
        types, blocks = dict(self.group.inputs), self.program.block.as_dict()
        along = [a for a in self.group.outer if a.name not in axes_of(indirect.index)]
        return types[indirect.tensor].dtype.bytes * math.prod(min(blocks.get(a.name, a.extent), a.extent) for a in along)


@dataclass(frozen=True, slots=True)
class _RowPrefetch:
    """Prefetches of the row whose index is bound to `name`, one for each line of `line_bytes`."""

    name: str
    line_bytes: int

    def prefetches(self, loop: Loop, indirect: _IndirectIndex) -> tuple[Node, ...]:
        """Prefetch as much of the row as a vector loop reads of the current one."""
        read = next((x for x in _reads(loop.body) if indirect.is_used_by(x) and _is_contiguous_in(x, loop.var)), None)
        if read is None:
            return ()
        step = max(1, self.line_bytes // read.dtype.bytes)
        prefetched = indirect.bound_to(self.name, read)
        lanes = [{loop.var: num(first)} for first in range(0, loop.extent, step)]
        return tuple(Prefetch(read.tensor, tuple(substitute(i, at) for i in prefetched.index), 0) for at in lanes)


def _is_contiguous_in(load: Load, var: str) -> bool:
    """Return whether iterations of the loop read contiguous elements of one row."""
    last = affine(load.index[-1])
    return last is not None and last.coeff(var) == 1 and all(var not in axes_of(i) for i in load.index[:-1])


def _bind_index(
    nodes: tuple[Node, ...], indirect: _IndirectIndex, name: str, prefetch: _RowPrefetch | None = None
) -> tuple[Node, ...]:
    """Return the nodes with the index replaced by the variable `name`."""
    bound_nodes: list[Node] = []
    for node in nodes:
        match node:
            case Compute(value=value):
                bound_nodes.append(replace(node, value=_bind_in_value(value, indirect, name)))
            case Loop(body=body):
                bound_nodes.append(replace(node, body=_bind_index(body, indirect, name, prefetch)))
                if prefetch is not None and node.kind is LoopKind.VECTOR:
                    bound_nodes += prefetch.prefetches(node, indirect)
            case Let(body=body) | Storage(body=body):
                bound_nodes.append(replace(node, body=_bind_index(body, indirect, name, prefetch)))
            case Branch(then=then, otherwise=otherwise):
                branches = (_bind_index(branch, indirect, name, prefetch) for branch in (then, otherwise))
                bound_nodes.append(Branch(node.cond, *branches))
            case _:
                bound_nodes.append(node)
    return tuple(bound_nodes)


def _bind_in_value(value: Expr, indirect: _IndirectIndex, name: str) -> Expr:
    def bind(expr: Expr) -> Expr:
        return indirect.bound_to(name, expr) if isinstance(expr, Load) and indirect.is_used_by(expr) else expr

    return rewrite(value, bind)


def _unconditional_indices(nodes: tuple[Node, ...]) -> dict[_IndirectIndex, None]:
    """Return the indirect indices that the nodes read whatever their conditions are, in order."""
    indices: dict[_IndirectIndex, None] = {}
    for node in nodes:
        match node:
            case Compute(value=value):
                for load in unconditional_loads(value, in_indices=True):
                    indirect_indices = [
                        _IndirectIndex(load.tensor, d, load.index[d]) for d, c in enumerate(load.bounds_checked) if c
                    ]
                    indices |= dict.fromkeys(indirect_indices)
            case Loop(body=body) | Let(body=body) | Storage(body=body):
                indices |= _unconditional_indices(body)
            case Branch(then=then, otherwise=otherwise):
                others = _unconditional_indices(otherwise)
                indices |= {indirect: None for indirect in _unconditional_indices(then) if indirect in others}
            case _:
                pass
    return indices


def _reads(nodes: tuple[Node, ...]) -> Iterator[Load]:
    return (load for node in nodes if isinstance(node, Compute) for load in loads_of(node.value))
