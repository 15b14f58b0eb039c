"""Check that the host CPU has the features a kernel is compiled for; a missing one ends the process (SIGILL)."""

from __future__ import annotations

import platform
from collections.abc import Collection
from functools import cache
from pathlib import Path

from roller_svc.errors import LaunchError
from roller_svc.ir.hardware import Arch
from roller_svc.ir.kernel import KernelSource

CPUINFO = Path("/proc/cpuinfo")
# Features that kernels use, by the level that adds them and the names of /proc/cpuinfo (x86-64 psABI,
# "Micro-architecture levels"; a virtual machine may hide some of the host's features).
_LEVEL_FEATURES = {
    2: ("sse4_2",),
    3: ("avx2", "bmi1", "bmi2", "f16c", "fma"),
    4: ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
}
# Features beyond the level, by the compiler option that enables them.
_OPTION_FEATURES = {"-mavx512vnni": "avx512_vnni", "-mavxvnni": "avx_vnni", "-mavx512bf16": "avx512_bf16"}


def check_features(source: KernelSource) -> None:
    """Raise LaunchError for a kernel that this CPU cannot run."""
    if missing := missing_features(source.arch, source.options):
        raise LaunchError(
            f"{source.name} is compiled for {source.arch} with instructions that this CPU lacks "
            f"({', '.join(missing)}): compile it for target 'local', or for a target without them",
            code="wrong-device",
        )


def missing_features(arch: Arch, options: Collection[str] = ()) -> tuple[str, ...]:
    """Return the features that code for `arch` with these compiler options needs and this CPU lacks.

    Empty if the system does not list the CPU's features.
    """
    available = _flags(CPUINFO)
    if arch.prefix != "x86-64-v" or platform.machine() != "x86_64" or not available:
        return ()
    needed = [name for level, names in _LEVEL_FEATURES.items() if level <= arch.number for name in names]
    needed += [name for option, name in _OPTION_FEATURES.items() if option in options]
    return tuple(name for name in needed if name not in available)


@cache
def _flags(cpuinfo: Path) -> frozenset[str]:
    """Return the feature flags of the first processor; empty if the file or the line is missing."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))
