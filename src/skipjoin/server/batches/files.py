from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse

from skipjoin.server.api.errors import ApiError, bad_request
from skipjoin.server.api.replies import json_response
from skipjoin.server.batches.blobs import Blobs
from skipjoin.server.batches.context import context_of, owner_of
from skipjoin.server.batches.file_rows import check_usage
from skipjoin.server.batches.records import (
    INPUT,
    PURPOSES,
    FileRow,
    NoSpace,
    Quota,
    QuotaExceeded,
    StoreError,
    is_file_id,
    new_file_id,
)
from skipjoin.server.batches.store import Store
from skipjoin.server.batches.uploads import FILE, Form, too_large

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
    if (after := query.get("after")) is not None and not is_file_id(after):
        _found(None, after, "after")
    found, has_more = await context_of(request).store.files.page(
        owner_of(request),
        purpose=one_of(query, "purpose", PURPOSES, None),
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
    row = _found(await context.store.files.delete(owner_of(request), file_id), file_id)
    with suppress(StoreError):  # the file is deleted, and the periodic task will remove its content
        await sweep(context.store, context.blobs)
    return json_response({"id": row.id, "object": "file", "deleted": True})


async def _read(request: Request) -> FileRow:
    """Store the file of a request. Arriving bytes count toward the quota, and nothing is left after an error."""
    context, owner, file_id = context_of(request), owner_of(request), new_file_id()
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
        row = FileRow(
            id=file_id,
            owner=owner,
            purpose=INPUT,
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


async def _add(store: Store, blobs: Blobs, row: FileRow, quota: Quota) -> None:
    try:
        await store.files.add(row, quota)
    except (QuotaExceeded, NoSpace):
        await blobs.delete(row.id)
        raise
    # If the connection broke, the row may exist, so the content stays. Without a row, it is deleted at the next start.


def read_fields(fields: Mapping[str, str]) -> int:
    if unknown := next((name for name in fields if name not in _FIELDS), None):
        raise bad_request(f"unknown or unsupported field {unknown!r}", unknown, "unknown_parameter")
    if "purpose" not in fields:
        raise bad_request("purpose is missing", "purpose")
    if fields["purpose"] != INPUT:
        raise bad_request(f"purpose must be {INPUT}, got {fields['purpose']!r}", "purpose")
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


def shown(row: FileRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "object": "file",
        "bytes": row.bytes,
        "created_at": row.created_at,
        "expires_at": row.expires_at,
        "filename": row.filename,
        "purpose": row.purpose,
        "status": "processed",
        "status_details": None,
    }


def listed(data: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, "has_more": has_more, **ends}


def one_of(query: Mapping[str, str], name: str, known: tuple[str, ...], default: str | None) -> str | None:
    if name not in query:
        return default
    if query[name] not in known:
        raise bad_request(f"{name} must be one of {', '.join(known)}, got {query[name]!r}", name)
    return query[name]


def limit_of(query: Mapping[str, str], *, most: int, default: int) -> int:
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise bad_request(f"limit must be an integer in [1, {most}], got {text!r}", "limit")
    return int(text)


async def find(store: Store, request: Request, file_id: str, param: str = "file_id") -> FileRow:
    return _found(await store.files.get(owner_of(request), file_id), file_id, param)


def _found(row: FileRow | None, file_id: str, param: str = "file_id") -> FileRow:
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
