"""Synchronous client of the HTTP service. Depends only on the schemas and the errors of the project."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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

PAGE_SIZE = 100
COMPILE_TIMEOUT_S = 600.0
MODEL_TIMEOUT_S = 3600.0


class Client:
    """`with Client("http://127.0.0.1:8000") as service: service.compile(body)`.

    Requests are sent again after transient failures, as the retry policy says. Times are for a whole call.
    """

    def __init__(
        self,
        server: str,
        *,
        api_key: str = "",
        retry: RetryPolicy = DEFAULT_RETRIES,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._calls = Calls(server, retry)
        self._sleep = sleep
        self._http = httpx.Client(
            base_url=server,
            headers=authorization(api_key),
            transport=transport,
            timeout=httpx.Timeout(RESPONSE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        )

    def compile(self, body: KernelBody, timeout_s: float | None = COMPILE_TIMEOUT_S) -> OperationResponse:
        """Compile a kernel and wait for the operation. Raises the error of a failed build."""
        return self._run(self._calls.compile(body, timeout_s))

    def measure(self, body: KernelBody, timeout_s: float | None = COMPILE_TIMEOUT_S) -> OperationResponse:
        """Compile a kernel, choosing it by measurements on the device, and wait for the operation."""
        return self._run(self._calls.compile(body, timeout_s, "measure"))

    def submit(self, body: KernelBody) -> OperationResponse:
        """Begin to compile a kernel, and return the operation at once."""
        return self._run(self._calls.submit(body))

    def batch_compile(
        self, bodies: Sequence[KernelBody], timeout_s: float | None = MODEL_TIMEOUT_S
    ) -> list[OperationResponse | RollerError]:
        """Compile kernels and wait for them; return the operation or the error of each, in their order."""
        return self._run(self._calls.batch_compile(bodies, timeout_s))

    def compile_for_targets(
        self, body: KernelBody, targets: Sequence[str], timeout_s: float | None = MODEL_TIMEOUT_S
    ) -> dict[str, OperationResponse | RollerError]:
        """Compile a kernel for several targets by one request and wait; return the operation or the error of each.

        The target or the spec in the body does not count.
        """
        return self._run(self._calls.compile_for_targets(body, targets, timeout_s))

    def compile_model(
        self,
        source: ModelFile,
        target: str,
        options: GraphOptions | None = None,
        timeout_s: float | None = MODEL_TIMEOUT_S,
    ) -> ModelOperationResponse:
        """Compile an ONNX file (path or bytes) or a JSON graph (dict), and wait. Raises the error of a failed build."""
        return self._run(self._calls.compile_model(source, target, options, timeout_s))

    def compile_models(
        self,
        sources: Mapping[str, ModelFile],
        targets: Sequence[str],
        options: GraphOptions | None = None,
        timeout_s: float | None = MODEL_TIMEOUT_S,
    ) -> dict[str, dict[str, ModelOperationResponse | RollerError]]:
        """Compile models, given by names, each for several targets, and wait for all.

        Return the operation or the error of each model and target.
        """
        return self._run(self._calls.compile_models(sources, targets, options, timeout_s))

    def estimate_model(self, source: ModelFile, target: str, options: GraphOptions | None = None) -> GraphEstimateResponse:
        """Estimate a model, as `compile_model` takes it, without a build."""
        return self._run(self._calls.estimate_model(source, target, options))

    def put_blob(self, content: bytes) -> str:
        """Upload a file and return its digest."""
        return self._run(self._calls.put_blob(content))

    def operation(self, name: str, wait_s: float = 0) -> AnyOperation:
        """Return an operation, `operations/ID`; wait for it for some time."""
        return self._run(self._calls.operation(name, wait_s))

    def wait(self, name: str, timeout_s: float | None = COMPILE_TIMEOUT_S) -> AnyOperation:
        """Wait until an operation is done. Raises the error of a failed build."""
        return self._run(self._calls.wait(name, timeout_s))

    def cancel(self, name: str, *, for_all: bool = False) -> AnyOperation:
        """Withdraw from an operation, which ends when nobody waits for it; `for_all` needs the scope admin."""
        return self._run(self._calls.cancel(name, for_all=for_all))

    def operations(self) -> Iterator[AnyOperation]:
        """Yield the operations of this client, the latest first."""
        token = ""
        while True:
            page = self._run(self._calls.page(PAGE_SIZE, token))
            yield from page.operations
            token = page.next_page_token
            if not token:
                return

    def events(self, name: str, after: int = 0) -> Iterator[OperationEvent]:
        """Yield the events of an operation as they happen, until it is done. A lost connection is made again."""
        number, failures, is_last = after, 0, False
        while True:
            reply: Reply
            try:
                headers = {"Last-Event-ID": str(number)}
                with self._http.stream("GET", f"/v1/{name}/events", headers=headers) as response:
                    reply = response
                    if not response.is_success:
                        response.read()
                    for event in decode_events(response):
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
            is_last = self.operation(name).done  # its last events may have been missed
            if not is_last:
                self._sleep(pause_s)

    def estimates(self, body: EstimateRequest | Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return an entry for each item and target, which may have an `error`."""
        return self._run(self._calls.estimates(body))

    def hardware(self) -> list[dict[str, Any]]:
        """Return the devices and whether the service compiles for them."""
        return self._run(self._calls.hardware())

    def explain(self, request: KernelBody) -> ActionResponse:
        """Return whether the store has the result of a request, or else how the nearest stored request differs."""
        return self._run(self._calls.explain(request))

    def validate_hardware(self, hardware: str | Mapping[str, Any]) -> dict[str, Any]:
        """Return a spec, given as YAML text or as JSON, in its normal form. Raises SpecError."""
        return self._run(self._calls.validate_hardware(hardware))

    def version(self) -> dict[str, Any]:
        """Return the version of the service and everything else that determines the results of its builds."""
        return self._run(self._calls.version())

    def model_tuning(self, digest: str) -> dict[str, Any]:
        """Return the trials of a model that was compiled with `tune="now"`: choices, seconds, what was chosen."""
        return self._run(self._calls.model_tuning(digest))

    def model_story(self, digest: str) -> dict[str, Any]:
        """Return the story of a model: nodes, when each core does what, and memory, as `Model.story`."""
        return self._run(self._calls.model_story(digest))

    def model_plan(self, digest: str) -> dict[str, Any]:
        """Return the plan of a model with all its steps, as `Model.plan`."""
        return self._run(self._calls.model_plan(digest))

    def check_plan(self, digest: str, programs: Sequence[Any], bucket: int = 0) -> dict[str, Any]:
        """Return `seconds` and `instructions` of edited programs of a model's plan. Raises ArgumentError for illegal ones.

        Args:
            digest: the model's.
            programs: for each step of the plan with `vdevice`, its `programs`.
            bucket: number of the bucket.
        """
        return self._run(self._calls.check_plan(digest, programs, bucket))

    def file(self, link: str) -> bytes:
        """Download a file by its link."""
        return self._run(self._calls.file(link))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _run(self, call: Call[T]) -> T:
        reply: Reply = None
        try:
            while True:
                step = call.send(reply)
                reply = self._perform(step)
        except StopIteration as end:
            result: T = end.value
            return result

    def _perform(self, step: Send | Sleep) -> Reply:
        if isinstance(step, Sleep):
            self._sleep(step.seconds)
            return None
        try:
            return self._http.request(**request_arguments(step))
        except (httpx.TransportError, httpx.InvalidURL) as failure:
            return failure


def authorization(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def request_arguments(send: Send) -> dict[str, Any]:
    """Return a request as arguments of httpx."""
    timeout = httpx.Timeout(send.timeout_s, connect=min(CONNECT_TIMEOUT_S, send.timeout_s))
    return {
        "method": send.method,
        "url": send.path,
        "json": send.json,
        "headers": dict(send.headers),
        "content": send.content,
        "timeout": timeout,
    }


def decode_events(response: httpx.Response) -> Iterator[OperationEvent]:
    """Yield the events of a successful response."""
    if not response.is_success:
        return
    decoder = EventDecoder()
    for line in response.iter_lines():
        event = decoder.feed(line)
        if event is not None:
            yield event
