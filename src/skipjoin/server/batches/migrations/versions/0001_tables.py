"""Create all tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_COUNTER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_TIMES = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at")

_SUMS = ("prompt_tokens", "completion_tokens", "cached_tokens", "result_bytes")


def upgrade() -> None:
    op.create_table("servers", sa.Column("id", sa.Text, primary_key=True), sa.Column("lease_until", sa.Double))
    op.create_table("folder", sa.Column("id", sa.Text, primary_key=True))
    op.create_table(
        "files",
        sa.Column("seq", _COUNTER, primary_key=True, autoincrement=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("purpose", sa.Text, nullable=False),
        sa.Column("filename", sa.Text, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger),
        sa.Column("deleted_at", sa.BigInteger),
        sqlite_autoincrement=True,
    )
    op.create_index("files_of_owner", "files", ["owner", "seq"])
    op.create_table(
        "batches",
        sa.Column("seq", _COUNTER, primary_key=True, autoincrement=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("endpoint", sa.Text, nullable=False),
        sa.Column("completion_window", sa.Text, nullable=False),
        sa.Column("input_file_id", sa.Text, nullable=False),
        sa.Column("output_file_id", sa.Text),
        sa.Column("error_file_id", sa.Text),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
        *[sa.Column(name, sa.BigInteger) for name in _TIMES],
        sa.Column("total", sa.Integer, nullable=False),
        sa.Column("completed", sa.Integer, nullable=False),
        sa.Column("failed", sa.Integer, nullable=False),
        *[sa.Column(name, sa.BigInteger, nullable=False, server_default="0") for name in _SUMS],
        sa.Column("metadata", sa.JSON),
        sa.Column("errors", sa.JSON, nullable=False),
        sa.Column("output_expires_after_s", sa.BigInteger),
        sa.Column("server", sa.Text),
        sa.Column("model", sa.Text),
        sa.Column("idempotency_key", sa.Text),
        sqlite_autoincrement=True,
    )
    op.create_index("batches_of_owner", "batches", ["owner", "seq"])
    op.create_index("batches_by_status", "batches", ["status"])
    op.create_index("batches_by_key", "batches", ["owner", "idempotency_key"], unique=True)
    op.create_table(
        "lines",
        sa.Column("batch_id", sa.Text, primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("custom_id", sa.Text, nullable=False),
        sa.Column("offset", sa.BigInteger, nullable=False),
        sa.Column("length", sa.BigInteger, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("lost", sa.Integer, nullable=False, server_default="0"),
        sa.Column("server", sa.Text),
        sa.UniqueConstraint("batch_id", "custom_id"),
    )
    op.create_index("lines_by_state", "lines", ["batch_id", "state", "number"])
    held = sa.text("server IS NOT NULL")
    op.create_index("lines_held", "lines", ["server"], sqlite_where=held, postgresql_where=held)
    op.create_table(
        "results",
        sa.Column("batch_id", sa.Text, primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
