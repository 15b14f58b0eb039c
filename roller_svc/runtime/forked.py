"""Run a call in a fork of this process first: machine code that crashes or does not return ends the fork alone.

The fork shares the memory of this process until it writes, so that weights are not copied.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import time
from collections.abc import Callable

_POLL_S = 0.05  # at most, between looks at the fork
_RETURNED = b"."  # what the fork writes after the call
_UNKNOWN = 256  # no exit code


def find_fatal_end(call: Callable[[], object], limit_s: float) -> str:
    """Return how a call ends the process that makes it; "" if it returns or raises.

    A call that takes longer than `limit_s` counts as one that does not return. Where no process can be made, nothing is
    found: a confined worker makes none, and ends alone.
    """
    try:
        reader, writer = os.pipe()
    except OSError:
        return ""
    try:
        os.set_blocking(reader, False)
        try:
            child = os.fork()
        except OSError:
            return ""
        if child == 0:
            try:
                faulthandler.disable()  # the parent says how it ended
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                call()
            finally:
                os.write(writer, _RETURNED)
                os._exit(0)  # an exception is found by the call that follows here
        end_s, pause_s = time.monotonic() + limit_s, 1e-4
        while True:
            code = _exit_code(child, os.WNOHANG)
            if code is not None:
                return _describe_end(code, reader)
            if time.monotonic() > end_s:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                _exit_code(child, 0)
                return f"a call does not return within {limit_s:.3g} s"
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S)
    finally:
        os.close(reader)
        os.close(writer)


def _exit_code(child: int, options: int) -> int | None:
    """Return a child's exit code, _UNKNOWN if the process forgets it (it ignores SIGCHLD); None if it has not ended."""
    try:
        done, status = os.waitpid(child, options)
    except ChildProcessError:
        return _UNKNOWN
    return os.waitstatus_to_exitcode(status) if done else None


def _describe_end(code: int, reader: int) -> str:
    """Return how a fork ended. Where its exit code is not known, it has written to the pipe if the call returned."""
    if code != _UNKNOWN:
        return f"a call ends the process by {signal.Signals(-code).name}" if code < 0 else ""
    try:
        has_returned = os.read(reader, 1) == _RETURNED
    except BlockingIOError:
        has_returned = False
    return "" if has_returned else "a call ends the process"
