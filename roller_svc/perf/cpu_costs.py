"""Constants of the CPU model, in one table.

Cycles are those of one core. Each value comes from timing kernels that differ in one respect on Skylake-SP, or from the
source named. None is fitted to measured programs (docs/model.md). Facts of an instruction set and rules that schedules
share are defined where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass

LLC_FULL_HIT_RATIO = 0.25  # working set over LLC size up to which a repeated sweep hits entirely


@dataclass(frozen=True, slots=True)
class ContractionCosts:
    """Costs of packed GEMM (`families/cpu/contraction`)."""

    call_cycles: float = 40.0  # micro-kernel call: loop, pointers, filling the pipeline
    gather_cycles: float = 3.0  # copying one element that is not contiguous with others
    lookup_cycles: float = 4.0  # the same, with the position looked up in tables (several fused axes)
    window_cycles: float = 2.0  # extra for each sliding-window dimension: an addition and a guard
    copy_cycles: float = 1.5  # one vector from memory to a panel
    transpose_cycles: float = 3.0  # one vector of a transposed block: shuffles and store
    scatter_cycles: float = 1.5  # storing one element of C whose position is looked up
    segment_start_cycles: float = 70.0  # start of a contiguous segment: TLB entry, no prefetched line
    # Cycles for each load beyond the issue slots that multiply-adds leave free, `spare_issue_slots` per cycle in total.
    # It ranks tiles of 8 x 48 before 6 x 64 and 14 x 32, and those before 12 x 32 and 8 x 32.
    load_cycles: float = 0.2
    spare_issue_slots: float = 2.8
    rob_entries: float = 160.0  # operations in flight, of 224 reorder-buffer entries
    hidden_store_cycles: float = 8.0  # hidden cycles of a call's final stores: all of 4 vectors, a seventh of 28
    l2_exposed_fraction: float = 0.1  # of the time that B's rows take from L2
    l2_bandwidth_under_compute: float = 0.75  # L2 bandwidth left while a micro-kernel runs, as a fraction
    set_conflict_factor: float = 1.6  # slowdown when rows of A share an L1 set: 14 rows 16 KiB apart against 8
    edge_cycles: float = 2.0  # one vector of an edge tile, through a scratch buffer
    exposed_packing_fraction: float = 0.3  # of packing on first use, at least
    llc_exposed_fraction: float = 0.5  # of LLC streams under the micro-kernel: prefetchers hide about half
    output_exposed_fraction: float = 0.1  # of reading and writing C with software prefetch
    # of the micro-kernel's time, up to which prefetched panels are hidden better
    prefetch_hidden_fraction: float = 0.25
    memory_exposed_fraction: float = 0.1  # of the time that all operands take from memory


@dataclass(frozen=True, slots=True)
class ConvolutionCosts:
    """Costs of direct convolution (`families/cpu/convolution`)."""

    call_cycles: float = 40.0
    copy_cycles: float = 1.0  # a vector from memory to the input patch
    deinterleave_cycles: float = 3.0  # the same, of every second element
    tile_cycles: float = 1.5  # a tile of a row: loop and addresses
    gather_cycles: float = 2.5  # an element that is not contiguous with others
    division_cycles: float = 2.0  # extra for each division in its index: a widening product, its upper half
    transpose_cycles: float = 6.0  # a vector of accumulators, transposed between scratch buffers
    accumulator_cycles: float = 1.0  # a vector of accumulators between the micro-kernel and its scratch buffer
    store_cycles: float = 2.0  # a vector of outputs, through the epilogue
    element_cycles: float = 1.0  # an element of a partial vector
    row_cycles: float = 6.0  # a row of the patch or of outputs: loop and addresses
    tap_loop_cycles: float = 3.0  # one pass of the innermost loop over taps: counters are reset
    split_load_cycles: float = 0.4  # a vector of output positions that a tap shifts across two cache lines
    l2_exposed_fraction: float = 0.25  # of the time that rows of a panel take from L2
    port_contention: float = 0.7  # load-port time of lines that arrive from L2, as a fraction of their transfer
    l2_bandwidth_under_compute: float = 0.9  # L2 bandwidth left while a micro-kernel runs, as a fraction
    weights_exposed_fraction: float = 0.5  # of the time that prepacked weights take from memory
    memory_exposed_fraction: float = 0.3  # of the time that input, weights and outputs take from memory


@dataclass(frozen=True, slots=True)
class WinogradCosts:
    """Costs of Winograd convolution (`families/cpu/winograd`); staging and outputs cost what they cost a direct one."""

    call_cycles: float = 30.0  # start of a micro-kernel call
    tile_cycles: float = 8.0  # start of a tile's transform: addresses
    operation_cycles: float = 0.6  # one vector operation of a transform
    access_factor: float = 1.0  # loads and stores of a transform, those of registers that spill included
    transpose_cycles: float = 3.0  # one vector of a transposed block
    exposed_fraction: float = 1.0  # of the time that transformed weights and inputs take to arrive
    memory_exposed_fraction: float = 0.3  # of the time that input and outputs take from memory


@dataclass(frozen=True, slots=True)
class WindowCosts:
    """Costs of windowed reductions (`families/cpu/window`), each timed alone on Zen 4."""

    task_cycles: float = 120.0
    line_cycles: float = 2.0  # a staged or stored line: address, loop step, mispredicted branch at its end
    step_cycles: float = 4.0  # a step of the run
    accumulate_fma_ratio: float = 1.05  # accumulating a vector of the window, in multiply-adds of the unit
    minmax_cycles: float = 1.0  # the same for min and max: a comparison that propagates NaN, and a select
    staging_cycles: float = 2.0  # a vector staged or stored; a vector of strided elements takes it for each stride
    imperfect_overlap: float = 0.1  # exposed fraction of the shorter of operations and loads
    imperfect_memory_overlap: float = 0.15  # exposed fraction of the shorter of core and memory time
    prefetch_distance_bytes: float = 2500.0  # of the next row block, in flight when one is staged


@dataclass(frozen=True, slots=True)
class TransposeCosts:
    """Costs of blocked transposes (`families/cpu/transpose`).

    `..._penalty`: extra seconds over those of the writes (`read_run_penalty`: of the reads).
    """

    tile_cycles: float = 60.0  # loops over a tile, addresses
    short_tile_cycles: float = 6.0  # the same of a tile of short rows
    buffer_cycles: float = 3.0  # a vector into a scratch buffer and out again
    buffer_size_penalty: float = 0.12  # of buffer accesses and shuffles, for each doubling of the buffer beyond 1 KiB
    block_imperfect_overlap: float = 0.28  # exposed fraction of the shorter of core and memory time, block transposes
    interleave_imperfect_overlap: float = 0.06  # the same where vectors are deinterleaved or interleaved
    unprefetched_write_penalty: float = 0.4  # output rows that end with the tile: no prefetch
    shared_line_latency_fraction: float = 0.7  # of L2 latency, for an output line that adjacent tiles share
    read_run_penalty: float = 0.1  # for each doubling of the input rows beyond a line: L1 conflicts


@dataclass(frozen=True, slots=True)
class LoopCosts:
    """Costs of loop nests (`families/cpu/loops`), in cycles of a full vector register."""

    operation_cycles: float = 0.5  # one vector operation: two ports
    lookup_cycles: float = 1.0  # any lane to any other: one port (Agner Fog, Skylake-X), two of half the width on Zen 4
    minmax_cycles: float = 1.5  # max or min that propagates NaN
    division_cycles: float = 10.0  # a division or a root; vdivps of 512 bits alone takes 10 (Agner Fog, Skylake-X)
    exponential_cycles: float = 9.0  # e^x: about 17 operations
    function_cycles: float = 20.0  # longer polynomials, integer divisions
    accumulate_latency_cycles: float = 4.0  # one addition to an accumulator before the next (Agner Fog, Skylake-X)
    minmax_latency_cycles: float = 8.0  # the same for max and min that propagate NaN: a comparison, then a select
    rob_iterations: float = 40.0  # iterations over a row that 224 reorder-buffer entries hold
    load_cycles: float = 0.5  # one vector load or store that hits L1
    gather_cycles: float = 1.2  # one element of a vector that is not contiguous in memory
    permute_cycles: float = 2.0  # a vector of every second element, or of repeated ones: two loads, a shuffle
    tail_cycles: float = 2.5  # one element of a row's tail
    horizontal_cycles: float = 3.0  # one halving step of a horizontal reduction: a shuffle and its dependent operation
    loop_cycles: float = 2.0  # counter, branch and addresses of an iteration
    multi_stream_penalty: float = 0.03  # of reads, for each doubling of the short rows that are read in parallel
    # Fraction of row reads, for each doubling of the lines in flight beyond those that prefetchers cover.
    ooo_miss_penalty: float = 0.04
    bus_turnaround_penalty: float = 0.3  # of writes, for each doubling of resident rows beyond the prefetch distance
    startup_cycles: float = 40.0  # start of a row of columns: invariants, addresses, a mispredicted branch
    index_cycles: float = 2.0  # an element whose index is computed at run time, with a division in it
    # 4K aliasing: a load that waits for a non-temporal store with the same low 12 address bits.
    alias_4k_cycles: float = 55.0
    imperfect_overlap: float = 0.06  # exposed fraction of the shorter of core and memory time
    max_prefetched_fraction: float = 0.7  # of a row, moved while later statements process the row before, at most
    prefetch_distance_bytes: float = 2048.0  # of the next row, in flight when a row's first statement ends


@dataclass(frozen=True, slots=True)
class MemoryCosts:
    """Costs of data from beyond L1, whichever kernel reads it (`families/common/cpu/memory.py`)."""

    private_hit_fraction: float = 0.75  # effective fraction of a private cache for a repeated sweep
    llc_zero_hit_ratio: float = 2.0  # working set over LLC size from which a repeated sweep misses entirely
    write_cost_factor: float = 1.0  # bytes written to memory, against the calibrated cost
    unprefetched_write_penalty: float = 1.8  # factor on written lines without prefetch
    prefetch_overshoot: float = 1.0  # fraction of the lines past the end of a stream that prefetchers do load
    prefetch_restart_fraction: float = 0.42  # of a level's latency, exposed at each new stream
    # Factor on memory latency, page-table walks included, at the start of a stream of a page or more.
    tlb_miss_latency_factor: float = 1.8
    hidden_cycles: float = 50.0  # of that latency, hidden by out-of-order execution: most of the LLC's
    single_core_bandwidth_fraction: float = 0.65  # of the memory bandwidth of all cores, that one core achieves

    def hit_rate(self, cache_bytes: float, working_set_bytes: float, *, is_last: bool = False) -> float:
        """Return the hit rate of a repeated sweep over `working_set_bytes`.

        An LRU cache would hit entirely or not at all; real ones lose hits linearly around that limit and have none at
        twice the effective capacity. The LLC is not LRU: its hit rate falls linearly from LLC_FULL_HIT_RATIO of its
        size on.
        """
        if is_last:
            return min(
                1.0,
                max(
                    0.0,
                    (self.llc_zero_hit_ratio - working_set_bytes / cache_bytes) / (self.llc_zero_hit_ratio - LLC_FULL_HIT_RATIO),
                ),
            )
        return min(1.0, max(0.0, 2 * self.private_hit_fraction * cache_bytes / max(1.0, working_set_bytes) - 1))


@dataclass(frozen=True, slots=True)
class CpuCosts:
    """All constants, by kernel family."""

    contraction: ContractionCosts = ContractionCosts()
    convolution: ConvolutionCosts = ConvolutionCosts()
    winograd: WinogradCosts = WinogradCosts()
    window: WindowCosts = WindowCosts()
    transpose: TransposeCosts = TransposeCosts()
    loops: LoopCosts = LoopCosts()
    memory: MemoryCosts = MemoryCosts()
    task_cycles: float = 600.0  # starting a task and computing its addresses; that of a window has its own
    single_task_launch_fraction: float = 0.2  # launch overhead without threads, over that with


CPU_COSTS = CpuCosts()
