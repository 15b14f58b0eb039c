"""A run of a compiler that sees its own folder and the system's, ends in time, and leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from roller_svc.errors import BuildServiceError, CompileError, KernelTimeoutError
from roller_svc.toolchain import sandbox
from roller_svc.toolchain.limits import CompileLimits, shortened

# Where distributions keep programs, libraries and headers; what clang tells a distribution by, what Perl (hipcc) reads.
SYSTEM_FOLDERS = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store", "/etc/ld.so.cache",
    "/etc/ld.so.preload", "/etc/debian_version", "/etc/lsb-release", "/etc/os-release", "/etc/perl", "/dev/zero",
    "/dev/random", "/dev/urandom",
)  # fmt: skip
# Of a compiler installed elsewhere: these folders of the prefix that its bin is in, not the whole, which may be a home.
_PREFIX_FOLDERS = ("bin", "lib", "lib32", "lib64", "libexec", "include", "amdgcn", "llvm", "*-linux-*")
# What gcc, clang and collect2 say of a program of theirs that SIGKILL ended; the program itself leaves no log.
_KILLED = re.compile(r"Killed signal terminated program|terminated with signal 9|due to signal 9|signal 9 \(Killed\)")
_DEPENDENCIES = "dependencies"
_LOG_BYTES_MAX = 16 << 20  # what is held of a log before it is shortened
_LAST_WORDS_S = 5.0  # for what was killed to close its end of the pipe


def run_confined(
    command: list[str],
    directory: Path,
    limits: CompileLimits,
    output: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Exit code and log of a compiler that may write to `directory` alone; what it started has ended with it.

    What it prints is its log, the middle of a long one left out; with `output`, stdout goes to that file, whole.
    `environment`: variables beyond those that every compiler gets.
    Raises KernelTimeoutError.
    """
    variables = {
        "PATH": os.pathsep.join((str(Path(command[0]).parent), "/usr/local/bin", "/usr/bin", "/bin")),
        "LC_ALL": "C",
        "HOME": str(directory),
        "TMPDIR": str(directory),
        **(environment or {}),
    }
    with contextlib.ExitStack() as files:
        # Its reading end goes to the compiler; the writing end closes with this process, whichever way that ends.
        reader, _ = (files.enter_context(os.fdopen(end, mode)) for end, mode in zip(os.pipe(), "rw", strict=True))
        stdout = subprocess.PIPE if output is None else files.enter_context(output.open("wb"))
        process = files.enter_context(subprocess.Popen(
            [*_launcher(command[0], directory, limits, reader.fileno()), *command], cwd=directory, env=variables,
            start_new_session=True, pass_fds=(reader.fileno(),), stdin=subprocess.DEVNULL, stdout=stdout,
            stderr=subprocess.STDOUT if output is None else subprocess.PIPE,
        ))  # fmt: skip
        said, late = _await(process, limits.timeout_s)
    if late:
        raise KernelTimeoutError(
            f"{Path(command[0]).name} ran longer than {limits.timeout_s:g} s", code="compile-timeout"
        )
    return process.returncode, shortened(said.decode(errors="replace"))


def readable_for(program: str) -> tuple[str, ...]:
    """Paths beneath which the program may read: the system's, and those beside it where it is installed elsewhere."""
    folder = Path(program).resolve().parent
    if any(folder.is_relative_to(system) for system in SYSTEM_FOLDERS):
        return SYSTEM_FOLDERS
    beside = [folder]
    if folder.name == "bin":
        beside += (path for name in _PREFIX_FOLDERS for path in sorted(folder.parent.glob(name)))
    return (*SYSTEM_FOLDERS, *map(str, beside))


def compile_confined(
    what: str, command: list[str], output: Path, limits: CompileLimits, environment: Mapping[str, str] | None = None
) -> str:
    """Runs a compiler in the folder of `output`, which is there then; its log. `what` begins the messages.

    Raises CompileError with the log, KernelTimeoutError, and BuildServiceError where somebody killed the compiler.
    """
    # Where no Landlock confines them, gcc and clang list the files that they read.
    listing = () if sandbox.landlock_abi() else ("-MD", "-MF", _DEPENDENCIES)
    directory = output.parent
    code, log = run_confined([*command, *listing], directory, limits, environment=environment)
    if code == -signal.SIGKILL or (code != 0 and _KILLED.search(log)):
        raise BuildServiceError(
            f"{what} was killed: by hand, or because the machine has no memory left", code="compiler-killed"
        )
    if code != 0 or not output.is_file():
        raise CompileError(_summary(what, code, log), log=log)
    if listing and (directory / _DEPENDENCIES).is_file():
        _check_dependencies(what, command[0], directory)
    return log


def _check_dependencies(what: str, program: str, directory: Path) -> None:
    """Raises CompileError for a file read that is not the job's, the compiler's or the system's.

    Files that an assembler reads are not listed: `check_source` refuses texts that name any.
    """
    allowed = [directory.resolve(), *(Path(path).resolve() for path in readable_for(program))]
    listed = (directory / _DEPENDENCIES).read_text(encoding="utf-8", errors="replace")
    _, _, files = listed.replace("\\\n", " ").partition(":")
    for file in files.split():
        path = (directory / file).resolve()
        if not any(path.is_relative_to(folder) for folder in allowed):
            raise CompileError(
                f"{what} read {file}, expected files of its own folder or of the compiler's", code="refused-source"
            )


def _summary(what: str, code: int, log: str) -> str:
    """One line of what went wrong."""
    errors = [line for line in log.splitlines() if "error" in line.lower()]
    first = errors[0] if errors else (log.strip().splitlines() or ["no message"])[0]
    return f"{what} failed (exit {code}): {first.strip()[:300]}"


def _launcher(program: str, directory: Path, limits: CompileLimits, pipe: int) -> list[str]:
    """The process that confines itself and becomes the command: code between fork and exec is not safe with threads."""
    confinement = (
        f"parent={os.getpid()}",
        f"pipe={pipe}",
        *(f"readable={path}" for path in readable_for(program)),
        f"writable={directory}",
        "writable=/dev/null",
        f"RLIMIT_AS={limits.memory_bytes}",
        f"RLIMIT_CPU={max(1, round(limits.timeout_s) + 5)}",
        f"RLIMIT_FSIZE={limits.file_bytes}",
        f"RLIMIT_NOFILE={limits.open_files}",
        "RLIMIT_CORE=0",
    )
    return [sys.executable, "-I", "-S", str(Path(sandbox.__file__)), *confinement, "--"]


def _await(process: subprocess.Popen[bytes], timeout_s: float) -> tuple[bytes, bool]:
    """What the process printed until it ended or was late, and whether it was late. Its whole group has ended then.

    The group is killed before the process is reaped, while its number cannot be another's. The thread that started the
    process stays here for as long as that runs: it dies with this thread (see `sandbox.die_with_parent`).
    """
    log = process.stderr or process.stdout
    assert log is not None
    said = bytearray()
    ended = os.pidfd_open(process.pid)
    try:
        late = not _listen(log.fileno(), said, time.monotonic() + timeout_s, ended)
    finally:
        os.close(ended)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    _listen(log.fileno(), said, time.monotonic() + _LAST_WORDS_S)
    return bytes(said), late


def _listen(log: int, said: bytearray, deadline: float, ended: int | None = None) -> bool:
    """Adds to `said` what comes from the log; whether the process `ended`, or without one the log, before then."""
    poll = select.poll()
    for descriptor in (log,) if ended is None else (log, ended):
        poll.register(descriptor, select.POLLIN)
    while (left_s := deadline - time.monotonic()) > 0:
        ready = {descriptor for descriptor, _ in poll.poll(left_s * 1e3)}
        if ended in ready:
            return True
        if log not in ready:
            continue
        if part := os.read(log, 1 << 16):
            said += part[: _LOG_BYTES_MAX - len(said)]
        elif ended is None:
            return True
        else:
            poll.unregister(log)
    return False
