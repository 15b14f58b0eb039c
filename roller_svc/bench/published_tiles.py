"""Published tiles of ROLLER's artifact → the model's estimate of those very tiles beside their published times.

The artifact names the best of its ten tiles for each operator on K80 and MI50. A tile becomes an rProgram of our
families; where theirs are other kernels, `artifact_kernel` prices what they generate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roller_svc import hardware
from roller_svc.bench.artifact_kernel import artifact_seconds
from roller_svc.bench.documents import OperatorModel, TileModel
from roller_svc.bench.published import TOP_K, by_class, operators, program_of, tried
from roller_svc.bench.ranks import median_abs_log_ratio, share, spearman
from roller_svc.construct.partition import partition
from roller_svc.construct.rprograms import prepared
from roller_svc.errors import ArgumentError
from roller_svc.ir.group import TileSpace
from roller_svc.ir.hardware import ComputeUnit, Family, HardwareSpec
from roller_svc.ir.rprogram import RProgram, RTile
from roller_svc.perf.model import Model
from roller_svc.ranking import ranked_groups

# A device's fields in the file of published times.
COLUMNS = {"nvidia-k80": "k80", "amd-mi50": "mi50"}
# Classes whose kernels the artifact stages in shared memory and we do not, and the families that are priced so:
# reductions only where the compiled code is known (docs/model.md).
STAGED = {"depthwiseconv": tuple(Family), "pooling": tuple(Family), "reduce": (Family.AMD,)}
_LEVEL = re.compile(r"\[level (\d): \[tile: \[([\d, ]*)\]; step: \[([\d, ]*)\]\]\]")
Json = dict[str, Any]


def bench_tiles(path: Path, target: str) -> Json:
    """Spearman's correlation within each class and the median of |ln(estimate / published)| of the published tiles
    (`tile_s` beside `roller_s`), and how often the best of our own ten (`predicted_s`) is estimated within the
    published tile's estimate, and within the published time. Operators with an `error` are in no figure."""
    if target not in COLUMNS:
        raise ArgumentError(
            f"no tiles are published for {target}", code="invalid-option", hint=f"--target: {' or '.join(COLUMNS)}"
        )
    hw = hardware.load(target)
    rows = [tried(op, hw, _row) for op in operators(path)]
    judged = [row for row in rows if row["error"] is None]
    return {"target": target, "overall": _summary(judged), "classes": by_class(judged, _summary), "cases": rows}


def published_program(text: str, space: TileSpace, unit: ComputeUnit) -> RProgram:
    """`[level 0: [tile: [128, 128]; step: [32]]][level 1: ...]` → an rProgram: level 0 is a block's tile and what it
    stages of the reduced axes at once, level 1 a thread's tile; spatial axes stand in the order of the space's."""
    levels = {int(level): (_numbers(tile), _numbers(step)) for level, tile, step in _LEVEL.findall(text)}
    if not {0, 1} <= levels.keys() or any(len(levels[level][0]) != len(space.spatial) for level in (0, 1)):
        raise ArgumentError(f"no tile of {[a.name for a in space.spatial]}: {text!r}", code="unreadable-file")
    step = math.prod(levels[0][1])
    block = {a.name: n for a, n in zip(space.spatial, levels[0][0], strict=True)}
    thread = {a.name: n for a, n in zip(space.spatial, levels[1][0], strict=True)}
    block |= {a.name: min(a.extent, step) for a in space.reduced}
    return RProgram(
        space, unit, RTile(tuple((a.name, block[a.name]) for a in space.axes)),
        RTile(tuple((a.name, thread.get(a.name, 1)) for a in space.axes)),
    )  # fmt: skip


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())


def _row(op: OperatorModel, hw: HardwareSpec) -> Json:
    published: TileModel | None = getattr(op, COLUMNS[hw.id])
    if published is None:
        raise ArgumentError(f"no time is published for {hw.id}", code="unreadable-file")
    program = program_of(op)
    groups = partition(program, hw)
    if len(groups) > 1:
        raise ArgumentError(f"one tile for {len(groups)} kernels", code="unreadable-file")
    (group,) = groups
    unit = hw.unit_for(group.space.compute_dtype)
    p = prepared(group, hw, unit)
    tile = published_program(published.roller_best_config, group.space, unit)
    staged = hw.family in STAGED.get(op.kind, ())
    tile_s = artifact_seconds(p, tile)[0] if staged else Model(p).estimate(tile).seconds
    _, ranked, _ = ranked_groups(program, hw, TOP_K)
    return {
        "tile": published.roller_best_config,
        "tile_s": tile_s,
        "predicted_s": sum(candidates[0].estimate.seconds for candidates in ranked),
        "best_published_s": published.best_s,
        "roller_s": published.roller_s,
    }


def _summary(rows: Sequence[Json]) -> Json:
    pairs = [(row["tile_s"], row["roller_s"]) for row in rows]
    return {
        "cases": len(rows),
        "spearman": spearman(pairs),
        "median_abs_log_ratio": median_abs_log_ratio(pairs),
        "top10_within_estimate": share([row["predicted_s"] <= row["tile_s"] for row in rows]),
        "top10_within_published": share([row["predicted_s"] <= row["roller_s"] for row in rows]),
    }
