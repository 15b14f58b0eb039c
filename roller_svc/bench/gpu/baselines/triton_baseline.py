"""A case → the kernel written for it for Triton by hand, its tiles chosen by trying (bench/peers)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from roller_svc.bench.gpu.baselines import Variant
from roller_svc.bench.gpu.samples import TimedCase
from roller_svc.ir.program import TensorProgram
from roller_svc.verify.run_and_verify import einsum_equation

_HALVES = ("float16", "bfloat16")
_LONGEST_ROW = 1 << 16  # elements that one program of Triton may hold
_LEAST_FEATURES = 16  # of a product of Triton


def written_for(case: TimedCase) -> bool:
    """Whether bench/peers has a kernel for it."""
    return _kernel(case, case.program()) is not None


def triton_variants(case: TimedCase, program: TensorProgram, tensors: Mapping[str, Any]) -> list[Variant]:
    """It is compiled, and tiles are tried, when it is first called."""
    from roller_svc.bench.gpu.baselines import triton_kernels as kernels  # noqa: PLC0415 - needs Triton

    kernel = _kernel(case, program)
    if kernel is None:
        return []
    given = [tensors[name].t() if turned else tensors[name] for name, turned in _arguments(kernel, program)]
    causal = case.attention is not None and case.attention.causal
    calls: dict[str, Callable[[], Any]] = {
        "matmul": lambda: kernels.matmul(*given),
        "softmax": lambda: kernels.softmax(*given),
        "layernorm": lambda: kernels.norm(*given),
        "rmsnorm": lambda: kernels.norm(*[*given, None]),
        "attention": lambda: kernels.attention(*given, causal=causal),
    }
    return [Variant(f"triton {kernel}", calls[kernel])]


def _kernel(case: TimedCase, program: TensorProgram) -> str | None:
    """Which of the kernels computes the case."""
    shapes = {name: kind.shape for name, kind in program.inputs}
    first = next(iter(shapes.values()))
    einsum = einsum_equation(program)
    if einsum is not None:
        wanted = einsum.equation in ("ab,bc->ac", "ab,cb->ac") and case.dtype in _HALVES
        return "matmul" if wanted else None
    if case.attention is not None:
        features = first[-1]
        return "attention" if features >= _LEAST_FEATURES and math.log2(features).is_integer() else None
    inputs = {"softmax": 1, "layernorm": 3, "rmsnorm": 2}.get(case.cls)
    return case.cls if inputs == len(shapes) and first[-1] <= _LONGEST_ROW else None


def _arguments(kernel: str, program: TensorProgram) -> list[tuple[str, bool]]:
    """Names of what the kernel is given, and whether it lies the other way round."""
    einsum = einsum_equation(program)
    if kernel != "matmul" or einsum is None:
        return [(name, False) for name, _ in program.inputs]
    second_turned = einsum.equation == "ab,cb->ac"
    return [(einsum.operands[0], False), (einsum.operands[1], second_turned)]
