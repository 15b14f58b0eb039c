"""Shared memory of wgmma attention: the schedule allocates what the model predicts and devices have."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases_matrix import chosen, unit
from sampling import every

from roller_svc.codegen.cuda import function
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.rank import construct
from roller_svc.errors import InvariantError
from roller_svc.families.gpu.wgmma_attention.workload import wgmma_attention_facts, wgmma_attention_tile
from roller_svc.ir.report import Plan
from tests.unit.families.gpu.mma_attention.test_mma_attention import SCALED_BELOW, Inputs, operator, program
from tests.unit.families.gpu.wgmma_attention.test_wgmma_attention import HOPPER, Tiles, tree

SHAPES = [(256, 64), (96, 80), (256, 96), (128, 192), (192, 192), (32, 32)]  # features of queries, columns of values


def float32_results(features: int, columns: int, rows: int = 4096) -> tuple[str, Inputs]:
    """Outputs leave through a buffer of each warp; 16-bit ones are stored by TMA."""
    text = f"{SCALED_BELOW}; r[h, i, d] = o[h, i, d].cast(`float32`)"
    return text, {name: f"float16 2 {rows} {columns if name == 'v' else features}" for name in "qkv"}


@pytest.mark.parametrize(("features", "columns"), every(3, SHAPES))
@pytest.mark.parametrize("is_bulk", [False, True])
def test_launches_use_the_predicted_shared_memory(
    features: int, columns: int, monkeypatch: pytest.MonkeyPatch, *, is_bulk: bool
) -> None:
    dialect_of = function.dialect_of  # without static shared memory, launches have all of it
    monkeypatch.setattr(function, "dialect_of", lambda arch: replace(dialect_of(arch), static_shared_bytes=0))
    case = operator("2, 1", "4096, 4096", f"{features}, {columns}") if is_bulk else float32_results(features, columns)
    compute = program(*case)
    (group,) = partition(compute, HOPPER)
    on = unit(HOPPER, "wgmma_f16")
    known = wgmma_attention_facts(group, on, HOPPER.arch)
    programs = construct(group, HOPPER, on).programs
    assert programs
    for found in programs:
        (launch,) = emit_plan(Plan((chosen(found),)), compute, (group,), HOPPER).launches
        counted = wgmma_attention_tile(found, known).shared_bytes
        assert launch.shared_bytes == counted <= HOPPER.limits.shared_bytes_per_block


@pytest.mark.parametrize("features", ["32, 32", "36, 36", "32, 36", "36, 32"])
def test_one_stage_is_rejected(features: str) -> None:
    """Copies are committed when the next copies have started, which would wait for the stage to be read."""
    with pytest.raises(InvariantError, match="stages"):
        tree(operator("2, 1", "70, 150", features), Tiles(stages=1))
