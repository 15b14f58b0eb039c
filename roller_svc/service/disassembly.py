"""PTX and SASS of kernels: made at the first request, kept in the store, read from then on."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from roller_svc import toolchain
from roller_svc.errors import QueueFullError, ToolchainMissingError, UnknownKernelError
from roller_svc.farm.action import toolchain_versions
from roller_svc.farm.build import BINARY, unpack
from roller_svc.farm.store import Json, Store
from roller_svc.ir.hardware import Family
from roller_svc.ir.kernel import Language

MAX_RUNNING = 2  # that are made
MAX_PENDING = 16  # to be made, those that are being made counted


class ListingMaker(Protocol):
    """One kind of text. `tool` names what decides it beside the kernel; `make` makes it."""

    def tool(self) -> str: ...

    def make(self, facts: Json, files: Mapping[str, bytes]) -> str: ...


@dataclass(frozen=True, slots=True)
class Ptx:
    """What NVRTC makes of a kernel's text."""

    def tool(self) -> str:
        versions = toolchain_versions(Family.CUDA)
        return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()) if name.startswith("nvrtc"))

    def make(self, facts: Json, files: Mapping[str, bytes]) -> str:
        return toolchain.ptx(unpack(facts, dict(files)).compiled.source)


@dataclass(frozen=True, slots=True)
class Sass:
    """What nvdisasm reads in a kernel's binary."""

    def tool(self) -> str:
        try:
            return toolchain.disassembler_version()
        except ToolchainMissingError as missing:
            raise UnknownKernelError(f"no SASS: {missing.message}", code="no-disassembler") from missing

    def make(self, facts: Json, files: Mapping[str, bytes]) -> str:
        if not files.get(BINARY):
            raise UnknownKernelError("the kernel was not compiled: it has no SASS", code="unknown-artifact")
        return toolchain.sass_text(files[BINARY])


MAKERS: Mapping[str, ListingMaker] = {"ptx": Ptx(), "sass": Sass()}


class ListingCache:
    """Texts of the kernels of a store, in threads of their own: who reads the store does not wait for them."""

    def __init__(self, store: Store, makers: Mapping[str, ListingMaker] = MAKERS) -> None:
        self._store = store
        self._makers = makers
        self._threads = ThreadPoolExecutor(MAX_RUNNING, thread_name_prefix="text")
        self._lock = threading.Lock()
        self._pending: dict[tuple[str, str], Future[bytes]] = {}

    def cached(self, digest: str, kind: str) -> bytes | None:
        """The text, or None where it is to be made. Raises UnknownKernelError for a kernel without such a text."""
        facts = self._store.kernel(digest)
        if facts is None:
            raise UnknownKernelError(f"no kernel {digest[:80]}")
        language = facts["language"]
        if language != Language.CUDA.value:
            raise UnknownKernelError(
                f"kernel {digest} is {language}; only CUDA has {kind.upper()}", code="unknown-artifact"
            )
        return self._store.derived(digest, kind, self._makers[kind].tool())

    def request(self, digest: str, kind: str) -> Future[bytes]:
        """The text to come: whoever asks for one text meanwhile gets the same. Raises QueueFullError."""
        with self._lock:
            future = self._pending.get((digest, kind))
            if future is None:
                if len(self._pending) >= MAX_PENDING:
                    raise QueueFullError(f"{MAX_PENDING} texts are to be made already; try again later")
                future = self._pending[digest, kind] = self._threads.submit(self._make, digest, kind)
            return future

    def close(self) -> None:
        """End with the texts that are being made."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _make(self, digest: str, kind: str) -> bytes:
        try:
            text = self.cached(digest, kind)  # another may have made it before this one was asked for
            if text is None:
                maker = self._makers[kind]
                text = maker.make(self._store.kernel(digest) or {}, self._store.files(digest)).encode()
                self._store.put_derived(digest, kind, maker.tool(), text)
            return text
        finally:
            with self._lock:
                del self._pending[digest, kind]
