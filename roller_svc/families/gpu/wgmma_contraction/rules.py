"""ROLLER's rules for GEMM on warpgroups: tiles of warpgroups and blocks, pipelines, clusters; and the prefilter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from roller_svc.construct.align import round_up
from roller_svc.construct.rules import (
    MIN_MATRIX_STAGES,
    Shape,
    ThreadTile,
    axis_steps,
    check_grid,
    extent_on,
    replaced,
    spatial_grid,
    subsample,
)
from roller_svc.construct.scale_up import ScaleUpLevel, ScaleUpResult
from roller_svc.families.common.gpu.matrix.prefilter import TilePrefilter
from roller_svc.families.common.gpu.matrix.terms import (
    IMPERFECT_OVERLAP,
    accumulator_columns,
    split_k_reduction_cycles,
)
from roller_svc.families.common.gpu.matrix.tile import WORD_BYTES
from roller_svc.families.common.gpu.matrix.wave_quantization import (
    MIN_WAVES,
    block_extents,
    choose_raster,
    has_wave_quantization,
    instruction_multiples,
    stream_k_choices,
)
from roller_svc.families.common.gpu.warpgroups.terms import (
    BOX_LATENCY_CYCLES,
    CLUSTER_PARTS,
    LONE_WARP_SLOT_CYCLES,
    buffered_cycles,
    cluster_cores,
    cluster_parts,
    cluster_reduction_cycles,
)
from roller_svc.families.common.gpu.warpgroups.tile import (
    CONSUMER_REGISTERS,
    MAX_COLUMNS,
    MAX_CONSUMERS,
    ROWS,
    SWIZZLE_ATOMS,
    THREAD_REGISTERS,
    TRANSPOSABLE_BYTES,
    WgmmaBlock,
)
from roller_svc.families.gpu.wgmma_contraction.cost import (
    UNLIMITED,
    prefetch_stages,
    shared_step,
    wgmma_block,
)
from roller_svc.families.gpu.wgmma_contraction.workload import WgmmaFacts
from roller_svc.ir.rprogram import WARPGROUP_THREADS, PipelineOptions
from roller_svc.ir.search import BrokenRule, TileMetrics, check_limit
from roller_svc.perf.footprint import Tile
from roller_svc.perf.machine import SCHEDULERS
from roller_svc.perf.occupancy import blocks_per_core
from roller_svc.perf.workload import Workload


def approx_cycles(p: Workload[WgmmaFacts], block: Tile, base: ThreadTile, split_k: int) -> float:
    """Estimate the cycles of the core with the most blocks, for the prefilter."""
    mach = p.machine
    known = wgmma_block(p, block, base.tile)
    tile, step = known.tile, known.step
    tasks = spatial_grid(p, block) * split_k
    rounds = -(-tasks // mach.cores)
    together = min(rounds, blocks_per_core(known.resources, mach.hw))
    # each block of a cluster of two loads half of a shared operand, the larger one if possible
    requested_bytes = sum(known.requested_bytes) - max(known.requested_bytes) / 2
    loads = max(step.port, requested_bytes / mach.llc_bytes_per_cycle * min(1.0, tasks / mach.cores))
    each = max(step.mma, step.shared, step.issue, loads, step.chain / together)
    steps = -(-tile.k_order.steps // split_k)
    filling = (step.latency + BOX_LATENCY_CYCLES) / rounds
    through, (_, issued) = buffered_cycles(p, tile), epilogue_cycles(p, tile.m * tile.columns)
    edges = filling + through + issued
    floor = p.lower_bound_s * mach.clock_hz  # memory-bound tiles differ in prologue, epilogue and reduction
    whole = max(floor, rounds * steps * each) + rounds * edges
    if split_k == 1 and tasks > mach.cores and pingpong_block(p, known) is not None and p.space.k_bounds is None:
        rounds = -(-tasks // mach.cores)
        mainloop = steps * max(step.mma, step.shared, step.issue, loads, step.chain)
        alone = through + LONE_WARP_SLOT_CYCLES * issued
        period = max(mainloop, (mainloop + alone) / 2, steps * step.shared + through) + IMPERFECT_OVERLAP * alone
        return min(whole, max(floor, rounds * period) + step.latency + BOX_LATENCY_CYCLES + alone)
    if split_k > 1:
        return whole + split_k_reduction_cycles(p, split_k * p.outer_points)
    if not p.space.can_stream_k:
        return whole
    if (parts := cluster_parts(mach.cores, tasks, steps)) > 1:
        loads = max(step.port, requested_bytes / mach.llc_bytes_per_cycle * min(1.0, tasks * parts / mach.cores))
        part = -(-steps // parts) * max(step.mma, step.shared, step.issue, loads, step.chain)
        whole = min(whole, max(floor, part) + edges + cluster_reduction_cycles(p, tile, parts))
    if not stream_k_choices(tasks, steps, mach.cores):
        return whole
    joins = split_k_reduction_cycles(p, 2 * mach.cores * tile.m * tile.n)
    return min(whole, max(floor, tasks * steps / mach.cores * each) + edges + joins)


def epilogue_cycles(p: Workload[WgmmaFacts], points: int) -> tuple[float, float]:
    """Return cycles of `points` outputs: accumulators through shared memory, and instructions of the epilogue."""
    mach = p.machine
    through = 2 * points * p.space.num_accumulators * WORD_BYTES / mach.staged_bytes_per_cycle
    return through, points * p.facts.epilogue_slots / (mach.hw.limits.warp_size * SCHEDULERS)


def has_heavy_epilogue(p: Workload[WgmmaFacts]) -> bool:
    """Return whether epilogues take so long that a ping-pong schedule may pay."""
    through, issued = epilogue_cycles(p, 1)
    mainloop = p.inner_points * p.space.num_accumulators / p.machine.fma_per_cycle
    return through + issued >= MIN_EPILOGUE_FRACTION * mainloop


def pingpong_block(p: Workload[WgmmaFacts], known: WgmmaBlock) -> WgmmaBlock | None:
    """Return a tile of one consumer as two consumers take it in turn; None where it does not fit or pay."""
    if known.tile.tile_consumers > 1 or not has_heavy_epilogue(p):
        return None
    tile = known.tile.as_pingpong
    needs = tile.resources
    exceeded = tile.accumulator_registers + CONSUMER_REGISTERS > tile.consumer_registers
    if exceeded or needs.shared_bytes > p.machine.hw.limits.shared_bytes_per_block:
        return None
    return known._replace(tile=tile, resources=needs)


# Rows and columns of accumulators of tiles under ping-pong: the largest that fit in one consumer's registers, and some
# with wider swizzled rows or less padding.
PINGPONG_TILES = ((128, 176), (128, 160), (128, 128), (64, 256), (64, 192))
MIN_EPILOGUE_FRACTION = 0.1  # epilogue time over mainloop time from which ping-pong is estimated
MAX_FRAGMENTS = 2  # of a warpgroup along m: B is reread for each, so that more save no shared-memory reads
MAX_BASES = 12
PAIRS = ((2, 1), (1, 2))  # clusters; larger ones do not fill all SMs of a GPC, and share little more
QUAD = (2, 2)  # of a single wave
# LLC time over a tile's own time from which multicast is estimated. Assumed: below it the LLC does not limit, even at
# 1.4 times the modelled time, and the blocks of a cluster wait for each other.
MIN_SHARED_LOAD_FRACTION = 0.7
MAX_STAGES = 8  # deeper pipelines hold more than a memory round trip delivers


@dataclass(frozen=True)
class WgmmaContractionRules(TilePrefilter):
    """Rules of a wgmma GEMM. `varied`: k-tiles of every length, for constraints of a caller."""

    workload: Workload[WgmmaFacts]
    varied: bool = False

    @property
    def points(self) -> int:
        """Points to which the traffic of a tile refers: multiply-adds."""
        return self.workload.outer_points * self.workload.inner_points

    def reduce_thread_choices(self) -> tuple[int, ...]:
        return (WARPGROUP_THREADS,)

    def thread_level(self, lanes: int) -> ScaleUpLevel:
        """Scale up a warpgroup's tile: one instruction's columns, one or two of its rows."""
        p = self.workload
        granule = self._column_granule()
        steps = axis_steps(
            p,
            {
                p.m: instruction_multiples(p.extent(p.m), ROWS, MAX_FRAGMENTS),
                p.n: instruction_multiples(p.extent(p.n), granule, MAX_COLUMNS // (granule * p.space.num_accumulators)),
            },
        )
        return ScaleUpLevel(
            level=p.machine.hw.thread_level.name,
            points=self.points,
            steps=steps,
            axis_rank=tuple(range(len(steps))),
            evaluate=self._evaluate_warpgroup,
            is_saturated=self._feeds_the_unit,
            capacity_bytes=(THREAD_REGISTERS - CONSUMER_REGISTERS) * WARPGROUP_THREADS * WORD_BYTES,
        )

    def rank_thread_tiles(self, grown: ScaleUpResult, lanes: int) -> Sequence[Tile]:
        """Return tiles from the largest down to one size below that which fills the device several times."""
        p = self.workload
        by_size: dict[int, list[Tile]] = {}
        for tile in [*grown.saturated, *grown.border]:  # from the least traffic up
            by_size.setdefault((extent_on(tile, p.m) * extent_on(tile, p.n)).bit_length(), []).append(tile)
        chosen: list[Tile] = []
        filled = 0
        for size in sorted(by_size, reverse=True):
            chosen += by_size[size]
            filled += p.outer_points >= MIN_WAVES * p.machine.cores << size
            if filled > 1:
                break
        return subsample(chosen, MAX_BASES)

    def block_level(self, base: ThreadTile, epsilon: float) -> ScaleUpLevel:
        p = self.workload
        axes = block_extents(p, base, epsilon, MAX_CONSUMERS) | {p.k: self._k_steps}
        return ScaleUpLevel(
            level=p.machine.hw.block_level.name,
            points=self.points,
            steps=axis_steps(p, axes),
            axis_rank=tuple(range(len(p.extents))),
            evaluate=lambda block: self.evaluate(block, base),
            is_saturated=lambda block: self._covers_its_loads(block, base),
            capacity_bytes=p.machine.hw.limits.shared_bytes_per_block,
        )

    def evaluate(self, block: Tile, base: ThreadTile) -> TileMetrics:
        """Return bytes with the fewest stages, bytes loaded per multiply-add, and broken rules."""
        p = self.workload
        (m, n, _), (group_m, group_n, _) = p.mnk(block), p.mnk(base.tile)
        broken = self._check_instruction(group_m, group_n)
        broken = broken or check_limit("warpgroups per block", m // group_m * (n // group_n), MAX_CONSUMERS)
        if broken is not None:
            return TileMetrics(p.footprint.bytes(block), 0.0, broken)
        known = wgmma_block(p, block, base.tile)
        traffic = sum(known.requested_bytes) / (known.tile.m * known.tile.n * known.tile.k)
        return TileMetrics(known.resources.shared_bytes, traffic, self._capacity_rule(block, known))

    def pipeline_choices(self, block: Tile, base: ThreadTile, split_k: int) -> Sequence[PipelineOptions]:
        """Return pipelines with the stages that hide load latency, and the most blocks per SM that still fit.

        Blocks are persistent where there are more tiles than SMs. Clusters of two are added where multicast pays.
        """
        p, cores = self.workload, self.workload.machine.cores
        if split_k > 1 and p.space.transposed:
            return []  # launches of a split reduction have groups of their own
        known = wgmma_block(p, block, base.tile)
        if split_k > 1:
            known = known._replace(tile=known.tile.as_partial, resources=known.tile.as_partial.resources)
        tasks = spatial_grid(p, block) * split_k
        steps = -(-known.tile.k_order.steps // split_k)
        if p.space.k_bounds is not None:  # each tile has a k range of its own
            resident, stages = self._ring(known, -(-tasks // cores), steps)
            return [PipelineOptions(stages, self._raster(block, resident * cores, (1, 1)))]
        resident, stages = self._ring(known, -(-tasks // cores), steps)
        at_once = resident * cores
        if stages == steps and tasks > at_once:
            _, stages = self._ring(known, resident, MAX_STAGES)  # the pipeline continues across tiles
        found = []
        clusters = ((1, 1), *self._clusters(block, known))
        splits: tuple[PipelineOptions, ...] = ()
        if split_k == p.space.num_accumulators == 1:
            splits = tuple(self._cluster_splits(block, known, clusters))
        # where blocks may split k, whole tiles leave half of the SMs idle, so that multicast gains them nothing
        for cluster in clusters[:1] if splits else clusters:
            size = math.prod(cluster)
            if size > 2 and split_k > 1:
                continue  # not a single wave
            # blocks that stay: each core's first loads and last results then stand alone, and rings fill in between
            blocks = at_once // size * size if tasks > at_once else 0
            found.append(PipelineOptions(stages, self._raster(block, at_once, cluster), persistent_blocks=blocks, cluster=cluster))
        if split_k == 1 and tasks > cores:
            found += self._pingpong_choices(block, known)
        if split_k == p.space.num_accumulators == 1 and known.tile.k_order.steps == -(-p.extent(p.k) // extent_on(block, p.k)):
            found += [PipelineOptions(stages, 1, blocks) for blocks in stream_k_choices(tasks, steps, at_once)]
        return [*found, *splits]

    def fallback_tiles(self) -> Sequence[tuple[Tile, ThreadTile]]:
        """One warpgroup with the narrowest instruction, in the shortest steps."""
        p = self.workload
        one = tuple([1] * len(p.extents))
        group = replaced(replaced(one, p.m, ROWS), p.n, self._column_granule())
        base = ThreadTile(group, *self.reduce_thread_choices())
        return [(replaced(group, p.k, self._k_steps[0]), base)]

    def prefilter(self, shapes: Sequence[Shape], count: int) -> list[Shape]:
        """Choose among the tiles of scale-up and those that only a ping-pong schedule makes fast."""
        return TilePrefilter.prefilter(self, [*shapes, *self._pingpong_shapes(shapes)], count)

    def approx_cycles(self, block: Tile, base: ThreadTile, split_k: int) -> float:
        return approx_cycles(self.workload, block, base, split_k)

    def split_waves(self) -> Sequence[int]:
        """Return the tiles of a wave of clusters that split k."""
        p = self.workload
        if p.space.num_accumulators > 1:
            return ()
        return tuple(cluster_cores(p.machine.cores, parts) // parts for parts in CLUSTER_PARTS)

    def granules(self) -> tuple[int, int]:
        """Return the granules of a warpgroup's tile along m and n."""
        return ROWS, self._column_granule()

    # register level ---------------------------------------------------------------------------------------------
    def _evaluate_warpgroup(self, group: Tile) -> TileMetrics:
        """Bytes of sums; bytes read from shared memory for one multiply-add: an instruction reads 64 rows of A."""
        p = self.workload
        m, n = extent_on(group, p.m), accumulator_columns(p, group)
        sums = m * n // WARPGROUP_THREADS * (2 if p.facts.loads.promotes_accumulators else 1)
        rule = check_limit("registers per thread", sums + CONSUMER_REGISTERS, THREAD_REGISTERS)
        size = self._operand_bytes()
        return TileMetrics(m * n * WORD_BYTES, size / ROWS + size / n, rule)

    def _feeds_the_unit(self, group: Tile) -> bool:
        """Multiply-adds take as long as reading their operands."""
        p, mach = self.workload, self.workload.machine
        n = accumulator_columns(p, group)
        return ROWS * n / mach.fma_per_cycle >= (ROWS + n) * self._operand_bytes() / mach.staged_bytes_per_cycle

    # block level ------------------------------------------------------------------------------------------------
    @cached_property
    def _k_steps(self) -> Tile:
        """Lengths of a k-tile: 128 bytes, the widest swizzle, or the shortest swizzle that holds all of k.

        Shorter ones are added where they pad k less (whole rows of channels), and for `varied` tiles.
        """
        p, size = self.workload, self._operand_bytes()
        lengths = [atom // size for atom in reversed(SWIZZLE_ATOMS)]
        feeds = p.facts.loads
        if (runs := feeds.scale_runs) is not None:
            lengths = [depth for depth in lengths if feeds.k_order(depth).stays_within(runs.k)] or lengths[:1]
        padded = {depth: feeds.k_order(depth).steps * depth for depth in lengths}
        longest = next((depth for depth in lengths if depth >= p.extent(p.k)), lengths[-1])
        shorter = [d for d in lengths if d < longest and (self.varied or padded[d] < padded[longest])]
        return (*shorter, longest)

    def _check_instruction(self, group_m: int, group_n: int) -> BrokenRule | None:
        """Return the broken rule where a warpgroup's tile is not one of whole instructions."""
        columns = group_n * self.workload.space.num_accumulators
        return (
            check_limit("execution unit", round_up(group_m, ROWS), group_m)
            or check_limit("execution unit", round_up(group_n, self._column_granule()), group_n)
            or check_limit("execution unit", group_m, MAX_FRAGMENTS * ROWS)
            or check_limit("execution unit", columns, MAX_COLUMNS)
        )

    def _capacity_rule(self, block: Tile, known: WgmmaBlock) -> BrokenRule | None:
        p, tile, limits = self.workload, known.tile, self.workload.machine.hw.limits
        registers = tile.accumulator_registers + CONSUMER_REGISTERS
        return (
            check_limit("registers per thread", registers, tile.consumer_registers)
            or check_limit("shared memory", known.resources.shared_bytes, limits.shared_bytes_per_block)
            or check_grid(p, block)
        )

    def _covers_its_loads(self, block: Tile, base: ThreadTile) -> bool:
        """Whether wgmma time covers LLC load time, with cluster multicast if needed.

        Also true of grids so small that the model must decide which tile fills the device best.
        """
        if has_wave_quantization(self.workload, block):
            return True
        known = wgmma_block(self.workload, block, base.tile)
        loads = min(shared_step(self.workload, known, pair).llc for pair in PAIRS)
        return known.step.mma >= loads

    # ping-pong --------------------------------------------------------------------------------------------------
    def _pingpong_shapes(self, shapes: Sequence[Shape]) -> Iterator[Shape]:
        """Yield large tiles of one consumer, with the longest k-tile of the shapes."""
        p = self.workload
        if not has_heavy_epilogue(p):
            return
        one = tuple([1] * len(p.extents))
        depth = max(extent_on(shape.block, p.k) for shape in shapes)
        for rows, columns in PINGPONG_TILES:
            base = ThreadTile(replaced(replaced(one, p.m, rows), p.n, columns // p.space.num_accumulators), WARPGROUP_THREADS)
            block = replaced(base.tile, p.k, depth)
            look = self.evaluate(block, base)
            if spatial_grid(p, block) > p.machine.cores and not look.too_large and not look.misaligned:
                yield Shape(block, base)

    def _pingpong_choices(self, block: Tile, known: WgmmaBlock) -> Iterator[PipelineOptions]:
        """Yield persistent blocks, one on each SM, whose two consumers take tiles in turn."""
        cores, taken = self.workload.machine.cores, pingpong_block(self.workload, known)
        if taken is None:
            return
        _, stages = self._ring(taken, 1, MAX_STAGES)  # the pipeline continues across tiles
        for cluster in ((1, 1), *self._clusters(block, known)):
            size = math.prod(cluster)
            raster = self._raster(block, cores, cluster)
            yield PipelineOptions(stages, raster, persistent_blocks=cores // size * size, cluster=cluster, pingpong=True)

    # how blocks run ---------------------------------------------------------------------------------------------
    def _ring(self, known: WgmmaBlock, most_blocks: int, steps: int) -> tuple[int, int]:
        """Return (blocks per SM, stages): the most blocks with as many stages as k-tiles pass during a load's latency.

        One block per SM gets a few stages more, since nothing else needs the shared memory.
        """
        hw = self.workload.machine.hw
        step = known.step
        for resident in range(min(most_blocks, blocks_per_core(known.resources, hw)), 0, -1):
            max_shared_bytes = hw.limits.shared_bytes_per_core // resident - hw.limits.shared_bytes_reserved_per_block
            max_shared_bytes = min(max_shared_bytes, hw.limits.shared_bytes_per_block)
            busy = step.cycles(resident, UNLIMITED)
            latency = step.latency + BOX_LATENCY_CYCLES + resident * step.llc
            needed = 1 + math.ceil(latency / busy) if prefetch_stages(known, UNLIMITED) > 1 else MIN_MATRIX_STAGES
            if resident == 1 or known.tile.with_stages(needed).shared_bytes <= max_shared_bytes:
                wanted = needed if resident > 1 else max(needed + 1, MAX_STAGES // 2)
                if steps <= MAX_STAGES:  # all of k at once
                    wanted = max(wanted, steps)
                stages = max(MIN_MATRIX_STAGES, min(wanted, steps, MAX_STAGES))
                while stages > MIN_MATRIX_STAGES and known.tile.with_stages(stages).shared_bytes > max_shared_bytes:
                    stages -= 1
                return resident, stages
        return 1, MIN_MATRIX_STAGES

    def _clusters(self, block: Tile, known: WgmmaBlock) -> Iterator[tuple[int, int]]:
        """Yield clusters of two blocks where the LLC bounds a tile, and of four where it bounds a tile of a pair.

        All blocks have a tile. Clusters of four are for a single wave, since they leave SMs idle.
        """
        p, tile, step = self.workload, known.tile, known.step
        busy = max(step.mma, step.shared, step.chain)
        if step.llc < MIN_SHARED_LOAD_FRACTION * busy:
            return
        feeds = p.facts.loads
        one_wave = spatial_grid(p, block) <= cluster_cores(p.machine.cores, math.prod(QUAD))
        is_bound = one_wave and min(shared_step(p, known, pair).llc for pair in PAIRS) > busy
        for along_m, along_n in (*PAIRS, QUAD) if is_bound else PAIRS:
            sides = ((1, tile.b, p.m, along_m), (0, tile.a, p.n, along_n))
            if all(
                -(-p.extent(axis) // extent_on(block, axis)) % blocks == 0 and feeds.can_multicast(side, shared, blocks)
                for side, shared, axis, blocks in sides
                if blocks > 1
            ):
                yield along_m, along_n

    def _cluster_splits(self, block: Tile, known: WgmmaBlock, clusters: Sequence[tuple[int, int]]) -> Iterator[PipelineOptions]:
        """Yield pipelines whose clusters split k in one wave: for each number of parts, the fastest k-tile.

        `clusters`: blocks of each part along m and n.
        """
        p, tile = self.workload, known.tile
        tiles, steps, cores = spatial_grid(p, block), tile.k_order.steps, p.machine.cores
        if cluster_parts(cores, tiles, steps) == 1:
            return
        busy = max(known.step.mma, known.step.shared, known.step.chain)
        by_parts: dict[int, tuple[int, int]] = {}
        for cluster in sorted(clusters, key=lambda c: (max(busy, shared_step(p, known, c).llc), math.prod(c))):
            by_parts.setdefault(cluster_parts(cores, tiles, steps, math.prod(cluster)), cluster)
        for parts, cluster in by_parts.items():
            stages = max(self._ring(known, 1, -(-steps // parts))[1], tile.min_partial_stages)
            split = tile._replace(pipeline=PipelineOptions(stages, cluster_k=parts))
            if parts > 1 and split.shared_bytes <= p.machine.hw.limits.shared_bytes_per_block:
                yield PipelineOptions(stages, self._raster(block, cores, cluster), cluster=cluster, cluster_k=parts)

    def _raster(self, block: Tile, at_once: int, cluster: tuple[int, int]) -> int:
        """Rows of tiles that are walked together, in whole clusters."""
        rows, together = choose_raster(self.workload, block, at_once), cluster[0]
        return rows if rows == 1 else -(-rows // together) * together

    # parts ------------------------------------------------------------------------------------------------------
    def _column_granule(self) -> int:
        """Columns of the narrowest instruction; where B lies along n, of the narrowest swizzled row."""
        b, narrowest = self.workload.facts.loads.b, self.workload.machine.unit.shape[1]
        return narrowest if b.k_major else max(narrowest, SWIZZLE_ATOMS[-1] // TRANSPOSABLE_BYTES)

    def _operand_bytes(self) -> int:
        return self.workload.facts.loads.a.dtype.bytes
