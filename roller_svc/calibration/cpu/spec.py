"""Measurements of a CPU → its spec with the measured values and their sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from roller_svc.calibration.cpu import kernels
from roller_svc.calibration.samples import round_value
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec, Measured, MemoryLevel, Source, UnitKind

# The micro-benchmark of each level's bandwidth is reading, as micro-kernels read panels and reductions read rows.
# Beyond a core's own caches the faster variant counts, with or without software prefetch, as in generated kernels.
BANDWIDTH_PROBES = {"l1": "read_l1", "l2": "read_l2", "l3": "read_l3", "dram": "read_dram"}
PREFETCH_PROBES = {"l3": "read_ahead_l3", "dram": "read_ahead_dram"}
# (without, with prefetch) benchmarks that decide whether prefetch pays; in DRAM by a map, which also writes.
PREFETCH_COMPARISONS = {"l3": ("read_l3", "read_ahead_l3"), "dram": ("copy_dram", "copy_ahead_dram")}
CLOCK, LAUNCH = "clock", "launch"
NONTEMPORAL_WRITE, NONTEMPORAL_COPY = "write_streamed_dram", "copy_streamed_dram"
# Cached stores, without and with prefetch, as kernels do it.
WRITE, COPY = ("write_dram", "write_ahead_dram"), PREFETCH_COMPARISONS["dram"]
_FMA_LATENCY = f"{kernels.multiply_name(DType.FLOAT32)}_chain"
_OPERAND_BYTES = 3 * 4  # of a float32 multiply-add: bytes read from registers

CLOCK_FIELD, LAUNCH_FIELD = "clock_hz", "limits.launch_overhead_s"
# Fields derived from several micro-benchmarks.
RATIO_FIELDS = (
    "levels.dram.streamed_write_gain", "levels.dram.streamed_copy_gain", "levels.dram.write_gain",
    "levels.dram.copy_gain", "levels.dram.hinted_gain", "levels.l3.hinted_gain",
)  # fmt: skip
DERIVED_FIELDS = (
    *RATIO_FIELDS,
    "levels.*.peak_bandwidth_bytes_per_s", "levels.register.bandwidth_bytes_per_s", "levels.register.latency_s",
)  # fmt: skip


def field_of(name: str, values: Mapping[str, float], hw: HardwareSpec) -> str | None:
    """Return the field that a micro-benchmark on all cores determines. `values`: results of all micro-benchmarks."""
    figures = {CLOCK: CLOCK_FIELD, LAUNCH: LAUNCH_FIELD}
    figures |= {_fastest(level, values): f"levels.{level}.bandwidth_bytes_per_s" for level in BANDWIDTH_PROBES}
    figures |= {f"latency_{level}": f"levels.{level}.latency_s" for level in BANDWIDTH_PROBES}
    figures |= {kernels.multiply_name(unit.in_dtype): f"units.{unit.name}.flops_per_s" for unit in hw.units}
    figures |= {
        kernels.divide_name(unit.in_dtype): f"units.{unit.name}.quotients_per_s"
        for unit in hw.units
        if unit.kind is UnitKind.VECTOR
    }
    return figures.get(name)


def attach_fields(measured: Sequence[Measured], hw: HardwareSpec) -> tuple[Measured, ...]:
    """Return the measurements with the field that each determines, if any."""
    widest = {
        one.name: one for one in sorted(measured, key=lambda one: one.cores)
    }  # measurements on all cores replace those on one
    values = {name: one.quiet for name, one in widest.items()}
    figures = {name: field_of(name, values, hw) for name in widest}
    return tuple(replace(one, figure=figures[one.name] if one is widest[one.name] else None) for one in measured)


def with_measured_values(hw: HardwareSpec, measured: Sequence[Measured], provenance: str) -> HardwareSpec:
    """Return the spec with all measured values.

    A level's peak is that of its fastest micro-benchmark. Units have none: a vendor's peak does not describe this
    machine.
    """
    all_cores = {one.name: one.quiet for one in measured if one.cores == hw.num_cores}
    single_core = {one.name: one.quiet for one in measured if one.cores == 1}
    values = single_core | all_cores
    spec = replace(
        hw,
        clock_hz=values[CLOCK],
        levels=enforce_monotonic(tuple(_level(level, values) for level in hw.levels)),
        units=tuple(_unit(unit, hw.unit_for(DType.FLOAT32), values) for unit in hw.units),
        limits=replace(hw.limits, launch_overhead_s=values[LAUNCH]),
        measured=tuple(measured),
    )
    return replace(spec, sources=_sources(spec, provenance))


def recompute_derived(hw: HardwareSpec) -> HardwareSpec:
    """Recompute the fields of an older calibrated spec from its measurements. Other specs are returned unchanged."""
    required = {
        *BANDWIDTH_PROBES.values(),
        *PREFETCH_PROBES.values(),
        *chain(*PREFETCH_COMPARISONS.values()),
        NONTEMPORAL_WRITE,
        NONTEMPORAL_COPY,
    }
    if not required <= {one.name for one in hw.measured}:
        return hw
    return with_measured_values(hw, hw.measured, hw.sources[0].text)


def merge_calibrations(specs: Sequence[HardwareSpec]) -> HardwareSpec:
    """Merge calibrations of one machine by taking the best result of each micro-benchmark.

    Interference only slows a machine. A single spec is returned unchanged.
    """
    if len(specs) == 1:
        return specs[0]
    repetitions = zip(*(spec.measured for spec in specs), strict=True)
    best = [min(same, key=lambda one: one.quiet if one.unit == "s" else -one.quiet) for same in repetitions]
    return with_measured_values(specs[0], attach_fields(best, specs[0]), specs[0].sources[0].text)


def _level(level: MemoryLevel, values: Mapping[str, float]) -> MemoryLevel:
    if level.name not in BANDWIDTH_PROBES:
        rate = values[kernels.multiply_name(DType.FLOAT32)] / 2 * _OPERAND_BYTES
        latency = values[_FMA_LATENCY]
    else:
        rate, latency = values[_fastest(level.name, values)], values[f"latency_{level.name}"]
    peak = _peak(level, values)
    measured_level = replace(level, bandwidth_bytes_per_s=rate, latency_s=latency, peak_bandwidth_bytes_per_s=peak)
    if level.name in PREFETCH_COMPARISONS:
        without, prefetched = PREFETCH_COMPARISONS[level.name]
        measured_level = replace(measured_level, hinted_gain=_clamp_ratio(values[prefetched] / values[without]))
    if level.name == "dram":
        write, copy = (_clamp_ratio(values[way] / rate) for way in (NONTEMPORAL_WRITE, NONTEMPORAL_COPY))
        measured_level = replace(measured_level, streamed_write_gain=write, streamed_copy_gain=copy)
        use_prefetch = measured_level.hinted_gain >= 1
        # older specs lack stores with prefetch: assume they are as fast as reads
        write, copy = (_clamp_ratio(values.get(ways[use_prefetch], rate) / rate) for ways in (WRITE, COPY))
        measured_level = replace(measured_level, write_gain=write, copy_gain=copy)
    return measured_level


def _peak(level: MemoryLevel, values: Mapping[str, float]) -> float | None:
    """Return the best bandwidth of all benchmarks of the level."""
    ways = (f"{way}_{level.name}" for way in kernels.WAY_DESCRIPTIONS)
    return max((values[way] for way in ways if way in values), default=None)


def _fastest(level: str, values: Mapping[str, float]) -> str:
    """Return the micro-benchmark that determines the level's bandwidth."""
    ways = (BANDWIDTH_PROBES[level], PREFETCH_PROBES.get(level, BANDWIDTH_PROBES[level]))
    return max(ways, key=lambda way: values.get(way, 0.0))


def _clamp_ratio(gain: float) -> float:
    """Round a ratio and clamp it to the range of a spec."""
    return round_value(min(10.0, max(0.1, gain)))


def _unit(unit: ComputeUnit, floats: ComputeUnit, values: Mapping[str, float]) -> ComputeUnit:
    """Return the unit with measured rates. Dot products keep their ratio to multiply-adds."""
    is_dot = unit.kind is UnitKind.DOT
    rate = values.get(kernels.multiply_name(DType.FLOAT32 if is_dot else unit.in_dtype))
    if is_dot and rate is not None:
        rate *= unit.flops_per_s / floats.flops_per_s
    quotients = None if is_dot else values.get(kernels.divide_name(unit.in_dtype))
    return unit if rate is None else replace(unit, flops_per_s=rate, peak_flops_per_s=None, quotients_per_s=quotients)


def enforce_monotonic(levels: tuple[MemoryLevel, ...]) -> tuple[MemoryLevel, ...]:
    """Limit each level's latency to that of the level outside it, which noise may violate."""
    monotonic = [levels[0]]
    for level in levels[1:]:
        monotonic.append(replace(level, latency_s=min(level.latency_s, monotonic[-1].latency_s)))
    return tuple(monotonic)


def _sources(hw: HardwareSpec, provenance: str) -> tuple[Source, ...]:
    fields = sorted({one.figure for one in hw.measured if one.figure is not None})
    measured = Source((*fields, *DERIVED_FIELDS), provenance)
    return (measured, *(s for s in hw.sources if not set(s.fields) <= set(measured.fields)))
