"""Work that torch does on the device → its seconds, the host's part not counted, as for our kernels."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gpu_bench.samples import TimedCase, timing_inputs
from roller_svc.ir.program import TensorProgram
from roller_svc.runtime.binding import Array

Work = Callable[[], Any]
_LEAST_SAMPLE_S = 1e-3
_SAMPLES = 7
_WARM_UPS = 3  # libraries choose and allocate, compilers compile, at the first calls


def prepared() -> None:
    """Float32 as it is, not as tf32: our kernels are not allowed it either. Results are never differentiated."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_grad_enabled(False)
    torch.cuda.empty_cache()


def tensors_of(case: TimedCase, program: TensorProgram) -> dict[str, Any]:
    """The case's inputs on the device, in the program's order."""
    return {name: _tensor(array) for name, array in timing_inputs(case, program).items()}


def replayed(work: Work) -> float:
    """Median seconds of one call, of several recorded as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what the first calls do must not be recorded
        for _ in range(_WARM_UPS):
            work()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    times = max(1, round(_LEAST_SAMPLE_S / max(1e-6, start.elapsed_time(end) / 1e3)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            work()
    samples: list[float] = []
    for _ in range(_SAMPLES):
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 1e3 / times)
    return statistics.median(samples)


def _tensor(array: Array) -> Any:
    """A copy on the device; numpy's own types lack some of torch's."""
    bits = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8)).cuda()
    return bits.view(getattr(torch, array.dtype.name)).reshape(array.shape)
