"""Worker processes that hold NVRTC: started when first needed, kept, replaced when they crash or outrun their time."""

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
from roller_svc.toolchain.limits import CompileLimits
from roller_svc.toolchain.nvrtc.worker import HEADER

_WORKER = Path(__file__).with_name("worker.py")
_START_TIMEOUT_S = 60.0  # a cold disk reads 110 MB first
_CRASH_GRACE_S = 5.0  # between the end of the pipe and the end of the process
_MAX_ANSWER_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Answer:
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
        # The library opens libnvrtc-builtins beside it by name alone.
        environment = {"LC_ALL": "C", "LD_LIBRARY_PATH": str(library.parent)}
        # The worker is killed when the writing end closes. Not with the thread that starts it, which may end before it.
        reader, writer = os.pipe()
        self._life = os.fdopen(writer, "wb")
        with os.fdopen(reader, "rb"):
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_WORKER), str(library), str(memory_bytes), str(reader)],
                start_new_session=True, cwd="/", env=environment, pass_fds=(reader,), stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=self._stderr, bufsize=0,
            )  # fmt: skip
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

    def ask(self, request: dict[str, object], timeout_s: float) -> Answer:
        """Raises TimeoutError or _WorkerDiedError, after which this worker must be ended."""
        deadline = time.monotonic() + timeout_s
        text = json.dumps(request | {"timeout_s": timeout_s}).encode()
        try:
            self._send(HEADER.pack(len(text), 0) + text)
        except BrokenPipeError:
            raise _WorkerDiedError from None
        document, data = self._receive(deadline)
        return Answer(document["ok"], document["error"], document["log"], data)

    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self, grace_s: float = 0.0) -> str:
        """Kill it, unless it ends by itself within `grace_s`; how it ended and what it wrote to stderr last."""
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        code = self._process.wait()
        self.ended = True
        ended = f"signal {-code}" if code < 0 else f"exit {code}"
        self._stderr.seek(0)
        text = self._stderr.read(1 << 20).decode(errors="replace").strip()
        for file in (self._process.stdin, self._process.stdout, self._stderr, self._life):
            if file is not None:
                file.close()
        return f"{ended}: {text[-500:]}" if text else ended

    def check_not_killed(self, failure: Exception) -> None:
        """Raises BuildServiceError where a worker that has ended by itself did so by SIGKILL."""
        if isinstance(failure, _WorkerDiedError) and self._process.returncode == -signal.SIGKILL:
            raise BuildServiceError(
                "NVRTC was killed: by hand, or because the machine has no memory left", code="compiler-killed"
            ) from None

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        view = memoryview(data)
        while view:
            view = view[self._process.stdin.write(view) or 0 :]

    def _receive(self, deadline: float) -> tuple[dict[str, Any], bytes]:
        text_size, data_size = HEADER.unpack(self._read(HEADER.size, deadline))
        if text_size + data_size > _MAX_ANSWER_BYTES:
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
    """At most one worker a processor for one library and memory limit; idle ones wait, the last used goes first."""

    def __init__(self, library: Path, memory_bytes: int) -> None:
        self._library = library
        self._memory_bytes = memory_bytes
        self._slots = threading.Semaphore(len(os.sched_getaffinity(0)))
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []

    def describe(self) -> tuple[str, tuple[int, ...]]:
        """Version and supported architectures, as the library itself says them."""
        with self._worker() as worker:
            return worker.version, worker.archs

    def ask(self, name: str, request: dict[str, object], timeout_s: float) -> Answer:
        """One request. Raises KernelTimeoutError when time is up and CompileError when the compiler crashes."""
        with self._worker() as worker:
            try:
                return worker.ask(request, timeout_s)
            except TimeoutError:
                raise KernelTimeoutError(f"{name}: NVRTC ran longer than {timeout_s:g} s",
                                         code="compile-timeout") from None  # fmt: skip
            except _WorkerDiedError as failure:
                limit = f"its memory limit is {self._memory_bytes >> 20} MiB"
                words = worker.end(_CRASH_GRACE_S)
                worker.check_not_killed(failure)
                raise CompileError(f"{name}: NVRTC crashed ({words}); {limit}", log=words) from None

    @contextlib.contextmanager
    def _worker(self) -> Iterator[_Worker]:
        with self._slots:
            worker = self._take() or _Worker(self._library, self._memory_bytes)
            healthy = False
            try:
                yield worker
                healthy = True
            finally:
                # An interrupt or error may have left half a frame in the pipe.
                if healthy:
                    self._give_back(worker)
                elif not worker.ended:
                    worker.end()

    def _take(self) -> _Worker | None:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.alive():
                    return worker
                worker.end()
        return None

    def _give_back(self, worker: _Worker) -> None:
        with self._lock:
            self._idle.append(worker)

    def close_in(self, process_id: int) -> None:
        """End the idle workers, if this is the process that started them and no fork of it."""
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


def pool_for(library: Path, limits: CompileLimits) -> WorkerPool:
    """The pool of this process: a forked child must not share its parent's pipes, so it gets its own."""
    return _pool_of_process(library, limits.memory_bytes, os.getpid())
