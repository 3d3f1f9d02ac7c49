from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from skipjoin.config.access import AccessConfig
from skipjoin.config.shared import batch_option
from skipjoin.options import ConfigError

# Value of `batch_dir` that disables batches.
NOWHERE = "none"
_limit = partial(batch_option, low=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig(AccessConfig):
    batch_dir: Annotated[
        str | None,
        batch_option(
            "Folder of uploaded files and batches; none disables batches (default: in the user's cache folder)."
        ),
    ] = None
    batch_db: Annotated[
        str | None,
        batch_option(
            "PostgreSQL database of the batches, which servers may share if they also share the folder (default: "
            "SQLite in the folder).",
            metavar="postgresql://...",
        ),
    ] = None
    batch_inflight: Annotated[
        int | None,
        _limit(
            "Maximum number of batch sequences in the engines, waiting and running (default: twice --max-num-seqs for "
            "each replica).",
            high=1 << 20,
            metavar="SEQUENCES",
        ),
    ] = None
    batch_max_lines: Annotated[int, _limit("Maximum number of lines of a batch.", high=10_000_000, metavar="LINES")] = (
        50_000
    )
    batch_max_file_bytes: Annotated[int, _limit("Maximum size of an uploaded file.", high=1 << 40)] = 200_000_000
    batch_max_line_bytes: Annotated[int, _limit("Maximum size of a batch's line.", high=1 << 30)] = 4 << 20
    batch_max_bytes_per_key: Annotated[
        int,
        _limit(
            "Maximum total size of one key's files; uploads, batches and lines beyond it are refused with 429.",
            high=1 << 50,
            metavar="BYTES",
        ),
    ] = 10_000_000_000
    batch_max_files_per_key: Annotated[
        int,
        _limit(
            "Maximum number of one key's files; uploads beyond it are refused with 429.", high=1 << 40, metavar="FILES"
        ),
    ] = 10_000
    batch_max_active_per_key: Annotated[
        int,
        _limit(
            "Maximum number of one key's unfinished batches; more are refused with 429.",
            high=1 << 30,
            metavar="BATCHES",
        ),
    ] = 100

    store_responses: Annotated[
        bool,
        batch_option(
            "Store responses of /v1/responses for 30 days beside the files, for previous_response_id and "
            "item_reference, unless a request has store: false."
        ),
    ] = False
    max_stored_responses_per_key: Annotated[
        int,
        _limit(
            "Maximum number of one key's stored responses; the oldest are deleted.", high=1 << 40, metavar="RESPONSES"
        ),
    ] = 10_000
    max_stored_response_bytes_per_key: Annotated[
        int,
        _limit(
            "Maximum total size of one key's stored responses, compressed; the oldest are deleted.",
            high=1 << 50,
            metavar="BYTES",
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
