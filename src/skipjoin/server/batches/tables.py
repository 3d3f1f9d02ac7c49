"""Tables, as a new database gets them. Every change here needs a script in `migrations` for databases that exist."""

from __future__ import annotations

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

# `seq` is the order of creation. `FileRow` describes the other columns.
files = Table(
    "files",
    metadata,
    Column("seq", _COUNTER, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("owner", Text, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("filename", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    Column("deleted_at", BigInteger),
    Index("files_of_owner", "owner", "seq"),
    sqlite_autoincrement=True,
)

# `server` is the one that validates or finalizes the batch, and `result_bytes` the size of its output and error files
# until they are written. `BatchRow` describes the other columns.
batches = Table(
    "batches",
    metadata,
    Column("seq", _COUNTER, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("owner", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("completion_window", Text, nullable=False),
    Column("input_file_id", Text, nullable=False),
    Column("output_file_id", Text),
    Column("error_file_id", Text),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    *(Column(name, BigInteger) for name in _TIMES),
    Column("total", Integer, nullable=False),
    Column("completed", Integer, nullable=False),
    Column("failed", Integer, nullable=False),
    *(Column(name, BigInteger, nullable=False, server_default="0") for name in _SUMS),
    Column("metadata", JSON(none_as_null=True)),
    Column("errors", JSON, nullable=False),
    Column("output_expires_after_s", BigInteger),
    Column("server", Text),
    Column("model", Text),
    Column("idempotency_key", Text),
    Index("batches_of_owner", "owner", "seq"),
    Index("batches_by_status", "status"),
    Index("batches_by_key", "owner", "idempotency_key", unique=True),
    sqlite_autoincrement=True,
)

# `server` is the one that runs the line, set for RUNNING lines only. `Line` describes the other columns.
lines = Table(
    "lines",
    metadata,
    Column("batch_id", Text, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("custom_id", Text, nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("length", BigInteger, nullable=False),
    Column("state", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("lost", Integer, nullable=False, server_default="0"),
    Column("server", Text),
    UniqueConstraint("batch_id", "custom_id"),
    Index("lines_by_state", "batch_id", "state", "number"),
    Index("lines_held", "server", sqlite_where=_HELD, postgresql_where=_HELD),
)

# Lines of output and error files that are not written yet.
results = Table(
    "results",
    metadata,
    Column("batch_id", Text, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("body", LargeBinary, nullable=False),
)

# `ResponseRow` describes the columns besides `seq`. The index has `size`, so that a quota reads no bodies.
responses = Table(
    "responses",
    metadata,
    Column("seq", _COUNTER, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("owner", Text, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Index("responses_of_owner", "owner", "seq", "size"),
    Index("responses_by_expiry", "expires_at"),
    sqlite_autoincrement=True,
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
