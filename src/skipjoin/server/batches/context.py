from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from fastapi import FastAPI, Request, Response

from skipjoin.config import ServerConfig
from skipjoin.server.api.errors import ApiError, unavailable
from skipjoin.server.batches.blobs import Blobs
from skipjoin.server.batches.records import FolderLocked, NoSpace, Quota, QuotaExceeded, StoreError, StoreUnavailable
from skipjoin.server.batches.store import Store

# Retry-After of errors of the store.
_RETRY_S = 5
_CODE, NO_SPACE_CODE = "batch_store_unavailable", "insufficient_storage"
_log = logging.getLogger(__name__)


class BatchContext:
    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.file_quota = Quota(config.batch_max_bytes_per_key, config.batch_max_files_per_key)
        self.response_quota = Quota(config.max_stored_response_bytes_per_key, config.max_stored_responses_per_key)
        self.wake: Callable[[], None] = lambda: None
        self._trouble = unavailable("files and batches are being opened", _CODE, _RETRY_S)
        self._store: Store | None = None
        self._blobs: Blobs | None = None
        self.arriving: Counter[str] = Counter()  # bytes of uploads by owner

    def open(self, store: Store, blobs: Blobs) -> None:
        self._store, self._blobs = store, blobs

    def close(self, trouble: str, code: str = _CODE) -> None:
        self._store, self._blobs = None, None
        self._trouble = unavailable(trouble, code, _RETRY_S)

    @property
    def store(self) -> Store:
        if self._store is None:
            raise self._trouble
        return self._store

    @property
    def blobs(self) -> Blobs:
        if self._blobs is None:
            raise self._trouble
        return self._blobs


def context_of(request: Request) -> BatchContext:
    found: BatchContext = request.app.state.batches
    return found


def as_api_error(error: StoreError) -> ApiError:
    if isinstance(error, NoSpace):
        return unavailable(str(error), NO_SPACE_CODE, _RETRY_S)
    if isinstance(error, QuotaExceeded):
        return ApiError(429, str(error), code="quota_exceeded", headers={"Retry-After": str(_RETRY_S)})
    if isinstance(error, StoreUnavailable | FolderLocked):
        return unavailable(str(error), _CODE, _RETRY_S)
    _log.error("the store of batches failed: %s", error)
    return ApiError(500, "the store of batches failed; the server's log has the details", code="batch_store_error")


def install(app: FastAPI, context: BatchContext) -> None:
    app.state.batches = context

    @app.exception_handler(StoreError)
    async def on_store_error(request: Request, error: StoreError) -> Response:
        return as_api_error(error).response(request.scope)
