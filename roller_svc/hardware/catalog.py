"""Device id → HardwareSpec: the shipped spec files and `local`."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from roller_svc.errors import ArgumentError, InvariantError, SpecError, UnknownHardwareError
from roller_svc.hardware.detect import Machine, base_id, localised, probe
from roller_svc.hardware.yaml_text import load_yaml
from roller_svc.ir.hardware import HardwareSpec
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
    """Every spec, in the order of `ids`."""
    return tuple(load(hardware_id) for hardware_id in ids())


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
    """The spec that ROLLER_LOCAL_SPEC names; ArgumentError where it is another machine's."""
    where = f"ROLLER_LOCAL_SPEC={file}"
    try:
        spec = load_yaml(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as failure:
        raise ArgumentError(f"{where}: cannot be read: {failure}", code="invalid-setting") from failure
    for field in ("name", "num_cores", "vector_bytes"):
        said, there = getattr(spec, field), getattr(detected, field)
        if said != there:
            raise ArgumentError(
                f"{where}: {field} is {said}, here it is {there}", code="invalid-setting",
                hint=f"roller calibrate --output {file}",
            )  # fmt: skip
    return replace(spec, id=LOCAL)


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
