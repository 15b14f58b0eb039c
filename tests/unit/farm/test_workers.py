"""Worker processes: answers, errors, bugs, deaths and overruns."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from roller_svc.errors import (
    ArgumentError,
    BuildError,
    BuildServiceError,
    CompileError,
    IndexRangeError,
    InvariantError,
    KernelTimeoutError,
)
from roller_svc.farm import workers as workers_module
from roller_svc.farm.confinement import readable_by_builds
from roller_svc.farm.workers import (
    MAX_SOCKET_PATH_BYTES,
    SOCKET_BELOW_TEMPORARY_DIRECTORY,
    JsonCodec,
    WorkerLimits,
    WorkerPool,
    WorkerProcess,
    map_unordered,
)
from roller_svc.toolchain import supervisor
from roller_svc.toolchain.sandbox import landlock_abi


def work(task: str) -> str:
    match task:
        case "pid":
            return str(os.getpid())
        case "refuse":
            raise IndexRangeError("outside", line=1, column=2, end_column=3, hint="guard it")
        case "fail":
            raise CompileError("no", log="the log")
        case "bug":
            raise ZeroDivisionError("a bug")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(7)
        case "hoard":
            return str(len(bytearray(1 << 40)))
        case "reserve":
            return str(len(mmap.mmap(-1, 1 << 40, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)))
        case "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        case "spin":
            while True:
                pass
        case "folder":
            with tempfile.NamedTemporaryFile(delete=False) as file:
                return file.name
        case "name":
            return Path("/proc/self/comm").read_text().strip()
        case "nap":
            time.sleep(1.0)
        case "hang":
            time.sleep(600)
    return task.upper()


@pytest.fixture(scope="module", params=[False, True], ids=["spawned", "forked"])
def lane(request: pytest.FixtureRequest) -> Iterator[WorkerProcess[str, str]]:
    lane = WorkerProcess(work, timeout_s=60.0, forked=request.param)
    yield lane
    lane.close()


def test_a_worker_answers_and_is_used_again(lane: WorkerProcess[str, str]) -> None:
    assert lane.call("hello") == "HELLO"
    assert lane.call("pid") == lane.call("pid")


def test_errors_of_ours_come_back_whole(lane: WorkerProcess[str, str]) -> None:
    with pytest.raises(IndexRangeError) as refused:
        lane.call("refuse")
    error = refused.value
    assert (error.code, error.line, error.column, error.end_column, error.hint) == (
        "index-out-of-range",
        1,
        2,
        3,
        "guard it",
    )
    with pytest.raises(CompileError) as failed:
        lane.call("fail")
    assert failed.value.log == "the log"


def test_bug_is_reported_with_its_place_and_replaces_the_worker(lane: WorkerProcess[str, str]) -> None:
    before = lane.call("pid")
    with pytest.raises(InvariantError, match=r"ZeroDivisionError: a bug \(test_workers.py:\d+\)"):
        lane.call("bug")
    assert lane.call("pid") != before


@pytest.mark.parametrize(("task", "how"), [("die", "SIGKILL"), ("exit", "exit status 7")])
def test_a_death_is_an_error_and_not_the_end(lane: WorkerProcess[str, str], task: str, how: str) -> None:
    with pytest.raises(BuildServiceError, match=how) as lost:
        lane.call(task)
    assert lost.value.code == "worker-lost"
    assert lane.call("on") == "ON"


@pytest.mark.slow
def test_a_worker_that_overruns_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "STALLED_CPU_FRACTION", 0.0)  # a busy machine lets it run little
    lane = WorkerProcess(work, timeout_s=1.0)
    with pytest.raises(KernelTimeoutError):
        lane.call("spin")
    lane.close()


@pytest.mark.slow
def test_a_worker_that_is_not_let_run_is_the_machines_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = WorkerProcess(work, timeout_s=60.0)
    lane.call("on")
    monkeypatch.setattr(lane, "_timeout_s", 1.0)
    with pytest.raises(BuildServiceError) as stalled:
        lane.call("hang")
    assert stalled.value.code == "worker-stalled"
    lane.close()


def test_a_full_disk_may_pass() -> None:
    lane = WorkerProcess(work, timeout_s=60.0)
    with pytest.raises(BuildServiceError) as full:
        lane.call("full")
    assert full.value.code == "worker-resources"
    lane.close()


def test_a_worker_that_ends_before_its_task_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = WorkerProcess(work, timeout_s=60.0)
    start, started = lane._start, []

    def killed_twice() -> Connection:
        connection = start()
        started.append(connection)
        if len(started) < 3:
            assert lane._process is not None
            lane._process.kill()
        return connection

    monkeypatch.setattr(lane, "_start", killed_twice)
    assert lane.call("on") == "ON"
    assert len(started) == 3
    lane.close()


class Planted:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("/nonexistent/planted",)


def plant(task: str) -> Any:
    return Planted() if task == "pickle" else task


def upper(document: Any) -> str:
    if not isinstance(document, str):
        raise TypeError("no text")
    return document.upper()


def test_answers_of_a_worker_that_is_not_trusted_are_json() -> None:
    lane: WorkerProcess[str, Any] = WorkerProcess(plant, timeout_s=60.0, codec=JsonCodec(str, upper))
    assert lane.call("a") == "A"
    pickled = b"p" + pickle.dumps(Planted())
    for forged in (pickled, b"", b"j", b"j{", b"j[1]", b"e{}", b'e{"class": "Path", "code": "", "message": ""}', b"x1"):
        with pytest.raises(BuildServiceError) as refused:
            lane._decode_response(forged)
        assert refused.value.code == "worker-lost"
    assert lane.call("b") == "B"
    lane.close()


def outside(task: str) -> str:
    """What a worker may do, by the name of the first that it could."""
    match task.split():
        case ["read", path]:
            return Path(path).read_text(errors="replace")[:1]
        case ["write", path]:
            Path(path).write_text("x")
        case ["connect", port]:
            socket.create_connection(("127.0.0.1", int(port)), timeout=5.0)
        case ["signal", pid]:
            os.kill(int(pid), 0)
        case ["thread", path]:
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(Path(path).read_text).result()[:1]
        case ["program", path]:
            return subprocess.run(["cat", path], capture_output=True, text=True, check=False).stdout[:1]
        case ["descriptors"]:
            links = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.exists()]
            return " ".join(sorted(link.partition(":")[0] for link in links))
        case ["busy"]:  # a request that never ends, then one that is none
            own, theirs = socket.socketpair()
            requests = supervisor._requests
            assert requests is not None
            socket.send_fds(requests, [b"r"], [theirs.fileno()])
            socket.send_fds(requests, [b"r"], [os.open(os.devnull, os.O_RDONLY)])
            for descriptor in range(3, 64):  # a part of a response
                with contextlib.suppress(OSError):
                    if descriptor not in (own.fileno(), theirs.fileno(), requests.fileno()):
                        os.write(descriptor, struct.pack("!i", 1000) + b"j")
            time.sleep(600)
    return "done"


def refused(lane: WorkerProcess[str, str], task: str) -> bool:
    with pytest.raises(InvariantError, match=r"PermissionError|Operation not permitted|Permission denied"):
        lane.call(task)
    return True


@pytest.mark.slow
@pytest.mark.skipif(landlock_abi() < 6, reason="this kernel has no Landlock of ABI 6")
def test_a_confined_worker_sees_its_own(tmp_path: Path) -> None:
    secret, scratch = tmp_path / "secret", tmp_path / "scratch"
    secret.write_text("s")
    scratch.mkdir()
    limits = WorkerLimits(scratch=scratch, readable=readable_by_builds())
    lane = WorkerProcess(outside, timeout_s=60.0, limits=limits, forked=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert refused(lane, f"connect {server.getsockname()[1]}")
    for task in (
        f"read {secret}",
        f"thread {secret}",
        f"read /proc/{os.getpid()}/environ",
        f"write {secret}",
        f"write {tmp_path / 'new'}",
        f"write {scratch / 'new'}",
        f"signal {os.getpid()}",
        "read /etc/passwd",
        f"program {secret}",
    ):
        assert refused(lane, task)
    assert lane.call(f"read {Path(outside.__code__.co_filename).parents[3] / 'hwspecs' / 'cpu-x86-avx2.yaml'}")
    assert lane.call("read /proc/cpuinfo")
    assert secret.read_text() == "s"
    lane.close()
    assert not list(scratch.iterdir())


@pytest.mark.skipif(landlock_abi() < 6, reason="this kernel has no Landlock of ABI 6")
def test_a_confined_worker_has_no_descriptors_of_the_fork_server(tmp_path: Path) -> None:
    lane = WorkerProcess(outside, timeout_s=60.0, limits=WorkerLimits(scratch=tmp_path, readable=readable_by_builds()), forked=True)
    assert set(lane.call("descriptors").split()) <= {"/dev/null", "socket"}
    lane.close()


@pytest.mark.slow
@pytest.mark.skipif(landlock_abi() < 6, reason="this kernel has no Landlock of ABI 6")
def test_a_worker_that_keeps_its_supervisor_busy_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = WorkerProcess(outside, timeout_s=60.0, limits=WorkerLimits(scratch=tmp_path, readable=readable_by_builds()), forked=True)
    lane.call("")
    monkeypatch.setattr(lane, "_timeout_s", 1.0)
    monkeypatch.setattr(workers_module, "GRACE_S", 1.0)
    pids = [lane._pid, lane._process.pid if lane._process else 0]
    with pytest.raises((BuildServiceError, KernelTimeoutError)):
        lane.call("busy")
    lane.close(kill=True)
    wait_until(lambda: all(is_gone(pid) for pid in pids))


def is_gone(pid: int) -> bool:
    """Whether a process has ended, though its parent may not have looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_temporary_files_go_with_their_worker(tmp_path: Path) -> None:
    lane = WorkerProcess(work, timeout_s=60.0, limits=WorkerLimits(scratch=tmp_path))
    for end in ("on", "die", "bug"):
        file = Path(lane.call("folder"))
        assert file.is_relative_to(tmp_path)
        if end != "on":
            with pytest.raises((BuildServiceError, InvariantError)):
                lane.call(end)
            assert not file.exists()
    lane.close()
    assert not list(tmp_path.iterdir())


def test_a_tainted_worker_takes_no_other_task() -> None:
    lane = WorkerProcess(work, timeout_s=60.0, taints=lambda task: task == "pid")
    first = lane.call("pid")
    assert not Path("/proc", first).exists()
    assert lane.call("on") == "ON"
    assert lane.call("pid") != first
    lane.close()


@pytest.mark.slow
def test_no_task_is_lost_with_the_fork_server() -> None:
    lane, other = (WorkerProcess(work, timeout_s=60.0, forked=True) for _ in range(2))
    server = parent_of(lane.call("pid"))
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(lane.call, "nap")
        time.sleep(0.2)
        os.kill(server, signal.SIGKILL)
        assert parent_of(other.call("pid")) != server
        assert under_way.result() == "NAP"
    assert lane.call("on") == "ON"
    for one in (lane, other):
        one.close()


def parent_of(pid: str) -> int:
    return int(Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
def test_sending_to_a_stopped_worker_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = WorkerProcess(work, timeout_s=60.0)
    os.kill(int(lane.call("pid")), signal.SIGSTOP)
    monkeypatch.setattr(lane, "_timeout_s", 1.0)
    monkeypatch.setattr(workers_module, "GRACE_S", 0.0)
    with pytest.raises(BuildServiceError) as lost:
        lane.call("x" * (1 << 24))  # more than a socket's buffer takes
    assert lost.value.code == "worker-lost"
    lane.close()


def test_a_worker_bears_the_name_of_its_work(lane: WorkerProcess[str, str]) -> None:
    assert lane.call("name") == "work"


def test_a_worker_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = (
        "import os, sys\nfrom tests.unit.farm.test_workers import work\n"
        "from roller_svc.farm.workers import WorkerProcess\n"
        "if __name__ == '__main__':\n"
        "    lane = WorkerProcess(work, 60.0)\n    print(lane.call('pid'), flush=True)\n    lane.call('hang')\n"
    )
    (tmp_path / "main.py").write_text(script)
    paths = os.pathsep.join(sys.path)
    command = [sys.executable, str(tmp_path / "main.py")]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        worker = int(server.stdout.readline())
        assert not is_gone(worker)
        server.kill()
    wait_until(lambda: is_gone(worker))


def test_memory_is_limited() -> None:
    lane = WorkerProcess(work, timeout_s=60.0, limits=WorkerLimits(memory_bytes=1 << 30))
    with pytest.raises(BuildError) as refused:
        lane.call("hoard")
    assert refused.value.code == "out-of-memory"
    assert lane.call("on") == "ON"
    lane.close()


def test_addresses_that_are_only_reserved_are_not_memory() -> None:
    """As CUDA reserves them, for all that a device and the host could have."""
    lane = WorkerProcess(work, timeout_s=60.0, limits=WorkerLimits(memory_bytes=1 << 30))
    assert lane.call("reserve") == str(1 << 40)
    lane.close()


def test_threads_share_no_worker() -> None:
    lanes = WorkerPool(work, timeout_s=60.0)
    assert lanes.call("on") == "ON"
    lanes.close()


def test_tasks_are_spread_over_workers() -> None:
    found = dict(map_unordered(work, ["a", "fail", "b", "die", "c"], jobs=2, timeout_s=60.0))
    assert {task: found[task] for task in "abc"} == {"a": "A", "b": "B", "c": "C"}
    assert isinstance(found["fail"], CompileError)
    assert isinstance(found["die"], BuildServiceError)


def test_a_temporary_directory_with_too_long_a_path_is_refused_with_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = MAX_SOCKET_PATH_BYTES - len(SOCKET_BELOW_TEMPORARY_DIRECTORY)
    monkeypatch.setattr("tempfile.tempdir", "/" + "t" * longest)
    with pytest.raises(ArgumentError, match=f"at most {longest} bytes, got {longest + 1}") as raised:
        WorkerPool(abs, 60.0)
    assert "TMPDIR" in str(raised.value.hint)
    monkeypatch.setattr("tempfile.tempdir", "/" + "t" * (longest - 1))
    WorkerPool(abs, 60.0)


def test_the_longest_temporary_directory_fits_the_socket() -> None:
    """A service in a process of its own whose TMPDIR is as long as allowed builds."""
    longest = MAX_SOCKET_PATH_BYTES - len(SOCKET_BELOW_TEMPORARY_DIRECTORY)
    with tempfile.TemporaryDirectory(prefix="roller-") as base:
        folder = Path(base, "t" * (longest - len(base) - 1))
        folder.mkdir()
        code = "from roller_svc.farm.workers import *; p = WorkerPool(abs, 60); print(p.call(-7)); p.close(kill=True)"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"TMPDIR": str(folder)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.stdout == "7\n", done.stderr
