from __future__ import annotations

import asyncio
import resource
import socket

import pytest
from server_worlds import StartServer

from skipjoin.config import ConfigError, ServerConfig
from skipjoin.server.api.connections import SPARE
from skipjoin.server.listeners import (
    DESCRIPTORS_PER_ENGINE,
    RESERVED_DESCRIPTORS,
    listen,
    open_listeners,
    raise_descriptor_limit,
    url_of,
)

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_port_in_use_error_names_option_and_closes_other_socket() -> None:
    with listen("127.0.0.1", 0) as taken, listen("127.0.0.1", 0) as chosen:
        port, free = taken.getsockname()[1], chosen.getsockname()[1]
        chosen.close()
        with pytest.raises(ConfigError, match=f"metrics_port {port} on 127.0.0.1 is in use; choose another"):
            open_listeners(ServerConfig(host="127.0.0.1", port=free, metrics_port=port))
        listen("127.0.0.1", free).close()


def test_unknown_host_error_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    expected = "cannot listen on host 'no', port 8000: Name or service not known; --host takes an address"
    with pytest.raises(ConfigError, match=expected):
        open_listeners(ServerConfig(host="no"))


def test_metrics_listener_exists_only_with_metrics_port() -> None:
    for metrics_port in (None, 0):
        listeners = open_listeners(ServerConfig(host="127.0.0.1", port=0, metrics_port=metrics_port))
        assert len(listeners) == (1 if metrics_port is None else 2)
        for listener in listeners:
            assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
            listener.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_ipv6_url_has_brackets() -> None:
    try:
        listener = listen("::1", 0)
    except OSError as error:
        pytest.skip(f"::1 cannot be used: {error}")
    with listener:
        assert url_of(listener) == f"http://[::1]:{listener.getsockname()[1]}"


def test_connection_limit_reserves_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = (256, 512)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    raised = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: raised.append(pair))
    others = SPARE + RESERVED_DESCRIPTORS + 2 * DESCRIPTORS_PER_ENGINE
    assert raise_descriptor_limit(100, engines=2) == 100
    assert not raised
    assert raise_descriptor_limit(300, engines=2) == 300
    assert raise_descriptor_limit(4096, engines=2) == 512 - others
    assert raised == [(300 + others, 512), (512, 512)]
    limits = (20, 20)
    with pytest.raises(
        ConfigError, match=rf"\(ulimit -n\) is 20, and must be at least {others + 1}, or {4096 + others}"
    ):
        raise_descriptor_limit(4096, engines=2)


@pytest.mark.anyio
async def test_300_idle_connections_do_not_exhaust_256_descriptors(start_server: StartServer) -> None:
    server = start_server(descriptors=256)
    host, port = server.url.removeprefix("http://").split(":")
    idle = [await asyncio.open_connection(host, int(port)) for _ in range(300)]
    for _ in range(3):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(HEALTH)
        assert (await asyncio.wait_for(reader.readline(), 10)).startswith(b"HTTP/1.1 200")
        writer.close()
    assert server.api.num_fds() < 256
    for _, writer in idle:
        writer.close()
