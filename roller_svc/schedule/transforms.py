"""Schedule → Schedule: split, reorder, fuse, tile, vectorise, unroll, parallel, compute_at, store_at, inline.

Each is a pure function that gives a legal schedule or raises ScheduleError: none changes what is computed.
"""

from __future__ import annotations

from dataclasses import replace

from roller_svc.analysis.inlining import is_inlinable
from roller_svc.errors import ScheduleError
from roller_svc.ir.program import StatementKind
from roller_svc.ir.schedule import LoopKind
from roller_svc.schedule.bounds import extents_of, infer_bounds
from roller_svc.schedule.build_tree import build_tree
from roller_svc.schedule.legality import check
from roller_svc.schedule.schedule import At, Fixed, Function, Fuse, Schedule, Site, Split, Stage, StageLoop, StagePart


def split(schedule: Schedule, stage: str, loop: str, factor: int) -> Schedule:
    """`loop` becomes `loop.outer` around `loop.inner` of `factor` iterations; where that does not divide, the last
    round ends early."""
    here = _unmarked(schedule, stage, loop)
    extent = _extent(schedule, here, loop)
    if not 1 <= factor <= extent:
        raise ScheduleError(f"{loop} of {extent} iterations cannot be split by {factor}", code="schedule-extent")
    cut = Split(loop, f"{loop}.outer", f"{loop}.inner", factor)
    at = here.position(loop)
    loops = (*here.loops[:at], StageLoop(cut.outer), StageLoop(cut.inner), *here.loops[at + 1 :])
    new = schedule.with_stage(replace(here, loops=loops, cuts=(*here.cuts, cut)))
    return _legal(_moved(new, At(stage, loop), At(stage, cut.inner)))


def reorder(schedule: Schedule, stage: str, *loops: str) -> Schedule:
    """The named loops take each other's places, the first outermost; other loops stay where they are."""
    here = schedule.stage(stage)
    positions = [here.position(loop) for loop in loops]
    if len(set(loops)) != len(loops):
        raise ScheduleError(f"a loop stands twice in {', '.join(loops)}", code="schedule-name")
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
    """Two loops, `inner` directly inside of `outer`, become `outer.inner.fused`, from which div and mod tell them."""
    here = _unmarked(schedule, stage, outer)
    _unmarked(schedule, stage, inner)
    at = here.position(outer)
    if here.position(inner) != at + 1:
        raise ScheduleError(f"{inner} is not directly inside of {outer}", code="schedule-fuse", hint="reorder first")
    if between := _sites(schedule, At(stage, outer)):
        raise ScheduleError(f"{between[0].name} stands between {outer} and {inner}", code="schedule-fuse")
    cut = Fuse(outer, inner, f"{outer}.{inner}.fused")
    loops = (*here.loops[:at], StageLoop(cut.fused), *here.loops[at + 2 :])
    new = schedule.with_stage(replace(here, loops=loops, cuts=(*here.cuts, cut)))
    return _legal(_moved(new, At(stage, inner), At(stage, cut.fused)))


def tile(schedule: Schedule, stage: str, outer: tuple[str, int], inner: tuple[str, int]) -> Schedule:
    """Two (loop, factor): both split, and the rounds outside of the tiles."""
    (y, y_factor), (x, x_factor) = outer, inner
    new = split(split(schedule, stage, y, y_factor), stage, x, x_factor)
    return reorder(new, stage, f"{y}.outer", f"{x}.outer", f"{y}.inner", f"{x}.inner")


def vectorise(schedule: Schedule, stage: str, loop: str) -> Schedule:
    """Iterations become lanes of vectors. Only an innermost loop, and none of a reduced axis."""
    return _marked(schedule, stage, loop, LoopKind.VECTOR)


def unroll(schedule: Schedule, stage: str, loop: str) -> Schedule:
    """The body once for every iteration."""
    return _marked(schedule, stage, loop, LoopKind.UNROLL)


def parallel(schedule: Schedule, stage: str, loop: str) -> Schedule:
    """Iterations run on any thread; none of a reduced axis."""
    return _marked(schedule, stage, loop, LoopKind.PARALLEL)


def compute_at(schedule: Schedule, producer: str, consumer: str, loop: str) -> Schedule:
    """`producer` is computed, and stored, in each iteration of a consuming stage's loop, as much as that needs."""
    return _placed(schedule, producer, At(consumer, loop), At(consumer, loop))


def compute_root(schedule: Schedule, producer: str) -> Schedule:
    """`producer` is computed whole, before all loops."""
    return _placed(schedule, producer, Fixed.ROOT, Fixed.ROOT)


def store_at(schedule: Schedule, producer: str, consumer: str, loop: str) -> Schedule:
    """The room of `producer` stands in a loop outside of the one it is computed in."""
    return _placed(schedule, producer, schedule.function(producer).computed, At(consumer, loop))


def store_root(schedule: Schedule, producer: str) -> Schedule:
    """The room of `producer` stands outside of all loops, wherever it is computed."""
    return _placed(schedule, producer, schedule.function(producer).computed, Fixed.ROOT)


def inline(schedule: Schedule, producer: str) -> Schedule:
    """Every load of `producer`, a map, becomes its value, computed there."""
    function = schedule.function(producer)
    if producer in schedule.outputs:
        raise ScheduleError(f"{producer} is an output: it has to be stored", code="schedule-inline")
    if not is_inlinable(function.statement, (f.statement for f in schedule.functions)):
        raise ScheduleError(
            f"{producer} is no map, or its readers need the tensor itself", code="schedule-inline",
            hint="compute it at root, or in a loop of its consumer",
        )  # fmt: skip
    return _legal(schedule.with_function(replace(function, computed=Fixed.INLINE, stored=Fixed.INLINE)))


# what they share ----------------------------------------------------------------------------------------------------
def _legal(schedule: Schedule) -> Schedule:
    """The schedule, once its tree has been found to obey every rule."""
    inputs = {name for name, _ in schedule.program.inputs}
    check(build_tree(schedule), inputs | schedule.outputs)
    return schedule


def _extent(schedule: Schedule, stage: Stage, loop: str) -> int:
    """Iterations of a loop where it is now; of a function that has no loops, as when it is inlined, at root."""
    nest = infer_bounds(schedule).nests.get(stage.name)
    if nest is not None:
        return next(x.extent for x in nest.loops if x.name == loop)
    return extents_of(stage, {axis.name: axis.extent for axis in stage.axes})[loop]


def _unmarked(schedule: Schedule, stage: str, loop: str) -> Stage:
    """The stage, if that loop is plain."""
    here = schedule.stage(stage)
    kind = here.loops[here.position(loop)].kind
    if kind is not LoopKind.SERIAL:
        raise ScheduleError(
            f"{loop} is {kind.value} already", code="schedule-marked", hint="split, fuse and reorder first, mark last"
        )
    return here


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
        raise ScheduleError(f"{producer} is inlined: it is not stored", code="schedule-scope")
    return _legal(schedule.with_function(replace(function, computed=computed, stored=stored)))


def _sites(schedule: Schedule, site: At) -> list[Function]:
    return [f for f in schedule.functions if site in (f.computed, f.stored)]


def _moved(schedule: Schedule, old: At, new: At) -> Schedule:
    """Functions computed or stored in a loop that is no more move to the one that has its body."""
    for function in _sites(schedule, old):
        computed = new if function.computed == old else function.computed
        stored = new if function.stored == old else function.stored
        schedule = schedule.with_function(replace(function, computed=computed, stored=stored))
    return schedule
