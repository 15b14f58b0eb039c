"""Copy results from one store to another, through a tar file.

A member has the name and the content of the store's object. The blobs of a result precede the names that refer to them.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import tarfile
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from roller_svc.errors import ArgumentError, StoreError, UnknownKernelError
from roller_svc.farm.blobs import BLOBS, blob_name
from roller_svc.farm.store import ACTIONS, KERNELS, MODELS, Store
from roller_svc.farm.store_lock import writing

MAX_MEMBER_BYTES = 1 << 30
_BLOB = re.compile(rf"{BLOBS}/([0-9a-f]{{2}})/(\1[0-9a-f]{{62}})")
_NAME = re.compile(rf"({ACTIONS}|{KERNELS}|{MODELS})/[0-9a-f]{{64}}")


@dataclass(frozen=True, slots=True)
class Copied:
    """Number of names and bytes of blobs that were copied."""

    names: int
    size_bytes: int


def export_results(store: Store, path: Path, digests: Collection[str] = ()) -> Copied:
    """Write kernels and models with their actions to a file: those of the digests, or all if there are none.

    Raises UnknownKernelError for a digest without a complete result.
    """
    names = _chosen(store, digests)
    written: set[str] = set()
    count = size_bytes = 0
    try:
        with tarfile.open(path, "w") as archive:
            for name in names:
                pointer, blobs = store.contents(name)
                if pointer is None:  # collected or damaged meanwhile
                    continue
                for digest, content in blobs.items():
                    if digest not in written:
                        _add(archive, blob_name(digest), content)
                        written.add(digest)
                        size_bytes += len(content)
                _add(archive, name, pointer)
                count += 1
    except OSError as failure:
        raise ArgumentError(f"cannot write {path}: {failure.strerror}", code="unwritable-folder") from failure
    return Copied(count, size_bytes)


def import_results(store: Store, path: Path) -> Copied:
    """Take over what is in a file. What the store has stays. Raises ArgumentError for a file of another kind."""
    with contextlib.closing(_members(path)) as members:
        copied = list(iter(lambda: _import_next(store, path, members), None))
    return Copied(len(copied), sum(copied))


def _import_next(store: Store, path: Path, members: Iterator[tuple[str, bytes]]) -> int | None:
    """Write the next name, and its blobs as they are read; return their bytes, or None at the end."""
    size_bytes = 0
    with writing(store.objects):
        for name, content in members:
            if not _BLOB.fullmatch(name):
                if not store.adopt(name, content):
                    raise _invalid(path, f"{name} is not complete")
                return size_bytes
            if hashlib.sha256(content).hexdigest() != name.rpartition("/")[2]:
                raise _invalid(path, f"the content of {name} has another hash")
            store.put(content)
            size_bytes += len(content)
    return None


def _chosen(store: Store, digests: Collection[str]) -> list[str]:
    """Return the names of results and then of the actions that have them."""
    bare = [digest.removeprefix("sha256:") for digest in digests]
    results = [info.name for folder in (KERNELS, MODELS) for info in store.objects.list(f"{folder}/")]
    chosen = [name for name in results if not bare or name.rpartition("/")[2] in bare]
    for digest in bare:
        if not any(name.endswith(f"/{digest}") for name in chosen):
            raise UnknownKernelError(f"no kernel or model {digest[:80]}")
    of_chosen = {name.rpartition("/")[2] for name in chosen}
    actions = [info.name for info in store.objects.list(f"{ACTIONS}/")]
    return [*chosen, *(name for name in actions if store.result_digest(name) in of_chosen)]


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def _members(path: Path) -> Generator[tuple[str, bytes], None, None]:
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                is_known = _BLOB.fullmatch(member.name) or _NAME.fullmatch(member.name)
                is_plain = member.isfile() and not member.issparse()  # few bytes would become many
                file = archive.extractfile(member) if is_plain and is_known else None
                if file is None or member.size > MAX_MEMBER_BYTES:
                    raise _invalid(path, f"unexpected member {member.name[:80]!r}")
                yield member.name, file.read()
    except tarfile.TarError as failure:
        raise _invalid(path, str(failure)) from failure
    except StoreError:
        raise
    except OSError as failure:
        raise ArgumentError(f"cannot read {path}: {failure.strerror}", code="unreadable-file") from failure


def _invalid(path: Path, reason: str) -> ArgumentError:
    return ArgumentError(
        f"{path} is not a file of `roller store export`: {reason}",
        code="invalid-archive",
        hint="export it again; what was read before the fault is in the store",
    )
