"""The torch.compile baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from roller_bench.gpu.baselines import Variant
from roller_bench.gpu.baselines.torch_program import torch_function
from roller_svc.ir.program import TensorProgram


def compiled_variants(program: TensorProgram, tensors: Mapping[str, Any]) -> list[Variant]:
    """Compile a program in torch's default mode, without autotuned matrix kernels.

    torch.compile gets the traced graph of torch operators (make_fx), not the code that interprets our expressions. It
    compiles at the first call. Raises BuildError for a program that torch cannot express.
    """
    torch.compiler.reset()
    inputs = list(tensors.values())
    graph = make_fx(torch_function(program), tracing_mode="fake")(*inputs)
    function = torch.compile(graph, dynamic=False)
    return [Variant("torch.compile", lambda: tuple(function(*inputs)))]
