"""Compare the registers of attention kernels as compiled by NVRTC with the model's count, over a grid of tiles.

    python -m roller_bench.attention_registers --out FILE.json

No device is needed: kernels are compiled for sm_90a. The model rejects tiles that it expects to exceed the registers of
a thread; it is wrong if an accepted tile spills. Tiles whose count is within `--near` registers of the limit show
whether its constants are right.

A block of several consumer warpgroups raises their registers with setmaxnreg after the launch, and the compiler's log
has only the count at launch. For these kernels only spills are compared.
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
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import partition
from roller_svc.construct.rules import MIN_MATRIX_STAGES
from roller_svc.families.common.gpu.attention import tile as attention_tile
from roller_svc.families.common.gpu.attention.shapes import INSTRUCTION_GRANULE
from roller_svc.families.common.gpu.attention.tile import prepare_attention_operands, thread_registers
from roller_svc.families.common.gpu.warpgroups.tile import MAX_CONSUMERS, ROWS
from roller_svc.families.gpu.mma_attention.rules import SPILL_SLACK, WARP_KEYS, WARP_ROWS
from roller_svc.families.gpu.wgmma_attention import cost as wgmma_attention
from roller_svc.families.gpu.wgmma_attention.workload import wgmma_attention_facts, wgmma_attention_tile
from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import Candidate, Estimate, StageCost
from roller_svc.ir.group import AxisRole, KernelGroup
from roller_svc.ir.hardware import UnitKind
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import WARPGROUP_THREADS, PipelineOptions, RProgram, RTile
from roller_svc.toolchain import compile_source

Json = dict[str, Any]

HOPPER = hardware.load("nvidia-h200-sxm")
LENGTH = 1024  # of queries and keys: a multiple of some tile extents and not of others
FEATURES = (64, 96, 128, 192, 256)
MASKS = ("", ", causal=1")
WARP_CONSTANTS = (
    "BASE_REGISTERS", "MAX_FREE_KV_FRAGMENTS", "KV_REGISTERS", "ROW_REGISTERS", "HEAD_DIM_STEP_REGISTERS",
    "CHUNK_COPY_REGISTERS", "FREE_SCORE_OPERATIONS",
)  # fmt: skip
WARPGROUP_CONSTANTS = (
    "OVERHEAD_REGISTERS", "FREE_HEAD_DIM_STEPS", "HEAD_DIM_STEP_REGISTERS", "FREE_SCORE_OPERATIONS",
)  # fmt: skip
UNKNOWN = Estimate(1.0, (StageCost("compute", 1.0),), 1.0, 1, 1.0)  # hand-chosen tiles have no estimate


@dataclass(frozen=True, slots=True)
class Case:
    """A program that is one attention kernel, and its tiles."""

    id: str
    program: TensorProgram
    group: KernelGroup
    tiles: RProgram
    counted: int  # registers per thread by the model
    limit: int  # the largest count that the model accepts

    @property
    def kind(self) -> UnitKind:
        return self.tiles.unit.kind


def cases(widths: Sequence[int]) -> Iterator[Case]:
    """Yield the grid for these head dimensions, without tiles that exceed shared memory."""
    for features, mask in product(widths, MASKS):
        types = {name: TensorType(DType.FLOAT16, (1, 8, LENGTH, features)) for name in "qkv"}
        program = parse(f"o = attention(q, k, v{mask})", types)
        (group,) = partition(program, HOPPER)
        operands = f"{features} features{mask}"
        for keys, consumers in product(range(INSTRUCTION_GRANULE, 257, INSTRUCTION_GRANULE), range(1, MAX_CONSUMERS + 1)):
            yield from _warpgroup_case(f"{operands}, {keys} keys, {consumers} consumers", program, group, consumers, keys)
        for rows, keys, warps in product(WARP_ROWS, WARP_KEYS, (4, 8)):
            yield from _warp_case(f"{operands}, {rows} x {keys}, {warps} warps", program, group, (rows, keys, warps))


def _warpgroup_case(name: str, program: TensorProgram, group: KernelGroup, consumers: int, keys: int) -> Iterator[Case]:
    tiles = _tiled(group, UnitKind.WGMMA, (ROWS * consumers, keys), (ROWS, keys), WARPGROUP_THREADS)
    operands = wgmma_attention_facts(group, tiles.unit, HOPPER.arch)
    tile = wgmma_attention_tile(tiles, operands)
    if tile.shared_bytes <= HOPPER.limits.shared_bytes_per_block:
        counted = wgmma_attention.consumer_registers(tile, operands)
        yield Case(f"wgmma: {name}", program, group, tiles, counted, tile.consumer_registers)


def _warp_case(name: str, program: TensorProgram, group: KernelGroup, warp: tuple[int, int, int]) -> Iterator[Case]:
    rows, keys, warps = warp
    tiles = _tiled(group, UnitKind.MMA, (rows * warps, keys), (rows, keys), 32)
    operands = prepare_attention_operands(group, tiles.unit, HOPPER.arch)
    tile = attention_tile.mma_attention_tile(tiles, operands)
    if tile.shared_bytes <= HOPPER.limits.shared_bytes_per_block:
        limit = HOPPER.limits.max_registers_per_thread - SPILL_SLACK
        yield Case(f"mma: {name}", program, group, tiles, thread_registers(tile, operands), limit)


def _tiled(group: KernelGroup, kind: UnitKind, block: tuple[int, int], part: tuple[int, int], reduce_threads: int) -> RProgram:
    """Return an rProgram with these (rows, keys) of a block and of one warp or warpgroup."""
    unit = next(u for u in HOPPER.units if u.kind is kind and u.in_dtype is DType.FLOAT16)

    def tile(rows: int, keys: int) -> RTile:
        extents = {AxisRole.M: rows, AxisRole.K: keys, AxisRole.BATCH: 1}
        return RTile(tuple((axis.name, extents.get(axis.role, axis.extent)) for axis in group.space.axes))

    return RProgram(
        group.space,
        unit,
        tile(*block),
        tile(*part),
        reduce_threads=reduce_threads,
        pipeline=PipelineOptions(MIN_MATRIX_STAGES),
    )


def row(case: Case) -> Json:
    """Compile a case; return its row."""
    source = emit_plan(Plan((Candidate(case.tiles, UNKNOWN),)), case.program, (case.group,), HOPPER)
    (resources,) = compile_source(source).resources
    return {
        "id": case.id,
        "kind": case.kind.value,
        "counted": case.counted,
        "limit": case.limit,
        "registers": resources.registers_per_thread,
        "spill_bytes": resources.spill_bytes,
    }


def summary(rows: Sequence[Json]) -> Json:
    """Summarize the rows of one kind.

    `short`: the registers by which the model undercounts; at most 0 if no accepted tile spills. `refused_in_vain`:
    rejected tiles that do not spill. `over`: the model's count minus the compiled count for tiles that do not spill.
    """
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
    parser.add_argument(
        "--near",
        type=int,
        default=16,
        help="compile tiles within this many registers of the limit (default: %(default)s)",
    )
    parser.add_argument("--kind", choices=["mma", "wgmma"], help="tensor-core instruction (default: both)")
    parser.add_argument("--features", type=int, nargs="+", default=FEATURES, help="head dimensions")
    parser.add_argument("--out", type=Path, help="output file (default: stdout)")
    options = parser.parse_args()
    near = [
        case
        for case in cases(options.features)
        if abs(case.counted - case.limit) <= options.near and options.kind in (None, case.kind.value)
    ]
    rows = []
    for number, case in enumerate(near, 1):
        rows.append(row(case))
        print(f"{number} of {len(near)}: {rows[-1]}", file=sys.stderr)
    kinds = dict.fromkeys(r["kind"] for r in rows)
    report = {
        "constants": {
            "mma": {name: getattr(attention_tile, name) for name in WARP_CONSTANTS},
            "wgmma": {name: getattr(wgmma_attention, name) for name in WARPGROUP_CONSTANTS},
        },
        "summary": {kind: summary([r for r in rows if r["kind"] == kind]) for kind in kinds},
        "rows": rows,
    }
    text = json.dumps(report, indent=1) + "\n"
    if options.out is None:
        print(text, end="")
    else:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
