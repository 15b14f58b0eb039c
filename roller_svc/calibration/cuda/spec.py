"""Calibrate the spec of an NVIDIA device with the kernels of cuda/kernels.py, launched like generated kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np

from roller_svc import hardware, toolchain
from roller_svc.calibration.cpu.spec import enforce_monotonic
from roller_svc.calibration.cuda.kernels import SECONDS, Kernel, Timing, delay, kernels, sizes_of
from roller_svc.calibration.cuda.launches import Launch, queued_seconds
from roller_svc.calibration.samples import Probe, run_probes
from roller_svc.errors import LaunchError
from roller_svc.ir.event_state import find_reached_deadline
from roller_svc.ir.hardware import HardwareSpec, Measured, Source, TargetKind
from roller_svc.ir.kernel import Buffer, KernelSource, Language, Role
from roller_svc.runtime.binding import Array, numpy_dtype
from roller_svc.runtime.cuda.arrays import import_cupy
from roller_svc.runtime.cuda.module import CudaModule, Replay, launch_errors, load_functions, runs_on
from roller_svc.toolchain import compile_source
from roller_svc.version import __version__

# Runs of a kernel in one sample: kernels that do almost nothing are too short to be timed alone.
RUNS, SHORT_RUNS = 2, 200
SEED = 20
MIN_S = 1e-9  # of a difference of two times


@dataclass(frozen=True, slots=True)
class Device:
    """Device properties that the driver reports."""

    index: int
    name: str
    capability: tuple[int, int]
    cores: int


def open_device(index: int) -> Device:
    """Return the properties of a device. Raises LaunchError if CuPy or the driver is missing or fails."""
    cupy = import_cupy()
    runtime = cupy.cuda.runtime
    try:
        properties = runtime.getDeviceProperties(index)
    except runtime.CUDARuntimeError as error:
        raise LaunchError(f"device {index} cannot be opened: {error}", code="no-device") from error
    capability = properties["major"], properties["minor"]
    return Device(index, properties["name"].decode(), capability, properties["multiProcessorCount"])


def find_spec(device: Device) -> HardwareSpec:
    """Return the shipped spec of the device, with its number of cores.

    Among specs of its compute capability, one whose model is a word of the device's name ("NVIDIA H200") is preferred.
    Raises LaunchError (wrong-device) if there is none.
    """
    spec = find_shipped_spec(device.name, device.capability)
    if spec is None:
        digits = "".join(map(str, device.capability))
        raise LaunchError(f"hwspecs/ has no spec of {device.name}'s kind, sm_{digits}", code="wrong-device")
    return replace(spec, num_cores=device.cores)


def check_spec(hw: HardwareSpec, device: Device) -> None:
    """Raise LaunchError (wrong-device) if the device has a different spec."""
    if (device_id := find_spec(device).id) != hw.id:
        raise LaunchError(f"the device here is a {device.name}, whose spec is {device_id}, not {hw.id}", code="wrong-device")


def find_shipped_spec(name: str, capability: tuple[int, int]) -> HardwareSpec | None:
    """Return the shipped spec for a device name and compute capability; None if there is none."""
    words = set(name.upper().replace("-", " ").split())
    number = 10 * capability[0] + capability[1]
    specs = [
        spec
        for spec in hardware.shipped_specs()
        if spec.family is TargetKind.CUDA and runs_on(spec.arch, capability) and spec.arch.number == number
    ]
    named = [spec for spec in specs if words & set(spec.id.upper().split("-")[1:2])]
    return next(iter(named or specs), None)


def calibrate_cuda(index: int, seconds: float) -> HardwareSpec:
    """Return the device's spec with measured values, in about `seconds` after the kernels are compiled.

    Raises LaunchError (no-device, no-cupy, wrong-device), ToolchainMissingError if there is no compiler for it.
    """
    device = open_device(index)
    spec = find_spec(device)
    return with_measured_values(spec, measure_device(spec, device, seconds), device)


def measure_device(spec: HardwareSpec, device: Device, seconds: float) -> tuple[Measured, ...]:
    """Run all micro-benchmarks. The best of those for the same field determines it."""
    return measure_kernels(tuple(kernels(spec, sizes_of(spec))), spec, device.index, seconds)


def measure_kernels(benchmarks: Sequence[Kernel], hw: HardwareSpec, index: int, seconds: float) -> tuple[Measured, ...]:
    """Run these micro-benchmarks on the device of that index."""
    cupy = import_cupy()
    with cupy.cuda.Device(index):
        bench = _Bench(cupy, hw, index)
        return assign_fields(benchmarks, run_probes([bench.probe(kernel) for kernel in benchmarks], seconds))


class _Bench:
    """Kernels bound to one device. Arrays are shared by size."""

    def __init__(self, cupy: Any, hw: HardwareSpec, index: int) -> None:
        self._cupy = cupy
        self._hw = hw
        self._index = index
        self._arrays: dict[Buffer, Any] = {}

    def probe(self, kernel: Kernel) -> Probe:
        seconds_of, results = self._bind(kernel)
        part = None if kernel.part is None else self.probe(kernel.part).sample

        def sample() -> float:
            seconds = seconds_of()
            if kernel.field == "clock_hz":
                return float(results["results"].get()[0]) / seconds
            if kernel.unit != SECONDS:
                return kernel.amount / seconds
            each = seconds / kernel.amount
            return each if part is None else max(MIN_S, each - part())

        return Probe(kernel.name, kernel.unit, self._hw.num_cores, kernel.how, sample)

    def _bind(self, kernel: Kernel) -> tuple[Callable[[], float], dict[str, Any]]:
        """Return what times a run of a kernel, and the kernel's outputs."""
        source = kernel.source
        inputs = {b.name: self._array(b) for b in source.buffers_of(Role.INPUT)}
        results = {b.name: self._array(b) for b in source.buffers_of(Role.OUTPUT)}
        runs = SHORT_RUNS if kernel.unit == SECONDS and kernel.amount == 1 else RUNS
        if kernel.timing is Timing.CAPTURED:
            call = CudaModule(compile_source(source)).bind(inputs, results)
            return lambda: call.stopwatch(call, runs) / runs, results
        is_programmatic = kernel.timing is Timing.PROGRAMMATIC
        launch = self._load(source, {**inputs, **results}, is_programmatic=is_programmatic)
        if is_programmatic:
            replay = Replay(self._cupy, (launch,), runs)
            return lambda: replay.seconds() / runs, results

        def queued() -> float:
            seconds = queued_seconds(self._cupy, launch, runs, *self._delay) / runs
            if "sync" in results and find_reached_deadline(results["sync"].get()) is not None:
                raise LaunchError(f"{kernel.name}: a block waited for others that the device does not run beside it")
            return seconds

        return queued, results

    @cached_property
    def _delay(self) -> tuple[Launch, Any]:
        """A launch that takes as long as an array says, and the array."""
        source, time = delay(self._hw), self._cupy.asarray(np.zeros(1, np.uint64))
        return self._load(source, {"time": time}), time

    def _load(self, source: KernelSource, arrays: dict[str, Any], *, is_programmatic: bool = False) -> Launch:
        with launch_errors(self._cupy):
            (function,) = load_functions(compile_source(source), self._cupy, self._index)
        return Launch(source, function, arrays, is_programmatic=is_programmatic)

    def _array(self, buffer: Buffer) -> Any:
        if buffer not in self._arrays:
            self._arrays[buffer] = self._cupy.asarray(initial_contents(buffer))
        return self._arrays[buffer]


def initial_contents(buffer: Buffer) -> Array:
    """Return the initial contents of a buffer.

    A pointer chase gets a random cycle through all lines, arithmetic gets values that stay small in every type, and
    other buffers get random bytes.
    """
    dtype = numpy_dtype(buffer.dtype)
    random = np.random.default_rng(SEED)
    if buffer.name == "next":
        return random_cycle(buffer.shape[0], random)
    if buffer.role is not Role.INPUT:
        return np.zeros(buffer.shape, dtype)
    if buffer.dtype.is_float:
        return random.uniform(0.25, 0.5, buffer.shape).astype(dtype)
    if buffer.name == "values":
        return random.integers(0x30, 0x3A, (buffer.bytes,), np.uint8).view(dtype).reshape(buffer.shape)
    return random.integers(0, 256, (buffer.bytes,), np.uint8).view(dtype).reshape(buffer.shape)


def random_cycle(count: int, random: np.random.Generator) -> Array:
    """Return a random cycle: for the first word of each 128-byte line, the index of the next.

    Small arrays use every word.
    """
    step = 32 if count > 1024 else 1
    order = random.permutation(count // step) * step
    following = np.zeros(count, np.uint32)
    following[order] = np.roll(order, -1)
    return following


def assign_fields(benchmarks: Iterable[Kernel], measured: Sequence[Measured]) -> tuple[Measured, ...]:
    """Assign each field to the fastest micro-benchmark that determines it."""
    fields = {kernel.name: kernel.field for kernel in benchmarks}
    best: dict[str, Measured] = {}
    for one in measured:
        figure = fields[one.name]
        if figure and (figure not in best or _faster(one, best[figure])):
            best[figure] = one
    assigned = {one.name: figure for figure, one in best.items()}
    return tuple(replace(one, figure=assigned.get(one.name)) for one in measured)


def _faster(one: Measured, other: Measured) -> bool:
    return one.quiet < other.quiet if one.unit == SECONDS else one.quiet > other.quiet


def with_measured_values(hw: HardwareSpec, measured: tuple[Measured, ...], device: Device) -> HardwareSpec:
    """Return the spec with all measured values, without vendor's peaks that were exceeded."""
    values = {one.figure: one.quiet for one in measured if one.figure is not None}
    text = (
        f"Measured {datetime.now(UTC).date()} on {device.name} by roller {__version__} with "
        f"{toolchain.tool_version(Language.CUDA, hw.arch)}: the median of the faster half of the samples, which "
        "`measured` has; of several occupancies the best."
    )
    source = Source(tuple(sorted(values)), text)
    return replace(
        hw,
        clock_hz=values.get("clock_hz", hw.clock_hz),
        levels=enforce_monotonic(tuple(_with_values(level, f"levels.{level.name}", values) for level in hw.levels)),
        units=tuple(_with_values(unit, f"units.{unit.name}", values) for unit in hw.units),
        limits=_with_values(hw.limits, "limits", values),
        measured=measured,
        sources=(source, *(s for s in hw.sources if not set(s.fields) <= set(source.fields))),
    )


def _with_values(part: Any, path: str, values: Mapping[str, float]) -> Any:
    """Return a level, a unit or the limits with the measured values at `path`."""
    changes: dict[str, float | None] = {}
    for figure, value in values.items():
        above, _, field = figure.rpartition(".")
        if above == path:
            changes[field] = value
            peak = getattr(part, f"peak_{field}", None)
            if peak is not None and value > peak:
                changes[f"peak_{field}"] = None
    return replace(part, **changes)
