"""Reduction group and its rProgram → schedule tree for a GPU: lanes share rows, rows are read once if they fit.

On the inner axis, a thread's tile is one vector access, and the block's tile is what all lanes have in flight. If that
is the whole row, values that several statements read stay in registers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from roller_svc.analysis.linear import is_uniform
from roller_svc.analysis.online_reduction import (
    OnlineReduction,
    OnlineReductionKind,
    joint_reductions,
    online_reductions,
)
from roller_svc.analysis.shared_values import replace_all, shared_values
from roller_svc.analysis.unconditional import unconditional_loads
from roller_svc.errors import require
from roller_svc.families.common.gpu.launch_bounds import REGISTER_MARGIN, min_resident_blocks
from roller_svc.families.common.gpu.packed_rows import unpacks_pairs
from roller_svc.families.common.gpu.row_space import RowSpace
from roller_svc.families.gpu.reduction import REDUCTION
from roller_svc.families.gpu.reduction.block_reduce import reduce_lanes, reduction_buffers
from roller_svc.families.gpu.reduction.online_reduction import OnlinePass
from roller_svc.families.gpu.reduction.packed_chunks import PackedChunks, packed_chunks
from roller_svc.families.gpu.reduction.staged_operands import StagedOperands
from roller_svc.families.gpu.reduction.thread_mapping import (
    CHUNK,
    LANE,
    POINT,
    ROUND,
    VECTOR_ELEMENT,
    RowPart,
    RowTiling,
    ThreadRows,
    index_map,
    peeled_row,
    row_tiling,
    thread_rows,
)
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import (
    Const,
    Expr,
    Load,
    Op,
    OpKind,
    Select,
    axes_of,
    children,
    loads_of,
    rewrite,
    substitute,
)
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.index import add, eq, num, ref
from roller_svc.ir.program import Combine, TensorExpr, identity
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Branch, Compute, Loop, LoopKind, Node, ScheduleTree, Scope, Storage
from roller_svc.perf.workload import Workload
from roller_svc.schedule.nest_statements import (
    acc_name,
    convert_to_type,
    is_reduction,
    local_name,
    register,
    row_dtype,
    row_tensors,
    wrap_in_storages,
)


def lower(group: KernelGroup, program: RProgram, workload: Workload[RowSpace | None]) -> tuple[ScheduleTree, ...]:
    """Return one tree: for each statement, lanes reduce their parts of a row and combine them."""
    hw = workload.machine.hw
    rows = thread_rows(group, program, hw.limits.warp_size)
    peeled = peeled_row(rows)
    tilings = {s.output: row_tiling(s, group.outer, program, peeled) for s in group.statements}
    staged = StagedOperands.of(group, rows, tilings) if peeled is not None else StagedOperands()
    is_shared = _is_shared(workload, program)
    cached = _cached_values(group, rows, tilings, staged, is_shared=is_shared)
    reduction = _Reduction(group, rows, tilings, row_tensors(group), cached, staged, is_shared)
    reduction = reduction.with_online_passes().with_packed_chunks(hw)
    nodes = rows.for_each_serial_row(reduction.nodes(), has_barrier=reduction.reuses_one_buffer)
    nodes = nodes if peeled is None else peeled.bind(staged.wrap(nodes, rows, has_barrier=reduction.reads_staged_later))
    # rows in shared memory leave no register live through a loop
    margin = 1.0 if reduction.caches_in_shared or rows.serial_axes else REGISTER_MARGIN
    return (
        ScheduleTree(
            group.name,
            rows.thread_loops(nodes),
            resident=min_resident_blocks(REDUCTION.model(workload), program, margin),
        ),
    )


def _is_shared(workload: Workload[RowSpace | None], program: RProgram) -> bool:
    """Return whether rows that several statements read are stored in shared memory."""
    rows = workload.facts
    if rows is None:
        return False
    block, thread = workload.footprint.tile(program.block), workload.footprint.tile(program.thread)
    iteration = rows.row_iteration(block, thread, program.reduce_threads, program.split_k)
    return rows.is_shared(iteration, program.threads, workload.machine.hw.limits)


@dataclass(frozen=True, slots=True)
class _Cached:
    """A load of a part of a row, or a value of several, that stays in registers or shared memory."""

    name: str
    tiling: RowTiling


def _cached_values(
    group: KernelGroup,
    rows: ThreadRows,
    tilings: dict[str, RowTiling | None],
    staged: StagedOperands,
    *,
    is_shared: bool,
) -> dict[Expr, _Cached]:
    """Return names for what several statements read of a whole row in flight, and for loads of its edges.

    In registers these are values that statements compute from several loads, and other loads. Edges are loaded before
    the vectors, so that their latency is hidden.
    """
    tiled = [(s, tiling) for s in group.statements if (tiling := tilings[s.output]) is not None]
    if not all(tiling.tile_shape == tiled[0][1].tile_shape for _, tiling in tiled):
        return {}
    row_values = row_tensors(group)
    elements = {element.name for element in rows.elements}

    def moves(load: Load) -> bool:
        used = axes_of(load)
        return (
            any(name.startswith(".k") for name in used)
            and elements <= used
            and not any(inner.tensor in row_values for inner in loads_of(load))
        )

    def may_share(load: Load) -> bool:
        return load in staged.buffers or moves(load)

    cached: dict[Expr, _Cached] = {}
    for number in range(len(tiled[0][1].parts) if tiled else 0):
        parts = [(s, tiling.parts[number]) for s, tiling in tiled]
        if not all(part.holds_row for _, part in parts):
            continue
        part = parts[0][1]
        bodies = [index_map(s, rows, p, rows.read_at).apply(s.body) for s, p in parts]
        values = () if is_shared and part.part is not RowPart.EDGES else shared_values(bodies, may_share)
        counts: dict[Load, int] = {}
        for body in bodies:
            remaining = replace_all(body, dict.fromkeys(values, num(0)))
            for load in dict.fromkeys(unconditional_loads(remaining)):
                if moves(load) and load not in staged.buffers:
                    counts[load] = counts.get(load, 0) + 1
        least, kind = (1, "edge") if part.part is RowPart.EDGES else (2, "loaded")
        repeated: list[Expr] = [load for load, count in counts.items() if count >= least]
        for i, value in enumerate([*repeated, *values]):
            cached[value] = _Cached(f"{value.tensor if isinstance(value, Load) else 'value'}.{kind}{i}", part)
    return cached


@dataclass(frozen=True, slots=True)
class _Reduction:
    group: KernelGroup
    rows: ThreadRows
    tilings: dict[str, RowTiling | None]
    row_values: frozenset[str]  # tensors with one value for each row that later statements read
    cached: dict[Expr, _Cached]
    staged: StagedOperands
    is_shared: bool  # cached values but those of edges are in shared memory
    online_passes: tuple[OnlinePass, ...] = ()
    packed: Mapping[str, PackedChunks] = field(default_factory=dict[str, PackedChunks])  # by output

    @property
    def reuses_one_buffer(self) -> bool:
        """Return whether lanes write a row's only reduction buffer before all have read that of the row before."""
        return sum([bool(reduction_buffers(self.rows, s)) for s in self.group.statements if is_reduction(s)]) == 1

    @property
    def reads_staged_later(self) -> bool:
        """Return whether staged operands are read after the barrier of a reduction only, and by no reduction."""
        first = next((i for i, s in enumerate(self.group.statements) if is_reduction(s)), None)
        if first is None or not reduction_buffers(self.rows, self.group.statements[first]):
            return False
        bodies = [
            index_map(s, self.rows, tiling, self.rows.read_at).apply(s.body)
            for i, s in enumerate(self.group.statements)
            if (tiling := self.tilings[s.output]) is not None and (i <= first or is_reduction(s))
        ]
        early = {load for expr in (*bodies, *self.cached) for load in loads_of(expr)}
        return not early & self.staged.buffers.keys()

    @property
    def caches_in_shared(self) -> bool:
        return any(self._is_shared(cached.tiling) for cached in self.cached.values())

    def nodes(self) -> tuple[Node, ...]:
        """Return all statements in order, within the storages that pass values between them."""
        storages: list[Storage] = []
        nodes: list[Node] = []
        if self.cached:
            storages += [self._cache(value, cached) for value, cached in self.cached.items()]
            tiling = next(tiling for tiling in self.tilings.values() if tiling is not None)
            for part in reversed(tiling.parts):
                nodes += self._fill(part)
        for statement in self.group.statements:
            if is_reduction(statement):
                storages.append(register(acc_name(statement.output), statement.accumulator, *self.rows.shape))
                storages += self._vector_accumulators(statement)
                storages += [
                    s
                    for online_pass in self.online_passes
                    if online_pass.reduction.first is statement
                    for s in online_pass.storages()
                ]
                storages += reduction_buffers(self.rows, statement)
            if statement.output in self.row_values:
                storages.append(register(local_name(statement.output), row_dtype(statement), *self.rows.shape))
            if statement.output in self.inverted:
                storages.append(register(_inverse_name(statement.output), row_dtype(statement), *self.rows.shape))
            nodes += self._statement(statement, self.tilings[statement.output])
        return wrap_in_storages(storages, tuple(nodes))

    def _fill(self, part: RowTiling) -> tuple[Node, ...]:
        """Load the cached values of a part of the row."""
        fill = [
            Compute(cached.name, self._cache_index(part), self._load_staged(value))
            for value, cached in self.cached.items()
            if cached.tiling.part is part.part
        ]
        if not fill:
            return ()
        return part.for_each_chunk(lambda: tuple(node for compute in fill for node in self._over_vector(part, compute)))

    def _statement(self, statement: TensorExpr, tiling: RowTiling | None) -> list[Node]:
        if tiling is not None and not is_reduction(statement):
            return self._map(statement, tiling)
        nodes: list[Node] = []
        if tiling is not None:
            nodes += self._reduce(statement, tiling)
            value: Expr = Load(acc_name(statement.output), self.rows.elements, statement.accumulator)
        else:
            value = self._value(statement, None)
        value = convert_to_type(value, statement)
        if statement.output in self.row_values:
            row = Compute(local_name(statement.output), self.rows.elements, value)
            nodes += self.rows.for_each_row((row,), vector=False)
            if statement.output in self.inverted:
                nodes += self._invert(statement)
            value = Load(local_name(statement.output), self.rows.elements, statement.type.dtype)
        if statement.output not in self.group.register_tensors:
            stored = self.rows.for_each_row((Compute(statement.output, self._index(statement, None), value),), guarded=True)
            nodes += [Branch(eq(ref(LANE), num(0)), stored)] if self.rows.lanes > 1 else stored
        return nodes

    def _invert(self, statement: TensorExpr) -> tuple[Node, ...]:
        dtype = row_dtype(statement)
        row = Load(local_name(statement.output), self.rows.elements, dtype)
        inverse = Op(OpKind.RECIPROCAL, (row,), dtype)
        return self.rows.for_each_row((Compute(_inverse_name(statement.output), self.rows.elements, inverse),), vector=False)

    @property
    def inverted(self) -> frozenset[str]:
        """Return the sums by which later statements divide along the row: these multiply by the reciprocal.

        Both roundings are within the bound of a division (semantics/rounding.py), since a sum has an error, too. A
        division by a constant stays: a mean of equal elements is one of them.
        """
        sums = {s.output for s in self.group.statements if s.combine is Combine.SUM and s.type.dtype.is_float}
        along = [s.body for s in self.group.statements if self.tilings[s.output] is not None]
        return frozenset(
            divisor.tensor for body in along for divisor in _divisors(body) if divisor.tensor in sums & self.row_values
        )

    def _reduce(self, statement: TensorExpr, tiling: RowTiling) -> list[Node]:
        """Reduce a statement; each element of a vector has an accumulator, so that its elements are independent."""
        if passes := [p for p in self.online_passes if p.reduction.first is statement]:
            return [
                *(node for p in passes for node in self._online_pass(p)),
                *passes[0].start_primary(),
                *(node for p in passes for node in p.lane_primary()),
                *reduce_lanes(self.rows, statement),
            ]
        if passes := [p for p in self.online_passes if p.reduction.second is statement]:
            return [
                *passes[0].start_secondary(),
                *(node for p in passes for node in p.lane_secondary()),
                *reduce_lanes(self.rows, statement),
                *passes[0].merge_correction(),
            ]
        if (chunks := self.packed.get(statement.output)) is not None:
            return self._reduce_packed(chunks)
        joint = next((joint for joint in self._joint_reductions() if statement in joint), (statement,))
        accumulate: list[Node] = []
        if joint[0] is statement:
            for each in joint:
                accumulate += self._start(each, tiling)
            for part in tiling.parts:
                accumulate += self._accumulate(joint, part)
        return [*accumulate, *self._combine_vector(statement, tiling), *reduce_lanes(self.rows, statement)]

    def _joint_reductions(self) -> tuple[tuple[TensorExpr, ...], ...]:
        """Return reductions of rows that are computed in one loop, at the place of the first."""
        joint = joint_reductions(self.group.statements)
        return tuple([each for each in joint if not any(s.output in self.packed for s in each)])

    def _target(self, statement: TensorExpr, tiling: RowTiling) -> str:
        """Return the registers that accumulate a statement."""
        is_vector = self._has_vector_accumulators(tiling)
        return _vector_accumulator_name(statement) if is_vector else acc_name(statement.output)

    def _start(self, statement: TensorExpr, tiling: RowTiling) -> tuple[Node, ...]:
        is_vector = self._has_vector_accumulators(tiling)
        index = (*self.rows.elements, ref(VECTOR_ELEMENT)) if is_vector else self.rows.elements
        value = identity(statement.combine or Combine.SUM, statement.accumulator)
        start: tuple[Node, ...] = (Compute(self._target(statement, tiling), index, value),)
        if is_vector:
            start = (Loop(VECTOR_ELEMENT, tiling.vector_elems, LoopKind.UNROLL, start),)
        return self.rows.for_each_row(start, vector=False)

    def _combine_vector(self, statement: TensorExpr, tiling: RowTiling) -> tuple[Node, ...]:
        """Combine the accumulators of a vector's elements."""
        if not self._has_vector_accumulators(tiling):
            return ()
        rows, combine, acc = self.rows, statement.combine or Combine.SUM, acc_name(statement.output)
        target = self._target(statement, tiling)
        first = Compute(acc, rows.elements, Load(target, (*rows.elements, num(0)), statement.accumulator))
        after = Load(target, (*rows.elements, add(ref(VECTOR_ELEMENT), num(1))), statement.accumulator)
        remaining = Loop(VECTOR_ELEMENT, tiling.vector_elems - 1, LoopKind.UNROLL, (Compute(acc, rows.elements, after, combine),))
        return rows.for_each_row((first, remaining), vector=False)

    def _reduce_packed(self, chunks: PackedChunks) -> list[Node]:
        acc, zero = acc_name(chunks.statement.output), Const(0.0, DType.FLOAT32)
        start = self.rows.for_each_row((Compute(acc, self.rows.elements, zero),), vector=False)
        nodes = (*start, *chunks.tiling.for_each_chunk(chunks.accumulate), *chunks.redo())
        return [*wrap_in_storages(chunks.storages(), nodes), *reduce_lanes(self.rows, chunks.statement)]

    def with_packed_chunks(self, hw: HardwareSpec) -> _Reduction:
        """Return the reduction with sums whose packed weights are unpacked in pairs."""
        packed: dict[str, PackedChunks] = {}
        for statement in self.group.statements if unpacks_pairs(self.group, hw) else ():
            tiling = self.tilings[statement.output]
            if tiling is None or tiling.vector_elems == 1 or tiling.peeled is not None:
                continue
            apply = partial(self._expression, statement, tiling=tiling)
            chunks = packed_chunks(statement, self.rows, tiling, apply)
            if chunks is not None:
                packed[statement.output] = chunks
        return replace(self, packed=packed)

    def _accumulate(self, statements: tuple[TensorExpr, ...], part: RowTiling) -> tuple[Node, ...]:
        """Accumulate a part of the row for all statements; of several accumulators, single elements take the first."""
        accumulated: dict[Expr | None, list[Node]] = {}  # by guard
        for statement in statements:
            place: tuple[Expr, ...] = ()
            whole = self.tilings[statement.output]
            if self._has_vector_accumulators(whole):
                place = (num(0) if part.part is RowPart.EDGES else ref(VECTOR_ELEMENT),)
            guard, body = self._hoist_guard(statement, self._value(statement, part), part)
            target = self._target(statement, require(whole, "tiling of a reduction"))
            node = Compute(target, (*self.rows.elements, *place), body, statement.combine or Combine.SUM)
            accumulated.setdefault(guard, []).append(node)
        return part.for_each_chunk(
            lambda: tuple([node for guard, nodes in accumulated.items() for node in self._over_vector(part, *nodes, cond=guard)])
        )

    def _online_pass(self, online_pass: OnlinePass) -> tuple[Node, ...]:
        tiling = online_pass.tiling

        def update() -> tuple[Node, ...]:
            if online_pass.is_blockwise:
                return online_pass.update_vector()
            return (*online_pass.begin_chunk(), *self._over_vector(tiling, *online_pass.update()))

        chunks = tiling.for_each_chunk(update)
        return (*online_pass.start(), *chunks)

    def with_online_passes(self) -> _Reduction:
        """Return the reduction with online passes for pairs of reductions over rows that do not fit in registers."""
        online_passes: list[OnlinePass] = []
        for reduction in online_reductions(self.group.statements):
            tiling, second = self.tilings[reduction.first.output], self.tilings[reduction.second.output]
            if tiling is None or second is None or tiling.holds_row or tiling.tile_shape != second.tile_shape:
                continue
            accumulators = tiling.vector_elems if self._has_vector_accumulators(tiling) else 1
            if reduction.kind is OnlineReductionKind.VARIANCE and accumulators != tiling.vector_elems:
                continue  # the count of an accumulator's values is its number of rounds
            online_passes += [self._pass_over(reduction, part) for part in tiling.parts]
        return replace(self, online_passes=tuple(online_passes))

    def _pass_over(self, reduction: OnlineReduction, part: RowTiling) -> OnlinePass:
        accumulators = part.vector_elems if self._has_vector_accumulators(part) else 1
        value, index = (
            None if expr is None else self._expression(reduction.first, expr, part) for expr in (reduction.value, reduction.index)
        )
        mean, neutral = (
            None if expr is None else self._expression(reduction.second, expr, None)
            for expr in (reduction.mean, reduction.neutral_index)
        )
        return OnlinePass(reduction, self.rows, part, accumulators, value or reduction.value, mean, index, neutral)

    def _hoist_guard(self, statement: TensorExpr, body: Expr, tiling: RowTiling) -> tuple[Expr | None, Expr]:
        """Return (guard of a chunk, unguarded value) if one guard is uniform over the chunk, else (None, value)."""
        match body:
            case Select(cond=cond, then=then, otherwise=Const() as otherwise):
                is_neutral = otherwise.value == identity(statement.combine or Combine.SUM, statement.accumulator).value
                same = not {e.name for e in self.rows.elements} & axes_of(cond) and not loads_of(cond)
                if is_neutral and same and is_uniform(cond, VECTOR_ELEMENT, tiling.vector_elems):
                    return cond if self.rows.vector else substitute(cond, {VECTOR_ELEMENT: num(0)}), then
            case _:
                pass
        return None, body

    def _has_vector_accumulators(self, tiling: RowTiling | None) -> bool:
        return tiling is not None and tiling.vector_elems > 1 and self.rows.vector is None

    def _vector_accumulators(self, statement: TensorExpr) -> list[Storage]:
        tiling = self.tilings[statement.output]
        if (
            tiling is None
            or not self._has_vector_accumulators(tiling)
            or statement.output in self.packed
            or any(statement in (online_pass.reduction.first, online_pass.reduction.second) for online_pass in self.online_passes)
        ):
            return []
        return [register(_vector_accumulator_name(statement), statement.accumulator, *self.rows.shape, tiling.vector_elems)]

    def _map(self, statement: TensorExpr, tiling: RowTiling) -> list[Node]:
        return [node for part in tiling.parts for node in self._map_part(statement, part)]

    def _map_part(self, statement: TensorExpr, part: RowTiling) -> tuple[Node, ...]:
        value = convert_to_type(self._value(statement, part), statement)
        store = Compute(statement.output, self._index(statement, part), value)
        return part.for_each_chunk(lambda: self._over_vector(part, store, guarded=True))

    def _value(self, statement: TensorExpr, tiling: RowTiling | None) -> Expr:
        return self._expression(statement, statement.body, tiling)

    def _expression(self, statement: TensorExpr, expr: Expr, tiling: RowTiling | None) -> Expr:
        """Rewrite an expression over loop variables, with row values and cached loads in registers."""

        inverted = self.inverted if tiling is not None else frozenset[str]()
        inverses = {local_name(tensor): _inverse_name(tensor) for tensor in inverted}

        def change(node: Expr) -> Expr:
            match node:
                case Op(kind=OpKind.DIV, args=(value, Load(tensor=divisor) as row)) if divisor in inverses:
                    inverse = replace(row, tensor=inverses[divisor])
                    return Op(OpKind.MUL, (value, inverse), node.dtype)
                case _:
                    pass
            if isinstance(node, Load) and node.tensor in self.row_values:
                return Load(local_name(node.tensor), self.rows.elements, node.dtype)
            if isinstance(node, Load) and node in self.staged.buffers:
                return self.staged.load(node)
            return node

        mapped = index_map(statement, self.rows, tiling, self.rows.read_at).apply(expr)
        if tiling is not None:
            index = self._cache_index(tiling)
            registers: dict[Expr, Expr] = {
                value: Load(cached.name, index, value.dtype)
                for value, cached in self.cached.items()
                if cached.tiling.part is tiling.part
            }
            mapped = replace_all(mapped, registers)
        return rewrite(mapped, change)

    def _index(self, statement: TensorExpr, tiling: RowTiling | None) -> tuple[Expr, ...]:
        # a peeled row's vectors are aligned for the row that is read, which is the same one where it exists
        is_peeled = tiling is not None and tiling.peeled is not None
        values = index_map(statement, self.rows, tiling, self.rows.read_at if is_peeled else self.rows.write_at)
        return tuple(values.apply(i) for i in statement.index)

    def _load_staged(self, value: Expr) -> Expr:
        """Replace the loads of operands that the block copied to shared memory."""
        return rewrite(
            value,
            lambda node: self.staged.load(node) if isinstance(node, Load) and node in self.staged.buffers else node,
        )

    def _cache(self, value: Expr, cached: _Cached) -> Storage:
        """Return the storage of a part of a row: registers, or shared memory if these are too few.

        In shared memory a lane reads only what it wrote, so that there is no barrier.
        """
        tiling = cached.tiling
        if not self._is_shared(tiling):
            shape = (*self.rows.shape, tiling.iterations, tiling.vector_elems)
            return register(cached.name, value.dtype.compute, *shape)
        shape = (self.rows.points, *self.rows.shape, tiling.chunks, tiling.vector_elems)
        return Storage(cached.name, value.dtype, shape, Scope.SHARED, ())

    def _is_shared(self, tiling: RowTiling) -> bool:
        return self.is_shared and tiling.part is not RowPart.EDGES

    def _cache_index(self, tiling: RowTiling) -> tuple[Expr, ...]:
        element = ref(VECTOR_ELEMENT) if tiling.vector_elems > 1 else num(0)
        if self._is_shared(tiling):
            return (ref(POINT), *self.rows.elements, ref(CHUNK), element)
        return (*self.rows.elements, ref(ROUND), element)

    def _over_vector(self, tiling: RowTiling, *nodes: Node, guarded: bool = False, cond: Expr | None = None) -> tuple[Node, ...]:
        """Execute the nodes for a chunk's elements of each row, the contiguous dimension innermost.

        `guarded` limits them to existing rows, `cond` to where it holds.
        """

        def where(inside: tuple[Node, ...]) -> tuple[Node, ...]:
            return inside if cond is None else (Branch(cond, inside),)

        if tiling.vector_elems == 1:
            return where(self.rows.for_each_row(nodes, guarded=guarded))
        if self.rows.vector is None:
            return where(
                self.rows.for_each_row((Loop(VECTOR_ELEMENT, tiling.vector_elems, LoopKind.VECTOR, nodes),), guarded=guarded)
            )
        return (
            Loop(
                VECTOR_ELEMENT,
                tiling.vector_elems,
                LoopKind.UNROLL,
                where(self.rows.for_each_row(nodes, guarded=guarded)),
            ),
        )


def _divisors(expr: Expr) -> Iterator[Load]:
    """Yield the loads by which an expression divides."""
    match expr:
        case Op(kind=OpKind.DIV, args=(_, Load() as divisor)):
            yield divisor
        case _:
            pass
    for child in children(expr):
        yield from _divisors(child)


def _inverse_name(tensor: str) -> str:
    """Return the name of the register with a row value's reciprocal."""
    return f"{tensor}.inverse"


def _vector_accumulator_name(statement: TensorExpr) -> str:
    """Return the name of the registers that accumulate by vector elements."""
    return f"{statement.output}.parts"
