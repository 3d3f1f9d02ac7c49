"""Tables of a new database. Every change here needs a script in `migrations` for databases that exist."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)

metadata = MetaData()
# SQLite increments only columns of type INTEGER automatically.
_COUNTER = BigInteger().with_variant(Integer(), "sqlite")
_HELD = text("server IS NOT NULL")
_TIMES = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at")
_SUMS = ("prompt_tokens", "completion_tokens", "cached_tokens", "result_bytes")

# Live servers. `lease_until` is Unix time in seconds of PostgreSQL's clock; SQLite has one server without a lease.
servers = Table("servers", metadata, Column("id", Text, primary_key=True), Column("lease_until", Double))

# At most one row: the id of the folder of files, which a file in the folder also has.
folder = Table("folder", metadata, Column("id", Text, primary_key=True))


def _needed(kind: Any, *names: str) -> list[Column[Any]]:
    return [Column(name, kind, nullable=False) for name in names]


def _numbered(name: str, *columns: Any) -> Table:
    """Return a table whose `seq` is the order of creation."""
    seq = Column("seq", _COUNTER, primary_key=True, autoincrement=True)
    name_of = Column("id", Text, nullable=False, unique=True)
    return Table(name, metadata, seq, name_of, *columns, sqlite_autoincrement=True)


def _of_lines(name: str, *columns: Any) -> Table:
    key = Column("number", Integer, primary_key=True, autoincrement=False)
    return Table(name, metadata, Column("batch_id", Text, primary_key=True), key, *columns)


# `FileRow` describes the columns.
files = _numbered(
    "files",
    *_needed(Text, "owner", "purpose", "filename"),
    *_needed(BigInteger, "bytes", "created_at"),
    Column("expires_at", BigInteger),
    Column("deleted_at", BigInteger),
    Index("files_of_owner", "owner", "seq"),
)

# `server` is the one that validates or finalizes the batch, and `result_bytes` the size of its output and error files
# until they are written. `BatchRow` describes the other columns.
batches = _numbered(
    "batches",
    *_needed(Text, "owner", "status", "endpoint", "completion_window", "input_file_id"),
    Column("output_file_id", Text),
    Column("error_file_id", Text),
    *_needed(BigInteger, "created_at", "expires_at"),
    *(Column(name, BigInteger) for name in _TIMES),
    *_needed(Integer, "total", "completed", "failed"),
    *(Column(name, BigInteger, nullable=False, server_default="0") for name in _SUMS),
    Column("metadata", JSON(none_as_null=True)),
    Column("errors", JSON, nullable=False),
    Column("output_expires_after_s", BigInteger),
    *(Column(name, Text) for name in ("server", "model", "idempotency_key")),
    Index("batches_of_owner", "owner", "seq"),
    Index("batches_by_status", "status"),
    Index("batches_by_key", "owner", "idempotency_key", unique=True),
)

# `server` is the one that runs the line, set for RUNNING lines only. `Line` describes the other columns.
lines = _of_lines(
    "lines",
    Column("custom_id", Text, nullable=False),
    *_needed(BigInteger, "offset", "length"),
    Column("state", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("lost", Integer, nullable=False, server_default="0"),
    Column("server", Text),
    UniqueConstraint("batch_id", "custom_id"),
    Index("lines_by_state", "batch_id", "state", "number"),
    Index("lines_held", "server", sqlite_where=_HELD, postgresql_where=_HELD),
)

# Lines of output and error files that are not written yet.
results = _of_lines("results", Column("body", LargeBinary, nullable=False))

# `ResponseRow` describes the columns. The index has `size`, so that a quota reads no bodies.
responses = _numbered(
    "responses",
    Column("owner", Text, nullable=False),
    *_needed(BigInteger, "size", "created_at", "expires_at"),
    Column("body", LargeBinary, nullable=False),
    Index("responses_of_owner", "owner", "seq", "size"),
    Index("responses_by_expiry", "expires_at"),
)

# The newest response that has an item.
response_items = Table(
    "response_items",
    metadata,
    Column("owner", Text, primary_key=True),
    Column("id", Text, primary_key=True),
    Column("response_id", Text, nullable=False),
    Index("items_of_response", "response_id"),
)
