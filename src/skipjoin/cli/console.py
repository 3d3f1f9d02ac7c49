from __future__ import annotations

import os
from typing import Annotated

import typer

from skipjoin.cli.connection import Connection
from skipjoin.cli.options import Section, Values, takes
from skipjoin.config import ServerConfig, base_url
from skipjoin.options import ConfigError

_PORT = 8010
_LOCAL = "http://127.0.0.1:8000"


@takes(server=Section(ServerConfig, names={"host", "allowed_hosts"}))
def console(
    *,
    servers: Annotated[
        list[str] | None,
        typer.Option("--server", metavar="URL", help="Server to watch; may be repeated (default: port 8000 here)."),
    ] = None,
    api_keys: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            help="API key of a server, once for each --server in their order, '' for none (default: the variable "
            "OPENAI_API_KEY if there is one server, or else browsers ask for it).",
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = _PORT,
    server: Values,
) -> None:
    """Serve the console and the chat page of one or several servers, in a process of its own.

    On this machine alone, pages use --api-key, which should have operator=yes. With another --host, browsers ask for a
    key.
    """
    from skipjoin.server.relay import run_console  # noqa: PLC0415

    run_console(ServerConfig(**server, port=port), _keys(servers or [_LOCAL], api_keys or []))


def _keys(servers: list[str], api_keys: list[str]) -> dict[str, str | None]:
    """Return the key by the URL of its server, to which alone it is sent."""
    if not api_keys:
        variable = os.environ.get("OPENAI_API_KEY", "") if len(servers) == 1 else ""
        api_keys = [variable] * len(servers)
    if len(api_keys) != len(servers):
        raise ConfigError(
            f"api_key must be given once for each of the {len(servers)} servers, in their order and '' for none, "
            f"got {len(api_keys)}: a key goes to its own server only"
        )
    urls = [base_url("server", url) for url in servers]
    known = [Connection(url=url, api_key=key or None) for url, key in zip(urls, api_keys, strict=True)]
    return {item.url: item.api_key for item in known}
