"""A priority for each client that waits for an operation, the length of each lease, and a row that readiness writes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("interests", sa.Column("priority", sa.Integer(), nullable=True))
    op.add_column("operations", sa.Column("lease_s", sa.Double(), nullable=True))
    op.create_table(
        "probes",
        sa.Column("process", sa.String(length=80), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("process"),
    )
