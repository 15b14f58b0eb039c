"""C text → shared object, through gcc or clang in a confined subprocess.

C++ files → an object or a program, through g++ or clang++ in a confined subprocess.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import shlex
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from roller_svc.errors import InvariantError, KernelTimeoutError, ToolchainMissingError
from roller_svc.ir.hardware import Arch
from roller_svc.ir.kernel import CompiledKernel, KernelSource, Resources
from roller_svc.toolchain.confined import compile_confined, run_confined
from roller_svc.toolchain.limits import DEFAULT_LIMITS, CompileLimits
from roller_svc.toolchain.source_check import check_source

OUTPUT = "output"
INSTALL = "apt install g++"
CXX_PROGRAMS = ("g++", "c++")


def cxx_compiler() -> str:
    """The C++ compiler of this machine; raises ToolchainMissingError."""
    for name in CXX_PROGRAMS:
        if path := shutil.which(name):
            return path
    raise ToolchainMissingError(f"no C++ compiler found (looked for {', '.join(CXX_PROGRAMS)}): {INSTALL}")


def compile_cxx(
    name: str, files: Mapping[str, bytes], arguments: Sequence[str], limits: CompileLimits = DEFAULT_LIMITS
) -> bytes:
    """Runs the compiler with `arguments` in a folder of `files`; what it wrote to the file "output".

    Raises CompileError with the log, KernelTimeoutError, ToolchainMissingError.
    """
    command = [cxx_compiler(), *arguments]
    with tempfile.TemporaryDirectory(prefix="roller-cxx-") as folder:
        directory = Path(folder)
        for file, content in files.items():
            (directory / file).write_bytes(content)
        compile_confined(f"{name}: the C++ compiler", command, directory / OUTPUT, limits)
        return (directory / OUTPUT).read_bytes()


# -fwrapv, -fno-strict-aliasing: the language's integers wrap and its bit casts read one type's bytes as another's.
# -fno-math-errno, -fno-trapping-math let gcc vectorise. Not -ffast-math: it breaks NaN and infinity.
# -fno-predictive-commoning: elements of a window that the next tap reads again would be kept in registers that the
# accumulators of a micro-kernel need, and spill; a load from L1 is free there.
COMMON_FLAGS = (
    "-std=gnu11", "-O2", "-fPIC", "-shared", "-fwrapv", "-fno-strict-aliasing", "-fno-math-errno",
    "-fno-trapping-math", "-fno-predictive-commoning", "-fvisibility=default", "-fmax-errors=20", "-Wl,--build-id=none",
)  # fmt: skip
# Which bits of a value are constant takes gcc 12 a fifth of its time to find out, for each vector
# operation with numbers as wide as the vector, and tells it nothing here. Joined rounds of an outer loop gain
# a tile of one vector here and there a tenth, which no model of tiles foresees: which tile is best then is luck.
# -fno-tree-loop-distribute-patterns: of a loop that copies one vector a step gcc makes string instructions, `rep movs`,
# of one of two vectors it does not; rows of 2 KiB take those a tenth to a sixth longer on Zen 4 than vectors do.
GCC_FLAGS = ("-fno-tree-bit-ccp", "-fno-loop-unroll-and-jam", "-fno-tree-loop-distribute-patterns")
# Linking with any of these adds start-up code that switches on flush-to-zero for the whole process that loads it.
REFUSED_OPTIONS = frozenset({"-ffast-math", "-Ofast", "-funsafe-math-optimizations"})
_INSTALL_NATIVE = "apt install gcc"
_NATIVE_COMPILERS = ("gcc", "clang", "cc")
_BINUTILS = ("as", "ld")
_MACHINE_OF_PREFIX = {"x86-64-v": "x86_64", "armv": "aarch64"}
_CROSS_COMPILERS = {"aarch64": "aarch64-linux-gnu-gcc", "x86_64": "x86_64-linux-gnu-gcc"}
PROGRAMS = (*_NATIVE_COMPILERS, *_CROSS_COMPILERS.values())  # that a build may run


def compile_c(source: KernelSource, limits: CompileLimits = DEFAULT_LIMITS, cc: str | None = None) -> CompiledKernel:
    """The shared object of a C kernel. `cc` is a command to use in place of the compiler that is found.

    Raises CompileError with the log, KernelTimeoutError, ToolchainMissingError.
    """
    check_source(source)
    command = [*c_command(source, cc), "kernel.c", "-o", "kernel.so", "-lm"]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="roller-cc-") as folder:
        (Path(folder) / "kernel.c").write_text(source.text, encoding="utf-8")
        output = Path(folder) / "kernel.so"
        log = compile_confined(f"{source.name}: the C compiler", command, output, limits)
        binary = output.read_bytes()
    seconds = time.perf_counter() - start
    return CompiledKernel(source, binary, log, tuple(Resources() for _ in source.launches), seconds)


def c_command(source: KernelSource, cc: str | None = None) -> list[str]:
    """The compiler that is found, or `cc`, with its flags; raises ToolchainMissingError."""
    if refused := REFUSED_OPTIONS.intersection(source.options):
        raise InvariantError(f"{source.name}: options {sorted(refused)} change the caller's floating-point state")
    compiler = compiler_for(source.arch, cc)
    own = () if "clang" in Path(compiler[0]).resolve().name else GCC_FLAGS
    return [*compiler, *COMMON_FLAGS, *own, *_arch_flags(source.arch), *source.options]


def compiler_for(arch: Arch, cc: str | None = None) -> list[str]:
    """The command, as a list, that compiles C for `arch` on this machine; raises ToolchainMissingError."""
    machine = _MACHINE_OF_PREFIX.get(arch.prefix)
    if machine is None:
        raise ToolchainMissingError(f"C kernels run on x86-64 and 64-bit ARM, not on {arch}")
    if machine == platform.machine():
        return native_compiler(cc)
    cross = _CROSS_COMPILERS[machine]
    if path := shutil.which(cross):
        return [path]
    raise ToolchainMissingError(
        f"no compiler for {arch} on this {platform.machine()} machine: {cross} is not installed "
        f"({install_hint(arch)}); estimates work without it"
    )


def native_compiler(cc: str | None = None) -> list[str]:
    """The command that compiles C for this machine: `cc` if given, else the first that is installed."""
    if cc:
        words = shlex.split(cc)
        if words and (path := shutil.which(words[0])):
            return [path, *words[1:]]
        raise ToolchainMissingError(f"the C compiler {cc!r} is not there: {_INSTALL_NATIVE}")
    for name in _NATIVE_COMPILERS:
        if path := shutil.which(name):
            return [path]
    raise ToolchainMissingError(f"no C compiler found (looked for {', '.join(_NATIVE_COMPILERS)}): {_INSTALL_NATIVE}")


def install_hint(arch: Arch) -> str:
    """What to install to compile C for `arch`."""
    machine = _MACHINE_OF_PREFIX.get(arch.prefix, platform.machine())
    if machine == platform.machine():
        return _INSTALL_NATIVE
    return f"apt install gcc-{machine.replace('_', '-')}-linux-gnu"


@functools.cache
def compiler_version(command: tuple[str, ...]) -> str:
    """The first line of `--version`: what tells two compilers apart in a cache key.

    Raises ToolchainMissingError for a compiler that does not say it.
    """
    return _first_line(command, "--version")


@functools.cache
def binutils_versions(command: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Names and versions of the assembler and the linker that a compiler runs; without one that it does not find."""
    found = []
    for name in _BINUTILS:
        with contextlib.suppress(ToolchainMissingError):
            path = shutil.which(_first_line(command, f"-print-prog-name={name}"))
            if path is not None:
                found.append((name, _first_line((path,), "--version")))
    return tuple(found)


def _first_line(command: tuple[str, ...], option: str) -> str:
    """The first line that a program prints for an option. Raises ToolchainMissingError where it prints none."""
    with tempfile.TemporaryDirectory(prefix="roller-cc-") as folder:
        try:
            code, text = run_confined([*command, option], Path(folder), CompileLimits(timeout_s=10.0))
        except KernelTimeoutError as late:
            raise ToolchainMissingError(f"{shlex.join(command)} {option} does not end") from late
    lines = text.splitlines()
    if code != 0 or not lines:
        raise ToolchainMissingError(f"{shlex.join(command)} {option} fails: {text.strip()[:200]}")
    return lines[0].strip()


def _arch_flags(arch: Arch) -> list[str]:
    if arch.prefix == "armv":
        return [f"-march=armv{arch.number}-a"]
    return ["-march=x86-64"] if arch.number == 1 else [f"-march={arch}"]
