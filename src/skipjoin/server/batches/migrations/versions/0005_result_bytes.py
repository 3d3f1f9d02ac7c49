"""Add the size of output and error files that are not written yet."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add the column, and fill it from existing results."""
    op.add_column("batches", sa.Column("result_bytes", sa.BigInteger, nullable=False, server_default="0"))
    op.execute(
        "UPDATE batches SET result_bytes = COALESCE("
        "(SELECT SUM(LENGTH(body) + 1) FROM results WHERE results.batch_id = batches.id), 0)"
    )


def downgrade() -> None:
    """Drop the column."""
    op.drop_column("batches", "result_bytes")
