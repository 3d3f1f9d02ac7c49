"""Batches of rounds: submitted under load and fetched when the server is idle, perhaps after a restart."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from chaos.catalog import entry
from chaos.invariants import parse_lines
from chaos.served import Served

# Seconds for which a failed submission is retried, and to wait for the end of a batch.
_SUBMIT_S, _FETCH_S = 30.0, 60.0
_FINAL = ("completed", "failed", "expired", "cancelled")


class BatchLostError(AssertionError):
    """A batch that the server accepted does not complete."""


async def submit(served: Served, lines: Sequence[int]) -> str | None:
    """Submit a batch of these entries and return its id, or None if the server exits first."""
    path = entry(lines[0]).path
    rows = [
        json.dumps({"custom_id": str(index), "method": "POST", "url": path, "body": entry(number).body})
        for index, number in enumerate(lines)
    ]
    end = time.monotonic() + _SUBMIT_S
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_SUBMIT_S)) as session:
        while time.monotonic() < end and served.process.poll() is None:
            try:
                file = await _upload(session, served.url, "\n".join(rows).encode())
                body = {"input_file_id": file, "endpoint": path, "completion_window": "24h"}
                made = await _post(session, f"{served.url}/v1/batches", json=body)
                return str(made["id"])
            except (aiohttp.ClientError, OSError, TimeoutError):  # including statuses from 400
                await asyncio.sleep(0.2)
    return None


async def fetch(served: Served, batch: str) -> list[Any]:
    """Wait until the batch is final and return the lines of its output file."""
    end = time.monotonic() + _FETCH_S
    while (found := (await served.get(f"/v1/batches/{batch}"))[1] or {}).get("status") not in _FINAL:
        if time.monotonic() > end:
            raise BatchLostError(f"after {_FETCH_S:g} s the batch is still {found}")
        await asyncio.sleep(0.1)
    if found["status"] != "completed" or found["error_file_id"] is not None:
        raise BatchLostError(f"the batch is {found}")
    _, text = await served.get(f"/v1/files/{found['output_file_id']}/content")
    return parse_lines(text)


async def _upload(session: aiohttp.ClientSession, url: str, data: bytes) -> str:
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", data, filename="lines.jsonl")
    return str((await _post(session, f"{url}/v1/files", data=form))["id"])


async def _post(session: aiohttp.ClientSession, url: str, **options: Any) -> Any:
    async with session.post(url, **options) as answer:
        answer.raise_for_status()
        return await answer.json()
