"""Logs: one form for all libraries, the context of request and operation, and no secrets."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_process import running
from serving import served
from structlog.contextvars import bound_contextvars

from roller_svc.farm.store import Artifact
from roller_svc.ir.report import BuildRequest
from roller_svc.service.app import create_app
from roller_svc.service.logs import LogFormatter, Redactor, secrets_of
from roller_svc.service.request_log import choose_request_id
from roller_svc.settings import LogFormat, Settings

BODY = {"expression": "y[i] = x[i]", "inputs": {"x": {"dtype": "float32", "shape": [4]}}, "target": "cpu-x86-avx2"}
DATABASE_PASSWORD, BROKER_PASSWORD, KEY = "pass%2Fword-of-db", "password-of-mq", "environment-key"
SETTINGS = Settings(
    database=f"postgresql://u:{DATABASE_PASSWORD}@db/roller",
    broker=f"amqp://u:{BROKER_PASSWORD}@mq//",
    api_keys=f"{KEY}, other-key",
    api_key="key-of-the-client",
)


def formatted(log_format: LogFormat, message: str, *arguments: object, redactor: Redactor, **extra: object) -> str:
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    handler.setFormatter(LogFormatter(log_format, redactor))
    logger = logging.Logger("library")
    logger.addHandler(handler)
    logger.warning(message, *arguments, extra=extra)
    return output.getvalue()


def test_a_record_of_any_library_has_the_context_and_its_own_fields() -> None:
    with bound_contextvars(request_id="r1", operation="o1"):
        line = formatted("json", "attempt %d", 3, redactor=Redactor(), seconds=0.5, color_message="x")
    document = json.loads(line)
    assert document.pop("timestamp").endswith("Z")
    assert document == {
        "event": "attempt 3",
        "level": "warning",
        "logger": "library",
        "request_id": "r1",
        "operation": "o1",
        "seconds": 0.5,
    }
    assert line.count("\n") == 1


def test_text_has_the_same_fields() -> None:
    with bound_contextvars(request_id="r1"):
        line = formatted("console", "hello", redactor=Redactor(), seconds=0.5)
    assert all(part in line for part in ("warning", "hello", "request_id=r1", "seconds=0.5"))


@pytest.mark.parametrize("log_format", ["json", "console"])
@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("cannot reach postgresql+psycopg://roller:{}@db:5432/roller", "hunter2"),
        ("cannot reach amqps://roller:{}@mq//", "p:a/ss"),
        ("Authorization: Bearer {}", "rk_0123456789ab_" + "A" * 43),
        ("the key {} is unknown", "rk_0123456789ab_" + "A" * 43),
        ("token {}", "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJ4In0.c2lnbmF0dXJl"),
        ("GET /bucket?X-Amz-Signature={}&x=1", "0123456789abcdef"),
        ("{}", DATABASE_PASSWORD),
        ("{}", "pass/word-of-db"),
        ("{}", BROKER_PASSWORD),
        ("{}", KEY),
        ("{}", "other-key"),
        ("{}", "key-of-the-client"),
    ],
)
def test_secrets_are_redacted_wherever_they_are(log_format: LogFormat, text: str, secret: str) -> None:
    redactor = Redactor(secrets_of(SETTINGS))
    said = text.format(secret)
    for line in (
        formatted(log_format, said, redactor=redactor),
        formatted(log_format, "%s", said, redactor=redactor),
        formatted(log_format, "x", redactor=redactor, where={"deep": [said]}),
        formatted(log_format, "x", redactor=redactor, error=ValueError(said)),
    ):
        assert secret.removeprefix("rk_0123456789ab_") not in line
        assert "***" in line


def test_a_secret_of_an_exception_is_redacted() -> None:
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    handler.setFormatter(LogFormatter("json", Redactor(secrets_of(SETTINGS))))
    logger = logging.Logger("library")
    logger.addHandler(handler)
    try:
        raise ValueError(f"amqp://u:unknown-password@mq refused {KEY}")
    except ValueError:
        logger.exception("failed")
    document = json.loads(output.getvalue())
    assert "ValueError" in document["exception"]
    assert "unknown-password" not in output.getvalue()
    assert KEY not in output.getvalue()


def test_ordinary_text_is_unchanged() -> None:
    text = "GET http://127.0.0.1:8000/v1/kernels?x=1 mail me@example sha256:0123 C[m, n] +=! A[m, k] * B[k, n]"
    assert Redactor(secrets_of(SETTINGS)).redact(text) == text


@pytest.mark.parametrize("offered", ["a", "0f3c-A.b_9", "x" * 64])
def test_a_valid_request_id_is_kept(offered: str) -> None:
    assert choose_request_id([offered]) == offered


@pytest.mark.parametrize("offered", [[], [""], ["x" * 65], ["a b"], ["a\n"], ["é"], ["a", "b"], ['"}'], ["a\x7f"]])
def test_another_request_id_is_replaced(offered: list[str]) -> None:
    assert choose_request_id(offered) not in offered


def unused(_: BuildRequest) -> Artifact:
    raise AssertionError


def test_a_request_is_logged_with_its_id_and_client(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(Settings(store=tmp_path, api_keys=KEY), unused)
    with caplog.at_level(logging.DEBUG), served(app) as client:
        response = client.get("/nothing%0a?secret=1", headers={"X-Request-ID": "mine", "X-API-Key": KEY})
        client.get("/healthz")
    assert response.headers["x-request-id"] == "mine"
    logged = [record for record in caplog.records if record.getMessage() == "request"]
    assert [(r.levelname, r.method, r.path, r.status) for r in logged] == [
        ("INFO", "GET", "/nothing%0a", 404),
        ("DEBUG", "GET", "/healthz", 200),
    ]
    assert not any("secret" in str(vars(record)) for record in logged)


@pytest.fixture(scope="module")
def lines() -> Iterator[list[dict[str, Any]]]:
    """What a service logs as JSON in which a kernel is built and a client is refused."""
    environment = {
        "ROLLER_LOG_FORMAT": "json", "ROLLER_API_KEYS": KEY,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parents[2])]),
    }  # fmt: skip
    with running(environment=environment) as service:
        address = f"http://127.0.0.1:{service.port}"
        headers = {"X-API-Key": KEY, "X-Request-ID": "the-build", "Prefer": "wait=60"}
        built = httpx.post(f"{address}/v1/kernels:compile", json=BODY, headers=headers, timeout=90)
        assert built.json()["done"], built.text
        httpx.get(f"{address}/v1/version", headers={"Authorization": f"Bearer {KEY}x"}, timeout=60.0)
        content = service.log.read_text()
    assert KEY not in content
    return [json.loads(line) for line in content.splitlines()]


@pytest.mark.slow
def test_the_lines_of_a_build_have_the_ids_of_request_and_operation(lines: list[dict[str, Any]]) -> None:
    of_build = {line["event"]: line for line in lines if line.get("request_id") == "the-build"}
    assert set(of_build) == {"request", "attempt begins", "attempt ends"}
    assert len({line["operation"] for line in of_build.values()}) == 1
    assert of_build["attempt ends"]["attempt"] == 1
    assert of_build["attempt ends"]["code"] == "ok"
    assert of_build["attempt begins"]["worker"]
    assert of_build["request"]["client"]
    assert of_build["request"]["cache"] == "miss"


@pytest.mark.slow
def test_uvicorn_and_refused_requests_are_in_the_same_form(lines: list[dict[str, Any]]) -> None:
    assert any(line["logger"] == "uvicorn.error" and "running on" in line["event"] for line in lines)
    refused = next(line for line in lines if line["event"] == "request" and line["status"] == 401)
    assert refused["path"] == "/v1/version"
    assert "client" not in refused
    assert all(set(line) >= {"event", "level", "logger", "timestamp"} for line in lines)
