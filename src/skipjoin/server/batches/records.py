"""Rows and errors of the store. Times are in Unix seconds."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

# OpenAI's purposes of files that clients upload, and that batches write.
INPUT, OUTPUT = "batch", "batch_output"
PURPOSES = (INPUT, OUTPUT)
# Excludes paths, and NUL, which PostgreSQL does not accept in text.
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FILE_ID = re.compile(r"file-[0-9a-f]{32}")


class BatchStatus(StrEnum):
    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in _FINAL


_FINAL = frozenset([BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED])


class LineState(StrEnum):
    """DONE lines go to the output file, FAILED, EXPIRED and CANCELLED ones to the error file."""

    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRow:
    """`filename` is a label, never a path. After `deleted_at`, the blob stays while an unfinished batch reads it."""

    id: str
    owner: str
    purpose: str
    filename: str
    bytes: int
    created_at: int
    expires_at: int | None = None
    deleted_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineError:
    """Why a batch was rejected. `line` counts from 1; None is the whole file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """Only finished lines count: `failed` excludes expired and cancelled ones."""

    id: str
    owner: str
    endpoint: str
    completion_window: str
    input_file_id: str
    created_at: int
    expires_at: int
    status: BatchStatus = BatchStatus.VALIDATING
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    metadata: Mapping[str, str] | None = None
    errors: tuple[LineError, ...] = ()
    output_expires_after_s: int | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRow:
    """Stored response. `body` is `StoredResponse` as compressed JSON."""

    id: str
    owner: str
    size: int
    created_at: int
    expires_at: int
    body: bytes


@dataclass(frozen=True, slots=True)
class LinePlace:
    number: int
    custom_id: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """`lost` attempts ended with an engine crash."""

    batch_id: str
    number: int
    custom_id: str
    offset: int
    length: int
    attempt: int
    owner: str
    expires_at: int
    endpoint: str
    input_file_id: str
    lost: int = 0

    @property
    def key(self) -> tuple[str, int, int]:
        return self.batch_id, self.number, self.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class LineResult:
    line: Line
    state: LineState
    body: bytes
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def bytes(self) -> int:
        return len(self.body) + 1


@dataclass(frozen=True, slots=True)
class OwnerUsage:
    bytes: int
    files: int


@dataclass(frozen=True, slots=True)
class Quota:
    """Maximum storage of an owner; `count` is of files or of responses."""

    bytes: int
    count: int


UNLIMITED = 1 << 62
NO_QUOTA = Quota(UNLIMITED, UNLIMITED)


class StoreError(Exception):
    """The text may be shown to clients."""


class StoreUnavailable(StoreError):  # noqa: N818 -- a state, as in "503 unavailable"
    pass


class StoreDamaged(StoreUnavailable):
    pass


class NoSpace(StoreError):  # noqa: N818 -- the same
    pass


class BlobMissing(StoreUnavailable):
    pass


class FolderLocked(StoreError):  # noqa: N818 -- the same
    pass


class QuotaExceeded(StoreError):  # noqa: N818 -- the same
    pass


def is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def new_file_id() -> str:
    return f"file-{uuid.uuid4().hex}"


def is_file_id(text: str) -> bool:
    """Return whether `new_file_id` could have given an id."""
    return _FILE_ID.fullmatch(text) is not None


def new_batch_id() -> str:
    return f"batch_{uuid.uuid4().hex}"


# OpenAI's codes and messages, which clients compare.
_ERRORS = {
    LineState.EXPIRED: {
        "code": "batch_expired",
        "message": "This request could not be executed before the completion window expired.",
    },
    LineState.CANCELLED: {
        "code": "batch_cancelled",
        "message": "This request was not executed because the batch was cancelled.",
    },
}


def request_id(batch_id: str, custom_id: str) -> str:
    return f"batch_req_{hashlib.sha256(f'{batch_id} {custom_id}'.encode()).hexdigest()[:32]}"


def closed_line(batch_id: str, custom_id: str, state: LineState) -> bytes:
    line = {"id": request_id(batch_id, custom_id), "custom_id": custom_id, "response": None, "error": _ERRORS[state]}
    return msgspec.json.encode(line)
