"""Bounds of physics and of consistency on a spec: what no device can be. None of them is of one device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from roller_svc.hardware.schema import MATRIX_KINDS, Problem, SpecModel, UnitModel
from roller_svc.ir.dtype import DType, dtype_named
from roller_svc.ir.hardware import Scope, UnitKind

ROUNDING = 1.02  # of values in data sheets
MAX_CLOCK_HZ = 1e10  # the fastest processor, cooled by liquid helium, ran at 9.1 GHz
MIN_PORT_BYTES = 1 / 8  # a clock: the narrowest connection of a core to a level on the chip has one wire
# Energy of an operation, half a multiply-add, in a process of 7 nm: Jouppi et al., "Ten Lessons From Three Generations
# Shaped Google's TPUv4i", ISCA 2021, table 2. Later processes, and those to come, are taken to need a quarter.
JOULES_PER_OPERATION = {
    DType.FLOAT32: 0.85e-12, DType.INT32: 0.75e-12, DType.FLOAT16: 0.25e-12, DType.BFLOAT16: 0.16e-12, DType.INT8: 0.038e-12,
}  # fmt: skip
PROCESS_GAIN = 4
MAX_POWER_W = 25e3  # of one device: a processor of a whole wafer takes 23 kW (Cerebras WSE-3)
# Static memory of a wafer of 300 mm in the densest process: 38 Mbit a square millimetre (TSMC N2, IEDM 2024).
MAX_ON_CHIP_BYTES = 336_000_000_000
REGISTER_BYTES = 4


def find_implausible(spec: SpecModel) -> list[Problem]:
    """Return the values of a spec that no device can have, each with its path.

    Levels and registers are compared where nothing was measured: on a busy machine measurements contradict each other.
    """
    stated = () if spec.measured else (_levels, _neighbours, _registers)
    return [problem for check in (_clock, _cores, *stated, _power) for problem in check(spec)]


def _clock(spec: SpecModel) -> Iterator[Problem]:
    if spec.clock_hz > MAX_CLOCK_HZ:
        yield "clock_hz", f"{spec.clock_hz:.3g} Hz is faster than any processor, at most {MAX_CLOCK_HZ:g}"


def _cores(spec: SpecModel) -> Iterator[Problem]:
    """Find levels, units and memory that cannot be those of all cores."""
    cores, cycles = spec.num_cores, spec.num_cores * spec.clock_hz
    for index, level in enumerate(spec.levels[1:], start=1):
        share = level.bandwidth_bytes_per_s / cycles
        if level.scope == Scope.DEVICE.value and share < MIN_PORT_BYTES:
            what = f"{share:.2g} bytes a clock for each of {cores} cores (num_cores), less than {MIN_PORT_BYTES}"
            yield f"levels.{index}.bandwidth_bytes_per_s", what
    fastest = max(map(_peak, _plain_units(spec)), default=cycles)
    if fastest < cycles:
        yield (
            "num_cores",
            f"each of {cores} cores has {fastest / cycles:.2g} operations a clock of FMA or vector units, less than 1",
        )
    inside = sum(level.capacity_bytes for level in spec.levels if level.scope == Scope.CORE.value)
    total = cores * (inside + spec.limits.registers_per_core * REGISTER_BYTES)
    if total > MAX_ON_CHIP_BYTES:
        yield "num_cores", f"{cores} cores hold {total / 1e9:.3g} GB, more than fits on a wafer ({MAX_ON_CHIP_BYTES / 1e9:g})"


def _levels(spec: SpecModel) -> Iterator[Problem]:
    for index, level in enumerate(spec.levels):
        if level.latency_s * spec.clock_hz * ROUNDING < 1:
            yield f"levels.{index}.latency_s", f"{level.latency_s:.3g} s is less than a clock cycle, {1 / spec.clock_hz:.3g} s"
        most = spec.num_cores * spec.clock_hz * level.banks * level.bank_bytes
        if level.banks > 1 and level.bandwidth_bytes_per_s > most * ROUNDING:
            banks = f"{level.banks} banks of {level.bank_bytes} bytes in {spec.num_cores} cores"
            yield f"levels.{index}.bandwidth_bytes_per_s", f"{banks} give at most {most:.3g} bytes/s"


def _neighbours(spec: SpecModel) -> Iterator[Problem]:
    """Find levels that are slower or larger than the next, of those inside cores and of those of the device.

    A device of few cores may have caches that are faster than these cores, and smaller than one core's.
    """
    for index, (outer, inner) in enumerate(pairwise(spec.levels), start=1):
        if (inner.scope == Scope.DEVICE.value) != (outer.scope == Scope.DEVICE.value):
            continue
        own, around = inner.bandwidth_bytes_per_s, outer.bandwidth_bytes_per_s
        if own < around:
            yield f"levels.{index}.bandwidth_bytes_per_s", f"{own:.3g}, less than the {around:.3g} of {outer.name} around it"
        if inner.capacity_bytes > outer.capacity_bytes:
            yield f"levels.{index}.capacity_bytes", f"{inner.capacity_bytes}, more than {outer.name} around it holds"


def _registers(spec: SpecModel) -> Iterator[Problem]:
    """Find units that read more operands than registers give, at one for each multiply-add."""
    registers = spec.levels[-1].bandwidth_bytes_per_s
    for index, unit in enumerate(spec.units):
        dtype = dtype_named(unit.in_dtype)
        read = _peak(unit) / 2 * (0 if dtype is None else dtype.bytes)
        if unit in _plain_units(spec) and read > registers * ROUNDING:
            what = f"{unit.name} reads {read:.3g} bytes/s of operands, more than the {registers:.3g} of registers"
            yield _path_of_peak(unit, index), what


def _power(spec: SpecModel) -> Iterator[Problem]:
    for index, unit in enumerate(spec.units):
        power = _peak(unit) * _least_joules(UnitKind(unit.kind), dtype_named(unit.in_dtype))
        if power > MAX_POWER_W:
            arithmetic = f"{unit.name}: {_peak(unit):.3g} operations a second take {power / 1e3:.3g} kW"
            yield _path_of_peak(unit, index), f"{arithmetic}, no device takes more than {MAX_POWER_W / 1e3:g}"


def _plain_units(spec: SpecModel) -> list[UnitModel]:
    return [unit for unit in spec.units if UnitKind(unit.kind) in (UnitKind.FMA, UnitKind.VECTOR)]


def _peak(unit: UnitModel) -> float:
    return unit.peak_flops_per_s or unit.flops_per_s


def _path_of_peak(unit: UnitModel, index: int) -> str:
    return f"units.{index}.{'flops_per_s' if unit.peak_flops_per_s is None else 'peak_flops_per_s'}"


def _least_joules(kind: UnitKind, dtype: DType | None) -> float:
    """Return the energy of an operation in the best process; of types without a published value that of a byte.

    Matrix units may round float32 to as few bits as float16 has.
    """
    if dtype is DType.FLOAT32 and kind in MATRIX_KINDS:
        dtype = DType.FLOAT16
    known = None if dtype is None else JOULES_PER_OPERATION.get(dtype)
    return (JOULES_PER_OPERATION[DType.INT8] if known is None else known) / PROCESS_GAIN
