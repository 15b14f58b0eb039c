"""Run a call in a fork of this process first: machine code that crashes or does not return ends the fork alone.

The fork shares the memory of this process until it writes, so that weights are not copied.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import time
from collections.abc import Callable

_POLL_S = 0.05  # at most, between looks at the fork


def find_fatal_end(call: Callable[[], object], limit_s: float) -> str:
    """Return how a call ends the process that makes it; "" if it returns or raises.

    A call that takes longer than `limit_s` counts as one that does not return. Where no process can be made, nothing is
    found: a confined worker makes none, and ends alone.
    """
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
            os._exit(0)  # an exception is found by the call that follows here
    end_s, pause_s = time.monotonic() + limit_s, 1e-4
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return f"a call ends the process by {signal.Signals(-code).name}" if code < 0 else ""
        if time.monotonic() > end_s:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"a call does not return within {limit_s:.3g} s"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _POLL_S)
