"""/v1/blobs and /v1/graphs: upload model files, compile and estimate models."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from roller_svc.client.schemas import (
    BlobResponse,
    CheckedPlan,
    CheckPlanRequest,
    GraphBatchRequest,
    GraphBatchResponse,
    GraphEstimateResponse,
    GraphRequest,
    ModelOperationResponse,
)
from roller_svc.compiler.request import validate_name, validate_target
from roller_svc.errors import ArgumentError, SlowRequestError, UnknownKernelError
from roller_svc.farm.api_keys import Scope
from roller_svc.farm.models import JSON_GRAPH, ONNX, ModelRequest, leave_out_unused, named_devices
from roller_svc.farm.routing import check_measurable
from roller_svc.farm.store import Store
from roller_svc.farm.usage import BLOCK_BYTES
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.service import problems
from roller_svc.service.access import principal_of, requires
from roller_svc.service.batches import submit_batch
from roller_svc.service.caching import NOT_MODIFIED, immutable_headers, not_modified
from roller_svc.service.middleware import too_large
from roller_svc.service.model_builds import check_target
from roller_svc.service.model_tasks import PLAN, SCHEDULE, STORY, TUNING, PlanTask
from roller_svc.service.parts_response import PartsResponse
from roller_svc.service.responses import CLIENT_GONE
from roller_svc.service.state import State, needs_place, state_of
from roller_svc.service.submission import IdempotencyKey, Prefer, check_scopes, submit_and_wait
from roller_svc.settings import Resource

router = APIRouter(prefix="/v1", tags=["models"])

PART_BYTES = 1 << 20  # of a blob, written at once
MIN_BYTES_PER_S = 16 << 10  # of an upload, on average
SLOW_START_S = 5.0  # that an upload may wait for its client beyond that
_BLOB_LINKS = {"blob": {"operationId": "blob", "parameters": {"digest": "$response.body#/digest"}}}
_BINARY_BODY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


@router.put(
    "/blobs/{digest}",
    response_model=BlobResponse,
    responses={200: {"links": _BLOB_LINKS}, 201: {"model": BlobResponse, "links": _BLOB_LINKS}},
    dependencies=[requires(Scope.COMPILE)],
    openapi_extra={"requestBody": {"content": _BINARY_BODY, "required": True}},
)
async def put_blob(digest: str, request: Request) -> Response:
    """Store the body, whose hash must be the digest: 201 if it is new, 200 if it was stored."""
    try:
        return await _put_blob(digest, request)
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)


async def _put_blob(digest: str, request: Request) -> Response:
    state, bare, client = state_of(request), _bare_digest(digest), principal_of(request).client
    known = await state.run(lambda: state.store.has(bare))
    limit = None if known else state.shares.part_of(Resource.STORED_BYTES, client)
    part = bytearray()
    with state.shares.hold(Resource.UPLOADS, client), state.store.receive(bare) as blob:
        allowance = await state.query(lambda: state.farm.usage.allowance(client, Resource.STORED_BYTES, limit))
        async for chunk in _stream_in_time(request):
            part += chunk
            allowance.check(blob.size_bytes + len(part))
            if blob.size_bytes + len(part) > state.settings.max_blob_bytes:
                return problems.response(too_large(state.settings.max_blob_bytes))
            if len(part) >= PART_BYTES:
                content = bytes(part)
                part.clear()
                await state.run(partial(blob.write, content))
        await state.run(lambda: blob.write(bytes(part)))
        await state.run(blob.finish)
        if not known:
            size_bytes = max(BLOCK_BYTES, blob.size_bytes)
            await state.query(lambda: state.farm.usage.add(client, Resource.STORED_BYTES, size_bytes))
        body = {"digest": digest, "bytes": blob.size_bytes}
    return JSONResponse(body, status_code=200 if known else 201)


async def _stream_in_time(request: Request) -> AsyncIterator[bytes]:
    """Yield the parts of a body. Raises SlowRequestError once the client sends too slowly."""
    waited_s, received_bytes, parts = 0.0, 0, aiter(request.stream())
    while True:
        start_s = time.monotonic()
        try:
            async with asyncio.timeout(SLOW_START_S + received_bytes / MIN_BYTES_PER_S - waited_s):
                part = await anext(parts, None)
        except TimeoutError as late:
            raise SlowRequestError(f"the upload is slower than {MIN_BYTES_PER_S} bytes a second") from late
        if part is None:
            return
        waited_s += time.monotonic() - start_s
        received_bytes += len(part)
        yield part


@router.get(
    "/blobs/{digest}",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}}, 304: NOT_MODIFIED},
    dependencies=[requires(Scope.READ)],
)
async def blob(digest: str, request: Request, if_none_match: Annotated[str | None, Header()] = None) -> Response:
    """Return a blob."""
    state, bare = state_of(request), _bare_digest(digest)
    headers = immutable_headers(digest, is_public=state.is_open)
    current = not_modified(if_none_match, headers)
    if current is not None and await state.run(lambda: state.store.has(bare)):
        return current
    content = await state.run(lambda: state.store.blobs.open(bare))
    if content is None:
        raise _unknown_blob(digest)
    headers["Content-Disposition"] = "attachment"
    return PartsResponse(content, state.response_share(request), state.run, "application/octet-stream", headers)


@router.post(
    "/graphs:compile",
    response_model=ModelOperationResponse,
    responses={202: {"model": ModelOperationResponse}},
    dependencies=[requires(Scope.COMPILE)],
)
async def compile_graph(
    body: GraphRequest, request: Request, prefer: Prefer = None, idempotency_key: IdempotencyKey = None
) -> Response:
    """Compile a model unless it is stored: 200 if done, 202 if not. `Prefer: wait=SECONDS` waits for it."""
    check_scopes(request, body)
    state = state_of(request)
    wanted = await state.run(lambda: _request(state, body))
    return await submit_and_wait(request, body, wanted, idempotency_key, prefer)


@router.post(
    "/graphs:batchCompile",
    response_model=GraphBatchResponse,
    dependencies=[requires(Scope.COMPILE), needs_place(Resource.BATCHES)],
)
async def batch_compile_graphs(body: GraphBatchRequest, request: Request) -> Response:
    """Compile models, each for several targets: an operation or an error for each of them."""
    return await submit_batch(request, body.requests, partial(_request, state_of(request)))


@router.get(
    "/models/{digest}/tuning",
    response_class=JSONResponse,
    responses={304: NOT_MODIFIED},
    dependencies=[requires(Scope.READ)],
)
async def model_tuning(digest: str, request: Request, if_none_match: Annotated[str | None, Header()] = None) -> Response:
    """Return the trials of a model of `tune: now`: the tree of choices, each trial, and what was chosen."""
    return await _model_part(request, digest, TUNING, if_none_match)


@router.get(
    "/models/{digest}/story",
    response_class=JSONResponse,
    responses={304: NOT_MODIFIED},
    dependencies=[requires(Scope.READ)],
)
async def model_story(digest: str, request: Request, if_none_match: Annotated[str | None, Header()] = None) -> Response:
    """Return the story of a model: its nodes, what each core does when, and where tensors lie."""
    return await _model_part(request, digest, STORY, if_none_match)


@router.get(
    "/models/{digest}/plan",
    response_class=JSONResponse,
    responses={304: NOT_MODIFIED},
    dependencies=[requires(Scope.READ)],
)
async def model_plan(digest: str, request: Request, if_none_match: Annotated[str | None, Header()] = None) -> Response:
    """Return the plan of a model with all its steps, as `Model.plan`."""
    return await _model_part(request, digest, PLAN, if_none_match)


@router.post("/plans:check", response_model=CheckedPlan, dependencies=[requires(Scope.READ), needs_place(Resource.MODEL_ESTIMATES)])
async def check_plan(body: CheckPlanRequest, request: Request) -> Response:
    """Check edited programs of a model's vEUs, and return when each instruction runs by the performance model."""
    state = state_of(request)
    content = await state.run(lambda: _read_part(state.store, body.model, SCHEDULE))
    task = PlanTask(content, body.bucket, body.programs)
    checked = await state.estimate_model(lambda: state.models.check_plan(task), request)
    return Response(status_code=CLIENT_GONE) if checked is None else JSONResponse(checked)


async def _model_part(request: Request, digest: str, kind: str, if_none_match: str | None) -> Response:
    """Return a part of a model that is JSON. Raises UnknownKernelError where it was built without."""
    state = state_of(request)
    content = await state.run(lambda: _read_part(state.store, digest, kind))
    headers = immutable_headers(f"{digest}/{kind}", is_public=state.is_open, is_weak=True)
    return not_modified(if_none_match, headers) or Response(content, media_type="application/json", headers=headers)


@router.post(
    "/graphs:estimate",
    response_model=GraphEstimateResponse,
    dependencies=[requires(Scope.READ), needs_place(Resource.MODEL_ESTIMATES)],
)
async def estimate_graph(body: GraphRequest, request: Request) -> Response:
    """Estimate a model without a build."""
    state = state_of(request)
    wanted = await state.run(lambda: _request(state, body, builds=False))
    estimate = await state.estimate_model(lambda: state.models.estimate(wanted), request)
    if estimate is None:
        return Response(status_code=CLIENT_GONE)
    return JSONResponse(estimate)


def _request(state: State, body: GraphRequest, *, builds: bool = True) -> ModelRequest:
    """Return the request of a body, with the content of its graph: only a build stores it.

    Raises InputError for an unknown device or blob, a plan that the device does not have, or trials that no worker can make.
    """
    target = validate_target(body.target)
    spec = check_target(target, body.options.threads, body.options.plan)
    validate_name(body.options.name)
    wanted = _with_source(state.store, body, spec, target)
    named_devices(wanted, spec)
    if body.options.devices and not builds:
        raise ArgumentError("devices: estimates are of models on one device", code="invalid-option")
    if builds and body.options.tune == "now":
        if spec.family is not TargetKind.CPU:
            raise ArgumentError(f"tune: trials are of models for CPUs, and {spec.id} is a GPU", code="cannot-measure")
        check_measurable(state.farm.registry.alive(), state.farm.queue.generator, wanted)
    return wanted


def _with_source(store: Store, body: GraphRequest, spec: HardwareSpec, target: str) -> ModelRequest:
    given = body.options.model_dump(exclude_defaults=True) | {"select": body.options.select}
    options = leave_out_unused(given, spec.family)
    if body.model.graph is not None:
        content = json.dumps(body.model.graph, separators=(",", ":")).encode()
        return ModelRequest(hashlib.sha256(content).hexdigest(), JSON_GRAPH, target, options, content)
    name = body.model.blob or ""
    bare = _bare_digest(name)
    if not store.has(bare):
        raise _unknown_blob(name)
    return ModelRequest(bare, ONNX, target, options)


def _read_part(store: Store, digest: str, kind: str) -> bytes:
    facts = store.model(digest) if _DIGEST.fullmatch(digest) else None
    if facts is None:
        raise UnknownKernelError(f"no model {digest[:80]}")
    files = facts.get("files")
    blob = files.get(kind) if isinstance(files, dict) else None
    if not isinstance(blob, str):
        raise UnknownKernelError(f"model {digest} was built {_why_without(kind, facts)}", code="unknown-artifact")
    content = store.get(blob)
    if content is None:
        raise UnknownKernelError(f"the {kind} of model {digest} is no longer stored: compile it again", code="unknown-artifact")
    return content


def _why_without(kind: str, facts: Mapping[str, Any]) -> str:
    if kind == TUNING:
        return "without trials"
    if kind == SCHEDULE:
        return "without a plan of a virtual device, or by a version that checks none"
    return "for several devices, which have no story" if facts.get("subgraphs") else "by a version without stories"


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
