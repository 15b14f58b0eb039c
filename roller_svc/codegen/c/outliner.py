"""Outliner: bodies of routines → the same bodies over parameters, so that equal work has equal source.

Values from outside of a body become parameters: numbers, and for each tensor a pointer at the part of its indices that
is invariant in the body. Sizes of enclosing blocks are then in the arguments of a call, not in the body. Parameters are
named in the order of their first use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from roller_svc.analysis.index_ranges import Range, fold, range_of
from roller_svc.codegen.scalar import Scalar
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import (
    AxisRef,
    Cast,
    Const,
    Expr,
    Load,
    Op,
    OpKind,
    Select,
    axes_of,
    children,
    loads_of,
    with_children,
)
from roller_svc.ir.index import add, min_, mul, num, ref, sub
from roller_svc.ir.schedule import (
    Branch,
    Compute,
    HorizontalReduce,
    Let,
    Loop,
    Node,
    Prefetch,
    Storage,
    Transpose,
)

# Terms of the invariant part of an index, each with its factor. None: the constant.
Terms = dict[Expr | None, int]


@dataclass(frozen=True, slots=True)
class Pointer:
    """A parameter: the address of an element of `tensor`."""

    name: str
    tensor: str
    offset: Expr  # elements
    written: bool
    is_unaliased: bool  # `restrict`: no other parameter accesses what is written through this one, or writes what it reads


@dataclass(frozen=True, slots=True)
class Number:
    """A parameter: an integer from outside of the body."""

    name: str
    value: Expr
    known: Range | None  # of its values


@dataclass(frozen=True, slots=True)
class Outline:
    """A body over parameters. Tensors from outside are pointers, of one dimension."""

    body: tuple[Node, ...]
    pointers: tuple[Pointer, ...]
    numbers: tuple[Number, ...]

    @property
    def without_arguments(self) -> Outline:
        """Return the outline without the arguments of a call: equal for equal work."""
        pointers = tuple(replace(p, tensor="", offset=num(0)) for p in self.pointers)
        return Outline(self.body, pointers, tuple(replace(n, value=num(0)) for n in self.numbers))


def outline(body: tuple[Node, ...], scalar: Scalar, registers: Collection[str]) -> Outline | None:
    """Return the body over parameters, in the scope of `scalar`, or None if it cannot be outlined.

    It cannot if it writes nothing outside, checks indices from data, guards loads by a condition, or accesses
    registers, tables or scalars from outside.
    """
    outliner = _Outliner(scalar, registers)
    try:
        nodes = outliner.nodes(body)
    except _NotOutlinableError:
        return None
    if not outliner.written:
        return None
    return Outline(nodes, outliner.collect_pointers(), tuple(outliner.numbers.values()))


class _NotOutlinableError(Exception):
    """The body cannot be outlined."""


@dataclass(slots=True)
class _Outliner:
    scalar: Scalar
    registers: Collection[str]
    inner: set[str] = field(default_factory=set)  # variables bound in the body
    storages: set[str] = field(default_factory=set)  # tensors allocated in the body
    origins: dict[tuple[object, ...], tuple[str, int]] = field(default_factory=dict)  # → name, constant part
    pointers: dict[str, tuple[str, Expr]] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    numbers: dict[Expr, Number] = field(default_factory=dict)

    def collect_pointers(self) -> tuple[Pointer, ...]:
        """Return the pointer parameters. Prefetches neither read nor write."""
        hints = {name for key, (name, _) in self.origins.items() if key[0] == "hint"}
        users = Counter(tensor for name, (tensor, _) in self.pointers.items() if name not in hints)
        written_tensors = {self.pointers[name][0] for name in self.written}
        return tuple(
            Pointer(name, tensor, offset, name in self.written, tensor not in written_tensors or users[tensor] == 1)
            for name, (tensor, offset) in self.pointers.items()
        )

    # nodes ----------------------------------------------------------------------------------------------------------
    def nodes(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return tuple(found for node in nodes for found in self._node(node))

    def _node(self, node: Node) -> tuple[Node, ...]:
        match node:
            case Loop():
                return (self._loop(node),)
            case Let(var=var, value=value, body=body, bounds_check=None):
                value = self._expr(fold(value, self.scalar.values))
                return (Let(var, value, self._visit_below(self.inner, var, body)),)
            case Storage(tensor=tensor, body=body) if node.subview_of is None:
                return (replace(node, body=self._visit_below(self.storages, tensor, body)),)
            case Compute() if not any(node.bounds_checked):
                tensor, index = self._element(node.tensor, node.index)
                self.written |= {tensor} & self.pointers.keys()
                return (replace(node, tensor=tensor, index=index, value=self._expr(node.value)),)
            case Branch():
                return self._branch(node)
            case Prefetch():
                tensor, index = self._element(node.tensor, node.index, is_hint=True)
                return (replace(node, tensor=tensor, index=index),)
            case HorizontalReduce():
                tensor, index = self._element(node.tensor, node.index)
                self.written |= {tensor} & self.pointers.keys()
                return (replace(node, tensor=tensor, index=index, first=self._load(node.first)),)
            case Transpose():
                tensor, index = self._element(node.tensor, node.index)
                self.written |= {tensor} & self.pointers.keys()
                return (replace(node, tensor=tensor, index=index, source=self._load(node.source)),)
            case _:
                raise _NotOutlinableError

    def _visit_below(self, names: set[str], name: str, body: tuple[Node, ...]) -> tuple[Node, ...]:
        """Visit the nodes below the binding of a variable or a tensor."""
        known = name in names
        names.add(name)
        nodes = self.nodes(body)
        if not known:
            names.remove(name)
        return nodes

    def _loop(self, loop: Loop) -> Loop:
        limit = None if loop.stop is None else fold(loop.stop, self.scalar.values)
        if limit is not None and not self._is_inner(limit):
            known = range_of(limit, self.scalar.ranges)
            tight = known is not None and known[1] <= loop.extent
            below = None if known is None else (min(0, known[0]), loop.extent)
            limit = self._number(limit if tight else min_(num(loop.extent), limit), below)
        elif limit is not None:
            limit = self._expr(limit)
        return replace(loop, stop=limit, body=self._visit_below(self.inner, loop.var, loop.body))

    def _branch(self, branch: Branch) -> tuple[Node, ...]:
        cond = fold(branch.cond, self.scalar.values)
        if isinstance(cond, Const):
            return self.nodes(branch.then if cond.value else branch.otherwise)
        if self._is_inner(cond):
            test = self._expr(cond)
        else:
            test = Op(OpKind.NE, (self._number(cond, (0, 1)), num(0)), DType.INT8)
        return (Branch(test, self.nodes(branch.then), self.nodes(branch.otherwise)),)

    # expressions ----------------------------------------------------------------------------------------------------
    def _is_inner(self, expr: Expr) -> bool:
        """Return whether the value changes in the body."""
        return not self.inner.isdisjoint(axes_of(expr)) or any(load.tensor in self.storages for load in loads_of(expr))

    def _expr(self, expr: Expr) -> Expr:
        match expr:
            case AxisRef(name=name):
                if name in self.inner:
                    return expr
                here = fold(expr, self.scalar.values)
                return here if isinstance(here, Const) else self._number(here, range_of(here, self.scalar.ranges))
            case Load():
                return self._load(expr)
            case Select(then=then, otherwise=otherwise) if loads_of(then) or loads_of(otherwise):
                raise _NotOutlinableError
            case _:
                return with_children(expr, tuple(self._expr(x) for x in children(expr)))

    def _load(self, load: Load) -> Load:
        if any(load.bounds_checked):
            raise _NotOutlinableError
        tensor, index = self._element(load.tensor, load.index)
        return replace(load, tensor=tensor, index=index)

    def _number(self, value: Expr, known: Range | None) -> AxisRef:
        _never_reads(value)
        if value not in self.numbers:
            self.numbers[value] = Number(f".n{len(self.numbers)}", value, known)
        return ref(self.numbers[value].name)

    def _element(self, tensor: str, index: tuple[Expr, ...], *, is_hint: bool = False) -> tuple[str, tuple[Expr, ...]]:
        """Return (tensor, index) in the body, with a parameter for a tensor from outside."""
        if tensor in self.storages:
            return tensor, tuple(self._expr(fold(i, self.scalar.values)) for i in index)
        place = self.scalar.buffers[tensor]
        if not place.shape or place.swizzled or tensor in self.registers or tensor.endswith(".of"):
            raise _NotOutlinableError
        terms: Terms = {}
        offset: Expr = num(0)
        for i, stride in zip(index, place.strides, strict=True):
            outer, inside = self._split_invariant(fold(i, self.scalar.values))
            _add_terms(terms, outer, stride)
            offset = add(offset, mul(inside, num(stride)))
        constant = terms.pop(None, 0)
        for term in terms:
            _never_reads(term)
        key: tuple[object, ...] = ("element", tensor, frozenset(terms.items()))
        if is_hint:
            key = ("hint", *key, constant)
        if key not in self.origins:
            self.origins[key] = f".p{len(self.pointers)}", constant
            self.pointers[self.origins[key][0]] = tensor, _sum(terms, constant)
        name, start = self.origins[key]
        return name, (add(offset, num(constant - start)),)

    def _split_invariant(self, index: Expr) -> tuple[Terms, Expr]:
        """Split an index into its invariant terms and the rest."""
        if not self._is_inner(index):
            return _terms(index), num(0)
        match index:
            case Op(kind=OpKind.ADD | OpKind.SUB as kind, args=(x, y)):
                terms, inside = self._split_invariant(x)
                others, other = self._split_invariant(y)
                _add_terms(terms, others, 1 if kind is OpKind.ADD else -1)
                return terms, add(inside, other) if kind is OpKind.ADD else sub(inside, other)
            case Op(kind=OpKind.MUL, args=(x, Const(value=int(by)))) | Op(kind=OpKind.MUL, args=(Const(value=int(by)), x)):
                terms, inside = self._split_invariant(x)
                return {term: c * by for term, c in terms.items()}, mul(inside, num(by))
            case Cast(arg=arg) if index.is_exact:
                return self._split_invariant(arg)
            case _:
                return {}, self._expr(index)


def _never_reads(value: Expr | None) -> None:
    """Check that an argument, which is computed before the call, does not load."""
    if value is not None and loads_of(value):
        raise _NotOutlinableError


def _terms(index: Expr) -> Terms:
    """Return the terms of a sum."""
    match index:
        case Const(value=int(value)):
            return {None: value}
        case Op(kind=OpKind.ADD | OpKind.SUB as kind, args=(x, y)):
            terms = _terms(x)
            _add_terms(terms, _terms(y), 1 if kind is OpKind.ADD else -1)
            return terms
        case Op(kind=OpKind.MUL, args=(x, Const(value=int(by)))) | Op(kind=OpKind.MUL, args=(Const(value=int(by)), x)):
            return {term: c * by for term, c in _terms(x).items()}
        case _:
            return {index: 1}


def _add_terms(terms: Terms, others: Terms, factor: int) -> None:
    for term, c in others.items():
        total = terms.pop(term, 0) + c * factor
        if total:
            terms[term] = total


def _sum(terms: Terms, constant: int) -> Expr:
    total: Expr = num(0)
    for term, c in terms.items():
        if term is not None:
            total = add(total, mul(term, num(c)))
    return add(total, num(constant))
