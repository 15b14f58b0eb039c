"""SQL tables of the farm. Every time is the database's clock, in seconds since 1970."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    text,
)

metadata = MetaData()

ALIVE = text("state <> 'done'")

operations = Table(
    "operations",
    metadata,
    Column("id", String(80), primary_key=True),
    Column("action", String(80), nullable=False),
    Column("request", JSON, nullable=False),
    Column("queue", String(80), nullable=False),
    Column("measured_on", String(8)),  # kind of device that the build measures on: cpu or gpu
    Column("generator", String(64), nullable=False),  # the code that computed `action`
    Column("client", String(80), nullable=False),  # who sent it first, and whose quota it uses
    Column("request_id", String(64)),  # of the request that queued it, for logs
    Column("traceparent", String(64)),  # of that request's span (W3C Trace Context)
    Column("priority", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("create_time", Double, nullable=False),
    Column("start_after", Double, nullable=False),  # later than create_time while a retry waits
    Column("deadline", Double),
    Column("send_time", Double),  # when a courier last carried its id
    Column("unserved_since", Double),  # while it is queued and no worker that is alive takes from its queue
    Column("attempt", Integer, nullable=False),  # claims so far: fences the writes of earlier claims
    Column("failures", Integer, nullable=False),  # attempts that ended by a transient error or an expired lease
    Column("worker", String(80)),
    Column("claim_time", Double),  # of the last attempt
    Column("lease_until", Double),
    Column("lease_s", Double),  # for how long its worker may be silent; null: an earlier version claimed it
    Column("is_cancelled", Boolean, nullable=False),
    Column("end_time", Double),
    Column("facts", JSON(none_as_null=True)),
    Column("error", JSON(none_as_null=True)),
    Column("remember_until", Double),  # until then the same action has the same error
    Index("operations_alive_action", "action", unique=True, sqlite_where=ALIVE, postgresql_where=ALIVE),
    Index("operations_action", "action", "state"),
    Index("operations_queue", "state", "queue", "client"),
    Index("operations_client", "client", "state"),
    Index("operations_end_time", "end_time"),
)

# Clients that wait for an operation: it is cancelled when the last one gives up.
interests = Table(
    "interests",
    metadata,
    Column("operation", ForeignKey("operations.id", ondelete="CASCADE"), primary_key=True),
    Column("client", String(80), primary_key=True),
    Column("priority", Integer),  # within the client's share; null: that of the operation
    Index("interests_client", "client"),
)

events = Table(
    "events",
    metadata,
    Column("operation", ForeignKey("operations.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True),  # from 1, within the operation
    Column("time", Double, nullable=False),
    Column("type", String(16), nullable=False),
    Column("data", JSON, nullable=False),
)

# Clients share workers round-robin: the one whose last claim is the oldest is next.
clients = Table(
    "clients",
    metadata,
    Column("client", String(80), primary_key=True),
    Column("last_claim", BigInteger, nullable=False),  # a number that grows with each claim
)

# Keys with which clients mark repeated requests; see farm/idempotency.py.
idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("client", String(80), primary_key=True),
    Column("key_hash", String(64), primary_key=True),
    Column("request_hash", String(64), nullable=False),
    Column("operation", String(80), nullable=False),
    Column("create_time", Double, nullable=False),
    Index("idempotency_keys_create_time", "create_time"),
)

# Keys of clients; see farm/api_keys.py.
api_keys = Table(
    "api_keys",
    metadata,
    Column("id", String(80), primary_key=True),
    Column("name", String(80), nullable=False),
    Column("key_hash", String(64), nullable=False),
    Column("scopes", JSON, nullable=False),
    Column("quota", Integer),  # operations of the client that are not done, at most
    Column("create_time", Double, nullable=False),
    Column("expire_time", Double),
    Column("revoke_time", Double),
)

# What clients used by the day; see farm/usage.py.
usage = Table(
    "usage",
    metadata,
    Column("client", String(80), primary_key=True),
    Column("day", Integer, primary_key=True),  # since 1970, in UTC
    Column("resource", String(24), primary_key=True),
    Column("amount", Double, nullable=False),
    Index("usage_day", "day"),
)

# Who did what; see farm/audit.py.
audit = Table(
    "audit",
    metadata,
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("time", Double, nullable=False),
    Column("client", String(80), nullable=False),
    Column("event", String(24), nullable=False),
    Column("subject", String(120), nullable=False),
    Column("details", JSON, nullable=False),
    Index("audit_time", "time"),
    Index("audit_client", "client"),
)

# When clients were seen; see farm/audit.py.
client_uses = Table(
    "client_uses",
    metadata,
    Column("client", String(80), primary_key=True),
    Column("name", String(120), nullable=False),
    Column("first_time", Double, nullable=False),
    Column("last_time", Double, nullable=False),
)

# Keys of actions that were submitted, in parts; see farm/actions.py.
actions = Table(
    "actions",
    metadata,
    Column("action", String(80), primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("expression", String(64), nullable=False),
    Column("spec", String(64), nullable=False),
    Column("options", String(64), nullable=False),
    Column("compiler", String(64), nullable=False),
    Column("generator", String(64), nullable=False),
    Column("create_time", Double, nullable=False),
    Column("build_time", Double),
    Index("actions_expression", "expression", "build_time"),
    Index("actions_spec", "spec", "build_time"),
)

# What the hashes of parts are of.
action_parts = Table(
    "action_parts",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("content", JSON, nullable=False),
)

# What processes wrote last to show that they can; see Database.check.
probes = Table(
    "probes",
    metadata,
    Column("process", String(80), primary_key=True),
    Column("time", Double, nullable=False),
)

workers = Table(
    "workers",
    metadata,
    Column("id", String(80), primary_key=True),
    Column("queues", JSON, nullable=False),
    Column("generator", String(64), nullable=False),
    Column("facts", JSON, nullable=False),
    Column("start_time", Double, nullable=False),
    Column("heartbeat", Double, nullable=False),
    Column("is_draining", Boolean, nullable=False),
)
