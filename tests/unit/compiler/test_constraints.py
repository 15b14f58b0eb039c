"""Tiles that a caller demands: given where they fit, else refused with the limit and the nearest that does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases_matrix import AMPERE, contraction, unit

from roller_svc import hardware
from roller_svc.analysis.operand import operands
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.rank import rank_units
from roller_svc.errors import InvariantError, NoCandidateError
from roller_svc.families.common.gpu.matrix.tile import mma_tile
from roller_svc.frontend.lang import parse
from roller_svc.fusion.split.reduction import split_length
from roller_svc.fusion.split.scan import split_scan
from roller_svc.ir.constraints import OpClass, ScheduleConstraints, tile_value
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorType
from roller_svc.ir.rprogram import RProgram

SMALL = contraction("C[m, n] +=! A[m, k] * B[k, n]", A="float16 64 256", B="float16 256 96")


def limited(**limits: int) -> HardwareSpec:
    return replace(AMPERE, limits=replace(AMPERE.limits, **limits))


def best(group: KernelGroup, hw: HardwareSpec = AMPERE, family: OpClass | None = OpClass.MMA, **tiles: int) -> RProgram:
    candidates, _ = rank_units(group, hw, 1, ScheduleConstraints(op_class=family, tiles=tuple(tiles.items())))
    return candidates[0].program


def refused(group: KernelGroup, hw: HardwareSpec = AMPERE, family: OpClass | None = OpClass.MMA, **tiles: int) -> NoCandidateError:
    with pytest.raises(NoCandidateError) as failure:
        best(group, hw, family, **tiles)
    return failure.value


@pytest.mark.parametrize(
    "tiles",
    [
        {"split_k": 3},
        {"split_k": 3, "stages": 5},
        {"stream_k": 7},
        {"stream_k": 2, "stages": 4},
        {"raster": 2},
        {"stages": 6, "raster": 2},
    ],
)
def test_what_nobody_would_choose_can_be_demanded(tiles: dict[str, int]) -> None:
    program = best(SMALL, **tiles)
    assert {field: tile_value(program, field) for field in tiles} == tiles
    assert mma_tile(program, *operands(SMALL)).shared_bytes <= AMPERE.limits.shared_bytes_per_block
    assert not (program.split_k > 1 and program.pipeline.stream_k_blocks)
    assert program.unit is unit(AMPERE, "mma_f16")


def test_what_excludes_a_demand_gives_way() -> None:
    """Where all that construction offers is rastered, or some of it streamed."""
    large = contraction("C[m, n] +=! A[m, k] * B[k, n]", A="float16 8192 8192", B="float16 8192 8192")
    assert best(large).pipeline.raster > 1
    streamed = best(large, stream_k=7)
    assert (streamed.pipeline.stream_k_blocks, streamed.pipeline.raster) == (7, 1)
    few = replace(AMPERE, num_cores=5)
    _, construction = rank_units(SMALL, few, 1, ScheduleConstraints(op_class=OpClass.MMA))
    assert any(program.pipeline.stream_k_blocks for program in construction.programs)
    assert best(SMALL, few, split_k=3).pipeline.stream_k_blocks == 0


def test_no_part_of_a_demanded_split_is_without_work() -> None:
    for parts in (2, 3, 4, 8):
        program = best(SMALL, split_k=parts)
        assert program.split_k == parts
        length = split_length(SMALL.space, program.unit, program.block.as_dict(), parts)
        assert (parts - 1) * length < 256


def test_parts_of_a_demanded_split_are_contractions() -> None:
    """Of 9 products three parts would have 3 each: too few for a matrix unit."""
    group = contraction("C[m, n] +=! A[m, k, r] * B[r, k, n]", A="float16 64 3 3", B="float16 3 3 96")
    assert "3 parts of 3 in steps as of " in refused(group, split_k=3).message
    assert "are too short" in refused(group, split_k=3).message


def test_stages_beyond_shared_memory_name_the_limit_and_what_fits() -> None:
    failure = refused(SMALL, limited(shared_bytes_per_block=16 << 10), stages=20)
    assert failure.message.startswith("no tiles of kernel0 have stages = 20: 20 stages of m=")
    assert "bytes of shared memory in a block where nvidia-a100-sxm-80gb has 16,384, " in failure.message
    assert failure.hint is not None
    assert failure.hint.startswith("the nearest that fits: stages = ")
    fitting = int(failure.hint.split("stages = ")[1].split(",")[0])
    assert 2 <= fitting < 20
    program = best(SMALL, limited(shared_bytes_per_block=16 << 10), stages=fitting)
    assert program.pipeline.stages == fitting  # what is said to fit does


@pytest.mark.parametrize(
    ("tiles", "reason", "hint"),
    [
        ({"split_k": 99}, "99 parts of 256 in steps as of ", "split_k = "),
        ({"stream_k": 10_000}, r"steps, one for each of as many blocks", "stream_k = "),
        ({"stages": 1}, "a pipeline on mma_f16 has at least 2 stages", "stages = 2"),
        ({"raster": 50}, " rows", "raster = "),
        ({"split_k": 2, "stream_k": 3}, "split-K and stream-K are exclusive", "split_k = 2, stream_k = 0"),
        ({"stream_k": 3, "raster": 2}, "stream-K tiles have a fixed order", "stream_k = 3, raster = 1"),
        ({"lanes": 7}, "lanes is 32 here", "lanes = 32"),
    ],
)
def test_a_demand_that_cannot_be_met_says_why(tiles: dict[str, int], reason: str, hint: str) -> None:
    failure = refused(SMALL, **tiles)
    assert reason in failure.message
    assert failure.hint is not None
    assert hint in failure.hint
    assert failure.code == "no-candidate"


@pytest.mark.parametrize("target", ["nvidia-a100-sxm-80gb", "cpu-x86-avx512"])
@pytest.mark.parametrize(
    "body",
    ["h[i, t] = a[i, t] * h[i, t - 1].when([t > 0], 1.0) + a[i, t]", "y[i, j] +=! a[i, o].when([o <= j], 0.0) where j in 1000"],
)
def test_rows_of_scans_are_split_into_equal_pieces_alone(body: str, target: str) -> None:
    hw, row = hardware.load(target), {"a": TensorType(DType.FLOAT32, (2, 1000))}
    (group,) = partition(parse(body, row), hw)
    for parts, nearest in ((16, 10), (1000, 500)):
        failure = refused(group, hw, None, split_k=parts)
        assert f"rows of 1000 make no {parts} equal pieces of two points or more" in failure.message
        assert failure.hint is not None
        assert f"split_k = {nearest}, " in failure.hint
    assert best(group, hw, None, split_k=8).split_k == 8
    with pytest.raises(InvariantError, match="rows of 1000 of kernel0 cannot be split into 16 equal pieces"):
        split_scan(group, 16)
    (wide,) = partition(parse(body, {"a": TensorType(DType.FLOAT64, (2, 1000))}), hw)
    if body.startswith("h"):  # no type is wider than float64
        assert "rows of this scan cannot be split into pieces" in refused(wide, hw, None, split_k=8).message


def test_epilogue_row_reduction_rejects_split_k_and_stream_k() -> None:
    group = contraction("C[m, n] +=! A[m, k] * B[k, n]; Y[m] >=! C[m, n]", A="float16 64 256", B="float16 256 96")
    assert "cannot be split" in refused(group, split_k=2).message
    assert "does not support row reductions" in refused(group, stream_k=2).message


def test_single_threads_have_no_streams() -> None:
    assert "fma_f32 has no stream-K" in refused(SMALL, family=OpClass.SIMT, stream_k=4).message


def test_a_device_too_small_says_by_how_much_and_what_would_fit() -> None:
    failure = refused(SMALL, limited(shared_bytes_per_block=2048))
    assert failure.message.startswith("no tile of kernel0 fits nvidia-a100-sxm-80gb: m=16 n=16 k=")
    assert "on mma_f16 takes" in failure.message
    assert "bytes of shared memory in a block where nvidia-a100-sxm-80gb has 2,048, " in failure.message
    assert "shared memory" in failure.rejections
    assert failure.hint is not None
    assert failure.hint.startswith("what fits: m=")
    assert failure.hint.endswith("on fma_f32")


def test_a_device_with_little_shared_memory_gets_small_tiles() -> None:
    hw = limited(shared_bytes_per_block=8 << 10)
    assert mma_tile(best(SMALL, hw), *operands(SMALL)).shared_bytes <= 8 << 10


def test_stages_alone_leave_no_split_within_a_cluster() -> None:
    group = contraction("C[m, n] +=! A[m, k] * B[n, k]", A="float16 256 4096", B="float16 4096 4096")
    hopper = hardware.load("nvidia-h200-sxm")
    for stages in (2, 3):
        program = best(group, hopper, family=OpClass.WGMMA, stages=stages)
        assert (program.pipeline.stages, program.pipeline.cluster_k) == (stages, 1)
