"""This machine as a worker: queues by what it has, and its description."""

from __future__ import annotations

import ctypes
import json
from types import SimpleNamespace
from typing import Any

import pytest

from roller_svc import hardware
from roller_svc.errors import ArgumentError, UnknownHardwareError
from roller_svc.farm import environment, machine
from roller_svc.farm.environment import environment_digest
from roller_svc.farm.machine import check_queues, describe_worker, machine_queues
from roller_svc.farm.routing import machine_queue
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.runtime.cuda import module
from roller_svc.runtime.cuda.module import CudaDevice, list_devices
from roller_svc.toolchain import Availability


def have(monkeypatch: pytest.MonkeyPatch, *kinds: TargetKind, local: str | None = None, cupy: bool = False) -> None:
    """A machine with compilers for these kinds of targets, with the CPU of a shipped spec."""

    def availability(spec: HardwareSpec) -> Availability:
        return Availability(ok=spec.family in kinds, reason="")

    def load(_: str) -> HardwareSpec:
        if local is None:
            raise UnknownHardwareError("none")
        return hardware.shipped_specs()[[spec.id for spec in hardware.shipped_specs()].index(local)]

    monkeypatch.setattr(machine, "availability", availability)
    monkeypatch.setattr(machine, "hardware", SimpleNamespace(load=load, shipped_specs=hardware.shipped_specs))
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda _: object() if cupy else None)


def test_queues_follow_from_compilers_and_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, TargetKind.CPU, TargetKind.CUDA, local="cpu-x86-avx512")
    levels = ("build.cpu.x86-64-v3", "build.cpu.x86-64-v4")
    assert machine_queues() == (*levels, "build.cuda", machine_queue())
    have(monkeypatch, TargetKind.CPU, local="cpu-x86-avx2")
    assert machine_queues() == ("build.cpu.x86-64-v3", machine_queue())
    have(monkeypatch, TargetKind.CPU, local="cpu-arm-neon")
    assert machine_queues() == ("build.cpu.armv8", machine_queue())
    have(monkeypatch, TargetKind.CPU, TargetKind.AMD)
    assert machine_queues() == ("build.hip",)
    have(monkeypatch)
    assert machine_queues() == ()


def test_a_machine_measures_on_the_architectures_of_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = (CudaDevice("NVIDIA H200", (9, 0)), CudaDevice("NVIDIA H200", (9, 0)), CudaDevice("NVIDIA L40S", (8, 9)))
    monkeypatch.setattr(machine, "list_devices", lambda: devices)
    have(monkeypatch, TargetKind.CUDA, cupy=True)
    assert machine_queues() == ("build.cuda", "measure.sm_89", "measure.sm_90a")
    have(monkeypatch, TargetKind.CUDA)  # CuPy runs the kernels
    assert machine_queues() == ("build.cuda",)
    have(monkeypatch, cupy=True)
    assert machine_queues() == ()


def test_queues_of_other_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, TargetKind.CUDA)
    assert check_queues(["build.cuda", "", "build.cuda"]) == ("build.cuda",)
    for names in (["build.cuda", "build.hip"], ["*"], ["local.other"], [], ["x" * 500]):
        with pytest.raises(ArgumentError) as refused:
            check_queues(names)
        assert refused.value.code == "unknown-queue"
        assert "build.cuda" in str(refused.value.hint)
        assert len(refused.value.message) < 200
    have(monkeypatch)
    with pytest.raises(ArgumentError) as refused:
        check_queues([])
    assert "install" in str(refused.value.hint)


def test_a_worker_says_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "list_devices", lambda: (CudaDevice("NVIDIA H200", (9, 0)),))
    first, second = (describe_worker(("build.cuda",), 3) for _ in range(2))
    assert first.id != second.id
    assert (first.queues, first.generator) == (("build.cuda",), environment_digest())
    facts = json.loads(json.dumps(first.facts))
    assert (facts["jobs"], facts["devices"]) == (3, [{"name": "NVIDIA H200", "arch": "sm_90"}])
    assert {"host", "pid", "version", "cpu", "compilers"} <= facts.keys()


def test_another_compiler_or_library_is_another_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    digest: Any = environment_digest.__wrapped__
    before = digest()
    assert before == digest() == environment_digest()
    monkeypatch.setattr(environment, "toolchain_versions", lambda: {"cc": "gcc 99"})
    after = digest()
    monkeypatch.setattr(environment, "reader_versions", lambda: {"onnx": "99"})
    with_reader = digest()
    monkeypatch.setattr(environment, "describe_python_ops", lambda: [["f", [], [], [], []]])
    assert len({before, after, with_reader, digest()}) == 4


class Driver:
    """A CUDA driver with one device that works, one that does not."""

    def cuInit(self, _: int) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, handle: Any, ordinal: int) -> int:
        handle._obj.value = ordinal
        return ordinal

    def cuDeviceGetName(self, name: Any, _: int, __: object) -> int:
        name.value = b"NVIDIA H100"
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, _: object) -> int:
        value._obj.value = {75: 9, 76: 0}[attribute]
        return 0


def test_devices_are_listed_without_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver())
    assert list_devices() == (CudaDevice("NVIDIA H100", (9, 0)),)
    monkeypatch.setattr(module, "device_count", lambda: 0)
    assert list_devices() == ()
