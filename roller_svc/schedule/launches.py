"""Launches for GPUs: the blocks, threads and tiles that a search of schedules begins with, and those that it draws."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from roller_svc.ir.program import Axis, StatementKind
from roller_svc.schedule.nest_statements import ACCUMULATOR, acc_name
from roller_svc.schedule.schedule import UPDATE, Fixed, Function, Schedule
from roller_svc.schedule.steps import Step

THREADS = (64, 128, 256, 512)
ELEMENTS = (1, 1, 2, 4, 8)
DEPTHS = (8, 16, 32)


@dataclass(frozen=True, slots=True)
class LaunchSizes:
    """The sizes of a launch. The last axes of the result have the threads; each thread computes a tile."""

    threads: int = 256
    rows: int = 1  # of a thread, along the last axis but one
    columns: int = 1  # of a thread, along the last axis
    depth: int | None = None  # of shared tiles of inputs, along a reduced axis; None: no shared tiles
    cached: tuple[str, ...] = ()  # inputs that have shared tiles


def draw_sizes(function: Function, chance: random.Random, inputs: Sequence[str]) -> LaunchSizes:
    """Return random sizes for a launch of a function."""
    read = {load.tensor for load in function.statement.reads}
    rows, columns = chance.choice(ELEMENTS), chance.choice(ELEMENTS)
    depth = chance.choice(DEPTHS) if chance.random() < 0.5 else None
    cached = tuple(name for name in inputs if name in read and chance.random() < 0.7)
    return LaunchSizes(chance.choice(THREADS), rows, columns, depth, cached)


def default_launches(schedule: Schedule) -> tuple[Step, ...]:
    """Return the steps that give each function at root of a default schedule blocks and threads of its axes."""
    names = {function.name for function in schedule.functions}
    steps: list[Step] = []
    for function in schedule.functions:
        reduces = function.statement.kind is StatementKind.REDUCE or acc_name(function.name) in names
        is_stored = reduces or function.computed is not Fixed.INLINE
        is_stored &= function.statement.kind is not StatementKind.SCATTER
        if is_stored and not function.name.endswith(ACCUMULATOR):
            if function.computed is Fixed.INLINE:
                steps.append(Step("compute_root", function.name))
            steps += launch_steps(schedule, function, LaunchSizes(), reduces=reduces)
    return tuple(steps)


def launch_steps(schedule: Schedule, function: Function, sizes: LaunchSizes, *, reduces: bool) -> list[Step]:
    """Return the steps that run a function of a default schedule on blocks and threads of these sizes."""
    name, axes = function.name, function.statement.spatial
    if not axes:
        return []
    tiles: list[_Tile] = []
    cuts: list[Step] = []
    left = sizes.threads
    for place, axis in enumerate(reversed(axes)):
        elements = min(axis.extent, (sizes.columns, sizes.rows)[place] if place < 2 else 1)
        threads = min(-(-axis.extent // elements), left)
        left //= threads
        is_last = axis is axes[0]
        has_block = any(tile.block for tile in tiles)
        tiles.append(_cut(name, axis, threads, elements, cuts, needs_block=is_last and not has_block))
    tiles.reverse()
    blocks = [tile.block for tile in tiles if tile.block]
    threads_of = [tile.thread for tile in tiles if tile.thread]
    inner = [tile.element for tile in tiles if tile.element]
    steps = [*cuts, Step("reorder", name, (("loops", (*blocks, *threads_of, *inner)),))]
    steps += [Step("block", name, (("loop", loop),)) for loop in blocks]
    steps += [Step("thread", name, (("loop", loop),)) for loop in threads_of]
    if not reduces:
        return [*steps, *(Step("vectorise", name, (("loop", loop),)) for loop in inner[-1:] if tiles[-1].element == loop)]
    several = [axis.name for axis, tile in zip(axes, tiles, strict=True) if tile.element]
    return [*steps, *_accumulation(schedule, function, (*blocks, *threads_of)[-1], several, sizes)]


@dataclass(frozen=True, slots=True)
class _Tile:
    """The loops of an axis; '' where it has none."""

    block: str
    thread: str
    element: str


def _cut(name: str, axis: Axis, threads: int, elements: int, cuts: list[Step], *, needs_block: bool) -> _Tile:
    """Return the loops of an axis, and append the splits that make them."""
    if threads * elements == 1:
        return _Tile(axis.name, "", "")
    block, rest = "", axis.name
    if needs_block or threads * elements < axis.extent:
        block, rest = f"{axis.name}_block", f"{axis.name}_rest" if threads > 1 and elements > 1 else f"{axis.name}_inner"
        cuts.append(_split(name, axis.name, min(axis.extent, threads * elements), block, rest))
    if threads == 1:
        return _Tile(block, "", rest)
    if elements == 1:
        return _Tile(block, rest, "")
    thread, element = f"{axis.name}_thread", f"{axis.name}_element"
    cuts.append(_split(name, rest, elements, thread, element))
    return _Tile(block, thread, element)


def _accumulation(schedule: Schedule, function: Function, site: str, several: Sequence[str], sizes: LaunchSizes) -> list[Step]:
    """Return the steps that keep a thread's accumulators in registers, and parts of inputs in shared tiles.

    Args:
        schedule: the default one.
        function: a reduction, or the map that writes one.
        site: the loop in which a thread accumulates.
        several: the axes along which a thread has several accumulators.
        sizes: of the launch.
    """
    tile = acc_name(function.name)
    source = next((each for each in schedule.functions if each.name == tile), function).statement
    spatial, reduced = [axis.name for axis in source.spatial], list(source.reduced)
    steps = [Step("accumulate_at", function.name, (("loop", site),)), Step("store_in", tile, (("scope", "registers"),))]
    steps += [Step("unroll", tile, (("loop", axis),)) for axis in several]
    update, loops = tile + UPDATE, [axis.name for axis in reduced]
    is_cut = sizes.depth is not None and bool(reduced) and reduced[-1].extent > sizes.depth
    if sizes.depth is not None and is_cut:
        last = reduced[-1].name
        steps.append(_split(update, last, sizes.depth, f"{last}_step", f"{last}_part"))
        loops = [*loops[:-1], f"{last}_step", f"{last}_part"]
    steps.append(Step("reorder", update, (("loops", (*loops, *spatial)),)))
    steps += [Step("unroll", update, (("loop", axis),)) for axis in several]
    if is_cut:
        ranks = {load.tensor: len(load.index) for load in source.reads}
        for tensor in sizes.cached:
            if ranks.get(tensor):
                steps += _shared(tensor, update, loops[-2], ranks[tensor], sizes.threads)
    return steps


def _shared(tensor: str, stage: str, loop: str, rank: int, threads: int) -> list[Step]:
    """Return the steps that copy a part of an input to a shared tile, by all threads of the block."""
    steps = [Step("cache", tensor, (("stage", stage), ("loop", loop), ("scope", "shared")))]
    copy, fused = f"{tensor}.cache", "d0"
    for _, inner in pairwise(f"d{d}" for d in range(rank)):
        steps.append(Step("fuse", copy, (("outer", fused), ("inner", inner))))
        fused = f"{fused}.{inner}.fused"
    steps.append(_split(copy, fused, threads, "round", "copier"))
    return [*steps, Step("thread", copy, (("loop", "copier"),))]


def _split(stage: str, loop: str, factor: int, outer: str, inner: str) -> Step:
    return Step("split", stage, (("loop", loop), ("factor", factor), ("names", (outer, inner))))
