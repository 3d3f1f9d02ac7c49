from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from skipjoin.server.batches.disk import as_store_error
from skipjoin.server.batches.records import BlobMissing, is_id

FILES = "files"
# Bytes of one read or write.
CHUNK = 1 << 20
# A pool of its own, so that a slow disk blocks no other threads of the server.
_THREADS = 4
_PART = ".part"

P = ParamSpec("P")
T = TypeVar("T")


class Blobs:
    def __init__(self, folder: Path) -> None:
        self._folder = folder / FILES
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="skipjoin-files")
        with _errors(folder):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def path(self, file_id: str) -> Path:
        if not is_id(file_id):
            raise ValueError(f"not the id of a file: {file_id!r}")
        return self._folder / file_id

    @asynccontextmanager
    async def writing(self, file_id: str) -> AsyncIterator[Writer]:
        """Write a new file, durable after the block. A block that raises leaves nothing."""
        path = self.path(file_id)
        part = path.with_name(f"{file_id}.{uuid.uuid4().hex}{_PART}")
        file = _OpenFile(self._threads, part, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            await file.opened()
            writer = Writer(file)
            yield writer
            await writer.flush()
            await file.run(_commit, part, path)
        except BaseException:
            file.when_idle(lambda: _discard(part, path))
            raise
        finally:
            file.close()

    async def read_at(self, file_id: str, offset: int, length: int) -> bytes:
        return await self._run(_read_at, self.path(file_id), offset, length)

    async def size(self, file_id: str) -> int:
        return (await self._run(os.stat, self.path(file_id))).st_size

    async def iterate(self, file_id: str) -> AsyncGenerator[bytes, None]:
        file = _OpenFile(self._threads, self.path(file_id), os.O_RDONLY)
        try:
            await file.opened()
            while chunk := await file.run(os.read, CHUNK):
                yield chunk
        finally:
            file.close()

    async def delete(self, file_id: str) -> None:
        await self._run(self.path(file_id).unlink, True)

    async def sweep(self, known: set[str], min_age_s: float = 0) -> int:
        """Delete unknown files, unless another server may be writing them."""
        return await self._run(_sweep, self._folder, known, time.time() - min_age_s)

    async def _run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        with _errors(self._folder.parent):
            return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(*args, **kwargs))


class _OpenFile:
    """File that threads open, use and close, one call at a time.

    Only an unused descriptor is closed, because another file could get the same number.
    """

    def __init__(self, threads: ThreadPoolExecutor, path: Path, flags: int) -> None:
        self._threads = threads
        self._folder = path.parent.parent
        self._opening: Future[int] = threads.submit(os.open, path, flags | os.O_CLOEXEC, 0o600)
        self._last: Future[Any] = self._opening

    async def opened(self) -> None:
        await self._result(self._opening)

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        self._last = call = self._threads.submit(work, self._opening.result(), *args)
        return await self._result(call)

    def close(self) -> None:
        self.when_idle(self._close)

    def when_idle(self, work: Callable[[], None]) -> None:
        self._last.add_done_callback(lambda _: work())

    async def _result(self, work: Future[T]) -> T:
        with _errors(self._folder):
            return await asyncio.shield(asyncio.wrap_future(work))

    def _close(self) -> None:
        if not self._opening.cancelled() and self._opening.exception() is None:
            os.close(self._opening.result())


class Writer:
    def __init__(self, file: _OpenFile) -> None:
        self._file = file
        self._chunks: list[bytes] = []
        self._waiting = 0
        self.size = 0

    async def write(self, data: bytes) -> None:
        self._chunks.append(data)
        self._waiting += len(data)
        self.size += len(data)
        if self._waiting >= CHUNK:
            await self.flush()

    async def flush(self) -> None:
        data, self._chunks, self._waiting = b"".join(self._chunks), [], 0
        if data:
            await self._file.run(_write, data)


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _commit(descriptor: int, part: Path, path: Path) -> None:
    os.fsync(descriptor)
    os.rename(part, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _discard(*paths: Path) -> None:
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _read_at(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(length)


def _sweep(folder: Path, known: set[str], before: float) -> int:
    swept = 0
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):  # another server also sweeps
            if entry.name not in known and entry.stat().st_mtime <= before:
                os.unlink(entry)
                swept += 1
    return swept


@contextmanager
def _errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise BlobMissing("the file, or the batches' folder, is gone") from error
    except OSError as error:
        raise as_store_error(error, folder) from error
