"""The tables of operations, actions, events, clients and workers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "action_parts",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("content", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("digest"),
    )
    op.create_table(
        "actions",
        sa.Column("action", sa.String(length=80), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("expression", sa.String(length=64), nullable=False),
        sa.Column("spec", sa.String(length=64), nullable=False),
        sa.Column("options", sa.String(length=64), nullable=False),
        sa.Column("compiler", sa.String(length=64), nullable=False),
        sa.Column("generator", sa.String(length=64), nullable=False),
        sa.Column("create_time", sa.Double(), nullable=False),
        sa.Column("build_time", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("action"),
    )
    op.create_index("actions_expression", "actions", ["expression", "build_time"], unique=False)
    op.create_index("actions_spec", "actions", ["spec", "build_time"], unique=False)
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=80), nullable=False),
        sa.Column("name", sa.String(length=80), nullable=False),
        sa.Column("key_hash", sa.String(length=64), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("quota", sa.Integer(), nullable=True),
        sa.Column("create_time", sa.Double(), nullable=False),
        sa.Column("expire_time", sa.Double(), nullable=True),
        sa.Column("revoke_time", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "clients",
        sa.Column("client", sa.String(length=80), nullable=False),
        sa.Column("last_claim", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("client"),
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("client", sa.String(length=80), nullable=False),
        sa.Column("key_hash", sa.String(length=64), nullable=False),
        sa.Column("request_hash", sa.String(length=64), nullable=False),
        sa.Column("operation", sa.String(length=80), nullable=False),
        sa.Column("create_time", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("client", "key_hash"),
    )
    op.create_index("idempotency_keys_create_time", "idempotency_keys", ["create_time"], unique=False)
    op.create_table(
        "operations",
        sa.Column("id", sa.String(length=80), nullable=False),
        sa.Column("action", sa.String(length=80), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("queue", sa.String(length=80), nullable=False),
        sa.Column("measured_on", sa.String(length=8), nullable=True),
        sa.Column("generator", sa.String(length=64), nullable=False),
        sa.Column("client", sa.String(length=80), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=True),
        sa.Column("traceparent", sa.String(length=64), nullable=True),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("create_time", sa.Double(), nullable=False),
        sa.Column("start_after", sa.Double(), nullable=False),
        sa.Column("deadline", sa.Double(), nullable=True),
        sa.Column("send_time", sa.Double(), nullable=True),
        sa.Column("unserved_since", sa.Double(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String(length=80), nullable=True),
        sa.Column("claim_time", sa.Double(), nullable=True),
        sa.Column("lease_until", sa.Double(), nullable=True),
        sa.Column("is_cancelled", sa.Boolean(), nullable=False),
        sa.Column("end_time", sa.Double(), nullable=True),
        sa.Column("facts", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("error", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("remember_until", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("operations_action", "operations", ["action", "state"], unique=False)
    op.create_index(
        "operations_alive_action",
        "operations",
        ["action"],
        unique=True,
        sqlite_where=sa.text("state <> 'done'"),
        postgresql_where=sa.text("state <> 'done'"),
    )
    op.create_index("operations_client", "operations", ["client", "state"], unique=False)
    op.create_index("operations_end_time", "operations", ["end_time"], unique=False)
    op.create_index("operations_queue", "operations", ["state", "queue", "client"], unique=False)
    op.create_table(
        "workers",
        sa.Column("id", sa.String(length=80), nullable=False),
        sa.Column("queues", sa.JSON(), nullable=False),
        sa.Column("generator", sa.String(length=64), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.Column("start_time", sa.Double(), nullable=False),
        sa.Column("heartbeat", sa.Double(), nullable=False),
        sa.Column("is_draining", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "events",
        sa.Column("operation", sa.String(length=80), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("type", sa.String(length=16), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["operation"], ["operations.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("operation", "number"),
    )
    op.create_table(
        "interests",
        sa.Column("operation", sa.String(length=80), nullable=False),
        sa.Column("client", sa.String(length=80), nullable=False),
        sa.ForeignKeyConstraint(["operation"], ["operations.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("operation", "client"),
    )
    op.create_index("interests_client", "interests", ["client"], unique=False)
