"""Both clients, which share one core: retries, deadlines, batches, pages, events, against scripted services."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from builders import BODY

from roller_svc.client import AsyncClient, Client, RetryPolicy
from roller_svc.client.events import EventDecoder
from roller_svc.client.retry import MAX_RETRY_AFTER_S, parse_retry_after
from roller_svc.client.schemas import CompileRequest, EstimateRequest
from roller_svc.errors import (
    ArgumentError,
    BuildServiceError,
    CancelledError,
    ConflictError,
    ForbiddenError,
    QuotaExceededError,
    RollerError,
    SpecError,
)

REQUEST = CompileRequest.model_validate(BODY)
ESTIMATE = EstimateRequest.model_validate(
    {"items": [{"expression": BODY["expression"], "inputs": BODY["inputs"]}], "targets": ["cpu-x86-avx2"]}
)
FACTS = {
    "digest": "sha256:0", "target": "t", "expression": "e", "language": "c", "launches": [], "resources": [],
    "estimate": {"seconds": 1.0, "bound": "dram", "stages": [], "occupancy": 1.0, "waves": 1}, "measurement": None,
    "links": {},
}  # fmt: skip
Step = httpx.Response | Exception


def operation(number: int = 1, *, done: bool = True, **fields: Any) -> dict[str, Any]:
    metadata = {"stage": "done" if done else "queued", "cache": "miss", "create_time": "now"}
    outcome = {"response": FACTS} if done and not fields else fields
    return {"name": f"operations/{number}", "done": done, "metadata": metadata, **outcome}


def problem(status: int, code: str, **headers: str) -> httpx.Response:
    body = {"type": "", "title": "", "status": status, "detail": "no", "code": code, "errors": []}
    return httpx.Response(status, json=body, headers={name.replace("_", "-"): value for name, value in headers.items()})


def answer(document: object, status: int = 200) -> httpx.Response:
    return httpx.Response(status, json=document)


class Service:
    """Gives its steps as replies, one for each request, and records the requests and the pauses between them."""

    def __init__(self, *steps: Step) -> None:
        self.steps = list(steps)
        self.requests: list[httpx.Request] = []
        self.pauses: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return httpx.Response(step.status_code, headers=step.headers, content=step.content)

    @property
    def bodies(self) -> list[Any]:
        return [json.loads(request.content) for request in self.requests if request.content]


Run = Callable[[Service, Callable[[Any], Any]], Any]


def run_sync(service: Service, use: Callable[[Any], Any], policy: RetryPolicy) -> Any:
    transport = httpx.MockTransport(service)
    with Client("http://there", api_key="k", retry=policy, transport=transport, sleep=service.pauses.append) as client:
        result = use(client)
        return list(result) if inspect.isgenerator(result) else result


def run_async(service: Service, use: Callable[[Any], Any], policy: RetryPolicy) -> Any:
    async def sleep(seconds: float) -> None:
        service.pauses.append(seconds)

    async def run() -> Any:
        transport = httpx.MockTransport(service)
        async with AsyncClient("http://there", api_key="k", retry=policy, transport=transport, sleep=sleep) as client:
            result = use(client)
            return [each async for each in result] if inspect.isasyncgen(result) else await result

    return asyncio.run(run())


@pytest.fixture(params=[run_sync, run_async], ids=["sync", "async"])
def run(request: pytest.FixtureRequest) -> Run:
    policy = RetryPolicy(attempts=4, base_s=1.0, max_s=3.0, random=lambda: 1.0)
    return lambda service, use: request.param(service, use, policy)


def test_the_clients_have_the_same_methods() -> None:
    for name, method in inspect.getmembers(Client, inspect.isfunction):
        if not name.startswith("_"):
            twin = getattr(AsyncClient, name)
            assert list(inspect.signature(twin).parameters) == list(inspect.signature(method).parameters), name
            assert inspect.getdoc(twin) == inspect.getdoc(method), name


# ---------------------------------------------------------------- retries


@pytest.mark.parametrize(
    "step",
    [
        problem(503, "queue-full"),
        problem(502, "http-error"),
        problem(504, "http-error"),
        problem(429, "quota-exceeded"),
        httpx.ConnectError("refused"),
        httpx.ReadError("reset"),
        httpx.RemoteProtocolError("cut"),
        httpx.ReadTimeout("late"),
    ],
    ids=str,
)
def test_transient_failures_are_tried_again(run: Run, step: Step) -> None:
    service = Service(step, step, answer(operation()))
    assert run(service, lambda client: client.compile(REQUEST)).response.digest == "sha256:0"
    keys = {request.headers["Idempotency-Key"] for request in service.requests}
    assert len(service.requests) == 3
    assert len(keys) == 1  # the repetition of a request has its key
    assert service.requests[0].headers["Authorization"] == "Bearer k"
    assert service.pauses == [1.0, 2.0]


def test_a_new_request_has_a_new_key(run: Run) -> None:
    services = [Service(answer(operation())) for _ in range(2)]
    for service in services:
        run(service, lambda client: client.compile(REQUEST))
    assert len({service.requests[0].headers["Idempotency-Key"] for service in services}) == 2


def test_failures_that_last_are_raised(run: Run) -> None:
    service = Service(*(problem(503, "queue-full") for _ in range(4)))
    with pytest.raises(BuildServiceError) as failed:
        run(service, lambda client: client.compile(REQUEST))
    assert failed.value.code == "queue-full"
    assert service.pauses == [1.0, 2.0, 3.0]  # the last one is cut


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (problem(422, "wrong-rank"), RollerError),
        (problem(403, "insufficient-scope"), ForbiddenError),
        (problem(409, "idempotency-key-reused"), ConflictError),
        (problem(500, "internal"), RollerError),
        (problem(501, "toolchain-missing"), RollerError),
        (httpx.UnsupportedProtocol("ftp"), ArgumentError),
        (httpx.InvalidURL("x"), ArgumentError),
    ],
    ids=str,
)
def test_other_failures_are_final(run: Run, step: Step, kind: type[RollerError]) -> None:
    service = Service(step)
    with pytest.raises(kind):
        run(service, lambda client: client.compile(REQUEST))
    assert service.pauses == []


def test_retry_after_is_respected(run: Run) -> None:
    service = Service(
        problem(429, "quota-exceeded", Retry_After="7"), problem(503, "x", Retry_After="9999999"), answer(operation())
    )
    run(service, lambda client: client.compile(REQUEST))
    assert service.pauses == [8.0, MAX_RETRY_AFTER_S + 2.0]
    assert isinstance(QuotaExceededError(""), BuildServiceError)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("3", 3.0),
        ("", 0.0),
        ("-3", 0.0),
        ("x", 0.0),
        ("Thu, 01 Jan 2026 00:00:09 GMT", 9.0),
        ("²", 0.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("Thu, 01 Jan 2026 00:00:09", 9.0),
        ("9" * 5000, 999_999_999.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str, seconds: float) -> None:
    assert parse_retry_after(value, lambda: datetime(2026, 1, 1, tzinfo=UTC)) == seconds


def test_pauses_are_random_below_a_growing_limit() -> None:
    policy = RetryPolicy(base_s=0.5, max_s=4.0)
    for failures, limit in ((1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (2000, 4.0)):
        pauses = {policy.pause_s(failures) for _ in range(50)}
        assert len(pauses) > 40
        assert all(0 <= pause <= limit for pause in pauses)


@pytest.mark.parametrize(
    "use",
    [
        lambda client: client.hardware(),
        lambda client: client.file("/v1/blobs/x"),
        lambda client: client.version(),
        lambda client: client.put_blob(b"x"),
        lambda client: client.operation("operations/1"),
        lambda client: client.estimates(ESTIMATE),
        lambda client: client.cancel("operations/1"),
        lambda client: client.submit(REQUEST),
        lambda client: client.measure(REQUEST),
        lambda client: client.validate_hardware({}),
        lambda client: client.wait("operations/1"),
    ],
)
def test_every_call_is_tried_again(run: Run, use: Callable[[Any], Any]) -> None:
    document = operation() | {"hardware": [], "estimates": []}
    service = Service(problem(503, "queue-full"), answer(document if "validate" not in inspect.getsource(use) else {}))
    with contextlib.suppress(BuildServiceError):  # one document does not fit all calls
        run(service, use)
    assert len(service.requests) == 2


def test_nothing_is_sent_again_after_the_deadline(run: Run) -> None:
    service = Service(problem(503, "queue-full"), answer(operation()))
    with pytest.raises(BuildServiceError, match="no"):
        run(service, lambda client: client.compile(REQUEST, timeout_s=0.5))
    assert len(service.requests) == 1


# ---------------------------------------------------------------- operations


def test_an_operation_is_waited_for(run: Run) -> None:
    service = Service(
        answer(operation(done=False), 202),
        answer(operation(done=False)),
        problem(503, "shutting-down"),
        answer(operation()),
    )
    assert run(service, lambda client: client.compile(REQUEST)).done
    assert service.requests[0].headers["Prefer"] == "wait=30"
    assert service.requests[1].url.path == "/v1/operations/1"
    assert service.requests[1].url.params["wait"].startswith("30")


def test_a_call_ends_at_its_deadline(run: Run) -> None:
    service = Service(*(answer(operation(done=False)) for _ in range(10_000)))
    with pytest.raises(BuildServiceError) as late:
        run(service, lambda client: client.compile(REQUEST, timeout_s=0.05))
    assert late.value.code == "timeout"
    assert float(service.requests[0].headers["Prefer"].removeprefix("wait=")) <= 0.05


def test_a_cancelled_operation_is_an_error_of_its_own(run: Run) -> None:
    error = json.loads(problem(499, "operation-cancelled").content)
    service = Service(answer(operation(error=error)))
    with pytest.raises(CancelledError):
        run(service, lambda client: client.wait("operations/1"))
    service = Service(answer(operation(error=error)))
    assert run(service, lambda client: client.cancel("operations/1", for_all=True)).error.code == "operation-cancelled"
    assert service.bodies == [{"for_all": True}]
    assert service.requests[0].url.path == "/v1/operations/1:cancel"


def test_pages_are_read_one_after_the_other(run: Run) -> None:
    pages: Iterable[tuple[list[int], str]] = [([1, 2], "t1"), ([], "t2"), ([3], "")]
    service = Service(
        *(answer({"operations": [operation(n) for n in numbers], "next_page_token": token}) for numbers, token in pages)
    )
    found = run(service, lambda client: client.operations())
    assert [each.name for each in found] == ["operations/1", "operations/2", "operations/3"]
    assert [request.url.params["page_token"] for request in service.requests] == ["", "t1", "t2"]


def test_measure_has_its_own_path(run: Run) -> None:
    service = Service(answer(operation()))
    run(service, lambda client: client.measure(REQUEST))
    assert service.requests[0].url.path == "/v1/kernels:measure"


def test_a_spec_with_faults_is_an_error(run: Run) -> None:
    with pytest.raises(SpecError):
        run(Service(problem(422, "invalid-spec")), lambda client: client.validate_hardware("a: 1"))
    valid = Service(answer({"hardware": {"id": "x"}}))
    assert run(valid, lambda client: client.validate_hardware({"id": "x"})) == {"id": "x"}


# ---------------------------------------------------------------- batches


def test_a_batch_sends_rejected_items_again_and_waits(run: Run) -> None:
    full = {"error": json.loads(problem(429, "quota-exceeded").content)}
    wrong = {"error": json.loads(problem(422, "wrong-rank").content)}
    service = Service(
        answer({"results": [{"operation": operation(1, done=False)}, full, wrong, full]}),
        answer({"results": [{"operation": operation(2)}, full]}),
        answer({"results": [{"operation": operation(4)}]}),
        answer(operation(1)),
    )
    results = run(service, lambda client: client.batch_compile([REQUEST] * 4))
    assert [getattr(each, "name", getattr(each, "code", None)) for each in results] == [
        "operations/1",
        "operations/2",
        "wrong-rank",
        "operations/4",
    ]
    assert all(each.done for each in results if not isinstance(each, RollerError))
    assert [len(body["requests"]) for body in service.bodies] == [4, 2, 1]
    assert service.pauses == [1.0, 2.0]


def test_a_batch_ends_at_its_deadline(run: Run) -> None:
    full = {"error": json.loads(problem(503, "queue-full").content)}
    service = Service(answer({"results": [full, {"operation": operation(1, done=False)}]}))
    service.steps += [answer(operation(1, done=False)) for _ in range(10_000)]
    first, second = run(service, lambda client: client.batch_compile([REQUEST] * 2, timeout_s=0.05))
    assert (first.code, second.code) == ("queue-full", "timeout")


def test_a_long_batch_is_sent_in_parts(run: Run) -> None:
    sizes = (256, 256, 88)
    service = Service(*(answer({"results": [{"operation": operation()}] * size}) for size in sizes))
    assert len(run(service, lambda client: client.batch_compile([REQUEST] * 600))) == 600
    assert [len(body["requests"]) for body in service.bodies] == list(sizes)


def test_a_kernel_for_several_targets_is_one_request(run: Run) -> None:
    full = {"error": json.loads(problem(503, "queue-full").content)}
    service = Service(
        answer({"results": [{"operation": operation(1, done=False)}, full]}),
        answer({"results": [{"operation": operation(2)}]}),
        answer(operation(1)),
    )
    results = run(service, lambda client: client.compile_for_targets(REQUEST, ["a", "b", "a"]))
    assert {target: each.name for target, each in results.items()} == {"a": "operations/1", "b": "operations/2"}
    assert all(each.done for each in results.values())
    assert [[each["targets"] for each in body["requests"]] for body in service.bodies] == [[["a", "b"]], [["b"]]]
    assert "target" not in service.bodies[0]["requests"][0]


def test_more_targets_than_a_request_takes_are_several_requests(run: Run) -> None:
    service = Service(answer({"results": [{"operation": operation()}] * 100}))
    assert len(run(service, lambda client: client.compile_for_targets(REQUEST, [str(number) for number in range(100)]))) == 100
    assert [len(each["targets"]) for each in service.bodies[0]["requests"]] == [64, 36]


def test_models_are_all_queued_before_one_is_waited_for(run: Run) -> None:
    waiting, done = ({"name": f"operations/{n}", "done": n > 1, "metadata": operation()["metadata"]} for n in (1, 2))
    service = Service(
        answer({"results": [{"operation": waiting}]}),
        problem(422, "invalid-model"),
        answer({"results": [{"operation": done}]}),
        answer(waiting | {"done": True}),
    )
    results = run(service, lambda client: client.compile_models({"a": {}, "bad": {}, "c": {}}, ["x"]))
    assert [getattr(results[name]["x"], "name", None) for name in ("a", "c")] == ["operations/1", "operations/2"]
    assert results["bad"]["x"].code == "invalid-model"
    assert [request.url.path for request in service.requests] == ["/v1/graphs:batchCompile"] * 3 + ["/v1/operations/1"]


def test_no_targets_are_an_error(run: Run) -> None:
    with pytest.raises(ArgumentError):
        run(Service(), lambda client: client.compile_for_targets(REQUEST, []))


def test_too_few_results_are_an_error(run: Run) -> None:
    with pytest.raises(BuildServiceError, match="expected 2 results"):
        run(Service(answer({"results": [{"operation": operation()}]})), lambda client: client.batch_compile([REQUEST] * 2))


# ---------------------------------------------------------------- events


def stream(*events: tuple[int, str]) -> httpx.Response:
    blocks = ["retry: 1000\n\n", ": keep-alive\n\n"]
    for number, kind in events:
        data = json.dumps({"number": number, "type": kind, "time": "now", "data": {"n": number}})
        blocks.append(f"id: {number}\nevent: {kind}\ndata: {data}\n\n")
    return httpx.Response(200, content="".join(blocks).encode())


def test_events_resume_after_a_lost_connection(run: Run) -> None:
    service = Service(
        stream((1, "queued"), (2, "building")),
        answer(operation(done=False)),
        httpx.ReadError("cut"),
        answer(operation(done=False)),
        problem(503, "queue-full"),
        answer(operation(done=False)),
        stream((3, "done")),
    )
    events = run(service, lambda client: client.events("operations/1"))
    assert [(event.number, event.type) for event in events] == [(1, "queued"), (2, "building"), (3, "done")]
    streams = [request for request in service.requests if request.url.path.endswith("/events")]
    assert [request.headers["Last-Event-ID"] for request in streams] == ["0", "2", "2", "2"]
    assert len(service.pauses) == 3


def test_events_of_an_operation_that_is_done_end(run: Run) -> None:
    service = Service(stream(), answer(operation()), stream())
    assert run(service, lambda client: client.events("operations/1", after=3)) == []


def test_events_of_an_unknown_operation_are_an_error(run: Run) -> None:
    with pytest.raises(RollerError) as unknown:
        run(Service(problem(404, "unknown-operation")), lambda client: client.events("operations/1"))
    assert unknown.value.code == "unknown-operation"


def test_a_service_that_stays_away_ends_the_events(run: Run) -> None:
    service = Service(*[step for _ in range(4) for step in (httpx.ConnectError("no"), answer(operation(done=False)))])
    with pytest.raises(BuildServiceError) as away:
        run(service, lambda client: client.events("operations/1"))
    assert away.value.code == "server-unreachable"


def test_the_decoder_follows_the_standard() -> None:
    decoder = EventDecoder()
    data = json.dumps({"number": 1, "type": "x", "time": "now", "data": {}})
    head, tail = data[:4], data[4:]
    lines = [":comment", "", "id: 1", "", "data:" + data, "event: x", "unknown: y", "nothing", "", "data: " + head]
    found = [event for line in lines if (event := decoder.feed(line))]
    assert [event.number for event in found] == [1]
    with pytest.raises(BuildServiceError) as damaged:
        decoder.feed("data: " + tail) or decoder.feed("")  # two lines, which cut a text
    assert damaged.value.code == "bad-answer"


def test_a_request_may_be_a_mapping(run: Run) -> None:
    service = Service(answer(operation()))
    assert run(service, lambda client: client.compile(BODY)).response.digest == "sha256:0"
    assert json.loads(service.requests[0].content) == BODY
