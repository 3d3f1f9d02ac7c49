from __future__ import annotations

import logging
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field

from skipjoin.server.api.service import Phase, Service
from skipjoin.server.batches.blobs import Blobs
from skipjoin.server.batches.line_check import Rules
from skipjoin.server.batches.records import BatchRow, BatchStatus, BlobMissing, LineError, StoreError
from skipjoin.server.batches.runner import Runner, is_folder_gone
from skipjoin.server.batches.store import Store
from skipjoin.server.batches.validate import Refused, validate

_MAX_TRIES = 3
_FAILED = LineError(
    code="validation_failed", message="the file could not be validated; the server's log has the details"
)
_GONE = LineError(code="input_file_gone", message="the batch's input file is gone")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InputValidator:
    """Reader of input files in another process, which queues their lines or rejects the batch."""

    service: Service
    store: Store
    blobs: Blobs
    runner: Runner
    tries: Counter[str] = field(default_factory=Counter)

    async def take_new(self) -> None:
        while (row := await self._next()) is not None:
            await self._validate(row)

    async def _next(self) -> BatchRow | None:
        return await self.store.batches.take_unvalidated(self.service.names, runs=self.service.phase is Phase.OPEN)

    async def _validate(self, row: BatchRow) -> None:
        try:
            await self._add_lines(row)
        except Refused as refused:
            await self.store.batches.reject(row.id, refused.errors)
        except BlobMissing:
            if is_folder_gone(self.blobs, row.input_file_id):
                await self.store.batches.release(row.id)
                raise
            await self.store.batches.reject(row.id, [_GONE])
        except StoreError:
            await self.store.batches.release(row.id)
            raise
        except Exception:
            self.tries[row.id] += 1
            if self.tries[row.id] < _MAX_TRIES:
                await self.store.batches.release(row.id)
                raise
            _log.exception("the file of batch %s cannot be validated", row.id)
            await self.store.batches.reject(row.id, [_FAILED])

    async def _add_lines(self, row: BatchRow) -> None:
        config = self.service.config
        rules = Rules(
            endpoint=row.endpoint,
            max_lines=config.batch_max_lines,
            max_line_bytes=config.batch_max_line_bytes,
            models=() if row.status is BatchStatus.CANCELLING else self.service.names,
        )
        total = 0
        async with aclosing(validate(self.blobs.path(row.input_file_id), rules)) as chunks:
            async for places in chunks:
                total += len(places)
                if not await self.store.batches.add_lines(row.id, places):
                    return
        if await self.store.batches.begin(row.id, total):
            self.runner.wake()
