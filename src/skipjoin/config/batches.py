from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from skipjoin.config.access import AccessConfig
from skipjoin.config.shared import BATCHES
from skipjoin.options import ConfigError, Option

# Value of `batch_dir` that disables batches.
NOWHERE = "none"


def _limit(text: str, metavar: str, high: int) -> Option:
    return Option(text, low=1, high=high, metavar=metavar, group=BATCHES)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig(AccessConfig):
    batch_dir: Annotated[
        str | None,
        Option(
            "Folder of uploaded files and batches; none disables batches (default: in the user's cache folder).",
            metavar="DIR",
            group=BATCHES,
        ),
    ] = None
    batch_db: Annotated[
        str | None,
        Option(
            "PostgreSQL database of the batches, which servers may share if they also share the folder (default: "
            "SQLite in the folder).",
            metavar="postgresql://...",
            group=BATCHES,
        ),
    ] = None
    batch_inflight: Annotated[
        int | None,
        _limit(
            "Maximum number of batch sequences in the engines, waiting and running (default: twice --max-num-seqs for "
            "each replica).",
            "SEQUENCES",
            1 << 20,
        ),
    ] = None
    batch_max_lines: Annotated[int, _limit("Maximum number of lines of a batch.", "LINES", 10_000_000)] = 50_000
    batch_max_file_bytes: Annotated[int, _limit("Maximum size of an uploaded file.", "BYTES", 1 << 40)] = 200_000_000
    batch_max_line_bytes: Annotated[int, _limit("Maximum size of a batch's line.", "BYTES", 1 << 30)] = 4 << 20
    batch_max_bytes_per_key: Annotated[
        int,
        _limit(
            "Maximum total size of one key's files; uploads, batches and lines beyond it are refused with 429.",
            "BYTES",
            1 << 50,
        ),
    ] = 10_000_000_000
    batch_max_files_per_key: Annotated[
        int,
        _limit("Maximum number of one key's files; uploads beyond it are refused with 429.", "FILES", 1 << 40),
    ] = 10_000
    batch_max_active_per_key: Annotated[
        int,
        _limit("Maximum number of one key's unfinished batches; more are refused with 429.", "BATCHES", 1 << 30),
    ] = 100

    store_responses: Annotated[
        bool,
        Option(
            "Store responses of /v1/responses for 30 days beside the files, for previous_response_id and "
            "item_reference, unless a request has store: false.",
            group=BATCHES,
        ),
    ] = False
    max_stored_responses_per_key: Annotated[
        int,
        _limit("Maximum number of one key's stored responses; the oldest are deleted.", "RESPONSES", 1 << 40),
    ] = 10_000
    max_stored_response_bytes_per_key: Annotated[
        int,
        _limit(
            "Maximum total size of one key's stored responses, compressed; the oldest are deleted.", "BYTES", 1 << 50
        ),
    ] = 1_000_000_000

    @property
    def has_batches(self) -> bool:
        return self.batch_dir != NOWHERE

    def check_batches(self) -> None:
        if self.batch_dir == "":
            raise ConfigError("batch_dir must not be empty")
        if self.store_responses and not self.has_batches:
            raise ConfigError("store_responses must not be set where batch_dir is none: responses need the folder")
        if self.batch_db is None:
            return
        if not self.batch_db.startswith(("postgresql://", "postgres://")):
            # Only the scheme is shown, as the rest may contain a password.
            scheme, separator, _ = self.batch_db.partition("://")
            got = repr(scheme + separator) if separator else "a text without ://"
            raise ConfigError(f"batch_db must be like postgresql://user@host/name, got {got}")
        if not self.has_batches:
            raise ConfigError("batch_db must not be set where batch_dir is none: the files need a folder")
