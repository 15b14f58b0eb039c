"""/v1/kernels: compile kernels and download their files."""

from __future__ import annotations

import asyncio
import re
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import JSONResponse, Response

from roller_svc.client.schemas import CompileRequest, KernelResponse, OperationResponse
from roller_svc.errors import ArgumentError, UnknownKernelError
from roller_svc.farm.api_keys import Scope
from roller_svc.farm.blobs import BlobReader
from roller_svc.farm.build import METADATA, SOURCE
from roller_svc.farm.routing import check_measurable
from roller_svc.farm.store import Json, Store
from roller_svc.ir.options import RuntimeChoice, SelectionMode
from roller_svc.ir.report import BuildRequest
from roller_svc.runtime.saved.launchers import launcher_files
from roller_svc.runtime.saved.metadata import MAX_METADATA_BYTES
from roller_svc.runtime.saved.serialization import DAMAGE, parse_compiled
from roller_svc.service.access import principal_of, requires
from roller_svc.service.caching import NOT_MODIFIED, immutable_headers, not_modified
from roller_svc.service.disassembly import ANNOTATIONS
from roller_svc.service.mapping import build_request_from_body, kernel_response
from roller_svc.service.parts_response import Parts, PartsResponse
from roller_svc.service.state import State, state_of
from roller_svc.service.submission import IdempotencyKey, Prefer, check_scopes, submit_and_wait
from roller_svc.settings import Resource

router = APIRouter(prefix="/v1", tags=["kernels"])

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MEDIA_TYPES = {
    "source": "text/plain; charset=utf-8",
    "header": "text/plain; charset=utf-8",
    "ptx": "text/plain; charset=utf-8",
    "sass": "text/plain; charset=utf-8",
    "assembly": "text/plain; charset=utf-8",
    "ptx-links": "application/json",
    "sass-links": "application/json",
    "assembly-links": "application/json",
    "annotations": "application/json",
    "metadata": "application/json",
    "report": "application/json",
    "binary": "application/octet-stream",
    "bundle": "application/zip",
}
_KERNEL = {"digest": "$response.body#/response/digest"}
KERNEL_LINKS = {
    "kernel": {"operationId": "kernel", "parameters": _KERNEL},
    "source": {"operationId": "kernel_file", "parameters": _KERNEL | {"kind": "source"}},
}
PART_BYTES = 1 << 18  # of a bundle, sent at once
BUNDLE_MEMORY_BYTES = 1 << 20  # of a bundle that is being sent; the rest is in a file
MAX_LAUNCHERS = 100  # characters of the names in a query
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)  # fixed, so that a kernel always gives the same archive


@router.post(
    "/kernels:compile",
    response_model=OperationResponse,
    responses={200: {"links": KERNEL_LINKS}, 202: {"model": OperationResponse}},
    dependencies=[requires(Scope.COMPILE)],
)
async def compile_kernel(
    body: CompileRequest, request: Request, prefer: Prefer = None, idempotency_key: IdempotencyKey = None
) -> Response:
    """Compile a kernel unless it is stored: 200 if done, 202 if not. `Prefer: wait=SECONDS` waits for it."""
    check_scopes(request, body)
    wanted = await state_of(request).run(lambda: build_request_from_body(body))
    return await submit_and_wait(request, body, wanted, idempotency_key, prefer)


@router.post(
    "/kernels:measure",
    response_model=OperationResponse,
    responses={200: {"links": KERNEL_LINKS}, 202: {"model": OperationResponse}},
    dependencies=[requires(Scope.MEASURE)],
)
async def measure_kernel(
    body: CompileRequest, request: Request, prefer: Prefer = None, idempotency_key: IdempotencyKey = None
) -> Response:
    """Compile a kernel with `select: measure`, if a worker has the device. Otherwise as `kernels:compile`."""
    state = state_of(request)
    wanted = await state.run(lambda: _measured_request(body))
    await state.query(lambda: check_measurable(state.farm.registry.alive(), state.farm.queue.generator, wanted))
    return await submit_and_wait(request, body, wanted, idempotency_key, prefer)


@router.get("/kernels/{digest}", response_model=KernelResponse, dependencies=[requires(Scope.READ)])
async def kernel(digest: str, request: Request) -> Response:
    """Describe a kernel."""
    state = state_of(request)
    return JSONResponse(kernel_response(await state.run(lambda: _facts(state.store, digest))))


@router.get(
    "/kernels/{digest}/{kind}",
    response_class=Response,
    responses={200: {"content": {media: {} for media in _MEDIA_TYPES.values()}}, 304: NOT_MODIFIED},
    dependencies=[requires(Scope.READ)],
)
async def kernel_file(
    digest: str,
    kind: str,
    request: Request,
    launcher: Annotated[str, Query(max_length=MAX_LAUNCHERS)] = "",
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """Return a kernel's source, binary, metadata, header, bundle (a zip that roller_svc.load reads), or a listing.

    Listings are ptx and sass of CUDA kernels, assembly of C kernels, how their lines are linked with those of the
    source (ptx-links), and where the numbers of the source come from (annotations).

    A bundle also has the files of some launchers: ctypes, cupy, torch and cpp, separated by commas.
    """
    state = state_of(request)
    await state.run(lambda: _facts(state.store, digest))
    launchers = [name for name in launcher.split(",") if name]
    if launchers and kind != "bundle":
        raise ArgumentError(f"launchers are in a bundle, got {kind[:40]!r}", code="unknown-launcher", hint="ask for the bundle")
    # A digest's files never change, but launchers and annotations are of the service's version.
    is_json = _MEDIA_TYPES.get(kind) == "application/json"
    headers = (
        {} if launchers or kind == ANNOTATIONS else immutable_headers(f"{digest}/{kind}", is_public=state.is_open, is_weak=is_json)
    )
    if headers and (current := not_modified(if_none_match, headers)):
        return current
    if kind in state.listings:
        await _ensure_listing(state, digest, kind, principal_of(request).client)
    content = await state.run(lambda: _open(state, digest, kind, launchers))
    return PartsResponse(content, state.response_share(request), state.run, _MEDIA_TYPES[kind], headers)


def _measured_request(body: CompileRequest) -> BuildRequest:
    """Return the request of a body with `select: measure`. Raises ArgumentError if the body excludes that."""
    options = body.options
    excluding = {"select": SelectionMode.MODEL.value, "runtime": RuntimeChoice.EMULATOR.value}
    for name, value in excluding.items():
        if name in options.model_fields_set and getattr(options, name) == value:
            raise ArgumentError(
                f"options.{name} is {value!r}: kernels:measure runs kernels on a device",
                code="invalid-option",
                hint="leave it out, or use kernels:compile",
            )
    measured = options.model_copy(update={"select": SelectionMode.MEASURE.value})
    return build_request_from_body(body.model_copy(update={"options": measured}))


def _facts(store: Store, digest: str) -> Json:
    facts = store.kernel(digest) if _DIGEST.fullmatch(digest) else None
    if facts is None:
        raise UnknownKernelError(f"no kernel {digest[:80]}")
    return facts


async def _ensure_listing(state: State, digest: str, kind: str, client: str) -> None:
    """Have a listing made unless it is stored. Raises UnknownKernelError if the kernel cannot have one."""
    if await state.run(lambda: state.listings.open(digest, kind)) is None:
        with await state.shares.wait_for(Resource.LISTINGS, client):
            # Shielded, because other requests may wait for the same listing.
            await asyncio.shield(asyncio.wrap_future(state.listings.request(digest, kind)))


def _open(state: State, digest: str, kind: str, launchers: Sequence[str]) -> Parts:
    """Begin to read a file. Raises UnknownKernelError, and ArgumentError for unknown launchers."""
    if kind == "bundle":
        return _Bundle(state.store, digest, _launcher_files(state.store, digest, launchers) if launchers else {})
    content = state.listings.open(digest, kind) if kind in state.listings else state.store.open_file(digest, kind)
    if content is None:
        kinds = ", ".join([*state.store.kinds(digest), "bundle"])
        raise UnknownKernelError(f"kernel {digest} has no {kind[:40]!r}; it has {kinds}", code="unknown-artifact")
    return content


def _launcher_files(store: Store, digest: str, launchers: Sequence[str]) -> dict[str, bytes]:
    metadata, source = store.file(digest, METADATA), store.file(digest, SOURCE)
    damaged = UnknownKernelError(f"the files of kernel {digest} are damaged")
    if metadata is None or source is None or len(metadata) > MAX_METADATA_BYTES:
        raise damaged
    try:
        compiled = parse_compiled(metadata, source.decode())
    except DAMAGE as error:
        raise damaged from error
    return launcher_files(compiled, launchers)


class _Bundle:
    """A zip archive of a kernel's files and of others. Raises UnknownKernelError."""

    def __init__(self, store: Store, digest: str, others: Mapping[str, bytes]) -> None:
        names = _facts(store, digest)["files"]
        assert isinstance(names, dict)
        self._file = tempfile.SpooledTemporaryFile(BUNDLE_MEMORY_BYTES)  # noqa: SIM115 - closed by `close`
        with zipfile.ZipFile(self._file, "w", zipfile.ZIP_DEFLATED) as archive:
            for kind in sorted(store.kinds(digest)):
                _add_file(archive, names[kind], store.open_file(digest, kind))
            for name, content in others.items():
                archive.writestr(zipfile.ZipInfo(name, _ZIP_TIME), content, zipfile.ZIP_DEFLATED)
        self.size_bytes = self._file.tell()
        self._file.seek(0)

    def read(self) -> bytes:
        return self._file.read(PART_BYTES)

    def close(self) -> None:
        self._file.close()


def _add_file(archive: zipfile.ZipFile, name: str, content: BlobReader | None) -> None:
    if content is None:
        raise UnknownKernelError(f"the kernel's file {name} is damaged")
    entry = zipfile.ZipInfo(name, _ZIP_TIME)
    entry.compress_type, entry.file_size = zipfile.ZIP_DEFLATED, content.size_bytes
    with archive.open(entry, "w") as file:
        while part := content.read():
            file.write(part)
