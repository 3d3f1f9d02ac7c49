from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from engines import Closable, SwapAll, engine, make_core, mixed_requests, tiny_model
from rank_links import thread_executor
from test_invisible_preemption import FORCED, forced, outputs_alone
from test_worker_sharded import outputs_alone as outputs_of_one_rank
from test_worker_sharded import sharded

from skipjoin.core.engine import EngineCore
from skipjoin.core.request import Request
from skipjoin.core.step import StepPlan
from skipjoin.exec import worker
from skipjoin.exec.local import LocalExecutor
from skipjoin.exec.sampling import Sampling
from skipjoin.exec.worker import Worker
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.grammar_mask import GrammarMask
from skipjoin.model.grammars import Grammars
from skipjoin.model.logits_processors import Asked, ProcessorState, default_processors
from skipjoin.model.sampler import Sampler
from skipjoin.sampling import SamplingParams
from support.worlds import checkered, halved


class _Accepted(ProcessorState):
    reads_output = True

    def __init__(self, prompt: Sequence[int]) -> None:
        self.prompt = tuple(prompt)
        self.tokens: list[int] = []

    def accept(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens


@dataclass(eq=False)
class Probe:
    """Logits processor that changes nothing and records the states of one worker's requests."""

    states: list[_Accepted] = field(default_factory=list)
    freed: list[tuple[int, ...]] = field(default_factory=list)  # prompts of requests whose state was freed
    worker: Worker | None = None

    def start(self, asked: Asked) -> _Accepted:
        self.states.append(_Accepted(asked.prompt))
        return self.states[-1]

    def apply(self, logits: torch.Tensor, rows: Sequence[tuple[int, _Accepted]]) -> None:
        pass

    @property
    def started(self) -> Counter[tuple[int, ...]]:
        return Counter(state.prompt for state in self.states)


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[Probe]:
    for alone in (outputs_alone, outputs_of_one_rank):
        alone("llama")  # cache its outputs without a probe
    made: list[Probe] = []

    def sampler(model: CausalLM, grammars: Grammars | None) -> Sampler:
        made.append(Probe())
        vocab_size = model.config.vocab_size
        assert grammars is not None
        processors = [*default_processors(vocab_size), made[-1]]
        return Sampler(vocab_size, processors=processors, limit=GrammarMask(grammars))

    free = Worker.on_finished

    def on_finished(self: Worker, request: Request) -> None:
        if request in self._states:
            probe_of(self).freed.append(tuple(request.prompt))
        free(self, request)

    def probe_of(one: Worker) -> Probe:
        probe = one._sampler._processors[-1]
        assert isinstance(probe, Probe)
        probe.worker = one
        return probe

    monkeypatch.setattr(worker, "_sampler", sampler)
    monkeypatch.setattr(Worker, "on_finished", on_finished)
    return made


def drive(
    core: EngineCore,
    executor: Closable,
    requests: Sequence[Request],
    aborts: Mapping[int, Sequence[int]] = {},
    stop_after: int | None = None,
) -> None:
    """Run the requests to their end and free their states.

    Args:
        aborts: Ids of requests that are aborted, by the number of plans made before.
        stop_after: Number of results after which to return, with plans in flight; None for all.
    """
    core.on_finished = executor.on_finished
    handles: deque = deque()
    plans = results = 0
    for request in requests:
        core.add(request, 0.0)
    while core.requests or handles:
        while (plan := core.start_step(0.0)) is not None:
            handles.append(executor.submit(plan, 0.0))
            plans += 1
            for request_id in aborts.get(plans, ()):
                core.abort(request_id, 0.0)
        if handles:
            core.finish_step(handles.popleft().result(), 0.0)
        results += 1
        if results == stop_after:
            return
    executor.submit(StepPlan(-1, ()), 0.0).result()  # the next plan notifies ranks of the last finished requests
    executor.close()


def check(probe: Probe, requests: Sequence[Request], *, has_aborts: bool = False) -> None:
    """Assert that each request's state was made once, freed once, and accepted all tokens but the last, in order."""
    assert probe.started == Counter(tuple(request.prompt) for request in requests)
    assert Counter(probe.freed) == probe.started
    assert not probe.worker._states
    accepted = sorted((*state.prompt, *state.tokens) for state in probe.states)
    if not has_aborts:
        assert accepted == sorted((*request.prompt, *request.progress.output[:-1]) for request in requests)
        return
    # A step in flight may have read the last token of an aborted request, or sampled one more.
    outputs = {tuple(request.prompt): request.progress.output for request in requests}
    for state in probe.states:
        output = outputs[state.prompt]
        assert state.tokens[: len(output)] == output[: len(state.tokens)]
        assert len(output) - 1 <= len(state.tokens) <= len(output) + 1


CASES = [
    "paused at every step",
    "prompts in chunks of 3",
    "dropped at every step",
    "swapped at every step",
    "swapped, copies in fail",
    "tails dropped at every step",
    "shared at every step",
    "shared, copies fail",
    "parts moved concurrently, late copies fail",
    "overlapped, dropped",
    "overlapped, swapped, copies fail",
    "overlapped, shared, copies fail",
]


@pytest.mark.parametrize("case", halved(case for case in CASES if case in FORCED))
def test_preemption_keeps_request_states(case: str, probes: list[Probe]) -> None:
    requests = mixed_requests()
    core, executor = forced(case, "llama")
    drive(core, executor, requests)
    assert [request.progress.output for request in requests] == outputs_alone("llama")
    check(*probes, requests)


@pytest.mark.parametrize("case", ["dropped at every step", "shared at every step", "overlapped, dropped"])
def test_an_abort_frees_the_state_of_the_aborted_request_only(case: str, probes: list[Probe]) -> None:
    requests = mixed_requests()
    core, executor = forced(case, "opt")
    drive(core, executor, requests, aborts={1: (0, 6), 4: (2,), 9: (4,)})
    started = [request for request in requests if tuple(request.prompt) in probes[0].started]
    assert len(started) < len(requests)  # one request was aborted before it ran
    check(*probes, started, has_aborts=True)


@pytest.mark.parametrize("depth", [1, 2])
def test_choices_of_one_prompt_have_separate_states(depth: int, probes: list[Probe]) -> None:
    params = SamplingParams(temperature=1.0, frequency_penalty=1.0, repetition_penalty=1.2, max_tokens=12)
    requests = [Request(number, 0.0, [5, 6, 7], 12, sampling=Sampling(params, number, ())) for number in range(3)]
    drive(*engine(tiny_model("llama"), SwapAll(), device_blocks=8, cpu_blocks=20, depth=depth), requests)
    check(*probes, requests)
    assert len({tuple(request.progress.output) for request in requests}) == 3


@pytest.mark.parametrize(
    ("case", "layout"),
    checkered(
        ["dropped", "swapped, copies fail", "shared"],
        [(2, 1, False), (2, 1, True), (1, 2, False), (2, 2, False)],
        colors=3,
    ),
)
def test_each_rank_that_samples_has_its_own_states(
    case: str, layout: tuple[int, int, bool], probes: list[Probe]
) -> None:
    tp, pp, overlap = layout
    requests = mixed_requests()
    drive(*sharded(case, "llama", tp, pp, overlap=overlap), requests)
    assert [request.progress.output for request in requests] == outputs_of_one_rank("llama")
    sampling = [probe for probe in probes if probe.worker is not None and probe.worker.model.shard.is_last]
    assert len(sampling) == tp
    for probe in sampling:
        check(probe, requests)
    for probe in set(probes) - set(sampling):  # stages that do not sample have states without tokens
        assert not probe.states
        assert len(probe.freed) == len(requests)


@pytest.mark.parametrize(("after", "layout"), checkered([1, 6, 28], [(1, 1), (2, 1), (1, 2)], colors=3))
def test_states_are_recreated_after_a_restart(after: int, layout: tuple[int, int], probes: list[Probe]) -> None:
    tp, pp = layout
    requests = mixed_requests()
    core = make_core(SwapAll(), device_blocks=16, cpu_blocks=60, slots=2, depth=pp)
    lost = thread_executor(tp, pp, "llama", device_blocks=16, cpu_blocks=60)
    drive(core, lost, requests, stop_after=after)
    finished = [request for request in requests if request.progress.finish_reason is not None]
    core.restart(0.0)
    lost.close()
    probes.clear()
    drive(core, thread_executor(tp, pp, "llama", device_blocks=16, cpu_blocks=60), ())
    assert [request.progress.output for request in requests] == outputs_of_one_rank("llama")
    unfinished = [request for request in requests if request not in finished]
    assert unfinished
    assert any(finished) == (after == 28)
    for probe in probes:
        if probe.worker is not None and probe.worker.model.shard.is_last:
            check(probe, unfinished)


def test_finished_requests_are_reported_once(probes: list[Probe]) -> None:
    """This includes requests aborted before their first plan, which never had a state."""
    reported: list[int] = []

    class RecordingExecutor(LocalExecutor):
        def on_finished(self, request: Request) -> None:
            reported.append(request.id)
            super().on_finished(request)

    core, executor = forced("dropped at every step", "llama")
    executor.__class__ = RecordingExecutor
    requests = mixed_requests()
    drive(core, executor, requests, aborts={1: (3,)})
    assert not core.abort(3, 0.0)
    assert sorted(reported) == list(range(len(requests)))
