"""A spec → the same with what the machine at hand measures. What a CPU's figures mean stands in docs/hardware.md."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from roller_svc import toolchain
from roller_svc.calibration.cpu.probes import CpuKernels, compiled_kernels, probes
from roller_svc.calibration.cpu.spec import standing_for, with_figures
from roller_svc.calibration.cuda.spec import calibrated_cuda, check_spec, device, measured_on_device
from roller_svc.calibration.presence import check_present
from roller_svc.calibration.samples import sampled
from roller_svc.hardware.detect import localised, probe
from roller_svc.ir.hardware import HardwareSpec, Measured, TargetKind
from roller_svc.ir.kernel import Language
from roller_svc.version import __version__

SECONDS = 8.0


def calibrated(hw: HardwareSpec, cores: int | None = None, seconds: float = SECONDS) -> HardwareSpec:
    """The CPU's spec with measured figures, of so many cores (those of the spec), in about so many seconds. Of an
    NVIDIA device's spec that of the first device here.

    Raises ToolchainMissingError where nothing compiles for the spec, LaunchError where it does not run here (no-device,
    wrong-device) or other processes use the cores (machine-busy).
    """
    spec = replace(hw, num_cores=hw.num_cores if cores is None else cores)
    check_present(spec)
    if hw.family is TargetKind.CUDA:
        check_spec(hw, device(0))
        return calibrated_cuda(0, seconds)
    measured = measured_on(spec, seconds)
    return with_figures(spec, measured, _provenance(spec, measured))


def on_this_machine(hw: HardwareSpec) -> HardwareSpec:
    """A CPU's spec with the cores, caches and memory of the machine at hand, under its own id."""
    return replace(localised(hw, probe()), id=hw.id)


def measured_on(hw: HardwareSpec, seconds: float) -> tuple[Measured, ...]:
    """Every micro-benchmark, a CPU's on one core and on all of the spec's, with the figures that they stand for."""
    if hw.family is TargetKind.CUDA:
        return measured_on_device(hw, device(0), seconds)
    start = time.perf_counter()
    every = probes(CpuKernels(hw, hw.num_cores, compiled_kernels(hw)))
    return standing_for(sampled(every, seconds - (time.perf_counter() - start)), hw)


def _provenance(hw: HardwareSpec, measured: Sequence[Measured]) -> str:
    compiler = toolchain.tool_version(Language.C, hw.arch).partition(": ")[2]
    return (
        f"Measured {datetime.now(UTC).date()} on {probe().model_name}, {hw.num_cores} of its cores, by roller "
        f"{__version__} with {compiler}: the median of the faster half of {measured[0].samples} samples, which "
        "`measured` has. Registers: three operands for each multiply-add, whose latency, if less than L1's, is theirs."
    )
