from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from skipjoin.core.request import Request
from skipjoin.core.step import PAUSE_S, Slice, StageTime, StepPlan, StepResult
from skipjoin.exec.clocks import CpuClock, DeviceClock, Mark
from skipjoin.exec.graphs import DecodeGraphs
from skipjoin.exec.kv_store import KVStore
from skipjoin.exec.pooler import PLACEHOLDER, Pooler, Vectors
from skipjoin.exec.prompt_scores import keep_scores, score_prompt, wants_scores
from skipjoin.exec.request_state import RequestState
from skipjoin.exec.sampling import Sampling
from skipjoin.exec.throttle import copier_for
from skipjoin.exec.transfer import Copier, Ended
from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.cuda import is_out_of_memory
from skipjoin.model.grammar_mask import GrammarMask, GrammarState
from skipjoin.model.grammars import Grammars
from skipjoin.model.sampler import PromptLogprob, SampledTokens, Sampler, SampleRow, SamplingState, joined
from skipjoin.model.transfer import CpuCopy, send
from skipjoin.sampling import TokenDetail, TokenLogprob

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class InFlightStep:
    plan: StepPlan
    start: Mark
    ended: Ended
    moving: tuple[Mark, Mark] | None = None
    states: Sequence[RequestState] = ()
    chosen: list[int] = field(default_factory=list)
    sampled: SampledTokens | None = None
    scores: list[tuple[int, CpuCopy[list[PromptLogprob]]]] = field(default_factory=list)
    vectors: list[Vectors] = field(default_factory=list)
    dropped: dict[int, str] = field(default_factory=dict)
    refused: list[int] = field(default_factory=list)
    end: Mark | None = None
    waited: float = 0.0


@dataclass(slots=True)
class _Part:
    chosen: list[int] = field(default_factory=list)
    sampled: SampledTokens | None = None
    scores: list[tuple[int, CpuCopy[list[PromptLogprob]]]] = field(default_factory=list)
    vectors: Vectors | None = None


class Worker:
    """Runs plans sequentially with one rank's share of the model and the KV cache.

    A plan may begin before the previous one is finished. `begin` and `finish` are each called from one thread, in the
    same order. Slices can await tokens only with one stage, because the stage that samples must also embed.

    Args:
        copier: Receives overlapped moves only when their plan begins, since they may write blocks that an earlier
            plan's moves still read.
        limit_of: Returns the state of a request's grammar, if it was started outside of the steps.
    """

    def __init__(
        self,
        model: CausalLM,
        store: KVStore,
        *,
        copier: Copier | None = None,
        graphs: DecodeGraphs | None = None,
        grammars: Grammars | None = None,
        limit_of: Callable[[Request], GrammarState | None] = lambda request: None,
    ) -> None:
        self.model = model
        self.store = store
        self._graphs = graphs
        self._copier = copier or (copier_for(store) if store.cpu is not None else None)
        self._has_grammars = grammars is not None
        self._limit_of = limit_of
        self._sampler = _sampler(model, grammars)
        self._pooler = None if model.config.pooling is None else Pooler(model, store.device.block_size)
        self._alone = model.shard.ranks == 1
        self._clock: DeviceClock | CpuClock = DeviceClock(model.device) if model.device.type == "cuda" else CpuClock()
        # Tokens sampled by the latest plan and the row of each request, for slices of the next plan that await them.
        self._sampled: SampledTokens | None = None
        self._rows: dict[Request, int] = {}
        self._states: dict[Request, RequestState] = {}
        self.halvings = 0  # number of times that memory ran out
        self._ended: Mark | None = None  # end of the previous plan

    def run(self, plan: StepPlan) -> StepResult:
        return self.finish(self.begin(plan))

    def begin(self, plan: StepPlan) -> InFlightStep:
        """Queue a plan's work; raise ValueError if this rank cannot run it, and GroupError if another rank is lost."""
        if self._copier is None and (plan.blocking or plan.overlapped):
            raise ValueError(f"plan {plan.id} moves KV blocks, but there is no CPU pool")
        waited = self.model.group.waited_s
        in_flight = InFlightStep(plan, self._clock.mark(), Ended([], []))
        if self._copier is not None and plan.blocking:
            in_flight.ended = self._copier.run_blocking(plan.blocking)
            in_flight.moving = in_flight.start, self._clock.mark()
        if self._copier is not None and plan.overlapped:
            self._copier.begin(plan.overlapped)
        if plan.slices:
            if plan.states is not None:
                self.store.copy_states(plan.states.restored)
            with self.model.ops.step():
                self._compute(plan.slices, in_flight)
        in_flight.end = self._clock.mark()
        in_flight.waited = self.model.group.waited_s - waited
        if self._copier is not None:
            more = self._copier.poll(0.0 if plan.slices or plan.blocking else PAUSE_S)
            in_flight.ended.completed.extend(more.completed)
            in_flight.ended.failed.extend(more.failed)
        return in_flight

    def finish(self, in_flight: InFlightStep) -> StepResult:
        """Wait for a plan's result, with tokens if this rank samples. Its seconds exclude waiting for another stage."""
        plan, sampled = in_flight.plan, in_flight.sampled
        tokens: list[int | None] = [None] * len(plan.slices)
        details: dict[int, object] = {}
        for index, scores in in_flight.scores:
            keep_scores(in_flight.states[index].scores, plan.slices[index], scores.read())
        for index, sample in zip(in_flight.chosen, sampled.report.read() if sampled is not None else (), strict=True):
            state = in_flight.states[index]
            tokens[index] = sample.token
            if sample.logprob is not None or state.scores:
                chosen, prompt = TokenLogprob(sample.token, sample.logprob, sample.top), tuple(state.scores)
                details[index] = TokenDetail(chosen, prompt)
                state.scores = []
        for vectors in in_flight.vectors:
            for index, vector in vectors.read():
                tokens[index] = PLACEHOLDER
                details[index] = TokenDetail(TokenLogprob(PLACEHOLDER, None), vector=vector)
        assert in_flight.end is not None
        seconds = self._clock.between(in_flight.start, in_flight.end) - in_flight.waited
        moving = self._clock.between(*in_flight.moving) if in_flight.moving is not None else 0.0
        return StepResult(
            plan=plan,
            tokens=tokens,
            seconds=seconds,
            details=details,
            moving=moving,
            completed=in_flight.ended.completed,
            failed=in_flight.ended.failed,
            stages=self._stage_times(in_flight, seconds),
            dropped=in_flight.dropped,
            refused=in_flight.refused,
        )

    def on_finished(self, request: Request) -> None:
        """Free a request's state. Call from the thread of `begin`."""
        self._states.pop(request, None)

    def is_done(self, in_flight: InFlightStep) -> bool:
        assert in_flight.end is not None
        return self._clock.is_past(in_flight.end)

    def close(self) -> None:
        if self._copier is not None:
            self._copier.close()

    def _stage_times(self, in_flight: InFlightStep, busy: float) -> tuple[StageTime, ...]:
        if self.model.shard.pp_size == 1:
            return ()
        idle = 0.0
        if self._ended is not None:
            idle = in_flight.waited + self._clock.between(self._ended, in_flight.start)
        self._ended = in_flight.end
        return (StageTime(busy, idle),)

    def _compute(self, slices: Sequence[Slice], in_flight: InFlightStep) -> None:
        in_flight.states = states = [self._state_of(slice_.request) for slice_ in slices]
        void = [index for index, state in enumerate(states) if state.is_dropped]
        in_flight.dropped.update(dict.fromkeys(void, "the request was dropped in an earlier step"))
        self._drop_without_adapter(slices, in_flight)
        going = [index for index in range(len(slices)) if index not in in_flight.dropped]
        if self.model.adapters.bytes:
            # Rows of one adapter follow one another, so that its products need not gather them.
            going.sort(key=lambda index: slices[index].request.options.adapter)
        parts = self._halved(slices, going, in_flight) if going else []
        in_flight.chosen = [index for part in parts for index in part.chosen]
        in_flight.scores = [score for part in parts for score in part.scores]
        in_flight.vectors = [part.vectors for part in parts if part.vectors is not None]
        self._drop_failed(in_flight)
        in_flight.sampled = joined([part.sampled for part in parts if part.sampled is not None])
        rows = {slices[index].request: row for row, index in enumerate(in_flight.chosen)}
        self._sampled, self._rows = in_flight.sampled, rows

    def _halved(self, slices: Sequence[Slice], going: Sequence[int], in_flight: InFlightStep) -> list[_Part]:
        # A second attempt would find states of tokens that the first one has computed.
        is_last = len(going) == 1 or self.store.states is not None
        try:
            return [self._attempt(in_flight, going)]
        except Exception as error:
            # Other ranks would still run the whole step.
            if not self._alone or not is_out_of_memory(error):
                raise
            for index in going if is_last else ():
                in_flight.dropped[index] = out_of_memory(slices[index], error)
                in_flight.states[index].is_dropped = True
        self.halvings += 1
        # After the except block, whose traceback keeps the attempt's tensors alive.
        torch.cuda.empty_cache()
        if is_last:
            return []
        return [part for half in halves(slices, going) for part in self._halved(slices, half, in_flight)]

    def _drop_without_adapter(self, slices: Sequence[Slice], in_flight: InFlightStep) -> None:
        """Drop slices whose adapter could not be loaded again after a restart."""
        loaded = self.model.adapters.bytes
        for index, slice_ in enumerate(slices):
            if (adapter := slice_.request.options.adapter) and adapter not in loaded:
                in_flight.dropped[index] = "the adapter of the request is not loaded"
                in_flight.states[index].is_dropped = True

    @staticmethod
    def _drop_failed(in_flight: InFlightStep) -> None:
        """Drop slices whose token could not be chosen. A placeholder remains, because later slices may await it."""
        for index in in_flight.chosen:
            sampling = in_flight.states[index].sampling
            if sampling is not None and sampling.error:
                in_flight.dropped[index] = sampling.error
                if sampling.is_over_limit:
                    in_flight.refused.append(index)

    def _state_of(self, request: Request) -> RequestState:
        state = self._states.get(request)
        if state is None:
            sampling: Sampling = request.sampling  # type: ignore[assignment]
            if sampling.params.structured_outputs is not None and not self._has_grammars:
                raise ValueError(f"request {request.id} has structured outputs, and this worker has no grammars")
            started = None
            if self.model.shard.is_last and self._pooler is None:
                started = self._sampler.start(
                    sampling.params,
                    sampling.seed,
                    request.prompt,
                    sampling.eos_token_ids,
                    limit=self._limit_of(request),
                )
            state = self._states[request] = RequestState(started)
        return state

    def _attempt(self, in_flight: InFlightStep, going: Sequence[int]) -> _Part:
        part, states = _Part(), in_flight.states
        selected = [in_flight.plan.slices[index] for index in going]
        segments = [self._segment(slice_) for slice_ in selected]
        if self._pooler is not None:
            part.vectors = self._pool(self._pooler, selected, segments, [states[index] for index in going], going)
            return part
        if self.store.states is not None:
            segments = [self._with_state(in_flight.plan, *pair) for pair in zip(going, segments, strict=True)]
        chosen = [at for at, slice_ in enumerate(selected) if slice_.samples]
        if any(segment.all_logits for segment in segments):
            logits = self._score(selected, segments, chosen, part)
            part.scores = [(going[at], scores) for at, scores in part.scores]
        else:
            logits = self._forward(segments)
        if chosen and self.model.shard.is_last:
            rows = [self._sample_row(selected[at], states[going[at]].sampling) for at in chosen]
            part.sampled = self._sampler.sample(logits, rows)
            part.chosen = [going[at] for at in chosen]
        return part

    def _pool(
        self,
        pooler: Pooler,
        selected: Sequence[Slice],
        segments: Sequence[Segment],
        states: Sequence[RequestState],
        going: Sequence[int],
    ) -> Vectors | None:
        batch = pooler.typed(self._packed(segments), selected)
        rows = self.model.wanted_rows(batch, self.store.device)
        if not self.model.shard.is_last:
            return None
        return pooler.pool(list(zip(going, selected, states, strict=True)), rows, batch.row_starts)

    def _score(
        self, selected: Sequence[Slice], segments: Sequence[Segment], chosen: Sequence[int], part: _Part
    ) -> torch.Tensor:
        """Score prompts a few rows at a time: logits of a whole prompt may take more memory than the step."""
        batch = self._packed(segments)
        rows = self.model.wanted_rows(batch, self.store.device)
        if not self.model.shard.is_last:
            return rows
        each = zip(selected, segments, batch.row_starts, batch.row_starts[1:], strict=False)
        for at, (slice_, segment, first, end) in enumerate(each):
            if segment.all_logits:
                part.scores.append((at, score_prompt(slice_, rows[first:end], self.model.logits)))
        if not chosen:
            return rows
        # The last row of a segment predicts the next token.
        last = send([batch.row_starts[at + 1] - 1 for at in chosen], rows.device, torch.int64)
        return self.model.logits(rows[last])

    def _forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        sampled = self._sampled.tokens if self._sampled is not None else None
        if self._graphs is not None and self._graphs.fits(segments, sampled):
            return self._graphs.run(segments, sampled)[1]
        rows = self.model.wanted_rows(self._packed(segments), self.store.device)
        return self.model.logits(rows) if len(rows) else rows

    def _packed(self, segments: Sequence[Segment]) -> PackedBatch:
        batch = PackedBatch.build(segments, self.store.device.block_size, self.model.device)
        if self._sampled is not None:
            batch.fill_in(self._sampled.tokens)
        return batch

    def _segment(self, slice_: Slice) -> Segment:
        request, start, end = slice_.request, slice_.start, slice_.start + slice_.tokens
        row = None
        if slice_.awaits:
            if (stages := self.model.shard.pp_size) > 1:
                raise ValueError(
                    f"request {request.id} awaits a token that only the last of {stages} stages samples: "
                    "with stages, plans must not overlap"
                )
            row, end = self._rows[request], end - 1
        return Segment(
            request.tokens(start, end) if end > start else (),
            start,
            slice_.blocks,
            slice_.samples,
            all_logits=wants_scores(slice_) if self._pooler is None else self._pooler.reads_all,
            awaits=row,
            reverse=request.progress.reverse,
            adapter=request.options.adapter,
        )

    def _with_state(self, plan: StepPlan, index: int, segment: Segment) -> Segment:
        assert self.store.states is not None
        if plan.states is None:  # a measurement, which does not read the result
            return segment._replace(state=index % self.store.states.device)
        captures = [(tokens, slot) for of, tokens, slot in plan.states.captured if of == index]
        return segment._replace(state=plan.states.slots[index], captures=captures)

    def _sample_row(self, slice_: Slice, state: SamplingState | None) -> SampleRow:
        assert state is not None
        request = slice_.request
        length = slice_.start + slice_.tokens - len(request.prompt)
        if state.reads_output:
            # The engine may append during this call, so take only the tokens before this slice's end.
            tokens = request.progress.output[state.length : length - slice_.awaits]
            if slice_.awaits and state.length < length:
                tokens.append(self._awaited(request))
            state.accept(tokens)
            assert state.length == length, "no plan samples before a token that an earlier plan sampled"
        return SampleRow(state, length)

    def _awaited(self, request: Request) -> int:
        assert self._sampled is not None
        return self._sampled.report.read()[self._rows[request]].token


def _sampler(model: CausalLM, grammars: Grammars | None) -> Sampler:
    vocab_size = model.config.vocab_size
    limit = None if grammars is None else GrammarMask(grammars)
    if model.ops.name != "triton":
        return Sampler(vocab_size, limit=limit)
    # Imported lazily: Triton is optional.
    from skipjoin.model.kernels.thresholds import bisected_thresholds  # noqa: PLC0415

    return Sampler(vocab_size, bisected_thresholds, limit=limit)


def halves(slices: Sequence[Slice], going: Sequence[int]) -> tuple[list[int], list[int]]:
    ordered = sorted(going, key=lambda index: (memory_rank(slices[index]), index), reverse=True)
    left, count = sum(slices[index].tokens for index in going) / 2, 0
    while left > 0 and count < len(ordered) - 1:
        left -= slices[ordered[count]].tokens
        count += 1
    return sorted(ordered[:count]), sorted(ordered[count:])


def memory_rank(slice_: Slice) -> tuple[bool, int, int]:
    return wants_scores(slice_), slice_.tokens, slice_.start


def out_of_memory(slice_: Slice, error: Exception) -> str:
    _log.error("out of memory in a step: request %s is dropped: %s", slice_.request.id, error)
    tokens = f"{slice_.tokens} token{'s' if slice_.tokens > 1 else ''}"
    return (
        f"the device ran out of memory in a step with {tokens} of this request; a lower --max-num-batched-tokens, "
        "--max-num-seqs or --gpu-memory-utilization leaves more for steps"
    )
