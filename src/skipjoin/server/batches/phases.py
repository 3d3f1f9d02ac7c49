from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from skipjoin.server.api.service import Phase, Service
from skipjoin.server.batches import records
from skipjoin.server.batches.blobs import Blobs
from skipjoin.server.batches.line_check import Report, Rules
from skipjoin.server.batches.result_writer import ResultWriter
from skipjoin.server.batches.runner import Runner, is_folder_gone
from skipjoin.server.batches.store import Store
from skipjoin.server.metrics import Metrics

_COMMAND = (sys.executable, "-m", "skipjoin.server.batches.line_check")
# Maximum bytes of a report. 500 custom_ids of 512 characters, each of six bytes in JSON, have 1.5 MB.
_LONGEST_REPORT = 4 << 20
_decode = msgspec.json.Decoder(Report).decode
_MAX_TRIES = 3
_FAILED = records.LineError(
    code="validation_failed", message="the file could not be validated; the server's log has the details"
)
_GONE = records.LineError(code="input_file_gone", message="the batch's input file is gone")
_log = logging.getLogger(__name__)


class Refused(Exception):  # noqa: N818 -- a verdict, not an error of this program
    def __init__(self, errors: Sequence[records.LineError]) -> None:
        super().__init__(errors[0].message)
        self.errors = tuple(errors)


class ValidatorDied(Exception):  # noqa: N818 -- what has happened
    """The validation process died. Validation may be repeated."""


async def validate(path: Path, rules: Rules) -> AsyncGenerator[list[records.LinePlace], None]:
    process = await asyncio.create_subprocess_exec(
        *_COMMAND,
        str(path),
        msgspec.json.encode(rules).decode(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        limit=_LONGEST_REPORT,
    )
    assert process.stdout is not None
    try:
        while text := await process.stdout.readline():
            report = _decode(text)
            if report.errors:
                raise Refused(report.errors)
            if report.lines:
                yield report.lines
            if report.is_finished:
                return
        if not path.is_file():
            raise records.BlobMissing("the content of the batch's input file is gone")
        raise ValidatorDied(f"the check of a batch's lines ended with exit code {await process.wait()}")
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@dataclass(frozen=True, slots=True)
class InputValidator:
    service: Service
    store: Store
    blobs: Blobs
    runner: Runner
    tries: Counter[str] = field(default_factory=Counter)

    async def take_new(self) -> None:
        while (row := await self._next()) is not None:
            await self._validate(row)

    async def _next(self) -> records.BatchRow | None:
        return await self.store.batches.take_unvalidated(self.service.names, runs=self.service.phase is Phase.OPEN)

    async def _validate(self, row: records.BatchRow) -> None:
        try:
            await self._add_lines(row)
        except Refused as refused:
            await self.store.batches.reject(row.id, refused.errors)
        except records.BlobMissing:
            if is_folder_gone(self.blobs, row.input_file_id):
                await self.store.batches.release(row.id)
                raise
            await self.store.batches.reject(row.id, [_GONE])
        except records.StoreError:
            await self.store.batches.release(row.id)
            raise
        except Exception:
            self.tries[row.id] += 1
            if self.tries[row.id] < _MAX_TRIES:
                await self.store.batches.release(row.id)
                raise
            _log.exception("the file of batch %s cannot be validated", row.id)
            await self.store.batches.reject(row.id, [_FAILED])

    async def _add_lines(self, row: records.BatchRow) -> None:
        config = self.service.config
        rules = Rules(
            endpoint=row.endpoint,
            max_lines=config.batch_max_lines,
            max_line_bytes=config.batch_max_line_bytes,
            models=() if row.status is records.BatchStatus.CANCELLING else self.service.served_names,
        )
        total = 0
        async with aclosing(validate(self.blobs.path(row.input_file_id), rules)) as chunks:
            async for places in chunks:
                total += len(places)
                if not await self.store.batches.add_lines(row.id, places):
                    return
        if await self.store.batches.begin(row.id, total):
            self.runner.wake()


@dataclass(frozen=True, slots=True)
class OutputFinalizer:
    """Finalizer of batches that are complete, expired or cancelled.

    A crash may repeat all steps: the transaction that ends a batch comes last.
    """

    store: Store
    blobs: Blobs
    runner: Runner
    results: ResultWriter
    metrics: Metrics

    async def finish_due(self) -> None:
        failed: Exception | None = None
        for row in await self.store.batches.due():
            try:
                await self._finish(row)
            except Exception as error:  # a failing batch must not block the others
                failed = failed or error
                with suppress(records.StoreError):  # `failed` is the relevant error
                    await self.store.batches.release(row.id)
        if failed is not None:
            raise failed

    async def _finish(self, row: records.BatchRow) -> None:
        await self.runner.drop_batch(row.id)
        await self.results.flush()  # lines that finished in time
        if row.status is records.BatchStatus.CANCELLING:
            await self._close_lines(row, records.LineState.CANCELLED)
        elif row.expires_at <= self.store.now():
            await self._close_lines(row, records.LineState.EXPIRED)
        status = await self.store.batches.start_finalizing(row.id)
        if status is not None:
            await self._write(row, status)

    async def _close_lines(self, row: records.BatchRow, state: records.LineState) -> None:
        self.metrics.count("batch_lines_ended_total", state, await self.store.lines.close(row.id, state))

    async def _write(self, row: records.BatchRow, status: records.BatchStatus) -> None:
        output = await self._file(row, failed=False)
        try:
            errors = await self._file(row, failed=True)
        except BaseException:
            await self._delete(output)
            raise
        # If this raises, the commit may have succeeded. Files without a row are removed at the next start.
        if await self.store.batches.finalize(row.id, status, output, errors) is None:
            await self._delete(output)
            await self._delete(errors)

    async def _delete(self, file: records.FileRow | None) -> None:
        if file is not None:
            await self.blobs.delete(file.id)

    async def _file(self, row: records.BatchRow, *, failed: bool) -> records.FileRow | None:
        file_id = records.new_file_id()
        async with self.blobs.writing(file_id) as out:
            async for line in self.store.batches.results(row.id, failed=failed):
                await out.write(line + b"\n")
        if not out.size:
            await self.blobs.delete(file_id)
            return None
        now, kept_s = self.store.now(), row.output_expires_after_s
        return records.FileRow(
            id=file_id,
            owner=row.owner,
            purpose=records.OUTPUT,
            filename=f"{row.id}_{'error' if failed else 'output'}.jsonl",
            bytes=out.size,
            created_at=now,
            expires_at=None if kept_s is None else now + kept_s,
        )
