"""Work that torch does on the device → samples of its time, the host's part not counted, as for our kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from roller_svc.bench.gpu.interleaved import calls_for
from roller_svc.runtime.cuda.arrays import DeviceBytes

Call = Callable[[], Any]
_WARM_UPS = 3  # libraries choose and allocate, compilers compile, at the first calls


def prepare() -> None:
    """Float32 as it is, not as tf32: our kernels are not allowed it either. cuDNN tries its algorithms. Results are
    never differentiated."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    torch.set_grad_enabled(False)


def tensors_of(arrays: Mapping[str, DeviceBytes]) -> dict[str, Any]:
    """The same memory as torch's tensors."""
    return {
        name: torch.from_dlpack(array.raw).view(getattr(torch, array.dtype.value)).reshape(array.shape)
        for name, array in arrays.items()
    }


@contextmanager
def blas(library: str) -> Iterator[None]:
    """With matrix products by cuBLAS ("cublas") or cuBLASLt ("cublaslt")."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


class TorchWork:
    """Calls recorded once as a CUDA graph, see Work."""

    def __init__(self, call: Call) -> None:
        """Raises RuntimeError where the call does not work; what torch and Triton raise derives from it."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(side):  # what the first calls do must not be recorded
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
