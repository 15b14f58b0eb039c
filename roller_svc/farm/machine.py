"""This machine as a worker: the queues that it can take operations from, and what others should know of it."""

from __future__ import annotations

import importlib.util
import os
import platform
import uuid
from collections.abc import Iterable, Sequence

from roller_svc import hardware
from roller_svc.compiler.action import toolchain_versions
from roller_svc.errors import ArgumentError, InputError
from roller_svc.farm.environment import environment_digest
from roller_svc.farm.registry import Worker
from roller_svc.farm.routing import cpu_level, levels_below, machine_queue, queue_of_device
from roller_svc.hardware.catalog import LOCAL
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.runtime.cuda.module import CudaDevice, list_devices
from roller_svc.toolchain import availability
from roller_svc.version import __version__

MAX_HOST_CHARACTERS = 60


def machine_queues() -> tuple[str, ...]:
    """Return the queues whose operations this machine can build: it has the compiler, the CPU or the device."""
    specs = hardware.shipped_specs()
    gpu_kinds = (TargetKind.CUDA, TargetKind.AMD)
    gpus = [spec for spec in specs if spec.family in gpu_kinds and availability(spec).ok]
    queues = {queue_of_device(spec, is_measured=False) for spec in gpus}
    if importlib.util.find_spec("cupy") is not None:
        capabilities = {device.capability for device in list_devices()}
        queues |= {queue_of_device(spec, is_measured=True) for spec in gpus if _capability(spec) in capabilities}
    local = _local_spec()
    if local is not None and availability(local).ok:
        queues |= {machine_queue(), *(f"build.cpu.{level}" for level in levels_below(cpu_level(local)))}
    return tuple(sorted(queues))


def check_queues(names: Iterable[str]) -> tuple[str, ...]:
    """Return the queues of these names. Raises ArgumentError if this machine cannot build for one."""
    known = machine_queues()
    chosen = tuple(dict.fromkeys(name for name in names if name))
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        what = f"this machine does not serve the queue {unknown[0][:80]!r}" if unknown else "a worker needs a queue"
        hint = f"it serves {', '.join(known)}" if known else "install gcc, or NVRTC: pip install 'roller-svc[cuda]'"
        raise ArgumentError(what, code="unknown-queue", hint=hint)
    return chosen


def describe_worker(queues: Sequence[str], jobs: int) -> Worker:
    """Describe this process as a worker of the farm."""
    host = platform.node()[:MAX_HOST_CHARACTERS]
    local = _local_spec()
    facts: dict[str, object] = {
        "host": host,
        "pid": os.getpid(),
        "version": __version__,
        "jobs": jobs,
        "cpu": None if local is None else {"name": local.name, "level": cpu_level(local), "cores": local.num_cores},
        "devices": [_device_json(device) for device in list_devices()],
        "compilers": toolchain_versions(),
    }
    return Worker(f"{host}-{uuid.uuid4().hex[:12]}", tuple(queues), environment_digest(), facts)


def _device_json(device: CudaDevice) -> dict[str, object]:
    major, minor = device.capability
    return {"name": device.name, "arch": f"sm_{major}{minor}"}


def _capability(spec: HardwareSpec) -> tuple[int, int] | None:
    return divmod(spec.arch.number, 10) if spec.family is TargetKind.CUDA else None


def _local_spec() -> HardwareSpec | None:
    """Return the spec of the host CPU, or None if no spec describes it."""
    try:
        return hardware.load(LOCAL)
    except InputError:
        return None
