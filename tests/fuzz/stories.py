from __future__ import annotations

import asyncio
import io
import json
import random
import time
from typing import Any

import aiohttp

from chaos.invariants import wrong_body
from fuzz.case import CHAT, CLIENTS, COMPLETIONS
from fuzz.lines import jsonl

_FINAL = ("completed", "failed", "expired", "cancelled")
# Maximum seconds until a batch is final.
_BATCH_S = 240.0
_QUERIES = (
    "",
    "?limit=1",
    "?limit=0",
    "?limit=100&after=ID",
    "?after=ID&order=asc",
    "?purpose=batch_output",
    "?after=%00",
    "?limit=%C3%A9",
)
_ODD_FIELDS: tuple[tuple[str, Any], ...] = (
    ("endpoint", "/v1/embeddings"),
    ("completion_window", "0s"),
    ("completion_window", "168h"),
    ("metadata", {"a": "\0"}),
    ("metadata", {"": "x"}),
    ("input_file_id", "../x"),
    ("input_file_id", "file-" + "0" * 32),
)


class Http:
    """HTTP client that checks each answer and collects failures."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.failures: list[str] = []
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_BATCH_S))

    async def close(self) -> None:
        await self._session.close()

    async def ask(self, key: str, method: str, path: str, **options: Any) -> tuple[int, Any]:
        """Send a request and return status and body (parsed JSON or bytes)."""
        headers = {"Authorization": f"Bearer {key}", **options.pop("headers", {})}
        async with self._session.request(method, self.url + path, headers=headers, **options) as answer:
            body = await answer.read()
            found = {name.lower(): value for name, value in answer.headers.items()}
            if (failure := wrong_body(answer.status, found, body)) is not None:
                self.failures.append(f"{failure}: {method} {path}: {answer.status} {body[:300]!r}")
            return answer.status, json.loads(body) if found.get("content-type") == "application/json" else body

    async def upload(self, key: str, data: bytes) -> str | None:
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", io.BytesIO(data), filename="lines.jsonl")  # aiohttp warns about more than 1 MiB of bytes
        status, body = await self.ask(key, "POST", "/v1/files", data=form)
        return str(body["id"]) if status == 200 else None

    async def final(self, key: str, batch: str) -> Any:
        end = time.monotonic() + _BATCH_S
        while (found := (await self.ask(key, "GET", f"/v1/batches/{batch}"))[1])["status"] not in _FINAL:
            if time.monotonic() > end:
                self.failures.append(f"after {_BATCH_S:g} s the batch is still {found}")
                break
            await asyncio.sleep(0.05)
        return found


async def story(url: str, draw: random.Random) -> list[str]:
    key, other = draw.sample(CLIENTS, 2)
    path = draw.choice((COMPLETIONS, CHAT))
    http = Http(url)
    try:
        file = await http.upload(key, jsonl(draw, path))
        if file is None:
            return http.failures
        status, batch = await http.ask(key, "POST", "/v1/batches", **_batch(draw, path, file))
        if status != 200:
            return http.failures
        ids = file, str(batch["id"])
        await asyncio.gather(*(_disturb(http, draw, (key, other), ids) for _ in range(draw.choice((0, 0, 3, 8)))))
        await _check_end(http, key, await http.final(key, batch["id"]))
    finally:
        await http.close()
    return http.failures


def _batch(draw: random.Random, path: str, file: str) -> dict[str, Any]:
    body: dict[str, Any] = {"input_file_id": file, "endpoint": path, "completion_window": "24h"}
    if draw.random() < 0.2:
        name, value = draw.choice(_ODD_FIELDS)
        body[name] = value
    headers = (
        {"Idempotency-Key": draw.choice(("a", "b", "\u20ac".encode().decode("latin-1")))} if draw.random() < 0.1 else {}
    )
    return {"json": body, "headers": headers}


async def _disturb(http: Http, draw: random.Random, keys: tuple[str, str], ids: tuple[str, str]) -> None:
    """Make a random call about a file or its batch, with its owner's key or another one, which must not find it."""
    (key, other), (file, batch) = keys, ids
    await asyncio.sleep(draw.uniform(0, 0.3))
    owner = draw.choice((key, key, other))
    query = draw.choice(_QUERIES)
    method, target = draw.choice(
        (
            ("POST", f"/v1/batches/{batch}/cancel"),
            ("DELETE", f"/v1/files/{file}"),
            ("GET", f"/v1/files/{file}"),
            ("GET", f"/v1/files/{file}/content"),
            ("GET", f"/v1/batches/{batch}"),
            ("GET", "/v1/files" + query.replace("ID", file)),
            ("GET", "/v1/batches" + query.replace("ID", batch)),
        )
    )
    status, body = await http.ask(owner, method, target)
    if owner == other and (file in target or batch in target) and "?" not in target and status != 404:
        http.failures.append(f"another key's {method} {target} is answered: {status} {str(body)[:300]}")
    if owner == other and status == 200 and (file in str(body) or batch in str(body)):
        http.failures.append(f"another key sees the file or batch: {method} {target}: {str(body)[:300]}")


async def _check_end(http: Http, key: str, batch: Any) -> None:
    counts = batch["request_counts"]
    found = {}
    for name in ("output_file_id", "error_file_id"):
        if batch[name] is not None:
            status, text = await http.ask(key, "GET", f"/v1/files/{batch[name]}/content")
            found[name] = [json.loads(line) for line in bytes(text).splitlines()] if status == 200 else []
    lines = [line for some in found.values() for line in some]
    ids = [line["custom_id"] for line in lines]
    if len(ids) != len(set(ids)) or len(found.get("output_file_id", ())) != counts["completed"]:
        http.failures.append(f"of {counts} lines the files have {sorted(ids)}")
    if batch["status"] == "failed" and not batch["errors"]["data"]:
        http.failures.append(f"a batch failed without a reason: {batch}")
    if batch["status"] == "completed" and len(ids) != counts["total"]:
        http.failures.append(f"a completed batch of {counts} lines has {len(ids)} answers")
    for line in lines:
        status = (line["response"] or {"status_code": 0})["status_code"]
        if status >= 500:
            http.failures.append(f"a line got a server error: {str(line)[:300]}")


async def delete_files(url: str) -> list[str]:
    http = Http(url)
    try:
        for key in CLIENTS:
            _, listed = await http.ask(key, "GET", "/v1/files")
            for file in listed["data"]:
                await http.ask(key, "DELETE", f"/v1/files/{file['id']}")
    finally:
        await http.close()
    return http.failures
