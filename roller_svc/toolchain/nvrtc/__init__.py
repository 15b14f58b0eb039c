"""CUDA text → cubin or PTX, through NVRTC, with the resources that ptxas reports."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import time
from dataclasses import dataclass
from pathlib import Path

from roller_svc.errors import CompileError, ToolchainMissingError
from roller_svc.ir.hardware import Arch
from roller_svc.ir.kernel import CompiledKernel, KernelSource, Resources
from roller_svc.toolchain.limits import DEFAULT_LIMITS, CompileLimits, shortened
from roller_svc.toolchain.nvrtc.pool import Answer, pool_for
from roller_svc.toolchain.source_check import check_source

INSTALL_HINT = "pip install 'roller-svc[cuda]'"
_SYSTEM_FOLDERS = (
    "/usr/local/cuda/lib64", "/usr/local/cuda/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu",
)  # fmt: skip
_LIBRARY_NAME = re.compile(r"libnvrtc\.so\.(\d+)(?:\.\d+)*")
_OLDEST_MAJOR = 11  # the first with cubins and C++17
_WHEELS = {13: "nvidia-cuda-nvrtc", 12: "nvidia-cuda-nvrtc-cu12", 11: "nvidia-cuda-nvrtc-cu11"}
# Compute capabilities that a major version compiles for, least and greatest (CUDA release notes 11.8, 12.9, 13.0).
_ARCH_RANGES = {11: (35, 90), 12: (50, 121), 13: (75, 121)}
_WHAT_OLD_ARCHS_NEED = (
    (50, "NVRTC 11 (CUDA toolkit 11.x, libnvrtc.so.11.2)"),
    (75, "NVRTC 12 (pip install nvidia-cuda-nvrtc-cu12==12.9.86)"),
)


@dataclass(frozen=True, slots=True)
class NvrtcLibrary:
    path: Path
    major: int

    def may_support(self, arch: Arch) -> bool:
        """By its major version; the library itself has the last word when it compiles."""
        lowest, highest = _ARCH_RANGES.get(self.major, (_ARCH_RANGES[max(_ARCH_RANGES)][0], 10**6))
        return lowest <= arch.number <= highest

    @property
    def version(self) -> str:
        """The wheel's version, else what tells this library from another; nothing is loaded."""
        try:
            if "site-packages" in self.path.parts:
                return importlib.metadata.version(_WHEELS[self.major])
        except (KeyError, importlib.metadata.PackageNotFoundError):
            pass
        return f"{self.path.resolve().name}, {self.path.stat().st_size} bytes"


def compile_cuda(source: KernelSource, limits: CompileLimits = DEFAULT_LIMITS) -> CompiledKernel:
    """The cubin of a CUDA kernel, all launches in one, and what each launch takes.

    Raises CompileError with the log, KernelTimeoutError, ToolchainMissingError.
    """
    start = time.perf_counter()
    options = ["--std=c++17", f"-arch={source.arch}", "--ptxas-options=-v", *source.options]
    answer = _ask(source, options, "cubin", limits)
    entries = parse_ptxas_log(answer.log)
    resources = []
    for launch in source.launches:
        entry = entries.get(launch.name)
        if entry is None:
            raise CompileError(f"{source.name}: the text has no extern \"C\" __global__ function {launch.name}",
                               log=answer.log)  # fmt: skip
        shared_bytes = entry.shared_bytes + launch.shared_bytes
        resources.append(Resources(entry.registers_per_thread, shared_bytes, entry.spill_bytes))
    return CompiledKernel(source, answer.data, shortened(answer.log), tuple(resources), time.perf_counter() - start)


def ptx(source: KernelSource, limits: CompileLimits = DEFAULT_LIMITS) -> str:
    """The PTX of a CUDA kernel, for people to read."""
    options = ["--std=c++17", f"-arch=compute_{source.arch.number}{source.arch.suffix}", *source.options]
    return _ask(source, options, "ptx", limits).data.rstrip(b"\0").decode()


def library_for(arch: Arch) -> NvrtcLibrary:
    """The newest installed NVRTC that knows `arch`; raises ToolchainMissingError saying what would."""
    libraries = find_libraries()
    for library in libraries:
        if library.may_support(arch):
            return library
    if not libraries:
        raise ToolchainMissingError(f"NVRTC is not installed: {needed_for(arch)}; estimates work without it")
    found = ", ".join(f"NVRTC {library.major}" for library in libraries)
    raise ToolchainMissingError(
        f"{arch} cannot be compiled here: {found} does not know it; it takes "
        f"{needed_for(arch)}; estimates work without it"
    )


def needed_for(arch: Arch) -> str:
    """What to install to compile for `arch`."""
    for below, need in _WHAT_OLD_ARCHS_NEED:
        if arch.number < below:
            return need
    return INSTALL_HINT


@functools.cache
def find_libraries() -> tuple[NvrtcLibrary, ...]:
    """Installed NVRTCs, one a major version, newest first: wheels before the system's."""
    folders = [lib for root in wheel_roots() for lib in sorted(root.glob("*/lib"))]
    return libraries_in((*folders, *(Path(folder) for folder in _SYSTEM_FOLDERS)))


def libraries_in(folders: tuple[Path, ...]) -> tuple[NvrtcLibrary, ...]:
    """NVRTCs in those folders, one a major version (the first found), newest first."""
    found: dict[int, NvrtcLibrary] = {}
    for folder in folders:
        for path in sorted(folder.glob("libnvrtc.so.*")):
            match = _LIBRARY_NAME.fullmatch(path.name)
            if match and int(match[1]) >= _OLDEST_MAJOR:
                found.setdefault(int(match[1]), NvrtcLibrary(path, int(match[1])))
    return tuple(found[major] for major in sorted(found, reverse=True))


_ENTRY = re.compile(r"Compiling entry function '([^']+)' for")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+)(?:\+\d+)? bytes smem")


def parse_ptxas_log(log: str) -> dict[str, Resources]:
    """What `ptxas -v` says of every entry function: registers, static shared memory, spilled bytes (stores and loads).

    Spills of functions that an entry calls, when they are not inlined, count for that entry.
    """
    entries: dict[str, Resources] = {}
    entry, spill_bytes = "", 0
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry, spill_bytes = match[1], 0
        elif match := _SPILLS.search(line):
            spill_bytes += int(match[2]) + int(match[3])
        elif entry and (match := _USED.search(line)):
            shared = _SHARED.search(line)
            entries[entry] = Resources(int(match[1]), int(shared[1]) if shared else 0, spill_bytes)
    return entries


_WARNING_CODE = re.compile(r"\bC75\d\d\b")


def ptxas_warnings(log: str) -> tuple[str, ...]:
    """Lines with a C75xx code: what ptxas could not do as asked (a serialised wgmma, an ignored setmaxnreg)."""
    return tuple(line.strip() for line in log.splitlines() if _WARNING_CODE.search(line))


def _ask(source: KernelSource, options: list[str], want: str, limits: CompileLimits) -> Answer:
    check_source(source)
    library = library_for(source.arch)
    pool = pool_for(library.path, limits)
    version, archs = pool.describe()
    if source.arch.number not in archs:
        raise ToolchainMissingError(
            f"NVRTC {version} does not know {source.arch} (it knows {', '.join(f'sm_{n}' for n in archs)}); "
            f"it takes {needed_for(source.arch)}; estimates work without it"
        )
    request: dict[str, object] = {"name": f"{source.name}.cu", "text": source.text, "options": options, "want": want}
    answer = pool.ask(source.name, request, limits.timeout_s)
    if not answer.ok:
        errors = [line for line in answer.log.splitlines() if "error" in line]
        first = errors[0] if errors else answer.error
        raise CompileError(f"{source.name}: NVRTC failed: {first.strip()[:300]}", log=shortened(answer.log))
    return answer


def wheel_roots() -> list[Path]:
    """Folders of the `nvidia` namespace package, which NVIDIA's wheels share."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(root) for root in spec.submodule_search_locations or ()] if spec else []
