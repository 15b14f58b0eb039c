"""Content-addressed store: immutable blobs, and names that point to a manifest of them.

    cas/sha256/ab/<hex>    a blob, named by the hash of its content
    ac/<action digest>     hash of the manifest of an action's result
    kernels/<digest>       hash of the manifest of a kernel
    models/<digest>        hash of the manifest of a model
    uploads/<hex>          empty: a client has sent this blob
    derived/<digest>.<kind>  hash of a listing (PTX, SASS) of a kernel, and the tool that made it
    pins/<hex>             empty: collections keep the kernel, model or upload of this digest
    used/, writers/, collecting/  see store_uses.py and store_lock.py

Its objects are files below a folder, or are in S3 or in memory (objects.py). Blobs are written before the names that
point to them, and each object is written at once, so a name that resolves is complete. Every read of a blob checks its
hash (blobs.py): a missing, truncated or changed blob makes its name a miss, and the next build repairs it. A hit looks
at the sizes of large blobs only. Processes may write concurrently. An object that exists but cannot be read is a
StoreError, never a miss.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from roller_svc.compiler.action import SCHEMA
from roller_svc.errors import ArgumentError, StoreError, UnknownKernelError
from roller_svc.farm.blobs import HEX_DIGEST, BlobReader, Blobs, blob_name
from roller_svc.farm.objects import FolderObjects, open_objects
from roller_svc.farm.store_lock import Writing, writing
from roller_svc.farm.store_uses import UseLog

Json = dict[str, object]
KERNELS, MODELS, ACTIONS, UPLOADS, DERIVED, PINS = "kernels", "models", "ac", "uploads", "derived", "pins"
MAX_CHECKED = 10_000  # manifests

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuildStage:
    """A stage of a build: when it began, in seconds since 1970, and how long it took."""

    name: str
    start_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Artifact:
    """The result of an action: facts as JSON, and files by kind (source, binary, metadata, ...)."""

    digest: str  # of the kernel or model: sha256:<hex>
    facts: Json
    files: Mapping[str, bytes]
    folder: str = KERNELS  # of the store, for the artifact's name
    stages: tuple[BuildStage, ...] = ()  # of its build, for logs and traces; they are not stored


class BlobWriter:
    """A blob that arrives in parts."""

    def __init__(self, file: IO[bytes], digest: str, place: Callable[[], None]) -> None:
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
            raise ArgumentError(f"the content has the digest sha256:{given}, not sha256:{self._digest}", code="wrong-digest")
        with _as_store_error():
            self._file.flush()
        self._place()


class Store:
    """The store at a location.

    Args:
        location: a folder, `s3://BUCKET/PREFIX` or `memory:`.
        options: for S3; see `open_objects`.
        is_result: whether a manifest has the facts and files of a result; one without them is a miss.
    """

    def __init__(
        self,
        location: str | Path,
        options: Mapping[str, str] | None = None,
        is_result: Callable[[Json], bool] = lambda _: True,
    ) -> None:
        self.objects = open_objects(str(location), options or {})
        self._is_result = is_result
        self._is_usable: dict[bytes, bool] = {}  # manifests that were checked, by their pointers
        self.blobs = Blobs(self.objects)
        self.uses = UseLog(self.objects)

    @property
    def folder(self) -> Path | None:
        """The folder of the store; None for another kind of store."""
        return self.objects.root if isinstance(self.objects, FolderObjects) else None

    # ------------------------------------------------------------------ blobs

    def put(self, content: bytes) -> str:
        """Write a blob and return its hash in hex."""
        digest = hashlib.sha256(content).hexdigest()
        if not self.blobs.is_intact(digest):
            self.objects.write(blob_name(digest), content)
        return digest

    def get(self, digest: str) -> bytes | None:
        """Return a blob, or None if it is missing or does not match its hash."""
        if not HEX_DIGEST.fullmatch(digest):
            return None
        content = self.objects.read(blob_name(digest))
        if content is None or hashlib.sha256(content).hexdigest() != digest:
            return None
        return content

    def has(self, digest: str) -> bool:
        """Whether a blob of that hash is there; its content is not checked."""
        return self.blobs.info(digest) is not None

    def put_upload(self, content: bytes) -> str:
        """Write a client's blob and return its hash in hex."""
        digest = hashlib.sha256(content).hexdigest()
        name = f"{UPLOADS}/{digest}"
        if not (self.uses.is_recent(name) and self.blobs.is_intact(digest)):
            with writing(self.objects):
                self.put(content)
                self._name_upload(digest)
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
        with writing(self.objects) as right:
            return self._publish(action, artifact, right)

    def _publish(self, action: str, artifact: Artifact, right: Writing) -> Json:
        files = {kind: self.put(content) for kind, content in artifact.files.items()}
        document = {"schema": SCHEMA, "digest": artifact.digest, "facts": artifact.facts, "files": files}
        document["sizes"] = {kind: len(content) for kind, content in artifact.files.items()}
        if artifact.folder != KERNELS:
            document["folder"] = artifact.folder
        manifest = self.put(_to_bytes(document)).encode()
        right.check()
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
        """Return the facts of an action's result, or None unless it is complete and intact."""
        return self._result(action, self._manifest)

    def find_result(self, action: str) -> Json | None:
        """Return the facts of an action's result for a hit: None unless it is complete. Large files are not read."""
        return self._result(action, self._complete_manifest)

    def _result(self, action: str, read_manifest: Callable[[bytes], Json | None]) -> Json | None:
        bare = _hex_digest(action)
        pointer = self.objects.read(f"{ACTIONS}/{bare}") if HEX_DIGEST.fullmatch(bare) else None
        manifest = None if pointer is None else read_manifest(pointer)
        if manifest is None:
            return None
        name = _result_name(manifest)
        own = None if name is None else self.objects.read(name)
        if name is None or own is None or (own != pointer and read_manifest(own) is None):
            return None
        self.uses.note(name)
        return _mapping(manifest["facts"])

    def kernel(self, digest: str) -> Json | None:
        """Return the facts of a kernel, or None unless it is complete."""
        manifest = self._kernel(digest)
        return None if manifest is None else _mapping(manifest["facts"])

    def model(self, digest: str) -> Json | None:
        """Return the facts of a model, or None unless it is complete."""
        manifest = self._complete(MODELS, digest)
        return None if manifest is None else _mapping(manifest["facts"])

    def file(self, digest: str, kind: str) -> bytes | None:
        """Return a file of a kernel, or None if there is none of this kind."""
        blob = self._file_digest(digest, kind)
        return None if blob is None else self.get(blob)

    def open_file(self, digest: str, kind: str) -> BlobReader | None:
        """Begin to read a file of a kernel; None if there is none of this kind."""
        blob = self._file_digest(digest, kind)
        return None if blob is None else self.blobs.open(blob)

    def files(self, digest: str) -> dict[str, bytes]:
        """Return all files of a kernel by kind; empty if there is no such kernel."""
        contents = {kind: self.file(digest, kind) for kind in self.kinds(digest)}
        return {kind: content for kind, content in contents.items() if content is not None}

    def kinds(self, digest: str) -> tuple[str, ...]:
        """Return the kinds of files that a kernel has."""
        manifest = self._kernel(digest)
        return () if manifest is None else tuple(_mapping(manifest["files"]))

    # ----------------------------------------------------------------- copies

    def contents(self, name: str) -> tuple[bytes | None, dict[str, bytes]]:
        """Return what an action's, kernel's or model's name refers to, and its blobs; None if it is not complete."""
        pointer = self.objects.read(name)
        digests = None if pointer is None else self.blobs_of(name, pointer)
        blobs = {digest: self.get(digest) for digest in digests or ()}
        complete = {digest: content for digest, content in blobs.items() if content is not None}
        return (pointer, complete) if digests and len(complete) == len(blobs) else (None, {})

    def result_digest(self, action_name: str) -> str | None:
        """Return the digest, in hex, of the result that `ac/<digest>` refers to."""
        manifest = self._resolve(action_name)
        return None if manifest is None else _hex_digest(str(manifest["digest"]))

    def result_name(self, pointer: bytes) -> str | None:
        """Return the name of the kernel or model whose manifest an action refers to."""
        manifest = self._document(pointer)
        return None if manifest is None else _result_name(manifest)

    def blobs_of(self, name: str, content: bytes) -> list[str] | None:
        """Return the digests of the blobs that a name of this content refers to; None if its manifest is missing."""
        folder, _, rest = name.partition("/")
        match folder:
            case "ac" | "kernels" | "models":
                manifest = self._document(content)
                return None if manifest is None else [content.decode(), *map(str, _mapping(manifest["files"]).values())]
            case "derived":
                return [str((parse_json(content) or {}).get("blob"))]
            case "uploads":
                return [rest]
            case _:
                return []

    def adopt(self, name: str, pointer: bytes) -> bool:
        """Write a name of another store, whose blobs were put under the same `writing`; return whether it is complete.

        A complete one that is there already stays.
        """
        manifest = self._manifest(pointer)
        folder, _, digest = name.partition("/")
        if manifest is None or (folder != ACTIONS and _hex_digest(str(manifest["digest"])) != digest):
            return False
        if not self.objects.create(name, pointer) and not self.is_complete(name):
            self.objects.write(name, pointer)
        return self.is_complete(name)

    # --------------------------------------------------------------- listings

    def put_derived(self, digest: str, kind: str, tool: str, content: bytes) -> None:
        """Store a listing that a tool made of a kernel; replace the previous one of that kind."""
        with writing(self.objects):
            self.objects.write(_derived(digest, kind), _to_bytes({"tool": tool, "blob": self.put(content)}))

    # ------------------------------------------------------------------- pins

    def pin(self, digest: str) -> None:
        """Keep a kernel, model or upload in collections. Raises UnknownKernelError if there is none."""
        bare = _hex_digest(digest)
        with writing(self.objects):
            names = [f"{folder}/{bare}" for folder in (KERNELS, MODELS, UPLOADS)] if HEX_DIGEST.fullmatch(bare) else []
            if not any(self.objects.info(name) for name in names):
                raise UnknownKernelError(f"no kernel, model or upload {digest[:80]}")
            self.objects.write(f"{PINS}/{bare}", b"")

    def unpin(self, digest: str) -> None:
        """Undo `pin`."""
        bare = _hex_digest(digest)
        if HEX_DIGEST.fullmatch(bare):
            self.objects.remove([f"{PINS}/{bare}"])

    def pins(self) -> list[str]:
        """Return the digests that are pinned."""
        return sorted(f"sha256:{info.name.removeprefix(f'{PINS}/')}" for info in self.objects.list(f"{PINS}/"))

    def derived(self, digest: str, kind: str, tool: str) -> bytes | None:
        """Return the listing that the tool made of a kernel; None if it is missing or of another tool."""
        blob = self._derived_digest(digest, kind, tool)
        return None if blob is None else self.get(blob)

    def open_derived(self, digest: str, kind: str, tool: str) -> BlobReader | None:
        """Begin to read the listing that `derived` returns."""
        blob = self._derived_digest(digest, kind, tool)
        return None if blob is None else self.blobs.open(blob)

    def _derived_digest(self, digest: str, kind: str, tool: str) -> str | None:
        if not HEX_DIGEST.fullmatch(_hex_digest(digest)):
            return None
        entry = parse_json(self.objects.read(_derived(digest, kind))) or {}
        blob = entry.get("blob")
        return blob if entry.get("tool") == tool and isinstance(blob, str) else None

    def is_complete(self, name: str) -> bool:
        """Whether an action's, kernel's, model's, upload's or listing's name has all that it refers to, intact."""
        folder, _, rest = name.partition("/")
        if folder == ACTIONS:
            return self.action_result(rest) is not None
        content = self.objects.read(name)
        digests = None if content is None else self.blobs_of(name, content)
        return digests is not None and all(map(self.blobs.is_intact, digests))

    # ---------------------------------------------------------------- details

    def _take_upload(self, path: Path, digest: str) -> None:
        with writing(self.objects):
            self.objects.move_in(path, blob_name(digest))
            self._name_upload(digest)

    def _name_upload(self, digest: str) -> None:
        self.objects.write(f"{UPLOADS}/{digest}", b"")
        self.uses.write(f"{UPLOADS}/{digest}")

    def _kernel(self, digest: str) -> Json | None:
        return self._complete(KERNELS, digest)

    def _complete(self, folder: str, digest: str) -> Json | None:
        """Return the manifest of a kernel or a model, if it is complete."""
        bare = _hex_digest(digest)
        pointer = self.objects.read(f"{folder}/{bare}") if HEX_DIGEST.fullmatch(bare) else None
        manifest = None if pointer is None else self._complete_manifest(pointer)
        if manifest is not None:
            self.uses.note(f"{folder}/{bare}")
        return manifest

    def _file_digest(self, digest: str, kind: str) -> str | None:
        manifest = self._kernel(digest)
        blob = None if manifest is None else _mapping(manifest["files"]).get(kind)
        return blob if isinstance(blob, str) else None

    def _resolve(self, name: str) -> Json | None:
        """Return the manifest that a name points to, if all of its blobs are intact."""
        pointer = self.objects.read(name)
        return None if pointer is None else self._manifest(pointer)

    def _manifest(self, pointer: bytes) -> Json | None:
        """Return the manifest of a pointer, if all of its blobs are intact."""
        manifest = self._document(pointer)
        blobs = [] if manifest is None else _mapping(manifest["files"]).values()
        return manifest if all(isinstance(blob, str) and self.blobs.is_intact(blob) for blob in blobs) else None

    def _complete_manifest(self, pointer: bytes) -> Json | None:
        """Return the manifest of a pointer, if all of its blobs are there. Those of earlier versions have no sizes."""
        manifest = self._document(pointer)
        if manifest is None:
            return None
        sizes = _mapping(manifest.get("sizes"))
        files = _mapping(manifest["files"])
        is_complete = all(isinstance(blob, str) and self.blobs.is_there(blob, sizes.get(kind)) for kind, blob in files.items())
        return manifest if is_complete else None

    def _document(self, pointer: bytes) -> Json | None:
        """Return the manifest of a pointer, whose blobs are not checked."""
        manifest = parse_json(self.get(pointer.decode("ascii", "replace")))
        return None if manifest is None or not self._check_manifest(pointer, manifest) else manifest

    def _check_manifest(self, pointer: bytes, manifest: Json) -> bool:
        """Whether a manifest is one of a result. That is remembered, because what its hash names never changes."""
        if pointer not in self._is_usable:
            if len(self._is_usable) >= MAX_CHECKED:
                self._is_usable.clear()
            self._is_usable[pointer] = is_usable = _is_manifest(manifest) and self._is_result(manifest)
            if not is_usable:
                log.warning("the manifest %s is of another version or of no result: it is ignored", pointer.decode())
        return self._is_usable[pointer]


def _result_name(manifest: Json) -> str | None:
    digest = _hex_digest(str(manifest["digest"]))
    return f"{MODELS if manifest.get('folder') == MODELS else KERNELS}/{digest}" if HEX_DIGEST.fullmatch(digest) else None


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
    return document.get("schema") == SCHEMA and isinstance(digest, str) and isinstance(facts, dict) and isinstance(files, dict)


def parse_json(content: bytes | None) -> Json | None:
    """Return a JSON object; None for other content."""
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
