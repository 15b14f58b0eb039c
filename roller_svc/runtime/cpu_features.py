"""A kernel's instructions beside those of the CPU at hand: one that lacks some would end the process (SIGILL)."""

from __future__ import annotations

import platform
from collections.abc import Collection
from functools import cache
from pathlib import Path

from roller_svc.errors import LaunchError
from roller_svc.ir.hardware import Arch
from roller_svc.ir.kernel import KernelSource

CPUINFO = Path("/proc/cpuinfo")
# What each level adds to the one before that kernels use, by the names of /proc/cpuinfo (x86-64 psABI,
# "Micro-architecture levels"; a virtual machine may hide others that are there).
_LEVEL_FEATURES = {
    2: ("sse4_2",),
    3: ("avx2", "bmi1", "bmi2", "f16c", "fma"),
    4: ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
}
# What generated texts have beyond their level, by the compiler's option.
_OPTION_FEATURES = {"-mavx512vnni": "avx512_vnni", "-mavx512bf16": "avx512_bf16"}


def check_features(source: KernelSource) -> None:
    """Raises LaunchError for a kernel that this CPU cannot run."""
    if missing := missing_features(source.arch, source.options):
        raise LaunchError(
            f"{source.name} is compiled for {source.arch} with instructions that this CPU lacks "
            f"({', '.join(missing)}): compile it for target 'local' here, or for one with fewer",
            code="wrong-device",
        )


def missing_features(arch: Arch, options: Collection[str] = ()) -> tuple[str, ...]:
    """What code for that architecture, with those options of the compiler, needs and this CPU has not: nothing where
    the system does not list what it has."""
    available = _flags(CPUINFO)
    if arch.prefix != "x86-64-v" or platform.machine() != "x86_64" or not available:
        return ()
    needed = [name for level, names in _LEVEL_FEATURES.items() if level <= arch.number for name in names]
    needed += [name for option, name in _OPTION_FEATURES.items() if option in options]
    return tuple(name for name in needed if name not in available)


@cache
def _flags(cpuinfo: Path) -> frozenset[str]:
    """Of the first processor; empty where the file or the line is not there."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))
