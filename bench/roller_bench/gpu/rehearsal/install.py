"""Install the simulated device in this process."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from typing import Any

from roller_bench.gpu import clocks, graphs, probing
from roller_bench.gpu.rehearsal import Plan
from roller_bench.gpu.rehearsal.driver import Device, Module
from roller_bench.gpu.rehearsal.libraries import install_libraries
from roller_bench.gpu.rehearsal.memory import make_cupy
from roller_bench.gpu.rehearsal.nvidia import DriverLibrary, NvmlLibrary
from roller_svc.calibration import samples
from roller_svc.calibration.cuda import launches
from roller_svc.calibration.cuda import spec as cuda_spec
from roller_svc.calibration.cuda.kernels import Sizes
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.runtime.cuda import driver as cuda_driver
from roller_svc.runtime.cuda import module as cuda
from roller_svc.runtime.graphs import cuda as models

# Sizes of calibration kernels, whose arrays the host fills, and the seconds for each group of them.
_SIZES = Sizes(cores=0, last_cache_bytes=1 << 16, dram_bytes=1 << 18, rounds=64, steps=64)
_SECONDS = 0.2


@cache
def install_device(plan: Plan) -> Device:
    """Replace CuPy, torch, Triton, NVML and the driver in this process, permanently."""
    device = Device(plan)
    sys.modules["cupy"] = make_cupy(device)
    install_libraries(device)
    load = cuda.load_functions

    def load_emulated_module(compiled: CompiledKernel, cupy: Any, index: int) -> tuple[Any, ...]:
        Module.loading = compiled
        return load(compiled, cupy, index)

    replaced: list[tuple[Any, str, Any]] = [
        (cuda, "load_functions", load_emulated_module), (cuda_spec, "load_functions", load_emulated_module),
        (models, "load_functions", load_emulated_module), (graphs, "load_functions", load_emulated_module),
        (cuda, "device_present", lambda: True), (models, "device_present", lambda: True),
        (clocks, "nvml_library", NvmlLibrary), (samples, "runqueue_wait_s", lambda: 0.0),
        (probing, "SECONDS", _SECONDS), (probing, "sizes_of", lambda hw: replace(_SIZES, cores=hw.num_cores)),
    ]  # fmt: skip
    driver = cuda_driver.Driver(DriverLibrary(device.functions, device.work), fix_small_maps=True)
    replaced += [(module, "driver", lambda: driver) for module in (cuda, cuda_driver, launches, models)]
    for module, name, value in replaced:
        setattr(module, name, value)
    return device
