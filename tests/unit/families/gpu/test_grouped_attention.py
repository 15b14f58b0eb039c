"""Attention of queries that share keys, where softmax has one axis for all heads, as exporters of models write it."""

from __future__ import annotations

import numpy as np
import pytest
from schedule_support import program

from roller_svc import hardware
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import best_plans
from roller_svc.compiler.rank import rank_units
from roller_svc.ir.group import GroupKind
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.program import TensorProgram
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate

KEYS = 96
GROUPED = (
    "S[b, m, n] +=! Q[b, m, k] * K[b, n, k]; R[i, j, n] = S[{view}, n] where i in 8, j in 1;"
    "D[i, j, n] = R[i, j, n] / c[]; F[i, j, n] = u[].when([p[n] > o[j]], D[i, j, n]);"
    "H[i, j] >=! F[i, j, n]; E[i, j, n] = exp(F[i, j, n] - H[i, j]); T[i, j] +=! E[i, j, n];"
    "W[i, j, n] = E[i, j, n] / T[i, j]; X[b, m, n] = W[b * 4 + m, 0, n] where b in 2, m in 4;"
    "Y[b, m, d] +=! X[b, m, n] * V[b, n, d]"
)
HEADS = "i // 4, i % 4"
TARGETS = ("nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "amd-mi250x")


def grouped(view: str = HEADS, outputs: tuple[str, ...] = ("Y",)) -> TensorProgram:
    cache = f"bfloat16 2 {KEYS} 32"
    scalars = dict.fromkeys("cu", "bfloat16")
    text = GROUPED.format(view=view)
    return program(text, outputs=[*outputs], Q="bfloat16 2 4 32", K=cache, V=cache, p=f"int32 {KEYS}", o="int32 1", **scalars)


@pytest.mark.parametrize("target", TARGETS)
def test_heads_of_one_axis_are_attention(target: str) -> None:
    (group,) = PartitionCache(grouped()).groups(hardware.load(target))
    assert group.kind is GroupKind.ATTENTION


@pytest.mark.parametrize(
    ("view", "outputs"),
    [
        (HEADS, ("Y", "W")),  # weights that something else reads
        (HEADS, ("Y", "S")),
        ("i % 2, i // 2", ("Y",)),  # heads in another order
        ("i // 4, (i + 1) % 4", ("Y",)),
    ],
)
def test_other_views_and_readers_stay_several_kernels(view: str, outputs: tuple[str, ...]) -> None:
    compute = grouped(view, outputs)
    for target in TARGETS:
        groups = PartitionCache(compute).groups(hardware.load(target))
        assert all(group.kind is not GroupKind.ATTENTION for group in groups)


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("target", TARGETS)
def test_heads_of_one_axis_agree_with_the_interpreter(target: str) -> None:
    compute, hw = grouped(), hardware.load(target)
    groups = PartitionCache(compute).groups(hw)
    plan = best_plans(tuple(rank_units(group, hw, 1)[0] for group in groups), 1)[0]
    source = emit_plan(plan, compute, groups, hw)
    for seed, last in ((1, 0), (2, 57), (3, KEYS - 1)):
        arrays = random_inputs(compute, seed)
        arrays |= {"p": np.arange(KEYS, dtype=np.int32), "o": np.array([last], np.int32)}
        arrays |= {name: np.array(value, arrays[name].dtype) for name, value in (("c", 5.65625), ("u", -np.inf))}
        got = load_emulated(CompiledKernel(source, b"", "", ()), seed, races=True).run(arrays)
        agreement = agrees(compute, got, evaluate(compute, arrays))
        assert agreement.ok, agreement.detail
