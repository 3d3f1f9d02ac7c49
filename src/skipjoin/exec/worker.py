"""Carrying out plans on one rank: the moves, the model's step, the sampling."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from skipjoin.core.request import Request
from skipjoin.core.step import PAUSE_S, Slice, StageTime, StepPlan, StepResult
from skipjoin.exec.clocks import DeviceClock, HostClock, Mark
from skipjoin.exec.graphs import DecodeGraphs
from skipjoin.exec.kv_store import KVStore
from skipjoin.exec.prompt_scores import PromptScores, score_prompt, wants_scores
from skipjoin.exec.sampling import Sampling
from skipjoin.exec.transfer import Copier, Ended, copier_for
from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.sampler import PromptLogprob, SampledTokens, Sampler, SampleRow, needs_output
from skipjoin.model.transfer import HostCopy, send
from skipjoin.sampling import Scored, TokenDetail

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class InFlightStep:
    """A plan whose work is queued on the device, or done on a CPU.

    chosen: slices that sample, by index, in the order of `drawn`'s rows. given_up: see `StepResult`. scores: prompt
    scores of slices.
    """

    plan: StepPlan
    start: Mark
    ended: Ended
    moving: tuple[Mark, Mark] | None = None
    chosen: list[int] = field(default_factory=list)
    drawn: SampledTokens | None = None
    scores: list[tuple[Slice, HostCopy[list[PromptLogprob]]]] = field(default_factory=list)
    given_up: dict[int, str] = field(default_factory=dict)
    end: Mark | None = None
    stages: tuple[StageTime, ...] = ()
    waited: float = 0.0


class Worker:
    """Runs plans one after the other with what one rank has of the model and of the KV.

    `begin` queues a plan's work and returns; `finish` waits for it and reads what came of it. On a CPU all is done when
    `begin` returns. A plan may begin before the one before it is finished: what that one samples stays on the device,
    where the next finds it. One thread makes all calls of `begin`, one all calls of `finish`, in the same order.

    All ranks run the same plans. A stage makes a plan's blocking moves while the one before it still computes
    (FastServe section 4.3). Every rank of the last stage samples, and all of them the same tokens: they are a function
    of logits, seed and position. So a slice that awaits a token finds it where the stage that samples is also the one
    that embeds. With several stages no slice may await one: whoever decides must know a token before it plans the next.

    Every request's `sampling` is a `Sampling`. copier: of overlapped moves, which it gets when their plan's turn
    comes, not before: they may write where an earlier plan's moves still read. None: the one that suits the store.
    Without a host pool there is none. graphs: for the steps that fit them.
    """

    def __init__(
        self, model: CausalLM, store: KVStore, *, copier: Copier | None = None, graphs: DecodeGraphs | None = None
    ) -> None:
        self.model = model
        self.store = store
        self._graphs = graphs
        self._copier = copier or (copier_for(store) if store.host is not None else None)
        self._sampler = _sampler(model)
        # Several ranks wait for each other on the host, so that theirs is the clock there.
        self._alone = model.shard.ranks == 1
        on_device = self._alone and model.device.type == "cuda"
        self._clock = DeviceClock(model.device) if on_device else HostClock(model.device)
        # What the latest plan sampled, and in which row for whom: for slices of the next one that await it. Whether it
        # gave a slice up.
        self._drawn: SampledTokens | None = None
        self._rows: dict[Request, int] = {}
        self._has_given_up = False
        self._prompts = PromptScores()
        self._ended: float | None = None  # when the plan before was done, on the host's clock

    def run(self, plan: StepPlan) -> StepResult:
        """Carry out a plan: `begin`, then `finish`."""
        return self.finish(self.begin(plan))

    def begin(self, plan: StepPlan) -> InFlightStep:
        """Queue a plan's moves, its step and its sampling. Raises ValueError for a plan that cannot be carried out
        here, and `GroupError`."""
        if self._copier is None and (plan.blocking or plan.overlapped):
            raise ValueError(f"plan {plan.id} moves KV blocks, but there is no host pool")
        waited = self.model.group.waited_s
        begun = InFlightStep(plan, self._clock.mark(), Ended([], []))
        if self._copier is not None and plan.blocking:
            begun.ended = self._copier.run_blocking(plan.blocking)
            begun.moving = begun.start, self._clock.mark()
        if self._copier is not None and plan.overlapped:
            self._copier.begin(plan.overlapped)
        if plan.slices:
            self._compute(plan.slices, begun)
        begun.end = self._clock.mark()
        begun.waited = self.model.group.waited_s - waited
        begun.stages = self._stage_times(begun)
        if self._copier is not None:
            more = self._copier.landed(0.0 if plan.slices or plan.blocking else PAUSE_S)
            begun.ended.landed.extend(more.landed)
            begun.ended.failed.extend(more.failed)
        return begun

    def finish(self, begun: InFlightStep) -> StepResult:
        """Wait for a plan's work. The result has tokens if this rank samples; its seconds are those in which this rank
        did not wait for the stage before, and its `stages`, if there are several, are this rank's own time alone."""
        plan, drawn = begun.plan, begun.drawn
        tokens: list[int | None] = [None] * len(plan.slices)
        details: dict[int, object] = {}
        for piece, scores in begun.scores:
            self._prompts.keep(piece, scores.read())
        for index, sample in zip(begun.chosen, drawn.report.read() if drawn is not None else (), strict=True):
            request = plan.slices[index].request
            tokens[index] = sample.token
            prompt = self._prompts.take(request)
            if sample.logprob is not None or prompt:
                details[index] = TokenDetail(Scored(sample.token, sample.logprob, sample.top), prompt)
        assert begun.end is not None
        seconds = self._clock.between(begun.start, begun.end) - begun.waited
        moving = self._clock.between(*begun.moving) if begun.moving is not None else 0.0
        return StepResult(
            plan=plan,
            tokens=tokens,
            seconds=seconds,
            details=details,
            moving=moving,
            landed=begun.ended.landed,
            failed=begun.ended.failed,
            stages=begun.stages,
            given_up=begun.given_up,
        )

    def is_done(self, begun: InFlightStep) -> bool:
        """Whether `finish` would return at once."""
        assert begun.end is not None
        return self._clock.is_past(begun.end)

    def close(self) -> None:
        """Wait for the running copy; moves that have not begun are dropped. Nothing may be called afterwards."""
        if self._copier is not None:
            self._copier.close()

    def _stage_times(self, begun: InFlightStep) -> tuple[StageTime, ...]:
        """This rank's part in a pipeline's step; several ranks have the host's clock."""
        if self.model.shard.pp_size == 1:
            return ()
        start, end = begun.start, begun.end
        assert isinstance(start, float)
        assert isinstance(end, float)
        idle = begun.waited + start - self._ended if self._ended is not None else 0.0
        self._ended = end
        return (StageTime(end - start - begun.waited, idle),)

    def _compute(self, slices: Sequence[Slice], begun: InFlightStep) -> None:
        """Run the slices. Where the device has no memory for all of them, the largest is given up and the others run:
        what they compute does not depend on each other."""
        going = list(range(len(slices)))
        if self._has_given_up:
            going = [index for index in going if not self._is_orphan(slices[index], index, begun)]
        drawn, rows = None, {}
        while going:
            try:
                drawn, rows = self._attempt(slices, going, begun)
                break
            except torch.OutOfMemoryError as error:
                if not self._alone:  # the other ranks would go on with it
                    raise
                victim = max(going, key=lambda index: (slices[index].tokens, slices[index].start, index))
                begun.given_up[victim] = _out_of_memory(slices[victim], error)
                going.remove(victim)
            # Outside of the handler, whose traceback holds the tensors of the attempt.
            torch.cuda.empty_cache()
        self._drawn, self._rows, self._has_given_up = drawn, rows, bool(begun.given_up)

    def _is_orphan(self, piece: Slice, index: int, begun: InFlightStep) -> bool:
        """Whether a slice awaits a token that will not come, since the one that was to sample it was given up."""
        if piece.awaits and piece.request not in self._rows:
            begun.given_up[index] = "the step before gave this request up"
            return True
        return False

    def _attempt(
        self, slices: Sequence[Slice], going: Sequence[int], begun: InFlightStep
    ) -> tuple[SampledTokens | None, dict[Request, int]]:
        """Run those of the slices that are going; what they sampled, in which row for whom."""
        # An attempt that failed may have left some.
        begun.scores, begun.chosen, begun.drawn = [], [], None
        pieces = [slices[index] for index in going]
        segments = [self._segment(piece) for piece in pieces]
        batch, logits = self._forward(segments)
        if not self.model.shard.is_last:
            return None, {}
        for piece, segment, first, end in zip(pieces, segments, batch.row_starts, batch.row_starts[1:], strict=False):
            if segment.all_logits:
                begun.scores.append((piece, score_prompt(piece, logits[first:end])))
        chosen = [at for at, piece in enumerate(pieces) if piece.samples]
        if not chosen:
            return None, {}
        if len(chosen) < len(logits):
            # A segment's last row is the one that predicts the next token.
            logits = logits[send([batch.row_starts[at + 1] - 1 for at in chosen], logits.device)]
        begun.drawn = self._sampler.sample(logits, [self._sample_row(pieces[at]) for at in chosen])
        begun.chosen = [going[at] for at in chosen]
        return begun.drawn, {pieces[at].request: row for row, at in enumerate(chosen)}

    def _forward(self, segments: Sequence[Segment]) -> tuple[PackedBatch, torch.Tensor]:
        """The batch of these segments, and the logits of the rows that it wants."""
        sampled = self._drawn.tokens if self._drawn is not None else None
        if self._graphs is not None and self._graphs.fits(segments, sampled):
            return self._graphs.run(segments, sampled)
        pool = self.store.device
        batch = PackedBatch.build(segments, pool.block_size, self.model.device)
        if sampled is not None:
            batch.fill_in(sampled)
        return batch, self.model.forward(batch, pool)

    def _segment(self, piece: Slice) -> Segment:
        request, start, end = piece.request, piece.start, piece.start + piece.tokens
        if not piece.awaits:
            known: Sequence[int] = request.tokens(start, end)
            return Segment(known, start, piece.blocks, piece.samples, all_logits=wants_scores(piece))
        if (stages := self.model.shard.pp_size) > 1:
            raise ValueError(
                f"request {request.id} awaits a token that only the last of {stages} stages samples: "
                "with stages, plans must not overlap"
            )
        known = request.tokens(start, end - 1) if piece.tokens > 1 else ()
        row = self._rows[request]
        return Segment(known, start, piece.blocks, piece.samples, all_logits=wants_scores(piece), awaits=row)

    def _sample_row(self, piece: Slice) -> SampleRow:
        request = piece.request
        sampling: Sampling = request.sampling  # type: ignore[assignment]
        length = piece.start + piece.tokens - len(request.prompt)
        # Mostly nothing matters but how many there are.
        output: Sequence[int] = range(length)
        if needs_output(sampling.params):
            # The engine may append while this runs: cut it where this slice ends.
            output = request.output[: length - piece.awaits]
            if piece.awaits:
                output.append(self._awaited(request))
        return SampleRow(
            params=sampling.params,
            seed=sampling.seed,
            prompt=request.prompt,
            output=output,
            eos_token_ids=sampling.eos_token_ids,
        )

    def _awaited(self, request: Request) -> int:
        """The token that the plan before sampled for a request; waits for it."""
        assert self._drawn is not None
        return self._drawn.report.read()[self._rows[request]].token


def _sampler(model: CausalLM) -> Sampler:
    if model.ops.name != "triton":
        return Sampler(model.config.vocab_size)
    # Only where there is Triton.
    from skipjoin.model.kernels.thresholds import bisected_thresholds  # noqa: PLC0415

    return Sampler(model.config.vocab_size, bisected_thresholds)


def _out_of_memory(piece: Slice, error: Exception) -> str:
    """What to tell of a slice that was given up."""
    _log.error("out of memory in a step: request %s is given up: %s", piece.request.id, error)
    tokens = f"{piece.tokens} token{'s' if piece.tokens > 1 else ''}"
    return (
        f"the device ran out of memory in a step with {tokens} of this request; a lower --max-num-batched-tokens, "
        "--max-num-seqs or --gpu-memory-utilization leaves more for steps"
    )
