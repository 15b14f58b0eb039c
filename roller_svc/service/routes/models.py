"""/v1/blobs and /v1/graphs: upload model files, compile and estimate models."""

from __future__ import annotations

import json
import re
from typing import Annotated

from fastapi import APIRouter, Header, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from roller_svc.client.schemas import (
    BlobResponse,
    GraphEstimateResponse,
    GraphRequest,
    ModelOperationResponse,
    Problem,
)
from roller_svc.errors import ArgumentError, UnknownKernelError
from roller_svc.farm.models import JSON_GRAPH, ONNX, ModelRequest
from roller_svc.farm.store import Store
from roller_svc.service import problems
from roller_svc.service.middleware import too_large
from roller_svc.service.model_builds import check_target
from roller_svc.service.routes.estimates import CLIENT_GONE
from roller_svc.service.routes.kernels import operation_response, preferred_wait_s
from roller_svc.service.state import state_of

router = APIRouter(prefix="/v1", tags=["models"])

PART_BYTES = 1 << 20  # of a blob, written at once
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


@router.put(
    "/blobs/{digest}",
    response_model=BlobResponse,
    responses={201: {"model": BlobResponse}, 413: {"model": Problem}, 422: {"model": Problem}},
    openapi_extra={"requestBody": {"content": {"application/octet-stream": {}}, "required": True}},
)
async def put_blob(digest: str, request: Request) -> Response:
    """Store the body, whose hash must be the digest: 201 if it is new, 200 if it was stored."""
    try:
        return await _put_blob(digest, request)
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)


async def _put_blob(digest: str, request: Request) -> Response:
    state, bare = state_of(request), _bare_digest(digest)
    known = await state.run(lambda: state.store.has(bare))
    part = bytearray()
    with state.admit_upload(), state.store.receive(bare) as blob:
        async for chunk in request.stream():
            part += chunk
            if blob.size_bytes + len(part) > state.settings.max_blob_bytes:
                return problems.response(too_large(state.settings.max_blob_bytes))
            if len(part) >= PART_BYTES:
                content = bytes(part)
                part.clear()
                await state.run(lambda content=content: blob.write(content))  # type: ignore[misc]  # mypy cannot infer it
        await state.run(lambda: blob.write(bytes(part)))
        await state.run(blob.finish)
        body = {"digest": digest, "bytes": blob.size_bytes}
    return JSONResponse(body, status_code=200 if known else 201)


@router.get(
    "/blobs/{digest}",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}}, 404: {"model": Problem}},
)
async def blob(digest: str, request: Request) -> Response:
    """Return a blob."""
    state, bare = state_of(request), _bare_digest(digest)
    content = await state.run(lambda: state.store.get(bare))
    if content is None:
        raise _unknown_blob(digest)
    headers = {"ETag": f'"{digest}"', "Content-Disposition": "attachment"}
    return Response(content, media_type="application/octet-stream", headers=headers)


@router.post(
    "/graphs:compile",
    response_model=ModelOperationResponse,
    responses={
        202: {"model": ModelOperationResponse}, 404: {"model": Problem}, 422: {"model": Problem},
        503: {"model": Problem},
    },
)  # fmt: skip
async def compile_graph(
    body: GraphRequest, request: Request, prefer: Annotated[str | None, Header(max_length=200)] = None
) -> Response:
    """Compile a model unless it is stored: 200 if done, 202 if not. `Prefer: wait=SECONDS` waits for it."""
    state = state_of(request)
    wanted = await state.run(lambda: _request(state.store, body))
    operation = await state.submit(wanted, request.state.client)
    seconds = preferred_wait_s(prefer, state.settings.max_wait_s)
    operation = await state.wait(operation, request, seconds)
    applied = {"Preference-Applied": f"wait={seconds:g}"} if seconds else {}
    return operation_response(operation, 202, applied)


@router.post(
    "/graphs:estimate",
    response_model=GraphEstimateResponse,
    responses={404: {"model": Problem}, 422: {"model": Problem}, 503: {"model": Problem}},
)
async def estimate_graph(body: GraphRequest, request: Request) -> Response:
    """Estimate a model without a build."""
    state = state_of(request)
    wanted = await state.run(lambda: _request(state.store, body))
    estimate = await state.estimate_model(lambda: state.models.estimate(wanted), request)
    if estimate is None:
        return Response(status_code=CLIENT_GONE)
    return JSONResponse(estimate)


def _request(store: Store, body: GraphRequest) -> ModelRequest:
    """Return the request of a body, whose graph becomes a blob.

    Raises InputError for an unknown device or blob.
    """
    check_target(body.target, body.options.threads)
    options = body.options.model_dump(exclude_defaults=True) | {"select": body.options.select}
    if body.model.graph is not None:
        content = json.dumps(body.model.graph, separators=(",", ":")).encode()
        return ModelRequest(store.put(content), JSON_GRAPH, body.target, options)
    name = body.model.blob or ""
    bare = _bare_digest(name)
    if not store.has(bare):
        raise _unknown_blob(name)
    return ModelRequest(bare, ONNX, body.target, options)


def _bare_digest(digest: str) -> str:
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise ArgumentError(
            f"invalid digest {digest[:80]!r}: expected sha256: and 64 hexadecimal digits in lower case",
            code="invalid-digest",
        )
    return match[1]


def _unknown_blob(digest: str) -> UnknownKernelError:
    return UnknownKernelError(f"no blob {digest[:80]}", code="unknown-blob")
