"""Names of the queues that workers take operations from: what a machine needs for a build."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from roller_svc import hardware
from roller_svc.errors import ArgumentError
from roller_svc.farm.models import ModelRequest, Request
from roller_svc.farm.queue import EVERY_QUEUE, MACHINE_PREFIX
from roller_svc.farm.registry import Worker
from roller_svc.hardware.catalog import LOCAL
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.options import RuntimeChoice, SelectionMode

CPU_PREFIX, MEASURE_PREFIX = "build.cpu.", "measure."
CPU, GPU = "cpu", "gpu"  # kinds of devices that builds measure on
_X86_LEVELS = ("x86-64-v3", "x86-64-v4")  # psABI, each with the instructions of those before it
_MACHINE_IDS = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))


def queue_of(request: Request) -> str:
    """Return the queue of a request: `build.cuda`, `build.cpu.x86-64-v4`, `measure.sm_90`, `local.MACHINE`.

    A kernel for a GPU is compiled anywhere and measured on that architecture. One for a CPU is compiled and measured on
    machines with its vector extension. `local` is built by the machine of the service that took the request.
    """
    if request.target == LOCAL and (isinstance(request, ModelRequest) or request.hardware is None):
        return machine_queue()
    spec = hardware.load(request.target) if isinstance(request, ModelRequest) else None
    if spec is None:
        assert not isinstance(request, ModelRequest)
        spec = request.hardware or hardware.load(request.target)
    is_measured = (
        not isinstance(request, ModelRequest)
        and request.select is SelectionMode.MEASURE
        and request.runtime is not RuntimeChoice.EMULATOR
    )
    return queue_of_device(spec, is_measured=is_measured)


def measured_on(request: Request) -> str | None:
    """Return the kind of device that a build measures on, or None if it measures nothing."""
    if isinstance(request, ModelRequest):
        if request.options.get("select") != SelectionMode.MEASURE.value:
            return None
        return CPU if request.target == LOCAL or hardware.load(request.target).family is TargetKind.CPU else GPU
    if request.select is not SelectionMode.MEASURE or request.runtime is RuntimeChoice.EMULATOR:
        return None
    spec = request.hardware or hardware.load(request.target)
    return CPU if spec.family is TargetKind.CPU else GPU


def queue_of_device(spec: HardwareSpec, *, is_measured: bool) -> str:
    """Return the queue of builds for a device."""
    if spec.family is TargetKind.CPU:
        return f"{CPU_PREFIX}{cpu_level(spec)}"
    if is_measured:
        return f"{MEASURE_PREFIX}{spec.arch}"
    return "build.cuda" if spec.family is TargetKind.CUDA else "build.hip"


def check_measurable(alive: Iterable[Worker], generator: str, request: Request) -> None:
    """Raise ArgumentError unless a worker of the generator that is alive can measure the request's kernels or model."""
    is_model = isinstance(request, ModelRequest)
    way_out = "tune: off" if is_model else "kernels:compile"
    queue = queue_of(request)
    workers = [worker for worker in alive if worker.generator == generator]
    if not any(can_measure(worker, queue) for worker in workers):
        queues = sorted({name for worker in workers for name in worker.queues})
        raise ArgumentError(
            f"no worker measures on {request.target}: its queue {queue} has none",
            code="cannot-measure" if is_model else "no-measuring-worker",
            hint=f"{way_out} builds without a device; workers serve {', '.join(queues)[:200] or 'nothing'}",
        )


def is_known_queue(queue: str) -> bool:
    """Whether a queue is one of the devices in the catalog, or of a machine: their number is bounded."""
    return not queue.startswith(MEASURE_PREFIX) or queue in _queues_of_catalog()


@cache
def _queues_of_catalog() -> frozenset[str]:
    return frozenset(queue_of_device(spec, is_measured=True) for spec in hardware.all_specs())


def can_measure(worker: Worker, queue: str) -> bool:
    """Whether a worker takes measurements of a queue.

    A worker of every queue also builds for devices that it lacks: it measures on its own CPU alone.
    """
    if worker.is_draining or not queue.startswith((MEASURE_PREFIX, CPU_PREFIX, MACHINE_PREFIX)):
        return False
    cpu = worker.facts.get("cpu")
    own = levels_below(str(cpu.get("level"))) if isinstance(cpu, dict) else ()
    return queue in worker.queues or (EVERY_QUEUE in worker.queues and queue in {f"{CPU_PREFIX}{level}" for level in own})


def cpu_level(spec: HardwareSpec) -> str:
    """Return the level of a CPU's instruction set: x86-64-v3, x86-64-v4 (psABI), or its architecture."""
    if "avx512f" in spec.isa:
        return "x86-64-v4"
    return "x86-64-v3" if "avx2" in spec.isa else platform_level(spec)


def levels_below(level: str) -> tuple[str, ...]:
    """Return the levels whose programs run on a CPU of a level."""
    return _X86_LEVELS[: _X86_LEVELS.index(level) + 1] if level in _X86_LEVELS else (level,)


def platform_level(spec: HardwareSpec) -> str:
    return "armv8" if "simd" in spec.isa else "generic"


@cache
def machine_queue() -> str:
    """Return the queue of this machine alone. The name does not reveal the machine's id."""
    for path in _MACHINE_IDS:
        if path.is_file() and (text := path.read_text(encoding="ascii", errors="replace").strip()):
            return MACHINE_PREFIX + hashlib.sha256(f"roller {text}".encode()).hexdigest()[:16]
    return MACHINE_PREFIX + hashlib.sha256(f"roller {platform.node()}".encode()).hexdigest()[:16]
