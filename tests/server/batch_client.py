"""Helpers for batch tests: build input files, submit batches and wait for them with the official client."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

import openai
from openai.types import Batch

FINAL = ("completed", "failed", "expired", "cancelled")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode()


def upload(client: openai.OpenAI, lines: Iterable[bytes], name: str = "requests.jsonl") -> str:
    return client.files.create(file=(name, b"\n".join(lines) + b"\n"), purpose="batch").id


def submit(
    client: openai.OpenAI, lines: Iterable[bytes], url: str = COMPLETIONS, window: str = "24h", **more: Any
) -> Batch:
    return client.batches.create(
        input_file_id=upload(client, lines),
        endpoint=url,  # type: ignore[arg-type]
        completion_window=window,  # type: ignore[arg-type]
        **more,
    )


def wait_for(client: openai.OpenAI, batch: Batch, *statuses: str, seconds: float = 60) -> Batch:
    """Wait until the batch has one of `statuses` (default: any final one) and return it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        batch = client.batches.retrieve(batch.id)
        if batch.status in (statuses or FINAL):
            return batch
        time.sleep(0.05)
    raise AssertionError(f"the batch is still {batch}")


def answers(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """Return the lines of an output or error file, or an empty list if there is no file."""
    if file_id is None:
        return []
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()]


def ids(found: list[dict[str, Any]]) -> list[str]:
    return [line["custom_id"] for line in found]
