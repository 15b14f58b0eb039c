"""The image and the compose files run for real: built by buildah, run by podman."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import httpx
import pytest
from container_engine import ROOT, Compose, Engine

from roller_svc.client import Client
from roller_svc.client.schemas import CompileRequest, OperationResponse

pytestmark = pytest.mark.containers

KEY = "key-of-the-containers-test"
URL = "http://127.0.0.1:8000"
PASSWORDS = {f"{server}_PASSWORD": f"password0of0{server.lower()}" for server in ("POSTGRES", "RABBITMQ", "S3")}
START_S = 120.0
BUILD_S = 300.0
SIZES = range(1000, 1012)


def wait_until(condition: Callable[[], object], within_s: float = START_S) -> None:
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.2)


def is_ready() -> bool:
    try:
        return httpx.get(f"{URL}/readyz", timeout=5.0).status_code == 200
    except httpx.TransportError:
        return False


def product_of(size: int, target: str) -> CompileRequest:
    matrix = {"dtype": "float16", "shape": [size, 256]}
    body = {
        "expression": "C[m, n] +=! A[m, k] * B[n, k]", "inputs": {"A": matrix, "B": matrix}, "target": target,
        "options": {"select": "model"},
    }  # fmt: skip
    return CompileRequest.model_validate(body)


@pytest.fixture
def client() -> Iterator[Client]:
    with Client(URL, api_key=KEY) as made:
        yield made


@pytest.fixture
def service(engine: Engine, product: str) -> Iterator[str]:
    """A container of the image as compose.yaml runs it; its name."""
    name = "roller-test-service"
    engine.podman(
        "run",
        "--detach",
        "--rm",
        "--name",
        name,
        "--publish",
        "127.0.0.1:8000:8000",
        "--read-only",
        "--cap-drop",
        "all",
        "--security-opt",
        "no-new-privileges",
        "--pids-limit",
        "512",
        "--memory",
        "8g",
        "--tmpfs",
        "/tmp:exec,nosuid,nodev,size=2g",
        "--volume",
        f"{name}:/var/lib/roller",
        "--env",
        f"ROLLER_API_KEYS={KEY}",
        "--no-healthcheck",
        product,
        "serve",
        "--workers",
        "2",
    )
    yield name
    engine.podman("rm", "--force", "--time", "20", name)
    engine.podman("volume", "rm", "--force", name)


def test_a_service_without_privileges_builds_for_cpus_and_gpus(engine: Engine, service: str, client: Client) -> None:
    wait_until(is_ready)
    for target in ("cpu-x86-avx2", "nvidia-h200-sxm"):
        done = client.compile(product_of(64, target))
        assert done.response is not None
        assert client.file(done.response.links["metadata"])
    assert engine.podman("exec", service, "id", "-u").strip() == "10001"
    assert not engine.succeeds("exec", service, "touch", "/opt/roller/file")


@pytest.fixture
def farm(engine: Engine, product: str, servers: dict[str, str]) -> Iterator[Compose]:
    settings = servers | PASSWORDS | {"ROLLER_IMAGE": product, "ROLLER_API_KEYS": KEY}
    compose = Compose(engine, ROOT / "docker" / "compose.farm.yaml", settings)
    try:
        compose("up", "--no-start")  # podman before 4.6 does not wait for what a service depends on
        names = compose.containers()
        engine.podman("start", names["postgres"], names["rabbitmq"], names["s3"])
        for server in ("postgres", "rabbitmq"):
            wait_until(partial(engine.succeeds, "healthcheck", "run", names[server]))
        engine.podman("start", names["bucket"])
        assert engine.podman("wait", names["bucket"]).strip() == "0"
        engine.podman("start", names["api"], names["worker1"], names["worker2"])
        yield compose
    finally:
        compose("down", "--volumes")


def test_a_farm_loses_no_build_of_a_killed_worker(engine: Engine, farm: Compose, client: Client) -> None:
    wait_until(is_ready)
    wait_until(lambda: len(workers()) == 2)
    submitted = [client.submit(product_of(size, "nvidia-h200-sxm")) for size in SIZES]
    wait_until(lambda: any(each.metadata.worker for each in client.operations() if not each.done))
    victim = next(each.metadata.worker for each in client.operations() if not each.done and each.metadata.worker)
    container = workers()[victim]
    engine.podman("kill", "--signal", "KILL", container)
    done = [client.wait(each.name, BUILD_S) for each in submitted]
    kernels = [each.response for each in done if isinstance(each, OperationResponse)]
    assert len({kernel.digest for kernel in kernels if kernel}) == len(SIZES)
    assert max(each.metadata.attempt for each in done) == 2
    for kernel in kernels:
        assert kernel
        assert client.file(kernel.links["binary"])[:4] == b"\x7fELF"


def workers() -> dict[str, str]:
    """Return the host of each worker that is alive: the id of its container."""
    answer = httpx.get(f"{URL}/v1/workers", headers={"Authorization": f"Bearer {KEY}"}, timeout=10.0)
    return {worker["id"]: worker["host"] for worker in answer.json()["workers"]}
