"""Bounds inference: schedule → loop nest of every stage, with extents, axis values, guards and regions of functions.

Functions are processed from the last to the first: the region of a producer follows from the loops of its consumers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roller_svc.analysis.inlining import inline_producers
from roller_svc.analysis.linear import Linear, expression, linear, span
from roller_svc.errors import ScheduleError
from roller_svc.ir.expr import AxisRef, Expr, Load, axes_of, iter_subexpressions, substitute
from roller_svc.ir.index import add, ceil_div, div, mod, mul, num, ref
from roller_svc.ir.program import Axis, StatementKind, TensorExpr
from roller_svc.ir.schedule import LoopKind, Scope
from roller_svc.schedule.schedule import At, Fixed, Function, Fuse, Rename, Repeat, Schedule, Site, Split, Stage, StagePart

# Copies of a statement by unrolled and vector loops: compilers take seconds for some hundreds.
MAX_COPIES = 512
MAX_LANES = 1024
LANES_PER_COPY = 8
# Nodes of a tree, and of an index, are visited by recursion.
MAX_NESTED_LOOPS = 32
MAX_INDEX_NODES = 128
CONCURRENT = (LoopKind.PARALLEL, LoopKind.VECTOR, LoopKind.BLOCK, LoopKind.THREAD)
MAX_EXTENT = (1 << 31) - 1  # loop variables are 32 bits wide in expressions


@dataclass(frozen=True, slots=True)
class NestLoop:
    """A loop of a stage."""

    stage: str
    name: str  # in its stage
    var: str  # in the tree
    extent: int
    kind: LoopKind


@dataclass(frozen=True, slots=True)
class Guard:
    """0 <= value < size must hold; a side that always holds is not tested."""

    value: Expr
    size: int
    below: bool  # value may be less than 0
    above: bool  # value may be `size` or more


@dataclass(frozen=True, slots=True)
class Range:
    """`extent` indices of one dimension from `first` on."""

    first: Expr
    extent: int


@dataclass(frozen=True, slots=True)
class Body:
    """A statement with its inlined producers in place of their loads."""

    statement: TensorExpr
    reads: tuple[str, ...]  # tensors that the statement reads
    producers: tuple[TensorExpr, ...]  # values of those that are inlined
    expanded: TensorExpr
    tensors: tuple[str, ...]  # that the expanded statement reads


@dataclass(frozen=True, slots=True)
class Nest:
    """The loops of one stage."""

    stage: Stage
    prefix: str
    outer: tuple[NestLoop, ...]
    loops: tuple[NestLoop, ...]
    values: Mapping[str, Expr]  # axis → value over the variables of `outer` and `loops`
    guards: tuple[Guard, ...]
    reads: tuple[Load, ...]  # of the stage, over its axes

    @property
    def scope(self) -> tuple[NestLoop, ...]:
        return (*self.outer, *self.loops)


@dataclass(frozen=True, slots=True)
class Nests:
    """The result of bounds inference, of functions that have loops, in the schedule's order."""

    outputs: frozenset[str]
    functions: Mapping[str, Function]
    bodies: Mapping[str, Body]  # also of inlined functions
    nests: dict[str, Nest]
    buffers: dict[str, tuple[Range, ...]]  # region that is stored of each function
    launches: Mapping[str, tuple[str, ...]]  # function at root → functions that are computed inside of it, and itself
    readers: Mapping[str, tuple[Nest, ...]]  # nests that read a tensor


def infer_bounds(schedule: Schedule) -> Nests:
    """Infer the loop nests of a schedule. Those of `schedule.nests` that no step has changed are used again.

    Raises ScheduleError if a function is not computed around all its readers, or if a loop cannot have its kind.
    """
    bodies, functions = _expanded(schedule)
    nests: dict[str, Nest] = {}
    buffers: dict[str, tuple[Range, ...]] = {}
    launches: dict[str, tuple[str, ...]] = {}
    readers: dict[str, tuple[Nest, ...]] = {}
    found = Nests(schedule.outputs, {f.name: f for f in functions}, bodies, nests, buffers, launches, readers)
    launch_of: dict[str, str] = {}  # stage → function at root
    for function in reversed(functions):
        if not _reuse(schedule.nests, found, function):
            _place(schedule, found, function)
        at = function.computed
        root = launch_of[at.stage] if isinstance(at, At) else function.name
        launches[root] = (function.name, *launches.get(root, ()))
        for stage in function.stages:
            launch_of[stage.name] = root
            for tensor in {load.tensor for load in nests[stage.name].reads}:
                readers[tensor] = (nests[stage.name], *readers.get(tensor, ()))
    return found


def _reuse(known: Nests | None, found: Nests, function: Function) -> bool:
    """Take over a function's known nests, and return whether all that they follow from is unchanged."""
    name = function.name
    if known is None or known.functions.get(name) is not function or known.bodies[name] is not found.bodies[name]:
        return False
    stages = [site.stage for site in (function.computed, function.stored) if isinstance(site, At)]
    if stages:
        if not _are_the_same(found.readers.get(name, ()), known.readers.get(name, ())):
            return False
        if any(stage not in found.nests or found.nests[stage] is not known.nests.get(stage) for stage in stages):
            return False
    found.nests.update({stage.name: known.nests[stage.name] for stage in function.stages})
    found.buffers[name] = known.buffers[name]
    return True


def _place(schedule: Schedule, found: Nests, function: Function) -> None:
    """Infer the nests of a function from those of its readers."""
    path = _path(schedule, found, function.computed, function.name)
    stored_path = _path(schedule, found, function.stored, function.name)
    if path[: len(stored_path)] != stored_path:
        raise ScheduleError(f"{function.name} is stored inside of where it is computed", code="schedule-scope")
    _check_site(found, function, path, stored_path)
    stored_region = _region(found, function, stored_path)
    region = _region(found, function, path)
    sizes = function.statement.type.shape
    # a function computed whole is stored whole, even if its readers need a part
    found.buffers[function.name] = tuple(
        Range(num(0), size) if part.extent == size else stored
        for stored, part, size in zip(stored_region, region, sizes, strict=True)
    )
    for stage in function.stages:
        _check_depth(stage, len(path))
        reads = stage_reads(stage, found.bodies[function.name].expanded)
        found.nests[stage.name] = _nest(function, stage, region, path, reads)
        _check_loops(found.nests[stage.name], function)


def stage_reads(stage: Stage, body: TensorExpr) -> tuple[Load, ...]:
    """Return the loads of a stage, over its own axes."""
    match stage.part:
        case StagePart.INIT if body.kind is StatementKind.SCATTER:
            return (Load(body.target or "", tuple(ref(a.name) for a in stage.axes), body.type.dtype),)
        case StagePart.INIT:
            return ()
        case _:
            return body.reads


def _expanded(schedule: Schedule) -> tuple[dict[str, Body], tuple[Function, ...]]:
    """Return the bodies of all functions, and the functions that have loops."""
    bodies: dict[str, Body] = {}
    inlined: dict[str, TensorExpr] = {}
    for function in schedule.functions:
        known = schedule.nests.bodies.get(function.name) if schedule.nests is not None else None
        bodies[function.name] = _body(function.statement, inlined, known)
        if function.computed is Fixed.INLINE:
            inlined[function.name] = bodies[function.name].expanded
    needed = set(schedule.outputs)
    for function in reversed(schedule.functions):
        if function.name in needed:
            needed.update(bodies[function.name].tensors)
    live = tuple(f for f in schedule.functions if f.name in needed and f.computed is not Fixed.INLINE)
    return bodies, live


def _body(statement: TensorExpr, inlined: Mapping[str, TensorExpr], known: Body | None) -> Body:
    """Return the body of a statement: the known one, if it has the same statement and producers."""
    known = known if known is not None and known.statement is statement else None
    reads = statement.reads_tensors if known is None else known.reads
    producers = tuple(inlined[tensor] for tensor in reads if tensor in inlined)
    if known is not None and _are_the_same(producers, known.producers):
        return known
    expanded = inline_producers(statement, inlined)
    return Body(statement, reads, producers, expanded, reads if expanded is statement else expanded.reads_tensors)


def _are_the_same(values: Sequence[object], known: Sequence[object]) -> bool:
    """Return whether both have the same objects."""
    return len(values) == len(known) and all(a is b for a, b in zip(values, known, strict=True))


def _path(schedule: Schedule, nests: Nests, site: Site, name: str) -> tuple[NestLoop, ...]:
    """Return the loops around a site, outermost first."""
    if not isinstance(site, At):
        return ()
    nest = nests.nests.get(site.stage)
    if nest is None:
        schedule.stage(site.stage)
        raise ScheduleError(
            f"{name} cannot be computed in {site.stage}, which has no loops after it",
            code="schedule-scope",
            hint="compute a function inside one that reads it",
        )
    return (*nest.outer, *nest.loops[: nest.stage.position(site.loop) + 1])


def _check_site(nests: Nests, function: Function, path: tuple[NestLoop, ...], stored_path: tuple[NestLoop, ...]) -> None:
    name = function.name
    if path and name in nests.outputs:
        raise ScheduleError(f"output {name} must be computed at root", code="schedule-scope")
    if path and function.statement.kind is StatementKind.SCATTER:
        raise ScheduleError(f"scatter {name} must be computed at root: any part of it may need all of it", code="schedule-scope")
    for nest in nests.readers.get(name, ()):
        if nest.scope[: len(path)] != path:
            loop = path[-1]
            raise ScheduleError(
                f"{nest.stage.name} reads {name} outside of loop {loop.name} of {loop.stage}, where it is computed",
                code="schedule-scope",
            )
    for loop in path[len(stored_path) :]:
        if loop.kind in CONCURRENT:
            raise ScheduleError(
                f"iterations of {loop.name}, which is {loop.kind.value}, would share the storage of {name}",
                code="schedule-dependence",
                hint=f"store {name} inside of {loop.name}",
            )
    if path and not stored_path:
        # blocks and threads surround the whole launch, also those of loops inside of the site
        for loop in nests.nests[path[0].stage].loops:
            if loop.kind in (LoopKind.BLOCK, LoopKind.THREAD):
                raise ScheduleError(
                    f"each {loop.kind.value} of {loop.name} of {loop.stage} would write all of {name}, which is in memory",
                    code="schedule-dependence",
                    hint=f"{name}: store_at {path[-1].stage} {path[-1].name}",
                )


# regions ------------------------------------------------------------------------------------------------------------
def _region(nests: Nests, function: Function, path: tuple[NestLoop, ...]) -> tuple[Range, ...]:
    """Return the region that all readers need in one iteration of the path's loops."""
    sizes = function.statement.type.shape
    if not path:
        return tuple(Range(num(0), size) for size in sizes)
    parts_by_dimension: list[list[tuple[Linear, int, int]] | None] = [[] for _ in sizes]
    # a shared tile has what all threads of the block need
    fixed = {loop.var for loop in path if function.scope is not Scope.SHARED or loop.kind is not LoopKind.THREAD}
    for nest in nests.readers.get(function.name, ()):
        extents = {loop.var: loop.extent for loop in nest.scope}
        for load in nest.reads:
            if load.tensor != function.name:
                continue
            for d, index in enumerate(load.index):
                part = None if any(load.bounds_checked) else _part(substitute(index, nest.values), fixed, extents)
                parts = parts_by_dimension[d]
                if part is None or parts is None:
                    parts_by_dimension[d] = None
                else:
                    parts.append(part)
    return tuple(_hull(parts, size) for parts, size in zip(parts_by_dimension, sizes, strict=True))


def _part(index: Expr, fixed: set[str], extents: Mapping[str, int]) -> tuple[Linear, int, int] | None:
    """Return (invariant terms, lowest and highest value of the others), or None if the index comes from data."""
    if any(isinstance(node, Load) for node in iter_subexpressions(index)):
        return None
    invariant: Linear = {}
    varying: Linear = {}
    for term, c in linear(index).items():
        (invariant if term is not None and axes_of(term) <= fixed else varying)[term] = c
    low, high = span(varying, extents)
    return invariant, low, high


def _hull(parts: list[tuple[Linear, int, int]] | None, size: int) -> Range:
    if not parts or any(still != parts[0][0] for still, _, _ in parts):
        return Range(num(0), size)
    low, high = min(p[1] for p in parts), max(p[2] for p in parts)
    if high - low + 1 >= size:
        return Range(num(0), size)
    return Range(expression({**parts[0][0], None: low}), high - low + 1)


# loops --------------------------------------------------------------------------------------------------------------
def _nest(function: Function, stage: Stage, region: tuple[Range, ...], path: tuple[NestLoop, ...], reads: tuple[Load, ...]) -> Nest:
    prefix = f"{stage.name}." if path else ""
    ranges = _axis_ranges(function.statement, region)
    extents = {axis.name: ranges[axis.name].extent if axis.name in ranges else axis.extent for axis in stage.axes}
    whole = extents_of(stage, extents)
    loops = tuple(NestLoop(stage.name, x.name, prefix + x.name, whole[x.name], x.kind) for x in stage.loops)
    values, ragged = _values(stage, whole, {x.name: ref(x.var) for x in loops})
    in_scope = {x.var: x.extent for x in (*path, *loops)}
    guards = [Guard(value, size, below=False, above=True) for value, size in ragged]
    placed: dict[str, Expr] = {}
    for axis in stage.axes:
        start = ranges[axis.name].first if axis.name in ranges else num(0)
        placed[axis.name] = expression(linear(add(start, values[axis.name]))) if start != num(0) else values[axis.name]
        guards += _domain(axis, placed[axis.name], start, extents[axis.name], in_scope)
    for value, size in stage.limits:
        guards.append(Guard(expression(linear(substitute(value, placed))), size, below=False, above=True))
    return Nest(stage, prefix, path, loops, placed, tuple(guards), reads)


def _check_depth(stage: Stage, outer: int) -> None:
    """Check that a stage is not below too many loops, and that no axis becomes a long expression of its loops.

    Both parts of a fused loop are computed from its variable: splits and fuses in turn double the expression.
    """
    if outer + len(stage.loops) > MAX_NESTED_LOOPS:
        raise ScheduleError(
            f"{stage.name} is too deep: expected at most {MAX_NESTED_LOOPS} loops around it, got {outer + len(stage.loops)}",
            code="schedule-extent",
        )
    nodes = {loop.name: 1 for loop in stage.loops}
    for cut in reversed(stage.cuts):
        match cut:
            case Split():
                nodes[cut.loop] = nodes[cut.outer] + nodes[cut.inner] + 3
            case Fuse():
                nodes[cut.outer] = nodes[cut.inner] = nodes[cut.fused] + 2
            case Rename():
                nodes[cut.loop] = nodes[cut.name]
            case Repeat():
                pass
    if max(nodes.values(), default=0) > MAX_INDEX_NODES:
        loop = max(nodes, key=nodes.__getitem__)
        raise ScheduleError(
            f"{loop} of {stage.name} is split and fused too often: expected an index of at most {MAX_INDEX_NODES} nodes, "
            f"got {nodes[loop]}",
            code="schedule-extent",
        )


def extents_of(stage: Stage, axes: Mapping[str, int]) -> dict[str, int]:
    """Return the extents of every loop that a stage has or had, for these extents of its axes."""
    whole = dict(axes)
    for cut in stage.cuts:
        match cut:
            case Split(loop=loop, factor=factor):
                whole[cut.inner] = min(factor, whole[loop])
                whole[cut.outer] = ceil_div(whole[loop], whole[cut.inner])
            case Fuse(fused=fused):
                whole[fused] = whole[cut.outer] * whole[cut.inner]
                if whole[fused] > MAX_EXTENT:
                    raise ScheduleError(
                        f"fused loop {fused} is too long: expected at most {MAX_EXTENT} iterations, got {whole[fused]}",
                        code="schedule-extent",
                    )
            case Rename():
                whole[cut.name] = whole[cut.loop]
            case Repeat():
                whole[cut.name] = cut.extent
    return whole


def _axis_ranges(statement: TensorExpr, region: tuple[Range, ...]) -> dict[str, Range]:
    """Return the computed range of each spatial axis."""
    if statement.kind is StatementKind.SCATTER:
        return {}
    return {index.name: part for index, part in zip(statement.index, region, strict=True) if isinstance(index, AxisRef)}


def _values(stage: Stage, whole: Mapping[str, int], loops: Mapping[str, Expr]) -> tuple[dict[str, Expr], list[tuple[Expr, int]]]:
    """Return every axis over the loop variables, and the values that the last round of a ragged split may exceed."""
    values = dict(loops)
    ragged: list[tuple[Expr, int]] = []
    for cut in reversed(stage.cuts):
        match cut:
            case Split(loop=loop):
                values[loop] = add(mul(values[cut.outer], num(whole[cut.inner])), values[cut.inner])
                if whole[loop] % whole[cut.inner]:
                    ragged.append((values[loop], whole[loop]))
            case Fuse(fused=fused):
                values[cut.outer] = div(values[fused], whole[cut.inner])
                values[cut.inner] = mod(values[fused], whole[cut.inner])
            case Rename():
                values[cut.loop] = values[cut.name]
            case Repeat():
                ragged.append((values[cut.name], 1))
    return values, ragged


def _domain(axis: Axis, value: Expr, first: Expr, extent: int, extents: Mapping[str, int]) -> list[Guard]:
    """Return a guard if the region may exceed the tensor: in a guarded read, or in a ragged last round."""
    low, high = span(linear(first), extents)
    below, above = low < 0, high + extent > axis.extent
    return [Guard(value, axis.extent, below, above)] if below or above else []


def check_copies(nest: Nest, lanes_per_copy: int) -> None:
    """Check the copies of a statement that are printed, each for a number of lanes. Raises ScheduleError (schedule-extent)."""
    copies = math.prod(x.extent for x in nest.scope if x.kind is LoopKind.UNROLL)
    copies *= math.prod(ceil_div(x.extent, lanes_per_copy) for x in nest.loops if x.kind is LoopKind.VECTOR)
    if copies > MAX_COPIES:
        raise ScheduleError(
            f"{nest.stage.name} is unrolled too often: expected at most {MAX_COPIES} copies, got {copies}",
            code="schedule-extent",
            hint="split an unrolled or vector loop by a smaller factor",
        )


def _check_loops(nest: Nest, function: Function) -> None:
    """Check the kinds of loops."""
    reduced = {a.name for a in function.statement.reduced}
    scatters = function.statement.kind is StatementKind.SCATTER and nest.stage.part is StagePart.UPDATE
    plain = {index.name for index in function.statement.index if isinstance(index, AxisRef)}
    check_copies(nest, LANES_PER_COPY)
    for loop in nest.loops:
        if loop.kind is LoopKind.VECTOR and loop.extent > MAX_LANES:
            raise ScheduleError(
                f"vector loop {loop.name} is too long: expected at most {MAX_LANES} lanes, got {loop.extent}",
                code="schedule-extent",
            )
        if loop.kind not in CONCURRENT:
            continue
        if nest.outer and loop.kind is LoopKind.BLOCK:
            raise ScheduleError(
                f"blocks of {loop.name} would be inside of loop {nest.outer[-1].name}: a launch has its blocks at root",
                code="schedule-launch",
                hint=f"mark a loop of {nest.outer[0].stage}",
            )
        threads = any(outer.kind is LoopKind.THREAD for outer in nest.outer)
        if threads and loop.kind is LoopKind.THREAD and function.scope is not Scope.SHARED:
            raise ScheduleError(
                f"each thread has its own tile of {function.name}: other threads cannot compute a part of it",
                code="schedule-launch",
                hint=f"{function.name}: store_in shared",
            )
        axes = nest.stage.axes_of(loop.name)
        if axes & reduced:
            raise ScheduleError(
                f"iterations of {loop.name} all write the same elements of {function.name}",
                code="schedule-dependence",
                hint="loops of a reduction must be serial unless each iteration has an accumulator of its own",
            )
        if scatters and not axes <= plain:
            raise ScheduleError(
                f"iterations of {loop.name} may write the same elements of {function.name}: data or sums select them",
                code="schedule-dependence",
                hint="only loops of an axis that is an index by itself may be parallel or vectors",
            )
