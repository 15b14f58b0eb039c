"""Content-addressed store: immutable blobs, and names that point to a manifest of them.

    cas/sha256/ab/<hex>    a blob, named by the hash of its content
    ac/<action digest>     hash of the manifest of an action's result
    kernels/<digest>       hash of the manifest of a kernel
    models/<digest>        hash of the manifest of a model
    uploads/<hex>          empty: a client has sent this blob
    derived/<digest>.<kind>  hash of a listing (PTX, SASS) of a kernel, and the tool that made it

Its objects are files below a folder, or are in S3 or in memory (objects.py). Blobs are written before the names that
point to them, and each object is written at once, so a name that resolves is complete. Every read checks the hash: a
missing, truncated or changed blob makes its name a miss, and the next build repairs it. Processes may write
concurrently. An object that exists but cannot be read is a StoreError, never a miss.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from roller_svc.compiler.action import SCHEMA
from roller_svc.errors import ArgumentError, StoreError
from roller_svc.farm.objects import FolderObjects, open_objects

Json = dict[str, object]
KERNELS, MODELS, ACTIONS, UPLOADS, DERIVED = "kernels", "models", "ac", "uploads", "derived"
BLOBS = "cas/sha256"
_HEX = re.compile(r"[0-9a-f]{64}")

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
        with _as_store_error():
            self._file.write(part)
        self._hash.update(part)
        self.size_bytes += len(part)

    def finish(self) -> None:
        """Move the content to its place; it is durable when this returns. Raises ArgumentError for another hash."""
        given = self._hash.hexdigest()
        if given != self._digest:
            raise ArgumentError(
                f"the content has the digest sha256:{given}, not sha256:{self._digest}", code="wrong-digest"
            )
        with _as_store_error():
            self._file.flush()
        self._place()


class Store:
    """The store at a location.

    Args:
        location: a folder, `s3://BUCKET/PREFIX` or `memory:`.
        options: for S3; see `open_objects`.
    """

    def __init__(self, location: str | Path, options: Mapping[str, str] | None = None) -> None:
        self.objects = open_objects(str(location), options or {})

    @property
    def folder(self) -> Path | None:
        """The folder of the store; None for another kind of store."""
        return self.objects.root if isinstance(self.objects, FolderObjects) else None

    # ------------------------------------------------------------------ blobs

    def put(self, content: bytes) -> str:
        """Write a blob and return its hash in hex."""
        digest = hashlib.sha256(content).hexdigest()
        if self.get(digest) is None:
            self.objects.write(_blob(digest), content)
        return digest

    def get(self, digest: str) -> bytes | None:
        """Return a blob, or None if it is missing or does not match its hash."""
        if not _HEX.fullmatch(digest):
            return None
        content = self.objects.read(_blob(digest))
        if content is None or hashlib.sha256(content).hexdigest() != digest:
            return None
        return content

    def has(self, digest: str) -> bool:
        """Whether a blob of that hash is there; its content is not checked."""
        return bool(_HEX.fullmatch(digest)) and self.objects.info(_blob(digest)) is not None

    def put_upload(self, content: bytes) -> str:
        """Write a client's blob and return its hash in hex."""
        digest = self.put(content)
        self.objects.note(f"{UPLOADS}/{digest}")
        return digest

    @contextlib.contextmanager
    def receive(self, digest: str) -> Iterator[BlobWriter]:
        """Write a client's blob in parts. It replaces a damaged one, and is in the store once `finish` returns.

        Without `finish`, the parts are removed at the end.
        """
        with self.objects.spool() as (file, path):
            yield BlobWriter(file, digest, lambda: self._take_upload(path, digest))

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
        manifest = self.put(_to_bytes(document)).encode()
        name = f"{artifact.folder}/{_hex_digest(artifact.digest)}"
        if not self.objects.create(name, manifest) and self._resolve(name) is None:
            self.objects.write(name, manifest)  # repairs it; what a digest names never changes otherwise
        action_name = f"{ACTIONS}/{_hex_digest(action)}"
        if not self.objects.create(action_name, manifest):
            published = self.action_result(action)
            if published is not None:
                return published
            self.objects.write(action_name, manifest)
        return artifact.facts

    def action_result(self, action: str) -> Json | None:
        """Return the facts of an action's result, or None unless it is complete."""
        bare = _hex_digest(action)
        pointer = self.objects.read(f"{ACTIONS}/{bare}") if _HEX.fullmatch(bare) else None
        manifest = None if pointer is None else self._manifest(pointer)
        if manifest is None:
            return None
        digest = _hex_digest(str(manifest["digest"]))
        name = f"{MODELS if manifest.get('folder') == MODELS else KERNELS}/{digest}"
        if not _HEX.fullmatch(digest):
            return None
        own = self.objects.read(name)
        if own is None or (own != pointer and self._manifest(own) is None):
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
        self.objects.write(_derived(digest, kind), _to_bytes({"tool": tool, "blob": self.put(content)}))

    def derived(self, digest: str, kind: str, tool: str) -> bytes | None:
        """Return the listing that the tool made of a kernel; None if it is missing or of another tool."""
        if not _HEX.fullmatch(_hex_digest(digest)):
            return None
        entry = _parse_json(self.objects.read(_derived(digest, kind))) or {}
        blob = entry.get("blob")
        return self.get(blob) if entry.get("tool") == tool and isinstance(blob, str) else None

    # ---------------------------------------------------------------- details

    def _take_upload(self, path: Path, digest: str) -> None:
        self.objects.move_in(path, _blob(digest))
        self.objects.note(f"{UPLOADS}/{digest}")

    def _kernel(self, digest: str) -> Json | None:
        bare = _hex_digest(digest)
        return self._resolve(f"{KERNELS}/{bare}") if _HEX.fullmatch(bare) else None

    def _resolve(self, name: str) -> Json | None:
        """Return the manifest that a name points to, if all of its blobs are intact."""
        pointer = self.objects.read(name)
        return None if pointer is None else self._manifest(pointer)

    def _manifest(self, pointer: bytes) -> Json | None:
        """Return the manifest of a pointer, if all of its blobs are intact."""
        manifest = _parse_json(self.get(pointer.decode("ascii", "replace")))
        if manifest is None:
            return None
        if not _is_manifest(manifest):
            log.warning("the manifest %s is of another version: it is ignored", pointer.decode())
            return None
        blobs = _mapping(manifest["files"]).values()
        return manifest if all(isinstance(blob, str) and self.get(blob) is not None for blob in blobs) else None


def _blob(digest: str) -> str:
    return f"{BLOBS}/{digest[:2]}/{digest}"


def _derived(digest: str, kind: str) -> str:
    return f"{DERIVED}/{_hex_digest(digest)}.{kind}"


@contextlib.contextmanager
def _as_store_error() -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        raise StoreError(f"cannot write to the store: {failure.strerror or failure}") from failure


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
