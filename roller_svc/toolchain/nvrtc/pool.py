"""Worker processes that load NVRTC: started on demand, reused, replaced after a crash or a timeout."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roller_svc.errors import BuildServiceError, CompileError, KernelTimeoutError, ToolchainMissingError
from roller_svc.toolchain.nvrtc.worker import HEADER

_WORKER = Path(__file__).with_name("worker.py")
_START_TIMEOUT_S = 60.0  # reading 110 MB from a cold disk
_CRASH_GRACE_S = 5.0  # between the end of the pipe and the end of the process
_MAX_RESPONSE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Response:
    ok: bool
    error: str
    log: str
    data: bytes


class _WorkerDiedError(Exception):
    """The pipe ended inside a frame."""


class _Worker:
    """One process. Used by one thread at a time."""

    def __init__(self, library: Path, memory_bytes: int) -> None:
        self.ended = False
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        # The library opens libnvrtc-builtins in its own directory by name alone.
        environment = {"LC_ALL": "C", "LD_LIBRARY_PATH": str(library.parent)}
        # The worker is killed when the writing end closes, not when the thread that started it ends, which may be
        # earlier.
        reader, writer = os.pipe()
        self._lifetime_pipe = os.fdopen(writer, "wb")
        with os.fdopen(reader, "rb"):
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_WORKER), str(library), str(memory_bytes), str(reader)],
                start_new_session=True,
                cwd="/",
                env=environment,
                pass_fds=(reader,),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                bufsize=0,
            )
        try:
            hello, _ = self._receive(time.monotonic() + _START_TIMEOUT_S)
        except (_WorkerDiedError, TimeoutError) as failure:
            words = self.end(_CRASH_GRACE_S if isinstance(failure, _WorkerDiedError) else 0.0)
            self.check_not_killed(failure)
            raise ToolchainMissingError(f"NVRTC does not start from {library}: {words}") from None
        if "error" in hello:
            self.end()
            raise ToolchainMissingError(f"NVRTC cannot be loaded from {library}: {hello['error']}")
        self.archs = tuple(int(arch) for arch in hello["archs"])
        self.version = ".".join(str(part) for part in hello["version"])

    def request(self, request: dict[str, object], timeout_s: float) -> Response:
        """Send a request. Raises TimeoutError or _WorkerDiedError, after which the worker must be ended."""
        deadline = time.monotonic() + timeout_s
        text = json.dumps(request | {"timeout_s": timeout_s}).encode()
        try:
            self._send(HEADER.pack(len(text), 0) + text)
        except BrokenPipeError:
            raise _WorkerDiedError from None
        document, data = self._receive(deadline)
        return Response(document["ok"], document["error"], document["log"], data)

    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self, grace_s: float = 0.0) -> str:
        """Kill the worker unless it ends within `grace_s`. Returns its exit status and the end of its stderr."""
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # not reaped yet, so the id is still its own
        code = self._process.wait()
        self.ended = True
        ended = f"signal {-code}" if code < 0 else f"exit {code}"
        self._stderr.seek(0)
        text = self._stderr.read(1 << 20).decode(errors="replace").strip()
        for file in (self._process.stdin, self._process.stdout, self._stderr, self._lifetime_pipe):
            if file is not None:
                file.close()
        return f"{ended}: {text[-500:]}" if text else ended

    def check_not_killed(self, failure: Exception) -> None:
        """Raise BuildServiceError if the worker died of a SIGKILL that was not ours."""
        if isinstance(failure, _WorkerDiedError) and self._process.returncode == -signal.SIGKILL:
            raise BuildServiceError("NVRTC was killed, by a user or for lack of memory", code="compiler-killed") from None

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        view = memoryview(data)
        while view:
            view = view[self._process.stdin.write(view) or 0 :]

    def _receive(self, deadline: float) -> tuple[dict[str, Any], bytes]:
        text_size, data_size = HEADER.unpack(self._read(HEADER.size, deadline))
        if text_size + data_size > _MAX_RESPONSE_BYTES:
            raise _WorkerDiedError
        return json.loads(self._read(text_size, deadline)), self._read(data_size, deadline)

    def _read(self, size: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        parts = bytearray()
        while len(parts) < size:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1e3):
                raise TimeoutError
            part = os.read(descriptor, min(size - len(parts), 1 << 20))
            if not part:
                raise _WorkerDiedError
            parts += part
        return bytes(parts)


class WorkerPool:
    """Workers of one library and memory limit, at most one per processor. Idle ones are reused, last used first."""

    def __init__(self, library: Path, memory_bytes: int) -> None:
        self._library = library
        self._memory_bytes = memory_bytes
        self._slots = threading.Semaphore(len(os.sched_getaffinity(0)))
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []

    def describe(self) -> tuple[str, tuple[int, ...]]:
        """Return the version and the supported architectures that the library reports."""
        with self._worker() as worker:
            return worker.version, worker.archs

    def request(self, name: str, request: dict[str, object], timeout_s: float) -> Response:
        """Send one request. Raises KernelTimeoutError at a timeout and CompileError if the compiler crashes."""
        with self._worker() as worker:
            try:
                return worker.request(request, timeout_s)
            except TimeoutError:
                raise KernelTimeoutError(f"{name}: NVRTC ran longer than {timeout_s:g} s", code="compile-timeout") from None
            except _WorkerDiedError as failure:
                limit = f"its memory limit is {self._memory_bytes >> 20} MiB"
                words = worker.end(_CRASH_GRACE_S)
                worker.check_not_killed(failure)
                raise CompileError(f"{name}: NVRTC crashed ({words}); {limit}", log=words) from None

    @contextlib.contextmanager
    def _worker(self) -> Iterator[_Worker]:
        with self._slots:
            worker = self._acquire() or _Worker(self._library, self._memory_bytes)
            healthy = False
            try:
                yield worker
                healthy = True
            finally:
                # An interrupt or error may have left half a frame in the pipe.
                if healthy:
                    self._release(worker)
                elif not worker.ended:
                    worker.end()

    def _acquire(self) -> _Worker | None:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.alive():
                    return worker
                worker.end()
        return None

    def _release(self, worker: _Worker) -> None:
        with self._lock:
            self._idle.append(worker)

    def close_in(self, process_id: int) -> None:
        """End the idle workers, if this is the process that started them and not a fork of it."""
        if os.getpid() != process_id:
            return
        with self._lock:
            for worker in self._idle:
                worker.end()
            self._idle.clear()


@functools.cache
def _pool_of_process(library: Path, memory_bytes: int, process_id: int) -> WorkerPool:
    pool = WorkerPool(library, memory_bytes)
    atexit.register(pool.close_in, process_id)
    return pool


def pool_for(library: Path, memory_bytes: int) -> WorkerPool:
    """Return this process's pool. A forked child gets its own, because it must not share its parent's pipes."""
    return _pool_of_process(library, memory_bytes, os.getpid())
