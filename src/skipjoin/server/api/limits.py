from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from skipjoin.server.api.errors import bad_request, overloaded
from skipjoin.server.api.finish_times import QueueWaits, Runs, Throughput
from skipjoin.server.api.shares import Shares
from skipjoin.server.metrics import Metrics

# Estimated bytes of text per token. English has 4 to 5, code and other scripts have fewer.
_BYTES_PER_TOKEN = 4
# Clients that retry sooner would only be refused again.
_MIN_RETRY_AFTER_S = 1.0
# Clients ignore longer times, and estimates that far ahead are inaccurate.
_MAX_RETRY_AFTER_S = 60.0
# Fraction of either limit that best-effort requests leave free for real-time requests.
_KEPT_SHARE = 0.25
# Fraction of a shared limit that clients over their share leave free.
RESERVED_SHARE = 1 / 8
# Time after Retry-After for which a slot is kept for a refused client, which rounds up and has to connect.
_RETURN_S = 2.0


def estimate_tokens(prompt: str | Sequence[int]) -> int:
    if isinstance(prompt, str):
        return -(-len(prompt.encode()) // _BYTES_PER_TOKEN)
    return len(prompt)


def _retry_after(seconds: float) -> float:
    return min(max(_MIN_RETRY_AFTER_S, seconds), _MAX_RETRY_AFTER_S)


class QueuePlace(NamedTuple):
    """Place in the queue at the time `since`, when `begun` sequences had left it."""

    position: int
    since: float
    begun: int
    at_pace_s: float | None
    estimate_s: float | None


@dataclass(slots=True, eq=False)
class AdmissionSlot:
    """Slot of one sequence from admission to end. All methods are idempotent."""

    _admission: Admission
    tokens: int
    client: str
    weight: float
    queue: QueuePlace  # its place when it was admitted
    waited_s: float | None = None  # in the queue; None before the first start
    _open: bool = True

    @property
    def place(self) -> tuple[int, float | None]:
        """Return the position, if others start by arrival, and the expected seconds."""
        return self._admission.place_of(self)

    def resize(self, tokens: int) -> None:
        if self._open:
            self._admission.note_size(self, tokens - self.tokens)
            self.tokens = tokens

    def started(self) -> None:
        if self._open:
            self._admission.note_start(self, self.tokens)
            self.tokens = 0

    def ended(self) -> None:
        if self._open:
            self._open = False
            self._admission.note_end(self, self.tokens)
            self.tokens = 0


class Admission:
    """Admission control of one queue. Use it on the event loop only, so that check and count are atomic.

    `max_tokens` limits tokens of prompts that have not run yet. `steps` returns the number of engine steps; None counts
    one per second. With `is_shared`, clients share both limits fairly (see `Shares`).
    """

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        steps: Callable[[], float] | None = None,
        *,
        is_shared: bool = False,
        client_kind: str = "API key",
    ) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self._is_shared = is_shared
        self._kind = client_kind
        reserve = RESERVED_SHARE if is_shared else 0.0
        self._requests, self._tokens = Shares(reserve), Shares(reserve)
        self._metrics = metrics
        self._clock = clock
        self._began: float | None = None  # start of the current busy period, None while the server is idle
        self._busy_s = 0.0  # total time of earlier busy periods
        self._ends = Throughput(self._busy_time)
        self._starts = Throughput(self._busy_time)
        self._runs = Runs(clock, steps or clock)
        self._waits = QueueWaits()
        self._begun = 0  # number of sequences that have left the queue

    @property
    def requests(self) -> int:
        return self._requests.used

    @property
    def tokens(self) -> int:
        return self._tokens.used

    def reserve(
        self,
        prompt_tokens: Sequence[int],
        *,
        client: str = "",
        weight: float = 1.0,
        is_best_effort: bool = False,
        param: str = "prompt",
    ) -> list[AdmissionSlot]:
        """Reserve slots for all sequences of a request.

        Raises:
            ApiError: 429 with an estimated Retry-After if there is no room now, 400 if there never is.
        """
        client = client if self._is_shared else ""
        count, tokens = len(prompt_tokens), sum(prompt_tokens)
        max_requests, max_tokens, whose = self._limits(is_best_effort)
        largest = max_requests - self._requests.reserve_of(max_requests)
        if count > largest:
            raise bad_request(
                f"prompts times n must be at most {largest}, the requests this server queues{self._of_one(whose)}, "
                f"got {count}",
                "n",
            )
        self._check_size(tokens, max_tokens, whose, param)
        self._check_room(self._requests, count, max_requests, client, whose, weight=weight)
        self._check_room(self._tokens, tokens, max_tokens, client, whose, weight=weight)
        now = self._clock()
        if self._began is None and count:
            self._began = now
        first = self._last_position + 1
        self._requests.take(client, count, weight)
        self._tokens.take(client, tokens, weight)
        return [
            AdmissionSlot(self, share, client, weight, self._place_at(at, now))
            for at, share in enumerate(prompt_tokens, first)
        ]

    @property
    def _last_position(self) -> int:
        return max(0, self.requests - len(self._runs))

    def place_of(self, slot: AdmissionSlot) -> tuple[int, float | None]:
        queue = slot.queue
        position = max(1, queue.position - (self._begun - queue.begun))
        left_s = None if queue.estimate_s is None else max(0.0, queue.estimate_s - (self._clock() - queue.since))
        return position, left_s

    def _place_at(self, position: int, now: float) -> QueuePlace:
        at_pace_s = self._waits.at_pace(position)
        return QueuePlace(position, now, self._begun, at_pace_s, self._waits.estimate(at_pace_s))

    def _seconds_until(self, count: int) -> float:
        predicted_s = self._runs.seconds_until(count)
        return self._ends.seconds_until(count) if predicted_s is None else max(predicted_s, self._ends.by_rate(count))

    def resize(
        self, slots: Sequence[AdmissionSlot], prompt_tokens: Sequence[int], *, is_best_effort: bool = False
    ) -> None:
        _, max_tokens, whose = self._limits(is_best_effort)
        tokens, before = sum(prompt_tokens), sum(slot.tokens for slot in slots)
        if tokens > before:
            self._check_size(tokens, max_tokens, whose)
            of, weight = slots[0].client, slots[0].weight
            self._check_room(self._tokens, tokens, max_tokens, of, whose, weight=weight, instead_of=before)
        for slot, size in zip(slots, prompt_tokens, strict=True):
            slot.resize(size)

    def _limits(self, is_best_effort: bool) -> tuple[int, int, str]:
        if not is_best_effort:
            return self.max_requests, self.max_tokens, ""
        share = 1 - _KEPT_SHARE
        return math.ceil(share * self.max_requests), math.ceil(share * self.max_tokens), " for best-effort requests"

    def _of_one(self, whose: str) -> str:
        return f"{whose} of one {self._kind}" if self._is_shared else whose

    def _check_size(self, tokens: int, capacity: int, whose: str, param: str = "prompt") -> None:
        largest = capacity - self._tokens.reserve_of(capacity)
        if tokens > largest:
            raise bad_request(
                f"the prompts, times n, must have at most {largest} tokens, which is what this server queues"
                f"{self._of_one(whose)}; they have about {tokens}",
                param,
            )

    def _check_room(
        self, shares: Shares, amount: int, capacity: int, client: str, whose: str, *, weight: float, instead_of: int = 0
    ) -> None:
        """Raise 429 if `amount` does not fit in place of `instead_of`, which is already counted."""
        now = self._clock()
        if (excess := shares.excess(client, amount, capacity, now, instead_of=instead_of, weight=weight)) <= 0:
            return
        of_tokens = shares is self._tokens
        self._metrics.count("admission_rejected_total", "tokens" if of_tokens else "requests")
        retry_s = _retry_after(self._starts.seconds_until(excess) if of_tokens else self._seconds_until(excess))
        expected_in_s = retry_s + _RETURN_S
        is_entitled = shares.refuse(
            client, amount, capacity, now, instead_of=instead_of, weight=weight, expected_in_s=expected_in_s
        )
        named = client if self._is_shared and not is_entitled else None
        text = self._full(shares, capacity, "prompt tokens wait" if of_tokens else "requests", whose, named)
        place = self._place_at(self._last_position + 1, now)  # that the request would have
        raise overloaded(
            text, retry_s, is_of_client=named is not None, position=place.position, wait_s=place.estimate_s
        )

    def _full(self, shares: Shares, capacity: int, what: str, whose: str, client: str | None) -> str:
        text = f"{shares.used} of {capacity} {what}"
        if client is None:
            return f"the queue is full{whose}: {text}"
        return (
            f"the queue is full{whose} of this {self._kind}: {text}, {shares.held(client)} of them with it, and the "
            f"{self._kind}s that use this server share them ({shares.count_with(client)} now)"
        )

    def note_size(self, slot: AdmissionSlot, growth: int) -> None:
        self._tokens.take(slot.client, growth, slot.weight)

    def note_start(self, slot: AdmissionSlot, tokens: int) -> None:
        self._runs.begin(slot)
        if slot.waited_s is None:
            queue, now = slot.queue, self._clock()
            slot.waited_s = now - queue.since
            self._waits.note(queue.since, now, queue.at_pace_s, queue.estimate_s)
            self._begun += 1
        if tokens:
            self._tokens.give_back(slot.client, tokens)
            self._starts.add(tokens)

    def note_end(self, slot: AdmissionSlot, tokens: int) -> None:
        self._runs.end(slot)
        self._tokens.give_back(slot.client, tokens)
        self._ends.add(1)
        self._requests.give_back(slot.client, 1)
        if not self.requests and self._began is not None:
            self._busy_s, self._began = self._busy_time(), None

    def _busy_time(self) -> float:
        return self._busy_s + (0.0 if self._began is None else self._clock() - self._began)
