"""Random schedules: mutations of steps, and register tiles of random size. A given generator gives the same ones."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from roller_svc.errors import ScheduleError
from roller_svc.ir.program import Axis, AxisKind, StatementKind
from roller_svc.schedule.launches import default_launches, draw_sizes, launch_steps
from roller_svc.schedule.nest_statements import ACCUMULATOR, acc_name
from roller_svc.schedule.schedule import UPDATE, Fixed, Function, Schedule
from roller_svc.schedule.steps import Step, Value, apply_step

Steps = tuple[Step, ...]
FACTORS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
MAX_VECTORS = 4  # of a row of a register tile
MAX_ROWS = 14  # of a register tile
MAX_APPLIED = 4096  # schedules that are remembered
MAX_ATTEMPTS = 20  # mutations that are tried until one is legal


@dataclass(frozen=True, slots=True)
class _Applied:
    """A schedule, and those that are one step further."""

    schedule: Schedule
    further: dict[Step, _Applied] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepSpace:
    """The schedules of a program that are searched: those that `mutate` reaches."""

    default: Schedule
    lanes: int  # elements of a vector
    on_gpu: bool = False  # tiles are blocks and threads
    _applied: list[_Applied] = field(default_factory=list, repr=False, compare=False)  # the default schedule, then all known

    def apply(self, steps: Steps) -> Schedule:
        """Return the schedule of steps. Steps that another schedule began with are not applied again. Raises ScheduleError."""
        if not self._applied or len(self._applied) > MAX_APPLIED:
            self._applied[:] = [_Applied(self.default)]
        here = self._applied[0]
        for step in steps:
            if step not in here.further:
                here.further[step] = _Applied(apply_step(here.schedule, step))
                self._applied.append(here.further[step])
            here = here.further[step]
        return here.schedule

    def start(self) -> Steps:
        """Return the steps of the default schedule: none, or on a GPU those of its launches, where they are legal."""
        steps = default_launches(self.default) if self.on_gpu else ()
        try:
            self.apply(steps)
        except ScheduleError:
            return ()
        return steps

    def mutate(self, steps: Steps, chance: random.Random, refused: Counter[str] | None = None) -> tuple[Steps, Schedule] | None:
        """Return other steps and their schedule; None where all that were tried are illegal.

        `refused` counts what was illegal by the code of its rule.
        """
        for _ in range(MAX_ATTEMPTS):
            changed = chance.choice(_MUTATIONS)(self, steps, chance)
            if changed != steps:
                try:
                    return changed, self.apply(changed)
                except ScheduleError as error:
                    if refused is not None:
                        refused[error.code] += 1
        return None


def _with_another_factor(space: StepSpace, steps: Steps, chance: random.Random) -> Steps:
    numbered = [at for at, step in enumerate(steps) if any(_has_number(value) for _, value in step.values)]
    if not numbered:
        return steps
    at = chance.choice(numbered)

    def changed(value: Value) -> Value:
        match value:
            case int():
                return chance.choice((value * 2, max(1, value // 2), chance.choice(FACTORS)))
            case (str() as loop, int() as number):
                return loop, chance.choice((number * 2, max(1, number // 2), chance.choice(FACTORS)))
            case _:
                return value

    values = tuple((name, changed(value)) for name, value in steps[at].values)
    return (*steps[:at], replace(steps[at], values=values), *steps[at + 1 :])


def _has_number(value: Value) -> bool:
    return isinstance(value, int) or (isinstance(value, tuple) and any(isinstance(each, int) for each in value))


def _without_a_step(space: StepSpace, steps: Steps, chance: random.Random) -> Steps:
    if not steps:
        return steps
    at = chance.randrange(len(steps))
    return (*steps[:at], *steps[at + 1 :])


def _with_a_swap(space: StepSpace, steps: Steps, chance: random.Random) -> Steps:
    if len(steps) < 2:
        return steps
    at = chance.randrange(len(steps) - 1)
    return (*steps[:at], steps[at + 1], steps[at], *steps[at + 2 :])


def _with_a_step(space: StepSpace, steps: Steps, chance: random.Random) -> Steps:
    """Append a step on a random loop of the schedule."""
    try:
        schedule = space.apply(steps)
    except ScheduleError:
        return steps
    stages = [stage for function in schedule.functions for stage in function.stages if stage.loops]
    if not stages:
        return steps
    stage = chance.choice(stages)
    names = [loop.name for loop in stage.loops]
    loop = chance.choice(names)
    marks = ("vectorise", "block", "thread", "unroll") if space.on_gpu else ("vectorise", "parallel", "unroll")
    match chance.choice(("split", "reorder", *marks, "compute_at", "compute_root")):
        case "split":
            return (*steps, Step("split", stage.name, (("loop", loop), ("factor", chance.choice(FACTORS)))))
        case "reorder":
            return (*steps, Step("reorder", stage.name, (("loops", tuple(chance.sample(names, len(names)))),)))
        case "compute_at":
            producer = chance.choice(schedule.functions).name
            return (*steps, Step("compute_root", producer), Step("compute_at", producer, (("stage", stage.name), ("loop", loop))))
        case "compute_root":
            return (*steps, Step("compute_root", chance.choice(schedule.functions).name))
        case mark:
            return (*steps, Step(mark, stage.name, (("loop", loop),)))


def _with_a_tile(space: StepSpace, steps: Steps, chance: random.Random) -> Steps:
    """Replace the steps of one function by a tile of random size: of vectors or threads, and of a reduction's accumulators."""
    functions = [f for f in space.default.functions if not f.name.endswith(ACCUMULATOR) and f.statement.spatial]
    if not functions:
        return steps
    function = chance.choice(functions)
    own = {function.name, function.name + UPDATE, acc_name(function.name), acc_name(function.name) + UPDATE}
    inputs = [name for name, _ in space.default.program.inputs]
    if space.on_gpu:
        own.update(*({name, f"{name}.cache"} for name in inputs))
    others = tuple(step for step in steps if step.subject not in own)
    placed = (Step("compute_root", function.name),) if function.computed is Fixed.INLINE else ()
    reduces = function.statement.kind is StatementKind.REDUCE or any(
        f.name == acc_name(function.name) for f in space.default.functions
    )
    if space.on_gpu:
        sizes = draw_sizes(_accumulated(space.default, function), chance, inputs)
        return (*others, *placed, *launch_steps(space.default, function, sizes, reduces=reduces))
    return (*others, *placed, *_tile(space, function, chance, reduces=reduces))


def _accumulated(schedule: Schedule, function: Function) -> Function:
    """Return the accumulator of a function, if it is one of its own, or the function."""
    return next((each for each in schedule.functions if each.name == acc_name(function.name)), function)


def _tile(space: StepSpace, function: Function, chance: random.Random, *, reduces: bool) -> list[Step]:
    name, axes = function.name, function.statement.spatial
    column = axes[-1]
    width = min(column.extent, space.lanes * chance.randint(1, MAX_VECTORS))
    row = chance.choice(axes[:-1]) if len(axes) > 1 else None
    height = 1 if row is None else chance.randint(1, min(row.extent, MAX_ROWS))
    if chance.random() < 0.5:
        width, height = _divisor(column, width), 1 if row is None else _divisor(row, height)
    steps = [_split(name, column, width)]
    inner = [_inner(column)]
    if row is not None and height > 1:
        steps.insert(0, _split(name, row, height))
        inner.insert(0, _inner(row))
    outer = [_outer(axis) if _inner(axis) in inner else axis.name for axis in axes]
    if chance.random() < 0.5:
        chance.shuffle(outer)
    steps.append(Step("reorder", name, (("loops", (*outer, *inner)),)))
    if reduces:
        steps += _accumulators(function, outer[-1], [row.name] if len(inner) > 1 and row is not None else [], column.name, chance)
    steps += [Step("unroll", name, (("loop", loop),)) for loop in inner[:-1]]
    steps.append(Step("vectorise", name, (("loop", inner[-1]),)))
    if chance.random() < 0.7:
        steps.append(Step("parallel", name, (("loop", outer[0]),)))
    return steps


def _accumulators(function: Function, site: str, rows: list[str], column: str, chance: random.Random) -> list[Step]:
    """Return the steps that keep a tile of a reduction in registers, all of whose points are updated together."""
    tile = acc_name(function.name)
    reduced = [axis.name for axis in function.statement.axes if axis.kind is AxisKind.REDUCE]
    rest = [axis.name for axis in function.statement.spatial if axis.name not in (*rows, column)]
    chance.shuffle(reduced)
    steps = [Step("accumulate_at", function.name, (("loop", site),)), Step("store_in", tile, (("scope", "registers"),))]
    for stage, loops in ((tile, []), (tile + UPDATE, reduced)):
        steps.append(Step("reorder", stage, (("loops", (*rest, *loops, *rows, column)),)))
        steps += [Step("unroll", stage, (("loop", loop),)) for loop in rows]
        steps.append(Step("vectorise", stage, (("loop", column),)))
    return steps


def _divisor(axis: Axis, size: int) -> int:
    """Return the largest size up to this one that leaves no tail, or this one if that is 1."""
    divisor = max(each for each in range(1, size + 1) if axis.extent % each == 0)
    return divisor if divisor > 1 else size


def _split(stage: str, axis: Axis, factor: int) -> Step:
    names = (_outer(axis), _inner(axis))
    return Step("split", stage, (("loop", axis.name), ("factor", factor), ("names", names)))


def _outer(axis: Axis) -> str:
    return f"{axis.name}_outer"


def _inner(axis: Axis) -> str:
    return f"{axis.name}_inner"


Mutation = Callable[[StepSpace, Steps, random.Random], Steps]
# Tiles are proposed as often as all other mutations: they are several steps, of which each alone gains nothing.
_OTHERS: Sequence[Mutation] = (_with_another_factor, _without_a_step, _with_a_swap, _with_a_step)
_MUTATIONS: Sequence[Mutation] = (*_OTHERS, *(_with_a_tile,) * len(_OTHERS))
