"""A spec and the device at hand → figure by figure, what the spec says and what is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from roller_svc.calibration.calibrate import SECONDS, measured_on
from roller_svc.calibration.cpu.spec import GAINS, with_figures
from roller_svc.calibration.cuda.spec import device
from roller_svc.calibration.presence import check_present
from roller_svc.errors import require
from roller_svc.hardware import detect_local
from roller_svc.ir.hardware import HardwareSpec, Measured, TargetKind

# What two calibrations of a machine may differ by: turbo clocks alone vary by a tenth with what the neighbours do.
AGREES_WITHIN = 1.15
COUNT, BYTES, RATIO = "count", "bytes", "ratio"
_CACHES = ("l1", "l2", "l3")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure. `min`, `median`, `max` of the samples; what the system tells, and what follows from several figures,
    has but one value. `ratio`: what the machine gives where nothing else runs, over the spec's figure."""

    figure: str
    unit: str
    spec: float
    min: float
    median: float
    max: float
    ratio: float

    @property
    def agrees(self) -> bool:
        """What can be counted is the same; what is measured is so within 15 %, or lies among the samples."""
        if self.unit in (COUNT, BYTES):
            return self.ratio == 1
        near = 1 / AGREES_WITHIN <= self.ratio <= AGREES_WITHIN
        return near or self.min <= self.spec <= self.max


def compared(hw: HardwareSpec, seconds: float = SECONDS) -> tuple[Comparison, ...]:
    """What can be counted, every figure that a micro-benchmark stands for, and those that follow from several.

    Raises as `check_present` does, and LaunchError (machine-busy) where other processes use the cores.
    """
    check_present(hw)
    measured = measured_on(hw, seconds)
    derived = derived_comparisons(hw, measured) if hw.family is TargetKind.CPU else ()
    return (*_counted(hw), *measured_comparisons(hw, measured), *derived)


def measured_comparisons(hw: HardwareSpec, measured: Sequence[Measured]) -> Iterator[Comparison]:
    for one in measured:
        if one.figure is not None and (spec := figure(hw, one.figure)) is not None:
            yield Comparison(one.figure, one.unit, spec, one.min, one.median, one.max, one.quiet / spec)


def derived_comparisons(hw: HardwareSpec, measured: Sequence[Measured]) -> Iterator[Comparison]:
    """Of a CPU. Peaks are left out: a spec has the vendor's, or what was the fastest on a quiet machine."""
    here = with_figures(hw, measured, "")
    for path in GAINS:
        spec, found = (require(figure(one, path), f"{path} of {one.id}") for one in (hw, here))
        yield Comparison(path, RATIO, spec, found, found, found, found / spec)


def figure(hw: HardwareSpec, path: str) -> float | None:
    """The spec's figure of a dotted path: clock_hz, levels.l2.latency_s, limits.launch_overhead_s. None where it leaves
    it out."""
    part, *rest = path.split(".")
    if not rest:
        return float(getattr(hw, part))
    if part == "limits":
        return float(getattr(hw.limits, rest[0]))
    named = {level.name: level for level in hw.levels} if part == "levels" else {unit.name: unit for unit in hw.units}
    found = getattr(named[rest[0]], rest[1])
    return None if found is None else float(found)


def _counted(hw: HardwareSpec) -> Iterator[Comparison]:
    if hw.family is TargetKind.CUDA:
        cores = device(0).cores
        yield Comparison("num_cores", COUNT, hw.num_cores, cores, cores, cores, cores / hw.num_cores)
        return
    here = detect_local()
    paths = [("num_cores", COUNT), *((f"levels.{name}.capacity_bytes", BYTES) for name in _CACHES)]
    for path, unit in paths:
        found, said = (require(figure(spec, path), f"{path} of {spec.id}") for spec in (here, hw))
        yield Comparison(path, unit, said, found, found, found, found / said)
