"""Which units a contraction is tried on, and what callers may demand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from contractions import A100, matmul

from roller_svc import hardware
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.plans import rank_best_partition
from roller_svc.compiler.rank import rank_units
from roller_svc.errors import NoCandidateError
from roller_svc.families.matching import units_for
from roller_svc.frontend.parse import parse
from roller_svc.ir.constraints import NO_CONSTRAINTS, OpClass, ScheduleConstraints, tile_value
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import UnitKind
from roller_svc.ir.program import TensorType

MMA = ScheduleConstraints(op_class=OpClass.MMA)
SIMT = ScheduleConstraints(op_class=OpClass.SIMT)


@pytest.mark.parametrize(
    ("target", "dtype", "tf32", "units"),
    [
        ("nvidia-a100-sxm-80gb", "float16", False, ["mma_f16", "fma_f32"]),
        ("nvidia-a100-sxm-80gb", "bfloat16", False, ["mma_bf16", "fma_f32"]),
        ("nvidia-a100-sxm-80gb", "float32", False, ["fma_f32"]),
        ("nvidia-a100-sxm-80gb", "float32", True, ["mma_tf32", "fma_f32"]),
        ("nvidia-a100-sxm-80gb", "float64", False, ["mma_f64", "fma_f64"]),
        ("nvidia-h200-sxm", "float64", False, ["mma_f64", "fma_f64"]),
        ("nvidia-rtx4090", "float64", False, ["fma_f64"]),
        ("nvidia-t4", "float16", False, ["mma_f16", "fma_f32"]),
        ("nvidia-t4", "bfloat16", False, ["fma_f32"]),
        ("nvidia-h200-sxm", "float16", False, ["wgmma_f16", "mma_f16", "fma_f32"]),
        ("nvidia-b200", "float16", False, ["mma_f16", "fma_f32"]),
        ("nvidia-v100-sxm2", "float16", False, ["fma_f32"]),
        ("amd-mi50", "float16", False, ["fma_f32"]),
        ("amd-mi250x", "float16", False, ["mfma_f16", "fma_f32"]),
        ("amd-mi250x", "float32", False, ["mfma_f32", "fma_f32"]),  # as it is, not rounded
        ("amd-mi250x", "float64", False, ["mfma_f64", "fma_f64"]),
        ("amd-mi300x", "bfloat16", False, ["mfma_bf16", "fma_f32"]),
        ("nvidia-k80", "float16", False, ["fma_f32"]),
        ("cpu-x86-avx2", "float16", False, ["avx2_f32"]),
        # b would have to be turned byte by byte: float16 units take its values too, and turn them on the way
        ("nvidia-rtx5090", "float8_e4m3fn", False, ["mma_e4m3", "mma_f16", "fma_f32"]),
        ("nvidia-rtx4090", "float8_e4m3fn", False, ["mma_f16", "fma_f32"]),  # sums of float8 are short there
    ],
)
def test_units_that_are_tried(target: str, dtype: str, tf32: bool, units: list[str]) -> None:
    hw = hardware.load(target)
    found = units_for(matmul(256, 256, 256, dtype, hw=hw), hw, ScheduleConstraints(allow_tf32=tf32))
    plain = hw.unit_for(DType(dtype)).name
    assert [u.name for u in found.units] == [plain if name.startswith("avx") else name for name in units]


@pytest.mark.parametrize(
    ("target", "dtype", "reason"),
    [
        ("nvidia-a100-sxm-80gb", "float32", "mma_tf32: operand a is float32, and tf32 is not allowed"),
        ("nvidia-h200-sxm", "float16", "wgmma_bf16: operand a is float16, the unit takes bfloat16"),
    ],
)
def test_refusals_give_their_reason(target: str, dtype: str, reason: str) -> None:
    hw = hardware.load(target)
    refusals = units_for(matmul(256, 256, 256, dtype, hw=hw), hw, NO_CONSTRAINTS).unsupported_units
    assert any(refusal.startswith(reason) for refusal in refusals)


def test_float32_in_sums_of_float64_is_not_rounded_to_tf32() -> None:
    statement = parse(
        "C[m, n]: float64 +=! A[m, k] * B[k, n]",
        {"A": TensorType(DType.FLOAT32, (256, 256)), "B": TensorType(DType.FLOAT32, (256, 256))},
    )
    (group,) = partition(statement, A100)
    assert [u.name for u in units_for(group, A100, NO_CONSTRAINTS).units] == ["mma_f64", "fma_f64"]


def test_units_whose_sums_no_fragment_has_are_refused() -> None:
    units = [replace(u, acc_dtype=DType.FLOAT16) if u.name == "mma_f16" else u for u in A100.units]
    hw = replace(A100, units=tuple(units))
    refusals = units_for(matmul(256, 256, 256, hw=hw), hw, NO_CONSTRAINTS).unsupported_units
    assert "mma_f16: sums of 2 bytes, fragments have 4" in refusals


def test_a_family_that_cannot_is_refused_with_the_reason() -> None:
    with pytest.raises(NoCandidateError, match="tf32 is not allowed"):
        rank_units(matmul(256, 256, 256, "float32"), A100, 1, MMA)
    k80 = hardware.load("nvidia-k80")
    with pytest.raises(NoCandidateError, match="nvidia-k80 has no matrix units"):
        rank_units(matmul(256, 256, 256, hw=k80), k80, 1, MMA)
    cpu = hardware.load("cpu-x86-avx2")
    with pytest.raises(NoCandidateError, match="one family"):
        rank_units(matmul(256, 256, 256, hw=cpu), cpu, 1, SIMT)


def test_candidates_of_all_units_are_ranked_together() -> None:
    group = matmul(512, 512, 512)
    best, construction = rank_units(group, A100, 10)
    seconds = [c.estimate.seconds for c in best]
    assert seconds == sorted(seconds)
    assert len(best) == 10
    assert best[0].program.unit.kind is UnitKind.MMA
    (slow, *_), _ = rank_units(group, A100, 10, SIMT)
    assert slow.program.unit.kind is UnitKind.FMA
    assert slow.estimate.seconds > best[0].estimate.seconds
    assert {p.unit.kind for p in construction.programs} >= {UnitKind.MMA}


def test_a_unit_that_cannot_win_is_not_tried() -> None:
    """FMA units need 7.6 ms for what takes matrix units 0.6."""
    _, construction = rank_units(matmul(4096, 4096, 4096), A100, 4)
    assert {p.unit.kind for p in construction.programs} == {UnitKind.MMA}


@pytest.mark.parametrize("tiles", [{"split_k": 4}, {"stages": 3}, {"split_k": 1, "stages": 4}])
def test_demanded_tiles_are_kept(tiles: dict[str, int]) -> None:
    best, _ = rank_units(matmul(128, 128, 8192), A100, 5, ScheduleConstraints(op_class=OpClass.MMA, tiles=tuple(tiles.items())))
    for candidate in best:
        assert {field: tile_value(candidate.program, field) for field in tiles} == tiles


def test_demands_hold_for_contractions_where_there_are_any() -> None:
    half = DType.FLOAT16
    program = parse(
        "C[m,n] +=! A[m,k] * B[k,n]; S[m] >=! C[m,n]; Y[m,n] = exp(C[m,n] - S[m])",
        {"A": TensorType(half, (256, 256)), "B": TensorType(half, (256, 4096))},
        ("Y",),
    )
    groups, ranked, _ = rank_best_partition(program, A100, 1, ScheduleConstraints(op_class=OpClass.MMA, tiles=(("stages", 3),)))
    kinds = {group.kind.value: candidates[0].program for group, candidates in zip(groups, ranked, strict=True)}
    assert kinds["contraction"].unit.name == "mma_f16"
    assert kinds["contraction"].pipeline.stages == 3
    assert kinds["nest"].pipeline.stages == 1


def test_the_best_candidate_is_found_without_constructing_all_views() -> None:
    """Winograd's algorithm may be faster than the bounds of the direct one, which is then left out."""
    hw = hardware.load("cpu-x86-avx512")
    types = {"x": TensorType(DType.FLOAT32, (1, 64, 58, 58)), "k": TensorType(DType.FLOAT32, (64, 64, 3, 3))}
    program = parse("y[n, f, h, w] +=! x[n, c, h + r, w + s] * k[f, c, r, s] where h in 56, w in 56", types)
    (group,) = partition(replace(program, constants=("k",)), hw)
    (best,), construction = rank_units(group, hw, 1)
    ranked, all_constructions = rank_units(group, hw, 100)
    assert best == ranked[0]
    assert 0 < len(construction.programs) < len(all_constructions.programs)
    assert construction.roofline == all_constructions.roofline
