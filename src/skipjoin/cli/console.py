"""`skipjoin console`."""

from __future__ import annotations

from typing import Annotated

import typer

from skipjoin.cli.connection import Connection
from skipjoin.cli.options import Section, Values, takes
from skipjoin.config import ServerConfig, base_url

_PORT = 8010


@takes(connection=Section(Connection, names={"api_key"}), server=Section(ServerConfig, names={"host", "allowed_hosts"}))
def console(
    *,
    servers: Annotated[
        list[str] | None,
        typer.Option("--server", metavar="URL", help="Server to watch; may be repeated (default: port 8000 here)."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = _PORT,
    connection: Values,
    server: Values,
) -> None:
    """Serve the console and the chat page of one or several servers, in a process of its own.

    On this machine alone, pages use --api-key, which should be a key with operator=yes. With another --host, browsers
    ask for a key.
    """
    from skipjoin.server.relay.run import run_console  # noqa: PLC0415

    known = Connection(**connection)
    urls = [base_url("server", url) for url in dict.fromkeys(servers or [known.url])]
    run_console(ServerConfig(**server, port=port), urls, known.api_key)
