"""Temporary directory of a process's workers: removed when the process ends, or by the next one if it was killed.

What is in it may be hostile: directories that are too deep for a path, or that nobody may read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "roller-farm-"
FILE_BYTES = 1 << 30  # of one file of a worker
WRITTEN_BYTES = 4 << 30  # by a worker, in all
MAX_ENTRIES = 1 << 17  # files and directories of a worker
MAX_THREADS = 4096  # of a worker
MAX_PROCESSES = 4096  # of the compilers that run for a worker: several for each of the most cores
_OWNER = "owner"  # a file that the owner keeps locked while it lives


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Create a directory for this process, and remove those of processes that ended without doing so."""
    base = Path(tempfile.gettempdir())
    _remove_orphans(base)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    handle = os.open(folder / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield folder
    finally:
        remove_tree(folder)
        os.close(handle)


def find_excess(pid: int, supervisor: int, folder: Path) -> str:
    """Return what a worker has too much of: threads, processes of compilers, bytes written or temporary files.

    "" for nothing. `supervisor` starts the compilers, each in a session that its processes cannot leave.
    """
    if _proc_field(pid, "status", "Threads") > MAX_THREADS:
        return f"more than {MAX_THREADS} threads"
    if _count_session_members(supervisor) > MAX_PROCESSES:
        return f"more than {MAX_PROCESSES} processes of compilers"
    if _proc_field(pid, "io", "wchar") > WRITTEN_BYTES:  # counts files that have no name any more
        return f"written more than {WRITTEN_BYTES} bytes"
    folders, entries, size_bytes = [folder], 0, 0
    while folders:
        try:
            with os.scandir(folders.pop()) as found:
                for entry in found:
                    entries += 1
                    if entries > MAX_ENTRIES:
                        return f"more than {MAX_ENTRIES} temporary files"
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry))
                    else:
                        size_bytes += 512 * entry.stat(follow_symlinks=False).st_blocks
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError as error:
            return f"temporary files that cannot be counted ({error.strerror})"
    return f"temporary files of more than {WRITTEN_BYTES} bytes" if size_bytes > WRITTEN_BYTES else ""


def remove_tree(folder: Path) -> None:
    """Remove a directory with all that is in it, as far as it can be removed. Follows no link.

    Directories are moved up to `folder` first, so that no path is long.
    """
    prefix = secrets.token_hex(8)
    emptied: list[Path] = []
    waiting = [] if folder.is_symlink() else [folder]
    while waiting:
        with contextlib.suppress(OSError):
            current = waiting.pop()
            current.chmod(0o700)
            if current != folder:
                current = current.rename(folder / f"{prefix}{len(emptied)}")
            emptied.append(current)
            for entry in list(os.scandir(current)):
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry))
                else:
                    Path(entry).unlink()
    for each in reversed(emptied):
        with contextlib.suppress(OSError):
            each.rmdir()


def _proc_field(pid: int, file: str, name: str) -> int:
    """Return a number that the kernel reports of a process, 0 if it does not."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/{file}").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    return 0


def _count_session_members(parent: int) -> int:
    """Return the number of processes in the sessions that children of a process lead."""
    parents: dict[int, int] = {}
    sessions: list[int] = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            fields = (path / "stat").read_bytes().rpartition(b")")[2].split()
            parents[int(path.name)] = int(fields[1])
            sessions.append(int(fields[3]))
    return sum(parents.get(session) == parent for session in sessions)


def _remove_orphans(base: Path) -> None:
    for folder in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user, or removed meanwhile
            if folder.lstat().st_uid == os.geteuid() and not _has_owner(folder):
                remove_tree(folder)


def _has_owner(folder: Path) -> bool:
    """Whether a living process owns the directory. One without the file is just being made."""
    try:
        handle = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
