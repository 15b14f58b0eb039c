"""Which queue a request goes to."""

from __future__ import annotations

from typing import Any

import pytest

from roller_svc import hardware
from roller_svc.compiler.request import build_request
from roller_svc.farm.models import ModelRequest
from roller_svc.farm.queue import MACHINE_PREFIX
from roller_svc.farm.registry import Worker
from roller_svc.farm.routing import can_measure, machine_queue, measured_on, queue_of
from roller_svc.ir.report import BuildRequest

CUDA = "nvidia-h200-sxm"


def request(**options: Any) -> BuildRequest:
    return build_request("y[i] = x[i]", {"x": ("float32", (4,))}, **options)


@pytest.mark.parametrize(
    ("options", "queue"),
    [
        ({"target": CUDA, "select": "model"}, "build.cuda"),
        ({"target": CUDA, "select": "measure"}, "measure.sm_90a"),
        ({"target": CUDA, "select": "measure", "runtime": "emulator"}, "build.cuda"),
        ({"target": "amd-mi50", "select": "model"}, "build.hip"),
        ({"target": "cpu-x86-avx2", "select": "model"}, "build.cpu.x86-64-v3"),
        ({"target": "cpu-x86-avx2", "select": "measure"}, "build.cpu.x86-64-v3"),
        ({"target": "cpu-x86-avx512", "select": "measure"}, "build.cpu.x86-64-v4"),
    ],
)
def test_queues_by_device_and_selection(options: dict[str, Any], queue: str) -> None:
    assert queue_of(request(**options)) == queue


def test_local_belongs_to_one_machine() -> None:
    assert queue_of(request(target="local")) == machine_queue()
    assert machine_queue().startswith(MACHINE_PREFIX)


def test_a_spec_counts_and_not_its_name() -> None:
    spec = hardware.to_mapping(hardware.load(CUDA)) | {"id": "local"}
    assert queue_of(request(hardware=spec, select="model")) == "build.cuda"


def test_models_go_where_their_cpu_is() -> None:
    model = ModelRequest("0" * 64, "onnx", "cpu-x86-avx2", {"select": "model"})
    assert queue_of(model) == "build.cpu.x86-64-v3"


@pytest.mark.parametrize(
    ("options", "device"),
    [
        ({"target": CUDA, "select": "model"}, None),
        ({"target": CUDA, "select": "measure"}, "gpu"),
        ({"target": CUDA, "select": "measure", "runtime": "emulator"}, None),
        ({"target": "cpu-x86-avx2", "select": "measure"}, "cpu"),
        ({"target": "cpu-x86-avx2", "select": "model"}, None),
        ({"target": "local", "select": "measure"}, "cpu"),
    ],
)
def test_devices_that_builds_measure_on(options: dict[str, Any], device: str | None) -> None:
    assert measured_on(request(**options)) == device


def test_models_measure_on_the_cpu_if_they_select_so() -> None:
    assert measured_on(ModelRequest("0" * 64, "onnx", "cpu-x86-avx2", {"select": "measure"})) == "cpu"
    assert measured_on(ModelRequest("0" * 64, "onnx", "cpu-x86-avx2", {"select": "model"})) is None


def test_an_arm_cpu_has_a_level() -> None:
    assert queue_of(request(target="cpu-arm-neon", select="model")) == "build.cpu.armv8"


@pytest.mark.parametrize(
    ("queues", "level", "queue", "can"),
    [
        (("*",), "x86-64-v3", "build.cpu.x86-64-v3", True),
        (("*",), "x86-64-v4", "build.cpu.x86-64-v3", True),
        (("*",), "x86-64-v3", "build.cpu.x86-64-v4", False),
        (("*",), "x86-64-v4", "build.cpu.armv8", False),
        (("*",), "armv8", "build.cpu.armv8", True),
        (("*",), None, "build.cpu.x86-64-v3", False),
        (("build.cpu.armv8",), "armv8", "build.cpu.armv8", True),
        (("*",), "x86-64-v4", "measure.sm_90a", False),
    ],
)
def test_a_worker_of_every_queue_measures_on_its_own_cpu(queues: tuple[str, ...], level: str | None, queue: str, can: bool) -> None:
    worker = Worker("w", queues, "g", {"cpu": None if level is None else {"name": "CPU", "level": level}})
    assert can_measure(worker, queue) is can
