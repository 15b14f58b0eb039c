"""Calibrate a spec on this machine. docs/hardware.md defines the fields of a CPU's spec."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from roller_svc import toolchain
from roller_svc.calibration.cpu.probes import CpuKernels, compile_kernels, probes, required_bytes
from roller_svc.calibration.cpu.spec import attach_fields, with_measured_values
from roller_svc.calibration.cuda.spec import calibrate_cuda, check_spec, measure_device, open_device
from roller_svc.calibration.presence import check_present
from roller_svc.calibration.samples import run_probes
from roller_svc.errors import LaunchError
from roller_svc.hardware.detect import adapt_to_machine, probe
from roller_svc.ir.hardware import HardwareSpec, Measured, TargetKind
from roller_svc.ir.kernel import Language
from roller_svc.settings import usable_memory_bytes
from roller_svc.version import __version__

SECONDS = 8.0
MAX_MEMORY_FRACTION = 0.5  # of the usable memory, for a calibration that nobody asked for


def calibrate_spec(hw: HardwareSpec, cores: int | None = None, seconds: float = SECONDS) -> HardwareSpec:
    """Return the spec with values measured on this machine: on the CPU, or on the first NVIDIA device.

    Args:
        hw: the spec.
        cores: number of CPU cores; by default the spec's.
        seconds: approximate duration.

    Raises:
        ToolchainMissingError: there is no compiler for the spec.
        LaunchError: the kernels do not run here (no-device, wrong-device), or other processes use the cores
            (machine-busy).
    """
    spec = replace(hw, num_cores=hw.num_cores if cores is None else cores)
    check_present(spec)
    if hw.family is TargetKind.CUDA:
        check_spec(hw, open_device(0))
        return calibrate_cuda(0, seconds)
    measured = measure_spec(spec, seconds)
    return with_measured_values(spec, measured, _provenance(spec, measured))


def calibrate_briefly(hw: HardwareSpec, seconds: float) -> HardwareSpec:
    """Return the host CPU's spec with measured values, after about `seconds` however busy the machine is.

    Only the micro-benchmarks that determine fields run. Raises as `calibrate_spec` does.
    """
    start = time.perf_counter()
    check_present(hw)
    needed, usable = required_bytes(hw, hw.num_cores, for_spec=True), usable_memory_bytes()
    if needed > usable * MAX_MEMORY_FRACTION:
        raise LaunchError(
            f"micro-benchmarks need {needed >> 20} MiB of memory, more than half of {usable >> 20} MiB",
            code="out-of-memory",
        )
    kernels = CpuKernels(hw, hw.num_cores, compile_kernels(hw), for_spec=True)
    all_probes = probes(kernels, for_spec=True)
    measured = run_probes(all_probes, seconds - (time.perf_counter() - start), max_extension=1)
    return with_measured_values(hw, attach_fields(measured, hw), _provenance(hw, measured))


def adapt_to_this_machine(hw: HardwareSpec) -> HardwareSpec:
    """Return a CPU's spec with the cores, caches and memory of this machine, under its own id."""
    return replace(adapt_to_machine(hw, probe()), id=hw.id)


def measure_spec(hw: HardwareSpec, seconds: float) -> tuple[Measured, ...]:
    """Run all micro-benchmarks and attach the fields they determine. CPU benchmarks run on one core and on all."""
    if hw.family is TargetKind.CUDA:
        return measure_device(hw, open_device(0), seconds)
    start = time.perf_counter()
    all_probes = probes(CpuKernels(hw, hw.num_cores, compile_kernels(hw)))
    return attach_fields(run_probes(all_probes, seconds - (time.perf_counter() - start)), hw)


def _provenance(hw: HardwareSpec, measured: Sequence[Measured]) -> str:
    compiler = toolchain.tool_version(Language.C, hw.arch).partition(": ")[2]
    return (
        f"Measured {datetime.now(UTC).date()} on {probe().model_name}, {hw.num_cores} of its cores, by roller "
        f"{__version__} with {compiler}: the median of the faster half of {measured[0].samples} samples, which "
        "`measured` has. Registers: three operands for each multiply-add, whose latency, if less than L1's, is theirs."
    )
