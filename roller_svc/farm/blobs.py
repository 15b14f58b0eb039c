"""Blobs of a store: read in parts, and checked against their hashes as the bytes pass, or once for a time.

The result of a check is remembered for the version of the object that it read, so an object that was written again is
checked again. A damaged blob counts as missing from then on.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from dataclasses import dataclass

from roller_svc.compiler.estimates.cache import ENTRY_BYTES, LruCache
from roller_svc.errors import StoreError
from roller_svc.farm.objects import ObjectInfo, Objects

BLOBS = "cas/sha256"
DAMAGED = "damaged-blob"  # code of the error
SMALL_BYTES = 1 << 20  # a hit checks the hash of a blob of this size, and only the size of a larger one
REMEMBER_S = 600.0  # after which an intact blob is checked again
SETTLED_S = 2.0  # age of an object from which its version tells any change: clocks of file systems are coarse
MAX_BYTES = 8 << 20  # of memory for the checks
HEX_DIGEST = re.compile(r"[0-9a-f]{64}")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Check:
    """Whether a version of an object had its hash, and when that was checked."""

    version: str
    is_intact: bool
    time_s: float


class BlobReader:
    """Gives the content of a blob in parts, the last one only if the whole has the blob's hash."""

    def __init__(self, blobs: Blobs, digest: str, info: ObjectInfo) -> None:
        self.size_bytes = info.size_bytes
        self._blobs = blobs
        self._digest = digest
        self._info = info
        self._offset = 0
        self._hash = hashlib.sha256()
        self._first = self._next_part()

    def read(self) -> bytes:
        """Return the next part; empty at the end. Raises StoreError if the blob is damaged or was removed."""
        part, self._first = self._first, b""
        return part or self._next_part()

    def close(self) -> None:
        """Drop what was read ahead. No file is open between two parts."""
        self._first = b""

    def _next_part(self) -> bytes:
        wanted = min(self._blobs.objects.part_bytes, self.size_bytes - self._offset)
        part = self._blobs.objects.read_range(blob_name(self._digest), self._offset, wanted) if wanted else b""
        if part is None:
            raise StoreError(f"the blob sha256:{self._digest} was removed while it was read", code="damaged-blob")
        self._hash.update(part)
        self._offset += len(part)
        is_last = len(part) < wanted or self._offset == self.size_bytes
        if is_last and not self._blobs.remember(self._info, is_intact=self._hash.hexdigest() == self._digest):
            raise StoreError(f"the blob sha256:{self._digest} does not match its hash", code="damaged-blob")
        return part


class Blobs:
    """The blobs among a store's objects. Threads may use it."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self._checks: LruCache[str, _Check] = LruCache(MAX_BYTES)

    def info(self, digest: str) -> ObjectInfo | None:
        """Return the description of a blob's object, or None if there is none; its content is not checked."""
        return self.objects.info(blob_name(digest)) if HEX_DIGEST.fullmatch(digest) else None

    def open(self, digest: str) -> BlobReader | None:
        """Begin to read a blob; None if it is missing or known to be damaged. One of a single part is checked now."""
        info = self.info(digest)
        if info is None or self._known(info) is False:
            return None
        try:
            return BlobReader(self, digest, info)
        except StoreError as error:
            if error.code != DAMAGED:
                raise
            return None

    def is_intact(self, digest: str) -> bool:
        """Whether a blob has its hash: by reading it, unless that was done for this version of the object."""
        info = self.info(digest)
        known = None if info is None else self._known(info)
        return info is not None and (self._read_all(digest) if known is None else known)

    def is_there(self, digest: str, size_bytes: object) -> bool:
        """Whether a blob exists with this size, if that is given, and is not known to be damaged. A small one is read."""
        info = self.info(digest)
        if info is None or size_bytes not in (None, info.size_bytes):
            return False
        known = self._known(info)
        if known is None and info.size_bytes <= SMALL_BYTES:
            return self._read_all(digest)
        return known is not False

    def remember(self, info: ObjectInfo, *, is_intact: bool) -> bool:
        """Note whether an object has its hash; return that."""
        if not is_intact:
            log.error("the blob %s does not match its hash: it counts as missing until it is written again", info.name)
        if not is_intact or time.time() - info.write_time_s > SETTLED_S:
            self._checks.put(info.name, _Check(info.version, is_intact, time.monotonic()), ENTRY_BYTES)
        return is_intact

    def _known(self, info: ObjectInfo) -> bool | None:
        """Return whether this version of an object has its hash; None if that is not known."""
        check = self._checks.get(info.name)
        if check is None or check.version != info.version:
            return None
        return None if check.is_intact and time.monotonic() - check.time_s > REMEMBER_S else check.is_intact

    def _read_all(self, digest: str) -> bool:
        reader = self.open(digest)
        try:
            while reader is not None and reader.read():
                pass
        except StoreError as error:
            if error.code != DAMAGED:
                raise
            return False
        return reader is not None


def blob_name(digest: str) -> str:
    """Return the name of a blob's object."""
    return f"{BLOBS}/{digest[:2]}/{digest}"
