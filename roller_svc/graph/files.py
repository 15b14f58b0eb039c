"""Read files of models. They are untrusted: only regular files inside the model's folder, of limited size."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from roller_svc.errors import ArgumentError

MAX_FILE_BYTES = 1 << 36


def read_file(path: Path, limit_bytes: int) -> bytes:
    """Return a regular file's bytes. A symbolic link is followed. Raises ArgumentError if it cannot be read."""
    return _read(path, 0, None, limit_bytes)


def read_part(folder: Path, location: str, offset_bytes: int, length_bytes: int) -> bytes:
    """Return a part of a file in the folder or below.

    Raises:
        ArgumentError: the path leaves the folder, also by a symbolic link, the file is not a regular file, or it is too
            short.
    """
    try:
        root = folder.resolve(strict=True)
        path = (root / location).resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as error:  # no such file, a zero byte, a circle of links
        raise _external(f"file {location[:200]!r} of external data cannot be read: {error}") from error
    if Path(location).is_absolute() or not path.is_relative_to(root):
        raise _external(f"file {location[:200]!r} of external data is outside the model's folder")
    return _read(path, offset_bytes, length_bytes, MAX_FILE_BYTES)


def _read(path: Path, offset_bytes: int, length_bytes: int | None, limit_bytes: int) -> bytes:
    """Return `length_bytes` of a file; all of it if the length is None."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO does not block
    try:
        descriptor = os.open(path, flags if length_bytes is None else flags | os.O_NOFOLLOW)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ArgumentError(f"{path} cannot be read: {reason}", code="unreadable-file") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise ArgumentError(f"{path} is not a regular file", code="unreadable-file")
    with os.fdopen(descriptor, "rb") as file:
        length = status.st_size if length_bytes is None else length_bytes
        if status.st_size > limit_bytes:
            raise ArgumentError(f"{path} has {status.st_size} bytes, at most {limit_bytes} are read", code="unreadable-file")
        if offset_bytes + length > status.st_size:
            raise _external(f"{path} has {status.st_size} bytes; a tensor is said to end at {offset_bytes + length}")
        file.seek(offset_bytes)
        content = file.read(length)
    if len(content) != length:
        raise ArgumentError(f"{path} became shorter while it was read", code="unreadable-file")
    return content


def _external(message: str) -> ArgumentError:
    return ArgumentError(message, code="external-data")
