"""Choices of construction and model for wgmma contractions: tiles, stages, persistent blocks, clusters, copies."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from contractions import conv, group, matmul

from roller_svc import hardware
from roller_svc.analysis.operand import operands
from roller_svc.compiler.post_compile import predict_resources
from roller_svc.compiler.rank import construct, rank_units
from roller_svc.construct.construct import MAX_RANKED_MATRIX
from roller_svc.errors import InvariantError, NoCandidateError
from roller_svc.families import prepare_model
from roller_svc.families.common.gpu.matrix.tile import WORD_BYTES
from roller_svc.families.common.gpu.warpgroups.terms import (
    CLUSTER_LATENCY_CYCLES,
    MAX_CLUSTER_BLOCKS,
    cluster_cores,
    cluster_parts,
    cluster_reduction_cycles,
)
from roller_svc.families.common.gpu.warpgroups.tile import MAX_COLUMNS, WgmmaLoad, batch_rounds, wgmma_tile
from roller_svc.families.gpu.wgmma_contraction.cost import wgmma_block
from roller_svc.families.matching import units_for
from roller_svc.ir.constraints import OpClass, ScheduleConstraints, tile_value
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import Candidate
from roller_svc.ir.group import AxisRole, KernelGroup
from roller_svc.ir.hardware import HardwareSpec

H200 = hardware.load("nvidia-h200-sxm")
SLOW_CACHE = replace(
    H200, levels=tuple(replace(lv, bandwidth_bytes_per_s=6.4e12) if lv.name == "l2" else lv for lv in H200.levels)
)  # the cache bounds more products than that of the device
B200 = hardware.load("nvidia-b200")
WGMMA = OpClass.WGMMA


def best(found: KernelGroup, count: int = 1, *, tf32: bool = False, hw: HardwareSpec = H200, **tiles: int) -> tuple[Candidate, ...]:
    return rank_units(found, hw, count, ScheduleConstraints(tf32, WGMMA, tuple(tiles.items())))[0]


def square(side: int, dtype: str = "bfloat16", layout: str = "nt") -> KernelGroup:
    return matmul(side, side, side, dtype, layout=layout, hw=H200)


def tflops(side: int, candidate: Candidate) -> float:
    return 2e-12 * side**3 / candidate.estimate.seconds


def loads(found: KernelGroup, candidate: Candidate) -> tuple[WgmmaLoad, WgmmaLoad]:
    tile = wgmma_tile(candidate.program, operands(found), H200.arch)
    return tile.a.load, tile.b.load


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_a_large_product_runs_as_libraries_run_it(layout: str) -> None:
    """128 x 256 in steps of 128 bytes, pairs of blocks that share the longer side, one block a core that stays."""
    found = square(8192, layout=layout)
    (first,) = best(found)
    program = first.program
    assert {program.block["m"], program.block["n"]} == {128, 256}
    assert program.block["k"] == 64
    assert program.pipeline.cluster == ((2, 1) if program.block["n"] == 256 else (1, 2))
    assert program.pipeline.stages in (3, 4)
    assert program.pipeline.persistent_blocks == H200.num_cores
    assert program.threads == 384
    assert 650 < tflops(8192, first) < 790
    assert loads(found, first) == (WgmmaLoad.TMA, WgmmaLoad.TMA)


@pytest.mark.parametrize(
    ("m", "n", "k"), [(128, 15360, 5120), (256, 3584, 3584), (256, 4608, 3584), (16, 4096, 16384), (1000, 1000, 1000)]
)
def test_of_all_tiles_the_fastest_are_priced(m: int, n: int, k: int) -> None:
    """The prefilter keeps the best tiles: none that it drops is faster by 1 %."""
    found = matmul(m, n, k, "float16", layout="nt", hw=H200)
    unit = next(unit for unit in units_for(found, H200, ScheduleConstraints(op_class=WGMMA)).units)
    model = prepare_model(found, H200, unit)
    some, everything = (
        min(model.timed(program).seconds for program in construct(found, H200, unit, limit).programs)
        for limit in (MAX_RANKED_MATRIX, 2000)
    )
    assert some <= 1.01 * everything


@pytest.mark.parametrize("side", [512, 1024])
def test_few_tiles_are_cut_until_they_fill_the_device(side: int) -> None:
    (first,) = best(square(side))
    assert first.program.grid >= 0.45 * H200.num_cores
    assert first.program.pipeline.persistent_blocks == 0


@pytest.mark.parametrize(("rows", "depth"), [(32, 9216), (64, 7168)])
def test_tiles_of_evened_sides_are_instructions_that_exist(rows: int, depth: int) -> None:
    """36,864 columns over 132 cores are even in tiles of 280, which no instruction has."""
    found = matmul(rows, 36864, depth, layout="nt", hw=H200)
    (n,) = found.space.role(AxisRole.N)
    assert max(c.program.thread[n.name] for c in best(found, 40)) <= MAX_COLUMNS


def test_deep_reductions_are_split() -> None:
    (first,) = best(matmul(128, 128, 65536, "bfloat16", layout="nt", hw=H200))
    assert first.program.split_k > 8 or first.program.pipeline.stream_k_blocks > 64


def test_blocks_that_stay_gain_what_lies_between_tiles() -> None:
    found = square(8192)
    staying, leaving = best(found), best(found, blocks=0)
    assert staying[0].program.pipeline.persistent_blocks == H200.num_cores
    assert staying[0].estimate.seconds < leaving[0].estimate.seconds


def with_epilogue(function: str, layout: str = "n, k", shape: tuple[int, int] = (8192, 512)) -> KernelGroup:
    return group(
        f"C[m, n] +=! A[m, k] * B[{layout}]; Y[m, n] = {function}",
        H200,
        A=("float16", (8192, 512)),
        B=("float16", shape),
    )


@pytest.mark.parametrize("function", ["gelu(C[m, n])", "tanh(C[m, n])", "C[m, n] / (1.0 + exp(-C[m, n]))"])
def test_heavy_epilogues_overlap_with_the_next_mainloop(function: str) -> None:
    found = with_epilogue(function)
    (first,) = best(found)
    (together,) = best(found, pingpong=0)
    assert first.program.pipeline.pingpong
    assert first.program.threads == 384
    assert first.program.pipeline.persistent_blocks == H200.num_cores
    assert first.estimate.seconds < 0.93 * together.estimate.seconds
    needs = predict_resources(found, first.program, H200)
    assert needs is not None
    assert (needs.threads, needs.registers_per_thread) == (384, 168)


@pytest.mark.parametrize(("layout", "shape"), [("n, k", (8192, 512)), ("k, n", (512, 8192))])
def test_overlapped_results_share_the_last_cache_with_loads(layout: str, shape: tuple[int, int]) -> None:
    """No ping-pong kernel is faster than the LLC moves its loads and its results."""
    found = with_epilogue("gelu(C[m, n])", layout, shape)
    last = H200.level("l2")
    results_s = 2 * 8192**2 / last.bandwidth_bytes_per_s
    in_turn = [c for c in best(found, 40) if c.program.pipeline.pingpong]
    assert in_turn
    for candidate in in_turn:
        moves_s = {stage.name: stage.seconds for stage in candidate.estimate.stages}["l2"]
        assert candidate.estimate.seconds >= moves_s > results_s


@pytest.mark.parametrize(("epilogue", "result_bytes"), [("exp(S[m, n])", 2), ("S[m, n] + D[m, n]", WORD_BYTES)])
def test_shared_memory_counts_results_as_they_pass_through_it(epilogue: str, result_bytes: int) -> None:
    """TMA stores rounded results; warps pass whole accumulators through their buffers. Both write and read them."""
    m, n, k = 4096, 4096, 64
    types = {"A": ("bfloat16", (m, k)), "B": ("bfloat16", (k, n))} | ({"D": ("bfloat16", (m, n))} if "D" in epilogue else {})
    found = group(f"S[m, n] +=! A[m, k] * B[k, n]; C[m, n] = {epilogue}", H200, **types)
    (first,) = best(found)
    tile = wgmma_tile(first.program, operands(found), H200.arch)
    copied = k * (m * n // tile.m + m * n // tile.n) * 2
    fragments = m * n // (64 * tile.group_n) * (64 + tile.group_n) * k * 2
    moved = {stage.name: stage.seconds for stage in first.estimate.stages}["shared"] * H200.block_level.bandwidth_bytes_per_s
    assert moved == pytest.approx(copied + fragments + 2 * m * n * result_bytes, rel=1e-3)


@pytest.mark.parametrize("k", [32, 64])
def test_a_product_of_one_k_tile_is_most_sensitive_to_its_bound(k: int) -> None:
    found = group("C[m, n] +=! A[m, k] * B[k, n]", H200, A=("bfloat16", (4096, k)), B=("bfloat16", (k, 4096)))
    (first,) = best(found)
    faster = {}
    for level in ("dram", "l2", "shared"):
        levels = tuple(
            replace(lv, bandwidth_bytes_per_s=1.1 * lv.bandwidth_bytes_per_s) if lv.name == level else lv for lv in H200.levels
        )
        hw = replace(H200, levels=levels)
        faster[level] = prepare_model(found, hw, first.program.unit).estimate(first.program).seconds
    assert min(faster, key=faster.__getitem__) == first.estimate.bound == "dram"
    assert faster["dram"] < 0.96 * first.estimate.seconds


def test_long_mainloops_and_few_tiles_have_no_ping_pong() -> None:
    """A tile of one warpgroup loads more for each multiply-add than one of two."""
    for m, n, k in ((8192, 8192, 4096), (8192, 8192, 512), (1024, 1024, 512), (256, 256, 256)):
        for candidate in best(matmul(m, n, k, "float16", hw=H200), hw=SLOW_CACHE):
            assert not candidate.program.pipeline.pingpong


def test_pairs_of_blocks_ask_less_of_the_last_cache() -> None:
    found = square(8192)
    (pair,) = best(found)
    alone = pair.program.with_pipeline(cluster=(1, 1))
    again = prepare_model(found, H200, alone.unit).estimate(alone)
    results_s = 2 * 8192**2 / H200.level("l2").bandwidth_bytes_per_s
    alone_s, pair_s = ({s.name: s.seconds for s in each.stages}["l2"] - results_s for each in (again, pair.estimate))
    assert alone_s == pytest.approx(1.5 * pair_s)
    assert again.seconds > pair.estimate.seconds


def test_an_uneven_grid_forms_no_clusters() -> None:
    """31 x 31 tiles of 256."""
    for candidate in best(matmul(31 * 256, 31 * 256, 4096, "bfloat16", layout="nt", hw=H200), 10):
        for axis, blocks in zip("mn", candidate.program.pipeline.cluster, strict=True):
            assert -(-31 * 256 // candidate.program.block[axis]) % blocks == 0


@pytest.mark.parametrize(
    ("dtype", "layout", "tf32", "expected"),
    [
        ("float16", "nn", False, (WgmmaLoad.TMA, WgmmaLoad.TMA)),
        ("int8", "nt", False, (WgmmaLoad.TMA, WgmmaLoad.TMA)),
        ("int8", "nn", False, (WgmmaLoad.TMA, WgmmaLoad.ELEMENT)),
        ("float8_e4m3fn", "tn", True, (WgmmaLoad.ELEMENT, WgmmaLoad.ELEMENT)),
        ("float32", "nt", True, (WgmmaLoad.TMA, WgmmaLoad.TMA)),
        ("float32", "tt", True, (WgmmaLoad.ELEMENT, WgmmaLoad.TMA)),
    ],
)
def test_what_the_instruction_cannot_read_is_turned_by_threads(
    dtype: str, layout: str, tf32: bool, expected: tuple[WgmmaLoad, WgmmaLoad]
) -> None:
    found = square(1024, dtype, layout)
    same = (c for c in best(found, 20, tf32=tf32) if c.program.unit.in_dtype.bits == DType(dtype).bits)
    assert loads(found, next(same)) == expected


def test_float32_is_rounded_by_whoever_loads_it() -> None:
    """Rows of 4 x 37 bytes are no boxes, and copies that nobody touches would be cut off, not rounded."""
    found = matmul(256, 256, 36, "float32", layout="nt", hw=H200)
    odd = matmul(256, 256, 37, "float32", layout="nt", hw=H200)
    assert loads(found, best(found, tf32=True)[0]) == (WgmmaLoad.TMA, WgmmaLoad.TMA)
    assert all(load.through_registers for load in loads(odd, best(odd, tf32=True)[0]))


def test_pixels_come_by_boxes_of_pixels() -> None:
    found = conv(4, 64, 30, 128, 3, H200)
    assert loads(found, best(found)[0])[0] is WgmmaLoad.IM2COL


def test_unaligned_rows_are_copied_by_threads_and_cost_more() -> None:
    aligned, odd = matmul(1024, 1024, 1024, hw=H200), matmul(1024, 1024, 1023, layout="nt", hw=H200)
    assert not any(load.is_tma for load in loads(odd, best(odd)[0]))
    assert best(odd)[0].estimate.seconds > 1.5 * best(aligned)[0].estimate.seconds


def test_roles_hand_their_registers_over_and_one_consumer_keeps_its_own() -> None:
    found = square(8192)
    (first,) = best(found)
    needs = predict_resources(found, first.program, H200)
    assert needs is not None
    assert (needs.threads, needs.registers_per_thread) == (384, 168)
    small = square(512)
    (one,) = best(small)
    needs = predict_resources(small, one.program, H200)
    assert needs is not None
    assert needs.threads == 256
    assert needs.registers_per_thread < 168


def test_where_it_is_refused_and_why() -> None:
    rows = group(
        "C[m,n] +=! A[m,k].cast(`float32`) * B[n,k].cast(`float32`); Y[m] +=! C[m,n]",
        H200,
        A=("float16", (128, 64)),
        B=("float16", (64, 64)),
    )
    with pytest.raises(NoCandidateError, match="row reductions are not supported"):
        units_for(rows, H200, ScheduleConstraints(op_class=WGMMA))
    with pytest.raises(NoCandidateError, match="nvidia-b200 has no matrix units of warpgroups"):
        units_for(square(256, "float16"), B200, ScheduleConstraints(op_class=WGMMA))


@pytest.mark.parametrize(
    ("tiles", "reason"),
    [
        ({"cluster_m": 16}, "a cluster has 1 to 8 blocks"),
        ({"cluster_n": 7}, "not a multiple of clusters of 7"),
        ({"blocks": 131, "cluster_m": 2}, "whole clusters of 2 blocks"),
        ({"stream_k": 64, "blocks": 64}, "not persistent over whole tiles"),
        ({"stream_k": 64, "pingpong": 1}, "only persistent blocks have a ping-pong schedule"),
        ({"pingpong": 2}, "pingpong is 0 or 1"),
        ({"cluster_k": 3}, "2, 4, 8 parts"),
        ({"cluster_k": 4, "cluster_m": 4}, "a cluster has 1 to 8 blocks"),
        ({"cluster_k": 2, "split_k": 2}, "a reduction is split once"),
        ({"cluster_k": 2, "stream_k": 64}, "a reduction is split once"),
    ],
)
def test_demands_that_cannot_be_met_say_why(tiles: dict[str, int], reason: str) -> None:
    with pytest.raises(NoCandidateError) as refused:
        best(square(2048), **tiles)
    assert reason in refused.value.message


@pytest.mark.parametrize(
    "tiles",
    [
        {"cluster_m": 2},
        {"cluster_n": 4},
        {"cluster_m": 2, "cluster_n": 2},
        {"blocks": 7},
        {"stream_k": 100},
        {"split_k": 3},
        {"blocks": 16, "cluster_m": 2, "split_k": 2},
        {"stages": 2, "raster": 1},
        {"pingpong": 1, "blocks": 12},
        {"pingpong": 1, "blocks": 8, "cluster_m": 2},
        {"cluster_k": 4},
        {"cluster_k": 2, "cluster_m": 2, "cluster_n": 2},
        {"cluster_k": 1, "split_k": 2},
    ],
)
def test_demands_that_can_are(tiles: dict[str, int]) -> None:
    program = best(square(2048), **tiles)[0].program
    assert {field: tile_value(program, field) for field in tiles} == tiles


def test_blocks_and_clusters_fit_together() -> None:
    program = best(square(2048))[0].program
    with pytest.raises(InvariantError, match="multiple of the cluster"):
        program.with_pipeline(cluster=(2, 1), persistent_blocks=3)
    with pytest.raises(InvariantError, match="only persistent blocks"):
        program.with_pipeline(persistent_blocks=0, pingpong=True)
    with pytest.raises(InvariantError, match="tile is that of one warpgroup"):
        program.with_pipeline(persistent_blocks=4, pingpong=True)
    with pytest.raises(InvariantError, match="are not persistent"):
        program.with_pipeline(cluster=(1, 1), cluster_k=2, persistent_blocks=4)
    with pytest.raises(InvariantError, match="neither persistent nor in clusters"):
        program.with_pipeline(cluster=(1, 1), persistent_blocks=0, cluster_k=2, stream_k_blocks=4)
    with pytest.raises(InvariantError, match="neither persistent nor in clusters"):
        program.with_pipeline(cluster=(1, 1), persistent_blocks=4, stream_k_blocks=4)


# k split within clusters ----------------------------------------------------------------------------------------------
MOST_MICROSECONDS = {128: 14.0, 256: 20.0, 384: 27.0}


@pytest.mark.parametrize("m", MOST_MICROSECONDS)
def test_few_tiles_split_k_within_clusters(m: int) -> None:
    found = matmul(m, 4096, 4096, "float16", layout="nn", hw=H200)
    (first,) = best(found)
    program = first.program
    assert program.pipeline.cluster_k > 1
    assert program.split_k == 1
    assert program.pipeline.cluster_size <= MAX_CLUSTER_BLOCKS
    assert program.grid <= cluster_cores(H200.num_cores, program.pipeline.cluster_size)
    assert first.estimate.seconds * 1e6 < MOST_MICROSECONDS[m]
    assert first.estimate.seconds < best(found, split_k=2)[0].estimate.seconds


def test_one_wave_that_the_llc_bounds_multicasts_in_fours() -> None:
    (first,) = best(matmul(512, 4096, 4096, "float16", layout="nn", hw=H200), hw=SLOW_CACHE)
    assert (first.program.pipeline.cluster, first.program.pipeline.cluster_k, first.program.grid) == ((2, 2), 1, 128)
    assert first.estimate.seconds * 1e6 < 31.0
    for side in (1024, 4096):  # several waves, or tiles of pairs that the unit bounds
        product = matmul(side, 4096, 4096, "float16", layout="nn", hw=H200)
        programs = [c.program for c in best(product, 40, hw=SLOW_CACHE)]
        assert all(math.prod(p.pipeline.cluster) <= 2 or p.grid <= 128 for p in programs)
        assert math.prod(programs[0].pipeline.cluster) <= 2


def test_parts_take_the_place_of_whole_tiles_that_multicast() -> None:
    (first,) = best(matmul(256, 1024, 8192, "float16", layout="nt", hw=H200))
    assert (first.program.pipeline.cluster, first.program.pipeline.cluster_k, first.program.grid) == ((2, 1), 4, 128)


def test_parts_fit_the_stages_that_they_reuse() -> None:
    found = matmul(256, 4096, 4096, "float16", layout="nn", hw=H200)
    programs = [c.program for c in best(found, 40) if c.program.pipeline.cluster_k > 1]
    assert programs
    for program in programs:
        tile = wgmma_tile(program, operands(found), H200.arch)
        assert tile.pipeline.stages >= tile.min_partial_stages
        assert tile.m * tile.partial_row_words * WORD_BYTES <= tile.pipeline.stages * (tile.a.bytes + tile.b.bytes)
        assert tile.k_order.steps >= program.pipeline.cluster_k
        assert program.pipeline.cluster_size <= MAX_CLUSTER_BLOCKS


def test_more_parts_move_more_bytes() -> None:
    found = matmul(256, 4096, 4096, "float16", layout="nn", hw=H200)
    program = best(found)[0].program
    model = prepare_model(found, H200, program.unit)
    tile = wgmma_tile(program, operands(found), H200.arch)
    two, four, eight = (cluster_reduction_cycles(model.workload, tile, parts) for parts in (2, 4, 8))
    assert two < four < eight
    assert cluster_reduction_cycles(model.workload, tile, 2, 4) > two  # the network of a larger cluster is slower


def test_short_rows_of_boxes_take_longer() -> None:
    """k-tiles of 16 halves have rows of 32 bytes. 9000 is a multiple of 8, so that padding k to 64 takes longer."""
    found = matmul(90000, 9000, 9000, "float16", layout="nt", hw=H200)
    program = best(found)[0].program
    k = found.space.role(AxisRole.K)[0].name
    assert program.block[k] == 64
    model = prepare_model(found, H200, program.unit)
    launch = model.launch(model.workload, program)
    ports = {}
    for extent in (16, 32, 64):
        block = tuple([extent if i == model.workload.k else n for i, n in enumerate(launch.block)])
        ports[extent] = wgmma_block(model.workload, block, launch.thread).step.port / extent
    assert ports[16] == pytest.approx(2 * ports[64])
    assert ports[32] == pytest.approx(ports[64])


def test_a_prime_number_of_rounds_waits_for_each() -> None:
    """176 columns are 11 rounds, of which a batch has one; 192 are 12, of which it has six."""
    found = matmul(256, 4096, 4096, "float16", layout="nn", hw=H200)
    program = best(found)[0].program
    model = prepare_model(found, H200, program.unit)
    known = wgmma_tile(program, operands(found), H200.arch)
    prime, even = (
        cluster_reduction_cycles(model.workload, known._replace(m=128, n=n, group_m=64, group_n=n), 2) for n in (176, 192)
    )
    assert (batch_rounds(11, 8), batch_rounds(12, 8), batch_rounds(1, 8), batch_rounds(6, 0)) == (1, 6, 1, 1)
    assert prime > even + 6 * CLUSTER_LATENCY_CYCLES  # nine more batches, fewer bytes


@pytest.mark.parametrize(
    ("tiles", "steps", "blocks", "parts"),
    [
        (32, 64, 1, 4),
        (64, 64, 1, 2),
        (66, 64, 1, 2),
        (67, 64, 1, 1),
        (33, 64, 1, 2),
        (16, 64, 1, 8),
        (1, 64, 1, 8),
        (1, 8, 1, 4),
        (1, 3, 1, 1),
        (16, 64, 2, 4),
        (16, 64, 4, 2),
        (16, 64, 8, 1),
    ],
)
def test_parts_fill_one_wave_of_clusters(tiles: int, steps: int, blocks: int, parts: int) -> None:
    assert cluster_parts(H200.num_cores, tiles, steps, blocks) == parts


def test_a_b200_keeps_to_warps() -> None:
    hw: HardwareSpec = B200
    found = matmul(256, 256, 256, hw=hw)
    assert [u.name for u in units_for(found, hw, ScheduleConstraints()).units] == ["mma_f16", "fma_f32"]
