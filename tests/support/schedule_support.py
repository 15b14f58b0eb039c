"""Small programs to schedule, and schedules made into arrays: point by point in Python, or compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from run_tree import run_tree

from roller_svc import hardware
from roller_svc.analysis.wide_values import storage_dtype
from roller_svc.codegen.kernel import GroupLaunches, emit, tensors_in_memory
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import dtype_named
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.runtime.cpu import CpuModule
from roller_svc.schedule.build_tree import build_schedule_tree, build_tree
from roller_svc.schedule.schedule import Schedule
from roller_svc.semantics.compare import Agreement, agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate
from roller_svc.toolchain import compile_source

Arrays = dict[str, np.ndarray[Any, Any]]


def program(text: str, outputs: Sequence[str] | None = None, **inputs: str) -> TensorProgram:
    """`A="float32 5 6"`: type and shape."""
    types = {}
    for name, words in inputs.items():
        dtype, *shape = words.split()
        found = dtype_named(dtype)
        assert found is not None
        types[name] = TensorType(found, tuple(map(int, shape)))
    return parse(text, types, None if outputs is None else tuple(outputs))


MATMUL = program("C[m, n] +=! A[m, k] * B[k, n]", A="float32 5 6", B="float32 6 7")
BLUR = program(
    "bx[y, x] = (A[y, x] + A[y, x + 1] + A[y, x + 2]) / 3.0 where y in 10, x in 8;"
    "B[y, x] = (bx[y, x] + bx[y + 1, x] + bx[y + 2, x]) / 3.0 where y in 8, x in 8",
    A="float32 10 10",
)
PADDED_BLUR = program(
    "bx[y, x] = A[y, x - 1].when(x >= 1, 0.0) + A[y, x] + A[y, x + 1].when(x < 6, 0.0);"
    "B[y, x] = bx[y - 1, x].when(y >= 1, 0.0) + bx[y, x] + bx[y + 1, x].when(y < 4, 0.0)",
    A="float32 5 7",
)
SOFTMAX = program("mx[r] >=! A[r, c]; e[r, c] = exp(A[r, c] - mx[r]); s[r] +=! e[r, c]; o[r, c] = e[r, c] / s[r]", A="float32 4 9")
WINDOWED = program(
    "Y[f, o] +=! X[c, o * 2 + k] * W[f, c, k] where o in 7; Z[f, o] = relu(Y[f, o] + b[f]);"
    "P[f, i] >=! Z[f, i * 2 + r] where i in 3, r in 3",
    X="float32 2 15",
    W="float32 3 2 3",
    b="float32 3",
)
NARROW = program(
    "C[m, n] +=! A[m, k] * B[k, n]; D[m, n] = max(C[m, n] + v[n], 0)",
    ["C", "D"],
    A="float16 3 5",
    B="float16 5 4",
    v="float16 4",
)
MIRROR = program(
    "P[i] = A[i] * 2.0; Q[i] = P[i] + P[11 - i]; R[i, j] = Q[i * 4 + j] - P[(i + j) % 3] where i in 3, j in 4",
    A="float32 12",
)
GATHER = program("t[i, c] = T[i, c] + 1.0; o[n, c] = t[ids[n], c] * 2.0", T="float32 4 3", ids="int32 5")
SCATTER = program(
    "y[n, c] = x[n, c] * 2.0; d[pos[n], c] +=. y[n, c]; z[i, c] = d[i, c] + 1.0",
    d="float32 6 3",
    x="float32 4 3",
    pos="int32 4",
)
SCALAR = program("s[] +=! A[i, j]; t[] = s[] * 0.5; o[i] = A[i, 0] - t[]", A="float32 3 4")
PROGRAMS = {
    "matmul": MATMUL, "blur": BLUR, "padded_blur": PADDED_BLUR, "softmax": SOFTMAX, "windowed": WINDOWED,
    "narrow": NARROW, "mirror": MIRROR, "gather": GATHER, "scatter": SCATTER, "scalar": SCALAR,
}  # fmt: skip


def judged(program: TensorProgram, inputs: Arrays, got: Arrays) -> Agreement:
    return agrees(program, got, evaluate(program, inputs))


def interpreted(schedule: Schedule, inputs: Arrays) -> Arrays:
    """The schedule's tree, point by point."""
    types = schedule.program.types
    tensors = {o.name: o.tensor for o in schedule.program.outputs}
    results, _ = run_tree(build_tree(schedule), inputs, {t: types[t].shape for t in tensors.values()})
    return {name: results[t].astype(storage_dtype(types[t].dtype)) for name, t in tensors.items()}


def compiled(schedules: Sequence[Schedule]) -> list[CpuModule]:
    """Schedules of one program as kernels of this CPU, through one run of the compiler."""
    program = schedules[0].program
    views = (*program.inputs, *((o.tensor, program.types[o.tensor]) for o in program.outputs))
    trees = tuple(build_schedule_tree(s, f"kernel{i}") for i, s in enumerate(schedules))
    hw = hardware.load("local")
    source = emit("kernels", (GroupLaunches(trees, views),), tensors_in_memory(program, program.types, ()), hw, "")
    binary = compile_source(source).binary
    return [CpuModule(CompiledKernel(replace(source, launches=(launch,)), binary, "", ())) for launch in source.launches]


def inputs_of(program: TensorProgram) -> Arrays:
    return random_inputs(program, seed=1)
