from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from batch_worlds import OWNER, StoreLocation, add_batch
from server_worlds import Api, MakeApi, ServerProcess, StartServer

from skipjoin.server.batches import service
from skipjoin.server.batches.database import DATABASE_FILE
from skipjoin.server.batches.records import LineResult, LineState, OwnerUsage, StoreDamaged
from skipjoin.server.batches.service import Batches
from support.small_disk import SmallDisk
from support.waiting import wait_until

pytestmark = pytest.mark.anyio
FULL = "disk full: no space is left for the batches' folder"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    try:
        found = SmallDisk(tmp_path, "8m")
    except OSError as error:
        pytest.skip(str(error))
    yield found
    found.close()


class Client:
    """HTTP client of a server whose batch folder is on the small disk."""

    def __init__(self, server: ServerProcess) -> None:
        self.url = server.url

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        return httpx.request(method, self.url + path, timeout=30, **options)

    def upload(self, size: int) -> httpx.Response:
        return self.ask("POST", "/v1/files", files={"file": ("x", b"x" * size)}, data={"purpose": "batch"})

    def delete(self, file_id: str) -> None:
        deleted = self.ask("DELETE", f"/v1/files/{file_id}")
        assert deleted.json() == {"id": file_id, "object": "file", "deleted": True}

    def files(self) -> set[str]:
        return {file["id"] for file in self.ask("GET", "/v1/files").json()["data"]}

    def wait_for_files(self) -> None:
        wait_until(lambda: self.ask("GET", "/v1/files").status_code == 200, 60)


def storage_error(answer: httpx.Response) -> str:
    assert answer.status_code == 503, answer.text
    error = answer.json()["error"]
    assert error["code"] == "insufficient_storage"
    return str(error["message"])


def test_files_can_be_deleted_on_full_disk_and_after_restart(
    start_server: StartServer, disk: SmallDisk, tmp_path: Path
) -> None:
    folder = tmp_path / "batches"
    server = start_server(namespace=disk.namespace, batch_dir=folder)
    client = Client(server)
    ids = [client.upload(size).json()["id"] for size in (1, 1, 1 << 20, 1, 1 << 20)]
    for count, file_id in enumerate(ids[:-1], 1):
        disk.fill()
        assert storage_error(client.upload(1 << 20)) == f"{FULL} {folder}"
        client.delete(file_id)
        assert client.files() == set(ids[count:])
    disk.fill()
    server.api.terminate()
    server.process.wait(30)
    client = Client(start_server(namespace=disk.namespace, batch_dir=folder))
    disk.fill()
    assert client.files() == {ids[-1]}
    client.delete(ids[-1])
    assert client.upload(1 << 19).status_code == 200


def test_server_starts_on_full_disk_and_recovers_when_space_is_freed(
    start_server: StartServer, disk: SmallDisk, tmp_path: Path
) -> None:
    folder = tmp_path / "batches"
    disk.fill()
    client = Client(start_server(namespace=disk.namespace, batch_dir=folder))
    for answer in (client.upload(1), client.ask("GET", "/v1/batches"), client.ask("DELETE", "/v1/files/file-1")):
        assert storage_error(answer) == f"files and batches cannot be used now: {FULL} {folder}"
    assert client.ask("POST", "/v1/completions", json={"prompt": "abc", "max_tokens": 3}).status_code == 200
    disk.empty()
    client.wait_for_files()
    assert client.upload(100).status_code == 200


class Server:
    def __init__(self, api: Api) -> None:
        self.http = api.http
        self.batches = Batches(api.service, most=4)
        self.batches.add_routes(api.app.app)  # type: ignore[arg-type]

    async def upload(self, size: int) -> httpx.Response:
        content = b"x" * size
        return await self.http.post("/v1/files", files={"file": ("x", content)}, data={"purpose": "batch"})

    async def files(self) -> set[str]:
        return {file["id"] for file in (await self.http.get("/v1/files")).json()["data"]}

    async def refusal(self) -> tuple[str, str]:
        """Return code and message of the error with which the files API answers."""
        answer = await self.http.get("/v1/files")
        assert answer.status_code == 503, answer.text
        error = answer.json()["error"]
        return error["code"], error["message"]


@asynccontextmanager
async def served(make_api: MakeApi, folder: Path, **settings: Any) -> AsyncIterator[Server]:
    async with make_api(batch_dir=str(folder), **settings) as api:
        server = Server(api)
        await server.batches.open()
        yield server
        assert (await api.complete()).status_code == 200
        await server.batches.close()


@pytest.mark.parametrize("damage", ["no database", "pages"])
async def test_startup_error_names_corrupt_database(
    make_api: MakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(service, "_REOPEN_S", 0.1)
    async with served(make_api, tmp_path / "batches") as server:
        file_id = (await server.upload(100)).json()["id"]
    file = tmp_path / "batches" / DATABASE_FILE
    before = file.read_bytes()
    file.write_bytes(b"x" * len(before) if damage == "no database" else before[:4096] + b"x" * (len(before) - 4096))
    async with served(make_api, tmp_path / "batches") as server:
        code, message = await server.refusal()
        assert code == "batch_store_unavailable"
        assert f"the batches' database {file} is damaged (" in message
        assert message.endswith("from a copy, or move it away to begin without files and batches")
        file.write_bytes(before)
        async with asyncio.timeout(30):
            while (await server.http.get("/v1/files")).status_code != 200:
                await asyncio.sleep(0.05)
        assert await server.files() == {file_id}


async def test_error_names_database_corrupted_in_use(tmp_path: Path) -> None:
    location = StoreLocation(tmp_path, None)
    async with location.opened() as (store,):
        await add_batch(store)
    with sqlite3.connect(tmp_path / DATABASE_FILE) as connection:
        (size,) = connection.execute("PRAGMA page_size").fetchone()
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'results'").fetchone()
    connection.close()
    with (tmp_path / DATABASE_FILE).open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)
    async with location.opened() as (store,):
        (line,) = await store.lines.take(1)
        with pytest.raises(
            StoreDamaged, match=r"is damaged \(database disk image is malformed\): stop the server, and"
        ):
            await store.lines.finish([LineResult(line=line, state=LineState.DONE, body=b"{}")])
        assert await store.files.usage_of(OWNER) == OwnerUsage(0, 0)
