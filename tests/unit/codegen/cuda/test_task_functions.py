"""Launches of every GPU family as rTasks: the bits of their own kernels, or the reason why they cannot join."""

from __future__ import annotations

import numpy as np
import pytest
from emulator_support import module
from persistent import Node, build_graph, run, spec, tasks_of

from roller_svc import hardware
from roller_svc.codegen.cuda.function import find_join_refusal
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.plans import best_plans, rank_best_partition
from roller_svc.errors import InvariantError
from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType
from roller_svc.ir.schedule import Barrier, Loop, LoopKind, ScheduleTree
from roller_svc.semantics.inputs import random_inputs

A100, H200, MI300 = "nvidia-a100-sxm-80gb", "nvidia-h200-sxm", "amd-mi300x"
F32, F16, I8 = DType.FLOAT32, DType.FLOAT16, DType.INT8


def types(**shapes: tuple[DType, tuple[int, ...]]) -> dict[str, TensorType]:
    return {name: TensorType(dtype, shape) for name, (dtype, shape) in shapes.items()}


QKV = types(Q=(F16, (1, 2, 64, 32)), K=(F16, (1, 2, 64, 32)), V=(F16, (1, 2, 64, 32)))
JOINING = {
    "gpu/elementwise": ("Y[j, i] = tanh(X[i, j]) * 2.0", types(X=(F32, (37, 53)))),
    "gpu/window": ("Y = max_pool2d(X, kernel=3, stride=2, padding=1)", types(X=(F32, (1, 3, 17, 19)))),
    "gpu/reduction": ("Y = softmax(X, axis=-1)", types(X=(F32, (33, 200)))),
    "gpu/reduction of few columns": ("Y[i] +=! X[i, j] * X[i, j]", types(X=(F16, (300, 7)))),
    "gpu/reduction in parts": ("Y[i] +=! X[i, j]", types(X=(F32, (1, 30000)))),
    "gpu/scan": ("Y = cumsum(X, axis=1)", types(X=(F32, (5, 700)))),
    "gpu/simt_contraction": ("C[m, n] +=! A[m, k] * B[k, n]", types(A=(F32, (70, 50)), B=(F32, (50, 90)))),
    "gpu/mma_contraction": ("C[m, n] +=! A[m, k] * B[k, n]", types(A=(F16, (96, 64)), B=(F16, (64, 160)))),
    "gpu/mma_contraction of int8": ("C[m, n] +=! A[m, k] * B[k, n]", types(A=(I8, (64, 64)), B=(I8, (64, 64)))),
    "gpu/elementwise in blocks of part of a warp": ("Y[i] = X[i] + 1.0", types(X=(F32, (100,)))),
    "gpu/mma_attention": ("Y = attention(Q, K, V, causal=true)", QKV),
}


@pytest.mark.emulator
@pytest.mark.parametrize("name", JOINING)
def test_rtasks_give_the_bits_of_their_own_kernel(name: str) -> None:
    expression, inputs = JOINING[name]
    hw = spec(A100)
    program = parse(expression, inputs, None)
    groups, ranked, _ = rank_best_partition(program, hw, 1)
    plan = best_plans(ranked, 1)[0]
    family = name.split(" ")[0]
    assert family in {choice.program.family for choice in plan.choices}
    arrays = random_inputs(program, 1)
    alone = module(emit_plan(plan, program, groups, hw), 0).run(arrays)
    outputs = {output.name: output.name for output in program.outputs}
    kernel = build_graph([Node(expression, {each: each for each in inputs}, outputs)], inputs, list(outputs), hw, top_k=1).kernel()
    for seed in range(3):
        found = run(kernel, arrays, seed, races=seed == 2)
        for output in outputs:
            np.testing.assert_array_equal(found[output], alone[output])


def test_launches_that_cannot_join_say_why() -> None:
    product = parse("C[m, n] +=! A[m, k] * B[k, n]", types(A=(F16, (512, 256)), B=(F16, (256, 512))), None)
    with pytest.raises(InvariantError, match="cannot join other launches in a kernel: its blocks are in clusters of 2"):
        tasks_of(product, spec(H200, 132), top_k=1)
    sm_80, gfx942 = (hardware.load(target).arch for target in (A100, MI300))
    barrier = Loop("i", 40, LoopKind.THREAD, (Barrier(),))
    assert find_join_refusal(ScheduleTree("k", (), cluster=2), sm_80) == "its blocks are in clusters of 2"
    assert find_join_refusal(ScheduleTree("k", (), zeroed=("y",)), sm_80) == "y must be zero before the launch"
    assert find_join_refusal(ScheduleTree("k", ()), gfx942) == "rTasks in one kernel need CUDA, got gfx942"
    assert "40 threads that meet, which are not whole warps" in str(find_join_refusal(ScheduleTree("k", (barrier,)), sm_80))
    assert find_join_refusal(ScheduleTree("k", (Loop("i", 40, LoopKind.THREAD, ()),)), sm_80) is None
