from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console

from skipjoin.cli.connection import FAILED, Connection, call
from skipjoin.cli.explain import report
from skipjoin.cli.options import Section, Values, takes
from skipjoin.extras import require
from skipjoin.report.numbers import duration

if TYPE_CHECKING:
    from skipjoin.cli.server_client import ServerClient

_HELP = "/again repeats the last answer, /why explains its request, /system TEXT sets the system prompt, /reset, /quit"

# Reasoning is dim.
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


@takes(server=Section(Connection))
def chat(
    *,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Model (default: the one that is served).")] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature (default: the model's).")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the most likely tokens with this total probability (default: the model's)."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of tokens of an answer (default: what fits the context).")
    ] = None,
    server: Values,
) -> None:
    """Chat with a running server. Each line is a message; Ctrl-C stops an answer, Ctrl-D ends the chat."""
    require("skipjoin chat", "bench")
    from skipjoin.cli.server_client import ServerClient  # noqa: PLC0415

    connection = Connection(**server)
    sampling = {"model": model, "temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
    conversation = Conversation({name: value for name, value in sampling.items() if value is not None}, system)
    is_typed = sys.stdin.isatty()
    # A missing server or a wrong key is an error before the first message, and without one.
    call(ServerClient, connection, lambda client: client.json("GET", "/v1/models"))
    if is_typed:
        print(_HELP)
    failed = False
    while True:
        try:
            line = input("> " if is_typed else "").strip()
        except (EOFError, KeyboardInterrupt):
            break
        if line == "/quit":
            break
        if line:
            failed = not _handle(line, conversation, connection) or failed
    if failed and not is_typed:
        raise typer.Exit(FAILED)


@dataclass(slots=True)
class Conversation:
    sampling: dict[str, Any]
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    last_id: str = ""

    def body(self) -> dict[str, Any]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return {**self.sampling, **options, "messages": [*system, *self.messages]}


def _handle(line: str, conversation: Conversation, connection: Connection) -> bool:
    command, _, rest = line.partition(" ")
    messages = conversation.messages
    if command == "/reset":
        messages.clear()
    elif command == "/system":
        conversation.system = rest.strip() or None
    elif command == "/why":
        return _ask(connection, conversation, _explain)
    elif command == "/again":
        if not messages:
            print("there is no answer yet", file=sys.stderr)
            return False
        if messages[-1]["role"] == "assistant":
            messages.pop()
        return _ask(connection, conversation, _answer)
    elif command.startswith("/") and command[1:].isalpha():
        print(f"there is no command {command}; {_HELP}", file=sys.stderr)
        return False
    else:
        messages.append({"role": "user", "content": line})
        return _ask(connection, conversation, _answer)
    return True


def _ask(connection: Connection, conversation: Conversation, work: Any) -> bool:
    """Run `work`. An error leaves the conversation as it was before the message."""
    from skipjoin.cli.server_client import ServerClient, ServerClientError  # noqa: PLC0415

    async def inside() -> None:
        async with ServerClient(connection.url, connection.api_key) as client:
            await work(client, conversation)

    try:
        asyncio.run(inside())
    except ServerClientError as error:
        print(f"error: {error}", file=sys.stderr)
        if work is _answer:
            conversation.messages.pop()
        return False
    except KeyboardInterrupt:
        print("\n(stopped)", file=sys.stderr)
        if work is _answer and conversation.messages[-1]["role"] == "user":
            conversation.messages.pop()
    return True


async def _answer(client: ServerClient, conversation: Conversation) -> None:
    from skipjoin.cli.server_client import ServerClientError  # noqa: PLC0415

    begin, first, text, usage = time.monotonic(), None, "", None
    async for _, data in client.events("/v1/chat/completions", "POST", json=conversation.body()):
        if data == "[DONE]":
            break
        chunk = json.loads(data)
        if "error" in chunk:
            raise ServerClientError(chunk["error"]["message"])
        conversation.last_id, usage = chunk["id"], chunk.get("usage") or usage
        for choice in chunk["choices"]:
            thought, part = (choice["delta"].get(name) or "" for name in ("reasoning_content", "content"))
            if (part or thought) and first is None:
                first = time.monotonic() - begin
            text += part
            if thought and sys.stdout.isatty():
                print(f"{_DIM}{printable(thought)}{_PLAIN}", end="", flush=True)
            print(printable(part), end="", flush=True)
    print()
    conversation.messages.append({"role": "assistant", "content": text})
    if sys.stdout.isatty() and usage is not None and first is not None:
        total = duration(time.monotonic() - begin)
        print(f"({usage['completion_tokens']} tokens in {total}, first after {duration(first)})", file=sys.stderr)


def printable(text: str) -> str:
    """Remove control characters, with which a model could change the terminal."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")


async def _explain(client: ServerClient, conversation: Conversation) -> None:
    if not conversation.last_id:
        print("there is no answer yet", file=sys.stderr)
        return
    found = await client.json("GET", f"/debug/requests/{quote(conversation.last_id, safe='')}")
    for choice in found["choices"]:
        Console(highlight=False).print(report(found, choice))
