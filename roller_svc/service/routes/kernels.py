"""/v1/kernels: compile kernels and download their files."""

from __future__ import annotations

import asyncio
import io
import re
import zipfile
from typing import Annotated

from fastapi import APIRouter, Header, Request
from fastapi.responses import JSONResponse, Response

from roller_svc.client.schemas import CompileRequest, KernelResponse, OperationResponse, Problem
from roller_svc.errors import UnknownKernelError
from roller_svc.farm.operations import Operation
from roller_svc.farm.store import Json, Store
from roller_svc.service.disassembly import MAKERS
from roller_svc.service.mapping import build_request_from_body, kernel_response, operation_json
from roller_svc.service.state import State, state_of

router = APIRouter(prefix="/v1", tags=["kernels"])

POLL_S = 1
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*\"?(\d{1,6}(?:\.\d{1,3})?)\"?\s*(?:$|[,;\s])", re.IGNORECASE)
_MEDIA_TYPES = {
    "source": "text/plain; charset=utf-8",
    "header": "text/plain; charset=utf-8",
    "ptx": "text/plain; charset=utf-8",
    "sass": "text/plain; charset=utf-8",
    "metadata": "application/json",
    "binary": "application/octet-stream",
    "bundle": "application/zip",
}
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)  # fixed, so that a kernel always gives the same archive


@router.post(
    "/kernels:compile",
    response_model=OperationResponse,
    responses={202: {"model": OperationResponse}, 422: {"model": Problem}, 503: {"model": Problem}},
)
async def compile_kernel(
    body: CompileRequest, request: Request, prefer: Annotated[str | None, Header(max_length=200)] = None
) -> Response:
    """Compile a kernel unless it is stored: 200 if done, 202 if not. `Prefer: wait=SECONDS` waits for it."""
    state = state_of(request)
    operation = await state.submit(await state.run(lambda: build_request_from_body(body)), request.state.client)
    seconds = preferred_wait_s(prefer, state.settings.max_wait_s)
    operation = await state.wait(operation, request, seconds)
    applied = {"Preference-Applied": f"wait={seconds:g}"} if seconds else {}
    return operation_response(operation, 202, applied)


@router.get("/kernels/{digest}", response_model=KernelResponse, responses={404: {"model": Problem}})
async def kernel(digest: str, request: Request) -> Response:
    """Describe a kernel."""
    state = state_of(request)
    return JSONResponse(kernel_response(await state.run(lambda: _facts(state.store, digest))))


@router.get(
    "/kernels/{digest}/{kind}",
    response_class=Response,
    responses={200: {"content": {media: {} for media in _MEDIA_TYPES.values()}}, 404: {"model": Problem}},
)
async def kernel_file(
    digest: str, kind: str, request: Request, if_none_match: Annotated[str | None, Header()] = None
) -> Response:
    """Return a kernel's source, binary, ptx, sass, metadata, header or bundle (a zip that roller_svc.load reads)."""
    state = state_of(request)
    await state.run(lambda: _facts(state.store, digest))
    # A digest's files never change. The cache scope is private if a key is needed to access them.
    scope = "private" if state.settings.accepted_keys else "public"
    headers = {"ETag": f'"{digest}/{kind}"', "Cache-Control": f"{scope}, max-age=31536000, immutable"}
    if if_none_match is not None and _matches(if_none_match, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    if kind in MAKERS:
        content = await _listing(state, digest, kind)
    else:
        content = await state.run(lambda: _content(state, digest, kind))
    return Response(content, media_type=_MEDIA_TYPES[kind], headers=headers)


def operation_response(operation: Operation, pending_status: int, headers: dict[str, str]) -> Response:
    if operation.done:
        return JSONResponse(operation_json(operation), headers=headers)
    location = {"Location": f"/v1/operations/{operation.id}", "Retry-After": str(POLL_S)}
    return JSONResponse(operation_json(operation), status_code=pending_status, headers=headers | location)


def preferred_wait_s(prefer: str | None, max_s: float) -> float:
    """Parse RFC 7240's wait preference, limited to `max_s`; ignore a malformed one."""
    match = _WAIT.search(prefer or "")
    return min(float(match[1]), max_s) if match else 0.0


def _matches(if_none_match: str, etag: str) -> bool:
    offered = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
    return etag in offered or "*" in offered


def _facts(store: Store, digest: str) -> Json:
    facts = store.kernel(digest) if _DIGEST.fullmatch(digest) else None
    if facts is None:
        raise UnknownKernelError(f"no kernel {digest[:80]}")
    return facts


async def _listing(state: State, digest: str, kind: str) -> bytes:
    cached = await state.run(lambda: state.listings.cached(digest, kind))
    if cached is not None:
        return cached
    # Shielded, because other requests may wait for the same listing.
    return await asyncio.shield(asyncio.wrap_future(state.listings.request(digest, kind)))


def _content(state: State, digest: str, kind: str) -> bytes:
    if kind == "bundle":
        return _bundle(state.store, digest)
    content = state.store.file(digest, kind)
    if content is None:
        kinds = ", ".join([*state.store.kinds(digest), "bundle"])
        raise UnknownKernelError(f"kernel {digest} has no {kind[:40]!r}; it has {kinds}", code="unknown-artifact")
    return content


def _bundle(store: Store, digest: str) -> bytes:
    names = _facts(store, digest)["files"]
    assert isinstance(names, dict)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as bundle:
        for kind, content in sorted(store.files(digest).items()):
            bundle.writestr(zipfile.ZipInfo(names[kind], _ZIP_TIME), content, zipfile.ZIP_DEFLATED)
    return archive.getvalue()
