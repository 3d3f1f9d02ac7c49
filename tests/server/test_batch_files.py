from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from batch_worlds import Clock, LoopWatch, new_batch

from skipjoin.config import ServerConfig
from skipjoin.routes import FORM_BYTES, Part
from skipjoin.server.api.app import add_routes, new_app
from skipjoin.server.api.auth import AccessGuard
from skipjoin.server.api.connections import ConnectionLimits
from skipjoin.server.api.http import HttpServer
from skipjoin.server.batches import context as contexts
from skipjoin.server.batches import files
from skipjoin.server.batches.blobs import FILES, Blobs
from skipjoin.server.batches.records import BlobMissing, NoSpace, StoreError, StoreUnavailable
from skipjoin.server.batches.store import Store
from skipjoin.server.listeners import listen
from support.pace import max_stall_s
from support.waiting import until
from support.worlds import exhaustive

pytestmark = pytest.mark.anyio

KEYS = ("first", "second")
FORM = {"purpose": "batch"}
MB = 1_000_000


class Files:
    """Application with only the files routes, and clients with two keys."""

    def __init__(self, folder: Path, store: Store, config: ServerConfig) -> None:
        self.folder, self.store, self.blobs = folder, store, Blobs(folder)
        self.context = contexts.BatchContext(config)
        self.context.open(store, self.blobs)
        app = new_app()
        contexts.install(app, self.context)
        add_routes(app, Part.BATCHES)
        self.guard = AccessGuard(
            app,
            api_keys=config.api_keys,
            max_header_bytes=config.max_header_bytes,
            max_body_bytes=config.max_body_bytes,
            body_limits={("POST", "/v1/files"): config.batch_max_file_bytes + FORM_BYTES},
        )
        self.http, self.other = (self.client(key) for key in KEYS)

    def client(self, key: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.guard, raise_app_exceptions=False)
        return httpx.AsyncClient(
            transport=transport, base_url="http://test", headers={"Authorization": f"Bearer {key}"}
        )

    async def upload(self, content: bytes = b"{}\n", name: str = "a.jsonl", **fields: str) -> httpx.Response:
        return await self.http.post("/v1/files", data=FORM | fields, files={"file": (name, content)})

    def on_disk(self) -> list[str]:
        return sorted(path.name for path in (self.folder / FILES).iterdir())


@contextlib.asynccontextmanager
async def opened(folder: Path, clock: Clock | None = None, **settings: Any) -> AsyncIterator[Files]:
    store = await Store.open(None, folder, clock=clock or Clock())
    world = Files(folder, store, ServerConfig(api_keys=KEYS, **settings))
    yield world
    await world.http.aclose()
    await world.other.aclose()
    world.blobs.close()
    await store.close()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Files]:
    async with opened(tmp_path, batch_max_file_bytes=3 * MB, batch_max_bytes_per_key=5 * MB) as found:
        yield found


async def test_file_lifecycle_with_openai_client(world: Files) -> None:
    client = openai.AsyncOpenAI(api_key="first", base_url="http://test/v1", http_client=world.http)
    content = os.urandom(2_500_000) + b"\r\n--half a boundary\r\n"
    made = await client.files.create(file=("../../etc/passwd", content), purpose="batch")
    assert (made.filename, made.bytes, made.purpose) == ("../../etc/passwd", len(content), "batch")
    assert made.expires_at - made.created_at == 30 * 86400
    assert world.on_disk() == [made.id]
    assert await client.files.retrieve(made.id) == made
    assert (await client.files.content(made.id)).content == content
    kept = await client.files.create(
        file=b"{}", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert kept.expires_at - kept.created_at == 3600
    assert [file.id async for file in client.files.list(limit=1, purpose="batch")] == [kept.id, made.id]
    assert [file.id async for file in client.files.list(order="asc")] == [made.id, kept.id]
    assert (await client.files.delete(made.id)).deleted
    assert world.on_disk() == [kept.id]
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(made.id)


async def test_files_of_another_key_are_not_found(world: Files) -> None:
    file_id = (await world.upload()).json()["id"]
    for method, path in [("GET", ""), ("GET", "/content"), ("DELETE", "")]:
        response = await world.other.request(method, f"/v1/files/{file_id}{path}")
        missing = await world.other.request(method, f"/v1/files/file-none{path}")
        assert response.status_code == missing.status_code == 404
        assert response.text.replace(file_id, "file-none") == missing.text
    assert (await world.other.get("/v1/files")).json()["data"] == []
    assert (await world.other.get(f"/v1/files?after={file_id}")).json()["data"] == []
    assert (await world.http.get(f"/v1/files/{file_id}")).status_code == 200
    for path in ("/v1/files/%00", "/v1/files/..%2f..%2flock/content"):
        assert (await world.http.get(path)).status_code == 404


async def test_cursor_is_the_id_of_a_file_even_of_one_that_is_gone(world: Files) -> None:
    ids = [(await world.upload()).json()["id"] for _ in range(3)]
    for cursor in ("nope", "", ids[0].upper(), "file-nope"):
        refused = await world.http.get("/v1/files", params={"after": cursor})
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "after")
    client = openai.AsyncOpenAI(api_key="first", base_url="http://test/v1", http_client=world.http)
    assert [(await client.files.delete(file.id)).id async for file in client.files.list(limit=1)] == ids[::-1]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"purpose": "fine-tune"}, "purpose must be batch, got 'fine-tune'"),
        ({"purpose": "batch_output"}, "purpose must be batch, got 'batch_output'"),
        ({"expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, "anchor must be created_at"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"}, "integer in [3600, 2592000]"),
        ({"expires_after[anchor]": "created_at"}, "integer in [3600, 2592000]"),
        ({"expires_after[seconds]": "3600"}, "anchor must be created_at"),
        ({"color": "red"}, "unknown or unsupported field 'color'"),
        ({"color": "r" * 2000}, "color must have at most 1024 bytes"),
    ],
)
async def test_invalid_form_fields_are_rejected_and_nothing_is_stored(
    world: Files, fields: dict[str, str], text: str
) -> None:
    response = await world.upload(**fields)
    assert response.status_code == 400
    assert text in response.json()["error"]["message"]
    assert world.on_disk() == []


PART = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n'
PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        (b"{}", "application/json", "must be multipart/form-data"),
        (b"{}", "multipart/form-data", "must be multipart/form-data"),
        (b"{}", "multipart/form-data; boundary=" + "b" * 300, "not valid multipart"),
        (b"nonsense", "multipart/form-data; boundary=b", "not valid multipart"),
        (PART, "multipart/form-data; boundary=b", "ends before its last part"),
        (PURPOSE + b"--b--\r\n", "multipart/form-data; boundary=b", "file is missing"),
        (PART + b"--b--\r\n", "multipart/form-data; boundary=b", "purpose is missing"),
        (PART + PART + b"--b--\r\n", "multipart/form-data; boundary=b", "file must be given once"),
        (PURPOSE * 20 + b"--b--\r\n", "multipart/form-data; boundary=b", "purpose must be given once"),
        (PART.replace(b"{}", b"") + PURPOSE + b"--b--\r\n", "multipart/form-data; boundary=b", "must not be empty"),
    ],
)
async def test_malformed_forms_are_rejected(world: Files, body: bytes, kind: str, text: str) -> None:
    response = await world.http.post("/v1/files", content=body, headers={"Content-Type": kind})
    assert response.status_code == 400
    assert text in response.json()["error"]["message"]
    assert world.on_disk() == []


async def test_form_may_arrive_byte_by_byte(world: Files) -> None:
    async def slowly() -> AsyncIterator[bytes]:
        for byte in PURPOSE + PART + b"--b--\r\n":
            yield bytes([byte])

    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    response = await world.http.post("/v1/files", content=slowly(), headers=kind)
    assert (response.json()["bytes"], response.json()["filename"]) == (2, "a")


@pytest.mark.parametrize("query", ["limit=0", "limit=10001", "limit=x", "order=up", "purpose=assistants"])
async def test_invalid_query_parameters_are_rejected(world: Files, query: str) -> None:
    response = await world.http.get(f"/v1/files?{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == query.split("=", maxsplit=1)[0]


async def test_number_of_files_per_key_is_limited(tmp_path: Path) -> None:
    async with opened(tmp_path, batch_max_files_per_key=3) as world:
        answers = await asyncio.gather(*(world.upload() for _ in range(6)))
        assert sorted(answer.status_code for answer in answers) == [200] * 3 + [429] * 3
        refused = await world.upload()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
        assert "this key would have 4 files with the outputs of its batches, and may have 3" in refused.text
        assert len(world.on_disk()) == 3
        assert (await world.other.post("/v1/files", data=FORM, files={"file": b"{}"})).status_code == 200
        await world.http.delete(f"/v1/files/{next(a for a in answers if a.status_code == 200).json()['id']}")
        assert (await world.upload()).status_code == 200


async def test_file_sizes_are_limited(world: Files) -> None:
    large = await world.upload(b"x" * (3 * MB + 1))
    assert large.status_code == 413
    assert large.json()["error"]["message"] == "file must have at most 3000000 bytes"
    assert (await world.upload(b"x" * 3 * MB)).status_code == 200
    full = await world.upload(b"x" * (2 * MB + 1))
    assert (full.status_code, full.json()["error"]["code"]) == (429, "quota_exceeded")
    half = b"x" * (3 * MB // 2)  # concurrent uploads count together
    answers = await asyncio.gather(world.upload(half), world.upload(half))
    assert sorted(answer.status_code for answer in answers) in ([200, 429], [429, 429])
    elsewhere = await world.other.post("/v1/files", data=FORM, files={"file": b"x" * 3 * MB})
    assert elsewhere.status_code == 200
    assert len(world.on_disk()) == 2 + (200 in [answer.status_code for answer in answers])
    assert (await world.http.post("/v1/nothing", content=b"x" * 5 * MB)).status_code == 413


async def test_expired_files_are_swept_unless_a_batch_reads_them(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, clock) as world:
        ids = [(await world.upload()).json()["id"] for _ in range(3)]
        batch = replace(new_batch(world.store), input_file_id=ids[0])
        await world.store.batches.add(batch)
        clock.seconds += 31 * 86400
        assert (await world.http.get("/v1/files")).json()["data"] == []
        await files.sweep(world.store, world.blobs)
        assert world.on_disk() == [ids[0]]
        await world.store.batches.take_unvalidated()
        await world.store.batches.reject(batch.id, [])
        await files.sweep(world.store, world.blobs)
        assert world.on_disk() == []
        assert await world.store.files.known() == set()


async def test_partial_files_of_a_crash_are_swept(world: Files) -> None:
    file_id = (await world.upload()).json()["id"]
    folder = world.folder / FILES
    (folder / "file-unknown").write_bytes(b"x")
    (folder / f"{file_id}.0123.part").write_bytes(b"x")
    assert await world.blobs.sweep(await world.store.files.known(), min_age_s=3600) == 0
    assert await world.blobs.sweep(await world.store.files.known()) == 2
    assert world.on_disk() == [file_id]


@pytest.mark.parametrize("call", ["write", "fsync", "open"])
async def test_full_disk_is_reported_and_leaves_no_file(
    world: Files, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"skipjoin.server.batches.blobs.os.{call}", full)
    response = await world.upload(b"x" * 2 * MB)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "insufficient_storage"
    monkeypatch.undo()
    assert world.on_disk() == []
    assert (await world.upload(b"x" * 2 * MB)).status_code == 200


async def test_missing_folder_is_reported(world: Files) -> None:
    file_id = (await world.upload()).json()["id"]
    (world.folder / FILES).rename(world.folder / "elsewhere")
    for response in (await world.upload(), await world.http.get(f"/v1/files/{file_id}/content")):
        assert (response.status_code, response.json()["error"]["code"]) == (503, "batch_store_unavailable")
    with pytest.raises(BlobMissing):
        await world.blobs.read_at(file_id, 0, 1)
    (world.folder / "elsewhere").rename(world.folder / FILES)
    assert await world.blobs.read_at(file_id, 1, 100) == b"}\n"


@pytest.mark.parametrize(("error", "kept"), [(NoSpace, 0), (StoreUnavailable, 1)])
async def test_content_is_kept_if_its_row_may_be_committed(
    world: Files, monkeypatch: pytest.MonkeyPatch, error: type[StoreError], kept: int
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise error("no")

    monkeypatch.setattr(world.store.files, "add", fail)
    assert (await world.upload()).status_code == 503
    assert len(world.on_disk()) == kept
    assert await world.blobs.sweep(await world.store.files.known()) == kept


@contextlib.asynccontextmanager
async def served(world: Files) -> AsyncIterator[httpx.AsyncClient]:
    with listen("127.0.0.1", 0) as listener:
        server = HttpServer(world.guard, ConnectionLimits(max_header_bytes=1 << 16))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, headers=world.http.headers, timeout=60) as client:
            yield client
        server.should_exit = True
        await serving


def large_form(size: int) -> tuple[dict[str, str], AsyncIterator[bytes]]:
    head, tail = PURPOSE + PART.removesuffix(b"{}\r\n"), b"\r\n--b--\r\n"
    block = b"x" * 9_999 + b"\n"

    async def body() -> AsyncIterator[bytes]:
        yield head
        for _ in range(size // len(block)):
            yield block
        yield tail

    length = len(head) + size + len(tail)
    return {"Content-Type": "multipart/form-data; boundary=b", "Content-Length": str(length)}, body()


@pytest.mark.parametrize(
    ("size", "declared", "status"), [(60 * MB, True, 200), exhaustive(61 * MB, True, 413), (61 * MB, False, 413)]
)
async def test_upload_size_limit_and_memory_use(tmp_path: Path, size: int, declared: bool, status: int) -> None:
    assert ServerConfig().batch_max_file_bytes == 200 * MB  # the same as OpenAI
    async with opened(tmp_path, batch_max_file_bytes=60 * MB) as world, served(world) as client:
        headers, body = large_form(size)
        if not declared:
            del headers["Content-Length"]
        process = psutil.Process()
        gc.collect()
        before = peak = process.memory_info().rss

        async def sample() -> None:
            nonlocal peak
            while True:
                peak = max(peak, process.memory_info().rss)
                await asyncio.sleep(0.01)

        sampling = asyncio.create_task(sample())
        async with LoopWatch() as watch:
            response = await client.post("/v1/files", headers=headers, content=body)
        sampling.cancel()
        assert response.status_code == status
        assert peak - before < 30 * MB
        assert watch.longest_s < max_stall_s()
        assert len(world.on_disk()) == (status == 200)
        assert (await client.get("/v1/files")).status_code == 200  # on this connection or a new one


async def test_aborted_upload_leaves_no_file(tmp_path: Path) -> None:
    async with opened(tmp_path) as world, served(world) as client:
        _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        head = (
            "POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer first\r\nContent-Length: 9000000\r\n"
            "Content-Type: multipart/form-data; boundary=b\r\n\r\n"
        )
        writer.write(head.encode() + PURPOSE + PART + b"x" * MB)
        await until(lambda: len(world.on_disk()) == 1)
        writer.close()
        await until(lambda: not world.on_disk())


async def test_descriptor_stays_open_while_a_thread_reads_it(tmp_path: Path) -> None:
    # The number of a closed descriptor could already belong to another client's connection.
    blobs = Blobs(tmp_path)
    os.mkfifo(blobs.path("file-1"))
    process = psutil.Process()
    reading = asyncio.create_task(anext(blobs.iterate("file-1")))
    before = process.num_fds()
    end = await asyncio.to_thread(os.open, blobs.path("file-1"), os.O_WRONLY)
    await asyncio.sleep(0.1)  # the thread is now blocked in read()
    while not reading.done():  # structured concurrency cancels repeatedly
        reading.cancel()
        await asyncio.sleep(0)
    assert process.num_fds() == before + 2
    os.write(end, b"x")
    await until(lambda: process.num_fds() == before + 1)
    os.close(end)
    blobs.close()
