"""Rates of a spec for another number of cores or clock: a spec states for which its rates are."""

from __future__ import annotations

from typing import Any

from roller_svc.hardware.schema import LevelModel, SpecModel, UnitModel
from roller_svc.ir.hardware import Scope


def scale_rates(spec: SpecModel) -> SpecModel:
    """Return the spec with the rates of its own cores and clock.

    Rates of units and of levels inside the cores are proportional to cores times clock, and latencies inside the cores
    to a cycle. Levels of the whole device stay as they are, and so do all rates where the spec does not state for what
    they are.
    """
    given = spec.rates_for
    if given is None or (given.num_cores, given.clock_hz) == (spec.num_cores, spec.clock_hz):
        return spec
    rate = spec.num_cores * spec.clock_hz / (given.num_cores * given.clock_hz)
    cycle = given.clock_hz / spec.clock_hz
    levels = [level if level.scope == Scope.DEVICE.value else _scaled_level(level, rate, cycle) for level in spec.levels]
    return spec.model_copy(update={"levels": levels, "units": [_scaled_unit(unit, rate) for unit in spec.units]})


def _scaled_level(level: LevelModel, rate: float, cycle: float) -> LevelModel:
    rates = _scaled(level, rate, "bandwidth_bytes_per_s", "peak_bandwidth_bytes_per_s")
    return level.model_copy(update=rates | _scaled(level, cycle, "latency_s"))


def _scaled_unit(unit: UnitModel, rate: float) -> UnitModel:
    return unit.model_copy(update=_scaled(unit, rate, "flops_per_s", "peak_flops_per_s", "quotients_per_s"))


def _scaled(model: LevelModel | UnitModel, factor: float, *fields: str) -> dict[str, Any]:
    values = {field: getattr(model, field) for field in fields}
    return {field: None if value is None else value * factor for field, value in values.items()}
