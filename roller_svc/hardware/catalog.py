"""Device id → HardwareSpec: the shipped spec files and `local`."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from roller_svc.errors import ArgumentError, InputError, InvariantError, SpecError, UnknownHardwareError
from roller_svc.hardware.detect import Machine, base_id, localised, probe
from roller_svc.hardware.yaml_text import load_yaml
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec, MemoryLevel
from roller_svc.settings import settings

LOCAL = "local"
_SUFFIX = ".yaml"


def load(hardware_id: str) -> HardwareSpec:
    """The spec of that id; `local` is the CPU this runs on, as detected or as ROLLER_LOCAL_SPEC has it. Opens no
    device."""
    if hardware_id == LOCAL:
        return _local()
    if hardware_id not in _files():
        raise _unknown(hardware_id)
    return _shipped(hardware_id)


def ids() -> tuple[str, ...]:
    """Every id that `load` takes, `local` last (absent on a machine whose CPU no base spec describes)."""
    return (*sorted(_files()), *((LOCAL,) if base_id(_machine()) else ()))


def all_specs() -> tuple[HardwareSpec, ...]:
    """Every spec, in the order of `ids`; without `local` where the file of ROLLER_LOCAL_SPEC is refused, which
    `refusal_of_local` tells."""
    local = (load(LOCAL),) if LOCAL in ids() and refusal_of_local() is None else ()
    return (*shipped_specs(), *local)


def shipped_specs() -> tuple[HardwareSpec, ...]:
    """Those of hwspecs/, by id."""
    return tuple(_shipped(hardware_id) for hardware_id in sorted(_files()))


def refusal_of_local() -> InputError | None:
    """Why the file that ROLLER_LOCAL_SPEC names is not taken; None where it is, or none is named."""
    if settings().local_spec is None:
        return None
    try:
        load(LOCAL)
    except InputError as refusal:
        return refusal
    return None


def detect_local() -> HardwareSpec:
    """The CPU this runs on, read afresh: another affinity gives another number of cores."""
    machine = probe()
    base = base_id(machine)
    if base is None:
        raise UnknownHardwareError(f"no spec describes a {machine.machine} CPU", hint=f"targets are {', '.join(ids())}")
    return localised(_shipped(base), machine)


@lru_cache(maxsize=1)
def _local() -> HardwareSpec:
    file = settings().local_spec
    return detect_local() if file is None else _calibrated(file, detect_local())


def _calibrated(file: Path, detected: HardwareSpec) -> HardwareSpec:
    """The spec that ROLLER_LOCAL_SPEC names, of as many of its cores as this process may use; ArgumentError where it
    is another machine's."""
    where = f"ROLLER_LOCAL_SPEC={file}"
    try:
        spec = load_yaml(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as failure:
        raise ArgumentError(f"{where}: cannot be read: {failure}", code="invalid-setting") from failure
    for field in ("name", "num_cores", "vector_bytes"):
        said, there = getattr(spec, field), getattr(detected, field)
        if said != there and not (field == "num_cores" and said > there):
            raise ArgumentError(
                f"{where}: {field} is {said}, here it is {there}", code="invalid-setting",
                hint=f"roller calibrate --output {file}",
            )  # fmt: skip
    return replace(with_fewer_cores(spec, detected.num_cores), id=LOCAL)


def with_fewer_cores(spec: HardwareSpec, cores: int) -> HardwareSpec:
    """A CPU's spec for a process that may use only so many of its cores. A rate is that many times what one core was
    measured at alone, at most what all of them reach; without such a measurement their share of it. The peak of a
    level follows its rate."""
    if cores == spec.num_cores:
        return spec
    alone = {one.name: one.quiet for one in spec.measured if one.cores == 1}
    of_one = {one.figure: alone[one.name] for one in spec.measured if one.figure is not None and one.name in alone}

    def rate(figure: str, of_all: float) -> float:
        return min(of_all, cores * of_one.get(figure, of_all / spec.num_cores))

    def with_rate(level: MemoryLevel) -> MemoryLevel:
        of_all, peak = level.bandwidth_bytes_per_s, level.peak_bandwidth_bytes_per_s
        there = rate(f"levels.{level.name}.bandwidth_bytes_per_s", of_all)
        scaled = None if peak is None else peak * (there / of_all)
        return replace(level, bandwidth_bytes_per_s=there, peak_bandwidth_bytes_per_s=scaled)

    def with_rates(unit: ComputeUnit) -> ComputeUnit:
        flops = rate(f"units.{unit.name}.flops_per_s", unit.flops_per_s)
        of_all = unit.quotients_per_s
        quotients = None if of_all is None else rate(f"units.{unit.name}.quotients_per_s", of_all)
        return replace(unit, flops_per_s=flops, peak_flops_per_s=None, quotients_per_s=quotients)

    levels = tuple(with_rate(level) for level in spec.levels)
    units = tuple(with_rates(unit) for unit in spec.units)
    return replace(spec, num_cores=cores, levels=levels, units=units, measured=())


@lru_cache(maxsize=1)
def _machine() -> Machine:
    return probe()


@lru_cache(maxsize=64)
def _shipped(hardware_id: str) -> HardwareSpec:
    file = _files()[hardware_id]
    where = f"hwspecs/{file.name}"
    spec = load_yaml(file.read_text(encoding="utf-8"), where)
    if spec.id != hardware_id:
        raise SpecError(f"{where}: id: is {spec.id}, must be the file's name {hardware_id}")
    return spec


@lru_cache(maxsize=1)
def _files() -> dict[str, Traversable]:
    """Spec files by id: inside the package where it was installed, beside it in a checkout."""
    installed = files("roller_svc") / "hwspecs"
    folder: Traversable = installed if installed.is_dir() else Path(__file__).parents[2] / "hwspecs"
    if not folder.is_dir():
        raise InvariantError(f"no spec files: neither {installed} nor {folder} is there")
    return {file.name.removesuffix(_SUFFIX): file for file in folder.iterdir() if file.name.endswith(_SUFFIX)}


def _unknown(hardware_id: str) -> UnknownHardwareError:
    longer = [known for known in ids() if hardware_id and known.startswith(hardware_id)]
    near = longer or get_close_matches(hardware_id[:100], ids(), n=1, cutoff=0.4)
    guess = f"; did you mean {near[0]}?" if near else ""
    return UnknownHardwareError(
        f"unknown hardware {hardware_id[:100]!r}{guess}", hint=f"targets are {', '.join(ids())}"
    )
