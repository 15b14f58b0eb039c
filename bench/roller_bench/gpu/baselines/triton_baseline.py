"""The Triton baseline: hand-written, autotuned kernels (triton_kernels.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from roller_bench.gpu.baselines import Variant
from roller_bench.gpu.samples import TimedCase
from roller_svc.ir.program import TensorProgram
from roller_svc.verify.run_and_verify import einsum_equation

_HALVES = ("float16", "bfloat16")
_MAX_ROW_ELEMENTS = 1 << 16  # that one Triton program holds
_MIN_HEAD_DIM = 16  # of tl.dot


def has_triton_kernel(case: TimedCase) -> bool:
    """Return whether triton_kernels.py has a kernel for a case."""
    return _kernel(case, case.program()) is not None


def triton_variants(case: TimedCase, program: TensorProgram, tensors: Mapping[str, Any]) -> list[Variant]:
    """Return the variant for a case. It is compiled and autotuned at the first call."""
    from roller_bench.gpu.baselines import triton_kernels as kernels

    kernel = _kernel(case, program)
    if kernel is None:
        return []
    operands = [tensors[name].t() if transposed else tensors[name] for name, transposed in _arguments(kernel, program)]
    causal = case.attention is not None and case.attention.causal
    calls: dict[str, Callable[[], Any]] = {
        "matmul": lambda: kernels.matmul(*operands),
        "softmax": lambda: kernels.softmax(*operands),
        "layernorm": lambda: kernels.norm(*operands),
        "rmsnorm": lambda: kernels.norm(*[*operands, None]),
        "attention": lambda: kernels.attention(*operands, causal=causal),
    }
    return [Variant(f"triton {kernel}", calls[kernel])]


def _kernel(case: TimedCase, program: TensorProgram) -> str | None:
    """Return the name of the kernel that computes a case, or None."""
    shapes = {name: kind.shape for name, kind in program.inputs}
    first = next(iter(shapes.values()))
    einsum = einsum_equation(program)
    if einsum is not None:
        is_supported = einsum.equation in ("ab,bc->ac", "ab,cb->ac") and case.dtype in _HALVES
        return "matmul" if is_supported else None
    if case.attention is not None:
        features = first[-1]
        return "attention" if features >= _MIN_HEAD_DIM and math.log2(features).is_integer() else None
    inputs = {"softmax": 1, "layernorm": 3, "rmsnorm": 2}.get(case.cls)
    return case.cls if inputs == len(shapes) and first[-1] <= _MAX_ROW_ELEMENTS else None


def _arguments(kernel: str, program: TensorProgram) -> list[tuple[str, bool]]:
    """Return the names of the kernel's arguments, each with whether it is transposed."""
    einsum = einsum_equation(program)
    if kernel != "matmul" or einsum is None:
        return [(name, False) for name, _ in program.inputs]
    b_is_transposed = einsum.equation == "ab,cb->ac"
    return [(einsum.operands[0], False), (einsum.operands[1], b_is_transposed)]
