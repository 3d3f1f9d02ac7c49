"""Add the number of prompt tokens with a prefix cache hit."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("batches", sa.Column("cached_tokens", sa.BigInteger, nullable=False, server_default="0"))


def downgrade() -> None:
    """Drop the column."""
    op.drop_column("batches", "cached_tokens")
