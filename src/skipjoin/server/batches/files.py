from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from fastapi import Request, Response
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse

from skipjoin.server.api.errors import ApiError, bad_request
from skipjoin.server.api.replies import json_response, limit_of, listed
from skipjoin.server.batches import records
from skipjoin.server.batches.blobs import Blobs
from skipjoin.server.batches.context import context_of
from skipjoin.server.batches.file_rows import check_usage
from skipjoin.server.batches.store import Store

FILE = "file"
# A form has a file, its purpose and its expiry.
_MAX_PARTS, _LONGEST_FIELD = 16, 1024
_LONGEST_NAME = 255
# The response reports an invalid form, so the parser must not log it.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


class Form:
    def __init__(self, content_type: str | None) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise bad_request("the body must be multipart/form-data, with the fields file and purpose")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._parts = 0
        self._name = ""
        self._header = self._content = b""
        self._disposition = ""
        self._value = bytearray()
        self._file: list[bytes] = []
        self._is_complete = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers,
                    "on_part_data": self._on_data,
                    "on_part_end": self._end,
                    "on_end": self._complete,
                },
            )
        except FormParserError:
            _refuse()

    async def file(self, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for chunk in body:
            if data := self._parse(chunk):
                yield data
        if not self._is_complete:
            raise bad_request("the body ends before its last part does")
        if self.filename is None:
            raise bad_request("file is missing: the form must have a part of that name", FILE)

    def _parse(self, chunk: bytes) -> bytes:
        if self._is_complete and chunk.strip(b"\r\n"):
            raise bad_request("the body goes on after its last part")
        try:
            self._parser.write(chunk)
        except FormParserError:
            _refuse()
        data, self._file = b"".join(self._file), []
        return data

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise bad_request(f"a form must have at most {_MAX_PARTS} parts")
        self._disposition, self._value = "", bytearray()

    # Headers and values may arrive in several calls.

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._content += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._content.decode("latin-1")
        self._header, self._content = b"", b""

    def _on_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name in self.fields or (self._name == FILE and self.filename is not None):
            raise bad_request(f"{self._name} must be given once", self._name)
        if self._name == FILE:
            self.filename = label(options.get(b"filename", b""))

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE:
            self._file.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > _LONGEST_FIELD:
            raise bad_request(f"{self._name} must have at most {_LONGEST_FIELD} bytes", self._name)

    def _end(self) -> None:
        if self._name != FILE:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _complete(self) -> None:
        self._is_complete = True


def label(name: bytes) -> str:
    shown = "".join(c for c in name.decode("utf-8", "replace") if c.isprintable())
    return shown[:_LONGEST_NAME] or "upload"


def too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"file must have at most {max_bytes} bytes", param=FILE)


def _refuse() -> NoReturn:
    raise bad_request("the body is not valid multipart/form-data") from None


# OpenAI's bounds of an expiry, an hour to 30 days. The upper one is the default of input files.
EXPIRY_S = (3600, 2_592_000)
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = {"purpose", _ANCHOR, _SECONDS}
_MAX_LISTED = 10_000


async def upload_file(request: Request) -> Response:
    """Upload the input file of a batch, as a form with file, purpose and expires_after."""
    try:
        return json_response(shown(await _read(request)))
    except ClientDisconnect:
        return Response(status_code=499)  # not sent, because the client is gone


async def list_files(request: Request) -> Response:
    """List the files of this API key. Query: purpose, after, limit and order."""
    query = request.query_params
    if (after := query.get("after")) is not None and not records.is_file_id(after):
        _found(None, after, "after")
    found, has_more = await context_of(request).store.files.page(
        request.state.owner,
        purpose=one_of(query, "purpose", records.PURPOSES, None),
        after=after,
        limit=limit_of(query, most=_MAX_LISTED, default=_MAX_LISTED),
        order=one_of(query, "order", ("asc", "desc"), "desc") or "desc",
    )
    return json_response(listed([shown(row) for row in found], has_more))


async def show_file(request: Request, file_id: str) -> Response:
    """Show the size, name and purpose of a file."""
    return json_response(shown(await find(context_of(request).store, request, file_id)))


async def read_file(request: Request, file_id: str) -> Response:
    """Read the content of a file."""
    context = context_of(request)
    row = await find(context.store, request, file_id)
    size = await context.blobs.size(row.id)
    headers = {"Content-Length": str(size)}
    return StreamingResponse(context.blobs.iterate(row.id), 200, headers, "application/octet-stream")


async def delete_file(request: Request, file_id: str) -> Response:
    """Delete a file. Batches that read it continue."""
    context = context_of(request)
    row = _found(await context.store.files.delete(request.state.owner, file_id), file_id)
    with suppress(records.StoreError):  # the file is deleted, and the periodic task will remove its content
        await sweep(context.store, context.blobs)
    return json_response({"id": row.id, "object": "file", "deleted": True})


async def _read(request: Request) -> records.FileRow:
    context, owner, file_id = context_of(request), request.state.owner, records.new_file_id()
    store, blobs = context.store, context.blobs
    quota = context.file_quota
    form = Form(request.headers.get("content-type"))
    used = await store.files.usage_of(owner)
    check_usage(used.files + 1, quota.count, "files")
    with _counting(context.arriving, owner) as count:
        async with blobs.writing(file_id) as writer:
            async for data in form.file(request.stream()):
                count(len(data))
                check_usage(used.bytes + context.arriving[owner], quota.bytes, "bytes")
                if writer.size + len(data) > context.config.batch_max_file_bytes:
                    raise too_large(context.config.batch_max_file_bytes)
                await writer.write(data)
            expiry = read_fields(form.fields)
            if not writer.size:
                raise bad_request("file must not be empty", FILE)
        now = store.now()
        row = records.FileRow(
            id=file_id,
            owner=owner,
            purpose=records.INPUT,
            filename=form.filename or "",
            bytes=writer.size,
            created_at=now,
            expires_at=now + expiry,
        )
        await _add(store, blobs, row, quota)
    context.wake()
    return row


@contextmanager
def _counting(arriving: Counter[str], owner: str) -> Iterator[Any]:
    arrived = 0

    def count(size: int) -> None:
        nonlocal arrived
        arrived += size
        arriving[owner] += size

    try:
        yield count
    finally:
        arriving[owner] -= arrived


async def _add(store: Store, blobs: Blobs, row: records.FileRow, quota: records.Quota) -> None:
    try:
        await store.files.add(row, quota)
    except (records.QuotaExceeded, records.NoSpace):
        await blobs.delete(row.id)
        raise
    # If the connection broke, the row may exist, so the content stays. Without a row, it is deleted at the next start.


def read_fields(fields: Mapping[str, str]) -> int:
    if unknown := next((name for name in fields if name not in _FIELDS), None):
        raise bad_request(f"unknown or unsupported field {unknown!r}", unknown, "unknown_parameter")
    if "purpose" not in fields:
        raise bad_request("purpose is missing", "purpose")
    if fields["purpose"] != records.INPUT:
        raise bad_request(f"purpose must be {records.INPUT}, got {fields['purpose']!r}", "purpose")
    anchor, text = fields.get(_ANCHOR), fields.get(_SECONDS)
    if anchor is None and text is None:
        return EXPIRY_S[1]
    low, high = EXPIRY_S
    if anchor != "created_at":
        raise bad_request("expires_after.anchor must be created_at", "expires_after")
    text = str(text)
    if not (text.isascii() and text.isdigit() and len(text) < 10 and low <= int(text) <= high):
        raise bad_request(f"expires_after.seconds must be an integer in [{low}, {high}]", "expires_after")
    return int(text)


def shown(row: records.FileRow) -> dict[str, Any]:
    return {
        **{name: getattr(row, name) for name in ("id", "bytes", "created_at", "expires_at", "filename", "purpose")},
        "object": "file",
        "status": "processed",
        "status_details": None,
    }


def one_of(query: Mapping[str, str], name: str, known: tuple[str, ...], default: str | None) -> str | None:
    if name not in query:
        return default
    if query[name] not in known:
        raise bad_request(f"{name} must be one of {', '.join(known)}, got {query[name]!r}", name)
    return query[name]


async def find(store: Store, request: Request, file_id: str, param: str = "file_id") -> records.FileRow:
    return _found(await store.files.get(request.state.owner, file_id), file_id, param)


def _found(row: records.FileRow | None, file_id: str, param: str = "file_id") -> records.FileRow:
    if row is None:
        raise ApiError(404, f"there is no file {file_id[:64]!r}", param=param)
    return row


async def sweep(store: Store, blobs: Blobs) -> None:
    ids = await store.files.removable()
    for file_id in ids:
        await blobs.delete(file_id)
    if ids:
        await store.files.forget(ids)
    await store.responses.sweep()
    await store.fill_reserve()
