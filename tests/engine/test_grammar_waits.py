from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from skipjoin.config import EngineConfig
from skipjoin.core.events import Finished
from skipjoin.core.request import FinishReason, Request, RequestOptions
from skipjoin.core.waits import WaitReason
from skipjoin.engine import live_constraints
from skipjoin.engine.build import assemble
from skipjoin.engine.loop import EngineLoop
from skipjoin.exec.grammars_ahead import GrammarsAhead
from skipjoin.model import grammar_mask, grammars
from skipjoin.model.grammar_mask import GrammarMask, GrammarState
from skipjoin.model.grammars import _MAX_COMPILED, Grammars
from skipjoin.sampling import SamplingParams
from skipjoin.structured_output import StructuredOutput
from support.waiting import wait_until


@pytest.fixture(scope="module")
def loop() -> Iterator[EngineLoop]:
    made = EngineLoop(assemble(EngineConfig(profile="off", kv_cache_gib=0.02, swap_space_gib=0, threads=1)))
    yield made
    made.close()


def constrained(text: str) -> SamplingParams:
    return SamplingParams(max_tokens=8, temperature=0, structured_outputs=StructuredOutput(kind="regex", text=text))


def drain(loop: EngineLoop) -> list[Any]:
    events = []
    while not loop.idle:
        events += loop.step()
    return events


def test_other_requests_run_while_a_grammar_is_compiled(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: Future[GrammarState] = Future()
    asked: list[Request] = []

    ahead = loop.engine.executor.ahead
    assert isinstance(ahead, GrammarsAhead)

    def start(request: Request) -> Future[GrammarState]:
        asked.append(request)
        ahead._states[request] = compiled
        return compiled

    monkeypatch.setattr(ahead, "start", start)
    loop.add(1, [5, 6], constrained("[0-9]{4}"))
    loop.add(2, [5, 6], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    (first,) = asked
    ended: list[int] = []
    while 2 not in ended:
        ended += [event.request.id for event in loop.step() if isinstance(event, Finished)]
        wait = loop.core.wait_of(first)
        assert wait.reason is WaitReason.GRAMMAR
    assert not loop.core.is_stalled
    assert loop.step() == []
    compiled.set_result(ahead._new(first))
    events = drain(loop)
    assert [event.reason for event in events if isinstance(event, Finished)] == [FinishReason.STOP]
    assert not loop._compiling


def test_aborted_requests_leave_no_grammar_state(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are aborted before, while and after their grammar compiles. Compiled grammars are bounded."""
    states: list[weakref.ref[GrammarState]] = []
    start = GrammarMask.start

    def noted(self: GrammarMask, *args: Any) -> GrammarState | None:
        state = start(self, *args)
        assert state is not None
        states.append(weakref.ref(state))
        return state

    monkeypatch.setattr(GrammarMask, "start", noted)
    for number in range(10, 10 + 3 * _MAX_COMPILED):
        loop.add(number, [5, 6], constrained(f"[0-9]{{4}}x{number}"))
        for _ in range(number % 4):
            loop.step()
        loop.abort(number)
    drain(loop)
    loop.add(9, [5, 6], constrained("[0-9]{4}"))
    ended = [event.reason for event in drain(loop) if isinstance(event, Finished) and event.request.id == 9]
    assert ended == [FinishReason.STOP]
    executor = loop.engine.executor
    assert len(executor.grammars._compiled) <= _MAX_COMPILED
    executor._thread.submit(lambda: None).result()  # type: ignore[attr-defined] # states are freed on this thread
    assert not executor._worker._states  # type: ignore[attr-defined]
    deadline = time.monotonic() + 60
    while loop._compiling:  # a thread may still compile for one of them
        assert time.monotonic() < deadline
        loop._compiling.release(0.05)
    assert isinstance(executor.ahead, GrammarsAhead)
    assert not executor.ahead._states
    assert not loop._compiling._live._clients
    # The frame of a thread may hold one for a moment.
    wait_until(lambda: gc.collect() >= 0 and not any(state() is not None for state in states))


ITEM = {"type": "object", "properties": {"id": {"type": "integer"}, "ok": {"type": "boolean"}}, "required": ["id"]}
SCHEMA = StructuredOutput.json({"type": "array", "items": ITEM, "minItems": 3, "maxItems": 5})


def outputs(depth: int) -> list[list[int]]:
    config = EngineConfig(
        profile="off", kv_cache_gib=0.02, swap_space_gib=0, threads=1, pipeline_depth=depth, max_num_seqs=3
    )
    one = EngineLoop(assemble(config))
    try:
        for number in range(6):
            structured = SCHEMA if number % 3 else None
            params = SamplingParams(max_tokens=24, temperature=1.0, seed=number, structured_outputs=structured)
            one.add(number, [5, 6, number], params)
        requests = list(one.core.requests.values())
        drain(one)
        assert not one._compiling
        assert all(request.progress.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for request in requests)
        return [request.progress.output for request in requests]
    finally:
        one.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_slow_masks_change_no_tokens(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = outputs(depth)
    late: list[int] = []
    compute = GrammarMask.compute_ahead

    def compute_late(self: GrammarMask, state: GrammarState, output: Sequence[int]) -> None:
        late.append(len(output))
        compute(self, state, output)

    monkeypatch.setattr(grammar_mask, "_SLOW_S", 0.0)
    monkeypatch.setattr(GrammarMask, "compute_ahead", compute_late)
    assert outputs(depth) == expected
    assert sum(map(bool, late)) > 20


def test_other_requests_run_while_a_mask_is_computed(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    go, compute = threading.Event(), GrammarMask.compute_ahead

    def compute_late(self: GrammarMask, state: GrammarState, output: Sequence[int]) -> None:
        assert not output or go.wait(60)
        compute(self, state, output)

    monkeypatch.setattr(grammar_mask, "_SLOW_S", 0.0)
    monkeypatch.setattr(GrammarMask, "compute_ahead", compute_late)
    charged: list[float] = []
    monkeypatch.setattr(loop.core, "charge", lambda request, tokens, now: charged.append(tokens))
    loop.add(20, [5, 6], constrained("[0-9]{4}held"))
    slow = loop.core.requests[20]
    while not slow.progress.output:
        loop.step()
    loop.add(21, [5, 6], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    ended: list[int] = []
    while not ended:
        ended += [event.request.id for event in loop.step() if isinstance(event, Finished)]
    assert ended == [21]
    assert len(slow.progress.output) == 1
    wait = loop.core.wait_of(slow)
    assert wait.reason is WaitReason.GRAMMAR
    go.set()
    assert [event.reason for event in drain(loop) if isinstance(event, Finished)] == [FinishReason.LENGTH]
    assert len(charged) > 3
    assert min(charged) > 0


def compiled_texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    compiled = Grammars.compiled

    def noted(self: Grammars, structured: StructuredOutput) -> Any:
        texts.append(structured.text)
        return compiled(self, structured)

    monkeypatch.setattr(Grammars, "compiled", noted)
    return texts


def test_grammars_of_waiting_requests_are_compiled_once(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if more of them wait than are kept compiled."""
    texts = compiled_texts(monkeypatch)
    monkeypatch.setattr(grammars, "_MAX_COMPILED", 2)
    asked = [f"[0-9]{{4}}y{number}" for number in range(12)]
    for number, text in enumerate(asked, 300):
        loop.add(number, [5, 6], constrained(text))
    drain(loop)
    assert sorted(texts) == sorted(asked)


def test_constraints_of_a_client_wait_for_each_other(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other clients and known ones do not. All finish, also if some are aborted."""
    monkeypatch.setattr(live_constraints, "MAX_WEIGHT", 2 << 12)
    asked = {number: "abcda"[number] for number in range(5)}  # which requests have equal constraints
    for number, text in asked.items():
        loop.add(500 + number, [5, 6], constrained(f"[0-9]{{4}}{text}"), options=RequestOptions(client="x"))
    loop.add(505, [5, 6], constrained("[0-9]{4}e"), options=RequestOptions(client="y"))
    ahead = loop.engine.executor.ahead
    requests = list(loop.core.requests.values())
    assert [request.id for request in requests if ahead.state_of(request) is None] == [502, 503]
    loop.abort(503)
    loop.step()
    wait = loop.core.wait_of(requests[2])
    assert wait.reason is WaitReason.GRAMMAR
    drain(loop)
    ended = [request.id for request in requests if request.progress.finish_reason is FinishReason.STOP]
    assert ended == [500, 501, 502, 504, 505]
    assert not loop._compiling._live._clients


def test_grammars_are_charged_also_if_their_request_was_aborted(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, begun, compiled = threading.Event(), threading.Event(), Grammars.compiled

    def compiled_late(self: Grammars, structured: StructuredOutput) -> Any:
        begun.set()
        assert go.wait(60)
        while time.thread_time() < 0.02:
            pass
        return compiled(self, structured)

    charged: list[Request] = []
    monkeypatch.setattr(loop.core, "charge", lambda request, tokens, now: charged.append(request))
    monkeypatch.setattr(Grammars, "compiled", compiled_late)
    loop.add(600, [5, 6], constrained("[0-9]{4}charged"))
    request = loop.core.requests[600]
    assert begun.wait(60)
    loop.abort(600)
    go.set()
    while loop._compiling:
        loop._compiling.release(0.05)
    assert charged == [request]


def test_requests_that_do_not_fit_leave_no_constraint(loop: EngineLoop) -> None:
    loop.add(700, [5, 6], constrained("[0-9]{4}twice"))
    with pytest.raises(ValueError, match="in use"):
        loop.add(700, [5, 6], constrained("[0-9]{4}twice"))
    drain(loop)
    assert not loop._compiling._live._clients


def test_requests_with_other_salts_share_no_compiled_grammar(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = compiled_texts(monkeypatch)
    for number, salt in enumerate(("a", "b", "a", "b"), 400):
        loop.add(number, [5, 6], constrained("[0-9]{4}z"), options=RequestOptions(cache_salt=salt))
        drain(loop)
    assert texts == ["[0-9]{4}z"] * 2
