"""Content-addressed store on disk: immutable blobs, and names that point to a manifest of them.

    cas/sha256/ab/<hex>    a blob, named by the hash of its content
    ac/<action digest>     hash of the manifest of an action's result
    kernels/<digest>       hash of the manifest of a kernel
    models/<digest>        hash of the manifest of a model
    derived/<digest>.<kind>  hash of a listing (PTX, SASS) of a kernel, and the tool that made it
    set-aside/             directories that had the name of a file
    tmp/                   files that are being written

Blobs are written before the names that point to them, each by an atomic rename, so a name that resolves is complete.
Every read checks the hash: a missing, truncated or changed blob makes its name a miss, and the next build repairs it.
Processes may write concurrently. A file that exists but cannot be read is a StoreError, never a miss.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from roller_svc.compiler.action import SCHEMA
from roller_svc.errors import ArgumentError, StoreError

Json = dict[str, object]
KERNELS, MODELS = "kernels", "models"
_HEX = re.compile(r"[0-9a-f]{64}")
LEFTOVER_S = 3600.0  # after which a temporary file belongs to nobody

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Artifact:
    """The result of an action: facts as JSON, and files by kind (source, binary, metadata, ...)."""

    digest: str  # of the kernel or model: sha256:<hex>
    facts: Json
    files: Mapping[str, bytes]
    folder: str = KERNELS  # of the store, for the artifact's name


class BlobWriter:
    """A blob that arrives in parts."""

    def __init__(self, file: BinaryIO, digest: str, place: Callable[[], None]) -> None:
        self.size_bytes = 0
        self._file = file
        self._digest = digest
        self._place = place
        self._hash = hashlib.sha256()

    def write(self, part: bytes) -> None:
        with _as_store_error("write to"):
            self._file.write(part)
        self._hash.update(part)
        self.size_bytes += len(part)

    def finish(self) -> None:
        """Move the content to its place; it is on disk when this returns. Raises ArgumentError for another hash."""
        given = self._hash.hexdigest()
        if given != self._digest:
            raise ArgumentError(
                f"the content has the digest sha256:{given}, not sha256:{self._digest}", code="wrong-digest"
            )
        with _as_store_error("write to"):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._place()


class Store:
    def __init__(self, root: Path) -> None:
        self.root = root
        with _as_store_error("make"):
            for folder in ("cas/sha256", "ac", KERNELS, MODELS, "derived", "set-aside", "tmp"):
                (root / folder).mkdir(parents=True, exist_ok=True)

    def remove_leftovers(self) -> None:
        """Remove unfinished files of writers that were killed."""
        newest = time.time() - LEFTOVER_S
        for path in (self.root / "tmp").glob("*"):
            with contextlib.suppress(OSError):  # a leftover does no harm
                if path.stat().st_mtime < newest:
                    path.unlink()

    # ------------------------------------------------------------------ blobs

    def put(self, content: bytes) -> str:
        """Write a blob and return its hash in hex."""
        digest = hashlib.sha256(content).hexdigest()
        if self.get(digest) is None:
            self._write(self._blob(digest), content)
        return digest

    def get(self, digest: str) -> bytes | None:
        """Return a blob, or None if it is missing or does not match its hash."""
        if not _HEX.fullmatch(digest):
            return None
        content = _read(self._blob(digest))
        if content is None or hashlib.sha256(content).hexdigest() != digest:
            return None
        return content

    def has(self, digest: str) -> bool:
        """Whether a blob of that hash is there; its content is not checked."""
        with _as_store_error("read"):
            return bool(_HEX.fullmatch(digest)) and self._blob(digest).is_file()

    @contextlib.contextmanager
    def receive(self, digest: str) -> Iterator[BlobWriter]:
        """Write a blob in parts. It replaces a damaged one, and is in the store once `finish` returns.

        Without `finish`, the parts are removed at the end.
        """
        path = self._blob(digest)
        with _as_store_error("write to"):  # a full disk also fails the end of the inner block
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.root / "tmp")
            try:
                with os.fdopen(handle, "wb") as file:
                    yield BlobWriter(file, digest, lambda: self._place(Path(temporary), path))
            finally:
                Path(temporary).unlink(missing_ok=True)

    # -------------------------------------------------------------- artifacts

    def publish(self, action: str, artifact: Artifact) -> Json:
        """Write an artifact: its blobs, then the kernel's or model's name, then the action's name.

        The first complete result of an action stays. Return its facts.
        """
        published = self.action_result(action)
        if published is not None:
            return published
        files = {kind: self.put(content) for kind, content in artifact.files.items()}
        document = {"schema": SCHEMA, "digest": artifact.digest, "facts": artifact.facts, "files": files}
        if artifact.folder != KERNELS:
            document["folder"] = artifact.folder
        manifest = self.put(_to_bytes(document))
        name = self.root / artifact.folder / _hex_digest(artifact.digest)
        if self._resolve(name) is None:  # the first publication stays: digests are immutable
            self._write(name, manifest.encode())
        self._write(self.root / "ac" / _hex_digest(action), manifest.encode())
        return artifact.facts

    def action_result(self, action: str) -> Json | None:
        """Return the facts of an action's result, or None unless it is complete."""
        bare = _hex_digest(action)
        manifest = self._resolve(self.root / "ac" / bare) if _HEX.fullmatch(bare) else None
        if manifest is None:
            return None
        folder = MODELS if manifest.get("folder") == MODELS else KERNELS
        if self._artifact(folder, str(manifest["digest"])) is None:
            return None
        return _mapping(manifest["facts"])

    def kernel(self, digest: str) -> Json | None:
        """Return the facts of a kernel, or None unless it is complete."""
        manifest = self._kernel(digest)
        return None if manifest is None else _mapping(manifest["facts"])

    def file(self, digest: str, kind: str) -> bytes | None:
        """Return a file of a kernel, or None if there is none of this kind."""
        manifest = self._kernel(digest)
        blob = None if manifest is None else _mapping(manifest["files"]).get(kind)
        return self.get(blob) if isinstance(blob, str) else None

    def files(self, digest: str) -> dict[str, bytes]:
        """Return all files of a kernel by kind; empty if there is no such kernel."""
        contents = {kind: self.file(digest, kind) for kind in self.kinds(digest)}
        return {kind: content for kind, content in contents.items() if content is not None}

    def kinds(self, digest: str) -> tuple[str, ...]:
        """Return the kinds of files that a kernel has."""
        manifest = self._kernel(digest)
        return () if manifest is None else tuple(_mapping(manifest["files"]))

    # --------------------------------------------------------------- listings

    def put_derived(self, digest: str, kind: str, tool: str, content: bytes) -> None:
        """Store a listing that a tool made of a kernel; replace the previous one of that kind."""
        self._write(self._derived(digest, kind), _to_bytes({"tool": tool, "blob": self.put(content)}))

    def derived(self, digest: str, kind: str, tool: str) -> bytes | None:
        """Return the listing that the tool made of a kernel; None if it is missing or of another tool."""
        if not _HEX.fullmatch(_hex_digest(digest)):
            return None
        entry = _parse_json(_read(self._derived(digest, kind))) or {}
        blob = entry.get("blob")
        return self.get(blob) if entry.get("tool") == tool and isinstance(blob, str) else None

    def check_writable(self) -> None:
        """Write a byte to a temporary file. Raises StoreError if that fails."""
        with _as_store_error("write to"), tempfile.TemporaryFile(dir=self.root / "tmp", buffering=0) as probe:
            probe.write(b"1")

    # ---------------------------------------------------------------- details

    def _blob(self, digest: str) -> Path:
        return self.root / "cas" / "sha256" / digest[:2] / digest

    def _derived(self, digest: str, kind: str) -> Path:
        return self.root / "derived" / f"{_hex_digest(digest)}.{kind}"

    def _kernel(self, digest: str) -> Json | None:
        return self._artifact(KERNELS, digest)

    def _artifact(self, folder: str, digest: str) -> Json | None:
        bare = _hex_digest(digest)
        return self._resolve(self.root / folder / bare) if _HEX.fullmatch(bare) else None

    def _resolve(self, name: Path) -> Json | None:
        """Return the manifest that a name points to, if all of its blobs are intact."""
        pointer = _read(name)
        manifest = None if pointer is None else _parse_json(self.get(pointer.decode("ascii", "replace")))
        if manifest is None:
            return None
        if not _is_manifest(manifest):
            log.warning("%s names a manifest of another version: it is ignored", name)
            return None
        blobs = _mapping(manifest["files"]).values()
        return manifest if all(isinstance(blob, str) and self.get(blob) is not None for blob in blobs) else None

    def _write(self, path: Path, content: bytes) -> None:
        """Write a file atomically; it is on disk when this returns."""
        with _as_store_error("write to"):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.root / "tmp")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                self._place(Path(temporary), path)
            finally:
                Path(temporary).unlink(missing_ok=True)

    def _place(self, temporary: Path, path: Path) -> None:
        """Rename a complete file; the new name is on disk when this returns."""
        if path.is_dir():
            self._set_directory_aside(path)
        temporary.replace(path)
        _sync_directory(path.parent)

    def _set_directory_aside(self, path: Path) -> None:
        """Move away a directory that has the name of a file."""
        log.warning("%s is a directory: it is set aside", path)
        path.rename(tempfile.mkdtemp(prefix=f"{path.name}-", dir=self.root / "set-aside"))


@contextlib.contextmanager
def _as_store_error(verb: str) -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        raise StoreError(f"cannot {verb} the store: {failure.strerror or failure}") from failure


def _sync_directory(folder: Path) -> None:
    """Flush a directory, without which a rename is not durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(path: Path) -> bytes | None:
    """Return the content, or None if there is no file. Raises StoreError if it cannot be read."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as failure:
        raise StoreError(f"cannot read the store: {failure.strerror or failure}") from failure


def _is_manifest(document: Json) -> bool:
    """Whether a document has the fields and types of this version's manifests."""
    facts, files, digest = (document.get(field) for field in ("facts", "files", "digest"))
    return (
        document.get("schema") == SCHEMA
        and isinstance(digest, str)
        and isinstance(facts, dict)
        and isinstance(files, dict)
    )


def _parse_json(content: bytes | None) -> Json | None:
    if content is None:
        return None
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _to_bytes(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _mapping(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _hex_digest(digest: str) -> str:
    return digest.removeprefix("sha256:")
