"""Tiles that a caller demands → rPrograms that have them, or what stands in the way and the nearest that would fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from roller_svc.errors import NoCandidateError
from roller_svc.families.common.gpu.attention.mask import KeyBounds, key_bounds
from roller_svc.families.common.gpu.matrix.stream_k import stream
from roller_svc.families.common.gpu.matrix.terms import LEAST_STAGES
from roller_svc.families.gpu.wgmma_contraction.cost import wgmma_block, wgmma_feeds_of
from roller_svc.fusion.contraction import MIN_K
from roller_svc.fusion.split.reduction import may_split, piece_length
from roller_svc.ir.constraints import Demands
from roller_svc.ir.group import AxisRole, KernelGroup
from roller_svc.ir.hardware import HardwareSpec, UnitKind
from roller_svc.ir.rprogram import RProgram
from roller_svc.perf.model import Model
from roller_svc.perf.occupancy import BlockNeeds, block_registers

Tiles = tuple[tuple[str, int], ...]
MOST_CLUSTER = 8  # blocks that run together on every device that has clusters (CUDA Programming Guide)


@dataclass(frozen=True, slots=True)
class Nearest:
    """The value of a field that is nearest to the one wanted, and why it is not that one; '' where it is."""

    value: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Demanded:
    """rPrograms with all that is demanded; where there are none, the nearest to it and the reasons that it has."""

    programs: tuple[RProgram, ...]
    nearest: RProgram | None = None
    reasons: tuple[str, ...] = ()


def demanded(group: KernelGroup, model: Model, programs: Sequence[RProgram], demands: Demands) -> Demanded:
    """Those of the rPrograms that have the tiles; where none has, those that can be given them."""
    tiles = demands.tiles
    if not tiles:
        return Demanded(tuple(programs))
    found = tuple(program for program in programs if demands.admits(program))
    if found or not programs:
        return Demanded(found)
    tried = [_given(group, model, program, dict(tiles)) for program in programs]
    if met := tuple(program for program, reasons in tried if not reasons):
        return Demanded(tuple(dict.fromkeys(met)))
    nearest, reasons = min(tried, key=lambda t: _distance(t[0], tiles))
    return Demanded((), nearest, reasons)


def unmet(group: KernelGroup, tiles: Tiles, found: Iterable[Demanded]) -> NoCandidateError:
    """Of several units' nearest rPrograms the nearest."""
    tried = [(d.nearest, d.reasons) for d in found if d.nearest is not None]
    nearest, reasons = min(tried, key=lambda t: _distance(t[0], tiles))
    wanted = ", ".join(f"{field} = {value}" for field, value in tiles)
    fits = ", ".join(f"{field} = {getattr(nearest, field)}" for field, _ in tiles)
    return NoCandidateError(
        f"no tiles of {group.name} have {wanted}: {'; '.join(reasons)}",
        rejections={"demanded tiles": 1},
        hint=f"the nearest that fits: {fits}, with {tile_text(nearest)} on {nearest.unit.name}",
    )


def tile_text(program: RProgram) -> str:
    """A block's tile: 'm=64 n=64 k=32'."""
    return " ".join(f"{name}={extent}" for name, extent in program.block.extents)


def overruns(needs: BlockNeeds, hw: HardwareSpec) -> tuple[str, ...]:
    """The limits that a block is over, and by how much."""
    limits = hw.limits
    registers = block_registers(needs.threads, needs.registers_per_thread, limits)
    bounds = (
        ("threads in a block", needs.threads, limits.max_threads_per_block),
        ("registers in a thread", needs.registers_per_thread, limits.max_registers_per_thread),
        ("registers in a block", registers, limits.registers_per_core),
        ("bytes of shared memory in a block", needs.shared_bytes, limits.shared_bytes_per_block),
    )
    return tuple(
        f"{needed:,} {name} where {hw.id} has {most:,}, {needed - most:,} too many"
        for name, needed, most in bounds if needed > most
    )  # fmt: skip


def _distance(program: RProgram, tiles: Tiles) -> float:
    """How far its fields are from what is wanted of them, each as a share of that."""
    return math.fsum(abs(getattr(program, field) - value) / max(1, value) for field, value in tiles)


def _given(
    group: KernelGroup, model: Model, program: RProgram, tiles: dict[str, int]
) -> tuple[RProgram, tuple[str, ...]]:
    """The rProgram with each field as near to what is wanted as may be, and why one is not that."""
    reasons = [
        f"{field} is {getattr(program, field)} here"
        for field, value in tiles.items() if field not in _FORCED and getattr(program, field) != value
    ]  # fmt: skip
    # what excludes each other gives way where it is not wanted itself
    if tiles.get("stream_k"):
        program = replace(program, split_k=1, raster=1, blocks=0, cluster=(1, 1))
    elif tiles.get("split_k", 1) > 1 or any(tiles.get(f, 0) > 1 for f in ("blocks", "cluster_m", "cluster_n")):
        program = replace(program, stream_k=0)
    if any(tiles.get(f, 0) > 1 for f in ("cluster_m", "cluster_n")):
        program = replace(program, cluster=(1, 1))
    for field, (search, given) in _FORCED.items():
        if field in tiles:
            near = search(group, model, program, tiles[field])
            program = given(program, near.value)
            if near.reason:
                reasons.append(near.reason)
    return program, tuple(reasons)


_Search = Callable[[KernelGroup, Model, RProgram, int], Nearest]


def _nearest_split(group: KernelGroup, model: Model, program: RProgram, wanted: int) -> Nearest:
    if wanted < 1:
        return Nearest(1, "a reduction has at least 1 part")
    if wanted == 1:
        return Nearest(1)
    if group.attention is not None and program.unit.kind is UnitKind.WGMMA:
        return Nearest(1, "blocks of warpgroups do not share keys")
    if group.attention is not None:
        (keys,) = program.space.role(AxisRole.K)
        steps = -(-keys.extent // program.block[keys.name])
        parts = next(n for n in range(min(wanted, steps), 0, -1) if (n - 1) * -(-steps // n) < steps)
        return Nearest(parts, "" if parts == wanted else f"{tile_text(program)} makes {steps} steps over the keys")
    if not may_split(group):
        return Nearest(1, "a reduction that others follow cannot be split")
    longest = max(m.extent for axis in program.space.reduced for m in axis.members)
    parts = next(n for n in range(min(wanted, longest), 0, -1) if n == 1 or _parts_have_work(program, n, longest))
    if parts == wanted:
        return Nearest(wanted)
    return Nearest(parts, f"{wanted} parts of {longest} in steps as of {tile_text(program)} are too short")


def _parts_have_work(program: RProgram, parts: int, longest: int) -> bool:
    """Whether none is empty, and those of a contraction are contractions."""
    space = program.space
    length = piece_length(space, program.unit, program.block.as_dict(), parts)
    if (parts - 1) * length >= longest:
        return False
    return not space.role(AxisRole.K) or space.role(AxisRole.K)[0].extent // longest * length >= MIN_K


def _nearest_stream(group: KernelGroup, model: Model, program: RProgram, wanted: int) -> Nearest:
    if wanted == 0:
        return Nearest(0)
    if not program.unit.is_matrix:
        return Nearest(0, f"{program.unit.name} has no stream-K")
    if group.attention is not None:
        return Nearest(0, "attention has no stream-K")
    if program.split_k > 1:
        return Nearest(0, "a reduction is split evenly or streamed, not both")
    if group.is_paired:
        return Nearest(0, "two sums of a point are not streamed")
    if group.row_reduction is not None:
        return Nearest(0, "a block that has part of the sums cannot reduce their rows")
    work = stream(replace(program, stream_k=1))
    steps = work.tiles * work.steps
    if wanted <= steps:
        return Nearest(wanted)
    return Nearest(steps, f"tiles of {tile_text(program)} make {steps} steps, one for each of as many blocks")


def _nearest_stages(group: KernelGroup, model: Model, program: RProgram, wanted: int) -> Nearest:
    p = model.problem
    if not (p.is_contraction and p.machine.simt):
        return Nearest(program.stages, "" if program.stages == wanted else f"stages is {program.stages} here")
    is_matrix = program.unit.is_matrix
    least = LEAST_STAGES if is_matrix else 1
    if wanted < least:
        return Nearest(least, f"a pipeline on {program.unit.name} has at least {least} stages")
    most = wanted if is_matrix else min(wanted, program.steps)
    fitting = least
    while fitting < most and not _over(model, replace(program, stages=fitting + 1)):
        fitting += 1
    if fitting < most:
        over = " and ".join(_over(model, replace(program, stages=most)))
        return Nearest(fitting, f"{most} stages of {tile_text(program)} take {over}")
    return Nearest(most, "" if most == wanted else f"{tile_text(program)} makes {program.steps} steps to stage")


def _over(model: Model, program: RProgram) -> tuple[str, ...]:
    needs = model.needs(program)
    return overruns(needs, model.problem.machine.hw) if needs is not None else ()


def _nearest_raster(group: KernelGroup, model: Model, program: RProgram, wanted: int) -> Nearest:
    if wanted == 1:
        return Nearest(1)
    if group.attention is not None:
        return Nearest(1, "blocks of attention come in one order")
    if program.stream_k:
        return Nearest(1, "streamed tiles come in their own order")
    if not (model.problem.is_contraction and model.problem.machine.simt):
        return Nearest(1, "only tiles of a contraction on a GPU come in another order")
    (m,) = program.space.role(AxisRole.M)
    rows = -(-m.extent // program.block[m.name])
    together = program.cluster_m
    if 1 <= wanted <= rows and wanted % together == 0:
        return Nearest(wanted)
    near = max(1, min(rows, wanted) // together * together)
    return Nearest(near, f"blocks of {tile_text(program)} make {rows} rows, {together} of them in a cluster")


def _nearest_cluster(side: int) -> _Search:
    """Of blocks along m (side 0) or n."""

    def search(group: KernelGroup, model: Model, program: RProgram, wanted: int) -> Nearest:
        if wanted == 1:
            return Nearest(1)
        if program.unit.kind is not UnitKind.WGMMA:
            return Nearest(1, f"{program.unit.name} has no clusters")
        if group.attention is not None:
            return Nearest(1, "blocks of attention form no clusters")
        if program.stream_k:
            return Nearest(1, "blocks that stream steps form no clusters")
        reason = _cluster_refusal(model, program, side, wanted)
        if not reason:
            return Nearest(wanted)
        halves = (n for n in (1 << i for i in range(wanted.bit_length() - 1, 0, -1)) if n < wanted)
        return Nearest(next((n for n in halves if not _cluster_refusal(model, program, side, n)), 1), reason)

    return search


def _cluster_refusal(model: Model, program: RProgram, side: int, wanted: int) -> str:
    """Why so many blocks along one side cannot form a cluster with those along the other."""
    other = program.cluster[1 - side]
    if wanted < 1 or wanted * other > MOST_CLUSTER:
        return f"a cluster has 1 to {MOST_CLUSTER} blocks"
    (axis,) = program.space.role((AxisRole.M, AxisRole.N)[side])
    tiles = -(-axis.extent // program.block[axis.name])
    if tiles % wanted:
        return f"{tiles} tiles of {tile_text(program)} along {axis.name} are no whole clusters of {wanted}"
    p = model.problem
    known = wgmma_block(p, p.touched.tile(program.block), p.touched.tile(program.thread))
    shared = (known.tile.b, known.tile.a)[side]
    if not wgmma_feeds_of(p).shares(1 - side, shared, wanted):
        return f"tiles of {'ba'[side]} of {tile_text(program)} do not come in {wanted} parts by TMA"
    return ""


def _nearest_blocks(group: KernelGroup, model: Model, program: RProgram, wanted: int) -> Nearest:
    if wanted == 0:
        return Nearest(0)
    if program.unit.kind is not UnitKind.WGMMA:
        return Nearest(0, f"{program.unit.name} has a block for each tile")
    if group.attention is not None and key_bounds(group) != KeyBounds():
        return Nearest(0, "under a mask each tile of attention has a block")
    if program.stream_k:
        return Nearest(0, "blocks that stream steps walk no whole tiles")
    size = program.cluster_size
    near = max(1, min(wanted, program.grid) // size) * size
    reason = f"{program.grid} tiles of {tile_text(program)} take at most as many, in whole clusters of {size} blocks"
    return Nearest(near, "" if near == wanted else reason)


def _clustered(program: RProgram, cluster: tuple[int, int]) -> RProgram:
    """Its blocks in whole clusters, its rows of tiles too."""
    size = math.prod(cluster)
    blocks = max(1, program.blocks // size) * size if program.blocks else 0
    rows = program.raster if program.raster == 1 else -(-program.raster // cluster[0]) * cluster[0]
    return replace(program, cluster=cluster, blocks=blocks, raster=rows)


# What may be set on an rProgram that construction did not give it, in the order in which one bounds the next.
_FORCED: dict[str, tuple[_Search, Callable[[RProgram, int], RProgram]]] = {
    "split_k": (_nearest_split, lambda program, value: replace(program, split_k=value)),
    "stream_k": (_nearest_stream, lambda program, value: replace(program, stream_k=value)),
    "stages": (_nearest_stages, lambda program, value: replace(program, stages=value)),
    "cluster_m": (_nearest_cluster(0), lambda program, value: _clustered(program, (value, program.cluster_n))),
    "cluster_n": (_nearest_cluster(1), lambda program, value: _clustered(program, (program.cluster_m, value))),
    "blocks": (_nearest_blocks, lambda program, value: replace(program, blocks=value)),
    "raster": (_nearest_raster, lambda program, value: replace(program, raster=value)),
}
