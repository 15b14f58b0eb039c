"""A service on each kind of store: kernels and uploads are stored, found again and collected."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import BODY, Builder, digest_of
from s3_server import S3Server, s3_server
from serving import served

from roller_svc import settings as current
from roller_svc.errors import ArgumentError
from roller_svc.farm.collection import collect
from roller_svc.service.app import create_app
from roller_svc.service.worker import FarmWorker
from roller_svc.settings import Settings


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(params=["folder", "memory", "s3"])
def settings(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    database = f"sqlite:///{tmp_path}/operations.db"
    match request.param:
        case "folder":
            return Settings(store=tmp_path / "store", database=database, workers=1)
        case "memory":
            return Settings(store="memory:", database=database, workers=1)
        case _:
            server: S3Server = request.getfixturevalue("s3")
            variables = {"ENDPOINT_URL": server.endpoint, "REGION": "us-east-1", "ACCESS_KEY_ID": "id"}
            for name, value in (variables | {"SECRET_ACCESS_KEY": "secret"}).items():
                monkeypatch.setenv(f"AWS_{name}", value)
            return Settings(store=server.location(), database=database, workers=1)


def test_a_kernel_is_built_once_read_and_collected(settings: Settings) -> None:
    builder = Builder()
    app = create_app(settings, builder, digest_of)
    with served(app) as client:
        assert client.get("/readyz").json()["status"] == "ready"
        built = client.post("/v1/kernels:compile", json=BODY, headers={"Prefer": "wait=30"}).json()
        assert built["response"]["digest"].startswith("sha256:")
        hit = client.post("/v1/kernels:compile", json=BODY).json()
        assert (hit["metadata"]["cache"], builder.built) == ("hit", 1)
        assert client.get(hit["response"]["links"]["source"]).text == BODY["expression"]
        collect(app.state.roller.store, 0, grace_s=-10.0)
        assert client.get(f"/v1/operations/{hit['name'].removeprefix('operations/')}").status_code == 404
        again = client.post("/v1/kernels:compile", json=BODY, headers={"Prefer": "wait=30"}).json()
        assert (again["metadata"]["cache"], builder.built) == ("miss", 2)


def test_a_blob_is_stored_and_read(settings: Settings) -> None:
    content = bytes(range(256)) * 5000
    path = f"/v1/blobs/sha256:{hashlib.sha256(content).hexdigest()}"
    with served(create_app(settings, Builder(), digest_of)) as client:
        assert client.put(path, content=content).status_code == 201
        assert client.put(path, content=content).status_code == 200
        assert client.get(path).content == content


def test_credentials_are_known_after_they_left_the_environment(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "_forgotten_credentials", {})
    current.forget_secrets()
    with served(create_app(settings, Builder(), digest_of)) as client:
        assert client.get("/readyz").status_code == 200


def test_a_worker_refuses_a_store_in_memory(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="in memory"):
        FarmWorker(Settings(store="memory:", database=f"sqlite:///{tmp_path}/operations.db", workers=1), ["build.cuda"])
