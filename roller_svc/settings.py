"""Settings of the command line and the service, read from ROLLER_* environment variables only here."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import AliasChoices, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from roller_svc.errors import ArgumentError, InvariantError

LogFormat = Literal["console", "json"]
TuneDefault = Literal["background", "off"]
LogLevel = Literal["debug", "info", "warning", "error"]

PREFIX = "ROLLER_"
OTEL_SECRETS = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")
_CGROUP = Path("/sys/fs/cgroup")
MAX_BUFFERED_BODIES = 64  # bodies of maximum size in memory
_LIMIT = re.compile(r"(\w+)=(none|\d{1,18})/(none|\d{1,18})", re.ASCII)


class Resource(StrEnum):
    """A thing of which a service has a finite amount."""

    CONNECTIONS = "connections"
    PROBES = "probes"
    REQUESTS = "requests"
    REFUSALS = "refusals"
    WAITS = "waits"
    STREAMS = "streams"
    UPLOADS = "uploads"
    BATCHES = "batches"
    CHECKS = "checks"
    ESTIMATES = "estimates"
    LARGE_ESTIMATES = "large_estimates"
    MODEL_ESTIMATES = "model_estimates"
    LISTINGS = "listings"
    BODY_BYTES = "body_bytes"
    RESPONSE_BYTES = "response_bytes"
    BUILDS = "builds"
    BUILD_SECONDS = "build_seconds"
    STORED_BYTES = "stored_bytes"


class Limit(NamedTuple):
    """How much of a resource there is for all clients, and for each client; None: no limit."""

    total: int | None
    each: int | None

    def scaled_to(self, total: int) -> Limit:
        """Return this limit with another total, and the same part of it for each client."""
        if self.total is None or self.each is None:
            return Limit(total, self.each)
        return Limit(total, max(1, total * self.each // self.total))


# Of one process, but for builds and what is counted by the day: these are limits of all processes together.
# docs/operating.md has this table.
LIMITS: Mapping[Resource, Limit] = {
    Resource.CONNECTIONS: Limit(1000, 250),  # requests in progress, each on its connection
    Resource.PROBES: Limit(32, 16),  # further connections, for /healthz, /readyz and /metrics
    Resource.REQUESTS: Limit(None, 4),  # processed at once; others wait
    Resource.REFUSALS: Limit(200, 50),  # answered in a second; further ones wait
    Resource.WAITS: Limit(500, 125),  # requests that wait for an operation
    Resource.STREAMS: Limit(64, 16),  # event streams
    Resource.UPLOADS: Limit(8, 2),  # blobs that arrive
    Resource.BATCHES: Limit(16, 2),  # batches of builds that are submitted
    Resource.CHECKS: Limit(2, 1),  # programs that are parsed and checked at once; others wait
    Resource.ESTIMATES: Limit(16, 4),  # estimate requests
    Resource.LARGE_ESTIMATES: Limit(2, 1),  # large ones that are computed at once; others wait
    Resource.MODEL_ESTIMATES: Limit(4, 1),
    Resource.LISTINGS: Limit(2, 1),  # PTX or SASS that is made at once; others wait
    Resource.BODY_BYTES: Limit(64 << 20, 16 << 20),  # of JSON bodies in memory
    Resource.RESPONSE_BYTES: Limit(256 << 20, 64 << 20),  # of blobs and bundles in memory while they are sent
    Resource.BUILDS: Limit(256, 128),  # queued and running
    Resource.BUILD_SECONDS: Limit(None, 86_400),  # a day
    Resource.STORED_BYTES: Limit(None, 16 << 30),  # a day
}


def _variables(*names: str) -> AliasChoices:
    """Return the names of a variable, of which the first is current and the others are former names."""
    return AliasChoices(*(f"{PREFIX}{name}" for name in names))


class Settings(BaseSettings):
    """Settings. Each field is the variable ROLLER_<NAME>; docs/api.md lists them."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True, populate_by_name=True)

    host: str = Field("127.0.0.1", description="address the service listens on")
    port: int = Field(8000, ge=0, le=65535, description="port the service listens on; 0 takes a free one")
    store: str = Field("build/store", description="the content-addressed store: a directory, s3://BUCKET/PREFIX, or memory:")
    store_quota_bytes: int | None = Field(
        None, ge=0, description="size to which the service reduces the store, by removing the least recently used"
    )
    min_free_bytes: int = Field(1 << 26, ge=0, description="free space of the store's disk below which the service is not ready")
    database: SecretStr = Field(
        SecretStr(""),
        description="URL of the operations' database: sqlite:///FILE or postgresql://...; default: SQLite in the store",
    )
    broker: SecretStr = Field(
        SecretStr(""),
        description="URL of the RabbitMQ that announces operations to workers: amqp://...; default: workers poll",
    )
    api_keys: SecretStr = Field(
        SecretStr(""), description="API keys the service accepts, separated by commas; none: loopback only, anonymously"
    )
    require_key: bool = Field(default=False, description="refuse to start without an API key or OIDC, on loopback too")
    oidc_issuer: str = Field("", description="issuer of OIDC tokens that the service accepts, besides API keys")
    oidc_audience: str = Field("", description="audience that these tokens must have")
    oidc_jwks: str = Field("", description="file, or https URL, with the issuer's public keys (a JWK set)")
    oidc_scopes_claim: str = Field("scope", description="claim with the scopes of a token, as a list or separated by spaces")
    oidc_groups: str = Field(
        "", description="scopes of the members of groups: GROUP=SCOPE, separated by semicolons, in addition to a token's own"
    )
    oidc_groups_claim: str = Field("groups", description="claim with the groups of a token's subject, as a list")
    allowed_hosts: str = Field("", description="further names of the service, each with or without a port, separated by commas")
    max_connections: int = Field(
        1000,
        validation_alias=_variables("MAX_CONNECTIONS", "CONNECTIONS_MOST"),
        ge=1,
        le=60_000,
        description="connections that may be open at once",
    )
    header_timeout_s: float = Field(
        10.0, gt=0, le=600, description="how long a client may take to send a request's line and headers"
    )
    body_timeout_s: float = Field(30.0, gt=0, le=600, description="how long a client may take to send a body or to read a response")
    workers: int = Field(
        2,
        ge=0,
        le=256,
        description="build worker processes of the service, and estimate worker processes; 0: only others build",
    )
    processes: int = Field(1, ge=1, le=64, description="processes that serve requests on one port; only the first one builds")
    queue_length: int = Field(256, ge=1, le=100_000, description="queued and running builds; a further one is rejected with 503")
    queue_length_per_client: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="queued and running builds of one client; a further one is rejected with 429; default: half of "
        "the queue if there are several API keys",
    )
    limits: str = Field(
        "",
        description="changes to the limits of all clients together and of each: NAME=TOTAL/EACH, separated by commas, "
        "either of them none; docs/operating.md has the names",
    )
    lease_s: float = Field(15.0, ge=1, le=600, description="time after its last heartbeat at which a worker is taken for dead")
    no_worker_timeout_s: float = Field(
        600.0, ge=1, description="how long an operation waits for a queue that no worker takes from before it fails"
    )
    drain_timeout_s: float = Field(
        60.0, ge=0, le=86_400, description="how long `roller worker` goes on with its builds after SIGTERM"
    )
    remember_errors_s: float = Field(
        600.0, ge=0, le=86_400, description="how long the error of an invalid request stands without another build"
    )
    retention_s: float = Field(
        7 * 86_400.0, ge=60, description="how long operations are kept after they are done; results stay in the store"
    )
    audit_retention_s: float = Field(
        90 * 86_400.0, ge=3600, description="how long entries of the audit log are kept, which `roller audit` shows"
    )
    worker_memory_bytes: int | None = Field(
        None,
        ge=1 << 28,
        description="host memory that a worker may allocate; default: its share of three quarters of the memory",
    )
    malloc_arenas: int = Field(
        1, ge=0, le=1024, description="arenas of glibc's malloc in a service or a worker; 0: as the environment has them"
    )
    build_timeout_s: float = Field(300.0, gt=0, le=3600, description="time limit of one build")
    model_timeout_s: float = Field(1800.0, gt=0, le=86_400, description="time limit of the build of one model")
    check_timeout_s: float = Field(5.0, gt=0, le=600, description="time limit for validating one program, or for one estimate")
    confine_workers: bool = Field(
        default=True, description="restrict build workers to the system's files and their own, without network"
    )
    max_wait_s: float = Field(
        60.0,
        validation_alias=_variables("MAX_WAIT_S", "WAIT_MOST_S"),
        ge=0,
        le=600,
        description="upper limit of Prefer: wait",
    )
    max_body_bytes: int = Field(
        1 << 20,
        validation_alias=_variables("MAX_BODY_BYTES", "BODY_BYTES_MOST"),
        ge=1024,
        description="largest request body; a larger one is rejected with 413",
    )
    max_blob_bytes: int = Field(
        1 << 28, ge=1024, le=1 << 29, description="largest blob, such as a model; a larger one is rejected with 413"
    )
    max_items: int = Field(
        1024,
        validation_alias=_variables("MAX_ITEMS", "ITEMS_MOST"),
        ge=1,
        le=10_000,
        description="items times targets of one estimate request",
    )
    estimates_timeout_s: float = Field(
        60.0, gt=0, le=3600, description="deadline of one request; estimates not started by then are rejected"
    )
    estimates_at_once: int = Field(
        2, ge=1, le=64, description="concurrent large estimate requests; a few more wait, others get 503"
    )
    local_spec: Path | None = Field(
        None, description="spec of the target `local`, written by `roller calibrate`; default: the detected CPU"
    )
    calibrate: bool = Field(default=True, description="measure the host CPU at the first use of `local`; false: use assumed rates")
    cache: Path | None = Field(
        None,
        description="directory of compiled kernels and calibrations; default: roller-svc in the user's cache directory",
    )
    cache_kernels: bool = Field(default=True, description="whether roller_svc.compile keeps its kernels there, and finds them")
    tune: TuneDefault = Field(
        "background", description="how models are tuned whose caller gives neither `tune` nor `select`: background, or off"
    )
    log_format: LogFormat = Field("console", description="how services and workers log: console (text) or json")
    log_level: LogLevel = Field("info", description="least level of what they log: debug, info, warning or error")
    otlp_endpoint: str = Field(
        "", description="collector of OpenTelemetry traces, by OTLP over HTTP: http://HOST:4318; default: no traces"
    )
    python_ops: str = Field(
        "", description="MODULE:FUNCTION, which is called once in a process to register functions of Python for nodes of models"
    )
    server: str = Field("", description="service that the command line uses; the same as --server")
    api_key: SecretStr = Field(SecretStr(""), description="API key of the command line for that service")

    @field_validator("store", mode="before")
    @classmethod
    def _store_may_be_a_path(cls, value: object) -> object:
        return str(value) if isinstance(value, Path) else value

    @field_validator("local_spec", "cache", "store_quota_bytes", mode="before")
    @classmethod
    def _empty_is_unset(cls, value: object) -> object:
        return None if value == "" else value

    @field_validator("limits")
    @classmethod
    def _limits_are_readable(cls, value: str) -> str:
        parse_limits(value)
        return value

    @property
    def limit_table(self) -> dict[Resource, Limit]:
        """The limit of each resource: those of `limits`, else of settings of their own, else the defaults."""
        sizes = {
            Resource.CONNECTIONS: self.max_connections,
            Resource.LARGE_ESTIMATES: self.estimates_at_once,
            Resource.BODY_BYTES: MAX_BUFFERED_BODIES * self.max_body_bytes,
            Resource.BUILDS: self.queue_length,
        }
        table = {name: limit.scaled_to(sizes[name]) if name in sizes else limit for name, limit in LIMITS.items()}
        if self.queue_length_per_client is not None:
            table[Resource.BUILDS] = Limit(self.queue_length, self.queue_length_per_client)
        return table | parse_limits(self.limits)

    def total_of(self, resource: Resource) -> int:
        """Return how much of a resource there is for all clients. Raises InvariantError if it has no total."""
        total = self.limit_table[resource].total
        if total is None:
            raise InvariantError(f"{resource} has no total")
        return total

    @property
    def allowed_host_names(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.allowed_hosts.split(",") if name.strip())

    @property
    def memory_bytes_each(self) -> int:
        """Memory limit of a worker process: the setting, or its share of three quarters of the usable memory."""
        if self.worker_memory_bytes is not None:
            return self.worker_memory_bytes
        return max(1 << 28, usable_memory_bytes() * 3 // 4 // max(1, self.workers))

    @property
    def is_local_store(self) -> bool:
        """Whether the store is a directory."""
        return self.store != "memory:" and "://" not in self.store

    @property
    def folder(self) -> Path:
        """Directory of what this machine keeps beside results: that of the store, or the default if it has none."""
        return Path(self.store if self.is_local_store else type(self).model_fields["store"].default)

    @property
    def database_url(self) -> str:
        """URL of the operations' database: the setting, or SQLite in `folder`."""
        return self.database.get_secret_value() or f"sqlite:///{self._database_file}"

    @property
    def has_database(self) -> bool:
        """Whether the database is named, or the store's folder has it."""
        return bool(self.database.get_secret_value()) or (self.is_local_store and self._database_file.is_file())

    @property
    def _database_file(self) -> Path:
        return self.folder.absolute() / "operations.db"

    @property
    def is_distributed(self) -> bool:
        """Whether other machines may build: there is a broker, or a database that they can reach."""
        return bool(self.broker.get_secret_value()) or not self.database_url.startswith("sqlite")

    @property
    def cache_folder(self) -> Path:
        """Directory of kernels and calibrations: the setting, or one in the user's cache directory (XDG)."""
        if self.cache is not None:
            return self.cache
        named = os.environ.get("XDG_CACHE_HOME", "")
        base = Path(named) if Path(named).is_absolute() else Path.home() / ".cache"  # a relative one is to be ignored
        return base / "roller-svc"

    @property
    def accepted_keys(self) -> frozenset[str]:
        return frozenset(key.strip() for key in self.api_keys.get_secret_value().split(",") if key.strip())


def parse_limits(text: str) -> dict[Resource, Limit]:
    """Parse `NAME=TOTAL/EACH,...`. Raises ValueError."""
    limits: dict[Resource, Limit] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _LIMIT.fullmatch(part)
        if match is None or match[1] not in LIMITS:
            raise ValueError(f"expected NAME=TOTAL/EACH with a NAME of {', '.join(LIMITS)}; got {part[:80]!r}")
        limit = Limit(*(None if number == "none" else int(number) for number in match.groups()[1:]))
        has_no_total = LIMITS[Resource(match[1])].total is None
        if has_no_total != (limit.total is None) or 0 in limit:
            total = "none" if has_no_total else "a number of at least 1"
            raise ValueError(f"{match[1]}=TOTAL/EACH: expected {total} as TOTAL, and EACH not to be 0; got {part!r}")
        limits[Resource(match[1])] = limit
    return limits


def read_settings(**overrides: object) -> Settings:
    """Read the settings from the environment, with overrides. Raises ArgumentError that names an invalid variable."""
    try:
        return Settings(**{name: value for name, value in overrides.items() if value is not None})  # type: ignore[arg-type]  # pydantic checks
    except ValidationError as failure:
        first = failure.errors(include_url=False, include_input=False)[0]
        name = PREFIX + "_".join(str(part) for part in first["loc"]).upper().removeprefix(PREFIX)
        raise ArgumentError(f"{name}: {first['msg']}", code="invalid-setting") from failure


_current: list[Settings] = []


def use(current: Settings) -> None:
    """Set the settings of this process."""
    _current[:] = [current]


def settings() -> Settings:
    """Return the settings of this process, read from the environment at first use unless set by `use`."""
    if not _current:
        use(read_settings())
    return _current[0]


def pin_local(spec: Path | None) -> None:
    """Make this process and its children use one spec of `local`: a file's, or the detected one if None."""
    use(settings().model_copy(update={"local_spec": spec, "calibrate": False}))
    os.environ[f"{PREFIX}CALIBRATE"] = "0"
    if spec is not None:
        os.environ[f"{PREFIX}LOCAL_SPEC"] = str(spec)


_S3_CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_forgotten_credentials: dict[str, str] = {}


def s3_options() -> dict[str, str]:
    """Return options of S3: credentials, also those that were there before `forget_secrets`, and whether HTTP may be.

    An endpoint that begins with http:// allows it, too.
    """
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    is_http = endpoint.startswith("http://") or os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")
    return (_credentials() or _forgotten_credentials) | {"allow_http": "true" if is_http else "false"}


def _credentials() -> dict[str, str]:
    return {name.lower(): os.environ[name] for name in _S3_CREDENTIALS if name in os.environ}


def forget_secrets() -> None:
    """Remove the keys from the environment, so that child processes do not inherit them."""
    _forgotten_credentials.update(_credentials())
    names = ("ROLLER_API_KEYS", "ROLLER_API_KEY", "ROLLER_DATABASE", "ROLLER_BROKER", *_S3_CREDENTIALS, *OTEL_SECRETS)
    for name in names:
        os.environ.pop(name, None)


def usable_memory_bytes() -> int:
    """Return the machine's memory or the smallest memory limit of this process's cgroups."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min((machine, *_cgroup_limits()))


def _cgroup_limits() -> Iterator[int]:
    """Yield the memory limits of the cgroup and its ancestors, versions 1 and 2."""
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


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def openmp_threads() -> int:
    """Return the number of threads in OMP_NUM_THREADS; 0 if it has none."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isascii() and first.isdecimal() else 0
