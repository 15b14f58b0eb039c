"""Compile C to shared objects and C++ to objects or programs, through gcc or clang in a sandboxed subprocess."""

from __future__ import annotations

import contextlib
import platform
import shlex
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from roller_svc.errors import InvariantError, KernelTimeoutError, ToolchainMissingError
from roller_svc.fork_lock import ForkLock
from roller_svc.ir.hardware import Arch
from roller_svc.ir.kernel import CompiledKernel, KernelSource, Resources
from roller_svc.toolchain.confined import compile_sandboxed, run_sandboxed
from roller_svc.toolchain.limits import DEFAULT_LIMITS, CompileLimits
from roller_svc.toolchain.pool import COMPILE_FLAGS, has_pool, hide_pool, prepare_pool, write_pool
from roller_svc.toolchain.source_check import check_source

OUTPUT = "output"
INSTALL = "apt install g++"
CXX_PROGRAMS = ("g++", "c++")


def cxx_compiler() -> str:
    """Return the C++ compiler of this machine. Raises ToolchainMissingError."""
    for name in CXX_PROGRAMS:
        if path := shutil.which(name):
            return path
    raise ToolchainMissingError(f"no C++ compiler found (looked for {', '.join(CXX_PROGRAMS)}): {INSTALL}")


def compile_cxx(name: str, files: Mapping[str, bytes], arguments: Sequence[str], limits: CompileLimits = DEFAULT_LIMITS) -> bytes:
    """Run the compiler with `arguments` in a directory of `files`. Returns the contents of its file "output".

    Raises CompileError with the log, KernelTimeoutError, ToolchainMissingError.
    """
    command = [cxx_compiler(), *arguments]
    with tempfile.TemporaryDirectory(prefix="roller-cxx-") as temporary:
        directory = Path(temporary)
        for file, content in files.items():
            (directory / file).write_bytes(content)
        compile_sandboxed(f"{name}: the C++ compiler", command, directory / OUTPUT, limits)
        return (directory / OUTPUT).read_bytes()


# -fwrapv, -fno-strict-aliasing: the language's integers wrap and its bit casts read one type's bytes as another's.
# -fno-math-errno, -fno-trapping-math: allow vectorisation. -ffast-math would break NaN and infinity.
COMMON_FLAGS = (
    "-std=gnu11", "-O2", "-fPIC", "-shared", "-fwrapv", "-fno-strict-aliasing", "-fno-math-errno",
    "-fno-trapping-math", "-fvisibility=default", "-Wl,--build-id=none",
)  # fmt: skip
# Flags that clang does not know.
# -fno-predictive-commoning: it keeps elements of a window for the next tap in registers that a micro-kernel needs for
# its accumulators, which then spill. Loads from L1 are free there.
# -fno-tree-bit-ccp: the pass takes gcc 12 a fifth of its time on wide vectors and finds nothing here.
# -fno-loop-unroll-and-jam: it speeds up some tiles of one vector by a tenth, which the model does not predict.
# -fno-tree-loop-distribute-patterns: gcc would turn copy loops of one vector a step into `rep movs`, which is slower
# than vectors for rows of 2 KiB on Zen 4.
# -fno-delete-null-pointer-checks: gcc 12 may address an element in a deep loop nest as 0 plus two sums, and then takes
# the store for an access to the null pointer, which never happens: the function counts as pure, and calls of it are
# deleted (gcc bug 110702, mended in gcc 14). The emulator's program has the flag by -fsanitize=null.
GCC_FLAGS = (
    "-fmax-errors=20", "-fno-predictive-commoning", "-fno-tree-bit-ccp", "-fno-loop-unroll-and-jam",
    "-fno-tree-loop-distribute-patterns", "-fno-delete-null-pointer-checks",
)  # fmt: skip
# Linking with any of these adds start-up code that enables flush-to-zero for the whole process that loads it.
FORBIDDEN_OPTIONS = frozenset({"-ffast-math", "-Ofast", "-funsafe-math-optimizations"})
_INSTALL_NATIVE = "apt install gcc"
_NATIVE_COMPILERS = ("gcc", "clang", "cc")
_BINUTILS = ("as", "ld")
_MACHINE_OF_PREFIX = {"x86-64-v": "x86_64", "armv": "aarch64"}
_CROSS_COMPILERS = {"aarch64": "aarch64-linux-gnu-gcc", "x86_64": "x86_64-linux-gnu-gcc"}
_VERSION = "--version"
_running = ForkLock()
_first_lines: dict[tuple[tuple[str, ...], str], str] = {}  # that programs have printed, by command and option
PROGRAMS = (*_NATIVE_COMPILERS, *_CROSS_COMPILERS.values())  # programs that a build may run


def compile_c(source: KernelSource, limits: CompileLimits = DEFAULT_LIMITS, cc: str | None = None) -> CompiledKernel:
    """Compile a C kernel to a shared object. `cc` is a command to use in place of the compiler found.

    Raises CompileError with the log, KernelTimeoutError, ToolchainMissingError.
    """
    check_source(source)
    command = c_command(source, cc)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="roller-cc-") as temporary:
        directory = Path(temporary)
        (directory / "kernel.c").write_text(source.text, encoding="utf-8")
        output = directory / "kernel.so"
        pool = pool_arguments(source, directory, cc)
        hide = [hide_pool(directory)] if pool else []
        command += ["kernel.c", *pool, *hide, "-o", output.name, "-lm"]
        log = compile_sandboxed(f"{source.name}: the C compiler", command, output, limits)
        binary = output.read_bytes()
    seconds = time.perf_counter() - start
    return CompiledKernel(source, binary, log, tuple(Resources() for _ in source.launches), seconds)


def compile_assembly(source: KernelSource, limits: CompileLimits = DEFAULT_LIMITS) -> str:
    """Return the assembly of a C kernel with the lines of its source. Raises as `compile_c` does."""
    check_source(source)
    with tempfile.TemporaryDirectory(prefix="roller-cc-") as temporary:
        directory = Path(temporary)
        (directory / "kernel.c").write_text(source.text, encoding="utf-8")
        output = directory / "kernel.s"
        command = [*c_command(source), "-g1", "-S", "kernel.c", "-o", output.name]
        compile_sandboxed(f"{source.name}: the C compiler", command, output, limits)
        return output.read_text(encoding="utf-8", errors="replace")


def c_command(source: KernelSource, cc: str | None = None, *, parallel: bool | None = None) -> list[str]:
    """Return the command of the compiler found, or of `cc`, with its flags. Raises ToolchainMissingError.

    `parallel`: whether the text has parallel regions or belongs to such texts; by default, whether it has any.
    """
    if forbidden := FORBIDDEN_OPTIONS.intersection(source.options):
        raise InvariantError(f"{source.name}: options {sorted(forbidden)} change the caller's floating-point state")
    compiler = compiler_for(source.arch, cc)
    gcc_flags = () if _is_clang(compiler) else GCC_FLAGS
    has_regions = (source.is_parallel if parallel is None else parallel) and has_pool(source, clang=_is_clang(compiler))
    pool_flags = COMPILE_FLAGS if has_regions else ()
    return [*compiler, *COMMON_FLAGS, *gcc_flags, *_arch_flags(source.arch), *source.options, *pool_flags]


def pool_arguments(source: KernelSource, directory: Path, cc: str | None = None, *, parallel: bool | None = None) -> list[str]:
    """Return what links the source's library with its thread pool, which is written to `directory`; [] without regions.

    `parallel`: whether objects have regions; by default, whether the source has any.
    """
    compiler = compiler_for(source.arch, cc)
    has_regions = source.is_parallel if parallel is None else parallel
    if not has_regions or not has_pool(source, clang=_is_clang(compiler)):
        return []
    return write_pool(directory, compiler, _arch_flags(source.arch), source.name)


def prepare_model(source: KernelSource) -> None:
    """Begin what a model needs beside its objects, in other threads: the versions of its compiler, and its pool."""
    with contextlib.suppress(ToolchainMissingError):  # keys and links raise it
        compiler = compiler_for(source.arch)
        _prepare_versions(tuple(compiler))
        if has_pool(source, clang=_is_clang(compiler)):
            prepare_pool(compiler, _arch_flags(source.arch))


def _prepare_versions(command: tuple[str, ...]) -> None:
    """Ask a compiler for its versions in another thread, unless this process knows them."""

    def find_versions() -> None:
        with contextlib.suppress(ToolchainMissingError):
            compiler_version(command)
            binutils_versions(command)

    if (command, _VERSION) not in _first_lines:
        threading.Thread(target=find_versions, name="roller-versions").start()


def _is_clang(compiler: list[str]) -> bool:
    return "clang" in Path(compiler[0]).resolve().name


def compiler_for(arch: Arch, cc: str | None = None) -> list[str]:
    """Return the command that compiles C for `arch` on this machine. Raises ToolchainMissingError."""
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
    """Return the command that compiles C for this machine: `cc`, or the first compiler installed."""
    if cc:
        words = shlex.split(cc)
        if words and (path := shutil.which(words[0])):
            return [path, *words[1:]]
        raise ToolchainMissingError(f"the C compiler {cc!r} was not found: {_INSTALL_NATIVE}")
    for name in _NATIVE_COMPILERS:
        if path := shutil.which(name):
            return [path]
    raise ToolchainMissingError(f"no C compiler found (looked for {', '.join(_NATIVE_COMPILERS)}): {_INSTALL_NATIVE}")


def install_hint(arch: Arch) -> str:
    """Return what to install to compile C for `arch`."""
    machine = _MACHINE_OF_PREFIX.get(arch.prefix, platform.machine())
    if machine == platform.machine():
        return _INSTALL_NATIVE
    return f"apt install gcc-{machine.replace('_', '-')}-linux-gnu"


def compiler_version(command: tuple[str, ...]) -> str:
    """Return the first line of `--version`, which identifies a compiler in a cache key.

    Raises ToolchainMissingError if the compiler does not print it.
    """
    return _first_line(command, _VERSION)


def binutils_versions(command: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return names and versions of the assembler and the linker that a compiler finds."""
    versions = []
    for name in _BINUTILS:
        with contextlib.suppress(ToolchainMissingError):
            path = shutil.which(_first_line(command, f"-print-prog-name={name}"))
            if path is not None:
                versions.append((name, _first_line((path,), _VERSION)))
    return tuple(versions)


def _first_line(command: tuple[str, ...], option: str) -> str:
    """Return the first line that a program prints for an option, which is asked once in a process.

    Raises ToolchainMissingError if it prints none.
    """
    with _running:  # who asks at the same time waits
        if (command, option) not in _first_lines:
            _first_lines[command, option] = _run_for_line(command, option)
        return _first_lines[command, option]


def _run_for_line(command: tuple[str, ...], option: str) -> str:
    with tempfile.TemporaryDirectory(prefix="roller-cc-") as directory:
        try:
            code, text = run_sandboxed([*command, option], Path(directory), CompileLimits(timeout_s=10.0))
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
