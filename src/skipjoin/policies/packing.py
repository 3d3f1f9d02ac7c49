from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from enum import Enum
from itertools import chain, islice
from math import inf
from operator import attrgetter, itemgetter

from skipjoin.core.context import StepContext
from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.policy import BatchBuilder, CostModel, CountingBuilder, Fact
from skipjoin.core.refusals import Refusal, Scope
from skipjoin.core.request import Request
from skipjoin.core.step import StepShape
from skipjoin.core.waits import WaitReason
from skipjoin.policies.best_effort import Patience
from skipjoin.policies.deadlines import NextTokens
from skipjoin.policies.step_load import MIN_CHUNK, StepLoad, fitting_tokens

# Request that finds blocks, and its tokens to compute.
Candidate = tuple[Request, int]
_REQUEST_OF: Callable[[Candidate], Request] = itemgetter(0)
_PENDING_OF: Callable[[Candidate], int] = itemgetter(1)
_PLANNED_OF: Callable[[Request], int] = attrgetter("progress.planned")
# Weight of the latest step in the mean step time.
_MEAN_RATE = 0.1
# Time that a step may take in any case, in times of its real-time decodes and a small chunk of a prompt.
_MIN_OVER_DECODES = 1.25


class Replacing(Enum):
    """Real-time requests that a best-effort request may postpone by a step (BROS section 4.2)."""

    DECODES = "decodes"  # those that have sampled: a postponed prompt costs more than its step, and is waited for
    ALL = "all"  # as in the paper
    NONE = "none"


class Packing:
    """Builds steps whose modeled time ends before the next token of the most urgent real-time request is due.

    That request joins unconditionally, others by urgency within the limit. Best-effort requests follow while slots and
    time remain, within the limit of `patience`; otherwise each may replace the least urgent real-time request if that
    can wait. A step has up to `cap` requests with best-effort ones, which doubles with each step that has time for all
    real-time requests, and resets to `base` otherwise. The paper caps both classes.
    """

    def __init__(
        self,
        max_seqs: int,
        max_tokens: int,
        cost: CostModel,
        next_tokens: NextTokens,
        patience: Patience,
        *,
        base: int,
        replacing: Replacing = Replacing.NONE,
    ) -> None:
        self.max_seqs = max_seqs
        self.max_tokens = max_tokens
        self.cost = cost
        self.next_tokens = next_tokens
        self.patience = patience
        self.replacing = replacing
        self.base = self.cap = min(base, max_seqs)
        self.mean_s = cost.step(StepShape())  # modeled time of recent steps

    def open(self, context: StepContext) -> BatchBuilder:
        others, real_time = iter(context.candidates), self.next_tokens.requests
        # Real-time ones come first. Without best-effort ones among them, none needs bytecode.
        urgent = [*islice(others, len(real_time))]
        if not all(map(real_time.__contains__, map(_REQUEST_OF, urgent))):
            end = next(place for place, (request, _) in enumerate(urgent) if request not in real_time)
            others = chain(urgent[end:], others)
            del urgent[end:]
        load = _load_of(urgent, context)
        limit = self._limit(urgent, load, context)
        pack = Pack(self, context, limit)
        has_all = pack.add_all(urgent, load, real_time=True)
        is_late = bool(urgent) and (limit == inf or not has_all)
        self.cap = self.base if is_late else min(2 * self.cap, self.max_seqs)
        if has_all or pack.add_real_time(urgent):
            first = list(islice(others, max(0, pack.slots_left)))
            if not pack.add_all(first, _load_of(first, context), real_time=False):
                others = chain(first, others)
            for request, pending in others:
                is_small = pending == 1 or not request.progress.planned
                if not pack.add_best_effort(request, pending) and is_small:
                    break  # decodes may fit where a chunk of a prompt does not, and requests that began come first
        if pack.chosen:
            self.mean_s += _MEAN_RATE * (pack.seconds - self.mean_s)
        return pack

    def explain(self, request: Request, now: float, kv: KVAccounts) -> Iterator[Fact]:
        if request not in self.next_tokens.requests:
            meaning = "A step takes best-effort requests until it has as many requests in all."
            yield Fact("batch cap", self.cap, "requests", meaning)

    def _limit(self, urgent: Sequence[Candidate], load: StepLoad, context: StepContext) -> float:
        """Return the slack of the most urgent request that can still meet its deadline, inf if none can.

        All real-time decodes and a chunk of a prompt may join in any case. If one urgent request kept the others out,
        each step would serve one, and all would become late on a machine with steps about as long as an objective.
        """
        cost, start, margin = self.cost, self.start_of(context), self.cost.margin
        dues = [*self.next_tokens.dues(map(_REQUEST_OF, urgent), in_flight=bool(context.in_flight))]
        for place in _by_due(dues):
            when, (request, pending) = dues[place], urgent[place]
            left = (when - start) / margin
            if left > 0 and StepLoad.of(request.progress.planned, pending).seconds(cost) <= left:
                # A chunk of twice the size, with which `fitting_tokens` finds a fitting one.
                least = StepLoad(2 * MIN_CHUNK if load.prefill else 0, 0, load.decodes, load.context)
                return max(left, _MIN_OVER_DECODES * least.seconds(cost))
        return inf

    def start_of(self, context: StepContext) -> float:
        return context.now + len(context.in_flight) * self.mean_s * self.cost.margin


def _by_due(dues: Sequence[float]) -> Iterator[int]:
    """Yield the places of the dues, earliest first."""
    if not dues:
        return
    yield dues.index(min(dues))  # nearly always the only one that is read
    yield from sorted(range(len(dues)), key=dues.__getitem__)[1:]


def _load_of(candidates: Sequence[Candidate], context: StepContext) -> StepLoad:
    swapped_out = sum(map(context.blocks_swapped_out, map(_REQUEST_OF, candidates)))
    if sum(map(_PENDING_OF, candidates)) == len(candidates):  # decodes only, as in most steps
        read = sum(map(_PLANNED_OF, map(_REQUEST_OF, candidates)))
        return StepLoad(0, 0, len(candidates), read + len(candidates), swapped_out)
    prefill = attention = decodes = read = 0
    for request, pending in candidates:
        start = request.progress.planned
        if pending == 1:
            decodes += 1
            read += start + 1
        else:
            prefill += pending
            attention += pending * start + pending * (pending + 1) // 2
    return StepLoad(prefill, attention, decodes, read, swapped_out)


class Pack(CountingBuilder):
    def __init__(self, rules: Packing, context: StepContext, limit: float) -> None:
        self.chosen: dict[Request, int] = {}  # tokens of the requests that it was built with
        self._left = 0  # chosen requests that were not taken
        self._rules = rules
        self._real_time_requests = rules.next_tokens.requests
        self._context = context
        self._limit = limit
        self._slots = 0  # chosen and taken requests
        self._tokens = rules.max_tokens  # remaining tokens
        self._load = self._real_time = StepLoad()  # of all chosen requests, and of the real-time ones
        self._is_limited = rules.patience.is_limiting(context.now)
        self._limits: dict[
            bool, float
        ] = {}  # for prompts and decodes of best-effort requests beside the real-time load
        self._urgent: set[Request] = set()  # real-time candidates
        self._last: list[Request] = []  # chosen real-time requests, least urgent last

    @property
    def seconds(self) -> float:
        return self._load.seconds(self._rules.cost)

    @property
    def slots_left(self) -> int:
        return self._rules.cap - self._slots

    @property
    def decoding(self) -> Container[Request]:  # type: ignore[override]
        return self.chosen

    @property
    def decodes(self) -> int:
        return self._left

    def take_decodes(self, count: int) -> None:
        self._left -= count

    def add_all(self, candidates: Sequence[Candidate], added: StepLoad, *, real_time: bool) -> bool:
        """Choose all candidates, whose load is `added`, if they fit."""
        if not candidates:
            return True
        if len(candidates) > (self._rules.max_seqs if real_time else self.slots_left):
            return False
        load, tokens = self._load.plus(added), added.prefill + added.decodes
        limit = self._limit if real_time else self._limit_for(decodes=not added.prefill)
        if tokens > self._tokens or load.seconds(self._rules.cost) > limit:
            return False
        self._load = load
        self._slots += len(candidates)
        self._tokens -= tokens
        self.chosen.update(candidates)
        self._left = len(self.chosen)
        if real_time:
            self._last = [*map(_REQUEST_OF, candidates)]
            self._urgent = set(self._last)
            self._real_time = load
            self._limits.clear()
        return True

    def add_real_time(self, urgent: Sequence[Candidate]) -> bool:
        first = urgent[: self._rules.max_seqs]
        # Often only slots are short.
        is_full = len(first) < len(urgent) and self.add_all(first, _load_of(first, self._context), real_time=True)
        self._urgent.update(request for request, _ in urgent)
        if is_full:
            return True
        for request, pending in urgent:
            if self._slots >= self._rules.max_seqs or self._tokens <= 0:
                return True
            most = min(pending, self._tokens)
            tokens = self._fit(request, most) if self.chosen else most
            if tokens:
                self._choose(request, tokens)
                self._last.append(request)
            if tokens < most:
                return False
        return True

    def add_best_effort(self, request: Request, pending: int) -> bool:
        if self.slots_left > 0 and (tokens := self._room_for(request, pending)):
            self._choose(request, tokens)
            return True
        if not self._last or not self._can_wait(self._last[-1]):
            return False
        replaced = self._last.pop()
        given = self.chosen.pop(replaced)
        self._left -= 1
        self._join(replaced, given, -1)
        if tokens := self._room_for(request, pending):
            self._choose(request, tokens)
            return True
        self._choose(replaced, given)
        return False

    def offer(self, request: Request, pending: int) -> int | Refusal:
        if (tokens := self.chosen.get(request)) is not None:
            return tokens
        if not self._slots:  # no candidates: every request needs memory of others
            return min(pending, self._tokens)
        if not self._left:
            return Refusal(Scope.ALL, self._reason(request, pending))
        if request in self._real_time_requests and request not in self._urgent:  # it, too, needs memory of others
            return self._room_for(request, pending) or Refusal(Scope.REQUEST, self._reason(request, pending))
        return Refusal(Scope.REQUEST, self._reason(request, pending))

    def take(self, request: Request, tokens: int) -> None:
        if (given := self.chosen.pop(request, None)) is not None:
            self._left -= 1
            if given <= tokens:
                return
            self._join(request, given, -1)  # another batcher cut it
        self._join(request, tokens)

    def _reason(self, request: Request, pending: int) -> WaitReason:
        if self._slots >= self._rules.max_seqs:
            return WaitReason.NO_SLOT
        if self._tokens <= 0:
            return WaitReason.TOKEN_BUDGET
        is_real_time = request in self._real_time_requests
        if (is_real_time or self.slots_left > 0) and self._room_for(request, pending):
            return WaitReason.NO_KV  # others with KV, or with room for it, came first
        return WaitReason.STEP_TIME if is_real_time else WaitReason.BEHIND_REAL_TIME

    def _room_for(self, request: Request, pending: int) -> int:
        most = min(pending, self._tokens)
        return self._fit(request, most) if most > 0 and self._slots < self._rules.max_seqs else 0

    def _fit(self, request: Request, most: int) -> int:
        swapped_out = self._context.blocks_swapped_out(request)
        limit = self._limit if request in self._real_time_requests else self._limit_for(decodes=most == 1)
        return fitting_tokens(
            self._load, request.progress.planned, most, swapped_out=swapped_out, cost=self._rules.cost, limit=limit
        )

    def _limit_for(self, *, decodes: bool) -> float:
        """Return the limit for best-effort requests, which is also that of the wrapper around this batcher."""
        if decodes not in self._limits:
            theirs = self._rules.patience.limit(self._real_time, decodes=decodes) if self._is_limited else inf
            self._limits[decodes] = min(self._limit, theirs)
        return self._limits[decodes]

    def _can_wait(self, request: Request) -> bool:
        """Return whether the next token still meets its deadline if computed a step later (BROS equation 6)."""
        rules = self._rules
        match rules.replacing:
            case Replacing.NONE:
                return False
            case Replacing.DECODES if not request.progress.output:
                return False
        left = rules.next_tokens.due(request) - rules.start_of(self._context)
        alone = StepLoad.of(request.progress.planned, self.chosen[request]).seconds(rules.cost)
        return left >= rules.cost.margin * (self.seconds + max(rules.mean_s, alone))

    def _choose(self, request: Request, tokens: int) -> None:
        self.chosen[request] = tokens
        self._left += 1
        self._join(request, tokens)

    def _join(self, request: Request, tokens: int, sign: int = 1) -> None:
        swapped_out = self._context.blocks_swapped_out(request)
        load = StepLoad.of(request.progress.planned, tokens, swapped_out)
        self._load = self._load.plus(load, sign)
        if request in self._real_time_requests:
            self._real_time = self._real_time.plus(load, sign)
            self._limits.clear()
        self._slots += sign
        self._tokens -= sign * tokens
