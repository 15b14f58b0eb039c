"""Listings of kernels and their links with the source, created on first request and cached in the store."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from roller_svc import toolchain
from roller_svc.compiler.action import toolchain_versions
from roller_svc.compiler.annotate import WrittenKernel
from roller_svc.errors import ToolchainMissingError, UnknownKernelError
from roller_svc.farm.annotating import Annotator
from roller_svc.farm.blobs import BlobReader
from roller_svc.farm.build import BINARY, LOADED_GENERATOR, unpack
from roller_svc.farm.store import Json, Store
from roller_svc.ir.canonical import to_json
from roller_svc.ir.hardware import TargetKind
from roller_svc.ir.kernel import KernelSource, Language

MAX_RUNNING = 2  # concurrent runs of a tool


class ListingMaker(Protocol):
    """Creates one kind of listing."""

    @property
    def languages(self) -> tuple[Language, ...]:
        """Return the languages of the kernels that have such a listing."""

    def tool(self) -> str:
        """Return the name and version of the tool, which with the kernel determines the listing."""

    def make(self, facts: Json, files: Mapping[str, bytes]) -> str:
        """Create the listing of a kernel."""


@dataclass(frozen=True, slots=True)
class Ptx:
    """Compile a kernel's source to PTX with NVRTC."""

    links: bool = False  # how its lines are linked with the source, in place of the text
    languages: tuple[Language, ...] = (Language.CUDA,)

    def tool(self) -> str:
        return _compilers(TargetKind.CUDA, "nvrtc")

    def make(self, facts: Json, files: Mapping[str, bytes]) -> str:
        source = _source(facts, files)
        return _json(toolchain.link_ptx(source)) if self.links else toolchain.ptx(source)


@dataclass(frozen=True, slots=True)
class Sass:
    """Disassemble a kernel's binary with nvdisasm."""

    links: bool = False
    languages: tuple[Language, ...] = (Language.CUDA,)

    def tool(self) -> str:
        try:
            version = toolchain.disassembler_version()
        except ToolchainMissingError as missing:
            raise UnknownKernelError(f"no SASS: {missing.message}", code="no-disassembler") from missing
        return f"{version}, {_compilers(TargetKind.CUDA, 'nvrtc')}" if self.links else version

    def make(self, facts: Json, files: Mapping[str, bytes]) -> str:
        if not files.get(BINARY):
            raise UnknownKernelError("the kernel has no SASS: it was not compiled", code="unknown-artifact")
        if self.links:
            return _json(toolchain.link_sass(_source(facts, files), files[BINARY]))
        return toolchain.sass_text(files[BINARY])


@dataclass(frozen=True, slots=True)
class Assembly:
    """Compile a kernel's source to assembly with the C compiler."""

    links: bool = False
    languages: tuple[Language, ...] = (Language.C,)

    def tool(self) -> str:
        return _compilers(TargetKind.CPU, "cc")

    def make(self, facts: Json, files: Mapping[str, bytes]) -> str:
        listing = toolchain.assembly(_source(facts, files))
        return _json(toolchain.Links(listing.links)) if self.links else listing.text


@dataclass(frozen=True, slots=True)
class AnnotationMaker:
    """Say where the numbers and the parts of a kernel's source come from."""

    annotator: Annotator
    languages: tuple[Language, ...] = tuple(Language)

    def tool(self) -> str:
        return f"generator {LOADED_GENERATOR}"

    def make(self, facts: Json, files: Mapping[str, bytes]) -> str:
        kernel = unpack(facts, dict(files))
        source, extra = kernel.compiled.source, kernel.extra
        programmatic = any(launch.programmatic for launch in source.launches)
        written = WrittenKernel(source.text, source.name, extra.get("plan"), extra.get("request"), programmatic)
        return _json(self.annotator.annotate(written))


def _source(facts: Json, files: Mapping[str, bytes]) -> KernelSource:
    return unpack(facts, dict(files)).compiled.source


def _compilers(family: TargetKind, name: str) -> str:
    versions = toolchain_versions(family)
    return ", ".join(f"{tool} {version}" for tool, version in sorted(versions.items()) if tool.startswith(name))


def _json(value: object) -> str:
    return json.dumps(to_json(value), separators=(",", ":"), ensure_ascii=False)


ANNOTATIONS = "annotations"
TEXTS: Mapping[str, ListingMaker] = {"ptx": Ptx(), "sass": Sass(), "assembly": Assembly()}
LINKS: Mapping[str, ListingMaker] = {
    "ptx-links": Ptx(links=True),
    "sass-links": Sass(links=True),
    "assembly-links": Assembly(links=True),
}


def kinds_of(language: str) -> list[str]:
    """Return the kinds of listings that kernels of a language have."""
    made = {**TEXTS, **LINKS}
    return [*(kind for kind, maker in made.items() if language in _names(maker)), ANNOTATIONS]


def _names(maker: ListingMaker) -> list[str]:
    return [language.value for language in maker.languages]


def listing_makers(annotator: Annotator) -> Mapping[str, ListingMaker]:
    """Return what makes each kind of listing."""
    return {**TEXTS, **LINKS, ANNOTATIONS: AnnotationMaker(annotator)}


class ListingCache:
    """Listings of the kernels of a store. Tools run in separate threads, so readers of the store do not wait."""

    def __init__(self, store: Store, makers: Mapping[str, ListingMaker]) -> None:
        self._store = store
        self._makers = makers
        self._threads = ThreadPoolExecutor(MAX_RUNNING, thread_name_prefix="text")
        self._lock = threading.Lock()
        self._pending: dict[tuple[str, str], Future[bytes]] = {}

    def __contains__(self, kind: str) -> bool:
        return kind in self._makers

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
        language, languages = facts["language"], _names(self._makers[kind])
        if language not in languages:
            expected = " and ".join(languages)
            raise UnknownKernelError(
                f"kernel {digest} is of the language {language}; {kind} is of {expected}", code="unknown-artifact"
            )

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
