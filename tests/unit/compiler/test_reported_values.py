"""Programs whose values once were wrong: the first plans agree with the interpreter, on a CPU and emulated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from roller_svc import hardware
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import merge_ranked_plans, rank_partitions
from roller_svc.frontend.parse import parse
from roller_svc.ir.constraints import ScheduleConstraints
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import TargetKind
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.program import TensorType
from roller_svc.runtime.cpu import CpuModule
from roller_svc.runtime.cpu_features import missing_features
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate
from roller_svc.toolchain import compile_source

CPU, WIDE_CPU = "cpu-x86-avx2", "cpu-x86-avx512"
H200, A100, MI250X = "nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "amd-mi250x"
PLANS = 3
Types = dict[str, tuple[str, tuple[int, ...]]]
PROGRAMS: dict[str, tuple[tuple[str, ...], str, Types]] = {
    "an exclusive scan whose last element is out of range": (
        (CPU, H200), "y[j] +=! x[o * 7 - 7].when([o > j], 0.0) where o in 40, j in 40", {"x": ("float32", (267,))}
    ),
    "offsets, an exclusive scan that is longer than its input": (
        (CPU, A100), "p[j] +=! c[o].when([o < j], 0) where j in 10", {"c": ("int32", (9,))}
    ),
    "a scan of a part of each row": (
        (CPU, H200), "y[i, j] +=! x[i, o].when([o <= j], 0.0) where o in 1024, j in 1024", {"x": ("float32", (3, 1030))}
    ),
    "a cast that changes the neutral element": (
        (CPU, H200), "y[j] >=! x[o].when([o <= j], -2147483648).cast(`int8`) where j in 40", {"x": ("int32", (40,))}
    ),
    "a guard that hides a row of bytes": (
        (CPU, H200, MI250X), "y[i] >=! x[i, o].when([i > 1], -128)", {"x": ("int8", (3, 64))}
    ),
    "columns whose index a statement computes": (
        (H200, MI250X), "a[i] = b[i] % 64; y[i] = x[a[i], 0] + x[a[i], 2]; z[i] = a[i] + 1",
        {"b": ("int32", (100,)), "x": ("float32", (64, 3))},
    ),
    "selected matrices and a shorter table": (
        (H200,), "y[t, n] +=! x[t, k] * w[e[t], n, k] * s[e[t]]",
        {"x": ("float16", (256, 64)), "w": ("float16", (8, 64, 64)), "s": ("float16", (4,)), "e": ("int32", (256,))},
    ),
    "a map of selected products that reads a later sum": (
        (H200, A100), "h[t, n] +=! x[t, k] * w[e[t], n, k]; c[t] +=! x[t, k]; y[t, n] = h[t, n] - c[t]",
        {"x": ("float16", (256, 64)), "w": ("float16", (4, 64, 64)), "e": ("int32", (256,))},
    ),
    "scaled sums of scaled sums": (
        (H200, A100),
        "Q[m, j, h]: float16 +=! a[m, h, r] * b[j, h, r]; P[m, j]: float16 +=! s1[m, h] * Q[m, j, h]; "
        "C[m, p]: float32 +=! P[m, j] * w[p, j] * s[m, j // 16]",
        {"a": ("float16", (16, 4, 16)), "b": ("float16", (32, 4, 16)), "s1": ("float16", (16, 4)),
         "w": ("float16", (16, 32)), "s": ("float32", (16, 2))},
    ),
    "bytes that are rounded before they are scaled": (
        (H200, A100), "y[m, n]: float32 +=! a[m, k].cast(`float8_e4m3fn`).cast(`float32`) * b[n, k].cast(`float32`) * s[m]",
        {"a": ("int8", (64, 64)), "b": ("int8", (64, 64)), "s": ("float32", (64,))},
    ),
    "a product of a wide and a narrow factor": (
        (H200,), "y[m, n] +=! g[m, k] * x[m, k] * w[n, k].cast(`float32`)",
        {"g": ("float32", (64, 64)), "x": ("float16", (64, 64)), "w": ("float16", (64, 64))},
    ),
    "partial sums that are rounded": (
        (H200, A100),
        "P[m, n, g]: float32 +=! a[m, g, k] * b[n, g, k]; y[m, n] +=! P[m, n, g].cast(`float16`).cast(`float32`) * s[m, g]",
        {"a": ("float16", (32, 2, 64)), "b": ("float16", (32, 2, 64)), "s": ("float32", (32, 2))},
    ),
    "a transposed intermediate of a narrow type": (
        (CPU, A100), "x[e[g], i] +=. z[g, i]; t[j, k]: float32 = x[k, j] * x[k, j] where j in 2, k in 17",
        {"x": ("bfloat16", (17, 2)), "e": ("int32", (3,)), "z": ("bfloat16", (3, 2))},
    ),
    "a running product in a wider type": (
        (CPU,), "y = cumprod(x, dtype=float32)", {"x": ("int32", (30,))}
    ),
    "stores that gcc takes for accesses to the null pointer": (  # gcc bug 110702
        (CPU, WIDE_CPU), "t[b, m, r, n, p, q, s] +=! x[r, b, m, p, k, s] * w[k, b, n, q, s, m] * 0.5",
        {"x": ("float32", (3, 7, 5, 3, 2, 3)), "w": ("float32", (2, 7, 16, 33, 3, 5))},
    ),
}  # fmt: skip
OUTPUTS = {"columns whose index a statement computes": ("a", "y", "z")}
CASES = [(name, target) for name, (targets, _, _) in PROGRAMS.items() for target in targets]


def arrays_of(name: str, program: Any) -> dict[str, np.ndarray[Any, Any]]:
    arrays = {tensor: np.array(array) for tensor, array in random_inputs(program, seed=5).items()}
    rng = np.random.default_rng(5)
    if "e" in arrays:
        arrays["e"][:] = rng.integers(0, 4, arrays["e"].shape)
    if name == "a product of a wide and a narrow factor":
        arrays["g"][:] = 1e6
    if name == "a running product in a wider type":
        arrays["x"][:] = 10
    if "b" in arrays and arrays["b"].dtype == np.int32:
        arrays["b"][:] = rng.integers(-1000, 1000, arrays["b"].shape)
    return arrays


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize(("name", "target"), CASES)
def test_plans_agree_with_the_interpreter(name: str, target: str) -> None:
    _, expression, types = PROGRAMS[name]
    inputs = {tensor: TensorType(DType(dtype), shape) for tensor, (dtype, shape) in types.items()}
    program = parse(expression, inputs, OUTPUTS.get(name))
    hw = hardware.load(target)
    is_cpu = hw.family is TargetKind.CPU
    if is_cpu and (missing := missing_features(hw.arch)):
        pytest.skip(f"the CPU at hand lacks {', '.join(missing)}")
    arrays = arrays_of(name, program)
    with np.errstate(all="ignore"):
        wanted = evaluate(program, arrays)
    for plan in merge_ranked_plans(rank_partitions(PartitionCache(program), hw, PLANS, ScheduleConstraints()), PLANS):
        source = emit_plan(plan.plan, program, plan.groups, hw)
        kernel = CpuModule(compile_source(source)) if is_cpu else load_emulated(CompiledKernel(source, b"", "", ()), 1, races=True)
        got = kernel.run(arrays)
        agreement = agrees(program, got, wanted)
        assert agreement.ok, agreement.detail


def test_an_extremum_of_minus_infinity_in_an_integer_is_no_scan() -> None:
    text = "y[j] >=! x[o].when([o <= j], const(`-inf`)).cast(`int32`) where j in 8"
    program = parse(text, {"x": TensorType(DType.FLOAT32, (8,))})
    assert "kernel0" in emit_first(program, CPU)


def emit_first(program: Any, target: str) -> str:
    hw = hardware.load(target)
    (plan,) = merge_ranked_plans(rank_partitions(PartitionCache(program), hw, 1), 1)
    return emit_plan(plan.plan, program, plan.groups, hw).text
