from __future__ import annotations

from typing import NoReturn

from fastapi import Request, Response

from skipjoin.server.api.errors import ApiError, bad_request
from skipjoin.server.api.replies import json_response, limit_of, listed, service_of
from skipjoin.server.api.stored import ResponseStore, StoredResponse

_PAGE, _MAX_PAGE = 20, 100
_ORDERS = ("asc", "desc")


async def show_response(request: Request, response_id: str) -> Response:
    """Show a stored response."""
    if request.query_params.get("stream", "false") != "false":
        raise bad_request("a stored response cannot be streamed: leave out stream", "stream")
    return json_response((await _found(request, response_id)).response)


async def delete_response(request: Request, response_id: str) -> Response:
    """Delete a stored response. Later ones of its conversation keep what they were generated from."""
    if not await _store(request).delete(request.state.owner, response_id):
        _missing(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def list_input_items(request: Request, response_id: str) -> Response:
    """List the items that a stored response was generated from, newest first. Query: after, limit and order."""
    query = request.query_params
    limit, order = limit_of(query, most=_MAX_PAGE, default=_PAGE), query.get("order", "desc")
    if order not in _ORDERS:
        raise bad_request(f"order must be {' or '.join(_ORDERS)}, got {order!r}", "order")
    items = (await _found(request, response_id)).input
    if order == "desc":
        items = items[::-1]
    if (after := query.get("after")) is not None:
        at = next((number for number, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise bad_request(f"after must be the id of an item of the input, got {after!r}", "after")
        items = items[at + 1 :]
    return json_response(listed(items[:limit], len(items) > limit))


def _store(request: Request) -> ResponseStore:
    if (store := service_of(request).stored_responses) is None:
        raise ApiError(404, "this server stores no responses: it was started without --store-responses")
    return store


async def _found(request: Request, response_id: str) -> StoredResponse:
    return await _store(request).get(request.state.owner, response_id) or _missing(response_id)


def _missing(response_id: str) -> NoReturn:
    raise ApiError(404, f"there is no response {response_id[:64]!r}", param="response_id")
