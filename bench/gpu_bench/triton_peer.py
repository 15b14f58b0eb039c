"""A case → the time of a kernel written for Triton by hand, its tiles chosen by trying (bench/peers)."""

from __future__ import annotations

import importlib.util
import math
import time
from typing import Any

from gpu_bench.samples import TimedCase
from roller_svc.ir.program import TensorProgram
from roller_svc.trial import equation_of

Json = dict[str, Any]
NAME = "triton"
_HALVES = ("float16", "bfloat16")
_MOST_REASON = 300
_LONGEST_ROW = 1 << 16  # elements that one program of Triton may hold
_LEAST_FEATURES = 16  # of a product of Triton


def written_for(case: TimedCase) -> bool:
    """Whether bench/peers has a kernel for it."""
    return _kernel(case, case.program()) is not None


def triton_timed(case: TimedCase) -> Json:
    """`tune_s`: what compiling and trying took."""
    for module in ("torch", "triton"):
        if importlib.util.find_spec(module) is None:
            return {"name": NAME, "skipped": f"{module} is not installed"}
    import torch  # noqa: PLC0415 - optional, and slow to import
    from peers import triton_timed_kernels as kernels  # noqa: PLC0415 - needs torch or triton
    from triton.errors import TritonError  # noqa: PLC0415 - needs torch or triton

    from gpu_bench.torch_timing import prepared, replayed, tensors_of  # noqa: PLC0415 - needs torch or triton

    prepared()
    program = case.program()
    kernel = _kernel(case, program)
    if kernel is None:
        return {"name": NAME, "skipped": "no kernel is written for it"}
    tensors = tensors_of(case, program)
    given = [tensors[name].t() if turned else tensors[name] for name, turned in _arguments(kernel, program)]

    def work() -> Any:
        match kernel:
            case "matmul":
                return kernels.matmul(*given)
            case "softmax":
                return kernels.softmax(*given)
            case "layernorm":
                return kernels.norm(*given)
            case "rmsnorm":
                return kernels.norm(*given, None)
        return kernels.attention(*given, causal=case.attention is not None and case.attention.causal)

    began = time.monotonic()
    try:
        work()
        torch.cuda.synchronize()
        tune_s = time.monotonic() - began
        return {"name": f"{NAME} {kernel}", "seconds": replayed(work), "tune_s": tune_s}
    except (RuntimeError, TritonError) as failure:
        return {"name": NAME, "error": f"{type(failure).__name__}: {failure}"[:_MOST_REASON]}


def _kernel(case: TimedCase, program: TensorProgram) -> str | None:
    """Which of the kernels computes the case."""
    shapes = {name: kind.shape for name, kind in program.inputs}
    first = next(iter(shapes.values()))
    einsum = equation_of(program)
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
    einsum = equation_of(program)
    if kernel != "matmul" or einsum is None:
        return [(name, False) for name, _ in program.inputs]
    second_turned = einsum.equation == "ab,cb->ac"
    return [(einsum.operands[0], False), (einsum.operands[1], second_turned)]
