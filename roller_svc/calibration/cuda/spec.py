"""An NVIDIA device → its spec with measured figures: the kernels of cuda_kernels.py, launched as generated ones are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from roller_svc import hardware, toolchain
from roller_svc.calibration.cpu.spec import in_order
from roller_svc.calibration.cuda.kernels import SECONDS, Kernel, kernels, sizes_of
from roller_svc.calibration.samples import Probe, sampled
from roller_svc.errors import LaunchError
from roller_svc.ir.hardware import HardwareSpec, Measured, Source, TargetKind
from roller_svc.ir.kernel import Buffer, Language, Role
from roller_svc.runtime.binding import Array, numpy_dtype
from roller_svc.runtime.cuda.arrays import import_cupy
from roller_svc.runtime.cuda.module import CudaCall, CudaModule, runs_on
from roller_svc.toolchain import compile_source
from roller_svc.version import __version__

# Runs of a kernel in one sample: those that only launch, or touch a line, are too short to be timed alone.
RUNS, SHORT_RUNS = 2, 200
SEED = 20


@dataclass(frozen=True, slots=True)
class Device:
    """What the driver says of one."""

    index: int
    name: str
    capability: tuple[int, int]
    cores: int


def device(index: int) -> Device:
    """Raises LaunchError where CuPy or the driver is missing, or refuses."""
    cupy = import_cupy()
    runtime = cupy.cuda.runtime
    try:
        found = runtime.getDeviceProperties(index)
    except runtime.CUDARuntimeError as error:
        raise LaunchError(f"device {index} cannot be opened: {error}", code="no-device") from error
    capability = found["major"], found["minor"]
    return Device(index, found["name"].decode(), capability, found["multiProcessorCount"])


def spec_of(found: Device) -> HardwareSpec:
    """The shipped spec of the device, with as many cores as it has. Of those of its capability the one whose model is a
    word of the device's name ("NVIDIA H200"), else any. Raises LaunchError (wrong-device) where there is none."""
    spec = shipped_spec(found.name, found.capability)
    if spec is None:
        digits = "".join(map(str, found.capability))
        raise LaunchError(f"no spec in hwspecs/ is of {found.name}'s kind, sm_{digits}", code="wrong-device")
    return replace(spec, num_cores=found.cores)


def check_spec(hw: HardwareSpec, found: Device) -> None:
    """Raises LaunchError (wrong-device) where the device's spec is another than this one."""
    if (there := spec_of(found).id) != hw.id:
        raise LaunchError(f"the device here is a {found.name}, whose spec is {there}, not {hw.id}", code="wrong-device")


def shipped_spec(name: str, capability: tuple[int, int]) -> HardwareSpec | None:
    """The same by what the driver says; None where there is none."""
    words = set(name.upper().replace("-", " ").split())
    number = 10 * capability[0] + capability[1]
    specs = [
        spec
        for spec in hardware.shipped_specs()
        if spec.family is TargetKind.CUDA and runs_on(spec.arch, capability) and spec.arch.number == number
    ]
    named = [spec for spec in specs if words & set(spec.id.upper().split("-")[1:2])]
    return next(iter(named or specs), None)


def calibrated_cuda(index: int, seconds: float) -> HardwareSpec:
    """The spec of the device with measured figures, in about so many seconds after the kernels are compiled.

    Raises LaunchError (no-device, no-cupy, wrong-device), ToolchainMissingError where nothing compiles for it.
    """
    found = device(index)
    spec = spec_of(found)
    return with_measured(spec, measured_on_device(spec, found, seconds), found)


def measured_on_device(spec: HardwareSpec, found: Device, seconds: float) -> tuple[Measured, ...]:
    """Every micro-benchmark; of those that stand for the same figure the best has it."""
    return measured_kernels(tuple(kernels(spec, sizes_of(spec))), spec.num_cores, found.index, seconds)


def measured_kernels(every: Sequence[Kernel], cores: int, index: int, seconds: float) -> tuple[Measured, ...]:
    """The same of these micro-benchmarks, on the device of that index."""
    cupy = import_cupy()
    with cupy.cuda.Device(index):
        bench = _Bench(cupy, cores)
        return with_best(every, sampled([bench.probe(kernel) for kernel in every], seconds))


class _Bench:
    """Kernels made ready for one device; arrays of a size are made once."""

    def __init__(self, cupy: Any, cores: int) -> None:
        self._cupy = cupy
        self._cores = cores
        self._arrays: dict[Buffer, Any] = {}

    def probe(self, kernel: Kernel) -> Probe:
        call, results = self._ready(kernel)
        runs = SHORT_RUNS if kernel.unit == SECONDS and kernel.amount == 1 else RUNS

        def sample() -> float:
            seconds = call.stopwatch(call, runs) / runs
            if kernel.figure == "clock_hz":
                return float(results["results"].get()[0]) / seconds
            return seconds / kernel.amount if kernel.unit == SECONDS else kernel.amount / seconds

        return Probe(kernel.name, kernel.unit, self._cores, kernel.how, sample)

    def _ready(self, kernel: Kernel) -> tuple[CudaCall, dict[str, Any]]:
        source = kernel.source
        inputs = {b.name: self._array(b) for b in source.buffers_of(Role.INPUT)}
        results = {b.name: self._array(b) for b in source.buffers_of(Role.OUTPUT)}
        return CudaModule(compile_source(source)).bind(inputs, results), results

    def _array(self, buffer: Buffer) -> Any:
        if buffer not in self._arrays:
            self._arrays[buffer] = self._cupy.asarray(contents(buffer))
        return self._arrays[buffer]


def contents(buffer: Buffer) -> Array:
    """What a kernel finds there: for a chase one round through all lines in a random order; for what computes numbers
    that stay small, of bytes that are a half of some kind in every type; else bytes that are not all alike."""
    dtype = numpy_dtype(buffer.dtype)
    random = np.random.default_rng(SEED)
    if buffer.name == "next":
        return one_round(buffer.shape[0], random)
    if buffer.role is not Role.INPUT:
        return np.zeros(buffer.shape, dtype)
    if buffer.dtype.is_float:
        return random.uniform(0.25, 0.5, buffer.shape).astype(dtype)
    if buffer.name == "values":
        return random.integers(0x30, 0x3A, (buffer.bytes,), np.uint8).view(dtype).reshape(buffer.shape)
    return random.integers(0, 256, (buffer.bytes,), np.uint8).view(dtype).reshape(buffer.shape)


def one_round(count: int, random: np.random.Generator) -> Array:
    """For the first word of each line of 128 bytes, which word comes next; all lines once before the first again. Where
    there are few words, each is a line."""
    step = 32 if count > 1024 else 1
    order = random.permutation(count // step) * step
    following = np.zeros(count, np.uint32)
    following[order] = np.roll(order, -1)
    return following


def with_best(every: Iterable[Kernel], found: Sequence[Measured]) -> tuple[Measured, ...]:
    """Each figure at the fastest of the micro-benchmarks that stand for it."""
    figures = {kernel.name: kernel.figure for kernel in every}
    best: dict[str, Measured] = {}
    for one in found:
        figure = figures[one.name]
        if figure and (figure not in best or _faster(one, best[figure])):
            best[figure] = one
    taken = {one.name: figure for figure, one in best.items()}
    return tuple(replace(one, figure=taken.get(one.name)) for one in found)


def _faster(one: Measured, other: Measured) -> bool:
    return one.quiet < other.quiet if one.unit == SECONDS else one.quiet > other.quiet


def with_measured(hw: HardwareSpec, measured: tuple[Measured, ...], found: Device) -> HardwareSpec:
    """The spec with every figure that was measured. A vendor's peak that was surpassed is left out."""
    values = {one.figure: one.quiet for one in measured if one.figure is not None}
    text = (
        f"Measured {datetime.now(UTC).date()} on {found.name} by roller {__version__} with "
        f"{toolchain.tool_version(Language.CUDA, hw.arch)}: the median of the faster half of the samples, which "
        "`measured` has; of several occupancies the best."
    )
    of_device = Source(tuple(sorted(values)), text)
    return replace(
        hw,
        clock_hz=values.get("clock_hz", hw.clock_hz),
        levels=in_order(tuple(_part(level, f"levels.{level.name}", values) for level in hw.levels)),
        units=tuple(_part(unit, f"units.{unit.name}", values) for unit in hw.units),
        limits=_part(hw.limits, "limits", values),
        measured=measured,
        sources=(of_device, *(s for s in hw.sources if not set(s.fields) <= set(of_device.fields))),
    )


def _part(part: Any, path: str, values: Mapping[str, float]) -> Any:
    """A level, a unit or the limits, with those of its figures that were measured."""
    changes: dict[str, float | None] = {}
    for figure, value in values.items():
        above, _, field = figure.rpartition(".")
        if above == path:
            changes[field] = value
            peak = getattr(part, f"peak_{field}", None)
            if peak is not None and value > peak:
                changes[f"peak_{field}"] = None
    return replace(part, **changes)
