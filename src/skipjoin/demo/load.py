from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from skipjoin.workload.arrivals import parse_arrivals
from skipjoin.workload.lengths import parse_lengths
from skipjoin.workload.request import WorkloadRequest
from skipjoin.workload.streams import Closed, Stream

BACKGROUND, CHAT = "background", "chat"
# Aimed at duration of a background job in a full batch; a run takes about twice as long.
_JOB_S = 14.0
# Output tokens of a background job. Fewer would not outlast a chat, more would not fit into the model's context.
MIN_TOKENS, MAX_TOKENS = 100, 800
_BACKGROUND_PROMPT = 64
_CHAT_LENGTHS = "uniform:16-48,6-16"
# Chats arrive during this multiple of a background job, so that the last of them find free slots.
_CHATS_UNTIL = 1.25
_PROBE_TOKENS = 48


@dataclass(frozen=True, slots=True)
class MixedLoad:
    """Background jobs at 0 and chats during `duration_s`. Rates do not apply."""

    background: int
    background_tokens: int
    chats: int
    duration_s: float
    best_effort: float | None = None
    closed: tuple[Closed, ...] = ()

    def draw(
        self, rate_rps: float | None, duration_s: float | None, seed: int, limit: int | None = None
    ) -> list[WorkloadRequest]:
        jobs = [
            WorkloadRequest(0.0, _BACKGROUND_PROMPT, self.background_tokens, BACKGROUND, 0)
            for _ in range(self.background)
        ]
        if not self.chats:
            return jobs
        stream = Stream(CHAT, parse_lengths(_CHAT_LENGTHS), parse_arrivals("constant"))
        spread = random.Random(f"{seed}/spread")  # uniform within its slot: the number of chats is fixed
        chats = islice(stream.jobs(self.chats / self.duration_s, seed, 0), self.chats)
        gap_s = self.duration_s / self.chats
        jobs += (job._replace(at=(number + spread.random()) * gap_s) for number, job in enumerate(chats))
        return jobs

    def describe(
        self, rate_rps: float | None, duration_s: float | None, seed: int, limit: int | None = None
    ) -> dict[str, Any]:
        shape = {name: value for name, value in asdict(self).items() if name not in ("best_effort", "closed")}
        return {"lengths": _CHAT_LENGTHS, "arrivals": "demo", "rate_rps": None, "seed": seed, **shape}


def probe(requests: int) -> MixedLoad:
    return MixedLoad(requests, _PROBE_TOKENS, 0, 1.0)


def sized(background: int, chats: int, token_s: float) -> MixedLoad:
    tokens = min(max(round(_JOB_S / token_s), MIN_TOKENS), MAX_TOKENS)
    return MixedLoad(background, tokens, chats, _CHATS_UNTIL * tokens * token_s)
