"""Named objects in a folder, in an S3 bucket or in memory: the store's port to obstore.

An object is written whole. A reader of a whole object sees an old content or a new one, never a part. A failure is a
StoreError; only an object that does not exist is missing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING

from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError, UnknownConfigurationKeyError
from obstore.store import LocalStore, MemoryStore, ObjectStore, S3Store

from roller_svc.errors import ArgumentError, StoreError

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig

MEMORY = "memory:"
S3_PREFIX = "s3://"
ALLOW_HTTP = "allow_http"  # option of clients of S3
LEFTOVER_S = 3600.0  # after which a temporary file belongs to nobody
CHECKED_NAME = "tmp/writable"  # of the object that shows that a store without a folder is writable
_BUCKET_AND_PREFIX = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/([A-Za-z0-9!_.*'()/-]*))?")
_STAGED_FILE = re.compile(r".+#\d+")  # obstore's name of a file that it is writing
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_RETRIES, _RETRIES_S, _REQUEST_S, _CONNECT_S = 4, 20, 60, 5  # of requests to S3

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object's name, size and time of writing by the clock of the store."""

    name: str
    size_bytes: int
    write_time_s: float
    version: str  # differs after each write


class Objects:
    """Objects in S3 or in memory."""

    part_bytes = 1 << 20  # of content that is read in parts: each is a request

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def read(self, name: str) -> bytes | None:
        """Return the content, or None if there is no object of that name."""
        try:
            with _as_store_error("read"):
                return bytes(self._store.get(name).bytes())
        except FileNotFoundError:
            return None

    def read_range(self, name: str, start: int, length: int) -> bytes | None:
        """Return `length` bytes of the content, fewer at its end; None if there is no object of that name."""
        try:
            with _as_store_error("read"):
                return bytes(self._store.get_range(name, start=start, length=length))
        except FileNotFoundError:
            return None

    def info(self, name: str) -> ObjectInfo | None:
        """Return an object's description, or None if there is none of that name."""
        try:
            with _as_store_error("read"):
                return _to_info(self._store.head(name))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write an object, or replace it; it is durable when this returns."""
        with _as_store_error("write to"):
            self._store.put(name, content)

    def create(self, name: str, content: bytes) -> bool:
        """Write an object unless there is one of that name; return whether it was written."""
        try:
            with _as_store_error("write to"):
                self._store.put(name, content, mode="create")
        except AlreadyExistsError:
            return False
        except NotSupportedError:  # a server without conditional writes: the last of several writers wins
            if self.info(name) is not None:
                return False
            self.write(name, content)
        return True

    def note(self, name: str, content: bytes = b"") -> None:
        """Write an object whose loss in a crash does no harm."""
        with _as_store_error("write to"):
            self._store.put(name, content)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with a prefix, which ends with a slash."""
        with _as_store_error("read"):
            for batch in self._store.list(prefix.rstrip("/")):
                yield from map(_to_info, batch)

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects, those that are missing included: several by one request."""
        several = list(names)
        if several:
            with contextlib.suppress(FileNotFoundError), _as_store_error("remove from"):
                self._store.delete(several if len(several) > 1 else several[0])

    @contextlib.contextmanager
    def spool(self) -> Iterator[tuple[IO[bytes], Path]]:
        """Give a local file for content that arrives in parts; it is removed at the end."""
        with _as_store_error("write to"), tempfile.NamedTemporaryFile(prefix="roller-blob-") as file:
            yield file, Path(file.name)

    def move_in(self, path: Path, name: str) -> None:
        """Make a local file the content of an object; the file may be gone afterwards."""
        with _as_store_error("write to"):
            self._store.put(name, path)

    def check_writable(self, min_free_bytes: int = 0) -> None:
        """Write a byte. Raises StoreError if that fails, or if there is less free space where uploads arrive."""
        self.write(CHECKED_NAME, b"1")
        self._check_free(min_free_bytes)

    def free_bytes(self) -> int:
        """Return the free space where uploads arrive."""
        with _as_store_error("read"):
            return shutil.disk_usage(self._disk).free

    @property
    def _disk(self) -> Path:
        return Path(tempfile.gettempdir())

    def _check_free(self, min_free_bytes: int) -> None:
        free_bytes = self.free_bytes()
        if free_bytes < min_free_bytes:
            raise StoreError(f"the store's disk has {free_bytes} bytes left, less than {min_free_bytes}", code="store-full")

    def remove_leftovers(self) -> None:
        """Remove unfinished files of writers that were killed."""

    def remove_staged(self) -> None:
        """Do the same for all names, which takes as long as listing them."""


class FolderObjects(Objects):
    """Objects that are files below a folder. Temporary files are in `tmp`."""

    part_bytes = 1 << 18

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            for folder in ("tmp", "set-aside"):
                (root / folder).mkdir(parents=True, exist_ok=True)
        except OSError as failure:  # names the path, as only who opens the store reads it
            raise StoreError(f"cannot make a store in {root}: {failure.strerror}") from failure
        with _as_store_error("make"):
            super().__init__(LocalStore(root.absolute()))

    def read(self, name: str) -> bytes | None:
        """Read the file in this thread: a cached compile reads several, and obstore passes each to a thread pool."""
        with _as_store_error("read"), contextlib.suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return (self.root / name).read_bytes()
        return None

    def read_range(self, name: str, start: int, length: int) -> bytes | None:
        with (
            _as_store_error("read"),
            contextlib.suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError),
            (self.root / name).open("rb", buffering=0) as file,
        ):
            return os.pread(file.fileno(), length, start)
        return None

    def info(self, name: str) -> ObjectInfo | None:
        with _as_store_error("read"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = (self.root / name).stat()
            if stat.S_ISREG(found.st_mode):
                return ObjectInfo(name, found.st_size, found.st_mtime, f"{found.st_ino} {found.st_mtime_ns}")
        return None

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError), _as_store_error("remove from"):
                self._store.delete(name)

    def write(self, name: str, content: bytes) -> None:
        self._free(name)
        super().write(name, content)
        self._flush(name)

    def create(self, name: str, content: bytes) -> bool:
        self._free(name)
        is_new = super().create(name, content)
        if is_new:
            self._flush(name)
        return is_new

    @contextlib.contextmanager
    def spool(self) -> Iterator[tuple[IO[bytes], Path]]:
        with _as_store_error("write to"):  # a full disk also fails the end of the inner block
            handle, temporary = tempfile.mkstemp(dir=self.root / "tmp")
            try:
                with os.fdopen(handle, "wb") as file:
                    yield file, Path(temporary)
            finally:
                Path(temporary).unlink(missing_ok=True)

    def move_in(self, path: Path, name: str) -> None:
        self._free(name)
        with _as_store_error("write to"):
            _sync(path)
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
            _sync(target.parent)

    def check_writable(self, min_free_bytes: int = 0) -> None:
        with _as_store_error("write to"), tempfile.TemporaryFile(dir=self.root / "tmp", buffering=0) as probe:
            probe.write(b"1")
        self._check_free(min_free_bytes)

    @property
    def _disk(self) -> Path:
        return self.root

    def remove_leftovers(self) -> None:
        _remove_old((self.root / "tmp").glob("*"))

    def remove_staged(self) -> None:
        for folder, _, names in os.walk(self.root):
            _remove_old(Path(folder, name) for name in names if _STAGED_FILE.fullmatch(name))

    def _flush(self, name: str) -> None:
        """Flush a file and its directory, without which a rename is not durable."""
        with _as_store_error("write to"):
            path = self.root / name
            with contextlib.suppress(FileNotFoundError):  # a collection has removed it meanwhile
                _sync(path)
            _sync(path.parent)

    def _free(self, name: str) -> None:
        """Move away a directory that has the name of a file."""
        path = self.root / name
        if path.is_dir():
            log.warning("%s is a directory: it is set aside", path)
            with _as_store_error("write to"):
                path.rename(tempfile.mkdtemp(prefix=f"{path.name}-", dir=self.root / "set-aside"))


def _remove_old(paths: Iterable[Path]) -> None:
    newest_s = time.time() - LEFTOVER_S
    for path in paths:
        with contextlib.suppress(OSError):  # a leftover does no harm
            if path.stat().st_mtime < newest_s:
                path.unlink()


def open_objects(location: str, options: Mapping[str, str]) -> Objects:
    """Open a folder, `s3://BUCKET/PREFIX` or `memory:`. Raises ArgumentError for another location.

    Args:
        location: of the objects.
        options: obstore's for S3, by its names; others are read from AWS_* environment variables.
    """
    if location == MEMORY:
        return Objects(MemoryStore())
    if not location.startswith(S3_PREFIX):
        if re.match(r"[a-z0-9+.-]+://", location):
            raise ArgumentError(
                f"ROLLER_STORE {location!r}: expected a folder, s3://BUCKET/PREFIX or {MEMORY}", code="invalid-setting"
            )
        return FolderObjects(Path(location))
    match = _BUCKET_AND_PREFIX.fullmatch(location)
    if match is None:
        raise ArgumentError(f"ROLLER_STORE {location!r}: expected s3://BUCKET/PREFIX", code="invalid-setting")
    client: ClientConfig = {
        "timeout": timedelta(seconds=_REQUEST_S),
        "connect_timeout": timedelta(seconds=_CONNECT_S),
        "allow_http": options.get(ALLOW_HTTP) == "true",
    }
    try:
        bucket = S3Store(
            match[1],
            prefix=match[2] or None,
            config={name: value for name, value in options.items() if name != ALLOW_HTTP},  # type: ignore[arg-type]  # obstore checks the keys
            client_options=client,
            retry_config={"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRIES_S)},
        )
    except (BaseError, UnknownConfigurationKeyError) as failure:
        raise ArgumentError(f"the store {location} cannot be opened: {_first_line(failure)}", code="invalid-setting") from failure
    return Objects(bucket)


def _to_info(meta: ObjectMeta) -> ObjectInfo:
    write_time, e_tag = meta["last_modified"], meta["e_tag"]
    return ObjectInfo(meta["path"], meta["size"], write_time.timestamp(), f"{e_tag} {write_time}")


@contextlib.contextmanager
def _as_store_error(verb: str) -> Iterator[None]:
    """Raise StoreError for a failure of the store, without its paths. Pass on what callers handle."""
    try:
        yield
    except (AlreadyExistsError, NotSupportedError):
        raise
    except OSError as failure:
        is_obstores = isinstance(failure, FileNotFoundError) and failure.errno is None
        if is_obstores and verb != "write to":
            raise
        reason = "no such bucket or folder" if is_obstores else failure.strerror or str(failure)
        raise StoreError(f"cannot {verb} the store: {reason}") from failure
    except BaseError as failure:
        log.warning("cannot %s the store: %s", verb, _first_line(failure))
        number = _OS_ERROR.search(str(failure))
        reason = os.strerror(int(number[1])) if number else "the object store did not answer, or refused"
        raise StoreError(f"cannot {verb} the store: {reason}") from failure


def _first_line(failure: Exception) -> str:
    return (str(failure).strip().splitlines() or [type(failure).__name__])[0]


def _sync(path: Path) -> None:
    """Flush a file or a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
