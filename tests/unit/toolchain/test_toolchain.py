"""Availability of compilers for devices."""

from __future__ import annotations

import pytest
from reference_kernels import HOST

from roller_svc import toolchain
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch, ComputeUnit, HardwareSpec, Limits, MemoryLevel, Scope, TargetKind, UnitKind
from roller_svc.toolchain import gcc, nvrtc


def spec(family: TargetKind, arch: Arch) -> HardwareSpec:
    levels = (MemoryLevel("dram", Scope.DEVICE, 1 << 30, 1e9, 1e-6, 64), MemoryLevel("l1", Scope.CORE, 1, 1e9, 1e-9, 4))
    unit = ComputeUnit("fma", UnitKind.FMA, (1,), DType.FLOAT32, DType.FLOAT32, 1e9)
    limits = Limits(32, 1024, 2048, 16, 65536, 255, 49152, 65536, 1e-6)
    return HardwareSpec("x", "x", "x", family, arch, 1, 1e9, levels, (unit,), limits, ("dram", "l1"))


def test_this_processor_and_todays_gpus_can_be_compiled_for() -> None:
    for family, arch in (
        (TargetKind.CPU, HOST),
        (TargetKind.CUDA, Arch("sm_", 80)),
        (TargetKind.CUDA, Arch("sm_", 90, "a")),
    ):
        found = toolchain.availability(spec(family, arch))
        assert found.ok
        assert found.reason
        assert found.install == ""


@pytest.mark.parametrize(
    ("family", "arch", "install"),
    [
        (TargetKind.CUDA, Arch("sm_", 37), "CUDA toolkit 11"),
        (TargetKind.CUDA, Arch("sm_", 70), "nvidia-cuda-nvrtc-cu12"),
        (TargetKind.CUDA, Arch("sm_", 90, "a"), "roller-svc[cuda]"),
        (TargetKind.CPU, HOST, "apt install gcc"),
        (TargetKind.AMD, Arch("gfx", 0x906), "apt install hipcc"),
        (TargetKind.IPU, Arch("ipu", 2), "Poplar"),
    ],
)
def test_missing_tools_are_named(family: TargetKind, arch: Arch, install: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "find_libraries", lambda: ())
    monkeypatch.setattr(gcc.shutil, "which", lambda _: None)
    found = toolchain.availability(spec(family, arch))
    assert not found.ok
    assert install in found.install
    assert found.reason
