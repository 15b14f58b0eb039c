"""Device id → HardwareSpec: the shipped spec files and `local`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from roller_svc.errors import ArgumentError, InputError, SpecError, UnknownHardwareError
from roller_svc.hardware.calibration_cache import load_calibrated
from roller_svc.hardware.detect import Machine, adapt_to_machine, base_id, probe
from roller_svc.hardware.names import match_device, match_group, suggest_devices
from roller_svc.hardware.shipped_files import shipped_files
from roller_svc.hardware.yaml_text import load_yaml
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec, MemoryLevel
from roller_svc.settings import settings

LOCAL = "local"


def load(name: str) -> HardwareSpec:
    """Return the spec of the device that a name means, see `find_id`. Opens no device and measures nothing.

    `local` is the host CPU: from ROLLER_LOCAL_SPEC, else as it was calibrated, else as it is detected.
    """
    hardware_id = find_id(name)
    return _local() if hardware_id == LOCAL else _shipped(hardware_id)


def find_id(name: str) -> str:
    """Return the id of the device that a name means, see `find_meanings`.

    Raises UnknownHardwareError if no device or several have that name.
    """
    meant = find_meanings(name)
    if len(meant) == 1:
        return meant[0]
    raise _unknown_hardware(name, meant)


def find_meanings(name: str) -> list[str]:
    """Return the ids of the devices that a name may mean, in order.

    A name is an id, some words of a shipped one, as in H200 or nvidia-h200, or an architecture that one device has.
    `cpu` is the host CPU.
    """
    if name == LOCAL or name in shipped_files():
        return [name]
    if name.lower() in (LOCAL, "cpu", "host"):
        return [LOCAL]
    meant = match_device(name, shipped_files())
    return meant if len(meant) == 1 else match_group(name, shipped_specs()) or meant


def expand_targets(targets: Iterable[object]) -> list[Any]:
    """Return targets with the devices of each list `a,b`, and of each word for several: `all`, `cuda`, `amd`, `sm_90`.

    Other targets, such as unknown names, stay as they are. None is there twice.
    """
    expanded: list[Any] = []
    for target in targets:
        if not isinstance(target, str):
            expanded.append(target)
            continue
        for name in [part.strip() for part in target.split(",") if part.strip()] or [target]:
            devices = [LOCAL] if find_meanings(name) == [LOCAL] else match_group(name, shipped_specs()) or [name]
            expanded += [device for device in devices if device not in expanded]
    return expanded


def ids() -> tuple[str, ...]:
    """Return every id that `load` takes, `local` last (absent if no base spec describes the host CPU)."""
    return (*sorted(shipped_files()), *((LOCAL,) if base_id(_machine()) else ()))


def all_specs() -> tuple[HardwareSpec, ...]:
    """Return every spec in the order of `ids`, without `local` if `local_spec_error` returns an error."""
    local = (load(LOCAL),) if LOCAL in ids() and local_spec_error() is None else ()
    return (*shipped_specs(), *local)


def shipped_specs() -> tuple[HardwareSpec, ...]:
    """Return the specs of hwspecs/, by id."""
    return tuple(_shipped(hardware_id) for hardware_id in sorted(shipped_files()))


def local_spec_error() -> InputError | None:
    """Return the error of the file in ROLLER_LOCAL_SPEC; None if it is valid or not set."""
    if settings().local_spec is None:
        return None
    try:
        load(LOCAL)
    except InputError as refusal:
        return refusal
    return None


def detect_local() -> HardwareSpec:
    """Detect the host CPU without a cache: the number of cores depends on the current affinity."""
    machine = probe()
    base = base_id(machine)
    if base is None:
        raise UnknownHardwareError(f"no spec describes a {machine.machine} CPU", hint=f"targets are {', '.join(ids())}")
    return adapt_to_machine(_shipped(base), machine)


@lru_cache(maxsize=1)
def _local() -> HardwareSpec:
    file = settings().local_spec
    if file is not None:
        return _load_calibrated(file, detect_local())
    return calibrated_local() or detect_local()


@lru_cache(maxsize=1)
def calibrated_local() -> HardwareSpec | None:
    """Return the host CPU as an earlier use of `local` has measured it; None without one, or if ROLLER_CALIBRATE=0."""
    if not settings().calibrate:
        return None
    detected = detect_local()
    spec = load_calibrated(detected)
    return None if spec is None else replace(restrict_cores(spec, detected.num_cores), id=LOCAL)


def forget_local() -> None:
    """Make the next `load` read the spec of `local` again."""
    _local.cache_clear()
    calibrated_local.cache_clear()


def _load_calibrated(file: Path, detected: HardwareSpec) -> HardwareSpec:
    """Load the spec in ROLLER_LOCAL_SPEC, restricted to the cores that this process may use.

    Raises ArgumentError if it describes another machine.
    """
    where = f"ROLLER_LOCAL_SPEC={file}"
    try:
        spec = load_yaml(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as failure:
        raise ArgumentError(f"{where}: cannot be read: {failure}", code="invalid-setting") from failure
    for field in ("name", "num_cores", "vector_bytes"):
        stated, detected_value = getattr(spec, field), getattr(detected, field)
        if stated != detected_value and not (field == "num_cores" and stated > detected_value):
            raise ArgumentError(
                f"{where}: {field} is {stated}, here it is {detected_value}",
                code="invalid-setting",
                hint=f"roller calibrate --output {file}",
            )
    return replace(restrict_cores(spec, detected.num_cores), id=LOCAL)


def restrict_cores(spec: HardwareSpec, cores: int) -> HardwareSpec:
    """Return a CPU's spec for a process that may use only `cores` of its cores.

    A rate is `cores` times the measured single-core rate, at most the rate of all cores. Without a single-core
    measurement it is proportional to the cores. The peak of a level scales with its rate.
    """
    if cores == spec.num_cores:
        return spec
    single_core = {one.name: one.quiet for one in spec.measured if one.cores == 1}
    single_core_rates = {
        one.figure: single_core[one.name] for one in spec.measured if one.figure is not None and one.name in single_core
    }

    def rate(figure: str, of_all: float) -> float:
        return min(of_all, cores * single_core_rates.get(figure, of_all / spec.num_cores))

    def with_rate(level: MemoryLevel) -> MemoryLevel:
        of_all, peak = level.bandwidth_bytes_per_s, level.peak_bandwidth_bytes_per_s
        scaled_rate = rate(f"levels.{level.name}.bandwidth_bytes_per_s", of_all)
        scaled = None if peak is None else peak * (scaled_rate / of_all)
        return replace(level, bandwidth_bytes_per_s=scaled_rate, peak_bandwidth_bytes_per_s=scaled)

    def with_rates(unit: ComputeUnit) -> ComputeUnit:
        flops = rate(f"units.{unit.name}.flops_per_s", unit.flops_per_s)
        all_cores = unit.quotients_per_s
        divisions = None if all_cores is None else rate(f"units.{unit.name}.quotients_per_s", all_cores)
        return replace(unit, flops_per_s=flops, peak_flops_per_s=None, quotients_per_s=divisions)

    levels = tuple(with_rate(level) for level in spec.levels)
    units = tuple(with_rates(unit) for unit in spec.units)
    return replace(spec, num_cores=cores, levels=levels, units=units, measured=())


@lru_cache(maxsize=1)
def _machine() -> Machine:
    return probe()


@lru_cache(maxsize=64)
def _shipped(hardware_id: str) -> HardwareSpec:
    file = shipped_files()[hardware_id]
    where = f"hwspecs/{file.name}"
    spec = load_yaml(file.read_text(encoding="utf-8"), where)
    if spec.id != hardware_id:
        raise SpecError(f"{where}: id: is {spec.id}, must be the file's name {hardware_id}")
    return spec


def _unknown_hardware(name: str, meant: Sequence[str]) -> UnknownHardwareError:
    if len(meant) > 1:
        several = f"{name[:100]!r} names {len(meant)} devices"
        return UnknownHardwareError(several, hint=f"choose one: {', '.join(meant)}")
    suggestions = suggest_devices(name[:100], ids())
    guess = f"; did you mean {' or '.join(suggestions)}?" if suggestions else ""
    return UnknownHardwareError(f"unknown hardware {name[:100]!r}{guess}", hint=f"targets are {', '.join(ids())}")
