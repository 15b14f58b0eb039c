"""Who builds and runs for which family of devices: one line each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Never, Protocol

from roller_svc.errors import LaunchError, ToolchainMissingError, UnknownHardwareError
from roller_svc.hardware import detect_local
from roller_svc.ir.hardware import Family, HardwareSpec
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.runtime.cpu import CpuModule
from roller_svc.runtime.cpu_features import lacking_instructions
from roller_svc.runtime.cuda.arrays import placed
from roller_svc.runtime.cuda.module import CudaModule, device_present
from roller_svc.runtime.emulator import EmulatorModule
from roller_svc.toolchain import availability, compile_cxx


class Call(Protocol):
    """A kernel bound to arrays: calling it runs all launches."""

    def __call__(self) -> None: ...

    def finish(self) -> dict[str, Any]: ...


class Module(Protocol):
    """A kernel on its device."""

    def bind(self, arrays: Mapping[str, Any], out: Mapping[str, Any] | None = None) -> Call: ...


@dataclass(frozen=True, slots=True)
class Backend:
    """`load` brings a binary onto the device, `place` numpy arrays; `present` tells, cheaply, whether there is a device
    to measure on."""

    family: Family
    load: Callable[[CompiledKernel], Module]
    to_device: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    is_present: Callable[[HardwareSpec], bool]


def _runs_on_host(hw: HardwareSpec) -> bool:
    """Whether this CPU has all that the spec's kernels may be made of. Its architecture and instructions decide: an id
    is a name, which any spec may bear."""
    try:
        host = detect_local()
    except UnknownHardwareError:
        return False
    if hw.arch.prefix != host.arch.prefix or not availability(hw).ok:
        return False
    if hw.arch.prefix == "x86-64-v":
        return not lacking_instructions(hw.arch, [f"-m{feature}" for feature in hw.isa])
    return hw.arch.number <= host.arch.number and set(hw.isa) <= set(host.isa)


def reject_load(compiled: CompiledKernel) -> Never:
    """In place of a runtime for HIP kernels, which there is none of."""
    source = compiled.source
    raise LaunchError(
        f"{source.name} takes a device of {source.arch}, and a program that loads its code object (hipModuleLoad): "
        "nothing here does; runtime='emulator' runs the kernel without",
        code="no-device",
    )


BACKENDS = (
    Backend(Family.CPU, CpuModule, lambda arrays: arrays, _runs_on_host),
    Backend(Family.CUDA, CudaModule, placed, lambda _: device_present()),
    Backend(Family.AMD, reject_load, lambda arrays: arrays, lambda _: False),
)


def load_emulated(compiled: CompiledKernel, seed: int | None = None, *, races: bool = False) -> EmulatorModule:
    """A CUDA or HIP kernel on the CPU. `seed` decides the order of its threads; None gives each call one of its own."""
    return EmulatorModule(compiled, compile_cxx, seed=seed, races=races)


def backend_for(hw: HardwareSpec) -> Backend:
    """The family's back end; ToolchainMissingError where nothing compiles for the device, naming what is missing."""
    for backend in BACKENDS:
        if backend.family is hw.family:
            return backend
    missing = availability(hw)
    raise ToolchainMissingError(f"no kernels for {hw.id}: {missing.reason}")
