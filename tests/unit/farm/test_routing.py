"""Which queue a request goes to."""

from __future__ import annotations

from typing import Any

import pytest

from roller_svc import hardware
from roller_svc.compiler.request import build_request
from roller_svc.farm.models import ModelRequest
from roller_svc.farm.queue import MACHINE_PREFIX
from roller_svc.farm.routing import machine_queue, queue_of
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
