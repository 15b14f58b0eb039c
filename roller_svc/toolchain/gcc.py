"""C text → shared object, through gcc or clang in a confined subprocess."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import resource
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from roller_svc.errors import CompileError, InvariantError, KernelTimeoutError, ToolchainMissingError
from roller_svc.ir.hardware import Arch
from roller_svc.ir.kernel import CompiledKernel, KernelSource, Resources
from roller_svc.toolchain.limits import DEFAULT_LIMITS, CompileLimits, shortened

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
_MACHINE_OF_PREFIX = {"x86-64-v": "x86_64", "armv": "aarch64"}
_CROSS_COMPILERS = {"aarch64": "aarch64-linux-gnu-gcc", "x86_64": "x86_64-linux-gnu-gcc"}


def compile_c(source: KernelSource, limits: CompileLimits = DEFAULT_LIMITS, cc: str | None = None) -> CompiledKernel:
    """The shared object of a C kernel. `cc` is a command to use in place of the compiler that is found.

    Raises CompileError with the log, KernelTimeoutError, ToolchainMissingError.
    """
    command = c_command(source, cc)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="roller-cc-") as folder:
        directory = Path(folder)
        (directory / "kernel.c").write_text(source.text, encoding="utf-8")
        code, log = run_confined([*command, "kernel.c", "-o", "kernel.so", "-lm"], directory, limits)
        output = directory / "kernel.so"
        if code != 0 or not output.is_file():
            raise CompileError(summary(source.name, "C", code, log), log=log)
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
    with tempfile.TemporaryDirectory(prefix="roller-cc-") as folder:
        try:
            code, text = run_confined([*command, "--version"], Path(folder), CompileLimits(timeout_s=10.0))
        except KernelTimeoutError as late:
            raise ToolchainMissingError(f"{shlex.join(command)} --version does not end") from late
    lines = text.splitlines()
    if code != 0 or not lines:
        raise ToolchainMissingError(f"{shlex.join(command)} --version fails: {text.strip()[:200]}")
    return lines[0].strip()


def _arch_flags(arch: Arch) -> list[str]:
    if arch.prefix == "armv":
        return [f"-march=armv{arch.number}-a"]
    return ["-march=x86-64"] if arch.number == 1 else [f"-march={arch}"]


# A shell that waits for a line and then becomes the command.
_GATE = ("/bin/sh", "-c", 'read -r go && exec "$@" </dev/null', "sh")
_GO = "go\n"


def run_confined(
    command: list[str],
    directory: Path,
    limits: CompileLimits,
    output: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Exit code and log of a compiler run in a session of its own, which is killed whole when time is up.

    What it prints is its log, the middle of a long one left out; with `output`, stdout goes to that file, whole.
    `environment`: variables beyond those that every compiler gets.
    """
    variables = {
        "PATH": os.pathsep.join((str(Path(command[0]).parent), "/usr/local/bin", "/usr/bin", "/bin")),
        "LC_ALL": "C",
        "HOME": str(directory),
        "TMPDIR": str(directory),
        **(environment or {}),
    }
    with contextlib.ExitStack() as files:
        stdout = subprocess.PIPE if output is None else files.enter_context(output.open("wb"))
        process = subprocess.Popen(
            [*_GATE, *command], cwd=directory, env=variables, start_new_session=True, text=True, errors="replace",
            stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.STDOUT if output is None else subprocess.PIPE,
        )  # fmt: skip
    try:
        _confine(process.pid, limits)
        printed, complained = process.communicate(_GO, timeout=limits.timeout_s)
    except subprocess.TimeoutExpired:
        raise KernelTimeoutError(
            f"{Path(command[0]).name} ran longer than {limits.timeout_s:g} s", code="compile-timeout"
        ) from None
    finally:
        if process.returncode is None:
            _kill_session(process)
    log: str = printed if output is None else complained
    return process.returncode, shortened(log)


def _confine(pid: int, limits: CompileLimits) -> None:
    """Limit a process that waits at the gate: what it becomes, and what that starts, has the limits from the start.

    From outside, because code between fork and exec is not safe in a process with threads.
    """
    cpu_s = max(1, round(limits.timeout_s) + 5)
    wanted = (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CORE, 0),
    )
    for kind, value in wanted:
        try:
            hard = resource.prlimit(pid, kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.prlimit(pid, kind, (value, value))
        except ProcessLookupError:  # it has ended already
            return


def _kill_session(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def summary(name: str, language: str, code: int, log: str) -> str:
    """One line of what went wrong."""
    errors = [line for line in log.splitlines() if "error" in line.lower()]
    first = errors[0] if errors else (log.strip().splitlines() or ["no message"])[0]
    return f"{name}: the {language} compiler failed (exit {code}): {first.strip()[:300]}"
