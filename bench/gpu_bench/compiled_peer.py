"""A case → the time of what torch.compile makes of its program, and how long it took to make it."""

from __future__ import annotations

import importlib.util
import shutil
import time
from typing import Any

from gpu_bench.samples import TimedCase
from roller_svc.errors import BuildError

Json = dict[str, Any]
NAME = "torch.compile"
_MOST_REASON = 300


def compiled_timed(case: TimedCase) -> Json:
    """In torch's default mode: it chooses no matrix kernels by trying.

    It is given the program's graph of torch operators (make_fx), traced beforehand: what walks our expressions is none
    of its business. What it cannot compile is an error, and what is missing for it a reason to skip it.
    """
    lack = missing()
    if lack is not None:
        return {"name": NAME, "skipped": lack}
    import torch  # noqa: PLC0415 - optional, and slow to import
    from torch.fx.experimental.proxy_tensor import make_fx  # noqa: PLC0415 - needs torch or triton

    from gpu_bench.torch_program import torch_function  # noqa: PLC0415 - needs torch or triton
    from gpu_bench.torch_timing import prepared, replayed, tensors_of  # noqa: PLC0415 - needs torch or triton

    prepared()
    program = case.program()
    inputs = list(tensors_of(case, program).values())
    try:
        graph = make_fx(torch_function(program), tracing_mode="fake")(*inputs)
    except BuildError as refusal:
        return {"name": NAME, "skipped": refusal.message}
    function, began = torch.compile(graph, dynamic=False), time.monotonic()
    try:
        made = function(*inputs)
        torch.cuda.synchronize()
        compile_s = time.monotonic() - began
        shapes = [list(one.shape) for one in made]
        wanted = [list(program.types[out.tensor].shape) for out in program.outputs]
        if shapes != wanted:
            return {"name": NAME, "error": f"it makes {shapes}, not {wanted}"}
        return {"name": NAME, "seconds": replayed(lambda: function(*inputs)), "compile_s": compile_s}
    except RuntimeError as failure:  # torch's own errors of compiling derive from RuntimeError
        return {"name": NAME, "error": f"{type(failure).__name__}: {failure}"[:_MOST_REASON]}
    finally:
        torch.compiler.reset()


def missing() -> str | None:
    """What torch.compile needs on a GPU and is not there, in words."""
    for module in ("torch", "triton"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
    if not any(shutil.which(compiler) for compiler in ("cc", "gcc", "clang")):
        return "Triton has no C compiler for its launchers"
    return None
