"""TensorProgram → kernel groups: what is fused into one kernel, and which kernel comes after which."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace

from roller_svc.analysis.online_reduction import JointKind, joints
from roller_svc.analysis.operand import value_dtype
from roller_svc.fusion.aligned_copies import aligned_copies
from roller_svc.fusion.attention import Found, attentions
from roller_svc.fusion.attention_group import attention_group
from roller_svc.fusion.axis_fusion import flat_rows, fuse_axes
from roller_svc.fusion.contraction import Contraction, as_contraction
from roller_svc.fusion.delinearize import split_reduced
from roller_svc.fusion.dual_gemm import paired_sums
from roller_svc.fusion.inline import inlined, squeezed
from roller_svc.fusion.row_normalization import divided_rows
from roller_svc.fusion.space import contraction_space, nest_space
from roller_svc.fusion.split.online_reduction import cuts_evenly
from roller_svc.ir.attention import Attention
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Const, Expr, Load, axes_of, substitute
from roller_svc.ir.group import ContractionOperands, GroupKind, KernelGroup
from roller_svc.ir.program import Axis, AxisKind, StatementKind, TensorExpr, TensorProgram, TensorType

# A contraction with fewer rows, or columns, than this is bound by memory: a matrix unit would idle, and so would tiles.
STREAMED_ROWS = 8
# Rows below this many times the cores, with long rows, are better split over the device one statement at a time.
ROWS_PER_CORE = 1
LONG_ROW = 1 << 16
NARROW = 16  # bits of the operands that every matrix unit is for


@dataclass(frozen=True, slots=True)
class _Draft:
    """A group while it grows: statements whose shared axes already have the first statement's names."""

    statements: tuple[TensorExpr, ...]
    contraction: Contraction | None
    attention: Attention | None = None
    sums: int = 1

    @property
    def outer(self) -> tuple[Axis, ...]:
        return self.statements[0].spatial

    @property
    def written(self) -> frozenset[str]:
        return frozenset(s.output for s in self.statements)

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(t for s in self.statements for t in s.reads_tensors) | _attended(self.attention)


@dataclass(frozen=True, slots=True)
class Traits:
    """All that partitioning asks of a device."""

    is_cpu: bool
    has_matrix_unit: bool
    num_cores: int
    attends_in: frozenset[DType] = frozenset()  # types of factors with which attention becomes one kernel
    pairs: bool = False  # whether two contractions over one left factor become one kernel
    moves_boxes: bool = False  # whether it has bulk copies, which take aligned rows only
    aligns: bool = False  # whether contractions read copies that have such rows

    @property
    def alone(self) -> Traits:
        """What it asks where there is one statement: nothing may join it."""
        return Traits(self.is_cpu, has_matrix_unit=False, num_cores=1, aligns=self.aligns)

    @property
    def apart(self) -> Traits:
        """The same device, attention being several kernels."""
        return replace(self, attends_in=frozenset())

    @property
    def paired(self) -> Traits:
        """The same device, two contractions over one left factor being one kernel."""
        return replace(self, pairs=self.has_matrix_unit)

    @property
    def aligned(self) -> Traits:
        """The same device, contractions of rows that begin anywhere reading aligned copies of them, none of which is
        attention."""
        return replace(self, attends_in=frozenset(), aligns=self.moves_boxes)


def computed(program: TensorProgram, hw: Traits) -> tuple[TensorExpr, ...]:
    """The statements that are computed as such, in the form that kernels of the family have them in."""
    statements = tuple(squeezed(s) for s in inlined(program))
    if not hw.is_cpu:
        return statements
    return divided_rows(tuple(split_reduced(s) for s in statements), {o.tensor for o in program.outputs})


def partition_of(program: TensorProgram, statements: tuple[TensorExpr, ...], hw: Traits) -> tuple[KernelGroup, ...]:
    """`partition` of a program that is `computed`."""
    wanted = {o.tensor for o in program.outputs}
    types = stored_types(program)
    if hw.aligns:
        aligned = aligned_copies(statements, dict(program.inputs), lambda s: _contraction(s, hw))
        statements, types = aligned.statements, types | dict(aligned.copies)
    statements, attention = attentions(statements, wanted, hw.attends_in) if hw.attends_in else (statements, {})
    singles = tuple(s for s in statements if s.output not in attention)
    pairs = paired_sums(singles, lambda s: _contraction(s, hw)) if hw.pairs else {}
    drafts = _drafts(statements, attention, pairs, hw)
    read_by = _readers(drafts)
    groups = (_group(draft, f"kernel{i}", types, wanted | read_by[i], hw) for i, draft in enumerate(drafts))
    return tuple(_with_constants(groups, program))


def _with_constants(groups: Iterable[KernelGroup], program: TensorProgram) -> Iterator[KernelGroup]:
    """Each group told which of its inputs stay the same: the program's constants and what is made of them alone."""
    constants = set(program.constants)
    for group in groups:
        stay = frozenset(name for name, _ in group.inputs if name in constants)
        accesses = tuple(replace(a, constant=a.tensor in stay) for a in group.space.accesses)
        told = replace(group, constants=stay, space=replace(group.space, accesses=accesses))
        if told.is_constant(program.outputs):
            constants |= {name for name, _ in told.stored}
        yield told


def stored_types(program: TensorProgram) -> dict[str, TensorType]:
    """How each tensor lies in memory. An intermediate of a narrow float keeps its digits: it is stored as float32."""
    kept = {name for name, _ in program.inputs} | {o.tensor for o in program.outputs}
    return {
        name: type_ if name in kept else TensorType(type_.dtype.compute, type_.shape)
        for name, type_ in program.types.items()
    }


def _drafts(
    statements: tuple[TensorExpr, ...], attention: Mapping[str, Found], pairs: Mapping[str, TensorExpr], hw: Traits
) -> list[_Draft]:
    drafts: list[_Draft] = []
    pending = [(statement, _reads(statement, attention.get(statement.output))) for statement in statements]
    done: set[str] = set()  # written by groups before the one that grows
    written = {s.output for s in statements}
    while pending:
        first, _ = pending[0]
        found = attention.get(first.output)
        if found is not None:
            draft = _Draft((first,), found.contraction, found.attention)
        else:
            draft = _with_second(_Draft((first,), _contraction(first, hw)), pairs.get(first.output), written - done)
        rest: list[tuple[TensorExpr, frozenset[str]]] = []
        for statement, reads in pending[1:]:
            if statement.output in draft.written:
                continue
            available = all(t not in written or t in done or t in draft.written for t in reads)
            others = {t for s, names in pending[1:] if s is not statement for t in names} if available else set()
            alone = statement.output in attention
            joined = _joined(draft, statement, hw, others) if available and not alone else None
            if joined is None:
                rest.append((statement, reads))
            else:
                draft = joined
        drafts.append(draft)
        done |= draft.written
        pending = rest
    return drafts


def _with_second(draft: _Draft, second: TensorExpr | None, awaited: Set[str]) -> _Draft:
    """The draft of a sum with a second one in it, where that reads nothing that is still to come."""
    if second is None or not awaited.isdisjoint(second.reads_tensors):
        return draft
    return replace(draft, statements=(*draft.statements, second), sums=2)


def _reads(statement: TensorExpr, found: Found | None) -> frozenset[str]:
    """Tensors that must be there before the statement, or all of attention, is computed."""
    return frozenset(statement.reads_tensors) if found is None else _attended(found.attention)


def _attended(attention: Attention | None) -> frozenset[str]:
    return frozenset() if attention is None else attention.reads


def _contraction(statement: TensorExpr, hw: Traits) -> Contraction | None:
    """The reading of a statement that gets tiles of its own: on a GPU a thin product is rows to be streamed, unless its
    rows are windows."""
    found = as_contraction(statement)
    if found is None or hw.is_cpu:
        return found
    thin = min(math.prod(a.extent for a in axes) for axes in (found.m, found.n)) < STREAMED_ROWS
    reduced, spatial = ({a.name for a in axes} for axes in (statement.reduced, statement.spatial))
    windows = any(
        (used := axes_of(index)) & reduced and used & spatial for load in statement.reads for index in load.index
    )
    return None if thin and not windows else found


def _readers(drafts: list[_Draft]) -> list[set[str]]:
    """For each draft, which of its tensors other drafts read."""
    return [{t for other in drafts if other is not draft for t in other.reads} & draft.written for draft in drafts]


def _joined(draft: _Draft, statement: TensorExpr, hw: Traits, others: set[str]) -> _Draft | None:
    """The draft with the statement in it, where they can share one loop nest and it pays. `others`: what is read by
    statements still to come."""
    if statement.kind is StatementKind.SCATTER or draft.statements[0].kind is StatementKind.SCATTER:
        return None
    if draft.contraction is not None and statement.kind is StatementKind.REDUCE:
        apart = draft.attention is not None or bool(draft.written & others)
        return None if apart else _with_row_reduction(draft, draft.contraction, statement, hw)
    names = _shared_axes(draft, statement)
    if names is None:
        return None
    inner = [a for a in statement.axes if a.name not in names]
    if draft.contraction is not None and (inner or statement.kind is not StatementKind.MAP):
        return None
    if statement.kind is StatementKind.REDUCE and any(a.kind is AxisKind.SPATIAL for a in inner):
        return None  # a row of results for each point, not one: it wants a nest of its own
    if draft.contraction is None and _contraction(statement, hw) is not None:
        return None
    rows = math.prod(a.extent for a in draft.outer)
    row = max(math.prod(a.extent for a in s.axes) // rows for s in (*draft.statements, statement))
    joined = replace(draft, statements=(*draft.statements, _renamed(statement, names, draft)))
    if inner and rows < ROWS_PER_CORE * hw.num_cores and row >= LONG_ROW and not _shares_pass(joined, hw):
        return None
    return joined


def _shares_pass(draft: _Draft, hw: Traits) -> bool:
    """Whether its last statement needs no pass of its own over a row, which can be split as a pair."""
    last = draft.statements[-1]
    return cuts_evenly(last) and any(
        joint.second is last and (not hw.is_cpu or joint.kind is JointKind.PLACE) for joint in joints(draft.statements)
    )


def _with_row_reduction(draft: _Draft, contraction: Contraction, statement: TensorExpr, hw: Traits) -> _Draft | None:
    """A contraction's draft with a reduction over all of n: the epilogue of matrix units does it.

    Where something else reads the results too, they are stored anyway, and a nest that reads them once does it all.
    """
    types = (value_dtype(contraction.a), value_dtype(contraction.b))
    on_matrix_unit = hw.has_matrix_unit and all(t is None or t.bits <= NARROW for t in types)
    if not on_matrix_unit or any(s.kind is StatementKind.REDUCE for s in draft.statements[1:]):
        return None
    names: dict[str, str] = {}
    for load in statement.reads:
        if load.tensor in draft.written:
            writer = next(s for s in draft.statements if s.output == load.tensor)
            found = _renaming(writer.index, load.index)
            if found is None or (names and found != names):
                return None
            names = found
    extents = {a.name: a.extent for a in draft.outer}
    if set(names.values()) != extents.keys() or any(
        names.get(a.name) is None or extents[names[a.name]] != a.extent for a in statement.axes
    ):
        return None
    if {names[a.name] for a in statement.reduced} != {a.name for a in contraction.n}:
        return None
    return _Draft((*draft.statements, _renamed(statement, names, draft)), contraction)


def _renaming(written_at: tuple[Expr, ...], read_at: tuple[Expr, ...]) -> dict[str, str] | None:
    """Reader's axis → writer's, where both indices are bare axes."""
    names: dict[str, str] = {}
    for written, read in zip(written_at, read_at, strict=True):
        if not isinstance(written, AxisRef) or not isinstance(read, AxisRef) or read.name in names:
            return None
        names[read.name] = written.name
    return names


def _shared_axes(draft: _Draft, statement: TensorExpr) -> dict[str, str] | None:
    """Statement's axis → draft's outer axis, covering all of the outer axes; None where they do not line up.

    What the draft wrote may only be read at the very outer point that wrote it.
    """
    writers = {s.output: s for s in draft.statements}
    names: dict[str, str] | None = None
    for load in statement.reads:
        if load.tensor in writers:
            found = _identity(writers[load.tensor], load, statement, draft)
            if found is None or (names is not None and found != names):
                return None
            names = found
    if names is None:
        names = _parallel(draft, statement)
    return names


def _identity(writer: TensorExpr, load: Load, reader: TensorExpr, draft: _Draft) -> dict[str, str] | None:
    """How the reader's axes stand for the outer ones if it reads exactly what its own outer point wrote."""
    if len(writer.spatial) != len(draft.outer):
        return None  # the writer maps over inner axes: it is a tensor in memory, not a value of the row
    spatial = {a.name: a.extent for a in reader.spatial}
    names: dict[str, str] = {}
    for written_at, read_at in zip(writer.index, load.index, strict=True):
        match written_at, read_at:
            case AxisRef(name=outer), AxisRef(name=mine) if mine not in names and mine in spatial:
                if spatial[mine] != writer.extents[outer]:
                    return None
                names[mine] = outer
            case Const(), Const(value=0):
                continue
            case Const(), AxisRef(name=mine) if spatial.get(mine) == 1:
                continue
            case AxisRef(name=outer), Const(value=0) if writer.extents[outer] == 1:
                return None  # an axis of one point that the reader lacks: rare, and a kernel of its own is right
            case _:
                return None
    return names if len(names) == len(draft.outer) else None


def _parallel(draft: _Draft, statement: TensorExpr) -> dict[str, str] | None:
    """A second reduction over the same rows of the same tensor: nothing is passed on, but one pass reads for both."""
    first = draft.statements[0]
    if draft.contraction is not None or statement.kind is not StatementKind.REDUCE or not first.reduced:
        return None
    if not set(statement.reads_tensors) & set(first.reads_tensors):
        return None
    mine, theirs = statement.spatial, draft.outer
    if [a.extent for a in mine] != [a.extent for a in theirs]:
        return None
    if [a.extent for a in statement.reduced] != [a.extent for a in first.reduced]:
        return None
    return {a.name: b.name for a, b in zip(mine, theirs, strict=True)}


def _renamed(statement: TensorExpr, names: Mapping[str, str], draft: _Draft) -> TensorExpr:
    """The statement with outer axes called as the draft calls them and no inner axis called like another axis."""
    used = {a.name: a.extent for s in draft.statements for a in s.axes}
    outer = {a.name for a in draft.outer}
    new_names = dict(names)
    taken = set(names.values()) | outer
    for axis in statement.axes:
        if axis.name in names:
            continue
        name = axis.name
        while name in taken or used.get(name, axis.extent) != axis.extent:
            name += "_"
        taken.add(name)
        new_names[axis.name] = name
    refs: dict[str, Expr] = {old: AxisRef(new) for old, new in new_names.items() if old != new}
    order = {a.name: i for i, a in enumerate(draft.outer)}
    axes = [Axis(new_names[a.name], a.extent, a.kind) for a in statement.axes]
    axes.sort(key=lambda a: (a.kind is AxisKind.REDUCE, order.get(a.name, len(order))))
    return replace(
        statement, axes=tuple(axes), index=tuple(substitute(i, refs) for i in statement.index),
        body=substitute(statement.body, refs),
    )  # fmt: skip


def _group(draft: _Draft, name: str, types: Mapping[str, TensorType], wanted: set[str], hw: Traits) -> KernelGroup:
    locals_ = frozenset(draft.written - wanted)
    if draft.attention is not None and draft.contraction is not None:
        return attention_group(name, draft.statements, (draft.contraction, draft.attention), types, locals_)
    touched = {t for s in draft.statements for t in (*s.reads_tensors, s.output)}
    fused = fuse_axes(draft.statements, {t: types[t] for t in touched})
    if not hw.is_cpu:
        fused = flat_rows(fused)
    statements = fused.statements
    outer = statements[0].spatial
    stored = tuple((s.output, fused.types[s.output]) for s in statements if s.output not in locals_)
    inputs = tuple(sorted((t, ty) for t, ty in fused.types.items() if t not in draft.written))
    views = {t: ty for t, ty in fused.types.items() if t not in locals_}
    contraction = as_contraction(statements[0]) if draft.contraction is not None else None
    if contraction is not None:
        second = as_contraction(statements[1]) if draft.sums > 1 else None
        kind, space = GroupKind.CONTRACTION, contraction_space(statements, contraction, views, second)
        factors = ContractionOperands(contraction.a, contraction.b, None if second is None else second.b)
    else:
        scatter = statements[0].kind is StatementKind.SCATTER
        kind, factors = GroupKind.SCATTER if scatter else GroupKind.NEST, None
        space = nest_space(statements, outer, views)
    return KernelGroup(name, kind, statements, outer, locals_, stored, inputs, space, factors)
