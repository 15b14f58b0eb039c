"""Files that launch a saved kernel or model without this project, by the name of what the caller has."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from roller_svc.errors import ArgumentError
from roller_svc.ir.hardware import TargetKind
from roller_svc.ir.kernel import CompiledKernel, Language
from roller_svc.ir.options import HOST_LAUNCHERS, LAUNCHERS
from roller_svc.runtime.saved import launch
from roller_svc.runtime.saved.cpp_launcher import cpp_launcher


def launcher_files(compiled: CompiledKernel, names: Iterable[str]) -> dict[str, bytes]:
    """Return the files of launchers by name. A kernel in C has its header for C++ anyway.

    Raises ArgumentError for unknown launchers, for CuPy and a CPU, and for a cooperative launch.
    """
    names = tuple(names)
    if names and any(launch.cooperative for launch in compiled.source.launches):
        message = f"{compiled.source.name} has a cooperative launch, which launchers do not make"
        raise ArgumentError(message, code="unknown-launcher", hint="roller_svc.load_model runs the model that it is of")
    if compiled.source.language is Language.C:
        return host_launcher_files(names)
    files: dict[str, bytes] = {}
    for name in names:
        _check(name)
        if name == "cpp":
            files["launch.hpp"] = cpp_launcher(compiled).encode()
        else:
            files |= _python_launcher()
    return files


def host_launcher_files(names: Iterable[str]) -> dict[str, bytes]:
    """Return the files of launchers for a CPU, where C++ has a header anyway. Raises ArgumentError as launcher_files."""
    files: dict[str, bytes] = {}
    for name in names:
        _check(name)
        if name not in HOST_LAUNCHERS:
            message = "CuPy has arrays of GPUs, and this is for a CPU"
            raise ArgumentError(message, code="unknown-launcher", hint="the launcher ctypes takes numpy's arrays")
        if name != "cpp":
            files |= _python_launcher()
    return files


def check_model_launchers(names: Iterable[str], target: str, family: TargetKind) -> None:
    """Raise ArgumentError (unknown-launcher) for launchers that a GPU's model cannot have."""
    is_cuda = family is TargetKind.CUDA
    for name in names:
        _check(name)
        if name != "cpp" or not is_cuda:
            devices = "NVIDIA devices have the launcher cpp alone" if is_cuda else "AMD devices have none"
            raise ArgumentError(
                f"models for {devices}, and {target} is one of these: got {name!r}",
                code="unknown-launcher",
                hint="roller_svc.load_model runs the saved model; each of its kernels can be saved with a launcher",
            )


def _python_launcher() -> dict[str, bytes]:
    return {"launch.py": Path(launch.__file__).read_bytes()}


def _check(name: str) -> None:
    if name not in LAUNCHERS:
        message = f"unknown launcher {name[:40]!r}; expected one of {', '.join(LAUNCHERS)}"
        raise ArgumentError(message, code="unknown-launcher")
