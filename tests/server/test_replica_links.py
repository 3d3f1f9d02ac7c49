from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from local_replicas import LocalReplicas, local_replicas
from server_worlds import HERE

from skipjoin.config import EngineConfig
from skipjoin.core.request import DEFAULT_OPTIONS, RequestOptions
from skipjoin.sampling import SamplingParams
from skipjoin.server.engines import link
from skipjoin.server.engines.engine_handle import EngineStartError
from skipjoin.server.engines.engine_program import ORPHANED
from skipjoin.server.engines.errors import EngineDeadError
from skipjoin.server.engines.link import EngineLink, EngineListener, NoAnswerError, connect
from skipjoin.server.engines.messages import Add, ListenerKey, Setup
from skipjoin.server.engines.sequences import OutputQueue
from support.waiting import until

pytestmark = pytest.mark.anyio

PROMPT = [65, 66, 67, 68, 69]


async def generate(
    replicas: LocalReplicas, tokens: int, options: RequestOptions = DEFAULT_OPTIONS, **fields: Any
) -> list[int]:
    mailbox, found = OutputQueue(), []
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, **fields)
    replicas.client.submit(mailbox, 0, PROMPT, params, options=options)
    while True:
        for output in await mailbox.get():
            if output.token is not None:
                found.append(output.token)
            if output.reason is not None:
                return found


def expected(tokens: int) -> list[int]:
    return [PROMPT[n % len(PROMPT)] for n in range(tokens)]


async def test_engine_death_is_detected_immediately_and_requests_move(tokenizer_folder: Path) -> None:
    async with local_replicas(tokenizer_folder, 2) as replicas:
        replicas.supervisor.is_paused = True
        request = asyncio.create_task(generate(replicas, 400))
        await until(lambda: replicas.client.load().running == 1)
        begin = time.monotonic()
        for engine in replicas.engines[:1]:
            engine.kill()
        await until(lambda: replicas.client.alive == 1, link.SILENCE_S)
        assert time.monotonic() - begin < link.SILENCE_S / 2
        assert await request == expected(400)
        assert not replicas.died.is_set()


@pytest.mark.exhaustive  # the next but one replaces an engine that falls silent
async def test_hung_engine_is_replaced(tokenizer_folder: Path) -> None:
    async with local_replicas(tokenizer_folder, 2, hang_timeout_s=1) as replicas:
        request = asyncio.create_task(generate(replicas, 400))
        await until(lambda: replicas.client.load().running == 1)
        first, second = replicas.engines
        first.suspend()
        second.suspend()
        await until(lambda: not (first.is_running() or second.is_running()))
        assert await request == expected(400)


async def test_slow_engine_is_not_declared_dead(tokenizer_folder: Path) -> None:
    async with local_replicas(tokenizer_folder, 2) as replicas:
        request = asyncio.create_task(generate(replicas, 200))
        await until(lambda: replicas.client.load().running == 1)
        for engine in replicas.engines:
            engine.suspend()
        await asyncio.sleep(1.5)
        assert (replicas.client.alive, request.done()) == (2, False)
        for engine in replicas.engines:
            engine.resume()
        assert await request == expected(200)
        assert len(replicas.engines) == 2


async def test_engine_declared_dead_exits_when_it_resumes(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests of a silent engine move, and the engine exits when it is resumed."""
    monkeypatch.setattr(link, "SILENCE_S", 2.0)
    async with local_replicas(tokenizer_folder, 2) as replicas:
        first = replicas.engines[0]
        requests = [asyncio.create_task(generate(replicas, 400)) for _ in range(4)]
        await until(lambda: replicas.client.load().running == 4)
        first.suspend()
        await until(lambda: replicas.client.alive == 1)
        assert await asyncio.gather(*requests) == [expected(400)] * 4
        first.resume()
        await until(lambda: not first.is_running() or first not in replicas.engines)
        await until(lambda: replicas.client.alive == 2)


async def test_start_failure_is_reported(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="there is no folder"):
        async with local_replicas(tmp_path / "nowhere", 2):
            pass


async def test_server_stops_when_no_engine_restarts(tokenizer_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tokenizer_folder, folder)
    async with local_replicas(folder, 2) as replicas:
        request = asyncio.create_task(generate(replicas, 500))
        await until(lambda: replicas.client.load().running == 1)
        shutil.rmtree(folder)
        for engine in replicas.engines:
            engine.kill()
        await asyncio.wait_for(replicas.died.wait(), 60)
        with pytest.raises(EngineDeadError):
            await request
        assert replicas.client.dead


@pytest.mark.exhaustive  # the test above counts failures, and others restart an engine
async def test_failed_starts_are_tolerated_while_one_engine_lives(tokenizer_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tokenizer_folder, folder)
    async with local_replicas(folder, 2) as replicas:
        shutil.rmtree(folder)
        replicas.engines[0].kill()
        await until(lambda: replicas.supervisor.failures >= 4)
        assert (replicas.client.alive, replicas.died.is_set()) == (1, False)
        assert await generate(replicas, 20) == expected(20)
        shutil.copytree(tokenizer_folder, folder)
        await until(lambda: replicas.client.alive == 2)


async def test_progress_of_every_replica_is_reported(tokenizer_folder: Path) -> None:
    async with local_replicas(tokenizer_folder, 2) as replicas:
        assert {"replica 1: pretending to load", "replica 2: pretending to load"} <= set(replicas.progress)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "CONNECT_S", 0.5)


def try_to_connect(key: ListenerKey) -> None:
    context = zmq.Context()
    try:
        connect(context, key)
    finally:
        context.destroy(linger=0)


@pytest.mark.usefixtures("impatient")
async def test_unauthenticated_connections_are_rejected() -> None:
    """The listener accepts only its key's holder, and engines accept only their listener."""
    links: list[EngineLink] = []
    listener = EngineListener("127.0.0.1", links.append)
    public, secret = (part.decode() for part in zmq.curve_keypair())
    other, _ = (part.decode() for part in zmq.curve_keypair())
    wrong_keys = [
        msgspec.structs.replace(listener.key, public=public, secret=secret),
        msgspec.structs.replace(listener.key, server=other),  # another server
    ]
    for key in wrong_keys:
        with pytest.raises(NoAnswerError):
            await asyncio.to_thread(try_to_connect, key)
    plain = zmq.Context()
    socket = plain.socket(zmq.REQ)
    socket.connect(f"{listener.key.host}:{listener.key.port}")
    socket.send(b"")
    assert not await asyncio.to_thread(socket.poll, 500)
    plain.destroy(linger=0)
    assert links == []
    listener.close()


async def test_incomplete_handshake_is_dropped(impatient: None) -> None:
    lost: list[EngineLink] = []

    def admit(one: EngineLink) -> None:
        one.on_lost = lambda: lost.append(one)

    listener = EngineListener("127.0.0.1", admit)
    context = zmq.Context()
    socket = context.socket(zmq.REQ)
    link._lock(socket, listener.key)
    socket.connect(f"{listener.key.host}:{listener.key.port}")
    socket.send(b"")
    await until(lambda: len(lost) == 1)
    context.destroy(linger=0)
    listener.close()


async def test_links_are_encrypted_at_both_ends() -> None:
    """All sockets require encryption, and messages pass."""
    links: list[EngineLink] = []
    listener = EngineListener("127.0.0.1", links.append)
    context = zmq.Context()
    socket, _ = await asyncio.to_thread(connect, context, listener.key)
    ends = [socket, links[0]._socket, listener._socket]
    assert [end.getsockopt(zmq.MECHANISM) for end in ends] == [zmq.CURVE] * 3
    await until(lambda: links[0]._is_connected)
    links[0].send(Add(1, list(b"words"), SamplingParams()))
    assert await asyncio.to_thread(socket.poll, 30_000)
    assert b"words" in socket.recv()
    context.destroy(linger=0)
    listener.close()


async def test_engine_exits_without_api_process(tokenizer_folder: Path) -> None:
    """Its exit code says that the listener does not answer."""
    listener = EngineListener("127.0.0.1", lambda link: None)
    listener.close()
    program = (
        "import sys; import skipjoin.server.engines.link as link; link.CONNECT_S = 0.3\n"
        f"sys.path.insert(0, {str(HERE)!r}); sys.argv = ['x', {str(tokenizer_folder)!r}, '0', '99', '99']\n"
        "import simulated_engine; sys.exit(simulated_engine.main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    _, errors = await process.communicate(msgspec.json.encode(Setup(EngineConfig(), listener.key, os.getpid())))
    assert process.returncode == ORPHANED
    assert b"the API process does not answer" in errors
