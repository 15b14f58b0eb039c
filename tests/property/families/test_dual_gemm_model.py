"""Pairs of sums: every rProgram keeps the device's limits, and the model follows the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedule_support import program

from roller_svc import hardware
from roller_svc.analysis.operand import operands
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.rank import construct
from roller_svc.families import prepare_model
from roller_svc.families.common.gpu.matrix.tile import mma_tile
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec

TARGETS = {"nvidia-a100-sxm-80gb": "mma_f16", "nvidia-t4": "mma_f16", "amd-mi250x": "mfma_f16"}
QUIET = settings(max_examples=8, suppress_health_check=list(HealthCheck))
extents = st.one_of(st.integers(8, 70), st.sampled_from([64, 96, 128, 512, 1000, 1024]))


def pair(m: int, f: int, k: int, hw: HardwareSpec) -> KernelGroup:
    text = "g[m, f] +=! x[m, k] * w[f, k]; u[m, f] +=! x[m, k] * v[f, k]; y[m, f] = relu(g[m, f]) * u[m, f]"
    compute = program(text, x=f"float16 {m} {k}", w=f"float16 {f} {k}", v=f"float16 {f} {k}")
    (group,) = PartitionCache(compute).partitions(hw)[0]
    return group


@pytest.mark.parametrize("target", TARGETS)
@QUIET
@given(m=extents, f=extents, k=extents)
def test_tiles_keep_the_limits_and_estimates_follow_the_device(target: str, m: int, f: int, k: int) -> None:
    hw = hardware.load(target)
    on = next(unit for unit in hw.units if unit.name == TARGETS[target])
    group = pair(m, f, k, hw)
    factors = operands(group)
    quick = replace(hw, levels=tuple(replace(x, bandwidth_bytes_per_s=2 * x.bandwidth_bytes_per_s) for x in hw.levels))
    now, then = prepare_model(group, hw, on), prepare_model(group, quick, on)
    for found in construct(group, hw, on).programs:
        tile, needs = mma_tile(found, *factors), now.resources(found)
        assert needs is not None
        assert needs.shared_bytes == tile.shared_bytes <= hw.limits.shared_bytes_per_block
        assert needs.registers_per_thread * needs.threads <= hw.limits.registers_per_core
        assert tile.n == 2 * found.block["f"]
        assert (found.split_k, found.pipeline.stream_k_blocks) == (1, 0)
        seconds = now.estimate(found).seconds
        assert seconds >= now.workload.lower_bound_s
        assert then.estimate(found).seconds <= seconds * (1 + 1e-9)
        assert now.workload.operations == 4 * m * f * k
