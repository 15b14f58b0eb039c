"""Time torch calls on the device without host overhead, as our kernels are timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from roller_bench.gpu.interleaved import calls_for
from roller_svc.runtime.cuda.arrays import DeviceBytes

Call = Callable[[], Any]
_WARM_UPS = 3  # the first calls select algorithms, allocate and compile


def prepare() -> None:
    """Configure torch: no tf32 (our kernels use none either), cuDNN autotuning, no gradients."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    torch.set_grad_enabled(False)


def tensors_of(arrays: Mapping[str, DeviceBytes]) -> dict[str, Any]:
    """Return torch tensors that share the memory of these arrays."""
    return {
        name: torch.from_dlpack(array.raw).view(getattr(torch, array.dtype.value)).reshape(array.shape)
        for name, array in arrays.items()
    }


@contextmanager
def blas(library: str) -> Iterator[None]:
    """Use cuBLAS ("cublas") or cuBLASLt ("cublaslt") for matrix products within this context."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


class TorchWork:
    """A TimedWork whose calls are recorded once as a CUDA graph."""

    def __init__(self, call: Call) -> None:
        """Warm up and record the call. Raises RuntimeError, the base of torch's and Triton's errors, if it fails."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(side):  # warm-up work must not be recorded
            for _ in range(_WARM_UPS):
                call()
            self._start.record()
            call()
            self._end.record()
        torch.cuda.synchronize()
        self._times = calls_for(self._start.elapsed_time(self._end) / 1e3)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(self._times):
                call()

    def sample(self) -> float:
        self._graph.replay()
        self._start.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3 / self._times
