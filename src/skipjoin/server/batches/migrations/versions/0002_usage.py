"""Add models, token counts and idempotency keys of batches."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the columns. Earlier batches get no tokens and no key, and may run on any model."""
    for name in ("prompt_tokens", "completion_tokens"):
        op.add_column("batches", sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))
    for name in ("model", "idempotency_key"):
        op.add_column("batches", sa.Column(name, sa.Text))
    op.create_index("batches_by_key", "batches", ["owner", "idempotency_key"], unique=True)
