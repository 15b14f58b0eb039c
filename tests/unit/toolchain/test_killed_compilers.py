"""A killed compiler is not an error of its source: the build is retried with the same plan."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from reference_kernels import add, cuda_scale

from roller_svc.errors import BuildServiceError, CompileError
from roller_svc.toolchain import gcc, nvrtc
from roller_svc.toolchain.confined import compile_sandboxed
from roller_svc.toolchain.limits import CompileLimits

EXPANSIONS = "#define A0 0,\n" + "".join(f"#define A{i} A{i - 1} A{i - 1}\n" for i in range(1, 41))


@contextmanager
def killed_when_it_runs(name: str) -> Iterator[None]:
    """Kill the first new descendant of this process whose command line contains the name."""
    stop = threading.Event()
    before = {pid: cpu_ticks(pid) for pid in descendants(os.getpid())}

    def kill() -> None:
        while not stop.wait(0.05):
            for pid in descendants(os.getpid()):
                if name in command_line(pid) and cpu_ticks(pid) - before.get(pid, 0) > 5:
                    os.kill(pid, signal.SIGKILL)
                    return

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        stop.set()
        killer.join()


def descendants(root: int) -> set[int]:
    found = {root}
    parents = {pid: int(fields[1]) for pid in pids() if (fields := stat(pid))}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}


def pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def cpu_ticks(pid: int) -> int:
    return int(fields[11]) if (fields := stat(pid)) else 0


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_a_killed_c_compiler_is_a_fault_that_may_pass() -> None:
    endless = dataclasses.replace(add(), text=EXPANSIONS + "int x[] = {A40};\n")
    with killed_when_it_runs("cc1"), pytest.raises(BuildServiceError) as killed:
        gcc.compile_c(endless)
    assert killed.value.code == "compiler-killed"


@pytest.mark.parametrize(
    ("said", "is_killed"),
    [
        ("gcc: fatal error: Killed signal terminated program cc1", True),
        ("collect2: fatal error: ld terminated with signal 9 [Killed]", True),
        ("clang: error: unable to execute command: Killed\nclang: error: linker command failed due to signal 9", True),
        ("gcc: internal compiler error: Segmentation fault signal terminated program cc1", False),
        ("gcc: fatal error: CPU time limit exceeded signal terminated program cc1", False),
    ],
)
def test_device_names_of_drivers_are_matched(said: str, is_killed: bool, tmp_path: Path) -> None:
    command = ["/bin/sh", "-c", f"echo '{said}' >&2; exit 1"]
    with pytest.raises(BuildServiceError if is_killed else CompileError):
        compile_sandboxed("add", command, tmp_path / "kernel.so", CompileLimits())


def test_a_driver_that_is_killed_itself(tmp_path: Path) -> None:
    with pytest.raises(BuildServiceError):
        compile_sandboxed("add", ["/bin/sh", "-c", "kill -9 $$"], tmp_path / "kernel.so", CompileLimits())


@pytest.mark.slow
def test_a_killed_nvrtc_is_a_fault_that_may_pass() -> None:
    endless = dataclasses.replace(cuda_scale(), text=EXPANSIONS + "__device__ int x[] = {A40};\n")
    with killed_when_it_runs("nvrtc/worker.py"), pytest.raises(BuildServiceError) as killed:
        nvrtc.compile_cuda(endless)
    assert killed.value.code == "compiler-killed"
    assert nvrtc.compile_cuda(cuda_scale()).binary
