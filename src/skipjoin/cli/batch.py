from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from skipjoin.cli.batch_watch import Watch, summary
from skipjoin.cli.commands import Commands
from skipjoin.cli.connection import FAILED, Connection, call
from skipjoin.cli.options import Section, Values, takes
from skipjoin.cli.progress import result_console
from skipjoin.cli.tables import Table
from skipjoin.options import ConfigError

if TYPE_CHECKING:
    from skipjoin.cli.batch_client import BatchClient

batch = Commands(
    help="Submit and watch batches: files of requests that a server runs on spare capacity.", add_completion=False
)

BatchId = Annotated[str, typer.Argument(metavar="ID", help="Id of the batch.")]
T = TypeVar("T")


@batch.command()
@takes(server=Section(Connection))
def submit(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines: custom_id, method, url and body each.")],
    *,
    endpoint: Annotated[
        str | None, typer.Option(metavar="PATH", help="Endpoint of all lines (default: the url of the first).")
    ] = None,
    window: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Time after which the batch expires, such as 24h, 90m or 20s. Finished lines are kept."
        ),
    ] = "24h",
    watch: Annotated[bool, typer.Option("--watch", help="Show the progress until the batch has finished.")] = False,
    server: Values,
) -> None:
    """Upload FILE, create a batch of it and print the batch's id."""

    async def work(client: BatchClient) -> dict[str, Any]:
        file_id = await client.upload(file)
        return await client.create(file_id, endpoint or _endpoint_of(file), window)

    made = _call(Connection(**server), work)
    print(made["id"])
    if watch:
        _follow(Connection(**server), made["id"])


def _endpoint_of(file: Path) -> str:
    """Return the url of the first line, or an endpoint if it has none, which the server refuses."""
    with file.open("rb") as lines, suppress(ValueError, KeyError, TypeError):
        return str(json.loads(next(filter(bytes.strip, lines), b""))["url"])
    return "/v1/chat/completions"


@batch.command(name="watch")
@takes(server=Section(Connection))
def watch_batch(batch_id: BatchId, *, server: Values) -> None:
    """Show the progress of a batch until it has finished. The exit code is 0 if it is completed."""
    _follow(Connection(**server), batch_id)


@batch.command()
@takes(server=Section(Connection))
def fetch(
    batch_id: BatchId,
    *,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="File to write (default: standard output).")
    ] = None,
    errors: Annotated[
        bool, typer.Option("--errors", help="Download the error file instead of the output file.")
    ] = False,
    server: Values,
) -> None:
    """Download the output of a batch that has finished."""
    what = "error" if errors else "output"

    async def work(client: BatchClient) -> None:
        found = await client.batch(batch_id)
        file_id = found[f"{what}_file_id"]
        if file_id is None:
            hint = "" if errors else f"; skipjoin batch watch {batch_id} says why"
            raise ConfigError(f"{batch_id} has status {found['status']} and no {what} file{hint}")
        await _download(client, file_id, out)

    _call(Connection(**server), work)


@batch.command(name="list")
@takes(server=Section(Connection))
def list_batches(
    *,
    limit: Annotated[
        int, typer.Option(min=1, max=100, metavar="BATCHES", help="Maximum number of batches to list.")
    ] = 20,
    server: Values,
) -> None:
    """List the batches of this key, newest first."""
    page = _call(Connection(**server), lambda client: client.batches(limit))
    table = Table("id", "status", "done", "failed", "total", "created", "window ends")
    for row in page["data"]:
        counts = row["request_counts"]
        numbers = [str(counts[name]) for name in ("completed", "failed", "total")]
        table.add_row(row["id"], row["status"], *numbers, _clock(row["created_at"]), _clock(row["expires_at"]))
    result_console().print(table)
    if page["has_more"]:
        print("There are older ones.")


@batch.command()
@takes(server=Section(Connection))
def cancel(batch_id: BatchId, *, server: Values) -> None:
    """Cancel a batch. Results so far remain available as its output."""
    print(summary(_call(Connection(**server), lambda client: client.cancel(batch_id))))


def _follow(connection: Connection, batch_id: str) -> None:
    with Watch() as shown:
        found = _call(connection, lambda client: shown.follow(client, batch_id))
    print(summary(found))
    if found["status"] != "completed":
        raise typer.Exit(FAILED)


def _call(connection: Connection, work: Callable[[BatchClient], Awaitable[T]]) -> T:
    from skipjoin.cli.batch_client import BatchClient  # noqa: PLC0415

    return call(BatchClient, connection, work)


async def _download(client: BatchClient, file_id: str, out: Path | None) -> None:
    try:
        with nullcontext(sys.stdout.buffer) if out is None else out.open("wb") as file:
            async for chunk in client.content(file_id):
                file.write(chunk)
    except OSError as error:
        raise ConfigError(f"{out or 'standard output'}: {error.strerror or error}") from error


def _clock(seconds: int) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
