"""Carrying out plans on one rank: the moves, the model's step, the sampling."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from skipjoin.core.request import Request
from skipjoin.core.step import PAUSE_S, Move, Slice, StageTime, StepPlan, StepResult
from skipjoin.exec.kv_store import KVStore
from skipjoin.exec.transfer import Copier, Ended, copier_for
from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.sampler import Sampled, Sampler, SampleRow, prompt_logprobs
from skipjoin.sampling import SamplingParams, Scored, TokenDetail


class Sampling(NamedTuple):
    """What `Request.sampling` holds for executors that run a model: the user's parameters, and this request's seed."""

    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...]


class Worker:
    """Runs plans one after the other with what one rank has of the model and of the KV. One thread makes all calls but
    `close`.

    All ranks run the same plans. A stage makes a plan's `before` moves while the one before it still computes
    (FastServe section 4.3). Every rank of the last stage samples, and all of them the same tokens: they are a function
    of logits, seed and position. So a slice that awaits a token finds it where the stage that samples is also the one
    that embeds. With several stages no slice may await one: whoever decides must know a token before it plans the next.

    Every request's `sampling` is a `Sampling`. copier: of `beside` moves, which are handed to it when their plan's turn
    comes, not before: they may write where an earlier plan's moves still read. None: the one that suits the store.
    Without a host pool there is none.
    """

    def __init__(self, model: CausalLM, store: KVStore, *, copier: Copier | None = None) -> None:
        self.model = model
        self.store = store
        self._copier = copier or (copier_for(store) if store.host is not None else None)
        self._sampler = Sampler(model.config.vocab_size)
        # Tokens that the latest plan sampled, for slices of the next one that await them.
        self._sampled: dict[Request, int] = {}
        # Scores of prompt tokens, until the request's first generated token carries them away.
        self._prompt_scores: WeakKeyDictionary[Request, list[Scored]] = WeakKeyDictionary()
        self._ended: float | None = None  # when the plan before was done

    def run(self, plan: StepPlan) -> StepResult:
        """Carry out a plan. The result has tokens if this rank samples; its seconds are those in which this rank did
        not wait for the stage before, and its `stages`, if there are several, are this rank's own time alone. Raises
        ValueError for a plan that cannot be carried out here, and `GroupError`.
        """
        if self._copier is None and (plan.before or plan.beside):
            raise ValueError(f"plan {plan.id} moves KV blocks, but there is no host pool")
        group = self.model.group
        start, waited = time.perf_counter(), group.waited_s
        ended = self._move(plan.before)
        moving = time.perf_counter() - start if plan.before else 0.0
        if self._copier is not None and plan.beside:
            self._copier.begin(plan.beside)
        tokens: list[int | None] = [None] * len(plan.slices)
        details: dict[int, object] = {}
        if plan.slices:
            self._compute(plan.slices, tokens, details)
        end, waited = time.perf_counter(), group.waited_s - waited
        seconds = end - start - waited
        idle = waited + start - self._ended if self._ended is not None else 0.0
        self._ended = end
        if self._copier is not None:
            more = self._copier.landed(0.0 if plan.slices or plan.before else PAUSE_S)
            ended.landed.extend(more.landed)
            ended.failed.extend(more.failed)
        stages = (StageTime(seconds, idle),) if group.shard.pp_size > 1 else ()
        return StepResult(plan, tokens, seconds, details, moving, *ended, stages=stages)

    def close(self) -> None:
        """Wait for the running copy; moves that have not begun are dropped. Nothing may be called afterwards."""
        if self._copier is not None:
            self._copier.close()

    def _move(self, moves: Sequence[Move]) -> Ended:
        """Carry out moves that the step waits for."""
        return self._copier.run_before(moves) if self._copier is not None else Ended([], [])

    def _compute(self, slices: Sequence[Slice], tokens: list[int | None], details: dict[int, object]) -> None:
        """Run the slices; fill in the sampled tokens and their details."""
        segments = [self._segment(piece) for piece in slices]
        batch = PackedBatch.build(segments, self.store.device.block_size, self.model.device)
        logits = self.model.forward(batch, self.store.device)
        if not self.model.shard.is_last:
            return
        for index, (piece, segment) in enumerate(zip(slices, segments, strict=True)):
            if segment.all_logits:
                self._score_prompt(piece, logits[batch.row_starts[index] : batch.row_starts[index + 1]])
        chosen = [index for index, piece in enumerate(slices) if piece.samples]
        if len(chosen) < batch.num_rows:
            # A segment's last row is the one that predicts the next token.
            logits = logits[[batch.row_starts[index + 1] - 1 for index in chosen]]
        sampled = self._sampler.sample(logits, [self._sample_row(slices[index]) for index in chosen]) if chosen else []
        self._sampled = {}
        for index, sample in zip(chosen, sampled, strict=True):
            request = slices[index].request
            tokens[index] = self._sampled[request] = sample.token
            if sample.logprob is not None or request in self._prompt_scores:
                details[index] = self._detail(request, sample)

    def _segment(self, piece: Slice) -> Segment:
        request, start, count, samples, awaits, blocks = piece
        end = start + count - awaits
        tokens = request.tokens(start, end)
        if awaits:
            if (stages := self.model.shard.pp_size) > 1:
                raise ValueError(
                    f"request {request.id} awaits a token that only the last of {stages} stages samples: "
                    "with stages, plans must not overlap"
                )
            tokens.append(self._sampled[request])
        wants_prompt = _params(request).prompt_logprobs is not None and start < len(request.prompt)
        return Segment(tokens, start, blocks, samples, wants_prompt and not request.output)

    def _sample_row(self, piece: Slice) -> SampleRow:
        request = piece.request
        sampling: Sampling = request.sampling  # type: ignore[assignment]
        # The engine may append to `output` while this runs: cut it where this slice ends.
        output = request.output[: piece.start + piece.tokens - len(request.prompt) - piece.awaits]
        if piece.awaits:
            output.append(self._sampled[request])
        return SampleRow(sampling.params, sampling.seed, request.prompt, output, sampling.eos_token_ids)

    def _score_prompt(self, piece: Slice, logits: torch.Tensor) -> None:
        """Score the prompt tokens that the slice's rows predict. logits: one row per token of the slice."""
        request, start = piece.request, piece.start
        known = self._prompt_scores.setdefault(request, [Scored(request.prompt[0], None)])
        targets = list(request.prompt[start + 1 : start + 1 + piece.tokens])
        scores = prompt_logprobs(logits[: len(targets)], targets, _params(request).prompt_logprobs or 0)
        # Recomputed after an eviction, a chunk is scored again, with the same outcome.
        known[start + 1 :] = [
            Scored(token, score.logprob, score.top) for token, score in zip(targets, scores, strict=True)
        ]

    def _detail(self, request: Request, sample: Sampled) -> TokenDetail:
        prompt = tuple(self._prompt_scores.pop(request, ()))
        return TokenDetail(Scored(sample.token, sample.logprob, sample.top), prompt)


def _params(request: Request) -> SamplingParams:
    sampling: Sampling = request.sampling  # type: ignore[assignment]
    return sampling.params
