"""Compile kernel source of every language, and report which devices the installed compilers support."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass
from typing import assert_never

from roller_svc.errors import ToolchainMissingError
from roller_svc.ir.hardware import Arch, HardwareSpec, TargetKind
from roller_svc.ir.kernel import CompiledKernel, KernelSource, Language
from roller_svc.toolchain import gcc, hip, nvrtc
from roller_svc.toolchain.binaries.sass import disassembler_version, sass_text
from roller_svc.toolchain.gcc import compile_cxx, prepare_model
from roller_svc.toolchain.link import (
    compile_combined,
    compile_object,
    compile_unlinked,
    link_kernel,
    link_model,
    link_single,
    object_command,
)
from roller_svc.toolchain.listings import Links, assembly, link_ptx, link_sass

__all__ = [
    "Availability", "CompileLimits", "Links", "assembly", "availability", "compile_combined", "compile_cxx", "compile_object",
    "compile_source", "compile_unlinked", "disassembler_version", "link_kernel", "link_model", "link_ptx", "link_sass",
    "link_single", "object_command", "prepare_model", "ptx", "sass_text", "tool_version", "versions",
]  # fmt: skip

ptx = nvrtc.ptx

_IPU_NEEDS = "the Poplar SDK (popc) from Graphcore, and a generator for it, which this version does not have"


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether kernels for a device can be compiled here."""

    ok: bool
    reason: str  # the compiler, or why there is none
    install: str = ""


def compile_source(source: KernelSource) -> CompiledKernel:
    """Compile a kernel.

    Raises CompileError with the log, KernelTimeoutError, ToolchainMissingError naming what is missing.
    """
    match source.language:
        case Language.C:
            return gcc.compile_c(source)
        case Language.CUDA:
            return nvrtc.compile_cuda(source)
        case Language.HIP:
            return hip.compile_hip(source)
        case _ as never:
            assert_never(never)


def availability(spec: HardwareSpec) -> Availability:
    """Whether kernels for the device can be compiled here. Starts no compiler and opens no device."""
    match spec.family:
        case TargetKind.CPU:
            return _c_availability(spec.arch)
        case TargetKind.CUDA:
            return _cuda_availability(spec.arch)
        case TargetKind.AMD:
            return _hip_availability(spec.arch)
        case TargetKind.IPU:
            return Availability(ok=False, reason=f"{spec.arch} needs {_IPU_NEEDS}", install="the Poplar SDK, from Graphcore")
        case _ as never:
            assert_never(never)


def tool_version(language: Language, arch: Arch) -> str:
    """Return the compiler of a language for `arch` with its version, a part of a binary's cache key."""
    match language:
        case Language.C:
            command = tuple(gcc.compiler_for(arch))
            return f"{shlex.join(command)}: {gcc.compiler_version(command)}"
        case Language.CUDA:
            return f"nvrtc {nvrtc.library_for(arch).version}"
        case Language.HIP:
            return hip.compiler_version(hip.compiler_for(arch))
        case _ as never:
            assert_never(never)


def versions(family: TargetKind | None = None, *, cc: str | None = None) -> dict[str, str]:
    """Return the version of every installed compiler for this machine and for GPUs.

    `as` and `ld` are the assembler and the linker that the C compiler runs. With `family`, hipcc is listed only for
    AMD.
    """
    tools = {f"nvrtc-{library.major}": library.version for library in nvrtc.find_libraries()}
    try:
        command = tuple(gcc.native_compiler(cc))
        tools["cc"] = gcc.compiler_version(command)
        tools |= dict(gcc.binutils_versions(command))
    except ToolchainMissingError:
        pass  # not installed
    if family in (None, TargetKind.AMD) and (path := shutil.which(hip.COMMAND)):
        tools["hipcc"] = hip.compiler_version(path)
    return tools


def _c_availability(arch: Arch) -> Availability:
    try:
        command = gcc.compiler_for(arch)
    except ToolchainMissingError as missing:
        return Availability(ok=False, reason=missing.message, install=gcc.install_hint(arch))
    return Availability(ok=True, reason=shlex.join(command))


def _cuda_availability(arch: Arch) -> Availability:
    try:
        library = nvrtc.library_for(arch)
    except ToolchainMissingError as missing:
        return Availability(ok=False, reason=missing.message, install=nvrtc.install_hint(arch))
    return Availability(ok=True, reason=f"NVRTC {library.version}")


def _hip_availability(arch: Arch) -> Availability:
    try:
        path = hip.compiler_for(arch)
    except ToolchainMissingError as missing:
        return Availability(ok=False, reason=missing.message, install=hip.install_hint(arch))
    return Availability(ok=True, reason=path)
