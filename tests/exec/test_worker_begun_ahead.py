from __future__ import annotations

import copy
from collections import deque

import pytest
import torch
from engines import BLOCK_SIZE, GRAMMARS, SwapAll, make_core, make_store, mixed_requests, run, tiny_model

from skipjoin.core.events import Admitted, Event, Finished, Token
from skipjoin.core.prefixes import ContentPrefix
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.step import Slice, StepPlan, StepResult
from skipjoin.exec.sampling import Sampling
from skipjoin.exec.worker import InFlightStep, Worker, halves
from skipjoin.model import sampler
from skipjoin.model.batch import PackedBatch
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.parallel import Shard
from skipjoin.sampling import SamplingParams
from support.load import changed


class Ahead:
    """Executor that begins every plan at once and finishes it when its result is requested, as a device does."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.max_begun = 0
        self._begun: deque[InFlightStep] = deque()

    def submit(self, plan: StepPlan, now: float) -> Ahead:
        self._begun.append(self.worker.begin(plan))
        self.max_begun = max(self.max_begun, len(self._begun))
        return self

    def on_finished(self, request: Request) -> None:
        self.worker.on_finished(request)

    def done(self) -> bool:
        return self.worker.is_done(self._begun[0])

    def result(self) -> StepResult:
        return self.worker.finish(self._begun.popleft())

    def close(self) -> None:
        self.worker.close()


def ahead(model: CausalLM, requests: list[Request], *, depth: int, **options: int) -> tuple[list[Event], int]:
    store = make_store(model, 12, 40)
    executor = Ahead(Worker(model, store, grammars=GRAMMARS))
    core = make_core(SwapAll(), device_blocks=12, cpu_blocks=40, slots=3, depth=depth, overlap=True, **options)
    return run(core, executor, requests), executor.max_begun


def test_pipeline_depth_changes_no_tokens() -> None:
    one, other = mixed_requests(), mixed_requests()
    ahead(tiny_model("llama"), one, depth=1, chunk=6)
    _, max_begun = ahead(tiny_model("llama"), other, depth=2, chunk=6)
    assert max_begun == 2
    assert [request.progress.output for request in other] == [request.progress.output for request in one]


@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_log_probabilities_belong_to_their_step(attention: str) -> None:
    """Log-probabilities are equal bit for bit, except that torch's attention depends on the index of a row."""
    model = tiny_model("llama", attention)
    tolerance = 1e-5 if model.ops.name == "torch" else 0.0

    def scores(depth: int) -> tuple[list[tuple[int, int]], list[float]]:
        sampling = Sampling(SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1), 3, ())
        requests = [Request(i, 0.0, [5 * i + 1] * (9 + i), 6, sampling=sampling) for i in range(3)]
        events, _ = ahead(model, requests, depth=depth, chunk=5)
        tokens = sorted((e for e in events if isinstance(e, Token)), key=lambda event: event.request.id)
        assert all(len(event.detail.prompt) == 9 + event.request.id for event in tokens[::6])
        each = [(event.request.id, score) for event in tokens for score in (event.detail.chosen, *event.detail.prompt)]
        scored = [(i, *pair) for i, one in each for pair in ((one.token, one.logprob), *one.top)]
        return [(i, token) for i, token, _ in scored], [0.0 if logprob is None else logprob for *_, logprob in scored]

    (names, one), (same, other) = scores(1), scores(2)
    assert names == same
    assert one == pytest.approx(other, rel=0, abs=tolerance)


TOO_MUCH = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class LimitedMemoryModel(CausalLM):
    """A model whose device runs out of memory beyond `room` tokens per step."""

    room: int
    error: Exception

    def wanted_rows(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        if batch.num_tokens > self.room:
            raise self.error
        return super().wanted_rows(batch, kv)


def limited_model(room: int, error: Exception = TOO_MUCH) -> CausalLM:
    model = copy.copy(tiny_model("llama"))
    model.__class__ = LimitedMemoryModel
    model.room, model.error = room, error  # type: ignore[attr-defined]
    return model


def greedy(number: int, prompt: int, output: int) -> Request:
    return Request(number, 0.0, [number + 1] * prompt, output, sampling=Sampling(SamplingParams(temperature=0), 0, ()))


@pytest.mark.parametrize("depth", [1, 2])
def test_out_of_memory_fails_only_the_largest_request(depth: int, caplog: pytest.LogCaptureFixture) -> None:
    lengths = [(4, 7), (20, 5), (5, 6)]
    alone = [greedy(i, *size) for i, size in enumerate(lengths)]
    ahead(tiny_model("llama"), alone, depth=1)
    together = [greedy(i, *size) for i, size in enumerate(lengths)]
    events, _ = ahead(limited_model(16), together, depth=depth)
    assert [request.progress.output for request in together] == [alone[0].progress.output, [], alone[2].progress.output]
    (failed,) = [e for e in events if isinstance(e, Finished) and e.reason is FinishReason.ERROR]
    assert failed.request is together[1]
    assert "out of memory in a step with 20 tokens of this request; a lower --max-num-batched-tokens" in failed.detail
    assert "request 1 is dropped" in caplog.text


class OnceLimitedMemoryModel(LimitedMemoryModel):
    def wanted_rows(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        room, self.room = self.room, 1 << 20
        if batch.num_tokens > room:
            raise self.error
        return super().wanted_rows(batch, kv)


def test_chunks_after_a_failed_chunk_are_neither_computed_nor_cached() -> None:
    """The second chunk of the prompt is in flight when the first one runs out of memory."""

    def adopting(number: int) -> Request:
        return changed(greedy(7, 20, 6), id=number, prefix=ContentPrefix(BLOCK_SIZE))

    def admitted(events: list[Event]) -> list[int]:
        return [event.cached for event in events if isinstance(event, Admitted)]

    alone = adopting(0)
    ahead(tiny_model("llama"), [alone], depth=1)
    model = limited_model(1)
    model.__class__ = OnceLimitedMemoryModel
    worker = Worker(model, make_store(model, 12, 40), grammars=GRAMMARS)
    core = make_core(SwapAll(), device_blocks=12, cpu_blocks=40, slots=3, depth=2, overlap=True, chunk=8)
    lost, second = adopting(0), adopting(1)
    core.add(lost, 0.0)
    flying = [worker.begin(plan) for plan in (core.start_step(0.0), core.start_step(0.0)) if plan is not None]
    assert [list(step.dropped) for step in flying] == [[0], [0]]
    for step in flying:
        core.finish_step(worker.finish(step), 0.0)
    assert lost.progress.finish_reason is FinishReason.ERROR
    events = core.take_events() + run(core, Ahead(worker), [second])
    assert admitted(events) == [0, 0]
    assert second.progress.output == alone.progress.output


class RowCountingModel(CausalLM):
    widest = 0

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        self.widest = max(self.widest, len(rows))
        return super().logits(rows)


def test_prompt_logits_are_computed_in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of scored rows does not matter, and the scores equal those of all rows at once."""
    found = []
    for rows in (256, 8):
        monkeypatch.setattr(sampler, "_SCORED_ROWS", rows)
        sampling = Sampling(SamplingParams(temperature=0, logprobs=0, prompt_logprobs=2), 3, ())
        requests = [Request(i, 0.0, [*range(1, 40 - i)], 2, sampling=sampling) for i in range(3)]
        model = copy.copy(tiny_model("llama"))
        model.__class__ = RowCountingModel
        events, _ = ahead(model, requests, depth=1, chunk=30)
        found.append([e.detail.prompt for e in events if isinstance(e, Token) and e.detail.prompt])
        assert model.widest == min(rows, 30)
    assert [len(scores) for scores in found[0]] == [39, 38, 37]
    flat = [[score.logprob for scores in prompt for score in scores[1:]] for prompt in found]
    assert flat[0] == pytest.approx(flat[1], abs=1e-5)


def test_slices_in_flight_of_a_failed_request_are_dropped() -> None:
    """The requests decode, and their next tokens are planned already."""
    requests = [greedy(i, 3, 9) for i in range(3)]
    model = limited_model(2)
    events, _ = ahead(model, requests, depth=2)
    failed = [e.request for e in events if isinstance(e, Finished) and e.reason is FinishReason.ERROR]
    assert failed == requests  # a prompt of three tokens does not fit


@pytest.mark.parametrize(
    "error",
    [
        TOO_MUCH,
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory"),
        MemoryError(),
    ],
    ids=["torch", "cublas", "driver", "host"],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_steps_that_fit_in_halves_fail_no_request(error: Exception, depth: int) -> None:
    """The steps yield tokens whose successors are planned already, and scores."""

    def asked() -> list[Request]:
        sampling = Sampling(SamplingParams(temperature=1.0, logprobs=2, prompt_logprobs=1), 3, ())
        return [Request(i, 0.0, [5 * i + 1] * (1 + 2 * i), 7, sampling=sampling) for i in range(3)]

    found = []
    for model in (tiny_model("llama"), limited_model(5, error), limited_model(2, error)):
        events, _ = ahead(model, asked(), depth=depth, chunk=2)
        tokens = [(e.request.id, e.token, e.detail) for e in events if isinstance(e, Token)]
        found.append(sorted(tokens, key=lambda item: item[0]))
        assert not [e for e in events if isinstance(e, Finished) and e.reason is FinishReason.ERROR]
    assert [[(i, token) for i, token, _ in each] for each in found[1:]] == [[(i, t) for i, t, _ in found[0]]] * 2
    assert [len(each.prompt) for *_, each in found[2]] == [len(each.prompt) for *_, each in found[0]]


def test_other_cuda_errors_are_raised() -> None:
    model = limited_model(2, RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        ahead(model, [greedy(0, 5, 1)], depth=1)


def test_steps_are_split_into_halves_of_similar_size() -> None:
    def parts(*tokens: int) -> tuple[list[int], list[int]]:
        return halves([Slice(greedy(i, n, 1), 0, n, True, False, ()) for i, n in enumerate(tokens)], range(len(tokens)))

    assert parts(5, 100, 5, 5) == ([1], [0, 2, 3])
    assert parts(1, 1, 1, 1) == ([2, 3], [0, 1])
    assert parts(3, 4) == ([1], [0])


def test_out_of_memory_fails_all_ranks() -> None:
    model = limited_model(2)
    store = make_store(model, 4)
    model.shard = Shard.of_rank(0, 2, 1)
    plan = StepPlan(0, (Slice(greedy(0, 5, 1), 0, 5, True, False, (0, 1)),))
    with pytest.raises(torch.OutOfMemoryError):
        Worker(model, store).run(plan)
