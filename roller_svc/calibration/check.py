"""Compare a spec with the local device, field by field."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from roller_svc.calibration.calibrate import SECONDS, measure_spec
from roller_svc.calibration.cpu.spec import RATIO_FIELDS, with_measured_values
from roller_svc.calibration.cuda.spec import open_device
from roller_svc.calibration.presence import check_present
from roller_svc.errors import require
from roller_svc.hardware import detect_local
from roller_svc.ir.hardware import HardwareSpec, Measured, TargetKind

# Tolerance between two calibrations of a machine: turbo clocks alone vary by a tenth with the load of other cores.
AGREES_WITHIN = 1.15
COUNT, BYTES, RATIO = "count", "bytes", "ratio"
_CACHES = ("l1", "l2", "l3")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One field of a spec and its measured value.

    `min`, `median` and `max` of the samples are equal for values that the system reports or that are derived.
    """

    field: str
    unit: str
    spec: float
    min: float
    median: float
    max: float
    ratio: float  # undisturbed measurement over the spec's value

    @property
    def agrees(self) -> bool:
        """Whether counts are equal, and measured values within 15 % or within the range of the samples."""
        if self.unit in (COUNT, BYTES):
            return self.ratio == 1
        is_close = 1 / AGREES_WITHIN <= self.ratio <= AGREES_WITHIN
        return is_close or self.min <= self.spec <= self.max


def compare_spec(hw: HardwareSpec, seconds: float = SECONDS) -> tuple[Comparison, ...]:
    """Compare counts, fields that a micro-benchmark determines, and fields derived from several.

    Raises as `check_present` does, and LaunchError (machine-busy) if other processes use the cores.
    """
    check_present(hw)
    measured = measure_spec(hw, seconds)
    derived = derived_comparisons(hw, measured) if hw.family is TargetKind.CPU else ()
    return (*_count_comparisons(hw), *measured_comparisons(hw, measured), *derived)


def measured_comparisons(hw: HardwareSpec, measured: Sequence[Measured]) -> Iterator[Comparison]:
    for one in measured:
        if one.figure is not None and (spec := read_field(hw, one.figure)) is not None:
            yield Comparison(one.figure, one.unit, spec, one.min, one.median, one.max, one.quiet / spec)


def derived_comparisons(hw: HardwareSpec, measured: Sequence[Measured]) -> Iterator[Comparison]:
    """Compare the derived fields of a CPU, without peaks, which a spec has from the vendor or from an idle machine."""
    here = with_measured_values(hw, measured, "")
    for path in RATIO_FIELDS:
        spec, derived = (require(read_field(one, path), f"{path} of {one.id}") for one in (hw, here))
        yield Comparison(path, RATIO, spec, derived, derived, derived, derived / spec)


def read_field(hw: HardwareSpec, path: str) -> float | None:
    """Return the field at a dotted path, such as clock_hz or levels.l2.latency_s; None if the spec omits it."""
    part, *rest = path.split(".")
    if not rest:
        return float(getattr(hw, part))
    if part == "limits":
        value = getattr(hw.limits, rest[0])
    else:
        named = {level.name: level for level in hw.levels} if part == "levels" else {unit.name: unit for unit in hw.units}
        value = getattr(named[rest[0]], rest[1])
    return None if value is None else float(value)


def _count_comparisons(hw: HardwareSpec) -> Iterator[Comparison]:
    if hw.family is TargetKind.CUDA:
        cores = open_device(0).cores
        yield Comparison("num_cores", COUNT, hw.num_cores, cores, cores, cores, cores / hw.num_cores)
        return
    here = detect_local()
    paths = [("num_cores", COUNT), *((f"levels.{name}.capacity_bytes", BYTES) for name in _CACHES)]
    for path, unit in paths:
        detected, stated = (require(read_field(spec, path), f"{path} of {spec.id}") for spec in (here, hw))
        yield Comparison(path, unit, stated, detected, detected, detected, detected / stated)
