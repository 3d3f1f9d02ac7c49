from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import httpx
import pytest

from chaos.served import serving

ON_RAY = ("--distributed-executor-backend", "ray")
LONG = {"prompt": "abc", "max_tokens": 300, "ignore_eos": True}


def complete(url: str) -> None:
    with suppress(httpx.HTTPError):
        httpx.post(f"{url}/v1/completions", json=LONG, timeout=60)


@pytest.mark.parametrize(
    "options", [("-tp", "2"), pytest.param(ON_RAY, marks=(pytest.mark.ray, pytest.mark.exhaustive))]
)
def test_killed_server_leaves_no_processes_or_files(options: tuple[str, ...]) -> None:
    if options == ON_RAY:
        pytest.importorskip("ray")
    with serving(*options) as server:
        if options == ON_RAY:
            assert any(name.startswith("skipjoin-ray-") for name in server.files())
        else:
            assert len(server.ranks()) == 2
        threading.Thread(target=complete, args=(server.url,), daemon=True).start()
        server.process.kill()
        assert not asyncio.run(server.leftovers())
