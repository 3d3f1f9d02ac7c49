"""Models and tokens of batches, and the keys under which they may be asked for twice."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Earlier batches have used no tokens that are known of, have no key, and run on any model."""
    for name in ("prompt_tokens", "completion_tokens"):
        op.add_column("batches", sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))
    for name in ("model", "idempotency_key"):
        op.add_column("batches", sa.Column(name, sa.Text))
    op.create_index("batches_by_key", "batches", ["owner", "idempotency_key"], unique=True)
