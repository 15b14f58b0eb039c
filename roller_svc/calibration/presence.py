"""Check that a spec's device is present, so that it can be measured here."""

from __future__ import annotations

from roller_svc.errors import LaunchError, ToolchainMissingError
from roller_svc.hardware import detect_local
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.runtime.cuda.module import device_count


def check_present(hw: HardwareSpec) -> None:
    """Check that the spec's device is present.

    Raises LaunchError (no-device, wrong-device) if it is not, ToolchainMissingError if there are no micro-benchmarks
    for it.
    """
    match hw.family:
        case TargetKind.CPU:
            _check_cpu(hw)
        case TargetKind.CUDA:
            check_cuda(0)
        case _:
            raise ToolchainMissingError(
                f"{hw.id}: there are micro-benchmarks for CPUs and NVIDIA devices, none for {hw.family.value}"
            )


def check_cuda(index: int) -> None:
    """Check that an NVIDIA device is present."""
    count = device_count()
    if index >= count:
        present = f"{count} devices are" if count else "no driver (libcuda.so.1), or a driver without a device, is"
        raise LaunchError(f"there is no NVIDIA device {index}: {present} here", code="no-device")


def _check_cpu(hw: HardwareSpec) -> None:
    here = detect_local()
    if hw.arch.prefix != here.arch.prefix:
        raise LaunchError(f"{hw.id} is {hw.arch}, this machine {here.arch}", code="no-device")
    if missing := sorted(set(hw.isa) - set(here.isa)):
        raise LaunchError(f"{hw.id} has {', '.join(missing)}, which {here.name} does not have", code="wrong-device")
    if hw.num_cores > here.num_cores:
        raise LaunchError(f"{hw.id} has {hw.num_cores} cores, this process may use {here.num_cores}", code="wrong-device")
