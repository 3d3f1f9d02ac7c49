from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import httpx
import pytest

from chaos.served import serving

pytest.importorskip("ray")

pytestmark = pytest.mark.ray
RAY = ("--distributed-executor-backend", "ray")
LONG = {"prompt": "abc", "max_tokens": 300, "ignore_eos": True}


def complete(url: str) -> None:
    with suppress(httpx.HTTPError):
        httpx.post(f"{url}/v1/completions", json=LONG, timeout=60)


def test_killed_server_leaves_no_processes_or_files() -> None:
    with serving(*RAY) as server:
        assert server.ranks()
        assert any(name.startswith("skipjoin-ray-") for name in server.files())
        threading.Thread(target=complete, args=(server.url,), daemon=True).start()
        server.process.kill()
        assert not asyncio.run(server.leftovers())
