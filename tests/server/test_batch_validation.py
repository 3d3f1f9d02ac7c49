from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import aclosing
from io import BytesIO
from pathlib import Path
from typing import Any

import psutil
import pytest
from batch_worlds import LoopWatch, StoreLocation, new_batch

from skipjoin.server.batches.line_check import Rules, reports
from skipjoin.server.batches.phases import Refused, ValidatorDied, validate
from skipjoin.server.batches.records import BlobMissing, LineError, LinePlace
from support.pace import max_stall_s

pytestmark = pytest.mark.anyio

RULES = Rules(endpoint="/v1/completions", max_lines=20_000, max_line_bytes=4 << 20, models=("tiny", "tiny-folder"))


def line(**changes: Any) -> bytes:
    good = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "model": "tiny"}}
    return json.dumps(good | changes).encode()


async def check(path: Path) -> list[LinePlace]:
    async with aclosing(validate(path, RULES)) as chunks:
        return [place async for chunk in chunks for place in chunk]


def errors_of(content: bytes) -> list[LineError]:
    rules = Rules(endpoint="/v1/completions", max_lines=50, max_line_bytes=4000, models=("tiny", "tiny-folder"))
    return list(reports(BytesIO(content), rules))[-1].errors


async def test_line_offsets_and_numbers(tmp_path: Path) -> None:
    texts = [
        line(custom_id=f"é{n}", body={"prompt": "ü" * n, "stream": False, "model": RULES.models[n % 2]})
        for n in range(1200)
    ]
    ends = [b"\n", b"\r\n", b"\n\n", b"\n  \r\n"]
    content = b"\xef\xbb\xbf" + b"".join(text + ends[n % 4] for n, text in enumerate(texts)).rstrip()
    file = tmp_path / "input"
    file.write_bytes(content)
    places = await check(file)
    assert [content[place.offset : place.offset + place.length] for place in places] == texts
    assert [place.custom_id for place in places] == [f"é{n}" for n in range(1200)]
    number = begin = 0
    for place in places:
        number, begin = number + content.count(b"\n", begin, place.offset), place.offset
        assert place.number == number + 1


@pytest.mark.parametrize(
    ("wrong", "code", "text", "param"),
    [
        (b'{"custom_id": "a", ', "invalid_json_line", "not valid JSON", None),
        (b"[1]", "invalid_json_line", "must be a JSON object, got list", None),
        ("{}".encode("utf-16"), "invalid_json_line", "begins with the mark of UTF-16", None),
        (b"[" * 3_000, "invalid_json_line", "not valid JSON", None),
        (b'{"custom_id": "\xff"}', "invalid_json_line", "not valid JSON", None),
        (b'{"custom_id": "\\ud800"}', "invalid_json_line", "not valid JSON", None),
        (b'{"a": NaN}', "invalid_json_line", "not valid JSON", None),
        (line(custom_id=None), "invalid_custom_id", "string of 1 to 512 characters", "custom_id"),
        (line(custom_id=""), "invalid_custom_id", "got ''", "custom_id"),
        (line(custom_id="x" * 513), "invalid_custom_id", "512", "custom_id"),
        (line(custom_id="a\0"), "invalid_custom_id", "without NUL", "custom_id"),
        (line(custom_id="3"), "duplicate_custom_id", "is that of line 3, too", "custom_id"),
        (line(method="GET"), "invalid_method", "must be POST, got 'GET'", "method"),
        (line(url="/v1/embeddings"), "invalid_url", "/v1/completions, got '/v1/embeddings'", "url"),
        (line(url=["x" * 999]), "invalid_url", "got list", "url"),
        (line(body=None), "invalid_body", "must be an object, got nothing", "body"),
        (line(body={"stream": True}), "stream_not_supported", "stream", "body.stream"),
        (line(body={"model": "m" * 999}), "model_not_found", "this server serves 'tiny'", "body.model"),
        (line(body={"prompt": "x" * 5_000}), "line_too_long", "at most 4000 bytes", None),
        (line(body={"prompt": "x" * 3_000_000}), "line_too_long", "at most 4000 bytes", None),
    ],
)
async def test_invalid_line_is_reported(wrong: bytes, code: str, text: str, param: str | None) -> None:
    lines = [line(custom_id=str(number)) for number in range(1, 10)]
    lines[6] = wrong
    (error,) = errors_of(b"\n".join(lines))
    assert (error.code, error.line, error.param) == (code, 7, param)
    assert error.message.startswith("line 7: ")
    assert text in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (b"", "empty_file", None),
        (b"\n \n\r\n", "empty_file", None),
        (b"\n".join(line(custom_id=str(n)) for n in range(51)), "too_many_lines", 51),
        (b"\n" * 1000, "too_many_lines", 51),
    ],
)
async def test_number_of_lines_is_limited(content: bytes, code: str, number: int | None) -> None:
    (error,) = errors_of(content)
    assert (error.code, error.line) == (code, number)


async def test_at_most_100_errors_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "input"
    file.write_bytes(b"\n".join([line(custom_id="0"), *[b"nonsense"] * 10_000]))
    with pytest.raises(Refused, match="line 2: ") as caught:
        await check(file)
    assert [error.line for error in caught.value.errors] == list(range(2, 102))


@pytest.mark.parametrize(
    "location",
    ["sqlite", pytest.param("postgres", marks=[pytest.mark.postgres, pytest.mark.exhaustive])],
    indirect=True,
)
async def test_validating_20001_lines_does_not_block_event_loop(tmp_path: Path, location: StoreLocation) -> None:
    """This includes writing the lines to the database and rejecting the batch."""
    file = tmp_path / "input"
    file.write_bytes(b"\n".join(line(custom_id="i" * 500 + str(n)) for n in range(20_001)))
    async with location.opened() as (store,), LoopWatch() as watch:
        batch = await store.batches.add(new_batch(store))
        await store.batches.take_unvalidated()
        try:
            async with aclosing(validate(file, RULES)) as chunks:
                async for places in chunks:
                    assert await store.batches.add_lines(batch.id, places)
        except Refused as refusal:
            errors = refusal.errors
        assert [error.line for error in errors] == [20_001]
        assert await store.batches.reject(batch.id, errors)
    assert watch.longest_s < max_stall_s()


@pytest.fixture
def slow_file(tmp_path: Path) -> Callable[[], Path]:
    """Return a function that creates a pipe, which a reader never reads to its end."""

    def make() -> Path:
        path = tmp_path / "pipe"
        os.mkfifo(path)
        return path

    return make


def validators() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "skipjoin.server.batches.line_check" in child.cmdline()]


async def test_validator_process_exits_when_reader_is_cancelled(slow_file: Callable[[], Path]) -> None:
    path = slow_file()
    reading = asyncio.create_task(check(path))
    writer = await asyncio.to_thread(os.open, path, os.O_WRONLY)
    os.write(writer, line() + b"\n")
    (child,) = validators()
    while child.nice() <= os.nice(0):
        await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not child.is_running()
    os.close(writer)


async def test_killed_validator_process_is_an_error(slow_file: Callable[[], Path]) -> None:
    path = slow_file()
    reading = asyncio.create_task(check(path))
    writer = await asyncio.to_thread(os.open, path, os.O_WRONLY)
    (child,) = validators()
    child.kill()
    path.unlink()
    path.write_bytes(b"")
    with pytest.raises(ValidatorDied, match="-9"):
        await reading
    os.close(writer)


async def test_missing_input_file_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BlobMissing):
        await check(tmp_path / "none")
