"""Sandbox a process and its children: files, network, other processes, resources, lifetime of the parent.

Landlock and seccomp are kernel features that need no privilege, container or other program. Imported from its folder, or
run by path, under `python -I -S` this module is the launcher of compilers: it restricts itself, then becomes the command.
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
from _collections_abc import Iterable, Sequence  # collections.abc imports collections, which takes milliseconds

LAUNCH_FAILED = 127  # exit status of a shell that finds no command

# <linux/prctl.h>, <linux/landlock.h>, <signal.h>: the same numbers on every machine of _MACHINES.
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
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
_SCOPE_SOCKETS, _SCOPE_SIGNALS = 0b01, 0b10  # abstract UNIX sockets, signals: since ABI 6

# machine → its name in audit records, and the column of its numbers in the tables of calls
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_X32 = 0x40000000  # marks calls of the x32 ABI on x86-64, which have other numbers
_ABSENT = 0xFFFFFFFF  # the number of a call that a machine does not have
_Calls = dict[str, tuple[int, int]]
_DENIED_CALLS: _Calls = {
    # the network
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    # memory and descriptors of other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
    # memory that no limit of the process counts, or that stays behind
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195),
    "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "mq_open": (240, 180), "mq_unlink": (241, 181),
    # scheduling of other processes
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    # owners, modes, times and attributes of files, which Landlock does not restrict
    "chmod": (90, _ABSENT), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, _ABSENT), "lchown": (94, _ABSENT), "fchown": (93, 55), "fchownat": (260, 54),
    "utime": (132, _ABSENT), "utimes": (235, _ABSENT), "futimesat": (261, _ABSENT), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    # watches of files, of which a user has few
    "inotify_init": (253, _ABSENT), "inotify_init1": (294, 26), "fanotify_init": (300, 262),
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
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "syslog": (103, 116),
    # keys
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
}  # fmt: skip
_GROUP_CALLS: _Calls = {"setpgid": (109, 154), "setsid": (112, 157)}
_UNTRUSTED_CALLS: _Calls = {
    **_GROUP_CALLS,
    # processes and signals
    "fork": (57, _ABSENT), "vfork": (58, _ABSENT), "execve": (59, 221), "execveat": (322, 281),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
    # writes that /proc/PID/io does not count
    "fallocate": (285, 47), "splice": (275, 76), "tee": (276, 77), "vmsplice": (278, 75), "io_setup": (206, 0),
}  # fmt: skip
_CLONE, _CLONE3, _CAPSET = (56, 220), (435, 435), (126, 91)
_CLONE_THREAD, _CLONE_NEW_ANY = 0x10000, 0x7E020000  # the latter: CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET
_AF_UNIX, _MAP_SHARED = 1, 1
_F_SETOWN_EX, _FIOSETOWN, _SIOCSPGRP, _TIOCSTI, _TIOCLINUX = 15, 0x8901, 0x8902, 0x5412, 0x541C
_CAPABILITY_VERSION, _CAP_DAC_OVERRIDE = 0x20080522, 1 << 1

# What one argument of a call may be: the call, the argument's place, a mask of its lower half, whether it must (True) or
# must not (False) have one of the values. A tuple, because `typing` takes milliseconds to import.
_Rule = tuple[tuple[int, int], int, int, bool, tuple[int, ...]]
_ALL_BITS = 0xFFFFFFFF
_RULES: tuple[_Rule, ...] = (
    ((53, 199), 0, _ALL_BITS, True, (_AF_UNIX,)),  # socketpair
    ((302, 261), 0, _ALL_BITS, True, (0,)),  # prlimit: of its own process
    ((203, 122), 0, _ALL_BITS, True, (0,)),  # sched_setaffinity: of its own thread
    (_CLONE, 0, _CLONE_NEW_ANY, True, (0,)),
)

# Instructions of classic BPF, and return values of a filter (<linux/bpf_common.h>, <linux/seccomp.h>).
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_NUMBER_AT, _MACHINE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16  # in struct seccomp_data; low half of the argument
_ALLOW, _KILL, _DENY = 0x7FFF0000, 0x80000000, 0x00050000

_Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, value


def restrict_self(readable: Sequence[str], writable: Sequence[str], *, signals: bool = False) -> tuple[str, ...]:
    """Restrict this process and its children permanently. Returns the active layers: "landlock-7", "seccomp".

    Files beneath `readable` may be read and executed, those beneath `writable` also changed; others cannot be opened.
    Open files stay open. Missing paths and layers that the kernel lacks are skipped. Sockets except pairs of UNIX
    sockets, and other processes' memory, are denied with EPERM. Capabilities are dropped, except to access files.
    `signals`: whether it may signal processes that are not restricted.

    Raises RuntimeError if the process has other threads, which the kernel would not restrict.
    """
    if threads := _other_threads():
        raise RuntimeError(
            f"restrict_self needs a process with one thread, this one has {threads} more: call it before they start "
            "(importing numpy starts some)"
        )
    abi = landlock_abi()
    in_force = {
        f"landlock-{abi}": _prctl(_PR_SET_NO_NEW_PRIVS, 1) and _restrict_files(abi, readable, writable, signals=signals),
        "seccomp": _install(_deny_filter(_DENIED_CALLS, _RULES, no_clone3=True)),
    }
    _drop_capabilities()
    return tuple(layer for layer, active in in_force.items() if active)


def landlock_abi() -> int:
    """Return the kernel's Landlock ABI, at most the newest one known here; 0 for none."""
    return min(max(_syscall(_LANDLOCK_CREATE_RULESET, b"", 0, _CREATE_RULESET_VERSION), 0), _NEWEST_ABI)


def stay_in_group() -> bool:
    """Prevent this process and its children from leaving their process group, so that killing it ends them all."""
    return _install(_deny_filter(_GROUP_CALLS))


def forbid_processes(*, shared_memory: bool) -> bool:
    """Prevent this process from starting or signalling others, and from disarming what ends it. Threads may start.

    Call it after restrict_self. Returns whether the filter is active. `shared_memory`: whether it may map memory that
    RLIMIT_DATA does not count.
    """
    own = (os.getpid(),)
    owner_commands = (fcntl.F_SETOWN, _F_SETOWN_EX, fcntl.F_SETSIG, fcntl.F_SETLEASE, fcntl.F_NOTIFY)
    rules: list[_Rule] = [
        (_CLONE, 0, _CLONE_THREAD, True, (_CLONE_THREAD,)),
        ((62, 129), 0, _ALL_BITS, True, own),  # kill
        ((234, 131), 0, _ALL_BITS, True, own),  # tgkill
        ((157, 167), 0, _ALL_BITS, False, (_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE)),  # prctl
        ((72, 25), 1, _ALL_BITS, False, owner_commands),  # fcntl
        ((16, 29), 1, _ALL_BITS, False, (_FIOSETOWN, _SIOCSPGRP, _TIOCSTI, _TIOCLINUX)),  # ioctl
    ]
    if not shared_memory:
        rules.append(((9, 222), 3, _MAP_SHARED, True, (0,)))  # mmap
    return _install(_deny_filter(_UNTRUSTED_CALLS, rules))


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


def _restrict_files(abi: int, readable: Sequence[str], writable: Sequence[str], *, signals: bool) -> bool:
    scopes = _SCOPE_SOCKETS | (0 if signals else _SCOPE_SIGNALS)
    supported = sum(rights for since, rights in _RIGHTS_SINCE if abi >= since)
    attributes = struct.pack("=QQQ", supported, _TCP if abi >= 4 else 0, scopes if abi >= 6 else 0)
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


def _deny_filter(calls: _Calls, rules: Iterable[_Rule] = (), *, no_clone3: bool = False) -> list[_Instruction]:
    """Return a filter that denies those calls, and others by rules; empty for unsupported machines."""
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
    if no_clone3:
        # Filters cannot read clone3's flags. Without clone3 the C library starts threads with clone.
        program += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _DENY | errno.ENOSYS)]
    for numbers, argument, mask, wanted, values in rules:
        # Each value jumps behind the denial if it is wanted, else to it.
        after = [len(values) - place - (not wanted) for place in range(len(values))]
        tests = [(_EQUAL, jump, 0, value) for jump, value in zip(after, values, strict=True)]
        if not wanted:
            tests[-1] = (_EQUAL, 0, 1, values[-1])
        check = [(_LOAD, 0, 0, _FIRST_ARGUMENT_AT + 8 * argument), (_AND, 0, 0, mask), *tests, deny]
        program += [(_EQUAL, 0, len(check), numbers[column]), *check, (_LOAD, 0, 0, _NUMBER_AT)]
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


def _drop_capabilities() -> None:
    """Drop the capabilities of a privileged user, except the access to files, which Landlock restricts."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    _, column = _MACHINES.get(os.uname().machine, (0, -1))
    for files in (_CAP_DAC_OVERRIDE, 0) if column >= 0 else ():
        if _syscall(_CAPSET[column], header, struct.pack("=6I", files, files, 0, 0, 0, 0)) == 0:
            return


def _other_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task")) - 1  # noqa: PTH208 - pathlib is slow to import
    except OSError:  # no /proc, or restricted already
        return 0


# the launcher of compilers --------------------------------------------------------------------------------------------


def main(words: list[str]) -> int:
    """Restrict this process by the arguments up to "--", then become the command after them.

    Arguments are NAME=VALUE: parent (a process), pipe (a descriptor), readable and writable (paths), RLIMIT_... (a
    number), variable (NAME=VALUE, of the command: this process must obey none of them).
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
    environment = dict(word.split("=", 1) for word in arguments.pop("variable", []))
    # Reset signals that the interpreter ignores, because the command would inherit that.
    for number in (_SIGPIPE, _SIGXFSZ):
        ctypes.CDLL(None).signal(number, None)
    limit_self((getattr(resource, name), int(value)) for name, (value,) in arguments.items())
    try:
        os.execve(words[end + 1], words[end + 1 :], environment)
    except OSError as error:
        sys.stderr.write(f"{words[end + 1]} cannot be started: {error}\n")
    return LAUNCH_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
