"""Cost of streamed products: DRAM with the bytes that rings keep in flight, instructions of steps, the first page."""

from __future__ import annotations

import math

from roller_svc.families.common.gpu.matrix.terms import MMA_LATENCY_CYCLES
from roller_svc.families.common.gpu.row_cost import BARRIER_CYCLES, BLOCK_CYCLES, LOOP_OPS
from roller_svc.families.gpu.streamed_rows.workload import FRAGMENT_COLUMNS, FRAGMENT_ROWS, RingTile, StreamedRows, ring_tile
from roller_svc.perf.common import Costs, Launch, streaming_bandwidth
from roller_svc.perf.footprint import ADDRESS_OPS
from roller_svc.perf.occupancy import BlockResources, overhead_registers
from roller_svc.perf.workload import Workload

FRAGMENT_POINTS = 4  # of k of a lane, in one mma.sync
ROWS_OF_LANE = 2  # of the matrix
PAIR_ORDER_SLOTS = 0.5  # permutation that puts a pair of unpacked weights in order, of each weight
WORD_BYTES = 4
HALF_BYTES = 2
OUTPUT_OPS = 12.0  # of one result: addresses, conversion, store


def streamed_rows_cost(p: Workload[StreamedRows], launch: Launch) -> Costs:
    """Return the longest of DRAM, instructions and matrix unit; the first page is exposed."""
    mach, hw = p.machine, p.machine.hw
    way = launch.pipeline
    tile = ring_tile(p.facts, launch.block, launch.reduce_threads, way.stages, way.persistent_blocks)
    needs = launch.compiled or ring_resources(p, tile)
    busy = min(mach.cores, tile.blocks)
    resident = -(-tile.blocks // mach.cores)
    warps = tile.threads // hw.limits.warp_size
    pages = tile.rounds * tile.pages
    instructions = pages * page_instructions(tile) + tile.rounds * output_instructions(tile)
    issue = resident * warps * instructions / mach.issue_per_cycle + BLOCK_CYCLES
    step_cycles = MMA_LATENCY_CYCLES * tile.product.chunk / FRAGMENT_POINTS
    chain = pages * (tile.steps * step_cycles + BARRIER_CYCLES) + tile.rounds * 2 * BARRIER_CYCLES
    first = mach.dram_latency_cycles + BARRIER_CYCLES
    cycles = first + max(issue, chain) + 0.1 * min(issue, chain)
    requested = tile.blocks * (tile.stages - 1) * tile.page_bytes
    x_bytes = tile.product.rows * tile.product.k.extent * HALF_BYTES
    cache = p.compulsory_bytes + tile.tiles * x_bytes
    llc = mach.llc
    padded = tile.rounds * tile.blocks * tile.rows * FRAGMENT_COLUMNS * tile.product.k.extent * 2.0
    return Costs(
        core_s=mach.seconds(cycles),
        core_stage="latency" if chain > issue else "issue",
        stage_seconds=(
            ("mma", padded / busy * mach.cores / mach.unit.flops_per_s),
            (llc.name if llc else "cache", cache / (llc.bytes_per_s if llc else math.inf)),
            ("dram", mach.seconds(first) + _dram_seconds(p, tile, requested)),
        ),
        occupancy=min(1.0, resident * tile.threads / hw.limits.max_threads_per_core),
        waves=1,
        resources=needs,
        loads_per_block=pages,
        moved_bytes=(("dram", p.compulsory_bytes),),
    )


def _dram_seconds(p: Workload[StreamedRows], tile: RingTile, requested: float) -> float:
    """Return the seconds to stream everything; in the last round, those blocks that have a tile keep bytes in flight."""
    full, rest = divmod(tile.tiles, tile.blocks)
    each = p.compulsory_bytes / tile.tiles
    seconds = full * tile.blocks * each / streaming_bandwidth(p.machine, requested)
    if rest:
        seconds += rest * each / streaming_bandwidth(p.machine, requested * rest / tile.blocks)
    return seconds


def page_instructions(tile: RingTile) -> float:
    """Return the instructions of a warp for a page: copies, a barrier, and its steps."""
    copies = tile.copies * (1.0 + ADDRESS_OPS)
    return copies + 3 * LOOP_OPS + tile.steps * step_instructions(tile)


def step_instructions(tile: RingTile) -> float:
    """Return the instructions of a warp for a step: loads of both operands, weights made pairs, products, scales."""
    product = tile.product
    weights = ROWS_OF_LANE * product.chunk
    loads = ROWS_OF_LANE + product.x_loads
    order = PAIR_ORDER_SLOTS if product.slots else 1.0 / ROWS_OF_LANE  # words of two rows are moved together
    scaled = FRAGMENT_POINTS * (1.0 + 2.0 * len(product.scales)) if product.scales else 0.0
    return loads * (1.0 + ADDRESS_OPS / 2) + weights * (product.slots + order) + product.chunk / FRAGMENT_POINTS + scaled


def output_instructions(tile: RingTile) -> float:
    """Return the instructions of a warp for the results of a tile."""
    results = -(-tile.results * tile.product.rows // tile.threads)
    return FRAGMENT_POINTS * 2.0 + results * (2.0 * tile.warps_k * len(tile.product.all) + OUTPUT_OPS)


def ring_resources(p: Workload[StreamedRows], tile: RingTile) -> BlockResources:
    """Return what a block takes: registers hold the operands of a step and the sums."""
    chunk, product = tile.product.chunk, tile.product
    words = (ROWS_OF_LANE + 1) * chunk * HALF_BYTES // WORD_BYTES
    raw = ROWS_OF_LANE * product.chunk_bytes // WORD_BYTES
    sums = FRAGMENT_ROWS * FRAGMENT_COLUMNS // p.facts.warp * (2 if product.scales else 1)
    registers = overhead_registers(p.machine.hw.limits) + words + raw + sums
    return BlockResources(tile.threads, registers, tile.shared_bytes)
