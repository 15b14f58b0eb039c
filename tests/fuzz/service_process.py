"""A service in a process of its own, and what /proc says of it and of its children."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

START_S, STOP_S = 120.0, 120.0
QUIET_S, QUIET_MOST_S = 0.5, 60.0

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = resource.getpagesize()


@dataclass(frozen=True)
class ServiceProcess:
    """A service that listens; `folder` has its store, its log and its temporary files."""

    pid: int
    port: int
    folder: Path
    _popen: subprocess.Popen[bytes] = field(repr=False)

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def alive(self) -> bool:
        return self._popen.poll() is None

    def kill(self) -> None:
        """End the service as the kernel's out-of-memory killer does."""
        self._popen.kill()
        self._popen.wait()

    def stop(self) -> int:
        """End the service by SIGTERM, or SIGKILL where it does not end, and what it left behind. Return its exit status."""
        return _stop(self._popen)

    def tree(self) -> tuple[int, ...]:
        """The service and all its descendants."""
        return descendants(self.pid)

    def cpu_s(self) -> float:
        """Seconds of a core that the service and its children took, those that have ended among them."""
        return sum(_cpu_s(pid) for pid in self.tree())

    def rss_bytes(self) -> int:
        return _rss_bytes(self.pid)

    def rss_peak_bytes(self) -> int:
        """The most memory that the service itself ever held."""
        lines = (Path("/proc") / str(self.pid) / "status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

    def children_rss_bytes(self) -> int:
        return sum(_rss_bytes(pid) for pid in self.tree() if pid != self.pid)

    def descriptors(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())

    def wait_until_quiet(self) -> None:
        """Return once neither the service nor a child is at work."""
        until = time.monotonic() + QUIET_MOST_S
        before = self.cpu_s()
        while time.monotonic() < until:
            time.sleep(QUIET_S)
            now = self.cpu_s()
            if now - before <= 0.02:
                return
            before = now


@contextmanager
def running(
    *options: str, descriptors_most: int | None = None, environment: dict[str, str] | None = None
) -> Iterator[ServiceProcess]:
    """`roller serve` on a free port with a store of its own, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="roller-load-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        command = [sys.executable, "-m", "roller_svc", "serve", "--port", "0", "--store", str(folder / "store")]
        if descriptors_most is not None:
            command = ["sh", "-c", 'ulimit -n "$0" && exec "$@"', str(descriptors_most), *command]
        service = start([*command, *options], folder, environment or {})
        try:
            yield service
        finally:
            service.stop()


def start(command: Sequence[str], folder: Path, environment: dict[str, str]) -> ServiceProcess:
    """Start a service and wait until it listens."""
    (folder / "tmp").mkdir(exist_ok=True)
    variables = {key: value for key, value in os.environ.items() if not key.startswith("ROLLER_")}
    with (folder / "log").open("wb") as log:
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=variables | {"TMPDIR": str(folder / "tmp"), "ROLLER_CALIBRATE": "0"} | environment,
        )
    return ServiceProcess(popen.pid, _port(popen, folder / "log"), folder, popen)


def descendants(root: int) -> tuple[int, ...]:
    """A process and all its descendants that live."""
    children: dict[int, list[int]] = {}
    for name in (each.name for each in Path("/proc").iterdir()):
        if name.isdecimal() and (fields := _stat(int(name))):
            children.setdefault(int(fields[1]), []).append(int(name))
    found, pending = [root], [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return tuple(found)


def command_line(pid: int) -> str:
    """What a process was started with; nothing where it has ended."""
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def process_name(pid: int) -> str:
    """The name of a process, which for a worker is that of its work; nothing where it has ended."""
    try:
        return (Path("/proc") / str(pid) / "comm").read_text(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _stat(pid: int) -> Sequence[str]:
    """Fields of /proc/PID/stat from the state on; none where the process has ended."""
    try:
        text = (Path("/proc") / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ()
    return text.rpartition(")")[2].split()


def _cpu_s(pid: int) -> float:
    return sum(int(ticks) for ticks in _stat(pid)[11:15]) / _TICKS


def _rss_bytes(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[21]) * _PAGE if fields else 0


def _port(popen: subprocess.Popen[bytes], log: Path) -> int:
    """From what uvicorn says when it listens."""
    until = time.monotonic() + START_S
    while time.monotonic() < until and popen.poll() is None:
        for line in log.read_text(errors="replace").splitlines():
            if "running on http" in line:
                return int(line.split("running on ")[1].split()[0].rpartition(":")[2])
        time.sleep(0.05)
    _stop(popen)
    raise RuntimeError(f"the service did not start: {log.read_text(errors='replace')[-2000:]}")


def _stop(popen: subprocess.Popen[bytes]) -> int:
    """End the service, and what it left behind. Return its exit status."""
    left = descendants(popen.pid)
    popen.terminate()
    try:
        popen.wait(STOP_S)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()
    for pid in left[1:]:
        if os.getpgid(0) != pid and "roller" in command_line(pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    return popen.returncode
