"""Launches of micro-benchmarks that CuPy does not make: cooperative ones, and ones with programmatic edges.

Launches in a stream are timed behind a kernel that runs until the host has queued them all: what the device then does
between two of them does not depend on the host.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import numpy as np

from roller_svc.errors import LaunchError
from roller_svc.ir.kernel import KernelSource
from roller_svc.runtime.cuda.driver import driver

FIRST_DELAY_NS, MAX_DELAY_NS = 4_000_000, 1_000_000_000


class Launch:
    """A kernel of one launch with the addresses of its arrays."""

    def __init__(self, source: KernelSource, function: Any, arrays: dict[str, Any], *, is_programmatic: bool = False) -> None:
        """Take a loaded kernel with its arrays by name; `is_programmatic`: it may start before the launch before it ends."""
        (self._launch,) = source.launches
        self._function, self._arrays, self._is_programmatic = function, arrays, is_programmatic
        memory = {buffer.symbol: int(arrays[buffer.name].data.ptr) for buffer in source.buffers}
        self._parameters = driver().parameters(self._launch, memory)

    def launch(self, stream: Any) -> None:
        """Launch the kernel on a stream of CuPy."""
        launch = driver().launch_programmatic if self._is_programmatic else driver().launch
        launch(self._function.ptr, self._launch, self._parameters, stream.ptr)


class Launched(Protocol):
    """Work that can be launched on a stream of CuPy."""

    def launch(self, stream: Any) -> None: ...


def queued_seconds(cupy: Any, launch: Launched, runs: int, delay: Launch, delay_ns: Any) -> float:
    """Return the seconds that a device takes for launches that wait in a stream.

    Args:
        cupy: CuPy.
        launch: the launch.
        runs: how often it is made.
        delay: a launch that takes as many nanoseconds as `delay_ns` has.
        delay_ns: its array.

    Raises LaunchError (machine-busy) if the host takes too long to queue them.
    """
    stream = cupy.cuda.Stream(non_blocking=True)
    wanted = int(delay_ns.get()[0]) or FIRST_DELAY_NS
    while wanted <= MAX_DELAY_NS:
        delay_ns.set(np.array([wanted], np.uint64))
        cupy.cuda.runtime.deviceSynchronize()
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        began = time.perf_counter_ns()
        delay.launch(stream)
        start.record(stream)
        for _ in range(runs):
            launch.launch(stream)
        end.record(stream)
        queued = time.perf_counter_ns() - began
        end.synchronize()
        if queued < wanted:
            return float(cupy.cuda.get_elapsed_time(start, end)) / 1e3
        wanted = 2 * queued
    raise LaunchError(f"the host took more than {MAX_DELAY_NS / 1e9:g} s to queue {runs} launches", code="machine-busy")
