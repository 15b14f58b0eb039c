"""Asynchronous client of the HTTP service: `Client` with await."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import httpx

from roller_svc.client.calls import (
    CONNECT_TIMEOUT_S,
    RESPONSE_TIMEOUT_S,
    AnyOperation,
    Call,
    Calls,
    KernelBody,
    ModelFile,
    Reply,
    Send,
    Sleep,
    T,
)
from roller_svc.client.client import (
    COMPILE_TIMEOUT_S,
    MODEL_TIMEOUT_S,
    PAGE_SIZE,
    authorization,
    request_arguments,
)
from roller_svc.client.events import EventDecoder
from roller_svc.client.retry import DEFAULT_RETRIES, RetryPolicy
from roller_svc.client.schemas import (
    ActionResponse,
    EstimateRequest,
    GraphEstimateResponse,
    GraphOptions,
    ModelOperationResponse,
    OperationEvent,
    OperationResponse,
)
from roller_svc.errors import RollerError


class AsyncClient:
    """`async with AsyncClient("http://127.0.0.1:8000") as service: await service.compile(body)`.

    Requests are sent again after transient failures, as the retry policy says. Times are for a whole call.
    """

    def __init__(
        self,
        server: str,
        *,
        api_key: str = "",
        retry: RetryPolicy = DEFAULT_RETRIES,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._calls = Calls(server, retry)
        self._sleep = sleep
        self._http = httpx.AsyncClient(
            base_url=server,
            headers=authorization(api_key),
            transport=transport,
            timeout=httpx.Timeout(RESPONSE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        )

    async def compile(self, body: KernelBody, timeout_s: float | None = COMPILE_TIMEOUT_S) -> OperationResponse:
        """Compile a kernel and wait for the operation. Raises the error of a failed build."""
        return await self._run(self._calls.compile(body, timeout_s))

    async def measure(self, body: KernelBody, timeout_s: float | None = COMPILE_TIMEOUT_S) -> OperationResponse:
        """Compile a kernel, choosing it by measurements on the device, and wait for the operation."""
        return await self._run(self._calls.compile(body, timeout_s, "measure"))

    async def submit(self, body: KernelBody) -> OperationResponse:
        """Begin to compile a kernel, and return the operation at once."""
        return await self._run(self._calls.submit(body))

    async def batch_compile(
        self, bodies: Sequence[KernelBody], timeout_s: float | None = MODEL_TIMEOUT_S
    ) -> list[OperationResponse | RollerError]:
        """Compile kernels and wait for them; return the operation or the error of each, in their order."""
        return await self._run(self._calls.batch_compile(bodies, timeout_s))

    async def compile_for_targets(
        self, body: KernelBody, targets: Sequence[str], timeout_s: float | None = MODEL_TIMEOUT_S
    ) -> dict[str, OperationResponse | RollerError]:
        """Compile a kernel for several targets by one request and wait; return the operation or the error of each.

        The target or the spec in the body does not count.
        """
        return await self._run(self._calls.compile_for_targets(body, targets, timeout_s))

    async def compile_model(
        self,
        source: ModelFile,
        target: str,
        options: GraphOptions | None = None,
        timeout_s: float | None = MODEL_TIMEOUT_S,
    ) -> ModelOperationResponse:
        """Compile an ONNX file (path or bytes) or a JSON graph (dict), and wait. Raises the error of a failed build."""
        return await self._run(self._calls.compile_model(source, target, options, timeout_s))

    async def compile_models(
        self,
        sources: Mapping[str, ModelFile],
        targets: Sequence[str],
        options: GraphOptions | None = None,
        timeout_s: float | None = MODEL_TIMEOUT_S,
    ) -> dict[str, dict[str, ModelOperationResponse | RollerError]]:
        """Compile models, given by names, each for several targets, and wait for all.

        Return the operation or the error of each model and target.
        """
        return await self._run(self._calls.compile_models(sources, targets, options, timeout_s))

    async def estimate_model(self, source: ModelFile, target: str, options: GraphOptions | None = None) -> GraphEstimateResponse:
        """Estimate a model, as `compile_model` takes it, without a build."""
        return await self._run(self._calls.estimate_model(source, target, options))

    async def put_blob(self, content: bytes) -> str:
        """Upload a file and return its digest."""
        return await self._run(self._calls.put_blob(content))

    async def operation(self, name: str, wait_s: float = 0) -> AnyOperation:
        """Return an operation, `operations/ID`; wait for it for some time."""
        return await self._run(self._calls.operation(name, wait_s))

    async def wait(self, name: str, timeout_s: float | None = COMPILE_TIMEOUT_S) -> AnyOperation:
        """Wait until an operation is done. Raises the error of a failed build."""
        return await self._run(self._calls.wait(name, timeout_s))

    async def cancel(self, name: str, *, for_all: bool = False) -> AnyOperation:
        """Withdraw from an operation, which ends when nobody waits for it; `for_all` needs the scope admin."""
        return await self._run(self._calls.cancel(name, for_all=for_all))

    async def operations(self) -> AsyncIterator[AnyOperation]:
        """Yield the operations of this client, the latest first."""
        token = ""
        while True:
            page = await self._run(self._calls.page(PAGE_SIZE, token))
            for operation in page.operations:
                yield operation
            token = page.next_page_token
            if not token:
                return

    async def events(self, name: str, after: int = 0) -> AsyncIterator[OperationEvent]:
        """Yield the events of an operation as they happen, until it is done. A lost connection is made again."""
        number, failures, is_last = after, 0, False
        while True:
            reply: Reply
            try:
                headers = {"Last-Event-ID": str(number)}
                async with self._http.stream("GET", f"/v1/{name}/events", headers=headers) as response:
                    reply = response
                    if not response.is_success:
                        await response.aread()
                    async for event in _decode_events(response):
                        yield event
                        number, failures = event.number, 0
                        if event.type == "done":
                            return
            except (httpx.TransportError, httpx.InvalidURL) as failure:
                reply = failure
            failures += 1
            pause_s = self._calls.reconnect(reply, failures)
            if is_last:
                return
            is_last = (await self.operation(name)).done  # its last events may have been missed
            if not is_last:
                await self._sleep(pause_s)

    async def estimates(self, body: EstimateRequest | Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return an entry for each item and target, which may have an `error`."""
        return await self._run(self._calls.estimates(body))

    async def hardware(self) -> list[dict[str, Any]]:
        """Return the devices and whether the service compiles for them."""
        return await self._run(self._calls.hardware())

    async def explain(self, request: KernelBody) -> ActionResponse:
        """Return whether the store has the result of a request, or else how the nearest stored request differs."""
        return await self._run(self._calls.explain(request))

    async def validate_hardware(self, hardware: str | Mapping[str, Any]) -> dict[str, Any]:
        """Return a spec, given as YAML text or as JSON, in its normal form. Raises SpecError."""
        return await self._run(self._calls.validate_hardware(hardware))

    async def version(self) -> dict[str, Any]:
        """Return the version of the service and everything else that determines the results of its builds."""
        return await self._run(self._calls.version())

    async def model_tuning(self, digest: str) -> dict[str, Any]:
        """Return the trials of a model that was compiled with `tune="now"`: choices, seconds, what was chosen."""
        return await self._run(self._calls.model_tuning(digest))

    async def model_story(self, digest: str) -> dict[str, Any]:
        """Return the story of a model: nodes, when each core does what, and memory, as `Model.story`."""
        return await self._run(self._calls.model_story(digest))

    async def model_plan(self, digest: str) -> dict[str, Any]:
        """Return the plan of a model with all its steps, as `Model.plan`."""
        return await self._run(self._calls.model_plan(digest))

    async def check_plan(self, digest: str, programs: Sequence[Any], bucket: int = 0) -> dict[str, Any]:
        """Return `seconds` and `instructions` of edited programs of a model's plan. Raises ArgumentError for illegal ones.

        Args:
            digest: the model's.
            programs: for each step of the plan with `vdevice`, its `programs`.
            bucket: number of the bucket.
        """
        return await self._run(self._calls.check_plan(digest, programs, bucket))

    async def file(self, link: str) -> bytes:
        """Download a file by its link."""
        return await self._run(self._calls.file(link))

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _run(self, call: Call[T]) -> T:
        reply: Reply = None
        try:
            while True:
                step = call.send(reply)
                reply = await self._perform(step)
        except StopIteration as end:
            result: T = end.value
            return result

    async def _perform(self, step: Send | Sleep) -> Reply:
        if isinstance(step, Sleep):
            await self._sleep(step.seconds)
            return None
        try:
            return await self._http.request(**request_arguments(step))
        except (httpx.TransportError, httpx.InvalidURL) as failure:
            return failure


async def _decode_events(response: httpx.Response) -> AsyncIterator[OperationEvent]:
    """Yield the events of a successful response."""
    if not response.is_success:
        return
    decoder = EventDecoder()
    async for line in response.aiter_lines():
        event = decoder.feed(line)
        if event is not None:
            yield event
