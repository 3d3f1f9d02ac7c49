"""Admission: requests and prompt tokens in the server are counted and bounded, before anything is tokenized."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from skipjoin.server.api.errors import bad_request, overloaded
from skipjoin.server.api.shares import Shares
from skipjoin.server.metrics import Metrics

# Bytes of text per token, for an estimate before tokenizing; English has 4 to 5, code and other scripts fewer.
_BYTES_PER_TOKEN = 4
# Bounds of Retry-After: clients ignore longer times, and an estimate so far ahead is worth little.
_SOONEST_S, _LATEST_S = 1.0, 60.0
# What has left a queue counts for so many seconds, and in any case until so many others have.
_WINDOW_S, _LEAST_EVENTS = 10.0, 32
# Of what is foretold: how likely it may be wrong, for how long it is told again, how fine it is, and of how many
# sequences it is made, and how many times as long is told, since no pace is steady.
_DOUBT, _TOLD_S, _FINE_S, _SAMPLED, _MARGIN = 0.05, 0.1, 0.05, 64, 1.3
_PACE_S = 0.5
# Of either limit, what a best-effort request leaves free: real-time ones find room beside any flood of them.
_KEPT_SHARE = 0.25
# Of either limit, what clients that are over their share leave free, where clients share it.
RESERVED_SHARE = 1 / 8
# Seconds after Retry-After for which the place of a refused client is kept for it: clients round up, and connect.
_RETURN_S = 2.0


def estimate_tokens(prompt: str | Sequence[int]) -> int:
    """About how many tokens a prompt has, without tokenizing it; exact for token ids."""
    if isinstance(prompt, str):
        return -(-len(prompt.encode()) // _BYTES_PER_TOKEN)
    return len(prompt)


def _retry_after(seconds: float) -> float:
    return min(max(_SOONEST_S, seconds), _LATEST_S)


class Throughput:
    """How fast a queue is worked off: what has left it lately, over the time in which there was something to leave it.

    clock: seconds in which the queue was not empty.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()  # what left until then counts no more
        self._left: deque[tuple[float, float]] = deque()  # when, and how much
        self._sum = 0.0
        self._latest = self._since
        self._gap_s = 0.0  # the longest time without any, where longer ago counts less

    def add(self, amount: float) -> None:
        """So much has left the queue now."""
        now = self._clock()
        gap_s, self._latest = now - self._latest, now
        self._gap_s = max(gap_s, self._gap_s * math.exp(-gap_s / _WINDOW_S))
        self._left.append((now, amount))
        self._sum += amount
        while len(self._left) > _LEAST_EVENTS and self._left[0][0] < now - _WINDOW_S:
            self._since, dropped = self._left.popleft()
            self._sum -= dropped

    def seconds_until(self, amount: float) -> float:
        """About how long it takes until so much more has left: requests that began together end together, so it is no
        less than the longest gap of late, the present one included."""
        return max(self.by_rate(amount), self._gap_s, self._clock() - self._latest)

    def by_rate(self, amount: float) -> float:
        """How long so much has taken lately, on the average; 0 if nothing has left."""
        return (self._clock() - self._since) * amount / self._sum if self._sum else 0.0


class Pace:
    """Seconds for each step of the engines, over the last half second to second.

    clock: seconds. steps: how many there were.
    """

    def __init__(self, clock: Callable[[], float], steps: Callable[[], float]) -> None:
        self._clock, self._steps = clock, steps
        self._latest_s = 0.0
        self.start()

    def start(self) -> None:
        """There was no work until now."""
        self._before = self._mark = (self._clock(), self._steps())

    def seconds(self) -> float:
        """For a step; while none has ended, as long as it takes, and no less than those before."""
        now = (self._clock(), self._steps())
        if now[0] - self._mark[0] >= _PACE_S:
            self._before, self._mark = self._mark, now
        passed_s, steps = now[0] - self._before[0], now[1] - self._before[1]
        if not steps > 0:
            return max(self._latest_s, passed_s)
        self._latest_s = passed_s / steps
        return self._latest_s


class Runs:
    """How long sequences ran, by which it foretells when those end that run.

    It counts steps of the engines, whose pace changes with the load, and takes each of the lengths of late for as
    likely as the others.
    """

    def __init__(self, clock: Callable[[], float], steps: Callable[[], float]) -> None:
        self._clock, self._steps = clock, steps
        self._pace = Pace(clock, steps)
        self._live: dict[AdmissionSlot, float] = {}  # since which step each is there, in this order
        self._over: deque[float] = deque(maxlen=_LEAST_EVENTS)
        self._told: dict[int, float] = {}  # by number of sequences: when they will have ended
        self._told_at = -math.inf

    def __len__(self) -> int:
        """Sequences that run."""
        return len(self._live)

    def begin(self, slot: AdmissionSlot) -> None:
        """A sequence runs, perhaps again."""
        if not self._live:
            self._pace.start()
        self._live.setdefault(slot, self._steps())

    def end(self, slot: AdmissionSlot) -> None:
        """It has ended, if it ran at all."""
        if (since := self._live.pop(slot, None)) is not None:
            self._over.append(self._steps() - since)
            self._pace.seconds()  # of the work that may be over now

    def seconds_until(self, count: int) -> float | None:
        """In how many seconds so many of those that run will have ended, or all; None while none has ended."""
        if not (self._over and self._live):
            return None
        now = self._clock()
        if not now < self._told_at + _TOLD_S:
            self._told, self._told_at = {}, now
        if count not in self._told:
            self._told[count] = now + self._foretell(count)
        return max(0.0, self._told[count] - now)

    def _foretell(self, count: int) -> float:
        now, pace, over = self._steps(), max(self._pace.seconds(), 1e-9), sorted(self._over)
        every = -(-len(self._live) // _SAMPLED)  # of many, a part stands for all
        ages = [now - since for since in islice(self._live.values(), 0, None, every)]

        def have_ended(seconds: float) -> bool:
            shares = [_share_ended(over, age, seconds / pace) for age in ages]
            none_ended = math.prod(1 - share for share in shares) ** every
            return every * sum(shares) >= min(count, len(self._live)) and none_ended <= _DOUBT

        low, high = 0.0, _LATEST_S
        while high - low > _FINE_S:
            middle = (low + high) / 2
            low, high = (low, middle) if have_ended(middle) else (middle, high)
        return _MARGIN * high


def _share_ended(over: Sequence[float], age: float, more: float) -> float:
    """How likely it is that a run that lasts for `age` ends in so much more. over: the lengths of others, sorted. One
    that is longer than all of them is taken to last as long again as it is longer."""
    shorter = bisect_right(over, age)
    if shorter == len(over):
        return float(more >= age - over[-1])
    return (bisect_right(over, age + more) - shorter) / (len(over) - shorter)


class AdmissionSlot:
    """One sequence's share of the limits, from its admission to its end. Every method may be called again."""

    __slots__ = ("_admission", "_open", "_tokens", "client")

    def __init__(self, admission: Admission, tokens: int, client: str) -> None:
        self._admission = admission
        self._tokens = tokens
        self.client = client
        self._open = True

    @property
    def tokens(self) -> int:
        """Prompt tokens that it has in the queue."""
        return self._tokens

    def resize(self, tokens: int) -> None:
        """Replace the estimate: the prompt has `tokens` tokens. See `Admission.resize`, which heeds the limits."""
        if self._open:
            self._admission.note_size(self, tokens - self._tokens)
            self._tokens = tokens

    def started(self) -> None:
        """The sequence runs: its prompt waits no longer."""
        if self._open:
            self._admission.note_start(self, self._tokens)
            self._tokens = 0

    def ended(self) -> None:
        """The sequence has ended, or will never begin."""
        if self._open:
            self._open = False
            self._admission.note_end(self, self._tokens)
            self._tokens = 0


class Admission:
    """The counts and their bounds. Used on the event loop only, so that checking and counting are one operation.

    requests: sequences in the server, waiting or running. tokens: prompt tokens of those that have not run yet.
    A quarter of either limit is for real-time requests alone. clock: in seconds. steps: how many the engines have made;
    None: one in each second. is_shared: whether clients share both limits, as `Shares` says.
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
    ) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self._is_shared = is_shared
        reserve = RESERVED_SHARE if is_shared else 0.0
        self._requests, self._tokens = Shares(reserve), Shares(reserve)
        self._metrics = metrics
        self._clock = clock
        self._began: float | None = None  # when the server was last empty; None: it is
        self._busy_s = 0.0  # until it was empty for the last time
        self._ends = Throughput(self._busy_time)
        self._starts = Throughput(self._busy_time)
        self._runs = Runs(clock, steps or clock)

    @property
    def requests(self) -> int:
        """Sequences in the server."""
        return self._requests.used

    @property
    def tokens(self) -> int:
        """Prompt tokens of sequences that have not run yet."""
        return self._tokens.used

    def reserve(
        self, prompt_tokens: Sequence[int], *, client: str = "", is_best_effort: bool = False, param: str = "prompt"
    ) -> list[AdmissionSlot]:
        """Slots for sequences whose prompts have about so many tokens: all of them, or an error. client: whose they are
        where clients share the limits. param: the field that has the prompts.

        Raises 429 if there is no room now, with the time when there is likely to be, and 400 if there never is.
        """
        client = client if self._is_shared else ""
        count, tokens = len(prompt_tokens), sum(prompt_tokens)
        most, most_tokens, whose = self._limits(is_best_effort)
        largest = most - self._requests.reserve_of(most)
        if count > largest:
            raise bad_request(
                f"prompts times n must be at most {largest}, the requests this server queues{self._of_one(whose)}, "
                f"got {count}",
                "n",
            )
        self._check_size(tokens, most_tokens, whose, param)
        now = self._clock()
        if (excess := self._requests.excess(client, count, most, now)) > 0:
            self._metrics.rejected("requests")
            retry_s = _retry_after(self._seconds_until(excess))
            is_entitled = self._requests.refuse(client, count, most, now, expected_in_s=retry_s + _RETURN_S)
            raise overloaded(
                self._full(self._requests, most, "requests", whose, None if is_entitled else client), retry_s
            )
        self._check_room(client, tokens, most_tokens, whose, now)
        if self._began is None and count:
            self._began = now
        self._requests.take(client, count)
        self._tokens.take(client, tokens)
        return [AdmissionSlot(self, share, client) for share in prompt_tokens]

    def _seconds_until(self, count: int) -> float:
        """About how long it takes until so many more sequences have ended."""
        foretold = self._runs.seconds_until(count)
        return self._ends.seconds_until(count) if foretold is None else max(foretold, self._ends.by_rate(count))

    def resize(
        self, slots: Sequence[AdmissionSlot], prompt_tokens: Sequence[int], *, is_best_effort: bool = False
    ) -> None:
        """Replace the estimates of slots of one job: their prompts have so many tokens. A text may have several times
        as many as it was taken for. Raises as `reserve` if that passes the limit; the slots then keep their
        estimates."""
        _, most_tokens, whose = self._limits(is_best_effort)
        tokens, before = sum(prompt_tokens), sum(slot.tokens for slot in slots)
        if tokens > before:
            self._check_size(tokens, most_tokens, whose)
            self._check_room(slots[0].client, tokens, most_tokens, whose, self._clock(), instead_of=before)
        for slot, size in zip(slots, prompt_tokens, strict=True):
            slot.resize(size)

    @property
    def runs(self) -> int:
        """Sequences that run, or have run and may again."""
        return len(self._runs)

    def _limits(self, is_best_effort: bool) -> tuple[int, int, str]:
        """Most requests and most prompt tokens in the server when one of this class has come, and whose limits these
        are, for errors."""
        if not is_best_effort:
            return self.max_requests, self.max_tokens, ""
        share = 1 - _KEPT_SHARE
        return math.ceil(share * self.max_requests), math.ceil(share * self.max_tokens), " for best-effort requests"

    def _of_one(self, whose: str) -> str:
        """Whose limit it is for a single request."""
        return f"{whose} of one API key" if self._is_shared else whose

    def _check_size(self, tokens: int, most: int, whose: str, param: str = "prompt") -> None:
        """400 for a job that never fits."""
        largest = most - self._tokens.reserve_of(most)
        if tokens > largest:
            raise bad_request(
                f"the prompts, times n, must have at most {largest} tokens, which is what this server queues"
                f"{self._of_one(whose)}; they have about {tokens}",
                param,
            )

    def _check_room(self, client: str, tokens: int, most: int, whose: str, now: float, *, instead_of: int = 0) -> None:
        """429 where so many tokens do not fit now. instead_of: what of them is counted."""
        if (excess := self._tokens.excess(client, tokens, most, now, instead_of=instead_of)) > 0:
            self._metrics.rejected("tokens")
            retry_s = _retry_after(self._starts.seconds_until(excess))
            is_entitled = self._tokens.refuse(
                client, tokens, most, now, instead_of=instead_of, expected_in_s=retry_s + _RETURN_S
            )
            named = None if is_entitled else client
            raise overloaded(self._full(self._tokens, most, "prompt tokens wait", whose, named), retry_s)

    def _full(self, limit: Shares, most: int, what: str, whose: str, client: str | None) -> str:
        """Say what is full. client: that is over its share; None: it is not."""
        text = f"{limit.used} of {most} {what}"
        if client is None or not self._is_shared:
            return f"the queue is full{whose}: {text}"
        return (
            f"the queue is full{whose} of this API key: {text}, {limit.held(client)} of them with this key, and the "
            f"keys that use this server share them ({limit.count_with(client)} now)"
        )

    def note_size(self, slot: AdmissionSlot, growth: int) -> None:
        """The prompt of a request has that many tokens more than it was taken for."""
        self._tokens.take(slot.client, growth)

    def note_start(self, slot: AdmissionSlot, tokens: int) -> None:
        """A request runs: its `tokens` prompt tokens wait no longer."""
        self._runs.begin(slot)
        if tokens:
            self._tokens.give_back(slot.client, tokens)
            self._starts.add(tokens)

    def note_end(self, slot: AdmissionSlot, tokens: int) -> None:
        """A request has ended; `tokens` of its prompt never ran."""
        self._runs.end(slot)
        self._tokens.give_back(slot.client, tokens)
        self._ends.add(1)
        self._requests.give_back(slot.client, 1)
        if not self.requests and self._began is not None:
            self._busy_s, self._began = self._busy_time(), None

    def _busy_time(self) -> float:
        """Seconds in which there was a request in the server."""
        return self._busy_s + (0.0 if self._began is None else self._clock() - self._began)
