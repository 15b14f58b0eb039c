"""Dual GEMM: two contractions over one A, C[b, m, n] += A B and D[b, m, n] += A B', combined by a map.

A gated MLP, act(x W) * (x W'), is one (Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202). One kernel reads
A once and stores neither accumulator (CUTLASS example 45, dual_gemm).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from roller_svc.fusion.contraction import Contraction, as_contraction
from roller_svc.ir.expr import AxisRef, Expr, substitute
from roller_svc.ir.program import StatementKind, TensorExpr

ContractionOf = Callable[[TensorExpr], Contraction | None]


def match_dual_gemms(statements: Sequence[TensorExpr], contraction_of: ContractionOf) -> Mapping[str, TensorExpr]:
    """Return {first contraction's tensor: second contraction}, with the axes of the first.

    `contraction_of` returns the contraction of a statement that gets tiles of its own.
    """
    matches: dict[str, TensorExpr] = {}
    used: set[str] = set()
    for position, first in enumerate(statements):
        contraction = contraction_of(first)
        if contraction is None or first.output in used:
            continue
        for candidate in statements[position + 1 :]:
            if candidate.output in used or not _are_combined_by_map({first.output}, {candidate.output}, statements):
                continue
            second = _align_axes(first, contraction, candidate)
            if second is not None:
                matches[first.output] = second
                used |= {first.output, second.output}
                break
    return matches


def _are_combined_by_map(first: Collection[str], second: Collection[str], statements: Sequence[TensorExpr]) -> bool:
    """Return whether a map combines values that maps make of both."""
    made = (set(first), set(second))
    for statement in statements:
        if statement.kind is StatementKind.MAP:
            sources = [tensors for tensors in made if tensors & set(statement.reads_tensors)]
            if len(sources) == len(made):
                return True
            for tensors in sources:
                tensors.add(statement.output)
    return False


def _align_axes(first: TensorExpr, contraction: Contraction, other: TensorExpr) -> TensorExpr | None:
    """Return the other contraction with the first's axes if the two differ in B only, else None."""
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
        other,
        axes=first.axes,
        index=tuple(substitute(i, refs) for i in other.index),
        body=substitute(other.body, refs),
    )
    again = as_contraction(second)
    alike = again is not None and again.a == contraction.a and again.roles == contraction.roles
    return second if alike and second.index == first.index else None
