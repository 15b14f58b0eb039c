"""Schedule → Schedule: split, reorder, fuse, tile, rename, vectorise, parallel, compute_at, store_at, rfactor and others.

Each is a pure function that returns a legal schedule or raises ScheduleError. None changes what is computed.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from roller_svc.analysis.inlining import is_inlinable
from roller_svc.errors import ScheduleError
from roller_svc.ir.expr import Expr, Load, rewrite, substitute
from roller_svc.ir.index import add, mul, num, ref
from roller_svc.ir.program import Axis, AxisKind, StatementKind, TensorExpr, TensorType
from roller_svc.ir.schedule import LoopKind, Scope
from roller_svc.schedule.bounds import MAX_LANES, extents_of, infer_bounds
from roller_svc.schedule.build_tree import check_launches
from roller_svc.schedule.default import split_accumulator, stage_of
from roller_svc.schedule.nest_statements import acc_name
from roller_svc.schedule.schedule import (
    UPDATE,
    At,
    Fixed,
    Function,
    Fuse,
    Rename,
    Repeat,
    Schedule,
    Site,
    Split,
    Stage,
    StageLoop,
    StagePart,
)


def split(
    schedule: Schedule, stage: str, loop: str, factor: int, names: tuple[str, str] | None = None, *, exact: bool = False
) -> Schedule:
    """Split `loop` into an outer loop around an inner one of `factor` iterations; the last round may be shorter.

    Args:
        schedule: the schedule.
        stage: the stage of the loop.
        loop: the loop.
        factor: iterations of the inner loop, from 1 to the loop's extent.
        names: of the two loops; default: `loop.outer` and `loop.inner`.
        exact: refuse a factor that does not divide the extent.
    """
    here = _unmarked(schedule, stage, loop)
    extent = _extent(schedule, here, loop)
    if not 1 <= factor <= extent:
        raise ScheduleError(f"invalid split factor of {loop}: expected 1 to {extent}, got {factor}", code="schedule-extent")
    if exact and extent % factor:
        raise ScheduleError(f"{factor} does not divide the {extent} iterations of {loop}", code="schedule-extent")
    outer, inner = names or (f"{loop}.outer", f"{loop}.inner")
    _check_new_names(here, outer, inner)
    cut = Split(loop, outer, inner, factor)
    at = here.position(loop)
    loops = (*here.loops[:at], StageLoop(cut.outer), StageLoop(cut.inner), *here.loops[at + 1 :])
    new = schedule.with_stage(replace(here, loops=loops, cuts=(*here.cuts, cut)))
    return _legal(_moved(new, At(stage, loop), At(stage, cut.inner)))


def reorder(schedule: Schedule, stage: str, *loops: str) -> Schedule:
    """Permute the named loops, the first outermost; other loops keep their positions."""
    here = schedule.stage(stage)
    positions = [here.position(loop) for loop in loops]
    if len(set(loops)) != len(loops):
        raise ScheduleError(f"duplicate loop in reorder: {', '.join(loops)}", code="schedule-name")
    statement = schedule.owner(stage).statement
    if statement.kind is StatementKind.SCATTER and here.part is StagePart.UPDATE and statement.combine is None:
        raise ScheduleError(
            f"the last write to an element of {statement.name} wins: its loops keep their order",
            code="schedule-dependence",
        )
    new = list(here.loops)
    for place, position in zip(sorted(positions), positions, strict=True):
        new[place] = here.loops[position]
    return _legal(schedule.with_stage(replace(here, loops=tuple(new))))


def fuse(schedule: Schedule, stage: str, outer: str, inner: str) -> Schedule:
    """Fuse `outer` and `inner`, directly inside of it, into `outer.inner.fused`; div and mod recover the two."""
    here = _unmarked(schedule, stage, outer)
    _unmarked(schedule, stage, inner)
    at = here.position(outer)
    if here.position(inner) != at + 1:
        raise ScheduleError(f"{inner} is not directly inside of {outer}", code="schedule-fuse", hint="reorder first")
    if between := _sites(schedule, At(stage, outer)):
        raise ScheduleError(f"{between[0].name} is computed or stored between {outer} and {inner}", code="schedule-fuse")
    cut = Fuse(outer, inner, f"{outer}.{inner}.fused")
    _check_new_names(here, cut.fused)
    loops = (*here.loops[:at], StageLoop(cut.fused), *here.loops[at + 2 :])
    new = schedule.with_stage(replace(here, loops=loops, cuts=(*here.cuts, cut)))
    return _legal(_moved(new, At(stage, inner), At(stage, cut.fused)))


def tile(schedule: Schedule, stage: str, outer: tuple[str, int], inner: tuple[str, int]) -> Schedule:
    """Split two loops, given as (loop, factor), and move both outer loops outside of both inner ones."""
    (y, y_factor), (x, x_factor) = outer, inner
    new = split(split(schedule, stage, y, y_factor), stage, x, x_factor)
    return reorder(new, stage, f"{y}.outer", f"{x}.outer", f"{y}.inner", f"{x}.inner")


def rename(schedule: Schedule, stage: str, loop: str, name: str) -> Schedule:
    """Rename a loop."""
    here = schedule.stage(stage)
    at = here.position(loop)
    _check_new_names(here, name)
    loops = (*here.loops[:at], replace(here.loops[at], name=name), *here.loops[at + 1 :])
    new = schedule.with_stage(replace(here, loops=loops, cuts=(*here.cuts, Rename(loop, name))))
    return _legal(_moved(new, At(stage, loop), At(stage, name)))


def vectorise(schedule: Schedule, stage: str, loop: str) -> Schedule:
    """Vectorize an innermost loop that is not over a reduced axis."""
    return _marked(schedule, stage, loop, LoopKind.VECTOR)


def unroll(schedule: Schedule, stage: str, loop: str) -> Schedule:
    """Unroll a loop completely."""
    return _marked(schedule, stage, loop, LoopKind.UNROLL)


def parallel(schedule: Schedule, stage: str, loop: str) -> Schedule:
    """Run the iterations of a loop, not over a reduced axis, on any threads."""
    return _marked(schedule, stage, loop, LoopKind.PARALLEL)


def block(schedule: Schedule, stage: str, loop: str) -> Schedule:
    """Run each iteration of a loop on a thread block of a GPU. Several such loops make up the grid."""
    return _marked(schedule, stage, loop, LoopKind.BLOCK)


def thread(schedule: Schedule, stage: str, loop: str) -> Schedule:
    """Run each iteration of a loop on a thread of the block. In a shared tile these are the threads around it."""
    return _marked(schedule, stage, loop, LoopKind.THREAD)


def serial(schedule: Schedule, stage: str, loop: str) -> Schedule:
    """Run the iterations of a loop one after the other: what a loop does before it is marked."""
    here = schedule.stage(stage)
    at = here.position(loop)
    loops = (*here.loops[:at], StageLoop(loop), *here.loops[at + 1 :])
    return _legal(schedule.with_stage(replace(here, loops=loops)))


def compute_at(schedule: Schedule, producer: str, stage: str, loop: str) -> Schedule:
    """Compute and store `producer` in each iteration of a loop of a stage that reads it, for the region that it needs."""
    return _placed(schedule, producer, At(stage, loop), At(stage, loop))


def accumulate_at(schedule: Schedule, stage: str, loop: str) -> Schedule:
    """Accumulate a reduction `C` in a tile in each iteration of a loop of its stage `C`, which then writes the tile.

    Afterwards `C` has one stage, which writes; the stages of its accumulator are `C.acc` and `C.acc.update`.
    """
    function = schedule.owner(stage)
    if stage != function.name:
        raise ScheduleError(
            f"{stage} is not the stage that writes {function.name}",
            code="schedule-scope",
            hint=f"name a loop of {function.name}; its accumulator is then a function of its own",
        )
    schedule.stage(stage).position(loop)
    producer = acc_name(function.name)
    if function.statement.kind is StatementKind.REDUCE:
        schedule = _with_accumulator(schedule, function)
    elif all(f.name != producer for f in schedule.functions):
        raise ScheduleError(f"{function.name} is not a reduction and accumulates nothing", code="schedule-scope")
    return compute_at(schedule, producer, stage, loop)


def _with_accumulator(schedule: Schedule, function: Function) -> Schedule:
    """Return the schedule with a reduction as its accumulator, at root, and a map. Their stages keep their loops."""
    accumulator, written = split_accumulator(function.statement)
    start, update = function.stages
    name = accumulator.output
    stages = (stage_of(name, StagePart.INIT, written.spatial), replace(update, name=name + UPDATE))
    new = (Function(accumulator, stages), replace(function, statement=written, stages=(replace(start, part=StagePart.VALUE),)))
    at = schedule.functions.index(function)
    schedule = replace(schedule, functions=(*schedule.functions[:at], *new, *schedule.functions[at + 1 :]))
    for loop in update.loops:
        schedule = _moved(schedule, At(update.name, loop.name), At(name + UPDATE, loop.name))
    return schedule


def rfactor(schedule: Schedule, stage: str, loop: str) -> Schedule:
    """Give each iteration of a loop of a reduction `C` an accumulator of its own (Halide's rfactor).

    The loop is one of the two that a split of a reduced axis has made. The accumulators are a function `C.part`, with
    one dimension more, whose loops are those that the stage had. `C` reduces them.
    """
    function = schedule.owner(stage)
    here = schedule.stage(stage)
    here.position(loop)
    reduced = {axis.name: axis.extent for axis in function.statement.reduced}
    splits = [c for c in here.cuts if isinstance(c, Split) and c.loop in reduced and loop in (c.outer, c.inner)]
    if not splits:
        raise ScheduleError(
            f"{loop} of {stage} is not a loop of a split reduced axis: expected one that rfactor can give accumulators",
            code="schedule-scope",
        )
    (cut,) = splits
    names = {f.name for f in schedule.functions}
    name = next(each for n in count(1) if (each := f"{function.name}.part{n if n > 1 else ''}") not in names)
    part, rest = _factored(function, here, cut, loop, name)
    at = schedule.functions.index(function)
    schedule = replace(schedule, functions=(*schedule.functions[:at], part, rest, *schedule.functions[at + 1 :]))
    for stage_loop in here.loops:
        schedule = _moved(schedule, At(stage, stage_loop.name), At(name + UPDATE, stage_loop.name))
    return _legal(schedule)


def _factored(function: Function, update: Stage, cut: Split, loop: str, name: str) -> tuple[Function, Function]:
    """Return a reduction as two: its accumulators for each iteration of a loop, and their reduction."""
    statement = function.statement
    extents = extents_of(update, statement.extents)
    lanes = Axis(loop, extents[loop], AxisKind.SPATIAL)
    rest = cut.outer if loop == cut.inner else cut.inner
    reduced = (Axis(rest, extents[rest], a.kind) if a.name == cut.loop else a for a in statement.reduced)
    whole = add(mul(ref(cut.outer), num(extents[cut.inner])), ref(cut.inner))
    dtype, index = statement.accumulator, (*statement.index, ref(loop))
    partial = replace(
        statement,
        output=name,
        name=name,
        type=TensorType(dtype, (*statement.type.shape, lanes.extent)),
        axes=(*statement.spatial, lanes, *reduced),
        index=index,
        body=substitute(statement.body, {cut.loop: whole}),
    )
    total = replace(statement, axes=(*statement.spatial, replace(lanes, kind=AxisKind.REDUCE)), body=Load(name, index, dtype))
    ragged = extents[cut.loop] % extents[cut.inner] != 0
    moved = replace(
        update,
        name=name + UPDATE,
        axes=partial.axes,
        cuts=tuple(each for each in update.cuts if each is not cut),
        limits=(
            *((substitute(value, {cut.loop: whole}), size) for value, size in update.limits),
            *(((whole, extents[cut.loop]),) if ragged else ()),
        ),
    )
    start = function.stages[0]
    site = function.computed
    return (
        Function(partial, (stage_of(name, StagePart.INIT, (*statement.spatial, lanes)), moved), site, site),
        replace(function, statement=total, stages=(start, stage_of(update.name, StagePart.UPDATE, total.axes))),
    )


def add_threads(schedule: Schedule, stage: str, name: str, extent: int) -> Schedule:
    """Add an innermost loop over threads of a block. The first thread does the work of the stage.

    All threads take part in what is computed inside of the loop.
    """
    here = schedule.stage(stage)
    if not 1 <= extent <= MAX_LANES:
        raise ScheduleError(f"invalid number of threads: expected 1 to {MAX_LANES}, got {extent}", code="schedule-extent")
    _check_new_names(here, name)
    loops = (*here.loops, StageLoop(name, LoopKind.THREAD))
    return _legal(schedule.with_stage(replace(here, loops=loops, cuts=(*here.cuts, Repeat(name, extent)))))


def compute_root(schedule: Schedule, producer: str) -> Schedule:
    """Compute `producer` whole, before all loops."""
    return _placed(schedule, producer, Fixed.ROOT, Fixed.ROOT)


def store_at(schedule: Schedule, producer: str, stage: str, loop: str) -> Schedule:
    """Store `producer` in a loop outside of the one it is computed in."""
    return _placed(schedule, producer, schedule.function(producer).computed, At(stage, loop))


def store_root(schedule: Schedule, producer: str) -> Schedule:
    """Store `producer` outside of all loops, wherever it is computed."""
    return _placed(schedule, producer, schedule.function(producer).computed, Fixed.ROOT)


def store_in(schedule: Schedule, producer: str, scope: Scope) -> Schedule:
    """Store a tile of `producer` in registers, on the stack, or in the memory that the threads of a block share.

    Registers hold elements whose indices are constants after unrolling; other tiles stay on the stack.
    """
    function = schedule.function(producer)
    if not isinstance(function.stored, At):
        raise ScheduleError(
            f"{producer} is not stored in a loop: expected a tile to store in {scope.value}",
            code="schedule-scope",
            hint="compute it in a loop of its consumer first",
        )
    return _legal(schedule.with_function(replace(function, scope=scope)))


def cache(schedule: Schedule, tensor: str, stage: str, loop: str, scope: Scope) -> Schedule:
    """Copy the part of an input that an iteration of a loop reads to a tile, in this scope.

    The copy is a function of its own, `A.cache`. Loads of the stage's function read it.
    """
    reader = schedule.owner(stage)
    schedule.stage(stage).position(loop)
    types = dict(schedule.program.inputs)
    if tensor not in types:
        raise ScheduleError(f"no input is named {tensor}", code="schedule-name", hint=f"inputs: {', '.join(types)}")
    loads = [load for load in reader.statement.reads if load.tensor == tensor]
    if not loads:
        raise ScheduleError(
            f"{reader.name} does not read {tensor} itself",
            code="schedule-scope",
            hint="name a stage of a function that does; one that is inlined has to be computed in a loop",
        )
    if any(any(load.bounds_checked) for load in loads):
        raise ScheduleError(f"data selects the elements of {tensor} that {reader.name} reads", code="schedule-scope")
    names = {f.name for f in schedule.functions}
    name = next(each for n in count(1) if (each := f"{tensor}.cache{n if n > 1 else ''}") not in names)
    copy = replace(_copy_of(tensor, name, types[tensor]), computed=At(stage, loop), stored=At(stage, loop), scope=scope)

    def moved(expr: Expr) -> Expr:
        return rewrite(expr, lambda node: replace(node, tensor=name) if isinstance(node, Load) and node.tensor == tensor else node)

    statement = reader.statement
    changed = replace(
        statement,
        body=moved(statement.body),
        index=tuple(moved(i) for i in statement.index),
        predicate=None if statement.predicate is None else moved(statement.predicate),
    )
    at = schedule.functions.index(reader)
    functions = (*schedule.functions[:at], copy, replace(reader, statement=changed), *schedule.functions[at + 1 :])
    return _legal(replace(schedule, functions=functions))


def _copy_of(tensor: str, name: str, kind: TensorType) -> Function:
    """Return a function that copies a tensor."""
    axes = tuple(Axis(f"d{d}", extent, AxisKind.SPATIAL) for d, extent in enumerate(kind.shape))
    index = tuple(ref(axis.name) for axis in axes)
    body = Load(tensor, index, kind.dtype)
    statement = TensorExpr(name, name, StatementKind.MAP, kind, axes, index, body)
    return Function(statement, (stage_of(name, StagePart.VALUE, axes),))


def inline(schedule: Schedule, producer: str) -> Schedule:
    """Replace every load of `producer`, a map, by its value."""
    function = schedule.function(producer)
    if producer in schedule.outputs:
        raise ScheduleError(f"output {producer} cannot be inlined", code="schedule-inline")
    if not is_inlinable(function.statement, (f.statement for f in schedule.functions)):
        raise ScheduleError(
            f"{producer} cannot be inlined: it is not a map, or its readers need the tensor",
            code="schedule-inline",
            hint="compute it at root, or in a loop of its consumer",
        )
    return _legal(schedule.with_function(replace(function, computed=Fixed.INLINE, stored=Fixed.INLINE)))


# what they share ----------------------------------------------------------------------------------------------------
def _legal(schedule: Schedule) -> Schedule:
    """Return the schedule. Raises ScheduleError if its tree breaks a rule."""
    return replace(schedule, nests=check_launches(schedule))


def _extent(schedule: Schedule, stage: Stage, loop: str) -> int:
    """Return the extent of a loop at its site; of an inlined function, at root."""
    nest = infer_bounds(schedule).nests.get(stage.name)
    if nest is not None:
        return next(x.extent for x in nest.loops if x.name == loop)
    return extents_of(stage, {axis.name: axis.extent for axis in stage.axes})[loop]


def _unmarked(schedule: Schedule, stage: str, loop: str) -> Stage:
    """Return the stage. Raises ScheduleError if the loop is not serial."""
    here = schedule.stage(stage)
    kind = here.loops[here.position(loop)].kind
    if kind is not LoopKind.SERIAL:
        raise ScheduleError(
            f"{loop} is already marked {kind.value}",
            code="schedule-marked",
            hint="split, fuse and reorder first, mark last",
        )
    return here


def _check_new_names(stage: Stage, *names: str) -> None:
    """Raise ScheduleError if a loop of the stage has, or had, one of the names."""
    for i, name in enumerate(names):
        if name in stage.loop_names or name in names[:i]:
            raise ScheduleError(
                f"{stage.name} has, or had, a loop {name}: expected a new name",
                code="schedule-name",
            )


def _marked(schedule: Schedule, stage: str, loop: str, kind: LoopKind) -> Schedule:
    here = _unmarked(schedule, stage, loop)
    loops = tuple(StageLoop(x.name, kind) if x.name == loop else x for x in here.loops)
    return _legal(schedule.with_stage(replace(here, loops=loops)))


def _placed(schedule: Schedule, producer: str, computed: Site, stored: Site) -> Schedule:
    function = schedule.function(producer)
    for site in (computed, stored):
        if isinstance(site, At):
            schedule.stage(site.stage).position(site.loop)
    if computed is Fixed.INLINE:
        raise ScheduleError(f"{producer} is inlined and has no storage", code="schedule-scope")
    return _legal(schedule.with_function(replace(function, computed=computed, stored=stored)))


def _sites(schedule: Schedule, site: At) -> list[Function]:
    return [f for f in schedule.functions if site in (f.computed, f.stored)]


def _moved(schedule: Schedule, old: At, new: At) -> Schedule:
    """Move functions that are computed or stored in a removed loop to the loop that has its body."""
    for function in _sites(schedule, old):
        computed = new if function.computed == old else function.computed
        stored = new if function.stored == old else function.stored
        schedule = schedule.with_function(replace(function, computed=computed, stored=stored))
    return schedule
