"""Partition: TensorProgram → kernel groups, in order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from roller_svc.analysis.columns import share_lines
from roller_svc.analysis.online_reduction import OnlineReductionKind, joint_reductions, online_reductions
from roller_svc.analysis.operand import value_dtype
from roller_svc.analysis.scans import match_scan
from roller_svc.analysis.sum_of_products import is_window, without_restated_guards
from roller_svc.errors import InvariantError
from roller_svc.fusion.attention import AttentionMatch, match_attentions
from roller_svc.fusion.attention_group import attention_group
from roller_svc.fusion.axis_fusion import flatten_rows, fuse_axes
from roller_svc.fusion.chained_products import match_chains
from roller_svc.fusion.col2im import insert_col2im
from roller_svc.fusion.columns import flatten_columns
from roller_svc.fusion.contraction import Contraction, as_contraction, as_scaled_contraction
from roller_svc.fusion.delinearize import delinearize_reduced_axes
from roller_svc.fusion.dual_gemm import match_dual_gemms
from roller_svc.fusion.equal_statements import merge_equal_statements
from roller_svc.fusion.few_bits import state_bytes
from roller_svc.fusion.grouped_axes import split_grouped_axes, split_reshaped_axes
from roller_svc.fusion.grouped_gemm import group_rows
from roller_svc.fusion.inline import drop_unit_axes, inline_elementwise, is_expensive
from roller_svc.fusion.linear_sums import split_linear_sums
from roller_svc.fusion.operand_copies import OperandCopy, insert_operand_copies
from roller_svc.fusion.ordered_scatter import order_scatters
from roller_svc.fusion.row_normalization import hoist_row_divisions
from roller_svc.fusion.scaled_sums import merge_scaled_sums
from roller_svc.fusion.space import contraction_space, nest_space, scan_space
from roller_svc.fusion.split.online_reduction import splits_evenly
from roller_svc.ir.affine import affine
from roller_svc.ir.attention import Attention
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Const, Expr, Load, axes_of, loads_of, substitute
from roller_svc.ir.group import ContractionOperands, GroupKind, KernelGroup
from roller_svc.ir.program import Axis, AxisKind, StatementKind, TensorExpr, TensorProgram, TensorType

# A contraction with fewer rows or columns is memory-bound: tiles do not pay.
MIN_TILED_ROWS = 8
# Fewer long rows than this times the cores are split over the device, one statement at a time.
ROWS_PER_CORE = 1
LONG_ROW = 1 << 16
NARROW_BITS = 16  # operand types that every matrix unit supports


@dataclass(frozen=True, slots=True)
class _FusionGroup:
    """A group in progress. Shared axes have the first statement's names."""

    statements: tuple[TensorExpr, ...]
    contraction: Contraction | None
    attention: Attention | None = None
    num_accumulators: int = 1
    is_scan: bool = False

    @property
    def outer(self) -> tuple[Axis, ...]:
        return self.statements[0].spatial

    @property
    def written(self) -> frozenset[str]:
        return frozenset(s.output for s in self.statements)

    @property
    def rows(self) -> frozenset[str]:
        """Return the tensors of rows that attention stores."""
        return _attention_rows(self.attention)

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(t for s in self.statements for t in s.reads_tensors) | _attention_reads(self.attention)


_Pending = tuple[TensorExpr, frozenset[str]]  # a statement that has no group yet, and what it reads


@dataclass(frozen=True, slots=True)
class FusionOptions:
    """Properties of a device, and choices, that partitioning depends on."""

    is_cpu: bool
    has_matrix_unit: bool
    num_cores: int
    attention_dtypes: frozenset[DType] = frozenset()  # operand types of fused attention
    fuse_dual_gemm: bool = False  # two contractions over one A become one kernel
    operand_copies: frozenset[OperandCopy] = frozenset()  # operands that are written to memory before a contraction
    inline_outputs: bool = False  # readers of an output that a reduction reads compute it again
    col2im: bool = False  # transposed convolutions become GEMMs whose products are added
    group_rows: bool = False  # products of rows with matrices that data selects become grouped GEMMs
    scale_partial_sums: bool = False  # kernels of contractions scale sums of blocks of k in registers
    packed_constants: frozenset[str] = frozenset()  # whose products with few rows are contractions, too
    has_thin_nests: bool = False  # contractions of few rows or columns are nests on a CPU, too
    has_signed_bytes_only: bool = False  # matrix units take int8, but not uint8
    allow_expanded_squares: bool = False  # of differences, whose sums then have an error relative to their terms
    separate_sums: bool = False  # a nest has one reduction, so that its matrix may stream

    @property
    def without_fusion(self) -> FusionOptions:
        """Return the options of a single statement, which nothing is fused with."""
        return replace(self, has_matrix_unit=False, num_cores=1, attention_dtypes=frozenset(), fuse_dual_gemm=False)

    @property
    def with_dual_gemm(self) -> FusionOptions:
        """Return the options with dual GEMM."""
        return replace(self, fuse_dual_gemm=self.has_matrix_unit)


def normalize_statements(program: TensorProgram, hw: FusionOptions) -> tuple[TensorExpr, ...]:
    """Return the statements after inlining, in the form that kernels of the target need, with operand copies."""
    program = merge_equal_statements(program)
    inlined = inline_elementwise(program, inline_outputs=hw.inline_outputs)
    statements = tuple(drop_unit_axes(s) for s in inlined)
    statements = split_linear_sums(
        statements,
        program.types,
        has_signed_bytes_only=hw.has_signed_bytes_only,
        allow_expanded_squares=hw.allow_expanded_squares,
    )
    if hw.scale_partial_sums if hw.is_cpu else hw.has_matrix_unit:
        statements = tuple(state_bytes(s, with_bytes=hw.is_cpu) for s in statements)
    if hw.scale_partial_sums:
        statements = merge_scaled_sums(statements, {o.tensor for o in program.outputs}, is_thin=hw.is_cpu)
    if hw.col2im:
        statements = insert_col2im(statements, stored_types(program), in_phases=hw.is_cpu)
    if hw.group_rows:
        outputs = {o.tensor for o in program.outputs}
        statements = group_rows(statements, stored_types(program), outputs, scale_sums=hw.scale_partial_sums)
    if hw.operand_copies:
        statements = insert_operand_copies(
            statements,
            hw.operand_copies,
            _all_types(program, statements),
            lambda s: as_contraction(s, is_thin=True) if hw.is_cpu else _contraction(s, hw),
        )
    if not hw.is_cpu:
        return order_scatters(statements)
    return hoist_row_divisions(tuple(delinearize_reduced_axes(s) for s in statements), {o.tensor for o in program.outputs})


def partition_statements(program: TensorProgram, statements: tuple[TensorExpr, ...], hw: FusionOptions) -> tuple[KernelGroup, ...]:
    """Partition normalized statements into kernel groups."""
    outputs = {o.tensor for o in program.outputs}
    types = _all_types(program, statements)
    if hw.is_cpu:
        grouped = split_grouped_axes(statements, types)
        statements, types = grouped.statements, grouped.types
    attention: Mapping[str, AttentionMatch] = {}
    if hw.attention_dtypes:
        statements, types, attention = _match_attentions(statements, types, outputs, hw)
        statements, chains = match_chains(statements, outputs, hw.attention_dtypes, attention)
        attention = {**attention, **chains}
    other_statements = tuple(s for s in statements if s.output not in attention)
    pairs = (
        match_dual_gemms(other_statements, lambda s: _contraction(s, hw)) if hw.fuse_dual_gemm and not hw.scale_partial_sums else {}
    )
    drafts = _fuse(statements, attention, pairs, types, hw)
    read_by = _readers(drafts)
    groups = tuple(_group(draft, f"kernel{i}", types, outputs | read_by[i], hw) for i, draft in enumerate(drafts))
    _check_stored(groups, program)
    return tuple(_with_constants(groups, program))


def finds_other_contractions(
    program: TensorProgram, statements: tuple[TensorExpr, ...], options: FusionOptions, plain: FusionOptions
) -> bool:
    """Return whether a CPU's options may find other contractions than plain ones, in normalized statements of both.

    Otherwise the partitions are equal, if the options differ in `packed_constants` and `has_thin_nests` alone.
    """
    if options.attention_dtypes:
        return True  # views of statements may be contractions
    statements = split_grouped_axes(statements, _all_types(program, statements)).statements
    return any(_contraction(statement, options) != _contraction(statement, plain) for statement in statements)


def _match_attentions(
    statements: tuple[TensorExpr, ...], types: dict[str, TensorType], outputs: Collection[str], hw: FusionOptions
) -> tuple[tuple[TensorExpr, ...], dict[str, TensorType], Mapping[str, AttentionMatch]]:
    """Match attention, also with views of scores and results where softmax has one axis for all heads."""
    matched, attention = match_attentions(statements, outputs, hw.attention_dtypes)
    views = split_reshaped_axes(statements, types)
    if views.statements != statements:
        viewed, found = match_attentions(views.statements, outputs, hw.attention_dtypes)
        if len(found) > len(attention):
            return viewed, views.types, found
    return matched, types, attention


def _check_stored(groups: Sequence[KernelGroup], program: TensorProgram) -> None:
    """Raise InvariantError if a group reads a tensor that is neither an input nor stored by a group."""
    stored = {name for group in groups for name, _ in group.stored} | {name for name, _ in program.inputs}
    for group in groups:
        if missing := sorted({name for name, _ in group.inputs} - stored):
            raise InvariantError(f"{group.name} reads {', '.join(missing)}, which no kernel stores")


def _with_constants(groups: Iterable[KernelGroup], program: TensorProgram) -> Iterator[KernelGroup]:
    """Mark the inputs of each group that are constant: the program's constants and what depends on them alone."""
    constants = set(program.constants)
    for group in groups:
        constant_inputs = frozenset(name for name, _ in group.inputs if name in constants)
        accesses = tuple(replace(a, constant=a.tensor in constant_inputs) for a in group.space.accesses)
        marked = replace(group, constants=constant_inputs, space=replace(group.space, accesses=accesses))
        if marked.is_constant(program.outputs):
            constants |= {name for name, _ in marked.stored}
            marked = replace(marked, runs_once=True)
        yield marked


def _all_types(program: TensorProgram, statements: Sequence[TensorExpr]) -> dict[str, TensorType]:
    """Return the type in memory of each tensor, with those that normalization adds: sums, and copies in their type."""
    added = {
        s.output: TensorType(s.type.dtype.compute, s.type.shape) if s.kind is StatementKind.REDUCE else s.type for s in statements
    }
    return added | stored_types(program)


def stored_types(program: TensorProgram) -> dict[str, TensorType]:
    """Return the type of each tensor in memory. Intermediates of narrow floats are float32."""
    exact = {name for name, _ in program.inputs} | {o.tensor for o in program.outputs}
    return {name: type_ if name in exact else TensorType(type_.dtype.compute, type_.shape) for name, type_ in program.types.items()}


def _fuse(
    statements: tuple[TensorExpr, ...],
    attention: Mapping[str, AttentionMatch],
    pairs: Mapping[str, TensorExpr],
    types: Mapping[str, TensorType],
    hw: FusionOptions,
) -> list[_FusionGroup]:
    drafts: list[_FusionGroup] = []
    pending = [(statement, _reads(statement, attention.get(statement.output))) for statement in statements]
    done: set[str] = set()  # written by earlier groups
    written = {s.output for s in statements} | {t for found in attention.values() for t in _attention_rows(found.attention)}
    while pending:
        first, _ = _first_to_place(pending, written - done, attention, hw)
        others_pending = [each for each in pending if each[0] is not first]
        found = attention.get(first.output)
        if found is not None:
            draft = _FusionGroup((first,), found.contraction, found.attention)
        elif match_scan(first) is not None:
            draft = _FusionGroup((first,), None, is_scan=True)
        else:
            draft = _with_second_gemm(_FusionGroup((first,), _contraction(first, hw)), pairs.get(first.output), written - done)
        remaining: list[_Pending] = []
        for statement, reads in others_pending:
            if statement.output in draft.written:
                continue
            available = all(t not in written or t in done or t in draft.written for t in reads)
            others = _read_by_others(others_pending, statement, draft) if available else set()
            is_attention = statement.output in attention
            grown = _try_fuse(draft, statement, types, hw, others) if available and not is_attention else None
            if grown is None:
                remaining.append((statement, reads))
            else:
                draft = grown
        drafts.append(draft)
        done |= draft.written | draft.rows
        pending = remaining
    return drafts


def _read_by_others(pending: Iterable[_Pending], statement: TensorExpr, draft: _FusionGroup) -> set[str]:
    """Return the tensors that statements outside of a group with `statement` read."""
    return {t for s, names in pending if s is not statement and s.output not in draft.written for t in names}


def _first_to_place(
    pending: Sequence[_Pending], not_yet_written: Set[str], attention: Mapping[str, AttentionMatch], hw: FusionOptions
) -> _Pending:
    """Return the statement of the next group: the first one, unless it is a contraction whose readers wait for others.

    A contraction comes after the sums and maps that its readers need, so that its epilogue computes these readers.
    """
    first = pending[0]
    if first[0].output in attention or _contraction(first[0], hw) is None:
        return first
    dependent, needed = {first[0].output}, set[str]()
    for statement, reads in pending[1:]:
        if not dependent.isdisjoint(reads):
            dependent.add(statement.output)
            needed |= reads
    for statement, reads in reversed(pending):
        if statement.output in needed:
            needed |= reads
    for each in pending[1:]:
        statement, reads = each
        is_needed = statement.output in needed - dependent and not_yet_written.isdisjoint(reads)
        if is_needed and statement.output not in attention and _contraction(statement, hw) is None:
            return each
    return first


def _with_second_gemm(draft: _FusionGroup, second: TensorExpr | None, not_yet_written: Set[str]) -> _FusionGroup:
    """Add the second contraction of a dual GEMM if it reads no tensor that is written later."""
    if second is None or not not_yet_written.isdisjoint(second.reads_tensors):
        return draft
    return replace(draft, statements=(*draft.statements, second), num_accumulators=2)


def _reads(statement: TensorExpr, found: AttentionMatch | None) -> frozenset[str]:
    """Return the tensors that the statement, or all of attention, reads."""
    return frozenset(statement.reads_tensors) if found is None else _attention_reads(found.attention)


def _attention_reads(attention: Attention | None) -> frozenset[str]:
    return frozenset() if attention is None else attention.reads


def _attention_rows(attention: Attention | None) -> frozenset[str]:
    return frozenset() if attention is None else frozenset(s.output for s in attention.rows.stored)


def _contraction(statement: TensorExpr, hw: FusionOptions) -> Contraction | None:
    """Return the contraction of a statement that gets tiles of its own.

    On a GPU a skinny GEMM is a row reduction, unless its rows are windows.
    """
    contraction = as_scaled_contraction(statement) if hw.scale_partial_sums else None
    contraction = contraction or as_contraction(statement)
    if contraction is None and hw.packed_constants:
        return _packed_product(statement, hw)
    if contraction is None or (hw.is_cpu and not hw.has_thin_nests):
        return contraction
    is_skinny = min(math.prod(a.extent for a in axes) for axes in (contraction.m, contraction.n)) < MIN_TILED_ROWS
    if hw.is_cpu:
        return None if is_skinny else contraction
    reduced = {a.name for a in contraction.k}
    is_windowed = any(is_window(index, reduced) for load in statement.reads for index in load.index)
    return None if is_skinny and not is_windowed else contraction


def _packed_product(statement: TensorExpr, hw: FusionOptions) -> Contraction | None:
    """Return a product of few rows with a constant matrix as a contraction, whose B is packed once; None for others.

    Packed columns arrive in one stream, and sums stay in registers.
    """
    contraction = as_scaled_contraction(statement, is_thin=True) if hw.scale_partial_sums else None
    contraction = contraction or as_contraction(statement, is_thin=True)
    if contraction is None or contraction.batch or math.prod(a.extent for a in contraction.n) < MIN_TILED_ROWS:
        return None
    if not {load.tensor for load in loads_of(contraction.b)} <= hw.packed_constants:
        return None
    return replace(contraction, m=contraction.m or (Axis(f"{statement.output}.row", 1, AxisKind.SPATIAL),))


def _readers(drafts: list[_FusionGroup]) -> list[set[str]]:
    """Return for each group the tensors that other groups read."""
    return [{t for other in drafts if other is not draft for t in other.reads} & draft.written for draft in drafts]


def _try_fuse(
    draft: _FusionGroup, statement: TensorExpr, types: Mapping[str, TensorType], hw: FusionOptions, read_later: set[str]
) -> _FusionGroup | None:
    """Return the group with the statement, or None if they cannot share a loop nest or it does not pay.

    `read_later` are tensors that later statements read.
    """
    if statement.kind is StatementKind.SCATTER:
        return None if draft.contraction is None else _with_scattered_rows(draft, draft.contraction, statement, types, read_later)
    if draft.statements[0].kind is StatementKind.SCATTER:
        return None
    if draft.is_scan or match_scan(statement) is not None:
        return _with_map_of_scan(draft, statement, types)
    if draft.contraction is not None and statement.kind is StatementKind.REDUCE:
        must_stay_separate = draft.attention is not None or bool(draft.written & read_later)
        return None if must_stay_separate else _with_row_reduction(draft, draft.contraction, statement, hw)
    names = _shared_axes(draft, statement, types)
    if names is None and hw.inline_outputs:
        names = _same_row_axes(draft, statement)
    if names is None:
        return None
    inner = [a for a in statement.axes if a.name not in names]
    if not _fits_nest(draft, statement, inner, hw):
        return None
    candidate = replace(draft, statements=(*draft.statements, _renamed(statement, names, draft)))
    rows = math.prod(a.extent for a in draft.outer)
    has_long_rows = inner and max(s.points // rows for s in candidate.statements) >= LONG_ROW
    fills_cores = rows >= ROWS_PER_CORE * hw.num_cores
    return candidate if not has_long_rows or fills_cores or _shares_pass(candidate, hw) else None


def _with_map_of_scan(draft: _FusionGroup, statement: TensorExpr, types: Mapping[str, TensorType]) -> _FusionGroup | None:
    """Return a scan with a map of its results over the same points; None for other statements."""
    names = _shared_axes(draft, statement, types) if draft.is_scan and statement.kind is StatementKind.MAP else None
    if names is None or len(names) != len(statement.axes):
        return None
    return replace(draft, statements=(*draft.statements, _renamed(statement, names, draft)))


def _fits_nest(draft: _FusionGroup, statement: TensorExpr, inner: Sequence[Axis], hw: FusionOptions) -> bool:
    """Return whether the group's kernel can, and should, compute a statement with these axes inside its outer ones."""
    if draft.contraction is not None:
        return statement.kind is StatementKind.MAP and not inner
    if _contraction(statement, hw) is not None:
        return False
    if statement.kind is StatementKind.REDUCE:
        if hw.separate_sums and any(each.kind is StatementKind.REDUCE for each in draft.statements):
            return False
        # a row of results for each point needs a nest of its own
        return all(a.kind is AxisKind.REDUCE for a in inner)
    # a nest of its own computes one value for each row in vectors
    return not (inner and hw.is_cpu and _computes_one_value_per_row(draft))


def _computes_one_value_per_row(draft: _FusionGroup) -> bool:
    """Return whether the group has maps alone, of which one computes an expensive value for each outer point."""
    return all(s.kind is StatementKind.MAP for s in draft.statements) and any(
        is_expensive(s.body) for s in draft.statements if len(s.axes) == len(draft.outer)
    )


def _shares_pass(draft: _FusionGroup, hw: FusionOptions) -> bool:
    """Return whether the last statement shares its pass over a row with another, and both can be split."""
    last = draft.statements[-1]
    if not hw.is_cpu and any(last in joint for joint in joint_reductions(draft.statements)):
        return True
    return splits_evenly(last) and any(
        joint.second is last and (not hw.is_cpu or joint.kind is OnlineReductionKind.ARG)
        for joint in online_reductions(draft.statements)
    )


def _with_row_reduction(
    draft: _FusionGroup, contraction: Contraction, statement: TensorExpr, hw: FusionOptions
) -> _FusionGroup | None:
    """Fuse a reduction over all of n into a contraction, whose epilogue on matrix units computes it.

    If something else reads the results they are stored anyway, and one nest that reads them once is as good.
    """
    types = (value_dtype(contraction.a), value_dtype(contraction.b))
    on_matrix_unit = hw.has_matrix_unit and all(t is None or t.bits <= NARROW_BITS for t in types)
    if not on_matrix_unit or any(s.kind is StatementKind.REDUCE for s in draft.statements[1:]):
        return None
    names: dict[str, str] = {}
    for load in statement.reads:
        if load.tensor in draft.written:
            writer = next(s for s in draft.statements if s.output == load.tensor)
            axes = _renaming(writer.index, load.index)
            if axes is None or (names and axes != names):
                return None
            names = axes
    extents = {a.name: a.extent for a in draft.outer}
    if set(names.values()) != extents.keys() or any(
        names.get(a.name) is None or extents[names[a.name]] != a.extent for a in statement.axes
    ):
        return None
    if {names[a.name] for a in statement.reduced} != {a.name for a in contraction.n}:
        return None
    return _FusionGroup((*draft.statements, _renamed(statement, names, draft)), contraction)


def _with_scattered_rows(
    draft: _FusionGroup, contraction: Contraction, statement: TensorExpr, types: Mapping[str, TensorType], read_later: set[str]
) -> _FusionGroup | None:
    """Fuse a scatter of whole rows of a contraction, which writes all elements of its result and has no other reader."""
    writes_all = statement.writes_once and statement.in_place and statement.target is None
    if not writes_all or draft.attention is not None or len(draft.statements) > 1 or not draft.written.isdisjoint(read_later):
        return None
    names = _shared_axes(draft, statement, types)
    if names is None or any(own != outer for own, outer in names.items()) or len(names) != len(statement.axes):
        return None
    columns = {axis.name for axis in contraction.n}
    where = frozenset[str]() if statement.predicate is None else axes_of(statement.predicate)
    moved = frozenset[str]().union(*(axes_of(index) for index in statement.index if not isinstance(index, AxisRef)))
    return replace(draft, statements=(*draft.statements, statement)) if columns.isdisjoint(where | moved) else None


def _renaming(written_at: tuple[Expr, ...], read_at: tuple[Expr, ...]) -> dict[str, str] | None:
    """Return {reader's axis: writer's axis}, or None if an index is not a plain axis."""
    names: dict[str, str] = {}
    for written, read in zip(written_at, read_at, strict=True):
        if not isinstance(written, AxisRef) or not isinstance(read, AxisRef) or read.name in names:
            return None
        names[read.name] = written.name
    return names


def _shared_axes(draft: _FusionGroup, statement: TensorExpr, types: Mapping[str, TensorType]) -> dict[str, str] | None:
    """Return {statement's axis: group's outer axis} for all outer axes, or None if they do not correspond.

    A tensor that the group writes may only be read at the outer point that writes it.
    """
    writers = {s.output: s for s in draft.statements}
    names: dict[str, str] | None = None
    for load in statement.reads:
        if load.tensor in writers:
            found = _same_point_axes(writers[load.tensor], load, statement, draft)
            if found is None or (names is not None and found != names):
                return None
            names = found
    if names is None:
        names = _same_pass_axes(draft, statement, types)
    return names


def _same_point_axes(writer: TensorExpr, load: Load, reader: TensorExpr, draft: _FusionGroup) -> dict[str, str] | None:
    """Return {reader's axis: outer axis} if it reads only values of its own outer point, else None."""
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
                return None  # the reader lacks an axis of extent 1: rare, and separate kernels are right
            case _:
                return None
    return names if len(names) == len(draft.outer) else None


def _same_pass_axes(draft: _FusionGroup, statement: TensorExpr, types: Mapping[str, TensorType]) -> dict[str, str] | None:
    """Return the axes of a second reduction, or map, over the same memory lines, so that one pass serves both."""
    first = draft.statements[0]
    if draft.contraction is not None or statement.kind is not first.kind:
        return None
    if not set(statement.reads_tensors) & set(first.reads_tensors):
        return None
    own, theirs = statement.spatial, draft.outer
    if [a.extent for a in own] != [a.extent for a in theirs]:
        return None
    if [a.extent for a in statement.reduced] != [a.extent for a in first.reduced]:
        return None
    names = {a.name: b.name for a, b in zip(own, theirs, strict=True)}
    reduced = {a.name: b.name for a, b in zip(statement.reduced, first.reduced, strict=True)}
    return names if _reads_same_lines(draft, statement, names | reduced, types) else None


def _same_row_axes(draft: _FusionGroup, statement: TensorExpr) -> dict[str, str] | None:
    """Return {map's axis: outer axis} of a map over the elements that the group's first reduction reads.

    None of a map that reads what the group writes: only `_shared_axes` knows whether it may.
    """
    first = draft.statements[0]
    if draft.contraction is not None or statement.kind is not StatementKind.MAP:
        return None
    if first.kind is not StatementKind.REDUCE or not draft.written.isdisjoint(statement.reads_tensors):
        return None
    own, theirs = {a.name: a.extent for a in statement.axes}, {a.name: a.extent for a in first.axes}
    for load, read in itertools.product(statement.reads, first.reads):
        if load.tensor != read.tensor:
            continue
        names = {
            mine.name: axis.name
            for mine, axis in zip(load.index, read.index, strict=True)
            if isinstance(mine, AxisRef) and isinstance(axis, AxisRef)
        }
        extents = {name: theirs.get(axis) for name, axis in names.items()}
        if len(names) == len(load.index) and extents == own and set(names.values()) == theirs.keys():
            outer = {a.name for a in draft.outer}
            return {mine: axis for mine, axis in names.items() if axis in outer}
    return None


def _reads_same_lines(
    draft: _FusionGroup, statement: TensorExpr, names: Mapping[str, str], types: Mapping[str, TensorType]
) -> bool:
    """Return whether two maps or reductions load from the same lines; maps, in the order of their axes."""
    refs: dict[str, Expr] = {own: AxisRef(outer) for own, outer in names.items()}
    order = [a.name for a in draft.outer] if statement.kind is StatementKind.MAP else None
    own = [replace(load, index=tuple(substitute(i, refs) for i in load.index)) for load in statement.reads]
    return any(
        share_lines(first, second, types[first.tensor].shape) and (order is None or _follows(first, order))
        for first, second in itertools.product(draft.statements[0].reads, own)
        if first.tensor == second.tensor
    )


def _follows(load: Load, order: Sequence[str]) -> bool:
    """Return whether the indices are steps along axes of their own, in this order, the last axis included."""
    forms = [form for form in map(affine, load.index) if form is None or form.coeffs]
    steps = [form.coeffs[0] if form is not None and len(form.coeffs) == 1 else ("", 0) for form in forms]
    places = [order.index(name) if name in order and c > 0 else -1 for name, c in steps]
    return -1 not in places and places == sorted(set(places)) and places[-1:] == [len(order) - 1]


def _renamed(statement: TensorExpr, names: Mapping[str, str], draft: _FusionGroup) -> TensorExpr:
    """Rename outer axes to those of the group, and inner axes so that equal names have equal extents."""
    used = {a.name: a.extent for s in draft.statements for a in s.axes}
    outer = {a.name for a in draft.outer}
    new_names = dict(names)
    used_names = set(names.values()) | outer
    for axis in statement.axes:
        if axis.name in names:
            continue
        name = axis.name
        while name in used_names or used.get(name, axis.extent) != axis.extent:
            name += "_"
        used_names.add(name)
        new_names[axis.name] = name
    refs: dict[str, Expr] = {old: AxisRef(new) for old, new in new_names.items() if old != new}
    order = {a.name: i for i, a in enumerate(draft.outer)}
    axes = [Axis(new_names[a.name], a.extent, a.kind) for a in statement.axes]
    axes.sort(key=lambda a: (a.kind is AxisKind.REDUCE, order.get(a.name, len(order))))
    return replace(
        statement,
        axes=tuple(axes),
        index=tuple(substitute(i, refs) for i in statement.index),
        body=substitute(statement.body, refs),
    )


def _group(draft: _FusionGroup, name: str, types: Mapping[str, TensorType], needed: set[str], hw: FusionOptions) -> KernelGroup:
    locals_ = frozenset(draft.written - needed)
    if draft.attention is not None and draft.contraction is not None:
        return attention_group(name, draft.statements, (draft.contraction, draft.attention), types, locals_)
    tensors = {t for s in draft.statements for t in (*s.reads_tensors, s.output)}
    fused = fuse_axes(draft.statements, {t: types[t] for t in tensors})
    if not hw.is_cpu:
        fused = flatten_columns(flatten_rows(fused))
    statements = fused.statements
    outer = statements[0].spatial
    stored = tuple((s.output, fused.types[s.output]) for s in statements if s.output not in locals_)
    inputs = tuple(sorted((t, ty) for t, ty in fused.types.items() if t not in draft.written))
    views = {t: ty for t, ty in fused.types.items() if t not in locals_}
    if (scan := match_scan(statements[0])) is not None:
        rows = tuple(a for a in outer if a.name != scan.axis.name)
        return KernelGroup(name, GroupKind.SCAN, statements, rows, locals_, stored, inputs, scan_space(scan, statements, views))
    contraction = None
    if draft.contraction is not None:
        contraction = as_scaled_contraction(statements[0]) if draft.contraction.scales else None
        contraction = contraction or as_contraction(statements[0]) or _packed_product(statements[0], hw)
    if contraction is not None:
        second = as_contraction(statements[1]) if draft.num_accumulators > 1 else None
        kind, space = GroupKind.CONTRACTION, contraction_space(statements, contraction, views, second)
        operands = ContractionOperands(contraction.a, contraction.b, None if second is None else second.b, contraction.scales)
    else:
        statements = tuple(without_restated_guards(statement) for statement in statements)
        scatter = statements[0].kind is StatementKind.SCATTER
        kind, operands = GroupKind.SCATTER if scatter else GroupKind.NEST, None
        space = nest_space(statements, outer, views)
    return KernelGroup(name, kind, statements, outer, locals_, stored, inputs, space, operands)
