"""HIP text → code object, through hipcc in a confined subprocess."""

from __future__ import annotations

import functools
import shutil
import tempfile
import time
from pathlib import Path

from roller_svc.errors import CompileError, KernelTimeoutError, ToolchainMissingError
from roller_svc.ir.hardware import Arch
from roller_svc.ir.kernel import CompiledKernel, KernelSource, Resources
from roller_svc.toolchain.binaries.code_object import read_code_object
from roller_svc.toolchain.confined import compile_confined, run_confined
from roller_svc.toolchain.limits import DEFAULT_LIMITS, CompileLimits
from roller_svc.toolchain.source_check import check_source

COMMAND = "hipcc"
INSTALL = "apt install hipcc libamdhip64-dev rocm-device-libs"
NEWER = "a hipcc that knows it (for gfx942 that of ROCm 6)"
NEWEST_OF_DEBIAN = 0x940  # of the line that gfx906 and gfx90a are of
# The text is as hiprtc takes it: HIP's headers are there, those of the host's library, with their macros, are not.
# -fno-strict-aliasing: arrays of narrow types are moved in words. -Wno-pass-failed: a loop that is too long to unroll
# whole is no defect.
COMMON_FLAGS = (
    "--genco", "--no-gpu-bundle-output", "-std=c++17", "-O3", "-fno-strict-aliasing", "-Wno-pass-failed",
    "-D__HIPCC_RTC__", "-include", "hip/hip_runtime.h", "-include", "hip/amd_detail/amd_warp_functions.h",
)  # fmt: skip
# hipcc compiles for NVIDIA where it finds an nvcc, unless it is told otherwise.
ENVIRONMENT = {"HIP_PLATFORM": "amd"}
# Where packages of distributions and of AMD have the device libraries, beside the folder of hipcc.
_LIBRARY_FOLDERS = ("lib/*/amdgcn/bitcode", "lib/amdgcn/bitcode", "amdgcn/bitcode")


def compile_hip(source: KernelSource, limits: CompileLimits = DEFAULT_LIMITS) -> CompiledKernel:
    """The code object of a HIP kernel.

    Raises CompileError with the log, KernelTimeoutError, ToolchainMissingError.
    """
    check_source(source)
    flags = [*COMMON_FLAGS, f"--offload-arch={source.arch}", *source.options]
    command = [compiler_for(source.arch), *flags, "kernel.hip", "-o", "kernel.hsaco"]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="roller-hip-") as folder:
        (Path(folder) / "kernel.hip").write_text(source.text, encoding="utf-8")
        output = Path(folder) / "kernel.hsaco"
        log = compile_confined(f"{source.name}: the HIP compiler", command, output, limits, ENVIRONMENT)
        binary = output.read_bytes()
    seconds = time.perf_counter() - start
    return CompiledKernel(source, binary, log, _resources(source, binary, log), seconds)


def compiler_for(arch: Arch) -> str:
    """The hipcc that compiles for `arch`; raises ToolchainMissingError saying what would. Starts nothing."""
    path = shutil.which(COMMAND)
    if path is None:
        raise ToolchainMissingError(f"{arch} takes hipcc, which is not installed: {INSTALL}; estimates work without it")
    root = Path(path).resolve().parent.parent
    libraries = {file.name for folder in _LIBRARY_FOLDERS for file in root.glob(f"{folder}/*.bc")}
    if not libraries or not (root / "include/hip/hip_runtime.h").is_file():
        lacking = "HIP's device libraries" if not libraries else "HIP's headers"
        raise ToolchainMissingError(f"{arch}: {path} is there, but not {lacking}: {INSTALL}")
    if f"oclc_isa_version_{arch.number:x}.bc" not in libraries:
        raise ToolchainMissingError(
            f"{arch} is too new for the hipcc at {path}, whose device libraries do not have it: it takes {NEWER}; "
            "estimates work without it"
        )
    return path


def needed_for(arch: Arch) -> str:
    """What to install to compile for `arch`, where `compiler_for` finds nothing."""
    return NEWER if arch.number > NEWEST_OF_DEBIAN else INSTALL


@functools.cache
def compiler_version(path: str) -> str:
    """HIP's version and its compiler's: what tells two of them apart in a cache key."""
    with tempfile.TemporaryDirectory(prefix="roller-hip-") as folder:
        limits = CompileLimits(timeout_s=10.0)
        try:
            code, text = run_confined([path, "--version"], Path(folder), limits, environment=ENVIRONMENT)
        except KernelTimeoutError:  # what lists the versions of all compilers goes on
            return f"{path} --version does not end"
    lines = text.splitlines()
    return ", ".join(line.strip() for line in lines[:2]) if code == 0 else f"{path} --version fails"


def _resources(source: KernelSource, binary: bytes, log: str) -> tuple[Resources, ...]:
    """What each launch takes, dynamic shared memory included."""
    kernels = read_code_object(binary)
    found = []
    for launch in source.launches:
        if launch.name not in kernels:
            raise CompileError(f'{source.name}: the text has no extern "C" __global__ function {launch.name}', log=log)
        of = kernels[launch.name]
        found.append(Resources(of.registers_per_thread, of.shared_bytes + launch.shared_bytes, of.spill_bytes))
    return tuple(found)
