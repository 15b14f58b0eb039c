"""The runtime of each device family, one line each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Never, Protocol

from roller_svc.errors import LaunchError, ToolchainMissingError, UnknownHardwareError
from roller_svc.hardware import detect_local
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.runtime.cpu import CpuModule
from roller_svc.runtime.cpu_features import missing_features
from roller_svc.runtime.cuda.arrays import copy_to_device
from roller_svc.runtime.cuda.module import CudaModule, device_present
from roller_svc.runtime.emulator import EmulatorModule
from roller_svc.toolchain import availability, compile_cxx


class Call(Protocol):
    """A kernel bound to arrays: calling it runs all launches."""

    def __call__(self) -> None: ...

    def results(self) -> dict[str, Any]: ...


class Module(Protocol):
    """A kernel on its device."""

    def bind(self, arrays: Mapping[str, Any], out: Mapping[str, Any] | None = None) -> Call: ...


@dataclass(frozen=True, slots=True)
class Backend:
    """The runtime of a device family."""

    family: TargetKind
    load: Callable[[CompiledKernel], Module]  # binary → loaded module
    to_device: Callable[[Mapping[str, Any]], Mapping[str, Any]]  # copies numpy arrays to the device
    is_present: Callable[[HardwareSpec], bool]  # whether this machine has the device; cheap


def _runs_on_host(hw: HardwareSpec) -> bool:
    """Whether the host CPU can run the spec's kernels: its architecture and features decide, not the spec's id."""
    try:
        host = detect_local()
    except UnknownHardwareError:
        return False
    if hw.arch.prefix != host.arch.prefix or not availability(hw).ok:
        return False
    if hw.arch.prefix == "x86-64-v":
        return not missing_features(hw.arch, [f"-m{feature}" for feature in hw.isa])
    return hw.arch.number <= host.arch.number and set(hw.isa) <= set(host.isa)


def reject_load(compiled: CompiledKernel) -> Never:
    """Reject a HIP kernel: there is no HIP runtime."""
    source = compiled.source
    raise LaunchError(
        f"cannot run {source.name}: it needs a {source.arch} device and a program that loads its code object "
        '(hipModuleLoad); runtime="emulator" runs it on the CPU',
        code="no-device",
    )


BACKENDS = (
    Backend(TargetKind.CPU, CpuModule, lambda arrays: arrays, _runs_on_host),
    Backend(TargetKind.CUDA, CudaModule, copy_to_device, lambda _: device_present()),
    Backend(TargetKind.AMD, reject_load, lambda arrays: arrays, lambda _: False),
)


def load_emulated(compiled: CompiledKernel, seed: int | None = None, *, races: bool = False) -> EmulatorModule:
    """Load a CUDA or HIP kernel into the CPU emulator.

    `seed` determines the order of its threads; None: a new order for each call.
    """
    return EmulatorModule(compiled, compile_cxx, seed=seed, races=races)


def backend_for(hw: HardwareSpec) -> Backend:
    """Return the backend of a device. Raises ToolchainMissingError if its family is not supported."""
    for backend in BACKENDS:
        if backend.family is hw.family:
            return backend
    missing = availability(hw)
    raise ToolchainMissingError(f"no kernels for {hw.id}: {missing.reason}")
