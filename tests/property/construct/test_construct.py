"""Construction against brute force: every candidate, on every kind of device, obeys the rules lowering relies on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from tile_spaces import column_sum, conv, depthwise, matmul, relu, row_sum, scatter, spatial

from roller_svc import hardware
from roller_svc.compiler.rank import construct, rank
from roller_svc.construct.align import EPSILONS
from roller_svc.construct.rules import ThreadTile
from roller_svc.construct.scale_up import SearchTrace, scale_up
from roller_svc.families import prepare
from roller_svc.families.common.gpu.elementwise_space import is_map, map_space
from roller_svc.families.common.gpu.row_space import MIN_PEELED_LANES
from roller_svc.families.cpu.contraction.blocking import rows_per_block
from roller_svc.families.cpu.window.cost import staged_bytes
from roller_svc.families.cpu.window.workload import PlaneSpace, plane_space
from roller_svc.families.gpu.simt_contraction.rules import SimtContractionRules
from roller_svc.families.gpu.window.workload import is_windowed, window_space
from roller_svc.ir.affine import Dim
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import Construction
from roller_svc.ir.group import AxisRole, GroupKind, KernelGroup, TileAccess, TileAxis
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.search import SearchKind
from roller_svc.perf.footprint import footprint

GPUS = ("nvidia-v100-sxm2", "nvidia-h200-sxm", "nvidia-k80", "amd-mi50", "graphcore-mk2")
CPUS = ("cpu-x86-avx2", "cpu-x86-avx512", "cpu-arm-neon")
QUIET = settings(max_examples=examples(50))
extents = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 97, 128, 256, 1000, 1024, 4099]))
groups: st.SearchStrategy[KernelGroup] = st.one_of(
    st.builds(matmul, extents, extents, extents, st.integers(1, 4), st.sampled_from([DType.FLOAT32, DType.FLOAT64])),
    st.builds(conv, st.integers(1, 9), st.integers(1, 70), st.integers(7, 40), extents, st.integers(1, 7), st.integers(1, 2)),
    st.builds(relu, extents, extents, extents),
    st.builds(row_sum, extents, st.one_of(extents, st.just(1 << 20))),
    st.builds(column_sum, extents, extents),
    st.builds(depthwise, st.integers(1, 9), extents, st.integers(7, 40), st.integers(1, 7), st.integers(1, 2)),
    st.builds(scatter, extents, extents),
)


def built(group: KernelGroup, hw: HardwareSpec, limit: int = 64) -> Construction:
    return construct(group, hw, hw.unit_for(group.space.compute_dtype), limit)


@pytest.mark.parametrize("target", GPUS + CPUS)
@QUIET
@given(group=groups)
def test_every_candidate_is_legal(target: str, group: KernelGroup) -> None:
    hw = hardware.load(target)
    construction = built(group, hw)
    assert construction.programs
    assert len(set(construction.programs)) == len(construction.programs) <= 64
    assert construction.tiles_visited <= 2100
    checks: dict[tuple[GroupKind, bool], Callable[[KernelGroup, RProgram, HardwareSpec], None]] = {
        (GroupKind.CONTRACTION, True): check_cpu_contraction,
        (GroupKind.CONTRACTION, False): check_simt_contraction,
        (GroupKind.NEST, True): check_cpu_nest,
        (GroupKind.NEST, False): check_simt_nest,
        (GroupKind.SCATTER, True): check_cpu_scatter,
        (GroupKind.SCATTER, False): check_simt_nest,
    }
    for program in construction.programs:
        for axis in group.space.spatial:
            assert program.block[axis.name] % program.thread[axis.name] == 0
        if program.split_k > 1:
            check_split(group, program)
        checks[group.kind, hw.family is TargetKind.CPU](group, program, hw)


def check_split(group: KernelGroup, program: RProgram) -> None:
    """No part of a split reduction is empty; parts are powers of two."""
    assert program.split_k & (program.split_k - 1) == 0
    longest = max(m.extent for a in group.space.reduced for m in a.members)
    assert (program.split_k - 1) * math.ceil(longest / program.split_k) < longest


def check_simt_contraction(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> None:
    space, limits = group.space, hw.limits
    (m,), (n,), (k,) = (space.role(r) for r in (AxisRole.M, AxisRole.N, AxisRole.K))
    assert all(program.block[b.name] == program.thread[b.name] == 1 for b in space.role(AxisRole.BATCH))
    bm, bn, bk = program.block[m.name], program.block[n.name], program.block[k.name]
    tm, tn = program.thread[m.name], program.thread[n.name]
    assert program.thread[k.name] == 1
    assert 8 <= bk <= 64
    # execution unit
    threads = (bm // tm) * (bn // tn)
    assert program.threads == threads
    assert threads % limits.warp_size == 0
    assert threads <= limits.max_threads_per_block
    # registers: accumulators, operands and the least of everything else, for a thread and for a core
    words = max(1, space.compute_dtype.bytes // 4)
    registers = (tm * tn + tm + tn) * words + min(14, limits.max_registers_per_thread // 8)
    assert registers <= limits.max_registers_per_thread
    assert registers * threads <= limits.registers_per_core
    # bank and capacity: rows are an odd number of 16-byte chunks, and so lie in all banks one after another
    size = space.compute_dtype.bytes
    chunk = max(1, 16 // size)
    rows = [edge if hw.block_level.banks == 1 else (math.ceil(edge / chunk) | 1) * chunk for edge in (bm, bn)]
    assert program.pipeline.stages * sum(rows) * bk * size <= limits.shared_bytes_per_block
    assert 1 <= program.pipeline.stages <= program.steps
    if hw.block_level.banks > 1:
        assert len({row * size * i // 16 % 8 for row in rows[:1] for i in range(8)}) == 8
    assert 1 <= program.pipeline.raster <= math.ceil(m.extent / bm)
    # transaction: a step along k is a whole transaction of the operands
    assert bk * size >= min(hw.dram.transaction_bytes, 32)
    # tensor shape: padding is bounded, beyond what a warp must do
    if threads > limits.warp_size:
        for axis, block, thread in ((m, bm, tm), (n, bn, tn)):
            padded = math.ceil(axis.extent / block) * block
            assert padded <= max(axis.extent * (1 + EPSILONS[-1]), 4 * thread)


def check_simt_rows(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> None:
    space, limits = group.space, hw.limits
    (inner,) = space.reduced
    run, chunk = program.thread[inner.name], program.thread[inner.name] * program.reduce_threads
    extent = inner.members[-1].extent  # rows whose length no vector divides are peeled, if these are long enough
    assert extent % run == 0 or (len(inner.members) == 1 and extent >= MIN_PEELED_LANES * run)
    assert run & (run - 1) == 0
    assert run <= 16
    assert program.block[inner.name] % chunk == 0
    assert program.block[inner.name] < inner.extent + chunk
    assert program.reduce_threads & (program.reduce_threads - 1) == 0
    assert program.threads <= limits.max_threads_per_block
    if program.reduce_threads > 1:
        assert program.threads % limits.warp_size == 0
    assert program.grid // program.split_k <= 2**31 - 1
    for axis in space.spatial:
        assert program.thread[axis.name] <= max(8, hw.vector_bytes)
        if program.threads > limits.warp_size:
            padded = math.ceil(axis.extent / program.block[axis.name]) * program.block[axis.name]
            assert padded <= max(axis.extent * (1 + EPSILONS[-1]), program.thread[axis.name])


def check_simt_outputs(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> None:
    """Maps and windows: a thread has several outputs, one after the other along the row in whole vectors."""
    space, limits = group.space, hw.limits
    thread = tuple(program.thread[a.name] for a in space.axes)
    block = tuple(program.block[a.name] for a in space.axes)
    assert program.reduce_threads == program.split_k == program.pipeline.stages == 1
    assert all(t & (t - 1) == 0 for t in thread)
    assert program.threads <= limits.max_threads_per_block
    if program.threads > limits.warp_size:
        idle = -program.threads % limits.warp_size
        assert 8 * idle <= program.threads
    assert program.grid <= 2**31 - 1
    for axis in space.spatial:
        padded = math.ceil(axis.extent / program.block[axis.name]) * program.block[axis.name]
        if program.threads > limits.warp_size:
            assert padded <= max(axis.extent * (1 + EPSILONS[-1]), program.thread[axis.name])
        if axis.extent == 1:
            assert program.thread[axis.name] == 1
    windows = window_space(space)
    if windows is not None:
        assert windows.supports(thread)
        assert not windows.register_windows(thread) or windows.unrolled_statements(thread) <= 1024
        return
    prepared = map_space(space)
    assert math.prod(thread) * min(a.bytes for a in prepared.accesses) <= 16 * 64
    shared = 0
    for staged in prepared.staged_accesses(block):
        row = block[staged.tile_axes(prepared.row)[-1]]
        pad = prepared.padded_layout(staged, block, thread).pad
        shared += math.prod(block[i] for i in staged.index or ()) // row * (row + pad) * staged.bytes
    assert shared <= limits.shared_bytes_per_block


def check_simt_nest(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> None:
    space, limits = group.space, hw.limits
    if space.reduces_rows:
        check_simt_rows(group, program, hw)
        return
    if group.kind is GroupKind.NEST and (is_map(space) or is_windowed(group)):
        check_simt_outputs(group, program, hw)
        return
    for axis in space.reduced:
        assert program.block[axis.name] == axis.extent
        assert program.thread[axis.name] == 1
    assert program.reduce_threads & (program.reduce_threads - 1) == 0
    assert program.reduce_threads <= 1024
    if not space.reduced or group.kind is GroupKind.SCATTER:
        assert program.reduce_threads == 1
    threads = program.reduce_threads * math.prod(program.block[a.name] // program.thread[a.name] for a in space.spatial)
    assert program.threads == threads <= limits.max_threads_per_block
    assert math.prod(program.thread[a.name] for a in space.spatial) <= 16
    for axis in space.spatial:
        if axis.extent == 1:
            assert program.thread[axis.name] == 1
    assert program.grid // program.split_k <= 2**31 - 1
    if program.reduce_threads > 1:
        assert threads * space.compute_dtype.bytes <= limits.shared_bytes_per_block
    if threads > limits.warp_size:
        assert threads % limits.warp_size == 0
        for axis in space.spatial:
            padded = math.ceil(axis.extent / program.block[axis.name]) * program.block[axis.name]
            assert padded <= max(axis.extent * (1 + EPSILONS[-1]), program.thread[axis.name])


def check_cpu_contraction(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> None:
    space, limits, lanes = group.space, hw.limits, program.unit.shape[-1]
    (m,), (n,), (k,) = (space.role(r) for r in (AxisRole.M, AxisRole.N, AxisRole.K))
    assert all(program.block[b.name] == program.thread[b.name] == 1 for b in space.role(AxisRole.BATCH))
    mr, nr = program.thread[m.name], program.thread[n.name]
    assert nr % lanes == 0
    vectors = nr // lanes
    assert mr * vectors + vectors + 1 <= limits.max_registers_per_thread
    kc, size = program.block[k.name], space.compute_dtype.bytes
    assert 1 <= kc <= k.extent
    l2 = hw.block_level
    assert kc * nr * size <= 0.2 * l2.capacity_bytes
    at_once = rows_per_block(program.block[m.name], mr, kc, size, l2.capacity_bytes)
    assert at_once == mr or at_once * kc * size <= 0.4 * l2.capacity_bytes
    assert program.block[m.name] < m.extent + mr
    assert program.block[n.name] < n.extent + nr


def check_cpu_nest(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> None:
    space, lanes = group.space, program.unit.shape[-1]
    if (planes := plane_space(group)) is not None:
        check_cpu_window(planes, program, hw)
        return
    for axis in space.reduced:
        assert program.block[axis.name] == axis.extent
        assert program.thread[axis.name] == 1
    wide = [a for a in space.spatial if program.thread[a.name] > 1]
    assert len(wide) <= 1
    if wide and program.reduce_threads > 1:  # lanes along the reduction: rows whose reductions go side by side
        assert space.reduces_rows
        assert program.thread[wide[0].name] == 4 <= wide[0].extent
    elif wide:
        assert wide[0].name == space.vector_axis
        width = program.thread[wide[0].name]
        assert width in (lanes, 2 * lanes, 4 * lanes)
        assert width < wide[0].extent + lanes
    if program.reduce_threads > 1:
        assert program.reduce_threads in (lanes, 2 * lanes, 4 * lanes)
        assert program.reduce_threads <= space.reduced[-1].members[-1].extent
    tasks = program.grid // program.split_k
    assert tasks <= max(1, 16 * hw.num_cores)
    for axis in space.spatial:
        assert program.block[axis.name] < axis.extent + program.thread[axis.name]


def check_cpu_window(planes: PlaneSpace, program: RProgram, hw: HardwareSpec) -> None:
    lanes, names = program.unit.shape[-1], [a.name for a in planes.axes]
    block = tuple(program.block[a.name] for a in program.space.axes)
    thread = tuple(program.thread[a.name] for a in program.space.axes)
    assert program.reduce_threads == program.split_k == 1
    assert program.thread[names[-1]] % lanes == 0
    assert all(program.thread[a.name] == 1 for a in program.space.axes if a.name not in names[-2:])
    totals = program.thread[names[-1]] // lanes * (program.thread[names[-2]] if len(names) > 1 else 1)
    assert totals < hw.limits.max_registers_per_thread
    assert staged_bytes(planes, block, thread) <= hw.limits.shared_bytes_per_core
    for axis in program.space.spatial:
        assert program.block[axis.name] < axis.extent + program.thread[axis.name]


def check_cpu_scatter(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> None:
    assert program.grid == program.reduce_threads == program.split_k == 1
    assert all(program.thread[a.name] == 1 and program.block[a.name] == a.extent for a in group.space.axes)


@QUIET
@given(group=groups)
def test_trace_is_data_and_the_same_every_time(group: KernelGroup) -> None:
    hw = hardware.load("nvidia-v100-sxm2")
    construction = built(group, hw)
    assert construction == built(group, hw)
    for search in construction.searches:
        for number, visit in enumerate(search.visits):
            assert visit.metrics.footprint_bytes > 0
            if search.kind is SearchKind.SCALE_UP and number:
                assert visit.parent is not None
            assert visit.parent is None or visit.parent < number
            assert visit.limit is None or visit.limit.needs > visit.limit.has


@QUIET
@given(m=extents, n=extents, k=extents, epsilon=st.sampled_from(EPSILONS))
def test_scale_up_grows_one_axis_at_a_time_until_capacity(m: int, n: int, k: int, epsilon: float) -> None:
    hw = hardware.load("nvidia-v100-sxm2")
    group = matmul(m, n, k)
    rules = SimtContractionRules(prepare(group, hw, hw.unit_for(DType.FLOAT32))[1])
    stage = rules.block_level(ThreadTile((1, 4, 4, 1)), epsilon)
    log = SearchTrace(10_000, rules.workload, "family")
    grown = scale_up(stage, log, 10_000)
    (search,) = log.searches
    first, *others = (visit.tile for visit in search.visits)
    assert first == tuple(steps[0] for steps in stage.steps)
    earlier = [first]
    for tile in others:
        assert any(
            [a <= b for a, b in zip(old, tile, strict=True)] == [True] * len(tile)
            and sum(a != b for a, b in zip(old, tile, strict=True)) == 1
            for old in earlier
        )
        earlier.append(tile)
    every = [t for t in itertools.product(*stage.steps) if not any(stage.evaluate(t)[2:])]
    large = {t for t in every if stage.is_saturated(t)}
    assert set(grown.saturated) == large
    assert set(grown.border) == set(every) - large
    assert search.saturated == large
    for tile, parent, metrics, _ in search.visits:
        if parent is not None:
            before = search.visits[parent].tile
            assert sum(a != b for a, b in zip(before, tile, strict=True)) == 1
        if metrics.too_large is not None and metrics.too_large.rule == "shared memory":
            assert metrics.too_large == ("shared memory", metrics.footprint_bytes, hw.limits.shared_bytes_per_block)


dims = st.lists(
    st.lists(st.tuples(st.sampled_from("ijk"), st.integers(1, 4)), max_size=3, unique_by=lambda t: t[0]),
    min_size=1,
    max_size=3,
)
reaches = st.fixed_dictionaries({name: st.integers(1, 6) for name in "ijk"})


@QUIET
@given(terms=dims, reach=reaches)
def test_footprint_counts_touched_elements(terms: list[list[tuple[str, int]]], reach: dict[str, int]) -> None:
    """Exact where no axis moves two dimensions; an upper bound where one does."""
    access = TileAccess("t", DType.FLOAT32, tuple(Dim(1000, tuple(sorted(t))) for t in terms), is_output=False)
    touched = {
        tuple(sum(coeff * point["ijk".index(name)] for name, coeff in dim) for dim in terms)
        for point in itertools.product(*(range(reach[name]) for name in "ijk"))
    }
    names = [name for dim in terms for name, _ in dim]
    if len(names) == len(set(names)):
        assert access.tile_elements(reach) == len(touched)
    assert access.tile_elements(reach) >= len(touched)
    run = access.contiguous_elements(reach)
    assert 1 <= run <= access.tile_elements(reach)


@QUIET
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3), tile=st.integers(1, 40))
def test_fused_axes_reach_no_further_than_said(sizes: list[int], tile: int) -> None:
    """Whatever aligned tile of a fused axis one takes, it meets at most that many values of each member."""
    axis = TileAxis("f", AxisRole.OUTER, tuple(spatial(f"a{i}", e) for i, e in enumerate(sizes)))
    reach = axis.member_extents(min(tile, axis.extent))
    points = list(itertools.product(*(range(e) for e in sizes)))
    for start in range(0, axis.extent, tile):
        values = zip(*points[start : start + tile], strict=True)
        for member, met in zip(axis.members, values, strict=True):
            assert len(set(met)) <= reach[member.name] <= member.extent


@QUIET
@given(group=groups, data=st.data())
def test_search_footprint_is_the_space_s(group: KernelGroup, data: st.DataObject) -> None:
    """What the search remembers is what the nouns say, and never more than the points of the tile."""
    touched = footprint(group.space, (32, 32))
    tile = tuple(data.draw(st.integers(1, a.extent)) for a in group.space.axes)
    reach: dict[str, int] = {}
    for axis, extent in zip(group.space.axes, tile, strict=True):
        reach |= axis.member_extents(extent)
    for access in touched.accesses:
        points = math.prod(tile[i] for i in access.axes)
        assert access.elements(tile) == min(points, access.access.tile_elements(reach))
        assert access.contiguous_elements(tile) == access.access.contiguous_elements(reach)
        assert access.transferred_bytes(tile) >= access.bytes(tile)


@pytest.mark.parametrize("target", GPUS + CPUS)
@pytest.mark.parametrize("group", [matmul(1, 1, 1), relu(), relu(1), row_sum(1, 1), scatter(1, 1)])
def test_smallest_programs_terminate(target: str, group: KernelGroup) -> None:
    hw = hardware.load(target)
    ranked, construction = rank(group, hw, hw.unit_for(DType.FLOAT32), 10)
    assert 1 <= len(ranked) <= 10
    assert construction.tiles_visited < 100


def test_small_contraction_fills_the_device() -> None:
    hw = hardware.load("nvidia-v100-sxm2")
    group = matmul(64, 64, 4096)
    ranked, construction = rank(group, hw, hw.unit_for(DType.FLOAT32), 10)
    assert 2 * ranked[0].program.grid > hw.num_cores  # splits are powers of two, and fewer parts are cheaper to join
    assert any(p.split_k == 1 and p.grid >= hw.num_cores for p in construction.programs)
    assert any(search.kind is SearchKind.SCALE_OUT and len(search.visits) > 1 for search in construction.searches)
