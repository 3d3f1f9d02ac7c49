from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import asyncpg
import httpx
import openai
import pytest
from batch_client import answers, ids, line, submit, wait_for
from batch_worlds import StoreLocation
from openai.types import Batch
from server_worlds import BLOCKS, ServerProcess, outcome_of, simulated_server

from skipjoin.server.batches.database import DATABASE_FILE
from support.postgres import Postgres
from support.waiting import wait_until

SEED = 17
LINES, TOKENS = 60, 24
MANY = 120
STEP_S = 0.004
INFLIGHT = 16
# This server finishes four lines of a few tokens in 0.4 s and 60 lines in 6 s, so it is killed in mid-batch.
SLOW, FEW = {"step_s": 0.05, "batch_inflight": 4}, 8

Start = Callable[..., ServerProcess]


@pytest.fixture
def start(tokenizer_folder: Path, tmp_path: Path) -> Iterator[Start]:
    started: list[ServerProcess] = []

    def begin(step_s: float = STEP_S, **settings: object) -> ServerProcess:
        settings = {"batch_dir": tmp_path / "batches", "batch_inflight": INFLIGHT, **settings}
        started.append(simulated_server(tokenizer_folder, step_s, BLOCKS, **settings))
        return started[-1]

    yield begin
    for server in started:
        server.stop()


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def begin_batch(server: ServerProcess, count: int = LINES, tokens: int = TOKENS) -> Batch:
    with client_of(server) as client:
        lines = [line(f"{n:03}", prompt=f"line {n}", max_tokens=tokens, ignore_eos=True) for n in range(count)]
        return wait_for(client, submit(client, lines), "in_progress")


def finished(folder: Path) -> int:
    with closing(sqlite3.connect(folder / DATABASE_FILE)) as database:
        return int(database.execute("SELECT completed FROM batches").fetchone()[0])


def check(server: ServerProcess, batch: Batch, count: int = LINES, tokens: int = TOKENS) -> None:
    """Check that every line has exactly one answer, the same as that of a direct request."""
    with client_of(server) as client:
        done = wait_for(client, batch)
        assert done.status == "completed"
        found = answers(client, done.output_file_id)
        assert ids(found) == [f"{n:03}" for n in range(count)]
        assert done.error_file_id is None
        assert done.usage.output_tokens == count * tokens
        for line in random.Random(SEED).sample(found, 3):
            prompt = f"line {int(line['custom_id'])}"
            direct = client.completions.create(
                model="tiny", prompt=prompt, max_tokens=tokens, extra_body={"ignore_eos": True}
            )
            assert line["response"]["body"]["choices"][0]["text"] == direct.choices[0].text


def test_batch_survives_sigkill_of_api_and_engine(start: Start, tmp_path: Path) -> None:
    """Processes are killed at random moments. Committed lines are not generated again."""
    dice, folder = random.Random(SEED), tmp_path / "batches"
    server = start(**SLOW)
    batch = begin_batch(server, tokens=FEW)
    written = 0
    for victim in ("api", "engine"):
        wait_until(lambda before=written: finished(folder) > before)
        time.sleep(dice.uniform(0, 0.4))
        killed = server.api if victim == "api" else server.engine
        os.kill(killed.pid, signal.SIGKILL)
        if victim == "engine":  # skip the grace period in which the server still reports the death
            server.process.terminate()
        server.process.wait(30)
        written = finished(folder)
        server = start(**(SLOW if victim == "api" else {}))
    assert 0 < written < LINES
    check(server, batch, tokens=FEW)
    # Only uncommitted lines were generated; the direct requests of `check` are not counted.
    assert server.metric("batch_generation_tokens_total") == (LINES - written) * FEW


def test_upgrade_does_not_wait_for_batches_and_continues_them(start: Start, tmp_path: Path) -> None:
    server = start(**SLOW)
    batch = begin_batch(server, tokens=FEW)
    wait_until(lambda: finished(tmp_path / "batches"))
    server.process.terminate()
    assert server.process.wait(30) == 0
    assert 0 < finished(tmp_path / "batches") < LINES
    assert any("draining: 0 requests" in line for line in server.errors)
    check(start(), batch, tokens=FEW)


def test_second_server_waits_for_batch_folder(start: Start, tokenizer_folder: Path, tmp_path: Path) -> None:
    """A second server does not start on the same explicit folder. With the default folder it starts without batches."""
    first = start()
    arguments = ["simulated", str(tokenizer_folder), "0.001", "64", "512", f"batch_dir={tmp_path / 'batches'}"]
    code, errors = outcome_of(*arguments)
    assert code == 2
    assert "another server has the batches' folder" in errors
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKIPJOIN_BATCH_DIR", str(tmp_path / "batches"))
        second = simulated_server(tokenizer_folder, STEP_S, BLOCKS)
    try:
        answer = httpx.get(f"{second.url}/v1/batches")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "batch_store_unavailable")
        assert httpx.post(f"{second.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        first.stop()
        wait_until(lambda: httpx.get(f"{second.url}/v1/batches").status_code == 200)
    finally:
        second.stop()


@pytest.mark.postgres
def test_two_servers_share_a_batch_through_one_database(
    start: Start, postgres: Postgres, postgres_location: StoreLocation
) -> None:
    """The database fails for a while, then one of the servers is killed."""
    url = postgres_location.url
    assert url is not None
    # Each server finishes eight of these lines in half a second, so the batch outlasts the database failure.
    settings = {"step_s": 0.02, "batch_inflight": 8, "batch_dir": postgres_location.folder, "batch_db": url}
    first, second = servers = [start(**settings) for _ in range(2)]
    batch = begin_batch(first, MANY)
    wait_until(lambda: all(server.metric("batch_generation_tokens_total") for server in servers))
    postgres.stop()
    wait_until(lambda: httpx.get(f"{first.url}/v1/batches/{batch.id}").status_code == 503)
    answer = httpx.get(f"{first.url}/v1/batches")
    assert answer.json()["error"]["code"] == "batch_store_unavailable"
    assert httpx.post(f"{first.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
    postgres.start()
    before = second.metric("batch_generation_tokens_total")
    wait_until(lambda: second.metric("batch_generation_tokens_total") > before)
    second.api.kill()
    second.process.wait(30)
    asyncio.run(end_leases(url))
    check(first, batch, MANY)


async def end_leases(url: str) -> None:
    """Expire all leases, of which a live server renews its own."""
    connection = await asyncpg.connect(url)
    await connection.execute("UPDATE servers SET lease_until = 0")
    await connection.close()
