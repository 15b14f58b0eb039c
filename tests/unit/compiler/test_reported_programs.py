"""Programs that once ended in an internal error: every plan of the first few has a source."""

from __future__ import annotations

import pytest

from roller_svc import hardware
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import merge_ranked_plans, rank_partitions
from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType

H200, A100, CPU = "nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "cpu-x86-avx512"
PLANS = 6
Types = dict[str, tuple[str, tuple[int, ...]]]
PROGRAMS: dict[str, tuple[str, str, Types]] = {
    "quotient of a remainder": (
        CPU, "y[i] = a[i] // (b[i] % c[i])", dict.fromkeys("abc", ("int32", (64,)))
    ),
    "shift of a shift, summed": (
        CPU, "y[] +=! a[i] << (b[i] << c[i])", dict.fromkeys("abc", ("int64", (64,)))
    ),
    "a table read twice under a sum": (
        CPU,
        "h[N, M] = const(1.0).when([N * 3 + M == 0], 0.5) where N in 4, M in 3; "
        "t[E, V, CI, CO] +=! w[CO, CI, R, S] * h[E, R] * h[V, S]",
        {"w": ("float32", (16, 8, 3, 3))},
    ),
    "a map that reads an output of its row": (
        H200,
        "high[] >=! x[i]; e[i] = exp(x[i] - high[]); total[] +=! e[i]; "
        "y[i] = where(e[i] <= e[i], z[i] - e[i], x[i]) + e[i]; l[] = high[] + log(total[])",
        {"x": ("float32", (256,)), "z": ("float32", (256,))},
    ),
    "axes of one factor each, rows of 1280": (
        H200, "c[m, n]: float32 +=! a[m, k] * b[j, n] where j in 768",
        {"a": ("float16", (256, 1280)), "b": ("float16", (768, 256))},
    ),
    "axes of one factor each, odd groups": (
        H200, "c[m, n]: float32 +=! a[m, k] * b[j, n]",
        {"a": ("float16", (1024, 512)), "b": ("float16", (640, 512))},
    ),
    "axes of one factor each, along columns": (
        H200, "c[m, n]: float32 +=! a[k, m] * b[n, j]",
        {"a": ("float16", (1280, 256)), "b": ("float16", (256, 768))},
    ),
    "axes of one factor each, bfloat16": (
        A100, "c[m, n]: float32 +=! a[m, k] * b[j, n]",
        {"a": ("bfloat16", (384, 512)), "b": ("bfloat16", (1024, 512))},
    ),
}  # fmt: skip
OUTPUTS = {"a map that reads an output of its row": ("e", "y")}


@pytest.mark.parametrize("name", PROGRAMS)
def test_plans_have_sources(name: str) -> None:
    target, expression, types = PROGRAMS[name]
    inputs = {tensor: TensorType(DType(dtype), shape) for tensor, (dtype, shape) in types.items()}
    program = parse(expression, inputs, OUTPUTS.get(name))
    hw = hardware.load(target)
    for plan in merge_ranked_plans(rank_partitions(PartitionCache(program), hw, PLANS), PLANS):
        assert "kernel0" in emit_plan(plan.plan, program, plan.groups, hw).text
