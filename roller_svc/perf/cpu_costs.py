"""What the model of CPUs takes one step of a kernel to cost: every constant that measuring may change, in one table.

Cycles are a core's. Each default was written down from timing kernels that differ in little else on Skylake-SP, or from
its source. `cpu_costs_fitted.py` has what the model computes with: these values fitted together to measured programs,
none further than a factor of four from here (`roller_svc/bench/model/fit.py`). Facts of an instruction set and rules that
lowering shares are no costs and stand where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass

KEPT_WHOLE = 0.25  # of the last cache, what calibration takes a walk through to find there again
TASK_CYCLES = 600.0  # taking a task and its addresses


@dataclass(frozen=True, slots=True)
class ContractionCosts:
    """Of packed contractions (`cpu_contraction.py`)."""

    call_cycles: float = 40.0  # one micro-kernel call: loop, pointers, the pipeline filling up
    task_cycles: float = TASK_CYCLES
    gather_cycles: float = 3.0  # moving one element that its neighbours do not accompany
    lookup_cycles: float = 4.0  # the same where its place is looked up in tables, for an axis of several fused ones
    window_cycles: float = 2.0  # more for each dimension that a window slides over: a sum and a guard
    copy_cycles: float = 1.5  # one vector from memory to a panel
    turn_cycles: float = 3.0  # one vector of a block that is transposed: its shuffles, its store
    scatter_cycles: float = 1.5  # storing one element of C whose place is looked up
    start_cycles: float = 70.0  # a run of neighbours in memory begins: a page, and nothing that has fetched it ahead
    # Of a cycle for each load of a step beyond what multiply-adds leave of `free_issues` a cycle, and of the time that
    # B's row takes from the second cache: 8 x 48 stands before 6 x 64 and 14 x 32, those before 12 x 32 and 8 x 32.
    load_cycles: float = 0.2
    free_issues: float = 2.8
    in_flight: float = 160.0  # operations that a core holds while they wait, of 224 in its reorder buffer
    stores_hidden: float = 8.0  # cycles of the stores that a call ends with: all of 4 vectors, a seventh of 28
    l2_exposed: float = 0.1
    l2_beside: float = 0.75  # of the second cache's bandwidth, what there is beside a micro-kernel
    conflict: float = 1.6  # factor: 14 rows 16 KiB apart took so much longer than 8
    edge_cycles: float = 2.0  # one vector of a tile that is cut at the edge, through a room of its own
    packing_left: float = 0.3  # of packing, at least, where it is done beside a sweep of multiply-adds
    exposed: float = 0.5  # of what streams from the last cache beside the micro-kernel: prefetchers hide about half
    results_exposed: float = 0.1  # of the time that results take to memory and back, lines that hints ask for
    hinted: float = 0.25  # of the micro-kernel's time: panels that hints ask for are hidden better up to there
    memory_exposed: float = 0.1  # of the time that all operands take from memory


@dataclass(frozen=True, slots=True)
class ConvolutionCosts:
    """Of convolutions by windows (`cpu_convolution.py`)."""

    call_cycles: float = 40.0
    task_cycles: float = TASK_CYCLES
    copy_cycles: float = 1.0  # a vector from memory to the window
    deal_cycles: float = 3.0  # the same of every other element
    tile_cycles: float = 1.5  # a tile of a row: its loop, its addresses
    gather_cycles: float = 2.5  # an element whose neighbours do not accompany it
    quotient_cycles: float = 2.0  # more for each quotient in its place: a product of twice the width, its upper half
    turn_cycles: float = 6.0  # a vector of sums turned, from room to room
    sum_cycles: float = 1.0  # a vector of sums, between the micro-kernel and their room
    store_cycles: float = 2.0  # a vector of results, through the epilogue
    element_cycles: float = 1.0  # an element of a vector that is cut short
    row_cycles: float = 6.0  # a row of the window or of results: its loop, its addresses
    tap_loop_cycles: float = 3.0  # one pass of the innermost loop over taps: counters that are set again
    across_lines_cycles: float = 0.4  # a vector of pixels that a tap has moved across two cache lines
    l2_exposed: float = 0.25  # of the time that rows of a panel take from the second cache
    crowded: float = 0.7  # of the time that these lines take from there, what their turns at the load ports do
    l2_beside: float = 0.9  # of the second cache's bandwidth, what there is beside a micro-kernel
    weights_exposed: float = 0.5  # of the time that weights which are packed already take from memory
    memory_exposed: float = 0.3  # of the time that image, weights and results take from memory


@dataclass(frozen=True, slots=True)
class WindowCosts:
    """Of reductions over windows (`cpu_window.py`), their parts timed by themselves on Zen 4."""

    task_cycles: float = 120.0
    line_cycles: float = 2.0  # a line staged or stored: its address, a loop's step, a branch that fails at the end
    step_cycles: float = 4.0  # a step of the run
    sums: float = 1.05  # a vector of the window joined to its sum, in the unit's multiply-adds
    extreme_cycles: float = 1.0  # the same to a maximum: a comparison, for NaN, and a selection
    staged_cycles: float = 2.0  # a vector staged, or stored
    shuffled_cycles: float = 2.0  # a vector of elements that are apart: loads and permutations for each of the strides
    overlap_leak: float = 0.1  # of the shorter of operations and loads
    memory_leak: float = 0.15  # of the shorter of the core's work and what memory moves
    ahead_bytes: float = 2500.0  # of the next band, what is asked for when one is staged: hints are 2 KiB ahead


@dataclass(frozen=True, slots=True)
class TransposeCosts:
    """Of tiles that are turned (`cpu_layout.py`). `..._more`: seconds more, in parts of what the results, `read_more`
    the reads, take from where they are."""

    task_cycles: float = TASK_CYCLES
    tile_cycles: float = 60.0  # loops over a tile begun and ended, addresses
    short_cycles: float = 6.0  # the same of a tile of short rows
    room_cycles: float = 3.0  # a vector into a room and out of it again
    room_more: float = 0.12  # of that and the shuffles, each time that a room of short rows is twice as large as 1 KiB
    operation_cycles: float = 0.5  # one vector operation: two ports
    gather_cycles: float = 1.2  # one element of a vector that is no run in memory
    square_leak: float = 0.28  # of the shorter of work and what memory moves, of tiles that are turned in rooms
    dealt_leak: float = 0.06  # the same where vectors are dealt or woven, in order of memory
    plain_more: float = 0.4  # results that nothing asks for ahead: rows of tiles that do not go on in the next tile
    written_more: float = 0.05  # each time that rows of a tile that are written are twice as long or short as the best
    met_again: float = 0.7  # of the second cache's latency, a line of results that tiles of one row share
    read_more: float = 0.1  # each time that rows that are read are twice as long as a line: L1 is crowded
    streamed_long_more: float = 0.05  # each time that rows that stream are twice as long as two lines
    written_back_more: float = 0.8  # beyond all caches a line that is written is read before
    streamed_cut_more: float = 1.0  # a line within which a row of results that streams begins or ends
    shared_lines_more: float = 1.0  # rows of results cut into tasks within a line: 331 x 331 x 3 reversed, two threads


@dataclass(frozen=True, slots=True)
class LoopCosts:
    """Of loop nests (`cpu_nest.py`), cycles of a whole vector register's worth."""

    task_cycles: float = TASK_CYCLES
    operation_cycles: float = 0.5  # one vector operation: two ports
    lookup_cycles: float = 1.0  # any lane to any other: one port (Agner Fog, Skylake-X), two of half the width on Zen 4
    extreme_cycles: float = 1.5  # a maximum or minimum that a NaN wins
    quotient_cycles: float = 10.0  # a division or a root; vdivps of 512 bits alone takes 10 (Agner Fog, Skylake-X)
    exponential_cycles: float = 9.0  # e^x: about 17 operations
    function_cycles: float = 20.0  # longer polynomials, integer divisions
    join_latency_cycles: float = 4.0  # one value added to an accumulator, before the next can be (Agner Fog, Skylake-X)
    extreme_latency_cycles: float = 8.0  # the same of an extreme that a NaN wins: a comparison, then a selection
    steps_in_flight: float = 40.0  # of a row: what 224 entries of the reorder buffer hold
    load_cycles: float = 0.5  # one vector load or store that hits L1
    gather_cycles: float = 1.2  # one element of a vector that is no run in memory
    permuted_cycles: float = 2.0  # a vector of every other element, or of neighbours that repeat: two loads, a shuffle
    tail_cycles: float = 2.5  # one element at the end of a row that fills no vector
    horizontal_cycles: float = 3.0  # lanes joined, each time that half are left: a shuffle and what waits for it
    loop_cycles: float = 2.0  # counter, branch, addresses of a loop's step
    jumps_in_flight: float = 4.0  # steps of a walk that no prefetcher follows that wait for memory at once
    rows_more: float = 0.03  # of what is read, each time that twice as many short rows are walked side by side
    # Of what is read of rows, each time that a core holds twice as many lines in flight as prefetchers stay ahead of.
    run_ahead_more: float = 0.04
    rows_written_more: float = 0.3  # of what is written, each time that rows at hand are twice as long as what is ahead
    begun_cycles: float = 40.0  # a row of columns begins: what all share, addresses, a branch that goes another way
    place_cycles: float = 2.0  # an element whose place is known only at run time, with a quotient in it
    # A load behind a store past the caches at the same place of another page: 3072 rows of 4 KiB in pieces of 256 bytes
    # 1.0 ms, 0.57 where results lie half a page further on (Zen 4).
    met_store_cycles: float = 55.0
    overlap_leak: float = 0.06  # of the shorter of the core's work and what memory moves
    ahead_most: float = 0.7  # of a row, at most what moves during the walks of the row before
    ahead_bytes: float = 2048.0  # of the next row, what has been asked for when a row's first walk ends


@dataclass(frozen=True, slots=True)
class MemoryCosts:
    """Of what comes from beyond the first cache, whatever asks for it (`cpu_memory.py`)."""

    held: float = 0.75  # of a core's own cache, what it walked through and finds again
    lost_last: float = 2.0  # of the last, the length of a walk that finds nothing there again
    written: float = 1.0  # factor: a byte written to memory, against what calibration has for it
    unasked: float = 1.8  # factor: written lines that nothing has asked for ahead: 6.8 GB/s in place of 12
    overrun: float = 1.0  # of lines that prefetchers may bring beyond the end of a stretch, those that they do
    restart: float = 0.42  # of a level's latency, what each stretch of neighbours waits until prefetchers follow it
    # Of memory's latency, walks through tables of pages included, what a stretch of a page and more waits that begins
    # elsewhere: 128 MB in pieces of 64 KB 5.4 ms, in order 4.6, on Zen 4.
    elsewhere: float = 1.8
    hidden_cycles: float = 50.0  # of that latency, what other work in flight covers: most of L3's
    alone: float = 0.65  # of all cores' memory bandwidth that one reaches

    def held_share(self, cache_bytes: float, walked_bytes: float, *, is_last: bool = False) -> float:
        """Which share of what is walked through again and again a cache keeps. One that drops what was used longest ago
        would have everything or nothing; real ones, with other data in them, have less and less from where that limit
        is, and nothing of what is twice as much. A last cache does not drop what was used longest ago: from a quarter
        of it on ever less is found again, of half of it 0.83 on Zen 4, of all of it 0.6, of one and a half 0.3."""
        if is_last:
            return min(1.0, max(0.0, (self.lost_last - walked_bytes / cache_bytes) / (self.lost_last - KEPT_WHOLE)))
        return min(1.0, max(0.0, 2 * self.held * cache_bytes / max(1.0, walked_bytes) - 1))


@dataclass(frozen=True, slots=True)
class CpuCosts:
    """All of them, by family of kernels. `single_task`: of a launch's overhead, what there is without threads."""

    contraction: ContractionCosts = ContractionCosts()
    convolution: ConvolutionCosts = ConvolutionCosts()
    window: WindowCosts = WindowCosts()
    transpose: TransposeCosts = TransposeCosts()
    loops: LoopCosts = LoopCosts()
    memory: MemoryCosts = MemoryCosts()
    single_task: float = 0.2
