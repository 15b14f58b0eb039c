"""Build kernels in another process of low priority, so that calls of a model keep their time meanwhile.

The process ends with the thread that started it. Its temporary files are in a folder that this process removes.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import IO, Any, TypeVar

from roller_svc.compiler.kernel_cache import KernelCache
from roller_svc.errors import BuildServiceError, RollerError
from roller_svc.fork_lock import ForkLock
from roller_svc.graph.objects import compile_objects
from roller_svc.graph.wiring.child import NICENESS, PREPARE, start_program
from roller_svc.graph.wiring.kernels import build_alternatives
from roller_svc.ir.report import BuildRequest
from roller_svc.runtime.saved.serialization import KernelBundle
from roller_svc.toolchain.sandbox import die_with_parent

_T = TypeVar("_T")
_PROGRAM = PREPARE + "from roller_svc.graph.wiring.building import answer_requests; answer_requests(int(sys.argv[2]))"
_REMOVALS, _PAUSE_S = 200, 0.01
_one_at_a_time = ForkLock()  # of a program that serves several models


class BuildingProcess:
    """A process that builds kernels. It starts when it is first needed."""

    def __init__(self) -> None:
        self._lock = RLock()  # a collected model stops its tuning in any thread, at any time
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def build(self, requests: Sequence[BuildRequest], cache: KernelCache) -> Iterator[list[KernelBundle]]:
        """Yield the fastest kernels of each request, alone. Raises BuildServiceError if the process ends before.

        The cache then has the objects of these kernels: compilers that this process starts would delay its calls.
        """
        with _one_at_a_time:
            folder = Path(tempfile.mkdtemp(prefix="roller-build-"))
            with self._at_end(_remove, folder):
                process = self._start(folder)
                try:
                    with self._at_end(_kill, process):
                        yield from self._read_answers(process, (list(requests), cache.folder))
                finally:
                    process.communicate()  # closes the pipes

    def stop(self) -> None:
        """End the process, and start no other."""
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()

    @contextmanager
    def _at_end(self, function: Callable[[_T], None], argument: _T) -> Iterator[None]:
        """Call the function when the block ends, or when the program exits: twice if it exits meanwhile."""
        owner = os.getpid()
        finalizer = weakref.finalize(self, _call_in, owner, function, argument)
        try:
            yield
        finally:
            _call_in(owner, function, argument)
            finalizer.detach()  # not before: the exit does not wait for this thread

    def _start(self, folder: Path) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_stopped:
                raise _ended()
            self._process = start_program(_PROGRAM, os.environ | {"TMPDIR": str(folder)})
            if self._is_stopped:  # meanwhile, by this thread
                self._process.kill()
            return self._process

    def _read_answers(
        self, process: subprocess.Popen[bytes], question: tuple[Sequence[BuildRequest], Path]
    ) -> Iterator[list[KernelBundle]]:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump(question, process.stdin)
            process.stdin.flush()
            for _ in question[0]:
                yield pickle.load(process.stdout)  # of a process of ours
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise _ended() from error


def _ended() -> BuildServiceError:
    return BuildServiceError("the process that builds other kernels was ended", code="compiler-killed")


def _call_in(owner: int, function: Callable[[_T], None], argument: _T) -> None:
    if os.getpid() == owner:  # not in a fork, which has the block and the finalizer too
        function(argument)


def _remove(folder: Path) -> None:
    """Remove the folder. Compilers of a killed process end a little later, and write to it until then."""
    for _ in range(_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(_PAUSE_S)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def answer_requests(parent: int) -> None:
    """Build what the standard input asks for, and write it to the standard output: the main function of the process."""
    die_with_parent(parent)
    os.nice(NICENESS)
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # prints do not mix with answers
        requests, folder = pickle.load(sys.stdin.buffer)  # of the process that started this one
        for request in requests:
            _answer(request, KernelCache(folder), answers)


def _answer(request: BuildRequest, cache: KernelCache, answers: IO[Any]) -> None:
    try:
        kernels = build_alternatives(request)
        compile_objects([each.compiled.source for each in kernels], cache)
    except (RollerError, OSError):  # its first kernel stays
        kernels = []
    pickle.dump(kernels, answers)
    answers.flush()
