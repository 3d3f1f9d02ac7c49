"""A request waits for its grammar alone, and leaves nothing behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from skipjoin.config import EngineConfig
from skipjoin.core.events import Finished
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.scheduling.waits import WaitReason
from skipjoin.engine.build import assemble
from skipjoin.engine.loop import EngineLoop
from skipjoin.model.grammar_mask import GrammarState
from skipjoin.model.grammars import _MAX_COMPILED
from skipjoin.sampling import SamplingParams
from skipjoin.structured_output import StructuredOutput


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
    compiled: Future[object] = Future()
    asked: list[Request] = []

    def compile_grammar(request: Request) -> Future[object] | None:
        asked.append(request)
        return compiled if request.id == 1 else None

    monkeypatch.setattr(loop.engine.executor, "compile_grammar", compile_grammar)
    loop.add(1, [5, 6], constrained("[0-9]{4}"))
    loop.add(2, [5, 6], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    first, _ = asked
    ended: list[int] = []
    while 2 not in ended:
        ended += [event.request.id for event in loop.step() if isinstance(event, Finished)]
        wait = loop.core.wait_of(first)
        assert wait is not None
        assert wait.reason is WaitReason.GRAMMAR
    assert not loop.core.is_stalled
    assert loop.step() == []
    compiled.set_result(None)
    events = drain(loop)
    assert [event.reason for event in events if isinstance(event, Finished)] == [FinishReason.STOP]
    assert not loop._compiling


def test_aborted_requests_leave_no_grammar_state(loop: EngineLoop) -> None:
    """They are aborted before, while and after their grammar compiles. Compiled grammars are bounded."""
    others = [found for found in gc.get_objects() if type(found) is GrammarState]  # of other tests in this process
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
    assert executor.grammars is not None
    assert len(executor.grammars._compiled) <= _MAX_COMPILED
    executor._thread.submit(lambda: None).result()  # type: ignore[attr-defined] # states are freed on this thread
    assert not executor._worker._states  # type: ignore[attr-defined]
    gc.collect()
    known = set(map(id, others))
    assert not any(type(found) is GrammarState and id(found) not in known for found in gc.get_objects())
    assert not loop._compiling
