"""The library baseline: calls of cuBLAS, cuDNN and torch's own kernels through torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from roller_bench.gpu.baselines import Variant
from roller_bench.gpu.baselines.attention import attention_variants
from roller_bench.gpu.baselines.torch_program import library_convolution
from roller_bench.gpu.baselines.torch_timing import blas
from roller_bench.gpu.baselines.window_text import kernel_extents, windows
from roller_bench.gpu.samples import TimedCase
from roller_svc.ir.expr import AxisRef, Load
from roller_svc.ir.program import TensorProgram
from roller_svc.verify.run_and_verify import einsum_equation

Call = Callable[[], Any]
BLAS = ("cublas", "cublaslt")


def library_variants(case: TimedCase, program: TensorProgram, tensors: Mapping[str, Any]) -> list[Variant]:
    """Return the library calls for a case, or none. Products use both cuBLAS and cuBLASLt."""
    if case.attention is not None:
        return attention_variants(case.attention, tensors)
    einsum = einsum_equation(program)
    if einsum is not None:
        operands = [tensors[name] for name in einsum.operands]
        if einsum.equation in ("ab,bc->ac", "abc,acd->abd"):
            return _by_blas("torch matmul", lambda: torch.matmul(*operands))
        return _by_blas("torch einsum", lambda: torch.einsum(einsum.equation, *operands))
    inputs = list(tensors.values())
    order = permutation(program)
    if order is not None:
        return [Variant("torch permute", lambda: inputs[0].permute(order).contiguous())]
    call = _library_call(case, inputs)
    if call is not None:
        return [Variant(*call)]
    convolution = library_convolution(program, tensors)
    return [] if convolution is None else [Variant(*convolution)]


def permutation(program: TensorProgram) -> list[int] | None:
    """Return the permutation of a program that only permutes dimensions, else None."""
    body, index = program.statements[0].body, program.statements[0].index
    if len(program.statements) != 1 or not isinstance(body, Load):
        return None
    read, written = ([axis.name for axis in one if isinstance(axis, AxisRef)] for one in (body.index, index))
    whole = dict(program.inputs)[body.tensor].shape == tuple(program.statements[0].extents[name] for name in read)
    if len(read) != len(body.index) or sorted(read) != sorted(written) or read == written or not whole:
        return None
    return [read.index(name) for name in written]


def _by_blas(name: str, call: Call) -> list[Variant]:
    return [Variant(f"{name}, {library}", call, partial(blas, library)) for library in BLAS]


def _library_call(case: TimedCase, inputs: list[Any]) -> tuple[str, Call] | None:
    match case.cls:
        case "relu":
            return "torch relu", lambda: torch.relu(inputs[0])
        case "add":
            return "torch add", lambda: inputs[0] + inputs[1]
        case "softmax":
            return "torch softmax", lambda: torch.softmax(inputs[0], -1)
        case "layernorm":
            return "torch layer_norm", lambda: functional.layer_norm(inputs[0], inputs[0].shape[-1:], *inputs[1:])
        case "embedding":
            return "torch embedding", lambda: functional.embedding(inputs[1], inputs[0])
        case "rmsnorm" if len(inputs) == 2:
            return "torch rms_norm", lambda: functional.rms_norm(inputs[0], inputs[0].shape[-1:], inputs[1], eps=1e-5)
    return _window_call(case, inputs)


def _window_call(case: TimedCase, inputs: list[Any]) -> tuple[str, Call] | None:
    """Return the convolution or pooling call for channels-first images, the layout of the corpus."""
    window = windows(case.expression, inputs[0].ndim)
    if window is None:
        return None
    stride, padding = window
    match case.cls.removeprefix("kb_").replace("_1x1", ""):
        case "conv2d" | "conv2d_bias":
            return "torch conv2d", lambda: functional.conv2d(*inputs, stride=stride, padding=padding)
        case "conv2d_bias_relu":
            return "torch conv2d, relu", lambda: torch.relu(functional.conv2d(*inputs, stride=stride, padding=padding))
        case "depthwise":
            weight = inputs[1].reshape(inputs[0].shape[1], 1, *inputs[1].shape[-2:])
            groups = inputs[0].shape[1]
            return "torch conv2d", lambda: functional.conv2d(inputs[0], weight, None, stride, padding, 1, groups)
        case "maxpool" | "avgpool" as kind if len(kernel_extents(case.expression)) == 2:
            pool = functional.max_pool2d if kind == "maxpool" else functional.avg_pool2d
            kernel = kernel_extents(case.expression)
            return f"torch {kind}", lambda: pool(inputs[0], kernel, stride, padding)
    return None
