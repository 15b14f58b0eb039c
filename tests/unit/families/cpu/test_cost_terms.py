"""Terms of the model of CPUs, each by itself: what it makes dearer, and where it must not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dot_specs import BF16_SPEC, spec_with
from tile_spaces import COSTS, with_costs

from roller_svc import hardware
from roller_svc.analysis.lookup_tables import BYTE_PERMUTATIONS
from roller_svc.compiler.partition_cache import PartitionCache, partition
from roller_svc.compiler.plans import rank_partitions
from roller_svc.families import prepare, prepare_model
from roller_svc.families.common.cpu.column_reduction import MAX_ROWS_PER_ITERATION
from roller_svc.families.common.cpu.image_space import image_space
from roller_svc.families.common.cpu.micro_kernel_cost import gather_cycles
from roller_svc.families.common.cpu.op_counts import count_ops
from roller_svc.families.common.cpu.window_reduction import PlaneWindowDim
from roller_svc.families.cpu.contraction.cost import packing_cycles
from roller_svc.families.cpu.window.cost import line_vectors, staged_positions
from roller_svc.families.cpu.window.workload import Dimension
from roller_svc.families.matching import group_views
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import Estimate
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorType
from roller_svc.ir.rprogram import RProgram, RTile
from roller_svc.perf.model import Model
from roller_svc.perf.roofline import roofline
from roller_svc.perf.uncertainty import AssumedStages

F32, I32 = DType.FLOAT32, DType.INT32
L3_BYTES = 32 << 20
Shapes = dict[str, tuple[DType, tuple[int, ...]]]


def one_core(vendor: str = "intel") -> HardwareSpec:
    """AVX-512, one core's part of all bandwidths, an L3 of 32 MiB."""
    hw = hardware.load("cpu-x86-avx512")
    levels = tuple(
        replace(
            level,
            bandwidth_bytes_per_s=level.bandwidth_bytes_per_s / hw.num_cores,
            capacity_bytes=L3_BYTES if level.name == "l3" else level.capacity_bytes,
        )
        for level in hw.levels
    )
    units = tuple(replace(unit, flops_per_s=unit.flops_per_s / hw.num_cores) for unit in hw.units)
    return replace(hw, vendor=vendor, num_cores=1, levels=levels, units=units)


def model_of(text: str, shapes: Shapes, outputs: tuple[str, ...] | None = None, hw: HardwareSpec | None = None) -> Model:
    hw = hw or one_core()
    types = {name: TensorType(dtype, shape) for name, (dtype, shape) in shapes.items()}
    (group,) = partition(parse(text, types, outputs), hw)
    return prepare_model(group, hw, hw.unit_for(F32))


def estimated_program(model: Model, block: dict[str, int], thread: dict[str, int]) -> RProgram:
    """Axes that are not named: the whole of them in a block, one point in a thread."""
    space = model.workload.space
    whole = dict(zip((a.name for a in space.axes), model.workload.extents, strict=True))
    tiles = (RTile(tuple((whole | block).items())), RTile(tuple((dict.fromkeys(whole, 1) | thread).items())))
    return RProgram(space, model.workload.machine.unit, *tiles)


def estimated(model: Model, block: dict[str, int], thread: dict[str, int], *, streamed: bool = False) -> Estimate:
    return model.estimate(estimated_program(model, block, thread).with_pipeline(nontemporal=streamed))


def stage(estimate: Estimate, name: str) -> float:
    return next(s.seconds for s in estimate.stages if s.name == name)


def moved_from(estimate: Estimate) -> str:
    return next(s.name for s in estimate.stages if s.name in ("dram", "l3", "l2", "l1"))


def moving(estimate: Estimate) -> float:
    """Seconds of what is moved, from whichever level it comes."""
    return stage(estimate, moved_from(estimate))


def with_memory(model: Model, **changed: float) -> Model:
    return with_costs(model, replace(COSTS, memory=replace(COSTS.memory, **changed)))


def gathered(width: int) -> Model:
    return model_of("y[f, c] = x[i[f], c]", {"x": (F32, (30000, width)), "i": (I32, (3000,))})


def test_gathered_rows_are_dearer_in_pieces() -> None:
    found = [estimated(gathered(1024), {"c": columns}, {"c": 16}).seconds for columns in (1024, 512, 256, 128)]
    assert found == sorted(set(found))


def test_prefetchers_bring_nothing_beyond_a_page() -> None:
    model = gathered(1024)  # rows of a page each
    for columns, is_dearer in ((1024, False), (512, True)):
        one, none = (
            moving(estimated(with_memory(model, prefetch_overshoot=share), {"c": columns}, {"c": 16})) for share in (1.0, 0.0)
        )
        assert (one > 1.001 * none) == is_dearer  # indices have one end within a page


def test_what_l2_keeps_was_not_brought_for_nothing() -> None:
    model = gathered(1024)
    one, none = (
        moving(estimated(with_memory(model, prefetch_overshoot=share), {"f": 100, "c": 512}, {"c": 16})) for share in (1.0, 0.0)
    )
    assert one == none


SOFTMAX = (
    "m[n, j] >=! x[n, k, j]; e[n, k, j] = (x[n, k, j] - m[n, j]).call(`exp`); s[n, j] +=! e[n, k, j];"
    " y[n, k, j] = e[n, k, j] / s[n, j]"
)


def test_statements_over_columns_wait_for_each_other() -> None:
    """Memory takes longest, but nothing is asked of it while exponentials are computed."""
    model = model_of(SOFTMAX, {"x": (F32, (128, 16, 12288))}, ("y",))
    nest = replace(COSTS.loops, exponential_cycles=1.1 * COSTS.loops.exponential_cycles)
    dearer = with_costs(model, replace(COSTS, loops=nest))
    before, after = (estimated(m, {"j": 12288}, {"j": 64}) for m in (model, dearer))
    assert moving(before) > stage(after, "compute")
    assert after.seconds - before.seconds > 0.5 * (stage(after, "compute") - stage(before, "compute"))
    assert stage(before, "again") > 0


def test_short_rows_of_columns_cost_what_each_begins_with() -> None:
    model = model_of("y[j] +=! x[k, j]", {"x": (F32, (4096, 12288))})
    wide, narrow = (stage(estimated(model, {"j": columns}, {"j": 64}), "compute") for columns in (4096, 512))
    begun = COSTS.loops.startup_cycles * 4096 / MAX_ROWS_PER_ITERATION * 12288 * (1 / 512 - 1 / 4096)
    assert narrow - wide > 0.99 * begun / model.workload.machine.clock_hz


@pytest.mark.parametrize(("rows", "waits"), [(4, False), (2048, True)])
def test_rows_of_columns_from_memory_are_waited_for_where_each_piece_begins(rows: int, waits: bool) -> None:
    """Eight rows of words at once, all of which begin in memory: one wait for all."""
    model = model_of("y[j] +=! x[k] * q[k // 8, j]", {"x": (F32, (8 * rows,)), "q": (F32, (rows, 12288))})
    wide, narrow = (stage(estimated(model, {"j": columns}, {"j": 64}), "compute") for columns in (4096, 1024))
    pieces = 12288 * (1 / 1024 - 1 / 4096) / model.workload.machine.clock_hz
    turns = max(1, rows // MAX_ROWS_PER_ITERATION)
    begun = COSTS.loops.startup_cycles * turns * pieces
    wait = COSTS.memory.tlb_miss_latency_factor * model.workload.machine.dram_latency_cycles * turns * pieces
    assert narrow - wide == pytest.approx(begun + wait * waits, rel=0.01)


def sum_of_weights(mask: int) -> Model:
    text = f"y[j] +=! x[k] * bitwise_and(q[k // 8, j] >> k % 8 * 4, {mask}).cast(`float32`)"
    return model_of(text, {"x": (F32, (4096,)), "q": (I32, (512, 12288))})


@pytest.mark.parametrize(("mask", "is_looked_up"), [(15, True), (16, False)])
def test_functions_of_few_bits_are_one_look_into_a_vector(mask: int, is_looked_up: bool) -> None:
    model = sum_of_weights(mask)
    dearer = with_costs(model, replace(COSTS, loops=replace(COSTS.loops, lookup_cycles=9 + COSTS.loops.lookup_cycles)))
    before, after = (stage(estimated(m, {"j": 4096}, {"j": 64}), "compute") for m in (model, dearer))
    cycles = 9 * 4096 * 12288 / 16 * is_looked_up
    assert after - before == pytest.approx(cycles / model.workload.machine.clock_hz)


def test_a_table_is_in_registers_if_its_reachable_entries_fill_vectors() -> None:
    """Three bits leave half of a vector of 16 empty, and are gathered; four bits reach 16 entries of 64."""
    text = "y[n] = t[bitwise_and(q[n // 8] >> n % 8 * {bits}, {mask})] * x[n]"

    def cycles(bits: int, entries: int) -> float:
        shapes = {"t": (F32, (entries,)), "q": (I32, (8192,)), "x": (F32, (65536,))}
        model = model_of(text.format(bits=bits, mask=2**bits - 1), shapes)
        return stage(estimated(model, {"n": 4096}, {"n": 64}), "loads")

    assert cycles(4, 64) == cycles(4, 16)
    assert cycles(3, 8) > 1.5 * cycles(4, 16)


def test_what_is_looked_up_are_no_operations_of_the_unit() -> None:
    """A shift, a mask, a product and a sum: the mask is none where its bits choose an entry."""
    plain = sum_of_weights(16).workload.operations
    assert sum_of_weights(15).workload.operations == plain
    scaled = "y[j] +=! x[k] * (bitwise_and(q[k // 8, j] >> k % 8 * 4, {}).cast(`float32`) - 8.0)"
    shapes = {"x": (F32, (4096,)), "q": (I32, (512, 12288))}
    looked_up, computed = (model_of(scaled.format(mask), shapes).workload.operations for mask in (15, 16))
    assert computed - looked_up == 4096 * 12288


def test_a_factor_that_columns_share_is_free_where_another_one_is_left() -> None:
    """x goes into the table, s takes its place in the multiply-add."""
    shapes = {"x": (F32, (4096,)), "q": (I32, (512, 12288))}
    text = "y[j] +=! x[k] * {}bitwise_and(q[k // 8, j] >> k % 8 * 4, 15).cast(`float32`)"
    plain = model_of(text.format(""), shapes)
    scaled = model_of(text.format("s[k // 128, j] * "), shapes | {"s": (F32, (32, 12288))})
    assert scaled.workload.operations == plain.workload.operations
    counts = [[one.counts for one in model.workload.facts.statements] for model in (plain, scaled)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("size", [21, 42, 83])
@pytest.mark.parametrize("block", [1, 3, 12, 21, 44, 96])
@pytest.mark.parametrize("stride", [1, 2])
def test_bands_stage_what_is_inside_of_their_planes(size: int, block: int, stride: int) -> None:
    pad, taps = 3, 7
    slide = PlaneWindowDim("h", (size + 2 * pad - taps) // stride + 1, "u", taps, stride, 1)
    band = Dimension(slide, block, 1)
    bands = -(-slide.extent // block)
    firsts = range(0, bands * block * stride, block * stride)
    staged = [max(0, min(pad + size, first + band.places) - max(pad, first)) for first in firsts]
    assert staged_positions(band, (pad, pad + size)) == pytest.approx(sum(staged) / bands)


def test_work_on_what_windows_stage_is_counted() -> None:
    plain, dear = (
        model_of(f"y[c, i, j] >=! {value} where p in 2, q in 2, i in 64, j in 64", {"x": (F32, (64, 65, 65))})
        for value in ("x[c, i + p, j + q]", "x[c, i + p, j + q].call(`exp`)")
    )
    found = [stage(estimated(m, {}, {"j": 64}), "staging") for m in (plain, dear)]
    exponentials = 64 * 65 * 65 / 16 * COSTS.loops.exponential_cycles / dear.workload.machine.clock_hz
    assert exponentials < found[1] < exponentials + found[0]  # beside loads and stores, but for a part
    assert found[0] < found[1]


def test_what_is_divided_by_a_constant_is_a_quotient_unless_its_reciprocal_is_exact() -> None:
    exact, rounded, none = (
        model_of(f"y[c, i, j] +=! {value} where p in 2, q in 2, i in 64, j in 64", {"x": (F32, (64, 65, 65))})
        for value in ("x[c, i + p, j + q] / 8.0", "x[c, i + p, j + q] / 9.0", "x[c, i + p, j + q]")
    )
    staging = [stage(estimated(m, {}, {"j": 64}), "staging") for m in (none, exact, rounded)]
    quotients = 64 * 65 * 65 / 16 * COSTS.loops.division_cycles / exact.workload.machine.clock_hz
    assert staging[0] <= staging[1] < staging[2]
    assert staging[2] > quotients


def test_a_function_of_a_row_costs_one_scalar_call_a_row() -> None:
    rows, columns = 1000, 16
    shapes: Shapes = {"x": (F32, (rows, columns)), "s": (F32, (rows,)), "t": (F32, (columns,))}
    plain, by_row, by_column = (
        stage(estimated(model_of(f"y[i, j] = x[i, j] + {value}", shapes), {}, {"j": 1}), "compute")
        for value in ("s[i]", "exp(s[i])", "exp(x[i, j] + s[i])")
    )
    calls = rows * COSTS.loops.exponential_cycles / one_core().clock_hz
    assert by_row - plain == pytest.approx(calls, rel=0.2)
    assert by_column - plain >= calls


def test_short_vectors_are_staged_faster_than_whole_ones() -> None:
    """24 places of a line: a vector of 16 and one of 8, which lies across two lines of the cache half as often."""
    lines = {
        width: model_of(
            f"y[c, i, j] +=! x[c, i * 2 + p, j * 2 + q] * k[c, p, q] where i in 64, j in {width}",
            {"x": (F32, (64, 128, 2 * width)), "k": (F32, (64, 2, 2))},
        )
        for width in (16, 24, 32)
    }
    one, half, two = (stage(estimated(m, {"j": 32}, {"j": 32}), "staging") for m in lines.values())
    assert half - one == pytest.approx((two - one) * 0.5 * 0.75)


@pytest.mark.parametrize(("elements", "sixteenths"), [(0, []), (1, [1]), (11, [8, 4]), (16, [16]), (42, [16] * 3)])
def test_pieces_of_a_line(elements: int, sixteenths: list[int]) -> None:
    assert [16 * piece for piece in line_vectors(elements, 16)] == sixteenths


def summed(row: int, joins: str = "+") -> Model:
    """Sums of rows, 256 MiB of them."""
    return model_of(f"y[i] {joins}=! x[i, k]", {"x": (F32, ((16 << 20) // row * 4, row))}, hw=one_core("amd"))


def walked(model: Model, rows: int, lanes: int) -> float:
    """What memory takes for sums of so many rows at hand."""
    program = estimated_program(model, {}, {"i": rows})
    return moving(model.estimate(replace(program, reduce_threads=lanes)))


ROW_SOFTMAX = "m[i] >=! x[i, k]\ns[i] +=! (x[i, k] - m[i]).call(`exp`)\ny[i, k] = (x[i, k] - m[i]).call(`exp`) / s[i]"


def test_rows_begin_anew_only_where_they_are_walked_again() -> None:
    """Rows of one reduction are read in the order of memory, however many are at hand; a softmax pauses at each."""
    assert walked(summed(1024), 4, 16) == pytest.approx(walked(summed(1024), 1, 16), rel=2e-3)  # but for results
    softmax = model_of(ROW_SOFTMAX, {"x": (F32, (1 << 19, 128))}, ("y",))
    assert walked(softmax, 4, 16) > 1.02 * walked(softmax, 1, 16)


def test_a_core_that_does_little_with_each_line_runs_ahead_of_prefetchers() -> None:
    """Of rows of 121 four at hand with four accumulators each do least; what is joined to a maximum is more work."""
    found = {(rows, lanes): walked(summed(121), rows, lanes) for rows in (1, 4) for lanes in (16, 64)}
    assert max(found, key=found.__getitem__) == (4, 64)
    assert found[4, 64] > 1.01 * found[1, 64]
    greatest = summed(121, ">")
    assert walked(greatest, 4, 64) < walked(summed(121), 4, 64)
    assert walked(greatest, 4, 64) == pytest.approx(walked(greatest, 1, 64), rel=2e-3)


def computed(model: Model, rows: int, part: str = "compute") -> float:
    return stage(model.estimate(replace(estimated_program(model, {}, {"i": rows}), reduce_threads=16)), part)


def test_lanes_that_are_joined_hold_up_only_who_walks_the_row_again() -> None:
    """After a sum the next row's loads go on; a softmax needs its maximum, one of a row."""
    longer = replace(COSTS, loops=replace(COSTS.loops, horizontal_cycles=2 * COSTS.loops.horizontal_cycles))
    for text, outputs, waits in (("y[i] +=! x[i, k]", ("y",), False), (ROW_SOFTMAX, ("y",), True)):
        model = model_of(text, {"x": (F32, (256, 128))}, outputs)
        assert (computed(with_costs(model, longer), 1) > 1.1 * computed(model, 1)) is waits


@pytest.mark.parametrize(("columns", "shares"), [(2, True), (1, False)])
def test_rows_side_by_side_share_what_they_all_read(columns: int, *, shares: bool) -> None:
    """Rows that are walked once for each of two columns are; of one column they come in the order of memory."""
    types = {"a": (F32, (3072, 1024)), "b": (F32, (1024, columns))}
    model = model_of("y[i, j] +=! a[i, k] * b[k, j]", types)
    one, four = (computed(model, rows, "loads") for rows in (1, 4))
    assert (four < 0.8 * one) is shares


@pytest.mark.parametrize(("rows", "in_turn"), [(1 << 16, True), (64, False)])
def test_sums_of_rows_in_turn_hide_no_more_of_their_latency(rows: int, in_turn: bool) -> None:
    """As rows from memory are read, so their chains of additions follow each other; others go side by side."""
    model = model_of("y[i] +=! x[i, k]", {"x": (F32, (rows, 2048))})
    one, four = (
        stage(model.estimate(replace(estimated_program(model, {}, {"i": at_hand}), reduce_threads=16)), "compute")
        for at_hand in (1, 4)
    )
    assert (four > 0.9 * one) is in_turn


def test_rows_in_flight_at_once_turn_memory_no_more_than_one() -> None:
    """Softmax of rows of 128 bytes, and of 4 KB."""
    for row, is_dearer in ((32, False), (1024, True)):
        model = model_of(ROW_SOFTMAX, {"x": (F32, ((64 << 20) // row, row))}, ("y",))
        without = with_costs(model, replace(COSTS, loops=replace(COSTS.loops, bus_turnaround_penalty=0.0)))
        assert (walked(model, 4, 16) > walked(without, 4, 16)) is is_dearer


def test_longer_rows_turn_memory_longer() -> None:
    """Written through the caches, and past them, where reads hide no further than they run ahead."""
    for way in (False, True):
        found = []
        for row in (1024, 4096, 16384):
            model = model_of(ROW_SOFTMAX, {"x": (F32, ((64 << 20) // row, row))}, ("y",))
            program = replace(estimated_program(model, {}, {"i": 1}), reduce_threads=16).with_pipeline(nontemporal=way)
            found.append(moving(model.estimate(program)))
        assert found == sorted(found)
        assert found[-1] > 1.05 * found[0]


def test_places_with_a_quotient_are_found_by_the_compiler_where_an_axis_is_whole() -> None:
    model = model_of("y[i, j] = x[i, j // 2] where j in 64", {"x": (F32, (4096, 32))})
    cut, whole = (stage(estimated(model, {"j": columns}, {"j": 32}), "loads") for columns in (32, 64))
    assert cut > whole


def test_every_other_element_is_a_shuffle_of_two_vectors() -> None:
    """As it is of neighbours that repeat; elements further apart come one by one."""
    pair, far, twice = (
        stage(estimated(model_of(text, {"x": (F32, (64, columns))}), {"j": 64}, {"j": 32}), "loads")
        for text, columns in (("x[i, 2 * j]", 128), ("x[i, 5 * j]", 320), ("x[i, j // 2]", 32))
        for text in (f"y[i, j] = {text} where j in 64",)
    )
    assert pair == pytest.approx(twice)
    assert far > 2 * pair


def test_streams_go_to_memory_while_a_cache_delivers() -> None:
    model = model_of("y[j, i] = x[i, j]", {"x": (F32, (1008, 1008))})
    found = [estimated(model, {"i": 1008, "j": 1008}, {"i": 48, "j": 48}, streamed=way) for way in (True, False)]
    each = model.workload.compulsory_bytes / 2 / one_core().level("l3").bandwidth_bytes_per_s
    assert moving(found[1]) > 2 * each
    costs = COSTS.transpose
    slow_reads = with_costs(model, replace(COSTS, transpose=replace(costs, read_run_penalty=2 * costs.read_run_penalty)))
    again = estimated(slow_reads, {"i": 1008, "j": 1008}, {"i": 48, "j": 48}, streamed=True)
    assert moving(again) == pytest.approx(moving(found[0]))


@pytest.mark.parametrize(("write", "copy"), [(0.86, 1.5), (0.56, 0.8), (1.67, 1.0)])
def test_a_copy_past_the_caches_takes_what_was_measured_of_one(write: float, copy: float) -> None:
    """Or the sum of what reading and writing take, where a spec says nothing of doing both."""
    hw, size = one_core(), 1 << 26
    dram = replace(hw.dram, streamed_write_gain=write, streamed_copy_gain=copy)
    model = model_of("y[i] = x[i] * 2.0", {"x": (F32, (size,))}, hw=replace(hw, levels=(dram, *hw.levels[1:])))
    rate = hw.dram.bandwidth_bytes_per_s * min(2.0, max(copy, 2 / (1 + 1 / write)))
    moved_s = moving(estimated(model, {}, {"i": 64}, streamed=True))
    assert moved_s == pytest.approx(2 * 4 * size / rate, rel=1e-3)


@pytest.mark.parametrize(("text", "read", "each"), [("x[i] * 2.0", 1 << 26, 2 / 0.9), ("x[0] where i in 67108864", 1, 1.25)])
def test_results_through_the_caches_take_what_was_measured(text: str, read: int, each: float) -> None:
    """Of a fill as in a fill, of a map as in a copy. `each`: for a byte of results, in what one takes that is read."""
    hw = one_core()
    dram = replace(hw.dram, write_gain=0.8, copy_gain=0.9)
    model = model_of(f"y[i] = {text}", {"x": (F32, (read,))}, hw=replace(hw, levels=(dram, *hw.levels[1:])))
    moved_s = moving(estimated(with_memory(model, write_cost_factor=1.0), {}, {"i": 64}))
    assert moved_s == pytest.approx(each * (4 << 26) / hw.dram.bandwidth_bytes_per_s, rel=1e-3)


def test_results_past_the_caches_leave_room_for_what_is_read() -> None:
    """Half of the last cache is read, as much is written: only through the caches some of what is read is lost."""
    model = model_of("y[i] = x[i] * 2.0", {"x": (F32, (L3_BYTES // 8,))})
    tight, wide = (with_memory(model, llc_zero_hit_ratio=most) for most in (0.8, 8.0))
    streamed, plain = ([moving(estimated(m, {}, {"i": 64}, streamed=way)) for m in (tight, wide)] for way in (True, False))
    assert plain[0] > 1.3 * plain[1]
    assert streamed[0] < 1.3 * streamed[1]


def test_stretches_that_begin_elsewhere_are_dearer() -> None:
    model = model_of("y[i, j, k] = x[i, k] where j in 512", {"x": (F32, (128, 512))})
    times = [moving(estimated(model, {"j": rows}, {"k": 32})) for rows in (32, 64, 128, 512)]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.05 * times[-1]
    near = with_memory(model, tlb_miss_latency_factor=0.0)
    assert moving(estimated(near, {"j": 32}, {"k": 32})) == pytest.approx(times[-1], rel=0.01)


def test_a_peak_that_was_measured_is_the_floor_and_the_roof() -> None:
    text, shapes = "y[i] = x[i] * 2.0", {"x": (F32, (1 << 26,))}
    hw = one_core()
    peak = 1.5 * hw.dram.bandwidth_bytes_per_s
    peaked = replace(hw, levels=(replace(hw.dram, peak_bandwidth_bytes_per_s=peak), *hw.levels[1:]))
    plain, faster = (model_of(text, shapes, hw=one).workload for one in (hw, peaked))
    assert plain.lower_bound_s == pytest.approx(1.5 * faster.lower_bound_s)
    for p in (plain, faster):
        assert p.lower_bound_s == next(roof.seconds for roof in roofline(p) if roof.level == "dram")


def test_a_floor_that_decides_is_a_stage_and_what_an_estimate_rests_on() -> None:
    """Copies that are faster than reading alone, by the spec: no byte is moved faster than the level's figure."""
    hw = one_core()
    dram = replace(hw.dram, streamed_copy_gain=2.0, streamed_write_gain=2.0)
    model = model_of("y[i] = x[i] * 2.0", {"x": (F32, (1 << 26,))}, hw=replace(hw, levels=(dram, *hw.levels[1:])))
    found = estimated(model, {}, {"i": 64}, streamed=True)
    assert found.bound == "dram floor"
    assert stage(found, "dram floor") == model.workload.lower_bound_s > moving(found)
    assumed = AssumedStages(levels=(("dram", True),), arithmetic=False, latency=False, launch=False)
    assert "dram floor" in assumed
    assert "exposed" not in assumed
    assert "exposed" in replace(assumed, latency=True)
    assert "exposed" in replace(assumed, arithmetic=True)
    assert "compute floor" not in assumed


def test_what_is_moved_is_named_by_where_most_of_it_comes_from() -> None:
    sizes = (1 << 12, 1 << 16, L3_BYTES // 64, 1 << 26)
    models = [model_of("y[i] = x[i] * 2.0", {"x": (F32, (size,))}) for size in sizes]
    assert [moved_from(estimated(model, {}, {"i": 64})) for model in models] == ["l1", "l2", "l3", "dram"]
    assert moved_from(estimated(models[2], {}, {"i": 64}, streamed=True)) == "dram"


def test_rows_that_begin_within_a_line_go_through_the_caches() -> None:
    """Of rows of 1012 bytes every sixteenth begins with a line, of rows of 1024 bytes all do."""
    saved = {}
    for rows in (253, 256):
        model = model_of("y[j, i] = x[i, j]", {"x": (F32, (rows, 4096))})
        level = replace(one_core().dram, streamed_write_gain=2.0 * one_core().dram.streamed_write_gain)
        hw = replace(model.workload.machine.hw, levels=(level, *model.workload.machine.hw.levels[1:]))
        (group,) = partition(parse("y[j, i] = x[i, j]", {"x": TensorType(F32, (rows, 4096))}, None), hw)
        faster = prepare_model(group, hw, hw.unit_for(F32))
        tiles = {"i": 256, "j": 4096}, {"i": 64, "j": 32}
        slow, fast = (moving(estimated(m, *tiles, streamed=True)) for m in (model, faster))
        saved[rows] = slow - fast
    assert 0 < saved[253] < saved[256] / 8


def test_lines_that_two_tiles_of_a_row_share_are_met_again() -> None:
    met_again = {}
    for rows in (253, 256):
        model = model_of("y[j, i] = x[i, j]", {"x": (F32, (rows, 4096))})
        without = with_costs(model, replace(COSTS, transpose=replace(COSTS.transpose, shared_line_latency_fraction=0.0)))
        for wide in (64, 128):
            tiles = {"i": 256, "j": 4096}, {"i": wide, "j": 32}
            met_again[rows, wide] = moving(estimated(model, *tiles)) - moving(estimated(without, *tiles))
    assert met_again[256, 64] == met_again[256, 128] == 0
    assert met_again[253, 64] > 2 * met_again[253, 128] > 0


def test_quotients_in_places_are_found_for_each_element_that_is_staged() -> None:
    text = "y[f, c, b] +=! x[c, b // 15 * 2 + k, b % 15 * 2 + l] * w[k, l, f] where b in 240, k in 2, l in 2"
    shapes = {"x": (F32, (8, 32, 30)), "w": (F32, (2, 2, 64))}
    hw = one_core()
    (group,) = partition(parse(text, {name: TensorType(*of) for name, of in shapes.items()}, None), hw)
    prepared = [prepare(view, hw, hw.unit_for(F32)) for view in group_views(group, hw)]
    costs = replace(COSTS, convolution=replace(COSTS.convolution, division_cycles=0.0))
    found = {}
    for family, workload in prepared:
        model = family.model(workload)
        inner = next(axis.name for axis in workload.space.axes if axis.name.endswith("b"))
        both = (model, with_costs(model, costs))
        found[family.name] = [stage(estimated(m, {}, {"f": 4, inner: 16}), "packing") for m in both]
    elements, quotients = 8 * 240 * 4, 2
    each = COSTS.convolution.division_cycles * quotients / hw.clock_hz
    assert found["cpu/convolution"][0] - found["cpu/convolution"][1] >= elements * each * (1 - 1e-9)
    assert found["cpu/contraction"][0] == found["cpu/contraction"][1]


def with_quotients(cycles: float) -> HardwareSpec:
    """One core that divides a vector in so many cycles."""
    hw = one_core()
    units = [replace(u, quotients_per_s=u.shape[-1] * hw.clock_hz / cycles) for u in hw.units]
    return replace(hw, units=tuple(units))


def test_quotients_take_what_the_spec_says_beside_all_else() -> None:
    def compute_s(text: str, hw: HardwareSpec) -> float:
        model = model_of(text, {"x": (F32, (4096,)), "z": (F32, (4096,))}, hw=hw)
        return stage(estimated(model, {}, {"i": 64}), "compute")

    slow, fast = (compute_s("y[i] = x[i] / z[i]", with_quotients(cycles)) for cycles in (12.0, 6.0))
    vectors_s = 4096 / 16 / one_core().clock_hz
    assert slow - fast == pytest.approx(6.0 * vectors_s)
    assert compute_s("y[i] = x[i] / z[i] + x[i]", with_quotients(12.0)) == pytest.approx(slow)  # hidden
    without = replace(COSTS.loops, division_cycles=12.0)
    model = model_of("y[i] = x[i] / z[i]", {"x": (F32, (4096,)), "z": (F32, (4096,))})
    model = with_costs(model, replace(COSTS, loops=without))
    assert stage(estimated(model, {}, {"i": 64}), "compute") == pytest.approx(slow)


@pytest.mark.parametrize(("tile", "overlap"), [((1, 16), True), ((14, 32), False)])
def test_short_chains_of_multiply_adds_overlap_with_the_next_tiles(tile: tuple[int, int], overlap: bool) -> None:
    costs = replace(COSTS, contraction=replace(COSTS.contraction, call_cycles=1e-9))
    found = []
    for depth in (64, 1024):
        shapes = {"a": (F32, (56, depth)), "b": (F32, (depth, 64))}
        model = with_costs(model_of("c[m, n] +=! a[m, k] * b[k, n]", shapes), costs)
        found.append(stage(estimated(model, {}, {"m": tile[0], "n": tile[1]}), "compute") / depth)
    assert (found[0] < 0.9 * found[1]) == overlap


@pytest.mark.parametrize(("images", "dearer"), [(128, True), (4, False)])
def test_pieces_of_rows_are_dear_to_pack_from_memory(images: int, dearer: bool) -> None:
    """Columns are pixels of all images: one panel after the other is packed, for each k a piece of a row of pixels."""
    shapes = {"x": (F32, (images, 64, 3136)), "w": (F32, (64, 64))}
    model = model_of("y[b, f, p] +=! w[f, c] * x[b, c, p]", shapes)
    fused = next(axis.name for axis in model.workload.space.axes if len(axis.members) > 1)
    costs = replace(COSTS, contraction=replace(COSTS.contraction, segment_start_cycles=0.0))
    wide = [stage(estimated(m, {}, {"f": 8, fused: 64}), "packing") for m in (model, with_costs(model, costs))]
    assert (wide[0] > 1.3 * wide[1]) == dearer


def product(hw: HardwareSpec, depth: int = 64) -> Model:
    shapes = {"a": (F32, (224, depth)), "b": (F32, (depth, 64))}
    return model_of("c[m, n] +=! a[m, k] * b[k, n]", shapes, hw=hw)


def with_contraction(model: Model, **changed: float) -> Model:
    return with_costs(model, replace(COSTS, contraction=replace(COSTS.contraction, **changed)))


def test_calls_hide_better_on_a_core_that_issues_more() -> None:
    exposed = {}
    for vendor in ("amd", "intel"):
        model = product(one_core(vendor))
        free = with_contraction(model, call_cycles=1e-9)
        seen = [stage(estimated(m, {}, {"m": 4, "n": 16}), "compute") for m in (model, free)]
        exposed[vendor] = seen[0] - seen[1]
    assert 0 < exposed["amd"] < 0.85 * exposed["intel"]


def test_stores_of_a_call_hide_where_they_are_few() -> None:
    model = product(one_core("amd"))
    store = model.workload.machine.store_cycles
    exposed = {}
    for rows in (4, 14):
        few, all_of_them = (with_contraction(model, hidden_store_cycles=hidden) for hidden in (8 * store, 1e9))
        seen = [stage(estimated(m, {}, {"m": rows, "n": 32}), "compute") for m in (few, all_of_them)]
        exposed[rows] = (seen[0] - seen[1]) * one_core().clock_hz
    assert exposed[4] == pytest.approx(0.0, abs=1e-3)
    assert exposed[14] == pytest.approx(224 / 14 * 64 / 32 * (28 - 8) * store)


@pytest.mark.parametrize("vendor", ["amd", "intel"])
def test_panels_that_prefetchers_follow_cost_bandwidth_alone(vendor: str) -> None:
    model = product(one_core(vendor), depth=512)
    seen = [stage(estimated(with_contraction(model, l2_exposed_fraction=e), {}, {"m": 14, "n": 32}), "compute") for e in (0.0, 0.3)]
    assert (seen[0] == seen[1]) == (vendor == "amd")


@pytest.mark.parametrize(("columns", "waits"), [(1 << 20, True), (1 << 12, False)])
def test_runs_that_begin_in_memory_wait_for_it(columns: int, waits: bool) -> None:
    model = model_of("c[m, n] +=! a[m, k] * b[k, n]", {"a": (F32, (64, 64)), "b": (F32, (64, columns))})
    model = with_memory(model, hidden_cycles=60.0)  # all that a cache's latency has
    seen = [
        stage(estimated(m, {"n": 2048}, {"m": 8, "n": 32}), "packing")
        for m in (model, with_memory(model, prefetch_restart_fraction=0.0))
    ]
    assert (seen[0] > 1.01 * seen[1]) == waits


@pytest.mark.parametrize(
    ("columns", "piece", "waits"),
    [
        (1024, 32, True),  # rows of a page: each piece meets the row before
        (1024, 1024, False),  # whole rows: those stores are done
        (512, 32, True),  # half a page: the second row before
        (1000, 40, False),  # rows that begin elsewhere in a page each time
    ],
)
def test_pieces_of_even_rows_wait_for_stores_past_the_caches(columns: int, piece: int, waits: bool) -> None:
    shapes: Shapes = {"t": (F32, (30000, columns)), "i": (I32, (4096,))}
    model = model_of("y[n,c] = t[i[n],c]", shapes)
    no_waits = replace(COSTS, loops=replace(COSTS.loops, alias_4k_cycles=0.0))
    block, thread = {"c": piece}, {"c": 16 if piece % 16 == 0 else 8}
    here = stage(estimated(model, block, thread, streamed=True), "loads")
    assert (here > stage(estimated(with_costs(model, no_waits), block, thread, streamed=True), "loads")) is waits
    through = stage(estimated(model, block, thread), "loads")
    assert through == stage(estimated(with_costs(model, no_waits), block, thread), "loads")


def test_what_only_writes_meets_no_store() -> None:
    model = model_of("y[n,c] = x[n] where c in 1024", {"x": (F32, (4096,))})
    dear = replace(COSTS, loops=replace(COSTS.loops, alias_4k_cycles=1e6))
    block, thread = {"c": 32}, {"c": 16}
    here = stage(estimated(model, block, thread, streamed=True), "loads")
    assert here == stage(estimated(with_costs(model, dear), block, thread, streamed=True), "loads")


@pytest.mark.parametrize(
    ("source", "is_transposed"),
    [
        ("x[m, k]", True),
        ("x[m // 8, m % 8, k]", False),
        ("x[m, k].when([k < 128], z[m, k - 128])", False),
    ],
)
def test_rows_are_transposed_in_registers_only_from_one_plain_tensor(source: str, *, is_transposed: bool) -> None:
    shape = (60, 8, 256) if "//" in source else (480, 256)
    shapes = {"x": (F32, shape), "w": (F32, (256, 9))} | ({"z": (F32, (480, 128))} if "z[" in source else {})
    text = f"y[m, n] +=! {source} * w[k, n] where m in 480, n in 9, k in 256"
    hw = one_core()
    (group,) = partition(parse(text, {name: TensorType(*of) for name, of in shapes.items()}, None), hw)
    images = [image_space(view.space) for view in group_views(group, hw)]
    views = [image for image in images if image is not None and image.filters.extent == 480]
    assert views
    assert {image.weights_along_k for image in views} == {is_transposed}


def test_functions_that_divide_cost_a_division() -> None:
    """tanh, sigmoid and silu are quotients of exponentials; exp is not."""
    counts = {}
    for name in ("exp", "tanh", "sigmoid", "silu"):
        (statement,) = parse(f"y[i] = {name}(x[i]) where i in 64", {"x": TensorType(DType.FLOAT32, (64,))}).statements
        counts[name] = count_ops(statement.body, {"i"})
    assert [counts[name].div for name in ("exp", "tanh", "sigmoid", "silu")] == [0, 1, 1, 1]
    assert {each.exp for each in counts.values()} == {1}


@pytest.mark.parametrize(("dtype", "count"), [(DType.UINT8, BYTE_PERMUTATIONS), (DType.FLOAT32, 0)])
def test_bytes_of_a_table_cost_permutations(dtype: DType, count: int) -> None:
    types = {"x": TensorType(DType.UINT8, (64,)), "t": TensorType(dtype, (256,))}
    (statement,) = parse("y[i] = t[x[i]] where i in 64", types).statements
    assert count_ops(statement.body, {"i"}).lut == count


def test_entries_of_a_table_are_shuffled_or_gathered_where_no_instruction_permutes_bytes() -> None:
    types = {"x": TensorType(DType.UINT8, (32000,)), "t": TensorType(DType.UINT8, (256,))}
    program = parse("y[i] = t[x[i]] where i in 32000", types)
    wide = spec_with(frozenset())
    permuted, shuffled, gathered = (
        rank_partitions(PartitionCache(program), hw, 1)[0].candidates[0][0].estimate.seconds
        for hw in (spec_with(frozenset({"avx512vbmi"})), wide, replace(wide, isa=()))
    )
    assert permuted < shuffled < gathered


@pytest.mark.parametrize(("channels", "guard", "dear"), [(8, True, True), (8, False, False), (1, True, False)])
def test_words_of_guarded_taps_are_packed_one_by_one(channels: int, *, guard: bool, dear: bool) -> None:
    """Elements of a word have guards of their own; those of one axis are tested for all lanes at once."""
    at = "w + v - 1].when([w + v - 1 >= 0, w + v - 1 < 64], 0.0)" if guard else "w + v]"
    bf16 = DType.BFLOAT16
    types = {"x": TensorType(bf16, (channels, 8, 71)), "k": TensorType(bf16, (16, channels, 8))}
    program = parse(f"y[h, w, f] +=! x[c, h, {at} * k[f, c, v] where w in 64, v in 8", types)
    (group,) = partition(program, BF16_SPEC)
    dot = next(unit for unit in BF16_SPEC.units if unit.name == "dot_bf16")
    p = prepare(group, BF16_SPEC, dot)[1]
    block = tuple(p.extents)
    image = p.facts.a
    in_vectors = packing_cycles(p, p.a, replace(image, guards_fused_k=False), block, (p.m, 8))
    assert (packing_cycles(p, p.a, image, block, (p.m, 8)) > 2 * in_vectors) is dear


@pytest.mark.parametrize(("at", "apart"), [("m, n", 0), ("n, m", 1), ("n", 0), ("m", 0)])
def test_what_a_product_adds_is_gathered_where_its_columns_are_apart(at: str, apart: int) -> None:
    shapes = {"a": (F32, (96, 64)), "b": (F32, (64, 96)), "r": (F32, (96, 96)[: at.count(",") + 1])}
    model = model_of(f"t[m, n] +=! a[m, k] * b[k, n]; y[m, n] = t[m, n] + r[{at}]", shapes, ("y",))
    assert model.workload.n is not None
    assert gather_cycles(model.workload, model.workload.n) == apart * COSTS.loops.gather_cycles


def test_what_a_convolution_adds_in_another_layout_is_gathered() -> None:
    hw, results = one_core(), dict[str, float]()
    for at in ("f, h, w", "h, w, f"):
        shapes = {"x": (F32, (8, 18, 18)), "k": (F32, (16, 8, 3, 3)), "r": (F32, (16, 16, 16))}
        text = f"t[f, h, w] +=! x[c, h + u, w + v] * k[f, c, u, v] where h in 16, w in 16; y[f, h, w] = t[f, h, w] + r[{at}]"
        (group,) = partition(parse(text, {name: TensorType(*of) for name, of in shapes.items()}, ("y",)), hw)
        prepared = [prepare(view, hw, hw.unit_for(F32)) for view in group_views(group, hw)]
        family, workload = next(each for each in prepared if each[0].name == "cpu/convolution")
        results[at] = stage(estimated(family.model(workload), {}, {"f": 16, "w": 16}), "task")
    gathered = 16**3 * COSTS.loops.gather_cycles / hw.clock_hz
    assert results["h, w, f"] - results["f, h, w"] == pytest.approx(gathered)
