"""Dependence test of parallel loops: each iteration must write elements of its own, and read no other iteration's.

Indices are linear forms over loop variables; whether two iterations may access the same element follows from those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from roller_svc.analysis.linear import linear
from roller_svc.errors import ScheduleError
from roller_svc.ir.expr import AxisRef, Const, Expr, Load, Op, OpKind, iter_subexpressions
from roller_svc.ir.schedule import Loop, LoopKind, Scope


@dataclass(frozen=True, slots=True)
class Value:
    """The value of an index over loop variables."""

    terms: tuple[tuple[str, int], ...] | None  # (loop variable, coefficient), ("", constant); None: not linear
    loops: frozenset[str]  # that it depends on
    from_data: bool
    expr: Expr | None  # identifies values without terms

    @classmethod
    def of_loop(cls, var: str) -> Value:
        return cls(((var, 1),), frozenset((var,)), from_data=False, expr=None)


Position = tuple[Value, ...]


@dataclass(slots=True)
class Variables:
    """Values in scope."""

    values: dict[str, Value] = field(default_factory=dict)  # of loop variables and Lets
    contents: dict[str, frozenset[str]] = field(default_factory=dict)  # storage node → loops its contents depend on
    changing: frozenset[str] | None = None  # tensors that the tree writes; None: all

    def value(self, expr: Expr) -> Value:
        """Return the value of an expression."""
        if isinstance(expr, AxisRef):
            return self.values[expr.name]
        total: dict[str, int] = {}
        for term, c in linear(expr).items():
            if term is None:
                total[""] = total.get("", 0) + c
                continue
            known = self.values[term.name].terms if isinstance(term, AxisRef) else None
            if known is None:
                return self._opaque(expr)
            for name, k in known:
                total[name] = total.get(name, 0) + c * k
        terms = tuple(sorted((name, c) for name, c in total.items() if c))
        return Value(terms, frozenset(name for name, _ in terms if name), from_data=False, expr=None)

    def _opaque(self, expr: Expr) -> Value:
        loops, from_data = self.dependencies(expr)
        return Value(None, loops, from_data, expr)

    def dependencies(self, expr: Expr) -> tuple[frozenset[str], bool]:
        """Return the loops that an expression depends on, and whether it reads a tensor that the tree writes."""
        loops: set[str] = set()
        from_data = False
        for node in iter_subexpressions(expr):
            if isinstance(node, AxisRef):
                value = self.values[node.name]
                loops |= value.loops
                from_data |= value.from_data
            elif isinstance(node, Load):
                loops |= self.contents.get(node.tensor, frozenset())
                from_data |= self.changing is None or node.tensor in self.changing
        return frozenset(loops), from_data


def are_disjoint(position: Position, var: str, extent: int, inner: Mapping[str, int]) -> bool:
    """Return whether different iterations of the loop over `var` write different elements, for all inner iterations.

    One dimension is enough if its terms are digits of a number: each coefficient exceeds the span of the smaller ones.
    A dimension that is not linear (a decoded fused axis) is assumed to differ.
    """
    varying = {name: n for name, n in {**inner, var: extent}.items() if n > 1}
    for value in position:
        if var not in value.loops:
            continue
        if value.terms is None:
            return True
        span = 0
        for name, c in sorted(value.terms, key=lambda term: abs(term[1])):
            if name not in varying:
                continue
            if abs(c) <= span:
                break
            span += abs(c) * (varying[name] - 1)
        else:
            return True
    return False


def never_alias(write: Position, read: Position, varying: Mapping[str, int]) -> bool:
    """Return whether the read accesses no element that is written while the loops in `varying` run."""
    for a, b in zip(write, read, strict=True):
        if a.terms is None or b.terms is None:
            continue
        (invariant, low, high), (other_invariant, first, last) = (_bounds(v.terms or (), varying) for v in (a, b))
        if invariant == other_invariant and (high < first or last < low):
            return True
    return False


def _bounds(terms: tuple[tuple[str, int], ...], varying: Mapping[str, int]) -> tuple[list[tuple[str, int]], int, int]:
    """Return (invariant terms, lowest and highest value of the others)."""
    invariant, low, high = [], 0, 0
    for name, c in terms:
        if not name:
            low, high = low + c, high + c
        elif name in varying:
            end = c * (varying[name] - 1)
            low, high = low + min(0, end), high + max(0, end)
        else:
            invariant.append((name, c))
    return invariant, low, high


# (Loops around a tensor's storage node, its scope); (0, None) of a tensor in memory.
StorageSite = tuple[int, Scope | None]

_PARALLEL = (LoopKind.PARALLEL, LoopKind.VECTOR, LoopKind.BLOCK, LoopKind.THREAD)


@dataclass(slots=True)
class _Accesses:
    """Accesses in one parallel loop to tensors that are allocated outside of it."""

    writes: dict[str, list[Position]] = field(default_factory=dict)
    reads: dict[str, list[Position]] = field(default_factory=dict)
    inner: dict[str, int] = field(default_factory=dict)  # extents of its inner loops


class Condition(NamedTuple):
    """A branch around a node: it runs where `cond` is `holds`."""

    depth: int  # loops around the branch
    cond: Expr
    holds: bool


@dataclass(slots=True)
class Dependence:
    """The loops and branches around a node, and the accesses of each loop."""

    variables: Variables = field(default_factory=Variables)
    loops: list[Loop] = field(default_factory=list)
    branches: list[Condition] = field(default_factory=list)
    accesses: list[_Accesses] = field(default_factory=list)  # of each of the loops

    @contextmanager
    def inside(self, loop: Loop) -> Iterator[None]:
        """Enter the loop's body. On exit raises ScheduleError (schedule-dependence) if iterations conflict."""
        for accesses in self.accesses:
            accesses.inner[loop.var] = loop.extent
        self.loops.append(loop)
        self.accesses.append(_Accesses())
        yield
        self.loops.pop()
        self._check_reads(loop, self.accesses.pop())

    def record_access(self, tensor: str, index: tuple[Expr, ...], site: StorageSite, *, is_write: bool) -> None:
        """Record an access for every enclosing parallel loop whose iterations share the tensor."""
        depth, scope = site
        position: Position | None = None
        for level, loop in enumerate(self.loops):
            shared = level >= depth or (scope is Scope.SHARED and loop.kind is LoopKind.THREAD)
            if not shared or loop.kind not in _PARALLEL or loop.extent == 1:
                continue
            if position is None:
                position = tuple(self.variables.value(i) for i in index)
            accesses = self.accesses[level]
            (accesses.writes if is_write else accesses.reads).setdefault(tensor, []).append(position)
            if is_write:
                self._check_own_element(tensor, position, level)

    def _check_own_element(self, tensor: str, position: Position, level: int) -> None:
        loop = self.loops[level]
        inner = self._narrowed({x.var: x.extent for x in self.loops[level + 1 :]})
        if any(loop.var in value.loops for value in position):
            # threads of a block may share elements: barriers order them
            if loop.kind is LoopKind.THREAD or are_disjoint(position, loop.var, loop.extent, inner):
                return
        elif any(
            each.holds and each.depth > level and _selects_one_iteration(each.cond, loop.var, self.variables)
            for each in self.branches
        ):
            return
        raise ScheduleError(
            f"iterations of {loop.kind.value} loop {loop.var} write the same elements of {tensor}",
            code="schedule-dependence",
        )

    def _narrowed(self, extents: dict[str, int]) -> dict[str, int]:
        """Return extents of loops as far as branches leave them: to lanes below a bound, to all warpgroups but one."""
        for branch in self.branches:
            match branch.cond:
                case Op(kind=OpKind.LT, args=(a, Const(value=int(bound)))) if branch.holds:
                    terms = self.variables.value(a).terms or ()
                    if all(name and c > 0 for name, c in terms):
                        extents |= {v: min(extents[v], -(-bound // c)) for v, c in terms if v in extents}
                case Op(kind=OpKind.EQ, args=(a, Const(value=int(last)))) if not branch.holds:
                    terms = self.variables.value(a).terms or ()
                    extents |= {v: last for v, c in terms[:1] if terms == ((v, 1),) and extents.get(v) == last + 1}
                case _:
                    pass
        return extents

    def _check_reads(self, loop: Loop, accesses: _Accesses) -> None:
        """Check that an iteration reads only its own elements of tensors that the loop writes."""
        if loop.kind is LoopKind.THREAD:
            return
        moving = {loop.var: loop.extent, **accesses.inner}
        for tensor in sorted(accesses.writes.keys() & accesses.reads.keys()):
            writes = accesses.writes[tensor]
            for read in accesses.reads[tensor]:
                if any(_same_slice(write, read, loop.var) for write in writes):
                    continue
                if not all(never_alias(write, read, moving) for write in writes):
                    raise ScheduleError(
                        f"iterations of {loop.kind.value} loop {loop.var} read each other's elements of {tensor}",
                        code="schedule-dependence",
                    )


def _same_slice(write: Position, read: Position, var: str) -> bool:
    return any(a == b and var in a.loops for a, b in zip(write, read, strict=True))


def _selects_one_iteration(cond: Expr, var: str, variables: Variables) -> bool:
    """Return whether the condition holds in one iteration: a conjunct is an equality with the variable, or says that it is 0."""
    match cond:
        case Op(kind=OpKind.LAND, args=args):
            return any(_selects_one_iteration(arg, var, variables) for arg in args)
        case Op(kind=OpKind.EQ, args=(a, b)):
            return var in variables.value(a).loops or var in variables.value(b).loops
        case Op(kind=OpKind.LT, args=(a, Const(value=1))):
            terms = variables.value(a).terms or ()
            return var in dict(terms) and all(name and c > 0 for name, c in terms)
        case _:
            return False
