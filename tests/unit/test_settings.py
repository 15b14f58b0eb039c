"""Settings: from ROLLER_* variables, checked, and who may listen where."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from roller_svc import settings
from roller_svc.errors import ArgumentError
from roller_svc.settings import LIMITS, Limit, Resource, is_loopback, read_settings


def test_defaults_need_nothing() -> None:
    chosen = read_settings()
    assert (chosen.host, chosen.port, chosen.accepted_keys) == ("127.0.0.1", 8000, frozenset())


def test_variables_and_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLER_PORT", "9000")
    monkeypatch.setenv("ROLLER_STORE", "elsewhere")
    monkeypatch.setenv("ROLLER_API_KEYS", "key-1, key-2,")
    chosen = read_settings(host="10.0.0.1", store=None)
    assert (chosen.host, chosen.port, chosen.store, chosen.folder) == ("10.0.0.1", 9000, "elsewhere", Path("elsewhere"))
    assert chosen.accepted_keys == {"key-1", "key-2"}
    assert "key-1" not in repr(chosen)


@pytest.mark.parametrize(("variable", "value"), [("ROLLER_PORT", "70000"), ("ROLLER_WORKERS", "-1"), ("ROLLER_PORT", "x")])
def test_a_bad_one_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ArgumentError, match=variable) as refused:
        read_settings()
    assert refused.value.code == "invalid-setting"


@pytest.mark.parametrize("location", ["s3://bucket/prefix", "memory:"])
def test_a_store_without_a_directory_leaves_local_files_in_the_default_one(location: str) -> None:
    chosen = read_settings(store=location)
    assert (chosen.store, chosen.folder) == (location, Path("build/store"))
    assert chosen.database_url == f"sqlite:///{Path('build/store/operations.db').absolute()}"


def test_s3_credentials_leave_the_environment_and_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_forgotten_credentials", {})
    for name, value in {"ACCESS_KEY_ID": "id", "SECRET_ACCESS_KEY": "secret", "REGION": "here"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    for name in ("AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ALLOW_HTTP"):
        monkeypatch.delenv(name, raising=False)
    expected = {"aws_access_key_id": "id", "aws_secret_access_key": "secret", "allow_http": "false"}
    assert settings.s3_options() == expected
    settings.forget_secrets()
    assert "AWS_SECRET_ACCESS_KEY" not in os.environ
    assert os.environ["AWS_REGION"] == "here"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    assert settings.s3_options() == expected | {"allow_http": "true"}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_these_are_loopback_addresses(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org", ""])
def test_these_are_not(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("variable", "former", "value"),
    [
        ("ROLLER_MAX_CONNECTIONS", "ROLLER_CONNECTIONS_MOST", 30),
        ("ROLLER_MAX_WAIT_S", "ROLLER_WAIT_MOST_S", 30),
        ("ROLLER_MAX_BODY_BYTES", "ROLLER_BODY_BYTES_MOST", 3000),
        ("ROLLER_MAX_ITEMS", "ROLLER_ITEMS_MOST", 30),
    ],
)
def test_former_variable_is_read_unless_the_new_one_is_set(
    monkeypatch: pytest.MonkeyPatch, variable: str, former: str, value: int
) -> None:
    field = variable.removeprefix("ROLLER_").lower()
    monkeypatch.setenv(former, str(value))
    assert getattr(read_settings(), field) == value
    monkeypatch.setenv(variable, str(value + 1))
    assert getattr(read_settings(), field) == value + 1
    assert getattr(read_settings(**{field: value + 2}), field) == value + 2
    monkeypatch.delenv(variable)
    monkeypatch.setenv(former, "-1")
    with pytest.raises(ArgumentError, match=f"^{variable}: "):
        read_settings()


def test_the_cache_is_below_the_users_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable, value, folder in (
        ("XDG_CACHE_HOME", "", tmp_path / ".cache" / "roller-svc"),
        ("XDG_CACHE_HOME", "relative", tmp_path / ".cache" / "roller-svc"),
        ("XDG_CACHE_HOME", str(tmp_path / "xdg"), tmp_path / "xdg" / "roller-svc"),
        ("ROLLER_CACHE", "", tmp_path / "xdg" / "roller-svc"),
        ("ROLLER_CACHE", str(tmp_path / "own"), tmp_path / "own"),
    ):
        monkeypatch.setenv(variable, value)
        assert read_settings().cache_folder == folder


def test_limits_are_a_table_that_settings_change() -> None:
    assert read_settings().limit_table == LIMITS
    changes = {"max_connections": 40, "queue_length": 10, "max_body_bytes": 2048, "estimates_at_once": 1}
    table = read_settings(limits="uploads=16/4, stored_bytes=none/10,waits=9/none", **changes).limit_table
    assert table[Resource.CONNECTIONS] == Limit(40, 10)
    assert table[Resource.BUILDS] == Limit(10, 5)
    assert table[Resource.BODY_BYTES] == Limit(64 * 2048, 16 * 2048)
    assert table[Resource.LARGE_ESTIMATES] == Limit(1, 1)
    assert table[Resource.UPLOADS] == Limit(16, 4)
    assert table[Resource.WAITS] == Limit(9, None)
    assert table[Resource.STORED_BYTES] == Limit(None, 10)
    assert table[Resource.STREAMS] == LIMITS[Resource.STREAMS]
    assert read_settings(queue_length_per_client=7).limit_table[Resource.BUILDS] == Limit(256, 7)


@pytest.mark.parametrize(
    "limits", ["uploads", "uploads=1", "chairs=1/1", "uploads=none/1", "uploads=0/1", "stored_bytes=1/1", "x=1/-1"]
)
def test_a_limit_that_cannot_be_is_named(limits: str) -> None:
    with pytest.raises(ArgumentError, match="ROLLER_LIMITS"):
        read_settings(limits=limits)
