"""Measurements of a CPU → its spec with measured figures, and where each of them comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from roller_svc.calibration.cpu import kernels
from roller_svc.calibration.samples import rounded
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec, Measured, MemoryLevel, Source, UnitKind

# The micro-benchmark of each level's bandwidth: reading, as a micro-kernel does panels and a reduction rows. Beyond a
# core's own caches hints run ahead or do not, whichever is faster, as in generated kernels.
BANDWIDTH_OF = {"l1": "read_l1", "l2": "read_l2", "l3": "read_l3", "dram": "read_dram"}
HINTED = {"l3": "read_ahead_l3", "dram": "read_ahead_dram"}
# Whether they pay: in memory by what a map does, which also writes.
HINTS_PAY = {"l3": ("read_l3", "read_ahead_l3"), "dram": ("copy_dram", "copy_ahead_dram")}
CLOCK, LAUNCH = "clock", "launch"
STREAMED_WRITE, STREAMED_COPY = "write_streamed_dram", "copy_streamed_dram"
# Through the caches, without hints and with them, whichever kernels have.
WRITE, COPY = ("write_dram", "write_ahead_dram"), HINTS_PAY["dram"]
_FMA_LATENCY = f"{kernels.multiply_name(DType.FLOAT32)}_chain"
_OPERAND_BYTES = 3 * 4  # of a multiply-add of float32: what registers give

CLOCK_FIGURE, LAUNCH_FIGURE = "clock_hz", "limits.launch_overhead_s"
# What follows from several micro-benchmarks.
GAINS = (
    "levels.dram.streamed_write_gain", "levels.dram.streamed_copy_gain", "levels.dram.write_gain",
    "levels.dram.copy_gain", "levels.dram.hinted_gain", "levels.l3.hinted_gain",
)  # fmt: skip
DERIVED_FIGURES = (
    *GAINS,
    "levels.*.peak_bandwidth_bytes_per_s", "levels.register.bandwidth_bytes_per_s", "levels.register.latency_s",
)  # fmt: skip


def figure_of(name: str, values: Mapping[str, float], hw: HardwareSpec) -> str | None:
    """The field of the spec that a micro-benchmark on all of its cores is taken for, `values` being what all gave."""
    figures = {CLOCK: CLOCK_FIGURE, LAUNCH: LAUNCH_FIGURE}
    figures |= {_fastest(level, values): f"levels.{level}.bandwidth_bytes_per_s" for level in BANDWIDTH_OF}
    figures |= {f"latency_{level}": f"levels.{level}.latency_s" for level in BANDWIDTH_OF}
    figures |= {kernels.multiply_name(unit.in_dtype): f"units.{unit.name}.flops_per_s" for unit in hw.units}
    figures |= {
        kernels.divide_name(unit.in_dtype): f"units.{unit.name}.quotients_per_s"
        for unit in hw.units
        if unit.kind is UnitKind.VECTOR
    }
    return figures.get(name)


def standing_for(measured: Sequence[Measured], hw: HardwareSpec) -> tuple[Measured, ...]:
    """The micro-benchmarks, each with the figure that is taken from it, if any is."""
    most = {one.name: one for one in sorted(measured, key=lambda one: one.cores)}  # of all cores, where there is that
    values = {name: one.quiet for name, one in most.items()}
    figures = {name: figure_of(name, values, hw) for name in most}
    return tuple(replace(one, figure=figures[one.name] if one is most[one.name] else None) for one in measured)


def with_figures(hw: HardwareSpec, measured: Sequence[Measured], provenance: str) -> HardwareSpec:
    """The spec with every figure that was measured. Peaks are not the vendor's, which say nothing of this machine: a
    level's is its fastest micro-benchmark's, units have none."""
    all_cores = {one.name: one.quiet for one in measured if one.cores == hw.num_cores}
    alone = {one.name: one.quiet for one in measured if one.cores == 1}
    values = alone | all_cores
    found = replace(
        hw,
        clock_hz=values[CLOCK],
        levels=in_order(tuple(_level(level, values) for level in hw.levels)),
        units=tuple(_unit(unit, values) for unit in hw.units),
        limits=replace(hw.limits, launch_overhead_s=values[LAUNCH]),
        measured=tuple(measured),
    )
    return replace(found, sources=_sources(found, provenance))


def refigured(hw: HardwareSpec) -> HardwareSpec:
    """A calibrated spec, maybe of before, with figures taken from its micro-benchmarks as calibration takes them now;
    any other spec as it is."""
    needed = {*BANDWIDTH_OF.values(), *HINTED.values(), *chain(*HINTS_PAY.values()), STREAMED_WRITE, STREAMED_COPY}
    if not needed <= {one.name for one in hw.measured}:
        return hw
    return with_figures(hw, hw.measured, hw.sources[0].text)


def quietest(specs: Sequence[HardwareSpec]) -> HardwareSpec:
    """One spec of several calibrations of the same machine, with the same micro-benchmarks: of each the one that gave
    most, since others make a machine slower, never faster. One alone is itself, calibrated or not."""
    if len(specs) == 1:
        return specs[0]
    of_each = zip(*(spec.measured for spec in specs), strict=True)
    best = [min(same, key=lambda one: one.quiet if one.unit == "s" else -one.quiet) for same in of_each]
    return with_figures(specs[0], standing_for(best, specs[0]), specs[0].sources[0].text)


def _level(level: MemoryLevel, values: Mapping[str, float]) -> MemoryLevel:
    if level.name not in BANDWIDTH_OF:
        rate = values[kernels.multiply_name(DType.FLOAT32)] / 2 * _OPERAND_BYTES
        latency = values[_FMA_LATENCY]
    else:
        rate, latency = values[_fastest(level.name, values)], values[f"latency_{level.name}"]
    peak = _peak(level, values)
    found = replace(level, bandwidth_bytes_per_s=rate, latency_s=latency, peak_bandwidth_bytes_per_s=peak)
    if level.name in HINTS_PAY:
        without, ahead = HINTS_PAY[level.name]
        found = replace(found, hinted_gain=_within(values[ahead] / values[without]))
    if level.name == "dram":
        write, copy = (_within(values[way] / rate) for way in (STREAMED_WRITE, STREAMED_COPY))
        found = replace(found, streamed_write_gain=write, streamed_copy_gain=copy)
        hinted = found.hinted_gain >= 1
        # a spec of before stores with hints were measured: these write as fast as is read, or nearly so
        write, copy = (_within(values.get(ways[hinted], rate) / rate) for ways in (WRITE, COPY))
        found = replace(found, write_gain=write, copy_gain=copy)
    return found


def _peak(level: MemoryLevel, values: Mapping[str, float]) -> float | None:
    """Of all ways to read, write or copy what is there."""
    ways = (f"{way}_{level.name}" for way in kernels.WAYS_TOLD)
    return max((values[way] for way in ways if way in values), default=None)


def _fastest(level: str, values: Mapping[str, float]) -> str:
    """The micro-benchmark that the level's bandwidth is taken from."""
    ways = (BANDWIDTH_OF[level], HINTED.get(level, BANDWIDTH_OF[level]))
    return max(ways, key=lambda way: values.get(way, 0.0))


def _within(gain: float) -> float:
    """Rounded, and within what a spec may hold."""
    return rounded(min(10.0, max(0.1, gain)))


def _unit(unit: ComputeUnit, values: Mapping[str, float]) -> ComputeUnit:
    """Of dot products as many instructions as multiply-adds."""
    is_dot = unit.kind is UnitKind.DOT
    rate = values.get(kernels.multiply_name(DType.FLOAT32 if is_dot else unit.in_dtype))
    if is_dot and rate is not None:
        rate *= unit.k_group
    quotients = None if is_dot else values.get(kernels.divide_name(unit.in_dtype))
    return unit if rate is None else replace(unit, flops_per_s=rate, peak_flops_per_s=None, quotients_per_s=quotients)


def in_order(levels: tuple[MemoryLevel, ...]) -> tuple[MemoryLevel, ...]:
    """No level further away than the one outside of it: so near are they that samples of them may cross."""
    found = [levels[0]]
    for level in levels[1:]:
        found.append(replace(level, latency_s=min(level.latency_s, found[-1].latency_s)))
    return tuple(found)


def _sources(hw: HardwareSpec, provenance: str) -> tuple[Source, ...]:
    fields = sorted({one.figure for one in hw.measured if one.figure is not None})
    measured = Source((*fields, *DERIVED_FIGURES), provenance)
    return (measured, *(s for s in hw.sources if not set(s.fields) <= set(measured.fields)))
