"""Tokens of prompts whose KV was there."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Of lines that have ended it is not known."""
    op.add_column("batches", sa.Column("cached_tokens", sa.BigInteger, nullable=False, server_default="0"))
