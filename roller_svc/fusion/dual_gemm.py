"""Statements → pairs of contractions over one left factor: C[b, m, n] += A B and D[b, m, n] += A B', joined by a map.

A gated MLP is one, act(x W) * (x W'). One kernel then reads A once and stores neither sum (Shazeer, "GLU Variants
Improve Transformer", arXiv:2002.05202, has the variants).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from roller_svc.fusion.contraction import Contraction, as_contraction
from roller_svc.ir.expr import AxisRef, Expr, substitute
from roller_svc.ir.program import StatementKind, TensorExpr

Reading = Callable[[TensorExpr], Contraction | None]


def paired_sums(statements: Sequence[TensorExpr], reading: Reading) -> Mapping[str, TensorExpr]:
    """First sum's tensor → the statement of the second, its axes called as the first's. `reading`: how a statement that
    gets tiles of its own is a contraction."""
    found: dict[str, TensorExpr] = {}
    taken: set[str] = set()
    for place, first in enumerate(statements):
        contraction = reading(first)
        if contraction is None or first.output in taken:
            continue
        for other in statements[place + 1 :]:
            if other.output in taken or not _meet({first.output}, {other.output}, statements):
                continue
            second = _aligned(first, contraction, other)
            if second is not None:
                found[first.output] = second
                taken |= {first.output, second.output}
                break
    return found


def _meet(one: Collection[str], other: Collection[str], statements: Sequence[TensorExpr]) -> bool:
    """Whether a map reads what maps have made of both."""
    made = (set(one), set(other))
    for statement in statements:
        if statement.kind is StatementKind.MAP:
            reached = [tensors for tensors in made if tensors & set(statement.reads_tensors)]
            if len(reached) == len(made):
                return True
            for tensors in reached:
                tensors.add(statement.output)
    return False


def _aligned(first: TensorExpr, contraction: Contraction, other: TensorExpr) -> TensorExpr | None:
    """The other with the first's axes, where the two differ in the right factor only."""
    theirs = as_contraction(other)
    if theirs is None or other.accumulator is not first.accumulator:
        return None
    names: dict[str, str] = {}
    for (_, mine), (_, its) in zip(contraction.roles, theirs.roles, strict=True):
        if [a.extent for a in mine] != [a.extent for a in its]:
            return None
        names |= {old.name: new.name for old, new in zip(its, mine, strict=True)}
    refs: dict[str, Expr] = {old: AxisRef(new) for old, new in names.items()}
    second = replace(
        other, axes=first.axes, index=tuple(substitute(i, refs) for i in other.index),
        body=substitute(other.body, refs),
    )  # fmt: skip
    again = as_contraction(second)
    alike = again is not None and again.a == contraction.a and again.roles == contraction.roles
    return second if alike and second.index == first.index else None
