"""Kernels of attention over a grid of tiles → registers that NVRTC gives them beside those that the model counts.

    python -m roller_svc.bench.attention_registers --out FILE.json

No device is needed: kernels are compiled for sm_90a. The model refuses tiles for which it counts more registers than a
thread may have, and is wrong where it takes one that spills. What its constants must be is seen on tiles near that
limit: those whose count is within `--near` registers of it.

A block of several consumers is launched with fewer registers than these take over from their producer (setmaxnreg), and
the compiler's log says only how many it is launched with. Of these, spills tell.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from roller_svc import hardware
from roller_svc.compiler.lower_and_emit import generate
from roller_svc.compiler.partition_cache import partition
from roller_svc.construct.rules import MIN_MATRIX_STAGES
from roller_svc.families.common.gpu.attention import tile as attention_tile
from roller_svc.families.common.gpu.attention.shapes import GRANULE
from roller_svc.families.common.gpu.attention.tile import attended, thread_registers
from roller_svc.families.common.gpu.warpgroups.tile import MOST_CONSUMERS, ROWS
from roller_svc.families.gpu.mma_attention.rules import SPILL_SLACK, WARP_KEYS, WARP_ROWS
from roller_svc.families.gpu.wgmma_attention import cost as wgmma_attention
from roller_svc.families.gpu.wgmma_attention.workload import attention_group_tile, grouped_attention
from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import Candidate, Estimate, StageCost
from roller_svc.ir.group import AxisRole, KernelGroup
from roller_svc.ir.hardware import UnitKind
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import WARPGROUP_THREADS, RProgram, RTile
from roller_svc.toolchain import compile_source

Json = dict[str, Any]

HOPPER = hardware.load("nvidia-h200-sxm")
LENGTH = 1024  # of queries and keys: steps of some tiles divide it, of others not
FEATURES = (64, 96, 128, 192, 256)
MASKS = ("", ", causal=1")
OF_WARPS = (
    "BASE_REGISTERS", "MANY_KEYS", "KEY_REGISTERS", "ROW_REGISTERS", "FEATURE_STEP_REGISTERS", "CHUNK_COPY_REGISTERS",
    "USUAL_OPERATIONS",
)  # fmt: skip
OF_WARPGROUPS = ("BESIDE_REGISTERS", "MANY_FEATURE_STEPS", "FEATURE_STEP_REGISTERS", "USUAL_OPERATIONS")
UNKNOWN = Estimate(1.0, (StageCost("compute", 1.0),), 1.0, 1, 1.0)  # tiles by hand have none


@dataclass(frozen=True, slots=True)
class Case:
    """A program that is one kernel of attention, and its tiles. `counted`: the model's registers of a thread; `limit`:
    how many of these it takes a tile with."""

    id: str
    program: TensorProgram
    group: KernelGroup
    tiles: RProgram
    counted: int
    limit: int

    @property
    def kind(self) -> UnitKind:
        return self.tiles.unit.kind


def cases(widths: Sequence[int]) -> Iterator[Case]:
    """The grid for so many features, but for tiles that shared memory has no room for."""
    for features, mask in product(widths, MASKS):
        types = {name: TensorType(DType.FLOAT16, (1, 8, LENGTH, features)) for name in "qkv"}
        program = parse(f"o = attention(q, k, v{mask})", types)
        (group,) = partition(program, HOPPER)
        known = f"{features} features{mask}"
        for keys, consumers in product(range(GRANULE, 257, GRANULE), range(1, MOST_CONSUMERS + 1)):
            yield from _of_warpgroups(f"{known}, {keys} keys, {consumers} consumers", program, group, consumers, keys)
        for rows, keys, warps in product(WARP_ROWS, WARP_KEYS, (4, 8)):
            yield from _of_warps(f"{known}, {rows} x {keys}, {warps} warps", program, group, (rows, keys, warps))


def _of_warpgroups(name: str, program: TensorProgram, group: KernelGroup, consumers: int, keys: int) -> Iterator[Case]:
    tiles = _tiled(group, UnitKind.WGMMA, (ROWS * consumers, keys), (ROWS, keys), WARPGROUP_THREADS)
    known = grouped_attention(group, tiles.unit, HOPPER.arch)
    tile = attention_group_tile(tiles, known)
    if tile.shared_bytes <= HOPPER.limits.shared_bytes_per_block:
        counted = wgmma_attention.consumer_registers(tile, known)
        yield Case(f"wgmma: {name}", program, group, tiles, counted, tile.consumer_registers)


def _of_warps(name: str, program: TensorProgram, group: KernelGroup, warp: tuple[int, int, int]) -> Iterator[Case]:
    rows, keys, warps = warp
    tiles = _tiled(group, UnitKind.MMA, (rows * warps, keys), (rows, keys), 32)
    found = attended(group, tiles.unit, HOPPER.arch)
    tile = attention_tile.attention_tile(tiles, found)
    if tile.shared_bytes <= HOPPER.limits.shared_bytes_per_block:
        limit = HOPPER.limits.max_registers_per_thread - SPILL_SLACK
        yield Case(f"mma: {name}", program, group, tiles, thread_registers(tile, found), limit)


def _tiled(group: KernelGroup, kind: UnitKind, block: tuple[int, int], part: tuple[int, int], lanes: int) -> RProgram:
    """Rows and keys of a block and of what one warp or warpgroup of it has; all columns and features."""
    unit = next(u for u in HOPPER.units if u.kind is kind and u.in_dtype is DType.FLOAT16)

    def tile(rows: int, keys: int) -> RTile:
        extents = {AxisRole.M: rows, AxisRole.K: keys, AxisRole.BATCH: 1}
        return RTile(tuple((axis.name, extents.get(axis.role, axis.extent)) for axis in group.space.axes))

    return RProgram(group.space, unit, tile(*block), tile(*part), reduce_threads=lanes, stages=MIN_MATRIX_STAGES)


def row(case: Case) -> Json:
    """The case, compiled."""
    source = generate(Plan((Candidate(case.tiles, UNKNOWN),)), case.program, (case.group,), HOPPER)
    (took,) = compile_source(source).resources
    return {
        "id": case.id, "kind": case.kind.value, "counted": case.counted, "limit": case.limit,
        "registers": took.registers_per_thread, "spill_bytes": took.spill_bytes,
    }  # fmt: skip


def summary(rows: Sequence[Json]) -> Json:
    """`short`: by how many registers the model counts too few, for no tile that it takes to spill; not above 0 where
    none does. `refused_in_vain`: tiles that do not spill. `over`: counted beyond compiled, of those."""
    spilled = [r for r in rows if r["spill_bytes"]]
    fine = [r for r in rows if not r["spill_bytes"]]
    over = sorted(r["counted"] - r["registers"] for r in fine)
    return {
        "kernels": len(rows),
        "spilled": len(spilled),
        "taken_and_spilled": sum(r["counted"] <= r["limit"] for r in spilled),
        "refused_in_vain": sum(r["counted"] > r["limit"] for r in fine),
        "short": max((r["limit"] + 1 - r["counted"] for r in spilled), default=None),
        "over": {"least": over[0], "median": statistics.median(over), "most": over[-1]} if over else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--near", type=int, default=16, help="registers between a tile's count and the limit")
    parser.add_argument("--kind", choices=["mma", "wgmma"], help="of the matrix units; both by default")
    parser.add_argument("--features", type=int, nargs="+", default=FEATURES, help="of queries, keys and values")
    parser.add_argument("--out", type=Path, help="the JSON; by default it is printed")
    given = parser.parse_args()
    near = [
        case for case in cases(given.features)
        if abs(case.counted - case.limit) <= given.near and given.kind in (None, case.kind.value)
    ]  # fmt: skip
    rows = []
    for number, case in enumerate(near, 1):
        rows.append(row(case))
        print(f"{number} of {len(near)}: {rows[-1]}", file=sys.stderr)
    kinds = dict.fromkeys(r["kind"] for r in rows)
    report = {
        "constants": {
            "mma": {name: getattr(attention_tile, name) for name in OF_WARPS},
            "wgmma": {name: getattr(wgmma_attention, name) for name in OF_WARPGROUPS},
        },
        "summary": {kind: summary([r for r in rows if r["kind"] == kind]) for kind in kinds},
        "rows": rows,
    }
    text = json.dumps(report, indent=1) + "\n"
    if given.out is None:
        print(text, end="")
    else:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
