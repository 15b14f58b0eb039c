"""The table of what clients used by the day."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "usage",
        sa.Column("client", sa.String(length=80), nullable=False),
        sa.Column("day", sa.Integer(), nullable=False),
        sa.Column("resource", sa.String(length=24), nullable=False),
        sa.Column("amount", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("client", "day", "resource"),
    )
    op.create_index("usage_day", "usage", ["day"], unique=False)
