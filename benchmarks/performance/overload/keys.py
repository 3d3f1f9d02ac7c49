"""Measure the chats of other API keys during a flood from one key, with and without `--fair-by key`.

The script serves the built-in model. One key keeps 80 requests of 16 choices in flight: 1,280 sequences for a queue of
1,024. The other keys take turns to send one chat after the other. With one key the flood is alone, without and with
`--fair-by key` in turn. Targets: no chat is refused, the median chat takes at most 3 times as long as a chat alone, and
the throughput of the flood alone is the same with and without fairness.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[2]))
import harness
from servers import Skipjoin
from skipjoin.builtin import builtin_model_path
from skipjoin.observe.record import percentile

IN_FLIGHT, CHOICES, OUTPUT, CHAT_OUTPUT = 80, 16, 64, 32
ALONE = 20
Figures = dict[str, Any]


class Client:
    """Client that sends requests with API keys to one server."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = url, session
        self.statuses: Counter[int] = Counter()
        self.tokens = 0

    async def post(self, path: str, key: str, body: dict[str, Any]) -> tuple[int, float]:
        """Return the status and the seconds to wait after a refusal."""
        headers = {"Authorization": f"Bearer {key}"}
        async with self._session.post(self._url + path, json=body, headers=headers) as answer:
            found = json.loads(await answer.read())
            if answer.status == 200:
                self.tokens += found["usage"]["completion_tokens"]
            return answer.status, float(answer.headers.get("Retry-After", 0))

    async def flood(self, key: str, until: float) -> None:
        """Send completions one after the other, and wait as long as `Retry-After` says after refusals."""
        body = {"prompt": "abc" * 20, "n": CHOICES, "max_tokens": OUTPUT, "ignore_eos": True}
        while time.monotonic() < until:
            status, retry_s = await self.post("/v1/completions", key, body)
            self.statuses[status] += 1
            await asyncio.sleep(min(retry_s, max(0.0, until - time.monotonic())))

    async def chat(self, key: str) -> float | None:
        messages = [{"role": "user", "content": "Count from 3 to 12"}]
        body = {"messages": messages, "max_tokens": CHAT_OUTPUT, "ignore_eos": True}
        begin = time.monotonic()
        status, _ = await self.post("/v1/chat/completions", key, body)
        return time.monotonic() - begin if status == 200 else None


async def measure(url: str, keys: list[str], seconds: float) -> Figures:
    """Run the flood of the first key together with chats of the others in turn."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:
        client, chats = Client(url, session), Client(url, session)
        alone = [await chats.chat(keys[-1]) for _ in range(ALONE)]
        begin = time.monotonic()
        flood = [asyncio.create_task(client.flood(keys[0], begin + seconds)) for _ in range(IN_FLIGHT)]
        during: list[float | None] = []
        if len(keys) > 1:
            await asyncio.sleep(seconds / 4)
            for key in itertools.cycle(keys[1:]):
                if time.monotonic() >= begin + seconds:
                    break
                during.append(await chats.chat(key))
        await asyncio.gather(*flood)
        took_s = time.monotonic() - begin
    admitted = sorted(one for one in during if one is not None)
    return {
        "keys": len(keys),
        "flood_tokens_per_s": round(client.tokens / took_s, 1),
        "flood_admitted": client.statuses[200],
        "flood_refused": client.statuses[429],
        "chats": len(during),
        "chats_refused": len(during) - len(admitted),
        "chat_alone_s": round(percentile(sorted(one for one in alone if one is not None), 50), 4),
        "chat_during_s": round(percentile(admitted, 50), 4) if admitted else None,
        "chat_during_p90_s": round(percentile(admitted, 90), 4) if admitted else None,
    }


def main() -> None:
    """Measure one server after the other and print a line for each."""
    parser = harness.parser(__doc__)
    parser.add_argument("--keys", type=harness.words, default=["1", "10", "1000"], help="numbers of keys")
    parser.add_argument("--seconds", type=float, default=15.0, help="duration of a flood")
    args = parser.parse_args()
    record = harness.new_record(seconds=args.seconds, runs=[])
    for count in map(int, args.keys):
        names = [f"key-{number}" for number in range(count)]
        for fair in ("none", "key", "key", "none") if count == 1 else ("none", "key"):
            with tempfile.NamedTemporaryFile("w", suffix=".keys") as file:
                file.write("\n".join(names) + "\n")
                file.flush()
                options = ["--api-key-file", file.name, "--fair-by", fair, "--log-level", "warning"]
                with Skipjoin(builtin_model_path(), *options, key=names[0]) as server:
                    found = asyncio.run(measure(server.url, names, args.seconds))
                    record["runs"].append({"fair_by": fair, **found})
            harness.show(record["runs"][-1])
    harness.write_record(record, args.out)


if __name__ == "__main__":
    main()
