"""PTX and SASS listings of kernels, created on first request and cached in the store."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from roller_svc import toolchain
from roller_svc.compiler.action import toolchain_versions
from roller_svc.errors import ToolchainMissingError, UnknownKernelError
from roller_svc.farm.blobs import BlobReader
from roller_svc.farm.build import BINARY, unpack
from roller_svc.farm.store import Json, Store
from roller_svc.ir.hardware import TargetKind
from roller_svc.ir.kernel import Language

MAX_RUNNING = 2  # concurrent runs of a tool


class ListingMaker(Protocol):
    """Creates one kind of listing."""

    def tool(self) -> str:
        """Return the name and version of the tool, which with the kernel determines the listing."""

    def make(self, facts: Json, files: Mapping[str, bytes]) -> str:
        """Create the listing of a kernel."""


@dataclass(frozen=True, slots=True)
class Ptx:
    """Compile a kernel's source to PTX with NVRTC."""

    def tool(self) -> str:
        versions = toolchain_versions(TargetKind.CUDA)
        return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()) if name.startswith("nvrtc"))

    def make(self, facts: Json, files: Mapping[str, bytes]) -> str:
        return toolchain.ptx(unpack(facts, dict(files)).compiled.source)


@dataclass(frozen=True, slots=True)
class Sass:
    """Disassemble a kernel's binary with nvdisasm."""

    def tool(self) -> str:
        try:
            return toolchain.disassembler_version()
        except ToolchainMissingError as missing:
            raise UnknownKernelError(f"no SASS: {missing.message}", code="no-disassembler") from missing

    def make(self, facts: Json, files: Mapping[str, bytes]) -> str:
        if not files.get(BINARY):
            raise UnknownKernelError("the kernel has no SASS: it was not compiled", code="unknown-artifact")
        return toolchain.sass_text(files[BINARY])


MAKERS: Mapping[str, ListingMaker] = {"ptx": Ptx(), "sass": Sass()}


class ListingCache:
    """Listings of the kernels of a store. Tools run in separate threads, so readers of the store do not wait."""

    def __init__(self, store: Store, makers: Mapping[str, ListingMaker] = MAKERS) -> None:
        self._store = store
        self._makers = makers
        self._threads = ThreadPoolExecutor(MAX_RUNNING, thread_name_prefix="text")
        self._lock = threading.Lock()
        self._pending: dict[tuple[str, str], Future[bytes]] = {}

    def cached(self, digest: str, kind: str) -> bytes | None:
        """Return a stored listing or None. Raises UnknownKernelError if the kernel cannot have one."""
        self._check(digest, kind)
        return self._store.derived(digest, kind, self._makers[kind].tool())

    def open(self, digest: str, kind: str) -> BlobReader | None:
        """Begin to read the listing that `cached` returns."""
        self._check(digest, kind)
        return self._store.open_derived(digest, kind, self._makers[kind].tool())

    def _check(self, digest: str, kind: str) -> None:
        """Raise UnknownKernelError if a kernel cannot have a listing."""
        facts = self._store.kernel(digest)
        if facts is None:
            raise UnknownKernelError(f"no kernel {digest[:80]}")
        language = facts["language"]
        if language != Language.CUDA.value:
            raise UnknownKernelError(f"kernel {digest} is {language}; only CUDA has {kind.upper()}", code="unknown-artifact")

    def request(self, digest: str, kind: str) -> Future[bytes]:
        """Return a future of a listing; concurrent requests share it."""
        with self._lock:
            future = self._pending.get((digest, kind))
            if future is None:
                future = self._pending[digest, kind] = self._threads.submit(self._make, digest, kind)
            return future

    def close(self) -> None:
        """Cancel queued listings and wait for the running ones."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _make(self, digest: str, kind: str) -> bytes:
        try:
            text = self.cached(digest, kind)  # an earlier request may have created it
            if text is None:
                maker = self._makers[kind]
                text = maker.make(self._store.kernel(digest) or {}, self._store.files(digest)).encode()
                self._store.put_derived(digest, kind, maker.tool(), text)
            return text
        finally:
            with self._lock:
                del self._pending[digest, kind]
