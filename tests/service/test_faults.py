"""Connections that are slow, cut, refused or held back: right results or clear errors, and recovery by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from builders import text_kernel
from databases import new_database, postgresql_server
from fault_proxy import FaultProxy, fault_proxy
from serving import running, served
from sqlalchemy.engine import make_url
from waiting import wait_until

from roller_svc.client import NO_RETRIES, Client
from roller_svc.client.schemas import CompileRequest
from roller_svc.errors import RollerError
from roller_svc.farm.store import Artifact
from roller_svc.ir.report import BuildRequest
from roller_svc.service import readiness
from roller_svc.service.app import create_app
from roller_svc.settings import Settings

TYPES = {"x": {"dtype": "float32", "shape": [64]}}


def build(request: BuildRequest) -> Artifact:
    return text_kernel(request, request.expression)


def compile_request(number: int) -> CompileRequest:
    return CompileRequest.model_validate(
        {"expression": f"y[i] = x[i] * {number}.5", "inputs": TYPES, "target": "cpu-x86-avx2", "options": {"select": "model"}}
    )


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultProxy]:
    """A proxy between clients and a service."""
    app = create_app(Settings(store=tmp_path_factory.mktemp("store"), allowed_hosts="127.0.0.1"), build)
    with running(app) as (_, port), fault_proxy(port) as made:
        yield made


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[Client]:
    made = Client(f"http://127.0.0.1:{proxy.port}", sleep=lambda _: time.sleep(0.01))
    yield made
    made.close()


@pytest.mark.parametrize("count", [0, 1, 60, 400])
def test_a_response_that_is_cut_is_asked_for_again(proxy: FaultProxy, client: Client, count: int) -> None:
    proxy.faults.cut_after_bytes, proxy.faults.cuts = count, 2
    operation = client.compile(compile_request(count))
    assert operation.done
    assert operation.response is not None
    assert operation.response.expression == f"y[i] = x[i] * {count}.5"
    assert proxy.faults.cuts == 0


def test_a_cut_response_is_a_clear_error_without_retries(proxy: FaultProxy) -> None:
    proxy.faults.cut_after_bytes, proxy.faults.cuts = 60, 1
    client = Client(f"http://127.0.0.1:{proxy.port}", retry=NO_RETRIES)
    with pytest.raises(RollerError) as raised:
        client.compile(compile_request(1))
    client.close()
    assert raised.value.code == "server-unreachable"


def test_a_slow_connection_gets_the_same_result(proxy: FaultProxy, client: Client) -> None:
    expected = client.compile(compile_request(2))
    proxy.faults.delay_s, proxy.faults.part_bytes = 0.005, 64
    try:
        found = client.compile(compile_request(2))
    finally:
        proxy.faults.delay_s, proxy.faults.part_bytes = 0.0, 1 << 16
    assert found.response == expected.response


def test_a_service_that_refuses_for_a_while_is_found_again(proxy: FaultProxy, client: Client) -> None:
    proxy.faults.refuses = True
    with pytest.raises(RollerError):
        client.compile(compile_request(3), 0.2)
    proxy.faults.refuses = False
    assert client.compile(compile_request(3)).done


def wait_until_ready(client: httpx.Client) -> None:
    wait_until(lambda: client.get("/readyz").status_code == 200)


@pytest.mark.slow
def test_a_database_that_hangs_is_named_and_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "MAX_AGE_S", 0.0)
    with postgresql_server() as url:
        database = make_url(new_database(url))
        socket = f"{database.query['host']}/.s.PGSQL.{database.port or 5432}"
        with fault_proxy(socket) as between:
            reached = database.set(host="127.0.0.1", port=between.port, query={})
            settings = Settings(store=tmp_path, database=reached.render_as_string(hide_password=False))
            with served(create_app(settings, build)) as client:
                wait_until_ready(client)
                between.faults.holds = True
                with monkeypatch.context() as hurried:
                    hurried.setattr(readiness, "TIMEOUT_S", 0.5)
                    away = client.get("/readyz")
                assert (away.status_code, away.json()["parts"]["database"]) == (503, "timeout")
                assert client.get("/healthz").status_code == 200
                between.faults.holds = False
                wait_until_ready(client)
                body = compile_request(4).model_dump(mode="json", exclude_none=True)
                assert client.post("/v1/kernels:compile", json=body, headers={"Prefer": "wait=30"}).json()["done"]
