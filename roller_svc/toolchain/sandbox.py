"""Sandbox a process and its children: files, network, other processes, resources, lifetime of the parent.

Landlock and seccomp are kernel features that need no privilege, container or other program. Run by path under
`python -I -S` this module is the launcher of compilers: it restricts itself, then becomes the command.
It uses little of the standard library and nothing else, so that it starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import select
import struct
import sys
from collections.abc import Iterable, Sequence

LAUNCH_FAILED = 127  # exit status of a shell that finds no command

# <linux/prctl.h>, <linux/landlock.h>, <signal.h>: the same numbers on every machine of _MACHINES.
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_SIGKILL, _SIGPIPE, _SIGXFSZ = 9, 13, 25
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_CREATE_RULESET_VERSION, _RULE_PATH_BENEATH = 1, 1
_NEWEST_ABI = 7  # later ones add nothing that is used here

# Landlock's rights over files, and the ABI that introduced them.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_CHANGE_DIRECTORY = 0x1FF0  # remove and make entries of every kind
_REFER, _TRUNCATE, _IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15
_RIGHTS_SINCE = (
    (1, _EXECUTE | _WRITE_FILE | _READ_FILE | _READ_DIR | _CHANGE_DIRECTORY), (2, _REFER), (3, _TRUNCATE),
    (5, _IOCTL_DEVICE),
)  # fmt: skip
_READING = _EXECUTE | _READ_FILE | _READ_DIR
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_TCP = 0b11  # bind, connect: since ABI 4
_SCOPES = 0b11  # abstract UNIX sockets, signals: since ABI 6

# machine → its name in audit records, and the column of its numbers in _REFUSED_CALLS
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_X32 = 0x40000000  # marks calls of the x32 ABI on x86-64, which have other numbers
_DENIED_CALLS = {
    # the network
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    # memory and descriptors of other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    # calls that bypass filters
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    # the kernel itself
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
    # keys
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
}  # fmt: skip
_SOCKETPAIR, _PRLIMIT, _CLONE, _CLONE3 = (53, 199), (302, 261), (56, 220), (435, 435)
_GROUP_CALLS = {"setpgid": (109, 154), "setsid": (112, 157)}
_AF_UNIX = 1
_CLONE_NEW_ANY = 0x7E020000  # CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET

# Instructions of classic BPF, and return values of a filter (<linux/bpf_common.h>, <linux/seccomp.h>).
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _MACHINE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16  # in struct seccomp_data; low half of the argument
_ALLOW, _KILL, _DENY = 0x7FFF0000, 0x80000000, 0x00050000

_Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, value


def restrict_self(readable: Sequence[str], writable: Sequence[str]) -> tuple[str, ...]:
    """Restrict this process and its children permanently. Returns the active layers: "landlock-7", "seccomp".

    Files beneath `readable` may be read and executed, those beneath `writable` also changed; others cannot be opened.
    Open files stay open. Missing paths and layers that the kernel lacks are skipped. Sockets except pairs of UNIX
    sockets, and other processes' memory, are denied with EPERM.

    Raises RuntimeError if the process has other threads, which the kernel would not restrict.
    """
    if threads := _other_threads():
        raise RuntimeError(
            f"restrict_self needs a process with one thread, this one has {threads} more: call it before they start "
            "(importing numpy starts some)"
        )
    abi = landlock_abi()
    in_force = {
        f"landlock-{abi}": _prctl(_PR_SET_NO_NEW_PRIVS, 1) and _restrict_files(abi, readable, writable),
        "seccomp": _install(_deny_filter(_DENIED_CALLS)),
    }
    return tuple(layer for layer, active in in_force.items() if active)


def landlock_abi() -> int:
    """Return the kernel's Landlock ABI, at most the newest one known here; 0 for none."""
    return min(max(_syscall(_LANDLOCK_CREATE_RULESET, b"", 0, _CREATE_RULESET_VERSION), 0), _NEWEST_ABI)


def stay_in_group() -> bool:
    """Prevent this process and its children from leaving their process group, so that killing it ends them all."""
    return _install(_deny_filter(_GROUP_CALLS))


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when the thread that started it ends.

    That thread must live as long as this process is needed. Children do not inherit the setting.
    """
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the setting took effect
        os._exit(LAUNCH_FAILED)


def die_with_pipe(descriptor: int) -> None:
    """Let the kernel kill this process when the last writer of the pipe closes it or dies.

    If it leads a process group, the whole group is killed: a compiler's driver and the programs that it runs. The
    setting lasts while any of them has the reading end open. Nothing may be written to the pipe.
    """
    group = os.getpid() == os.getpgrp()
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, _SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, -os.getpid() if group else os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(descriptor, 0)
    if poll.poll(0):  # the writer closed it before the setting took effect
        os._exit(LAUNCH_FAILED)


def limit_self(limits: Iterable[tuple[int, int]]) -> None:
    """Set soft and hard resource limits. Lower existing limits stay."""
    for kind, value in limits:
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


# Landlock -------------------------------------------------------------------------------------------------------------


def _restrict_files(abi: int, readable: Sequence[str], writable: Sequence[str]) -> bool:
    supported = sum(rights for since, rights in _RIGHTS_SINCE if abi >= since)
    attributes = struct.pack("=QQQ", supported, _TCP if abi >= 4 else 0, _SCOPES if abi >= 6 else 0)
    rules = _syscall(_LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
    if rules < 0:
        return False
    try:
        for paths, rights in ((readable, supported & _READING), (writable, supported)):
            for path in paths:
                _allow(rules, path, rights)
        return _syscall(_LANDLOCK_RESTRICT_SELF, rules, 0) == 0
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # missing or inaccessible
        return
    try:
        if not os.path.isdir(descriptor):  # noqa: PTH112 - of a descriptor
            rights &= _FILE_RIGHTS
        _syscall(_LANDLOCK_ADD_RULE, rules, _RULE_PATH_BENEATH, struct.pack("=Qi", rights, descriptor), 0)
    finally:
        os.close(descriptor)


# seccomp --------------------------------------------------------------------------------------------------------------


def _deny_filter(calls: dict[str, tuple[int, int]]) -> list[_Instruction]:
    """Return a filter that denies those calls, with rules for their arguments; empty for unsupported machines."""
    machine = os.uname().machine
    if machine not in _MACHINES:
        return []
    audit, column = _MACHINES[machine]
    deny = (_RETURN, 0, 0, _DENY | errno.EPERM)
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _MACHINE_AT), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER_AT),
    ]  # fmt: skip
    if machine == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    for numbers in calls.values():
        program += [(_EQUAL, 0, 1, numbers[column]), deny]
    if calls is _DENIED_CALLS:
        # Filters cannot read clone3's flags. Without clone3 the C library starts threads with clone.
        program += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _DENY | errno.ENOSYS)]
        for numbers, test in (
            (_SOCKETPAIR, (_EQUAL, 0, 1, _AF_UNIX)),
            (_PRLIMIT, (_EQUAL, 0, 1, 0)),  # its own process
            (_CLONE, (_ANY_BIT, 1, 0, _CLONE_NEW_ANY)),
        ):
            program += [(_EQUAL, 0, 4, numbers[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT_AT), test]
            program += [(_RETURN, 0, 0, _ALLOW), deny]
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def _install(program: list[_Instruction]) -> bool:
    """Install a filter. Returns whether it is active."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in program))
    head = struct.pack("@HP", len(program), ctypes.addressof(code))
    return bool(program) and _prctl(_PR_SET_NO_NEW_PRIVS, 1) and _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, head)


# system calls ---------------------------------------------------------------------------------------------------------


def _prctl(option: int, value: int, data: bytes | None = None) -> bool:
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_ulong)
    return bool(prctl(option, value, data, 0, 0) == 0)


def _syscall(number: int, *arguments: int | bytes) -> int:
    """Return a system call's result, negative for an error. Empty bytes are a null pointer."""
    syscall = ctypes.CDLL(None).syscall
    syscall.restype = ctypes.c_long
    c_arguments = (ctypes.c_long(a) if isinstance(a, int) else ctypes.c_char_p(a or None) for a in arguments)
    return int(syscall(ctypes.c_long(number), *c_arguments))


def _other_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task")) - 1  # noqa: PTH208 - pathlib is slow to import
    except OSError:  # no /proc, or restricted already
        return 0


# the launcher of compilers --------------------------------------------------------------------------------------------


def main(words: list[str]) -> int:
    """Restrict this process by the arguments up to "--", then become the command after them.

    Arguments are NAME=VALUE: parent (a process), pipe (a descriptor), readable and writable (paths), RLIMIT_... (a
    number).
    """
    end = words.index("--")
    arguments: dict[str, list[str]] = {}
    for word in words[:end]:
        name, _, value = word.partition("=")
        arguments.setdefault(name, []).append(value)
    die_with_pipe(int(arguments.pop("pipe")[0]))
    die_with_parent(int(arguments.pop("parent")[0]))
    layers = restrict_self(arguments.pop("readable", []), arguments.pop("writable", []))
    if landlock_abi() and not any(layer.startswith("landlock") for layer in layers):
        sys.stderr.write("the kernel has Landlock, but cannot restrict this process further\n")
        return LAUNCH_FAILED
    stay_in_group()
    # Reset signals that the interpreter ignores, because the command would inherit that.
    for number in (_SIGPIPE, _SIGXFSZ):
        ctypes.CDLL(None).signal(number, None)
    limit_self((getattr(resource, name), int(value)) for name, (value,) in arguments.items())
    try:
        os.execv(words[end + 1], words[end + 1 :])
    except OSError as error:
        sys.stderr.write(f"{words[end + 1]} cannot be started: {error}\n")
    return LAUNCH_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
