"""Tables of a new database. Every change here needs a script in `migrations` for databases that exist."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

metadata = sa.MetaData()
# SQLite increments only columns of type INTEGER automatically.
_COUNTER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_HELD = sa.text("server IS NOT NULL")
_TIMES = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at")
_SUMS = ("prompt_tokens", "completion_tokens", "cached_tokens", "result_bytes")

# Live servers. `lease_until` is Unix time in seconds of PostgreSQL's clock; SQLite has one server without a lease.
servers = sa.Table("servers", metadata, sa.Column("id", sa.Text, primary_key=True), sa.Column("lease_until", sa.Double))

# At most one row: the id of the folder of files, which a file in the folder also has.
folder = sa.Table("folder", metadata, sa.Column("id", sa.Text, primary_key=True))


def _needed(kind: Any, *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False) for name in names]


def _numbered(name: str, *columns: Any) -> sa.Table:
    """Return a table whose `seq` is the order of creation."""
    seq = sa.Column("seq", _COUNTER, primary_key=True, autoincrement=True)
    name_of = sa.Column("id", sa.Text, nullable=False, unique=True)
    return sa.Table(name, metadata, seq, name_of, *columns, sqlite_autoincrement=True)


def _of_lines(name: str, *columns: Any) -> sa.Table:
    key = sa.Column("number", sa.Integer, primary_key=True, autoincrement=False)
    return sa.Table(name, metadata, sa.Column("batch_id", sa.Text, primary_key=True), key, *columns)


# `FileRow` describes the columns.
files = _numbered(
    "files",
    *_needed(sa.Text, "owner", "purpose", "filename"),
    *_needed(sa.BigInteger, "bytes", "created_at"),
    sa.Column("expires_at", sa.BigInteger),
    sa.Column("deleted_at", sa.BigInteger),
    sa.Index("files_of_owner", "owner", "seq"),
)

# `server` is the one that validates or finalizes the batch, and `result_bytes` the size of its output and error files
# until they are written. `BatchRow` describes the other columns.
batches = _numbered(
    "batches",
    *_needed(sa.Text, "owner", "status", "endpoint", "completion_window", "input_file_id"),
    sa.Column("output_file_id", sa.Text),
    sa.Column("error_file_id", sa.Text),
    *_needed(sa.BigInteger, "created_at", "expires_at"),
    *(sa.Column(name, sa.BigInteger) for name in _TIMES),
    *_needed(sa.Integer, "total", "completed", "failed"),
    *(sa.Column(name, sa.BigInteger, nullable=False, server_default="0") for name in _SUMS),
    sa.Column("metadata", sa.JSON(none_as_null=True)),
    sa.Column("errors", sa.JSON, nullable=False),
    sa.Column("output_expires_after_s", sa.BigInteger),
    *(sa.Column(name, sa.Text) for name in ("server", "model", "idempotency_key")),
    sa.Index("batches_of_owner", "owner", "seq"),
    sa.Index("batches_by_status", "status"),
    sa.Index("batches_by_key", "owner", "idempotency_key", unique=True),
)

# `server` is the one that runs the line, set for RUNNING lines only. `Line` describes the other columns.
lines = _of_lines(
    "lines",
    sa.Column("custom_id", sa.Text, nullable=False),
    *_needed(sa.BigInteger, "offset", "length"),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("lost", sa.Integer, nullable=False, server_default="0"),
    sa.Column("server", sa.Text),
    sa.UniqueConstraint("batch_id", "custom_id"),
    sa.Index("lines_by_state", "batch_id", "state", "number"),
    sa.Index("lines_held", "server", sqlite_where=_HELD, postgresql_where=_HELD),
)

# Lines of output and error files that are not written yet.
results = _of_lines("results", sa.Column("body", sa.LargeBinary, nullable=False))

# `ResponseRow` describes the columns. The index has `size`, so that a quota reads no bodies.
responses = _numbered(
    "responses",
    sa.Column("owner", sa.Text, nullable=False),
    *_needed(sa.BigInteger, "size", "created_at", "expires_at"),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Index("responses_of_owner", "owner", "seq", "size"),
    sa.Index("responses_by_expiry", "expires_at"),
)

# The newest response that has an item.
response_items = sa.Table(
    "response_items",
    metadata,
    sa.Column("owner", sa.Text, primary_key=True),
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("response_id", sa.Text, nullable=False),
    sa.Index("items_of_response", "response_id"),
)
