"""Settings of the command line and the service, from ROLLER_* variables: the only reader of the environment."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from roller_svc.errors import ArgumentError

_CGROUP = Path("/sys/fs/cgroup")


class Settings(BaseSettings):
    """Each field is the variable ROLLER_<NAME>; docs/api.md lists them."""

    model_config = SettingsConfigDict(env_prefix="ROLLER_", extra="ignore", frozen=True)

    host: str = Field("127.0.0.1", description="address the service listens on")
    port: int = Field(8000, ge=0, le=65535, description="port the service listens on; 0 takes a free one")
    store: Path = Field(Path("build/store"), description="folder of the content-addressed store")
    api_keys: SecretStr = Field(
        SecretStr(""), description="API keys the service accepts, separated by commas; none: loopback only, anonymously"
    )
    allowed_hosts: str = Field(
        "", description="names, with a port or for all, that the service is reached by beside its address; by commas"
    )
    connections_most: int = Field(1000, ge=1, le=60_000, description="connections that may be open at once")
    header_timeout_s: float = Field(
        10.0, gt=0, le=600, description="how long a client may take to send a request's line and headers"
    )
    body_timeout_s: float = Field(
        30.0, gt=0, le=600, description="how long a client may take to send a body, or to read what waits for it"
    )
    workers: int = Field(
        2, ge=1, le=256, description="processes that build kernels for the service; as many more make estimates"
    )
    queue_length: int = Field(256, ge=1, le=100_000, description="builds that may wait; one more is refused with 503")
    worker_memory_bytes: int | None = Field(
        None,
        ge=1 << 28,
        description="most that one of them may allocate of the host's memory; none: its share of three quarters",
    )
    build_timeout_s: float = Field(300.0, gt=0, le=3600, description="longest time that one build may take")
    check_timeout_s: float = Field(
        5.0, gt=0, le=600, description="longest time that checking one compile's program, or one estimate, may take"
    )
    confine_workers: bool = Field(
        default=True, description="whether processes that build see only the system's files, their own, and no network"
    )
    wait_most_s: float = Field(60.0, ge=0, le=600, description="longest time that Prefer: wait holds an answer back")
    body_bytes_most: int = Field(1 << 20, ge=1024, description="largest request body; a larger one is refused with 413")
    items_most: int = Field(1024, ge=1, le=10_000, description="items times targets of one estimate request")
    estimates_timeout_s: float = Field(
        60.0, gt=0, le=3600, description="how long estimates of one request are begun; later ones are refused"
    )
    estimates_at_once: int = Field(
        2, ge=1, le=64, description="large estimate requests worked on together; a few more wait, others get 503"
    )
    local_spec: Path | None = Field(
        None, description="what `local` is: a spec that `roller calibrate` wrote here; none: what is detected"
    )
    server: str = Field("", description="service that the command line runs on; the same as --server")
    api_key: SecretStr = Field(SecretStr(""), description="key the command line shows to that service")

    @field_validator("local_spec", mode="before")
    @classmethod
    def _empty_is_unset(cls, value: object) -> object:
        return None if value == "" else value

    @property
    def allowed_host_names(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.allowed_hosts.split(",") if name.strip())

    @property
    def memory_bytes_each(self) -> int:
        """What a worker process may allocate: as set, or its share of the machine's or the container's memory."""
        if self.worker_memory_bytes is not None:
            return self.worker_memory_bytes
        return max(1 << 28, usable_memory_bytes() * 3 // 4 // self.workers)

    @property
    def accepted_keys(self) -> frozenset[str]:
        return frozenset(key.strip() for key in self.api_keys.get_secret_value().split(",") if key.strip())


def read_settings(**overrides: object) -> Settings:
    """The environment's settings, some of them overridden; a bad one is refused by its variable's name."""
    try:
        return Settings(**{name: value for name, value in overrides.items() if value is not None})  # type: ignore[arg-type]  # pydantic checks
    except ValidationError as failure:
        first = failure.errors(include_url=False, include_input=False)[0]
        name = "ROLLER_" + "_".join(str(part) for part in first["loc"]).upper()
        raise ArgumentError(f"{name}: {first['msg']}", code="invalid-setting") from failure


_current: list[Settings] = []


def use(chosen: Settings) -> None:
    """What `settings` gives from now on in this process."""
    _current[:] = [chosen]


def settings() -> Settings:
    """This process's settings: the environment's at first use, unless others were chosen."""
    if not _current:
        use(read_settings())
    return _current[0]


def forget_secrets() -> None:
    """Take the keys out of the environment, so that no process started from here inherits them."""
    for name in ("ROLLER_API_KEYS", "ROLLER_API_KEY"):
        os.environ.pop(name, None)


def usable_memory_bytes() -> int:
    """The machine's memory, or the least limit of the cgroups that this process is in."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min((machine, *_cgroup_limits()))


def _cgroup_limits() -> Iterator[int]:
    """Limits of versions 2 and 1, of the cgroup and those above it."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, name = (_CGROUP, "memory.max") if not controllers else (_CGROUP / "memory", "memory.limit_in_bytes")
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(root):
                with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                    yield int((folder / name).read_text(encoding="ascii"))


def check_address(chosen: Settings) -> None:
    """Without a key anyone who reaches the service may use it: then only this machine may."""
    if not chosen.accepted_keys and not _is_loopback(chosen.host):
        raise ArgumentError(
            f"refusing to listen on {chosen.host} without an API key",
            code="no-api-key",
            hint="set ROLLER_API_KEYS, or listen on 127.0.0.1",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
