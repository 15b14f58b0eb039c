"""A supervisor: a process that starts compilers for its child, which may start no process, and ends with it.

The child runs code that is not trusted. Its requests are JSON; only functions marked by `supervised` run for it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import select
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

from roller_svc.errors import BuildServiceError, RollerError
from roller_svc.toolchain.sandbox import die_with_parent

P = ParamSpec("P")
R = TypeVar("R")

MAX_REQUEST_BYTES = 64 << 20
NAME = "supervisor"  # in `ps` and `top`
_functions: dict[str, Callable[..., object]] = {}
_requests: socket.socket | None = None  # to this process's supervisor, if it has one


def supervised(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function in this process's supervisor if there is one. Its arguments are positional and JSON.

    They may come from code that is not trusted.
    """
    name = f"{function.__module__}.{function.__name__}"
    _functions[name] = function

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _requests is None:
            return function(*args, **kwargs)
        result: R = _request(_requests, name, args)
        return result

    return call


def fork_supervised(lifeline: int, private: int, restrict: Callable[[], object]) -> None:
    """Fork, and return in the child. This process supervises it, and ends as the child does, or with the lifeline.

    Args:
        lifeline: the reading end of a pipe. When its writers are gone, the child is killed.
        private: a descriptor that only the child keeps.
        restrict: restricts the supervisor, which must remain able to signal the child.

    This process must have one thread.
    """
    global _requests
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, which processes inherit, none can be waited for
    requests, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    child = os.fork()
    if child:
        own.close()
        _close_all_but(lifeline, requests.fileno())
        Path("/proc/self/comm").write_text(NAME, encoding="ascii")
        restrict()
        _supervise(child, requests, lifeline)
    die_with_parent(parent)
    requests.close()
    _close_all_but(private, own.fileno())
    _requests = own


def _close_all_but(*descriptors: int) -> None:
    """Close what this process inherited but these and the standard streams, such as pipes of the fork server."""
    for descriptor in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
        if descriptor > 2 and descriptor not in descriptors:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(descriptor)


def _request(requests: socket.socket, name: str, arguments: tuple[object, ...]) -> Any:
    """Send a request and return the result, or raise its error."""
    own, theirs = socket.socketpair()
    with own:
        with theirs:
            socket.send_fds(requests, [b"r"], [theirs.fileno()])
        own.sendall(json.dumps([name, arguments]).encode())
        own.shutdown(socket.SHUT_WR)
        with own.makefile("rb") as stream:
            answer = stream.read()
    if not answer:
        raise BuildServiceError("the compilers' supervisor gave no answer", code="worker-lost")
    result, error = pickle.loads(answer)  # of a process that is trusted more than this one
    if error is not None:
        raise error
    return result


def _supervise(child: int, requests: socket.socket, lifeline: int) -> NoReturn:
    """Answer requests until the child ends or the lifeline's writers are gone. Never returns, and waits for no answer."""
    exit_descriptor = os.pidfd_open(child)
    poll = select.poll()
    for descriptor in (exit_descriptor, lifeline, requests.fileno()):
        poll.register(descriptor, select.POLLIN)
    threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if ready & {exit_descriptor, lifeline}:
                _end_as(child)
            message, descriptors, _, _ = socket.recv_fds(requests, 1, 1)
            if not message:  # the child closed its end
                poll.unregister(requests.fileno())
            for descriptor in descriptors:
                threads.submit(_answer, descriptor)
    finally:  # whatever ended the loop
        os.kill(child, signal.SIGKILL)
        os._exit(1)


def _answer(descriptor: int) -> None:
    """Run a request and send the result or the error; nothing for a request that is malformed."""
    try:
        stream = socket.socket(fileno=descriptor)
    except OSError:  # no socket
        os.close(descriptor)
        return
    with stream, contextlib.suppress(OSError):
        with stream.makefile("rb") as requests:
            name, arguments = json.loads(requests.read(MAX_REQUEST_BYTES))
        answer: tuple[object, RollerError | None]
        try:
            answer = (_functions[name](*arguments), None)
        except RollerError as error:
            answer = (None, error.with_traceback(None))
        stream.sendall(pickle.dumps(answer))


def _end_as(child: int) -> NoReturn:
    """Kill the child and end with its exit status or signal; running compilers end with this process."""
    os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0 and -code not in (signal.SIGSTOP, signal.SIGKILL):
        signal.signal(-code, signal.SIG_DFL)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)
