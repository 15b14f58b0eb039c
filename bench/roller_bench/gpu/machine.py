"""Describe device, driver, packages and commit of a run, or what is missing for it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from typing import Any

from roller_bench import CHECKOUT
from roller_svc import calibration
from roller_svc.errors import LaunchError
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.runtime.cuda.arrays import import_cupy
from roller_svc.runtime.cuda.module import device_present

Json = dict[str, Any]
PACKAGES = ("numpy", "ml_dtypes", "cupy-cuda13x", "torch", "triton", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime",
            "nvidia-cublas", "nvidia-cudnn-cu13")  # fmt: skip
_CLOCKS = "clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu,ecc.mode.current"


def missing_requirement() -> str | None:
    """Return why nothing can run on a device here, or None."""
    if not device_present():
        return "no NVIDIA device (no driver, or a driver without a device); --dry needs none"
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed: pip install cupy-cuda13x; --dry needs none"
    return None


def describe_host() -> Json:
    """Return date, commit, Python, processor and packages."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _command_output("git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=12"),
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def device(_: object) -> Json:
    """Describe the first device. Meant to run in its own process, for it opens the device.

    Raises LaunchError if the device cannot be opened.
    """
    cupy = import_cupy()
    runtime = cupy.cuda.runtime
    try:
        found = runtime.getDeviceProperties(0)
        versions = {"driver_cuda": runtime.driverGetVersion(), "runtime_cuda": runtime.runtimeGetVersion()}
        cupy.cuda.Device(0).synchronize()
    except runtime.CUDARuntimeError as error:
        raise LaunchError(f"the device cannot be opened: {error}", code="no-device") from error
    return {
        "name": found["name"].decode(),
        "capability": [found["major"], found["minor"]],
        "bus_id": runtime.deviceGetPCIBusId(0),
        "cores": found["multiProcessorCount"],
        "memory_bytes": found["totalGlobalMem"],
        "l2_bytes": found["l2CacheSize"],
        "shared_bytes_opt_in": found["sharedMemPerBlockOptin"],
        **versions,
        "driver": _query_nvidia_smi("driver_version"),
        "clocks": clocks(),
    }


def clocks() -> Json:
    """Return clocks, power and temperature from nvidia-smi; empty if it fails."""
    values = (_query_nvidia_smi(_CLOCKS) or "").split(", ")
    names = _CLOCKS.split(",")
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else {}


def target_of(found: Json) -> HardwareSpec | None:
    """Return the shipped spec of a device, by its name and compute capability."""
    major, minor = found["capability"]
    return calibration.find_shipped_spec(found["name"], (major, minor))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _query_nvidia_smi(fields: str) -> str | None:
    return _command_output("nvidia-smi", "--id=0", f"--query-gpu={fields}", "--format=csv,noheader")


def _command_output(*command: str) -> str | None:
    """Return the output of a command; None if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
