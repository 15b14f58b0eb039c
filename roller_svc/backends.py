"""Who builds and runs for which family of devices: one line each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from roller_svc.errors import ToolchainMissingError
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Family, HardwareSpec
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.runtime.cpu import CpuModule
from roller_svc.runtime.cuda import CudaModule, device_present
from roller_svc.runtime.cuda_arrays import import_cupy
from roller_svc.runtime.emulator import EmulatorModule
from roller_svc.toolchain import availability, compile_cxx


class Call(Protocol):
    """A kernel bound to arrays: calling it runs all launches."""

    def __call__(self) -> None: ...


class Module(Protocol):
    """A kernel on its device."""

    def bound(self, arrays: Mapping[str, Any], out: Mapping[str, Any] | None = None) -> Call: ...


@dataclass(frozen=True, slots=True)
class Backend:
    """`load` brings a binary onto the device, `place` numpy arrays; `present` tells, cheaply, whether there is a device
    to measure on; `unplaceable` are element types that no array of the runtime's own library can have."""

    family: Family
    load: Callable[[CompiledKernel], Module]
    place: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    present: Callable[[HardwareSpec], bool]
    unplaceable: frozenset[DType] = frozenset()


def _runs_here(hw: HardwareSpec) -> bool:
    """A CPU target runs here when it is the machine's own or a subset of its instructions."""
    return hw.id == "local" or (availability(hw).ok and hw.arch.prefix == "x86-64-v")


def _on_gpu(arrays: Mapping[str, Any]) -> Mapping[str, Any]:
    cupy = import_cupy()
    return {name: cupy.asarray(array) for name, array in arrays.items()}


# CuPy has no arrays of these; a caller's PyTorch has.
_NOT_IN_CUPY = frozenset({DType.BFLOAT16, DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2})

BACKENDS = (
    Backend(Family.CPU, CpuModule, lambda arrays: arrays, _runs_here),
    Backend(Family.CUDA, CudaModule, _on_gpu, lambda _: device_present(), _NOT_IN_CUPY),
)


def emulated(compiled: CompiledKernel, seed: int | None = None, *, races: bool = False) -> EmulatorModule:
    """A CUDA kernel on the CPU. `seed` decides the order of its threads; None gives each call one of its own."""
    return EmulatorModule(compiled, compile_cxx, seed=seed, races=races)


def backend_for(hw: HardwareSpec) -> Backend:
    """The family's back end; ToolchainMissingError where nothing compiles for the device, naming what is missing."""
    for backend in BACKENDS:
        if backend.family is hw.family:
            return backend
    missing = availability(hw)
    raise ToolchainMissingError(f"no kernels for {hw.id}: {missing.reason}")
