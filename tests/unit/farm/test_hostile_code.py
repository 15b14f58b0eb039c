"""Hostile machine code in a confined worker: what it may do is the table in docs/threats.md, and nothing is left of it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
from waiting import PATIENCE_S, becomes_true, wait_until

from roller_svc.errors import BuildError, BuildServiceError, RollerError
from roller_svc.farm import scratch as scratch_module
from roller_svc.farm import workers as workers_module
from roller_svc.farm.confinement import readable_by_builds
from roller_svc.farm.workers import WorkerLimits, WorkerProcess
from roller_svc.toolchain import gcc, supervisor
from roller_svc.toolchain.confined import run_sandboxed
from roller_svc.toolchain.limits import CompileLimits
from roller_svc.toolchain.sandbox import landlock_abi

T = TypeVar("T")
R = TypeVar("R")
ROOT = Path(__file__).parents[3]
SOURCE = Path(__file__).with_name("hostile.c")
KEY = "1382837356"  # of hostile.c
MEMORY_BYTES = 2 << 30
LIMITED = ("out-of-resources", "timeout", "worker-stalled", "worker-lost")  # codes of errors that end a worker
ALLOWED = "allowed"

pytestmark = [
    pytest.mark.skipif(landlock_abi() < 6, reason="this kernel has no Landlock of ABI 6"),
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="the attempts are system calls of x86-64"),
]


def documented() -> dict[str, str]:
    """Return the attempts of the table in docs/threats.md with the outcome of each."""
    text = (ROOT / "docs/threats.md").read_text(encoding="utf-8")
    section = text.partition("## Machine code in a build")[2].partition("\n## ")[0]
    outcomes: dict[str, str] = {}
    for line in section.splitlines():
        cells = line.split("|")
        if len(cells) > 3 and "`" in cells[2]:
            outcomes |= dict.fromkeys(re.findall("`([^`]+)`", cells[2]), re.findall("`([^`]+)`", cells[3])[0])
    return outcomes


OUTCOMES = documented()


@dataclass(frozen=True, slots=True)
class Attack:
    """A function of the library, and what it aims at."""

    name: str
    library: str
    numbers: dict[str, int]
    paths: dict[str, str]


def attack(task: Attack) -> str:
    """Run a function in a worker. Returns what it got."""
    library = ctypes.CDLL(task.library)
    for name, number in task.numbers.items():
        ctypes.c_int.in_dll(library, name).value = number
    for name, path in (task.paths | {"own": tempfile.gettempdir()}).items():
        (ctypes.c_char * 512).in_dll(library, name).value = path.encode()
    os.chdir(tempfile.gettempdir())
    function = library[task.name]
    function.restype = ctypes.c_long
    result = function()
    return errno.errorcode[-result] if result else ALLOWED


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "hostile.so"
    command = [*gcc.native_compiler(), "-shared", "-fPIC", "-pthread", "-w", str(SOURCE), "-o", str(path), "-lrt"]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    return path


class Site:
    """A worker, and those that its code attacks: this process, another one, a file, a folder, a segment."""

    def __init__(self, library: Path, base: Path) -> None:
        self.library, self.base, self.scratch, self.outside = library, base, base / "scratch", base / "outside"
        self.outside.mkdir()
        self.secret = self.outside / "secret"
        self.secret.write_text("s")
        self.limits = WorkerLimits(MEMORY_BYTES, scratch=self.scratch, readable=readable_by_builds(library))
        self.victim = subprocess.Popen(["sleep", "600"])
        self._workers = contextlib.ExitStack()
        self._libc = ctypes.CDLL(None)
        self.segment = self._libc.shmget(0, 4096, 0o600)
        self.before = self.state()

    def worker(self, timeout_s: float = 60.0) -> WorkerProcess[Attack, str]:
        return self.worker_of(attack, timeout_s)

    def worker_of(self, work: Callable[[T], R], timeout_s: float = 60.0) -> WorkerProcess[T, R]:
        worker = WorkerProcess(work, timeout_s, self.limits, forked=True)
        self._workers.callback(worker.close, kill=True)
        return worker

    def attack(self, name: str) -> Attack:
        numbers = {"service": os.getpid(), "victim": self.victim.pid, "segment": self.segment}
        return Attack(name, str(self.library), numbers, {"secret": str(self.secret), "outside": str(self.outside)})

    def state(self) -> tuple[object, ...]:
        """Return what an attack could change."""
        pid, file, folder = self.victim.pid, self.secret.stat(), self.outside.stat()
        return (
            self.victim.poll(), os.getpriority(os.PRIO_PROCESS, pid), os.getpriority(os.PRIO_PROCESS, 0),
            os.sched_getaffinity(pid), os.sched_getscheduler(pid), self.secret.read_text(), set(self.outside.iterdir()),
            file.st_mode, file.st_mtime_ns, file.st_nlink, folder.st_mode, os.listxattr(self.secret),
        )  # fmt: skip

    def leftovers(self) -> list[str]:
        """Return what attacks left: processes that run their library, files, segments, semaphores, queues."""
        found = [str(path) for path in self.scratch.iterdir()]
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if process.name != str(os.getpid()) and str(self.library) in (process / "maps").read_text():
                    found.append(f"process {process.name}")
            except OSError:  # it has ended, or is another's
                continue
        for kind in ("shm", "sem", "msg"):
            lines = Path("/proc/sysvipc", kind).read_text().splitlines()
            found += [f"{kind} {line}" for line in lines if line.split()[0] == KEY]
        named = (path for folder in ("/dev/shm", "/dev/mqueue", "/tmp") for path in Path(folder).glob("*roller-hostile*"))
        return found + [str(path) for path in named]

    def check(self) -> None:
        """End the workers. Nothing may be left of them, and nothing may have changed."""
        self._workers.close()
        assert becomes_true(lambda: not self.leftovers()), self.leftovers()
        assert self.state() == self.before

    def close(self) -> None:
        self._workers.close()
        self.victim.kill()
        self.victim.wait()
        self._libc.shmctl(self.segment, 0, None)


@pytest.fixture
def site(library: Path, tmp_path: Path) -> Iterator[Site]:
    site = Site(library, tmp_path)
    yield site
    site.close()


def test_the_document_lists_all_attempts() -> None:
    assert set(OUTCOMES) == set(re.findall(r"^long (\w+)\(void\)", SOURCE.read_text(), re.MULTILINE))
    assert len(OUTCOMES) > 100


def test_each_attempt_ends_as_documented_and_leaves_nothing(site: Site) -> None:
    expected = {name: outcome for name, outcome in OUTCOMES.items() if outcome not in LIMITED}
    worker = site.worker()
    assert {name: worker.call(site.attack(name)) for name in expected} == expected
    site.check()


@pytest.mark.parametrize("name", [name for name, outcome in OUTCOMES.items() if outcome in LIMITED])
def test_what_takes_too_much_is_ended_and_leaves_nothing(name: str, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch_module, "MAX_THREADS", 100)
    monkeypatch.setattr(scratch_module, "MAX_ENTRIES", 200)
    monkeypatch.setattr(scratch_module, "WRITTEN_BYTES", 32 << 20)
    monkeypatch.setattr(workers_module, "CHECK_S", 0.1)
    monkeypatch.setattr(workers_module, "STALLED_CPU_FRACTION", 0.01)
    worker = site.worker(timeout_s=60.0 if OUTCOMES[name] == "out-of-resources" else 2.0)
    with pytest.raises(RollerError) as raised:
        worker.call(site.attack(name))
    is_stopped = OUTCOMES[name] == "timeout" and raised.value.code == "worker-stalled"  # a busy machine did not let it run
    assert raised.value.code == OUTCOMES[name] or is_stopped
    site.check()


def test_the_same_code_succeeds_without_the_sandbox(site: Site) -> None:
    """The attempts are real."""
    free = WorkerLimits(scratch=site.scratch)
    worker: WorkerProcess[Attack, str] = WorkerProcess(attack, 60.0, free, forked=True)
    for name in ("vfork_child", "internet_socket", "memory_file", "shared_mapping", "read_secret", "kill_service"):
        assert worker.call(site.attack(name)) == ALLOWED
    worker.close(kill=True)


def test_code_that_closed_all_ends_with_a_killed_service(site: Site, tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom tests.unit.farm.test_hostile_code import Site\n"
        "if __name__ == '__main__':\n    site = Site(Path(sys.argv[1]), Path(sys.argv[2]))\n    worker = site.worker()\n"
        "    worker.call(site.attack('threads'))\n    site.victim.kill()\n"
        "    print(worker._pid, flush=True)\n    worker._exit_code = lambda: input()\n"
        "    worker.call(site.attack('close_everything'))\n"
    )
    (tmp_path / "main.py").write_text(script)
    (tmp_path / "site").mkdir()
    command = [sys.executable, str(tmp_path / "main.py"), str(site.library), str(tmp_path / "site")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        worker = Path("/proc", server.stdout.readline().strip())
        wait_until(lambda: not list((worker / "fd").iterdir()))
        server.kill()
    wait_until(lambda: not worker.exists() or " Z " in (worker / "stat").read_text())


def ask(task: str) -> str:
    """Ask the supervisor for what no compiler needs."""
    own = Path(tempfile.gettempdir())
    match task.split(" ", 1):
        case ["run", script]:
            code, log = run_sandboxed(["/bin/sh", "-c", script], own, CompileLimits())
            return f"{code} {log}"
        case ["preload", library]:
            return run_sandboxed(["/bin/true"], own, CompileLimits(), environment={"LD_PRELOAD": library})[1]
        case ["write", path]:
            run_sandboxed(["/bin/echo", "x"], own, CompileLimits(), Path(path))
        case ["call", name]:
            supervisor._request(supervisor._requests, name, ("a", "b"))
    return "done"


def test_the_supervisor_does_no_more_than_a_compiler_may(site: Site) -> None:
    worker = site.worker_of(ask)
    code, _, log = worker.call(f"run cat {site.secret}; kill -9 {site.victim.pid}; setsid sleep 600").partition(" ")
    assert code != "0"
    assert log.count("not permitted") + log.count("denied") == 3
    assert worker.call("run (sleep 600 &) & exit 3").startswith("3")
    worker.call(f"preload {site.library}")
    for path in (site.secret, site.outside / "new"):
        with pytest.raises(BuildServiceError):
            worker.call(f"write {path}")
    for name in ("os.system", "roller_svc.toolchain.confined._run"):
        with pytest.raises(BuildServiceError, match="no answer"):
            worker.call(f"call {name}")
    assert worker.call("run echo still here") == "0 still here\n"
    site.check()


def test_compilers_have_a_number_of_processes_at_most(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = site.worker_of(ask)
    many = "run for i in 1 2 3 4 5 6 7 8 9 10 11 12; do (sleep 600 &) done; wait; sleep 600"
    monkeypatch.setattr(scratch_module, "MAX_PROCESSES", 10)
    with pytest.raises(BuildError, match="more than 10 processes of compilers") as caught:
        worker.call(many)
    assert caught.value.code == "out-of-resources"
    site.check()
    assert worker.call("run echo still here") == "0 still here\n"


def test_a_killed_supervisor_takes_its_worker_along(site: Site) -> None:
    worker = site.worker()
    worker.call(site.attack("threads"))
    assert worker._process is not None
    assert worker._process.pid != worker._pid
    os.kill(worker._process.pid or 0, signal.SIGKILL)
    with pytest.raises(BuildServiceError):
        worker.call(site.attack("spin"))
    site.check()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_the_signal_that_ended_a_confined_worker_is_reported(number: signal.Signals, site: Site) -> None:
    worker = site.worker_of(end_by)
    with pytest.raises(BuildServiceError, match=number.name):
        worker.call(int(number))
    site.check()


def end_by(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60.0)
