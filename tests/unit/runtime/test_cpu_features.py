"""Kernels with instructions that the CPU lacks are rejected, because running one would end the process."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path

import pytest
from reference_kernels import add

from roller_svc import hardware
from roller_svc.compiler import backends
from roller_svc.compiler.backends import backend_for
from roller_svc.errors import LaunchError
from roller_svc.ir.hardware import Arch
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.runtime import cpu_features
from roller_svc.runtime.cpu import CpuModule
from roller_svc.toolchain import Availability, availability

HASWELL = "sse4_2 avx avx2 bmi1 bmi2 f16c fma"
AVX512 = "avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.fixture
def haswell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\nflags\t\t: fpu {HASWELL} ht\n\nprocessor : 1\n", encoding="utf-8")
    monkeypatch.setattr(cpu_features, "CPUINFO", cpuinfo)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.mark.usefixtures("haswell")
@pytest.mark.parametrize(("level", "lacking"), [(1, ()), (2, ()), (3, ()), (4, tuple(AVX512.split()))])
def test_each_level_needs_what_those_before_do(level: int, lacking: tuple[str, ...]) -> None:
    assert cpu_features.missing_features(Arch("x86-64-v", level)) == lacking


@pytest.mark.usefixtures("haswell")
def test_a_kernel_with_other_instructions_is_not_loaded() -> None:
    wide = dataclasses.replace(add(), arch=Arch("x86-64-v", 4), options=("-mavx512vnni",))
    with pytest.raises(LaunchError, match=r"avx512vl, avx512_vnni\): compile it for target 'local'") as refused:
        CpuModule(CompiledKernel(wide, b"never loaded", "", ()))
    assert refused.value.code == "wrong-device"


@pytest.mark.usefixtures("haswell")
def test_candidates_for_a_wider_cpu_are_not_measured_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "availability", lambda _: Availability(ok=True, reason="a compiler"))
    assert not backend_for(hardware.load("cpu-x86-avx512")).is_present(hardware.load("cpu-x86-avx512"))
    assert backend_for(hardware.load("cpu-x86-avx2")).is_present(hardware.load("cpu-x86-avx2"))


@pytest.mark.usefixtures("haswell")
def test_no_id_makes_a_spec_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spec with id `local` is not trusted: the kernel's features decide."""
    monkeypatch.setattr(backends, "availability", lambda _: Availability(ok=True, reason="a compiler"))
    here = hardware.load("cpu-x86-avx2")
    present = backend_for(here).is_present
    for name in ("local", "cpu-x86-avx2", "my-cpu"):
        assert present(dataclasses.replace(here, id=name))
        assert present(dataclasses.replace(here, id=name, num_cores=1, clock_hz=1e9))
        assert not present(dataclasses.replace(hardware.load("cpu-x86-avx512"), id=name))
        assert not present(dataclasses.replace(hardware.load("cpu-arm-neon"), id=name))
        assert not present(dataclasses.replace(here, id=name, isa=(*here.isa, "avx512vnni")))


def test_the_spec_of_this_machine_is_present_when_it_comes_back() -> None:
    here = hardware.load("local")
    again = hardware.from_mapping(hardware.to_mapping(here) | {"num_cores": 1})
    assert backend_for(again).is_present(again) == backend_for(here).is_present(here) == availability(here).ok


def test_a_system_without_cpu_flags_rejects_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_features, "CPUINFO", tmp_path / "none")
    assert cpu_features.missing_features(Arch("x86-64-v", 4)) == ()
    assert cpu_features.missing_features(Arch("armv", 8)) == ()
