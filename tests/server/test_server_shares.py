from __future__ import annotations

import asyncio
import contextlib
import random
from bisect import bisect_right
from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_worlds import MakeApi

from skipjoin.server.api.errors import ApiError
from skipjoin.server.api.limits import Admission, AdmissionSlot
from skipjoin.server.metrics import Metrics
from support.worlds import checkered

METRICS = Metrics()
CAPACITY, RESERVE = 64, 8


class Queue:
    """Shared queue for `CAPACITY` sequences, or for that number of tokens of waiting prompts."""

    def __init__(self, *, by_tokens: bool = False) -> None:
        self.now = 0.0
        self.steps = 0
        self.by_tokens = by_tokens
        bounds = (10_000, CAPACITY) if by_tokens else (CAPACITY, 1_000_000)
        self.admission = Admission(*bounds, METRICS, lambda: self.now, lambda: self.steps, is_shared=True)
        self.slots: dict[str, deque[AdmissionSlot]] = {}
        self.weights: dict[str, float] = {}

    def ask(self, key: str, amount: int = 1) -> int | None:
        """Request slots; return the Retry-After of a refusal or None."""
        sizes = [amount] if self.by_tokens else [1] * amount
        try:
            slots = self.admission.reserve(sizes, client=key, weight=self.weights.get(key, 1.0))
        except ApiError as refused:
            return int(refused.headers["Retry-After"])
        self.slots.setdefault(key, deque()).extend(slots)
        return None

    def fill(self, key: str, amount: int = 1) -> None:
        while self.ask(key, amount) is None:
            pass

    def end(self, key: str) -> None:
        slot = self.slots[key].popleft()
        slot.started()
        slot.ended()

    def held(self, key: str) -> int:
        return sum(slot.tokens if self.by_tokens else 1 for slot in self.slots.get(key, ()))

    @property
    def used(self) -> int:
        return self.admission.tokens if self.by_tokens else self.admission.requests


by_both = pytest.mark.parametrize("by_tokens", [False, True])


@by_both
def test_single_key_may_use_everything_except_the_reserve(by_tokens: bool) -> None:
    queue = Queue(by_tokens=by_tokens)
    queue.fill("a")
    assert queue.used == CAPACITY - RESERVE
    with pytest.raises(ApiError, match="at most 56 tokens" if by_tokens else "at most 56, the requests") as refused:
        queue.admission.reserve([57] if by_tokens else [1] * 57, client="b")
    assert refused.value.status == 400


@by_both
@given(floods=st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 20)), min_size=1, max_size=60))
def test_first_request_of_a_new_key_is_admitted(by_tokens: bool, floods: list[tuple[str, int]]) -> None:
    """Other keys may use the reserve only within their share."""
    queue = Queue(by_tokens=by_tokens)
    for key, amount in floods:
        before, keys = queue.used, len({*queue.slots, key})
        held = queue.held(key)
        refused = queue.ask(key, amount)
        assert queue.used <= CAPACITY
        if refused is None and before <= CAPACITY - RESERVE < queue.used:
            # Only a key within its share, or one that held nothing, may use the reserve.
            assert held + amount <= (CAPACITY - RESERVE) / keys or (held == 0 and amount <= RESERVE)
    room = CAPACITY - queue.used
    waiting = {key for key, one in queue.admission._requests._clients.items() if one.reserved}
    if by_tokens:
        waiting = {key for key, one in queue.admission._tokens._clients.items() if one.reserved}
    if room and not waiting:
        assert queue.ask("another", min(room, RESERVE)) is None


@by_both
def test_new_keys_share_the_reserve_during_a_flood(by_tokens: bool) -> None:
    queue = Queue(by_tokens=by_tokens)
    queue.fill("flood")
    for number in range(RESERVE):
        assert queue.ask(f"key {number}") is None
    assert queue.ask("late", 2) is not None
    for _ in range(2):
        queue.end("flood")
        assert queue.ask("flood") is not None  # A freed slot does not go back to the flood.
    assert queue.ask("late", 2) is None


@by_both
def test_borrowing_stops_until_a_large_request_within_its_share_fits(by_tokens: bool) -> None:
    queue = Queue(by_tokens=by_tokens)
    queue.fill("flood")
    assert queue.ask("other", 20) is not None  # Its share is 28.
    freed = 0
    while queue.ask("other", 20) is not None:
        queue.end("flood")
        freed += 1
        assert queue.ask("flood") is not None
    assert freed == 20 - RESERVE


@by_both
def test_refused_keys_have_precedence_if_keys_outnumber_shares(by_tokens: bool) -> None:
    """Shares are smaller than requests, so each key may hold one request."""
    queue = Queue(by_tokens=by_tokens)
    size, slots = RESERVE, CAPACITY // RESERVE
    names = [f"key {number}" for number in range(3 * slots)]
    waiting = deque(name for name in names if queue.ask(name, size) is not None)
    running = deque(name for name in names if queue.held(name))
    assert len(running) == slots
    served = Counter(running)
    for _ in range(4 * len(names)):
        finished = running.popleft()
        while queue.slots[finished]:
            queue.end(finished)
        assert queue.ask(finished, size) is not None  # It asks again before the waiting keys retry.
        waiting.append(finished)
        assert queue.ask(waiting[0], size) is None
        running.append(waiting.popleft())
        served[running[-1]] += 1
    assert max(served.values()) - min(served.values()) <= 1


def test_claim_expires_if_its_client_does_not_retry() -> None:
    queue = Queue()
    queue.fill("flood")
    retry_after_s = queue.ask("other", 20)
    assert retry_after_s is not None
    queue.end("flood")
    assert queue.ask("flood") is not None
    queue.now += retry_after_s + 4
    assert queue.ask("flood") is None


@pytest.mark.parametrize(
    ("sizes", "keys_and_weight"),
    checkered([(1, 1), (RESERVE, 1), (RESERVE, RESERVE), (7, 3)], [(2, 1.0), (3, 1.0), (4, 1.0), (3, 2.5), (2, 0.4)]),
)
def test_continuously_loaded_keys_converge_to_shares_by_weight(
    sizes: tuple[int, int], keys_and_weight: tuple[int, float]
) -> None:
    """One key holds all slots at first, and another one has a weight."""
    keys, weight = keys_and_weight
    queue, draw = Queue(), random.Random(keys)
    names = [f"key {number}" for number in range(keys)]
    queue.weights = {names[-1]: weight}
    amounts = {name: sizes[number > 0] for number, name in enumerate(names)}
    queue.fill(names[0], amounts[names[0]])
    held: Counter[str] = Counter()
    for step in range(4000):
        queue.now += 0.05
        for name in draw.sample(names, keys):
            queue.ask(name, amounts[name])
        queue.end(draw.choice([name for name in names for _ in range(queue.held(name))]))
        if step >= 1000:
            held.update({name: queue.held(name) for name in names})
    for name in names:
        share = (CAPACITY - RESERVE) * queue.weights.get(name, 1.0) / (keys - 1 + weight)
        assert abs(held[name] / 3000 - share) <= max(4, *sizes), held


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["ask", "size", "start", "end", "wait"]), st.integers(0, 30)),
        max_size=80,
    )
)
def test_counts_of_all_keys_return_to_zero(actions: list[tuple[str, str, int]]) -> None:
    now = 0.0
    admission = Admission(20, 100, METRICS, lambda: now, is_shared=True)
    slots: dict[str, list[AdmissionSlot]] = {key: [] for key in "abc"}
    for key, action, number in actions:
        with contextlib.suppress(ApiError):
            if action == "ask":
                slots[key] += admission.reserve([number] * (1 + number % 4), client=key)
            elif action == "wait":
                now += number
            elif slots[key] and action == "size":
                admission.resize(slots[key][-1:], [number])
            elif slots[key]:
                slot = slots[key][number % len(slots[key])]
                slot.started() if action == "start" else slot.ended()
        assert admission.requests <= 20
        assert admission.tokens <= 100
    for slot in (slot for some in slots.values() for slot in some):
        slot.ended()
    now += 100
    admission.reserve([1], client="d")[0].ended()
    assert (admission.requests, admission.tokens) == (0, 0)
    for limit in (admission._requests, admission._tokens):
        assert limit._reserved == sum(client.reserved for client in limit._clients.values())
        assert all(client.reserved and not client.held for client in limit._clients.values())


@pytest.mark.parametrize(("others", "min_accurate"), [({"b": 5.0}, 0.95), ({"b": 0.1}, 0.75), ({"b": 1.0}, 0.75)])
def test_retry_after_of_a_key_over_its_share_is_accurate(others: dict[str, float], min_accurate: float) -> None:
    """Freed slots go to other keys within their share first."""
    queue, draw = Queue(), random.Random(3)
    rates = {"flood": 5.0, **others}
    made: deque[tuple[int, str]] = deque()
    refusals: list[tuple[float, int]] = []
    admissions: list[float] = []
    due = dict.fromkeys(rates, 0.0)
    while queue.now < 40:
        for key, rate in rates.items():
            while due[key] <= queue.now:
                due[key] += draw.expovariate(rate * CAPACITY / (150 * (0.01 + 0.001 * CAPACITY)))
                retry_after_s = queue.ask(key)
                if retry_after_s is None:
                    queue.slots[key][-1].started()
                    made.append((queue.steps + 150, key))
                if key == "flood" and queue.now > 15:
                    if retry_after_s is None:
                        admissions.append(queue.now)
                    else:
                        refusals.append((queue.now, retry_after_s))
        queue.now += (0.01 + 0.001 * queue.used) * draw.uniform(0.8, 1.2)
        queue.steps += 1
        while made and made[0][0] <= queue.steps:
            queue.end(made.popleft()[1])
    pairs = [
        (admissions[at] - when, retry_after_s)
        for when, retry_after_s in refusals
        if (at := bisect_right(admissions, when)) < len(admissions)
    ]
    assert len(pairs) > 100
    assert sum(true <= predicted for true, predicted in pairs) >= min_accurate * len(pairs)


def key(name: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {name}"}}


FLOOD = {"prompt": "abc", "max_tokens": 4, "n": 16, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


@pytest.mark.anyio
async def test_sixteen_choices_of_one_key_leave_slots_for_another(make_api: MakeApi) -> None:
    async with make_api(api_keys=("noisy", "quiet")) as api:
        api.engine.paused = True

        async def flood() -> int:
            return (await api.http.post("/v1/completions", json=FLOOD, **key("noisy"))).status_code

        flooding = [asyncio.create_task(flood()) for _ in range(80)]
        while api.service.admission.requests < 896 or not all(task.done() for task in flooding[56:]):
            await asyncio.sleep(0.01)
        assert api.service.admission.requests == 896
        asked = [
            asyncio.create_task(api.http.post("/v1/chat/completions", json=CHAT, **key("quiet"))) for _ in range(5)
        ]
        text = await api.http.post("/tokenize", json={"prompt": "abc"}, **key("quiet"))
        assert text.status_code == 200
        refused = await api.http.post("/tokenize", json={"prompt": "abc"}, **key("noisy"))
        assert refused.status_code == 429
        message = refused.json()["error"]["message"]
        assert "the queue is full of this API key: 901 of 1024 requests, 896 of them with it" in message
        while api.service.admission.requests < 901:
            await asyncio.sleep(0.01)
        api.engine.paused = False
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 5
        assert Counter(await asyncio.gather(*flooding)) == {200: 56, 429: 24}
        assert api.is_clean()


@pytest.mark.anyio
@pytest.mark.parametrize("settings", [{}, {"api_keys": ("a", "b"), "fair_by": "none"}, {"api_keys": ("a",)}])
async def test_queue_is_undivided_unless_several_keys_share_it(make_api: MakeApi, settings: dict[str, Any]) -> None:
    async with make_api(max_queued_requests=8, **settings) as api:
        answer = await api.http.post("/v1/completions", json={**FLOOD, "n": 8}, **key("a"))
        assert answer.status_code == 200
        assert api.is_clean()
