"""What a worker that builds kernels, and measures them, may read and use. See toolchain/sandbox.py."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

import roller_svc
from roller_svc.toolchain import gcc, hip, nvrtc
from roller_svc.toolchain import gcc as cxx
from roller_svc.toolchain.confined import SYSTEM_FOLDERS, readable_for

_PROGRAMS = (*gcc.PROGRAMS, *cxx.PROGRAMS, hip.COMMAND)
# The machine's description. Of /proc a worker sees itself alone besides.
_MACHINE = ("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/sys/vm", "/sys/devices", "/sys/fs/cgroup")
# What the drivers of GPUs open (nvidia-modprobe, libcuda).
_DRIVERS = ("/proc/driver/nvidia", "/sys/module", "/sys/bus/pci", "/sys/class")
_DEVICES = "nvidia*"


def readable_by_builds(*more: Path) -> tuple[str, ...]:
    """Paths beneath which a build reads: the system's, the interpreter's, the package's, the compilers', and `more`.

    The working directory and the folders of PYTHONPATH are none of them.
    """
    package = Path(roller_svc.__file__).parent
    python = (sys.prefix, sys.base_prefix, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
    compilers = (path for name in _PROGRAMS if (path := shutil.which(name)))
    paths = {
        *SYSTEM_FOLDERS, *_MACHINE, *_DRIVERS, *python, str(package), str(package.parent / "hwspecs"),
        *(folder for path in compilers for folder in readable_for(path)),
        *(str(library.path.resolve().parent) for library in nvrtc.find_libraries()),
        *map(str, more),
    }  # fmt: skip
    return tuple(sorted(paths))


def gpu_devices() -> tuple[str, ...]:
    """Device files of NVIDIA's GPUs, which a worker that measures opens for writing."""
    return tuple(sorted(map(str, Path("/dev").glob(_DEVICES))))
