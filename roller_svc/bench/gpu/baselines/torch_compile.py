"""A case → what torch.compile makes of its program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from roller_svc.bench.gpu.baselines import Variant
from roller_svc.bench.gpu.baselines.torch_program import torch_function
from roller_svc.ir.program import TensorProgram


def compiled_variants(program: TensorProgram, tensors: Mapping[str, Any]) -> list[Variant]:
    """In torch's default mode: it chooses no matrix kernels by trying. It is given the program's graph of torch
    operators (make_fx), traced beforehand: what walks our expressions is none of its business. It compiles when it is
    first called. Raises BuildError for what torch has no way to write."""
    torch.compiler.reset()
    inputs = list(tensors.values())
    graph = make_fx(torch_function(program), tracing_mode="fake")(*inputs)
    function = torch.compile(graph, dynamic=False)
    return [Variant("torch.compile", lambda: tuple(function(*inputs)))]
