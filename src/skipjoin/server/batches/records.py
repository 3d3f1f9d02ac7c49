"""The rows of the store as frozen values, and what can go wrong with it. Times are Unix seconds."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

# Purposes of files, as OpenAI names them: what clients upload, and what batches write.
INPUT, OUTPUT = "batch", "batch_output"
PURPOSES = (INPUT, OUTPUT)
# What ids are made of: no path, and no NUL, which PostgreSQL takes in no text.
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class BatchStatus(StrEnum):
    """OpenAI's states of a batch."""

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
        """Whether a batch stays in this state."""
        return self in _FINAL


_FINAL = frozenset([BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED])


class LineState(StrEnum):
    """States of a line: it waits, runs at a server, or has ended in one of four ways. DONE goes to the output file,
    the other ends to the error file."""

    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRow:
    """A file. owner: a hash of the key that it belongs to. filename: a label, never a path. bytes: its size.
    deleted_at: from then on no request sees it; its blob stays while a batch that is not final reads it."""

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
    """Why a batch was refused. line: its number in the input file, from 1; None: the file as a whole."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """A batch. total, completed, failed: lines; failed ones are those whose request has failed, not the expired and
    the cancelled ones. prompt_tokens, completion_tokens: of all lines that have ended so far; cached_tokens: those of
    the prompts whose KV was there. output_expires_after_s: from the time that the output is written; None: it stays.
    model: the one that is to run it; None: any."""

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


@dataclass(frozen=True, slots=True)
class LinePlace:
    """A line of an input file that is in order. number: from 1, in the file. offset, length: its bytes there, without
    the end of the line."""

    number: int
    custom_id: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line that this server runs. attempt: counts from 1. expires_at: of its batch. lost: how many attempts ended as
    their engine did."""

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
        """Batch, number and attempt: what `Store.renew` names a line by."""
        return self.batch_id, self.number, self.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class LineResult:
    """The end of a line. state: DONE or FAILED. body: JSON of its line in the output or error file, without the end of
    the line. cached_tokens: those of the prompt whose KV was there."""

    line: Line
    state: LineState
    body: bytes
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def bytes(self) -> int:
        """Size of the line in its file."""
        return len(self.body) + 1


@dataclass(frozen=True, slots=True)
class OwnerUsage:
    """What an owner has: bytes and number of its files. Files that are deleted count while a batch reads them; bytes
    include results of batches that are not written to files yet."""

    bytes: int
    files: int


class StoreError(Exception):
    """What the store cannot do. The text may be shown to clients."""


class StoreUnavailable(StoreError):  # noqa: N818 -- a state, as in "503 unavailable"
    """The database, or the folder of the files, cannot be reached at this time."""


class StoreDamaged(StoreUnavailable):
    """The database is damaged, and has to be restored."""


class NoSpace(StoreError):  # noqa: N818 -- the same
    """The disk of the files or of the database is full. What was written before stays."""


class BlobMissing(StoreUnavailable):
    """A file's bytes are not in the folder, where they were."""


class FolderLocked(StoreError):  # noqa: N818 -- the same
    """Another server has the folder."""


class QuotaExceeded(StoreError):  # noqa: N818 -- the same
    """The owner has as many bytes, files or batches as it may have."""


def is_id(text: str) -> bool:
    """Whether a text from a client may be an id."""
    return _ID.fullmatch(text) is not None


def new_file_id() -> str:
    """A name that no other file has, and that is safe as a file's name on disk."""
    return f"file-{uuid.uuid4().hex}"


def new_batch_id() -> str:
    """A name that no other batch has."""
    return f"batch_{uuid.uuid4().hex}"
