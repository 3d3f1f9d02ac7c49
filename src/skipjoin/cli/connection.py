from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from skipjoin.config import base_url
from skipjoin.options import ConfigError, Option

if TYPE_CHECKING:
    from skipjoin.cli.server_client import ServerClient

FAILED, INTERRUPTED = 1, 130
_GROUP = "Server"
_server = partial(Option, group=_GROUP, is_common=True)

ClientT = TypeVar("ClientT", bound="ServerClient")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    url: Annotated[str, _server("URL of the server.", metavar="URL")] = "http://127.0.0.1:8000"
    api_key: Annotated[str | None, _server("API key.", metavar="KEY", envvar="OPENAI_API_KEY")] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", base_url("url", self.url))
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("api_key must be printable ASCII characters")


def call(kind: type[ClientT], connection: Connection, work: Callable[[ClientT], Awaitable[T]]) -> T:
    from skipjoin.cli.server_client import ServerClientError  # noqa: PLC0415

    async def inside() -> T:
        async with kind(connection.url, connection.api_key) as client:
            return await work(client)

    try:
        return asyncio.run(inside())
    except ServerClientError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(FAILED) from error
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
