"""Run a compiler in the sandbox: restricted to its own and the system's files, with a timeout, without orphans."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roller_svc.errors import BuildServiceError, CompileError, KernelTimeoutError
from roller_svc.toolchain import sandbox
from roller_svc.toolchain.limits import CompileLimits, truncate_log
from roller_svc.toolchain.supervisor import supervised

# Programs, libraries and headers; files by which clang identifies a distribution; files of Perl (for hipcc).
SYSTEM_PATHS = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store", "/etc/ld.so.cache",
    "/etc/ld.so.preload", "/etc/debian_version", "/etc/lsb-release", "/etc/os-release", "/etc/perl", "/dev/zero",
    "/dev/random", "/dev/urandom",
)  # fmt: skip
# For a compiler installed elsewhere: only these directories of its prefix, which may be a home directory.
_PREFIX_DIRECTORIES = ("bin", "lib", "lib32", "lib64", "libexec", "include", "amdgcn", "llvm", "*-linux-*")
# Messages of gcc, clang and collect2 about a child that SIGKILL ended; the child itself leaves no log.
_KILLED = re.compile(r"Killed signal terminated program|terminated with signal 9|due to signal 9|signal 9 \(Killed\)")
_CAUSE = re.compile("error|undefined reference|multiple definition", re.IGNORECASE)  # of a compiler or a linker
_DEPENDENCIES = "dependencies"
# Imports the launcher, which has bytecode then: compiling its text takes a third of its time. The standard library comes
# before its folder.
_LAUNCHER = "import sys; sys.path.append(sys.argv.pop(1)); import sandbox; sys.exit(sandbox.main(sys.argv[1:]))"
_MAX_LOG_BYTES = 16 << 20  # of a log, before it is truncated
_DRAIN_S = 5.0  # for killed processes to close their end of the pipe


def run_sandboxed(
    command: list[str],
    directory: Path,
    limits: CompileLimits,
    output: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Run a compiler that may write to `directory` only. Returns its exit code and log.

    All processes that it started have ended when this returns.

    Args:
        command: the compiler and its arguments.
        directory: the working directory.
        limits: time, memory and file limits.
        output: file for stdout; without it stdout is a part of the log.
        environment: variables beyond those that every compiler gets.

    Raises:
        KernelTimeoutError: the time limit is exceeded.
    """
    code, log, timed_out = _run(
        command, str(directory), dataclasses.asdict(limits), None if output is None else str(output), dict(environment or {})
    )
    if timed_out:
        raise KernelTimeoutError(f"{Path(command[0]).name} ran longer than {limits.timeout_s:g} s", code="compile-timeout")
    return code, log


@supervised
def _run(
    command: list[str], directory: str, limit_fields: dict[str, Any], output: str | None, environment: dict[str, str]
) -> tuple[int, str, bool]:
    """Return exit code, log, and whether the time limit was exceeded."""
    limits = CompileLimits(**limit_fields)
    variables = {
        "PATH": os.pathsep.join((str(Path(command[0]).parent), "/usr/local/bin", "/usr/bin", "/bin")),
        "LC_ALL": "C",
        "HOME": directory,
        "TMPDIR": directory,
        **environment,
    }
    with contextlib.ExitStack() as files:
        # The compiler gets the reading end. The writing end closes when this process ends, for whatever reason.
        reader, _ = (files.enter_context(os.fdopen(end, mode)) for end, mode in zip(os.pipe(), "rw", strict=True))
        stdout = subprocess.PIPE if output is None else files.enter_context(Path(output).open("wb"))
        process = files.enter_context(
            subprocess.Popen(
                [*_launch_command(command[0], Path(directory), limits, variables, reader.fileno()), *command],
                cwd=directory,
                env={},
                start_new_session=True,
                pass_fds=(reader.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.STDOUT if output is None else subprocess.PIPE,
            )
        )
        log_bytes, timed_out = _collect_log(process, limits.timeout_s)
    return process.returncode, truncate_log(log_bytes.decode(errors="replace")), timed_out


def readable_paths(program: str) -> tuple[str, ...]:
    """Return the paths that a program may read: the system's, and its own if it is installed elsewhere."""
    bin_directory = Path(program).resolve().parent
    if any(bin_directory.is_relative_to(system) for system in SYSTEM_PATHS):
        return SYSTEM_PATHS
    paths = [bin_directory]
    if bin_directory.name == "bin":
        paths += (path for name in _PREFIX_DIRECTORIES for path in sorted(bin_directory.parent.glob(name)))
    return (*SYSTEM_PATHS, *map(str, paths))


def compile_sandboxed(
    what: str, command: list[str], output: Path, limits: CompileLimits, environment: Mapping[str, str] | None = None
) -> str:
    """Run a compiler that must create `output`, in that file's directory. Returns the compiler's log.

    Error messages begin with `what`.

    Raises CompileError with the log, KernelTimeoutError, and BuildServiceError if the compiler was killed.
    """
    # Without Landlock, gcc and clang list the files that they read.
    listing = () if sandbox.landlock_abi() else ("-MD", "-MF", _DEPENDENCIES)
    directory = output.parent
    code, log = run_sandboxed([*command, *listing], directory, limits, environment=environment)
    if code == -signal.SIGKILL or (code != 0 and _KILLED.search(log)):
        raise BuildServiceError(f"{what} was killed, by a user or for lack of memory", code="compiler-killed")
    if code != 0 or not output.is_file():
        raise CompileError(_summary(what, code, log), log=log)
    if listing and (directory / _DEPENDENCIES).is_file():
        _check_dependencies(what, command[0], directory)
    return log


def _check_dependencies(what: str, program: str, directory: Path) -> None:
    """Raise CompileError if the compiler read a file that is not the job's, its own or the system's.

    Files that an assembler reads are not listed: `check_source` rejects source that names any.
    """
    allowed = [directory.resolve(), *(Path(path).resolve() for path in readable_paths(program))]
    listing = (directory / _DEPENDENCIES).read_text(encoding="utf-8", errors="replace")
    _, _, files = listing.replace("\\\n", " ").partition(":")
    for file in files.split():
        path = (directory / file).resolve()
        if not any(path.is_relative_to(root) for root in allowed):
            raise CompileError(f"{what} read {file}, expected files of its own directory or of the compiler", code="refused-source")


def _summary(what: str, code: int, log: str) -> str:
    """Return the failure in one line."""
    lines = [line for line in log.splitlines() if not line.startswith("collect2:")]  # says only that the linker failed
    first = next((line for line in lines if _CAUSE.search(line)), log.strip().partition("\n")[0] or "no message")
    return f"{what} failed (exit {code}): {first.strip()[:300]}"


def _launch_command(program: str, directory: Path, limits: CompileLimits, variables: Mapping[str, str], pipe: int) -> list[str]:
    """Return the command of a process that sandboxes itself and then becomes the compiler.

    Code between fork and exec would not be safe with threads.
    """
    confinement = (
        f"parent={os.getpid()}",
        f"pipe={pipe}",
        *(f"variable={name}={value}" for name, value in variables.items()),
        *(f"readable={path}" for path in readable_paths(program)),
        f"writable={directory}",
        "writable=/dev/null",
        f"RLIMIT_AS={limits.memory_bytes}",
        f"RLIMIT_CPU={max(1, round(limits.timeout_s) + 5)}",
        f"RLIMIT_FSIZE={limits.file_bytes}",
        f"RLIMIT_NOFILE={limits.open_files}",
        "RLIMIT_CORE=0",
    )
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(Path(sandbox.__file__).parent), *confinement, "--"]


def _collect_log(process: subprocess.Popen[bytes], timeout_s: float) -> tuple[bytes, bool]:
    """Return the log of a process until it ends or times out, and whether it timed out. Its group has ended then.

    The group is killed before the process is reaped, so that its id cannot be reused. The thread that started the
    process must stay here: the process dies with it (see `sandbox.die_with_parent`).
    """
    log = process.stderr or process.stdout
    assert log is not None
    log_bytes = bytearray()
    exit_descriptor = os.pidfd_open(process.pid)
    try:
        timed_out = not _read_log(log.fileno(), log_bytes, time.monotonic() + timeout_s, exit_descriptor)
    finally:
        os.close(exit_descriptor)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    _read_log(log.fileno(), log_bytes, time.monotonic() + _DRAIN_S)
    return bytes(log_bytes), timed_out


def _read_log(log: int, log_bytes: bytearray, deadline: float, exit_descriptor: int | None = None) -> bool:
    """Append the log to `log_bytes` until the process (without one: the log) ends. Returns whether it did in time."""
    poll = select.poll()
    for descriptor in (log,) if exit_descriptor is None else (log, exit_descriptor):
        poll.register(descriptor, select.POLLIN)
    while (left_s := deadline - time.monotonic()) > 0:
        ready = {descriptor for descriptor, _ in poll.poll(left_s * 1e3)}
        if exit_descriptor in ready:
            return True
        if log not in ready:
            continue
        if part := os.read(log, 1 << 16):
            log_bytes += part[: _MAX_LOG_BYTES - len(log_bytes)]
        elif exit_descriptor is None:
            return True
        else:
            poll.unregister(log)
    return False
