from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from skipjoin.server.batches.blobs import Blobs
from skipjoin.server.batches.records import OUTPUT, BatchRow, BatchStatus, FileRow, LineState, StoreError, new_file_id
from skipjoin.server.batches.result_writer import ResultWriter
from skipjoin.server.batches.runner import Runner
from skipjoin.server.batches.store import Store
from skipjoin.server.metrics import Metrics


@dataclass(frozen=True, slots=True)
class OutputFinalizer:
    """Finalizer of batches that are complete, expired or cancelled.

    All steps can be repeated after a crash: files get new names, and the transaction that ends a batch comes last.
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
                with suppress(StoreError):  # `failed` is the relevant error
                    await self.store.batches.release(row.id)
        if failed is not None:
            raise failed

    async def _finish(self, row: BatchRow) -> None:
        await self.runner.drop_batch(row.id)
        await self.results.flush()  # lines that finished in time
        if row.status is BatchStatus.CANCELLING:
            await self._close_lines(row, LineState.CANCELLED)
        elif row.expires_at <= self.store.now():
            await self._close_lines(row, LineState.EXPIRED)
        status = await self.store.batches.start_finalizing(row.id)
        if status is not None:
            await self._write(row, status)

    async def _close_lines(self, row: BatchRow, state: LineState) -> None:
        self.metrics.count("batch_lines_ended_total", state, await self.store.lines.close(row.id, state))

    async def _write(self, row: BatchRow, status: BatchStatus) -> None:
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

    async def _delete(self, file: FileRow | None) -> None:
        if file is not None:
            await self.blobs.delete(file.id)

    async def _file(self, row: BatchRow, *, failed: bool) -> FileRow | None:
        file_id = new_file_id()
        async with self.blobs.writing(file_id) as out:
            async for line in self.store.batches.results(row.id, failed=failed):
                await out.write(line + b"\n")
        if not out.size:
            await self.blobs.delete(file_id)
            return None
        now, kept_s = self.store.now(), row.output_expires_after_s
        return FileRow(
            id=file_id,
            owner=row.owner,
            purpose=OUTPUT,
            filename=f"{row.id}_{'error' if failed else 'output'}.jsonl",
            bytes=out.size,
            created_at=now,
            expires_at=None if kept_s is None else now + kept_s,
        )
