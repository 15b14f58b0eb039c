"""Paths and devices that a build worker may access. toolchain/sandbox.py enforces them."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

import roller_svc
from roller_svc.toolchain import gcc, hip, nvrtc
from roller_svc.toolchain import gcc as cxx
from roller_svc.toolchain.confined import SYSTEM_PATHS, readable_paths

_PROGRAMS = (*gcc.PROGRAMS, *cxx.PROGRAMS, hip.COMMAND)
# Descriptions of the machine. Of the processes in /proc a worker sees only itself.
_MACHINE = ("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/sys/vm", "/sys/devices", "/sys/fs/cgroup")
# Files that GPU drivers open (nvidia-modprobe, libcuda).
_DRIVERS = ("/proc/driver/nvidia", "/sys/module", "/sys/bus/pci", "/sys/class")
_DEVICES = "nvidia*"


def readable_by_builds(*more: Path) -> tuple[str, ...]:
    """Return the paths below which a build may read: system, interpreter, package, compilers, and `more`.

    The working directory and the directories of PYTHONPATH are excluded.
    """
    package = Path(roller_svc.__file__).parent
    python = (sys.prefix, sys.base_prefix, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
    compilers = (path for name in _PROGRAMS if (path := shutil.which(name)))
    paths = {
        *SYSTEM_PATHS, *_MACHINE, *_DRIVERS, *python, str(package), str(package.parent / "hwspecs"),
        *(folder for path in compilers for folder in readable_paths(path)),
        *(str(library.path.resolve().parent) for library in nvrtc.find_libraries()),
        *map(str, more),
    }  # fmt: skip
    return tuple(sorted(paths))


def gpu_devices() -> tuple[str, ...]:
    """Return the device files of NVIDIA GPUs, which a measuring worker opens for writing."""
    return tuple(sorted(map(str, Path("/dev").glob(_DEVICES))))
