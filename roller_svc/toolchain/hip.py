"""Compile HIP to code objects, through hipcc in a sandboxed subprocess."""

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
from roller_svc.toolchain.confined import compile_sandboxed, run_sandboxed
from roller_svc.toolchain.limits import DEFAULT_LIMITS, CompileLimits
from roller_svc.toolchain.source_check import check_source

COMMAND = "hipcc"
INSTALL = "apt install hipcc libamdhip64-dev rocm-device-libs"
NEWER = "a hipcc that knows it (for gfx942 that of ROCm 6)"
NEWEST_DEBIAN_ARCH = 0x940  # of the line of gfx906 and gfx90a
# The source is for hiprtc: HIP's headers are available, those of the host's library with their macros are not.
# -fno-strict-aliasing: arrays of narrow types are copied in words. -Wno-pass-failed: a loop too long to unroll fully is
# not a defect.
COMMON_FLAGS = (
    "--genco", "--no-gpu-bundle-output", "-std=c++17", "-O3", "-fno-strict-aliasing", "-Wno-pass-failed",
    "-D__HIPCC_RTC__", "-include", "hip/hip_runtime.h", "-include", "hip/amd_detail/amd_warp_functions.h",
)  # fmt: skip
# Without this, hipcc compiles for NVIDIA if it finds nvcc.
ENVIRONMENT = {"HIP_PLATFORM": "amd"}
# Device libraries in packages of distributions and of AMD, relative to the prefix of hipcc.
_LIBRARY_DIRECTORIES = ("lib/*/amdgcn/bitcode", "lib/amdgcn/bitcode", "amdgcn/bitcode")


def compile_hip(source: KernelSource, limits: CompileLimits = DEFAULT_LIMITS) -> CompiledKernel:
    """Compile a HIP kernel to a code object.

    Raises CompileError with the log, KernelTimeoutError, ToolchainMissingError.
    """
    check_source(source)
    flags = [*COMMON_FLAGS, f"--offload-arch={source.arch}", *source.options]
    command = [compiler_for(source.arch), *flags, "kernel.hip", "-o", "kernel.hsaco"]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="roller-hip-") as directory:
        (Path(directory) / "kernel.hip").write_text(source.text, encoding="utf-8")
        output = Path(directory) / "kernel.hsaco"
        log = compile_sandboxed(f"{source.name}: the HIP compiler", command, output, limits, ENVIRONMENT)
        binary = output.read_bytes()
    seconds = time.perf_counter() - start
    return CompiledKernel(source, binary, log, _resources(source, binary, log), seconds)


def compiler_for(arch: Arch) -> str:
    """Return the hipcc for `arch`. Raises ToolchainMissingError naming what is needed. Starts no process."""
    path = shutil.which(COMMAND)
    if path is None:
        raise ToolchainMissingError(f"{arch} needs hipcc, which is not installed: {INSTALL}; estimates work without it")
    root = Path(path).resolve().parent.parent
    libraries = {file.name for directory in _LIBRARY_DIRECTORIES for file in root.glob(f"{directory}/*.bc")}
    if not libraries or not (root / "include/hip/hip_runtime.h").is_file():
        missing = "HIP's device libraries" if not libraries else "HIP's headers"
        raise ToolchainMissingError(f"{arch}: {path} is installed without {missing}: {INSTALL}")
    if f"oclc_isa_version_{arch.number:x}.bc" not in libraries:
        raise ToolchainMissingError(
            f"{arch} is too new for the hipcc at {path}, whose device libraries lack it: install {NEWER}; estimates work without it"
        )
    return path


def install_hint(arch: Arch) -> str:
    """Return what to install to compile for `arch`, if `compiler_for` finds nothing."""
    return NEWER if arch.number > NEWEST_DEBIAN_ARCH else INSTALL


@functools.cache
def compiler_version(path: str) -> str:
    """Return the versions of HIP and its compiler, which identify them in a cache key."""
    with tempfile.TemporaryDirectory(prefix="roller-hip-") as directory:
        limits = CompileLimits(timeout_s=10.0)
        try:
            code, text = run_sandboxed([path, "--version"], Path(directory), limits, environment=ENVIRONMENT)
        except KernelTimeoutError:  # the list of all versions must not fail
            return f"{path} --version does not end"
    # Without a device hipcc also prints the traceback of a script that lists devices.
    versions = [line.strip() for line in text.splitlines() if " version" in line]
    return ", ".join(versions) if code == 0 and versions else f"{path} --version fails"


def _resources(source: KernelSource, binary: bytes, log: str) -> tuple[Resources, ...]:
    """Return the resources of each launch, dynamic shared memory included."""
    kernels = read_code_object(binary)
    resources = []
    for launch in source.launches:
        if launch.name not in kernels:
            raise CompileError(f'{source.name}: the source has no extern "C" __global__ function {launch.name}', log=log)
        usage = kernels[launch.name]
        resources.append(Resources(usage.registers_per_thread, usage.shared_bytes + launch.shared_bytes, usage.spill_bytes))
    return tuple(resources)
