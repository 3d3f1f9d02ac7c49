from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.request import Request
from skipjoin.core.step import Slice
from skipjoin.policies.execution import ExecutionTime
from skipjoin.policies.first_tokens import PromptAdvances, RequestHeap

# Share of the time for KV that is computed or moved again because it left the device for first tokens.
_MAX_AGAIN = 0.02
# While KV moves out and in again, its blocks are of no use: each time as long as to compute it, and up to a step more.
_MOVES = 4


class FirstTokenClaims:
    """Claims of requests to early first tokens, and what these cost others.

    A request gets a claim while there is room for it, or time for prompts of requests that then wait (`ahead`), and
    keeps it: if all gained and lost theirs together, each change would displace the KV of others. No order wins back
    the capacity that moving or computing KV again costs, so first tokens may not displace any while this takes more
    than 2 % of the time, and none are computed ahead while it takes more than their share.
    """

    def __init__(self, time: ExecutionTime, step_s: float) -> None:
        self.ahead = PromptAdvances(1.0, step_s)
        self._time = time
        # Both count the time for KV again, against the 2 % and against the share.
        self._again = PromptAdvances(_MAX_AGAIN, step_s)
        self._lost = PromptAdvances(1.0, step_s)
        self._queue = RequestHeap()
        self._counted: set[Request] = set()  # whose prompts count since their claims were granted
        self._parts: dict[Request, int] = {}  # tokens of prompts that are computed in part
        # Time that KV costs which left since the last step, and in the step before.
        self._left_s, self._before_s = 0.0, 0.0

    def __bool__(self) -> bool:
        return bool(self._queue)

    def follow(self, step_s: float, share: float) -> None:
        self.ahead.step_s = self._again.step_s = self._lost.step_s = step_s
        self.ahead.share = self._lost.share = share

    def may_displace(self, now: float) -> bool:
        return self._again.is_open(now)

    def ask(self, request: Request, key: float, now: float) -> bool:
        """Return whether the request gets a claim at once. Otherwise it waits in the order of keys."""
        if not self._queue and self._may_run_ahead(now):
            return True
        self._queue.add(key, request)
        return False

    def granted(
        self, now: float, slots: int, kv: KVAccounts, prompt_s: Callable[[Request], float | None]
    ) -> Iterator[Request]:
        """Grant claims while there is room for more requests, or time for prompts computed ahead.

        Args:
            slots: Number of requests that may run alongside all that have output; 0 if some of these wait.
            prompt_s: Returns the time of a request's prompt; None if the request needs no claim any more.
        """
        available = kv.available
        while self._queue:
            request = self._queue.first
            seconds = prompt_s(request)
            if seconds is not None:
                blocks = kv.blocks_for(request.progress.known)
                has_room = slots > 0 and blocks <= available
                if not (has_room or self._may_run_ahead(now)):
                    return
                slots -= 1
                available -= blocks
                if not has_room:  # counts already, so that not all get claims before the first of them runs
                    self._counted.add(request)
                    self.ahead.advance(request, seconds, now)
            self._queue.pop()
            if seconds is not None:
                yield request

    def _may_run_ahead(self, now: float) -> bool:
        return self.ahead.is_open(now) and self._lost.is_open(now)

    def _count_again(self, seconds: float, now: float) -> None:
        self._again.spend(seconds, now)
        self._lost.spend(seconds, now)

    def note_continued(self, ran: Iterable[Request], begun: Collection[Request]) -> None:
        """Note the requests of a step, of which those that had output before continue."""
        if waiting := self.ahead.waiting:
            for request in [*filter(waiting.__contains__, ran)]:
                if request in begun:
                    self.ahead.forget(request, continues=True)

    def note_prompt(self, slice_: Slice, now: float, *, displaces: bool) -> None:
        """Count a prompt of a request with a claim if it takes time from others, unless it counts already."""
        request = slice_.request
        if request in self._counted:
            if slice_.samples:
                self._counted.discard(request)
                if not displaces:
                    self.ahead.forget(request, continues=True)
        elif displaces and slice_.tokens > 1:
            self.ahead.advance(request, self._time.prefill(slice_.tokens), now)

    def note_part(self, request: Request, *, is_whole: bool) -> None:
        if is_whole:
            self._parts.pop(request, None)
        else:
            self._parts[request] = request.progress.computed

    def note_step(self, fresh: int, now: float) -> None:
        """Note the end of a step with `fresh` tokens of requests with claims. What else left did so for growth."""
        # KV may leave a step before, with overlapped moves.
        if fresh and (left_s := self._left_s + self._before_s):
            self._count_again(min(left_s, self._time.prefill(fresh)), now)
            self._left_s = 0.0
        self._left_s, self._before_s = 0.0, self._left_s

    def note_left(self, request: Request, now: float, capacity: int, *, is_begun: bool, is_lost: bool) -> None:
        """Note that KV of the request left the device, which holds `capacity` tokens; `is_lost` if it was dropped."""
        progress = request.progress
        if not is_begun:
            self._counted.discard(request)
            again_s = self._time.prefill(max(0, self._parts.pop(request, 0) - progress.computed))
        elif is_lost:
            again_s = self._time.prefill(progress.known - progress.computed)
        else:
            again_s = _MOVES * progress.known / capacity * self._time.prefill(progress.known)
        is_ahead = request in self.ahead.waiting
        if is_lost:
            self.ahead.forget(request, continues=False)
        if is_ahead:
            self._count_again(again_s, now)
        else:
            self._left_s += again_s

    def forget(self, request: Request, live: Collection[Request]) -> None:
        self._queue.sweep(live)
        self._counted.discard(request)
        self._parts.pop(request, None)
        self.ahead.forget(request, continues=True)
