"""Compile CUDA to cubin or PTX through NVRTC, with the resources that ptxas reports."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

from roller_svc.errors import CompileError, ToolchainMissingError
from roller_svc.ir.hardware import Arch
from roller_svc.ir.kernel import CompiledKernel, KernelSource, Resources
from roller_svc.toolchain.limits import DEFAULT_LIMITS, CompileLimits, truncate_log
from roller_svc.toolchain.nvrtc.pool import Response, WorkerPool, pool_for
from roller_svc.toolchain.source_check import check_source
from roller_svc.toolchain.supervisor import supervised

INSTALL_HINT = "pip install 'roller-svc[cuda]'"
_SYSTEM_DIRECTORIES = (
    "/usr/local/cuda/lib64", "/usr/local/cuda/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu",
)  # fmt: skip
_LIBRARY_NAME = re.compile(r"libnvrtc\.so\.(\d+)(?:\.\d+)*")
_OLDEST_MAJOR = 11  # the first with cubins and C++17
_WHEELS = {13: "nvidia-cuda-nvrtc", 12: "nvidia-cuda-nvrtc-cu12", 11: "nvidia-cuda-nvrtc-cu11"}
# Minimum and maximum compute capability of each major version (CUDA release notes 11.8, 12.9, 13.0).
_ARCH_RANGES = {11: (35, 90), 12: (50, 121), 13: (75, 121)}
_OLD_ARCH_LIBRARIES = (
    (50, "NVRTC 11 (CUDA toolkit 11.x, libnvrtc.so.11.2)"),
    (75, "NVRTC 12 (pip install nvidia-cuda-nvrtc-cu12==12.9.86)"),
)


@dataclass(frozen=True, slots=True)
class NvrtcLibrary:
    path: Path
    major: int

    def may_support(self, arch: Arch) -> bool:
        """Whether the major version supports `arch`. The library itself decides when it compiles."""
        lowest, highest = _ARCH_RANGES.get(self.major, (_ARCH_RANGES[max(_ARCH_RANGES)][0], 10**6))
        return lowest <= arch.number <= highest

    @property
    def version(self) -> str:
        """The wheel's version, or name and size of the library. Loads nothing."""
        try:
            if "site-packages" in self.path.parts:
                return importlib.metadata.version(_WHEELS[self.major])
        except (KeyError, importlib.metadata.PackageNotFoundError):
            pass
        return f"{self.path.resolve().name}, {self.path.stat().st_size} bytes"


def compile_cuda(source: KernelSource, limits: CompileLimits = DEFAULT_LIMITS) -> CompiledKernel:
    """Compile a CUDA kernel to one cubin for all launches, with the resources of each.

    Raises CompileError with the log, KernelTimeoutError, ToolchainMissingError.
    """
    start = time.perf_counter()
    options = ["--std=c++17", f"-arch={source.arch}", "--ptxas-options=-v", *source.options]
    response = _request(source, options, "cubin", limits)
    entries = parse_ptxas_log(response.log)
    resources = []
    for launch in source.launches:
        entry = entries.get(launch.name)
        if entry is None:
            raise CompileError(f'{source.name}: the source has no extern "C" __global__ function {launch.name}', log=response.log)
        shared_bytes = entry.shared_bytes + launch.shared_bytes
        resources.append(Resources(entry.registers_per_thread, shared_bytes, entry.spill_bytes))
    return CompiledKernel(source, response.data, truncate_log(response.log), tuple(resources), time.perf_counter() - start)


def ptx(source: KernelSource, limits: CompileLimits = DEFAULT_LIMITS) -> str:
    """Return the PTX of a CUDA kernel, for reading."""
    options = ["--std=c++17", f"-arch=compute_{source.arch.number}{source.arch.suffix}", *source.options]
    return _request(source, options, "ptx", limits).data.rstrip(b"\0").decode()


def library_for(arch: Arch) -> NvrtcLibrary:
    """Return the newest installed NVRTC that supports `arch`. Raises ToolchainMissingError naming what is needed."""
    libraries = find_libraries()
    for library in libraries:
        if library.may_support(arch):
            return library
    if not libraries:
        raise ToolchainMissingError(f"NVRTC is not installed: {install_hint(arch)}; estimates work without it")
    installed = ", ".join(f"NVRTC {library.major}" for library in libraries)
    raise ToolchainMissingError(
        f"{arch} cannot be compiled here: {installed} does not support it; needed: {install_hint(arch)}; estimates work without it"
    )


def install_hint(arch: Arch) -> str:
    """Return what to install to compile for `arch`."""
    for below, need in _OLD_ARCH_LIBRARIES:
        if arch.number < below:
            return need
    return INSTALL_HINT


@functools.cache
def find_libraries() -> tuple[NvrtcLibrary, ...]:
    """Return installed NVRTCs, one for each major version, newest first: wheels before the system's."""
    directories = [lib for root in wheel_roots() for lib in sorted(root.glob("*/lib"))]
    return find_libraries_in((*directories, *(Path(directory) for directory in _SYSTEM_DIRECTORIES)))


def find_libraries_in(directories: tuple[Path, ...]) -> tuple[NvrtcLibrary, ...]:
    """Return the NVRTCs in those directories, the first one found for each major version, newest first."""
    libraries: dict[int, NvrtcLibrary] = {}
    for directory in directories:
        for path in sorted(directory.glob("libnvrtc.so.*")):
            match = _LIBRARY_NAME.fullmatch(path.name)
            if match and int(match[1]) >= _OLDEST_MAJOR:
                libraries.setdefault(int(match[1]), NvrtcLibrary(path, int(match[1])))
    return tuple(libraries[major] for major in sorted(libraries, reverse=True))


_ENTRY = re.compile(r"Compiling entry function '([^']+)' for")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+)(?:\+\d+)? bytes smem")


def parse_ptxas_log(log: str) -> dict[str, Resources]:
    """Parse the resources of every entry function: registers, static shared memory, spilled bytes (stores and loads).

    Spills of functions that are called and not inlined count for the entry. The log lists them behind it. Of an entry that
    the log has twice, the last one counts.
    """
    entries: dict[str, Resources] = {}
    spill_bytes: dict[str, int] = {}
    entry = ""
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry = match[1]
            spill_bytes[entry] = 0
        elif match := _SPILLS.search(line):
            spill_bytes[entry] = spill_bytes.get(entry, 0) + _count_spilled(int(match[2]), int(match[3]))
        elif entry and (match := _USED.search(line)):
            shared = _SHARED.search(line)
            entries[entry] = Resources(int(match[1]), int(shared[1]) if shared else 0)
    return {name: replace(used, spill_bytes=spill_bytes.get(name, 0)) for name, used in entries.items()}


def _count_spilled(store_bytes: int, load_bytes: int) -> int:
    """Return the bytes that one function stores and loads for registers.

    A function that only stores passes arguments on the stack, and one that only loads takes them.
    """
    return store_bytes + load_bytes if store_bytes and load_bytes else 0


_WARNING_CODE = re.compile(r"\bC75\d\d\b")


def ptxas_warnings(log: str) -> tuple[str, ...]:
    """Return lines with a C75xx code: instructions that ptxas degraded (a serialised wgmma, an ignored setmaxnreg)."""
    return tuple(line.strip() for line in log.splitlines() if _WARNING_CODE.search(line))


def _request(source: KernelSource, options: list[str], want: str, limits: CompileLimits) -> Response:
    check_source(source)
    library = library_for(source.arch)
    version, archs = _describe(library.major, limits.memory_bytes)
    if source.arch.number not in archs:
        raise ToolchainMissingError(
            f"NVRTC {version} does not support {source.arch} (it supports {', '.join(f'sm_{n}' for n in archs)}); "
            f"needed: {install_hint(source.arch)}; estimates work without it"
        )
    request: dict[str, object] = {"name": f"{source.name}.cu", "text": source.text, "options": options, "want": want}
    response = _compile(library.major, limits.memory_bytes, source.name, request, limits.timeout_s)
    if not response.ok:
        errors = [line for line in response.log.splitlines() if "error" in line]
        first = errors[0] if errors else response.error
        raise CompileError(f"{source.name}: NVRTC failed: {first.strip()[:300]}", log=truncate_log(response.log))
    return response


@supervised
def _describe(major: int, memory_bytes: int) -> tuple[str, tuple[int, ...]]:
    """Return the version and the supported architectures that the library of that major version reports."""
    return _pool(major, memory_bytes).describe()


@supervised
def _compile(major: int, memory_bytes: int, name: str, request: dict[str, object], timeout_s: float) -> Response:
    return _pool(major, memory_bytes).request(name, request, timeout_s)


def _pool(major: int, memory_bytes: int) -> WorkerPool:
    """Return the pool of an installed library."""
    paths = {library.major: library.path for library in find_libraries()}
    return pool_for(paths[major], memory_bytes)


def wheel_roots() -> list[Path]:
    """Return the directories of the `nvidia` namespace package, which NVIDIA's wheels share."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(root) for root in spec.submodule_search_locations or ()] if spec else []
