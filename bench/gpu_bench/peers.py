"""A case → the time of the vendors' libraries for the same work, through torch, or CuPy for bare products."""

from __future__ import annotations

import importlib.util
import re
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from gpu_bench.samples import TimedCase, timing_inputs
from roller_svc.ir.program import TensorProgram
from roller_svc.runtime.cuda_arrays import import_cupy
from roller_svc.trial import equation_of

Json = dict[str, Any]
Work = Callable[[], Any]
_SAMPLES = 7
# An index of the corpus's windows, `HO * 2 + KH - 1`: stride and padding.
_STRIDED = re.compile(r"\w+(?: \* (\d+))?(?: \+ \w+)?(?: - (\d+))?")
_KERNEL = re.compile(r"K[HW] in (\d+)")


def library_timed(case: TimedCase) -> Json | None:
    """None where no library has the operation in one call, or none is there."""
    if importlib.util.find_spec("torch") is None:
        return _by_cupy(case)
    import torch  # noqa: PLC0415 - optional, and slow to import

    from gpu_bench.attention_peer import attention_timed  # noqa: PLC0415 - needs torch or triton
    from gpu_bench.torch_timing import prepared, replayed, tensors_of  # noqa: PLC0415 - needs torch or triton

    prepared()
    program = case.program()
    tensors = tensors_of(case, program)
    if case.attention is not None:
        return attention_timed(case.attention, tensors)
    found = _torch_work(torch, case, program, tensors)
    if found is None:
        return None
    name, work = found
    shape = list(program.types[program.outputs[0].tensor].shape)
    made = list(work().shape)
    if made != shape:
        return {"name": name, "error": f"it makes {made}, not {shape}"}
    return {"name": f"torch {name}", "seconds": replayed(work)}


def _torch_work(
    torch: Any, case: TimedCase, program: TensorProgram, tensors: Mapping[str, Any]
) -> tuple[str, Work] | None:
    given = list(tensors.values())
    einsum = equation_of(program)
    if einsum is not None:
        factors = [tensors[name] for name in einsum.operands]
        if einsum.equation in ("ab,bc->ac", "abc,acd->abd"):
            return "matmul", lambda: torch.matmul(*factors)
        return "einsum", lambda: torch.einsum(einsum.equation, *factors)
    functional = torch.nn.functional
    match case.cls:
        case "relu":
            return "relu", lambda: torch.relu(given[0])
        case "add":
            return "add", lambda: given[0] + given[1]
        case "softmax":
            return "softmax", lambda: torch.softmax(given[0], -1)
        case "layernorm":
            return "layer_norm", lambda: functional.layer_norm(given[0], given[0].shape[-1:], *given[1:])
        case "transpose" if given[0].ndim == 4:
            return "permute", lambda: given[0].permute(0, 3, 1, 2).contiguous()
        case "embedding":
            return "embedding", lambda: functional.embedding(given[1], given[0])
        case "rmsnorm" if len(given) == 2:
            return "rms_norm", lambda: functional.rms_norm(given[0], given[0].shape[-1:], given[1], eps=1e-5)
    found = windows(case.expression, given[0].ndim)
    if found is None:
        return None
    stride, padding = found
    match case.cls.removeprefix("kb_").replace("_1x1", ""):
        case "conv2d" | "conv2d_bias":
            return "conv2d", lambda: functional.conv2d(*given, stride=stride, padding=padding)
        case "conv2d_bias_relu":
            return "conv2d, relu", lambda: torch.relu(functional.conv2d(*given, stride=stride, padding=padding))
        case "depthwise":
            weight = given[1].reshape(given[0].shape[1], 1, *given[1].shape[-2:])
            groups = given[0].shape[1]
            return "conv2d", lambda: functional.conv2d(given[0], weight, None, stride, padding, 1, groups)
        case "maxpool" | "avgpool" as kind if len(_KERNEL.findall(case.expression)) == 2:
            pool = functional.max_pool2d if kind == "maxpool" else functional.avg_pool2d
            kernel = [int(extent) for extent in _KERNEL.findall(case.expression)]
            return kind, lambda: pool(given[0], kernel, stride, padding)
    return None


def windows(expression: str, dimensions: int) -> tuple[list[int], list[int]] | None:
    """Stride and padding of both spatial dimensions, which are the last of the first tensor that is read; None where
    its indices are no windows."""
    read = re.search(r"=!? \w+\[([^\]]*)\]", expression)
    indices = read[1].split(", ") if read else []
    found = [_STRIDED.fullmatch(index) for index in indices[-2:]]
    if len(indices) != dimensions or len(found) != 2 or not all(found):
        return None
    pairs = [(int(one[1] or 1), int(one[2] or 0)) for one in found if one is not None]
    return [stride for stride, _ in pairs], [padding for _, padding in pairs]


def _by_cupy(case: TimedCase) -> Json | None:
    program = case.program()
    einsum = equation_of(program)
    if einsum is None or einsum.equation != "ab,bc->ac":
        return None
    cupy, arrays = import_cupy(), timing_inputs(case, program)
    a, b = (cupy.asarray(arrays[name]) for name in einsum.operands)
    samples = []
    for _ in range(_SAMPLES + 1):  # the first warms up
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        cupy.matmul(a, b)
        end.record()
        end.synchronize()
        samples.append(cupy.cuda.get_elapsed_time(start, end) / 1e3)
    return {"name": "cupy matmul", "seconds": statistics.median(samples[1:])}
