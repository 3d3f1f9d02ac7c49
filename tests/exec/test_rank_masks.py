from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from engines import GRAMMARS, VOCAB, make_core, mixed_requests
from rank_links import thread_executor

from skipjoin.core.events import Finished
from skipjoin.core.request import FinishReason, RequestOptions
from skipjoin.core.step import StepPlan
from skipjoin.core.waits import WaitReason
from skipjoin.engine import grammar_waits
from skipjoin.engine.loop import EngineLoop
from skipjoin.exec.base import RankError
from skipjoin.exec.ranks.sharded import ShardedExecutor, ShardedHandle
from skipjoin.exec.sampling import Sampling
from skipjoin.model import grammar_mask
from skipjoin.model.grammar_mask import GrammarMask, GrammarState
from skipjoin.policies.cost import LearningCost, LinearCost
from skipjoin.policies.eviction import Recompute
from skipjoin.sampling import SamplingParams
from skipjoin.structured_output import StructuredOutput
from support.worlds import exhaustive

COST = LinearCost(floor=0.01, prefill_token=1e-5, decode=1e-3)
FREE = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def loop_of(executor: Any, depth: int, *, overlap: bool = False) -> EngineLoop:
    core = make_core(Recompute(), device_blocks=60, slots=4, depth=depth, overlap=overlap)
    info = SimpleNamespace(eos_token_ids=(VOCAB - 1,), vocab_size=VOCAB, max_model_len=256, cost=LearningCost(COST))
    info.check_pooling = lambda pooling: None
    unused = {"seed": 0, "jct_scale": None, "caches_prefixes": False, "adapter_bytes": {}, "learned": None}
    return EngineLoop(SimpleNamespace(core=core, executor=executor, info=info, **unused))  # type: ignore[arg-type]


def ranks(tp: int, pp: int) -> ShardedExecutor:
    return thread_executor(tp, pp, "llama", device_blocks=60)


def constrained(text: str) -> SamplingParams:
    structured = StructuredOutput(kind="regex", text=text)
    return SamplingParams(max_tokens=8, temperature=0, structured_outputs=structured)


def drain(loop: EngineLoop) -> list[Finished]:
    events: list[Finished] = []
    while not loop.idle:
        events += [event for event in loop.step() if isinstance(event, Finished)]
    return events


def outputs(loop: EngineLoop) -> list[list[int]]:
    for request in mixed_requests():
        assert isinstance(request.sampling, Sampling)
        loop.add(request.id, request.prompt, request.sampling.params)
    requests = list(loop.core.requests.values())
    drain(loop)
    assert not loop._compiling
    assert not loop._compiling._live._clients
    return [request.progress.output for request in requests]


class Late:
    """Lets the second rank wait before it computes the masks after some output."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        compute = GrammarMask.compute_ahead
        ranks: dict[GrammarMask, None] = {}

        def compute_late(mask: GrammarMask, state: GrammarState, output: Sequence[int]) -> None:
            ranks[mask] = None
            assert not output or mask is next(iter(ranks)) or self.go.wait(60)
            compute(mask, state, output)

        monkeypatch.setattr(grammar_mask, "_SLOW_S", 0.0)
        monkeypatch.setattr(GrammarMask, "compute_ahead", compute_late)


@pytest.mark.parametrize(("tp", "pp", "depth"), [(2, 1, 1), exhaustive(2, 1, 2), exhaustive(1, 2, 2), (2, 2, 2)])
def test_masks_outside_of_steps_change_no_tokens(tp: int, pp: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, computed = ranks(tp, pp), list[int]()
    try:
        expected = outputs(loop_of(executor, depth, overlap=depth > pp))
        compute = GrammarMask.compute_ahead

        def noted(mask: GrammarMask, state: GrammarState, output: Sequence[int]) -> None:
            computed.append(len(output))
            compute(mask, state, output)

        monkeypatch.setattr(grammar_mask, "_SLOW_S", 0.0)
        monkeypatch.setattr(GrammarMask, "compute_ahead", noted)
        loop = loop_of(executor, depth, overlap=depth > pp)
        charged: list[float] = []
        monkeypatch.setattr(loop.core, "charge", lambda request, tokens, now: charged.append(tokens))
        assert outputs(loop) == expected
        assert sum(map(bool, computed)) > 20 * tp
        assert len(charged) > 20
        assert not executor.ahead._states
        assert not executor.ahead._ordered
    finally:
        executor.close()


def test_others_run_until_all_ranks_have_a_mask_which_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    late, executor = Late(monkeypatch), ranks(2, 1)
    loop = loop_of(executor, 1)
    for number in (1, 2):
        loop.add(number, [5, 6], constrained(f"[0-9]{{4}}held{number}"))
    slow = loop.core.requests[1]
    while not slow.progress.output:
        loop.step()
    loop.add(3, [5, 6], FREE)
    ended: list[Finished] = []
    while not ended:
        ended += [event for event in loop.step() if isinstance(event, Finished)]
    assert [event.request.id for event in ended] == [3]
    assert len(slow.progress.output) == 1
    wait = loop.core.wait_of(slow)
    assert wait.reason is WaitReason.GRAMMAR

    # The second request has not begun on the only thread of a rank, and has therefore no deadline yet.
    monkeypatch.setattr(grammar_waits, "_MAX_AHEAD_S", 0.05)
    while not (overdue := [event for event in loop.step() if isinstance(event, Finished)]):
        assert slow.progress.finish_reason is None
    monkeypatch.setattr(grammar_waits, "_MAX_AHEAD_S", 60.0)
    (first,) = overdue
    assert (first.reason, first.is_refused) == (FinishReason.ERROR, True)
    assert "is too expensive after 1 tokens: its next step took more than 0.05 s: simplify it" in first.detail
    late.go.set()
    (second,) = drain(loop)
    assert (second.reason, {first.request.id, second.request.id}) == (FinishReason.LENGTH, {1, 2})
    while loop._compiling:
        loop._compiling.release(0.05)
    assert not executor.ahead._ordered
    executor.close()


def test_the_limit_of_time_of_any_rank_ends_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = GrammarMask.start, list[GrammarState]()

    def start_differently(mask: GrammarMask, *args: Any) -> GrammarState | None:
        if (state := start(mask, *args)) is not None:
            started.append(state)
            state._max_masks_s = -1.0 if len(started) == 2 else 60.0
        return state

    monkeypatch.setattr(GrammarMask, "start", start_differently)
    executor = ranks(2, 1)
    loop = loop_of(executor, 1)
    loop.add(1, [5, 6], constrained("[0-9]{4}limited"))
    loop.add(2, [5, 6], FREE)
    ended = {event.request.id: (event.reason, event.is_refused) for event in drain(loop)}
    assert ended == {1: (FinishReason.ERROR, True), 2: (FinishReason.LENGTH, False)}
    executor.close()


def test_salts_separate_the_grammars_of_ranks() -> None:
    executor = ranks(1, 1)
    loop = loop_of(executor, 1)
    params = constrained("[0-9]{4}salted")
    for number, salt in enumerate("aab"):
        loop.add(number, [5, 6], params, options=RequestOptions(cache_salt=salt))
    drain(loop)
    salts = {salt for salt, structured in GRAMMARS._compiled if structured == params.structured_outputs}
    assert salts == {"a", "b"}
    executor.close()


class Restarted:
    """Ranks that are lost with the fifth plan, and replaced."""

    def __init__(self) -> None:
        self._ranks, self._plans = ranks(2, 1), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    def submit(self, plan: StepPlan, now: float) -> ShardedHandle:
        self._plans += 1
        if self._plans == 5:
            raise RankError("lost")
        return self._ranks.submit(plan, now)

    def restart(self, reason: Exception) -> None:
        self._ranks.close()
        self._ranks = ranks(2, 1)


@pytest.mark.parametrize("slow_s", [0.0, 60.0])
def test_restarted_ranks_start_the_grammars_again(slow_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = ranks(2, 1)
    expected = outputs(loop_of(executor, 1))
    executor.close()
    monkeypatch.setattr(grammar_mask, "_SLOW_S", slow_s)
    lost = Restarted()
    assert outputs(loop_of(lost, 1)) == expected
    assert lost._plans > 5
    lost.close()
