"""Sampling: from logits to tokens.

A token's random number is a hash of the request's seed and the token's position, so neighbors in the batch, preemption
and restarts cannot change a seeded output.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from skipjoin.model.draws import FindThresholds, draw, largest_first, uniform
from skipjoin.model.large_pages import large_page_bytes
from skipjoin.model.logits_processors import Asked, LogitsProcessor, ProcessorState, default_processors
from skipjoin.model.ops.token_mask import mask_ops
from skipjoin.model.transfer import CpuCopy, send
from skipjoin.sampling import SamplingParams

if TYPE_CHECKING:
    from skipjoin.model.grammar_mask import GrammarMask, GrammarState  # imports the compiler of grammars

# Tokens per group in the search for the likeliest, which sorts the maxima of all groups and the tokens of the best
# groups. With 64, a large vocabulary has about as many groups as 20 groups have tokens.
_GROUP = 64
_MAX_ID = (1 << 32) - 1
# Rows of prompt scores at a time: each needs a copy of the vocabulary's logits.
_SCORED_ROWS = 256
Alternatives = tuple[tuple[int, float], ...]


class SamplingState:
    """Sampling state of one request.

    Attributes:
        length: Number of output tokens accepted so far; stays 0 without `reads_output`.
        reads_output: Whether the next token depends on the output tokens, not only on their number.
    """

    __slots__ = ("_states", "adjustments", "length", "limit", "params", "prompt_tokens", "reads_output", "seed")

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt_tokens: int,
        adjustments: tuple[tuple[int, ProcessorState], ...],
        limit: GrammarState | None = None,
    ) -> None:
        self.params, self.seed, self.prompt_tokens = params, seed, prompt_tokens
        self.adjustments = adjustments  # by the processor's index
        self.limit = limit
        self._states = [*(state for _, state in adjustments), *([] if limit is None else [limit])]
        self.reads_output = any(state.reads_output for state in self._states)
        self.length = 0

    def accept(self, tokens: Sequence[int]) -> None:
        for state in self._states:
            if state.reads_output:
                state.accept(tokens)
        self.length += len(tokens)

    @property
    def error(self) -> str:
        return next((state.error for state in self._states if state.error), "")

    @property
    def is_over_limit(self) -> bool:
        return any(state.is_over_limit for state in self._states)


class SampleRow(NamedTuple):
    state: SamplingState
    length: int


class Sampled(NamedTuple):
    """Sampled token, its natural log-probability, and the likeliest alternatives, best first."""

    token: int
    logprob: float | None = None
    top: Alternatives = ()


class _Limits(NamedTuple):
    """Rows with a limit of tokens, ascending, their masks, int32 [len(rows), words], and the rows that must end."""

    rows: list[int]
    masks: np.ndarray
    ending: frozenset[int] = frozenset()

    def within(self, rows: Collection[int]) -> _Limits:
        kept = [at for at, row in enumerate(self.rows) if row in rows]
        return self if len(kept) == len(self.rows) else _Limits([self.rows[at] for at in kept], self.masks[kept])


_NO_LIMITS = _Limits([], np.empty((0, 0), np.int32))


class SampledTokens(NamedTuple):
    tokens: torch.Tensor
    report: CpuCopy[list[Sampled]]


def joined(parts: Sequence[SampledTokens]) -> SampledTokens | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    tokens = torch.cat([part.tokens for part in parts])
    return SampledTokens(tokens, JoinedReports([part.report for part in parts]))


class JoinedReports(CpuCopy[list[Sampled]]):
    def __init__(self, parts: Sequence[CpuCopy[list[Sampled]]]) -> None:
        self._parts = parts

    def read(self) -> list[Sampled]:
        return [sampled for part in self._parts for sampled in part.read()]


class PromptLogprob(NamedTuple):
    """Log-probability of a given token, the likeliest alternatives, and its rank (1 is likeliest)."""

    logprob: float
    top: Alternatives
    rank: int


class Sampler:
    """Samples next tokens.

    Args:
        find_thresholds: Implements top_k and top_p; None makes the CPU wait for a GPU.
        processors: Applied in this order, before `limit`; None for those of `SamplingParams`.
    """

    def __init__(
        self,
        vocab_size: int,
        find_thresholds: FindThresholds | None = None,
        processors: Sequence[LogitsProcessor] | None = None,
        limit: GrammarMask | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self._find_thresholds = find_thresholds or largest_first
        self._processors = default_processors(vocab_size) if processors is None else tuple(processors)
        self._limit = limit
        self._widened = torch.empty(0)

    def start(
        self,
        params: SamplingParams,
        seed: int,
        prompt: Sequence[int],
        eos_token_ids: Collection[int] = (),
        *,
        limit: GrammarState | None = None,
    ) -> SamplingState:
        asked = Asked(params, prompt, eos_token_ids)
        made = enumerate(processor.start(asked) for processor in self._processors)
        adjustments = tuple((number, state) for number, state in made if state is not None)
        if limit is None and self._limit is not None:
            limit = self._limit.start(params, prompt, eos_token_ids)
        return SamplingState(params, seed, len(prompt), adjustments, limit)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> SampledTokens:
        """Sample one token per row of logits, which may change. Logprobs are those of the unmodified logits."""
        if logits.shape != (len(rows), self.vocab_size):
            raise ValueError(f"logits are {tuple(logits.shape)}; the rows need {(len(rows), self.vocab_size)}")
        if not rows:
            return SampledTokens(logits.new_empty(0, dtype=torch.int64), CpuCopy([], lambda _: []))
        logits = logits.contiguous()
        params = [row.state.params for row in rows]
        limits = self._limits(rows)
        if not limits.rows and all(self._is_plain(row) for row in rows):
            tokens = mask_ops(logits.device).best(logits)
            return SampledTokens(tokens, _report(logits, tokens, params))
        logits = self._as_floats(logits)
        # An output that must end is not drawn, because other tokens have no probability.
        random = [i for i, param in enumerate(params) if param.temperature > 0 and i not in limits.ending]
        limited_random = limits.within(set(random))
        adjusted = self._adjusted(logits, rows, has_removals=bool(limited_random.rows))
        if limited_random.rows:
            mask_ops(logits.device).remove_tokens(adjusted, limited_random.rows, limited_random.masks)
        if len(random) == len(rows):
            tokens = self._draw(adjusted, rows)
        else:
            tokens = _likeliest_of(adjusted, limits.within(set(range(len(rows))).difference(random)))
            if random:
                index = send(random, logits.device)
                tokens[index] = self._draw(adjusted[index], [rows[i] for i in random])
        return SampledTokens(tokens, _report(logits, tokens, params))

    @staticmethod
    def _is_plain(row: SampleRow) -> bool:
        state, length = row
        if state.params.temperature > 0 or state.params.logprobs is not None:
            return False
        return not any(adjustment.is_active(length) for _, adjustment in state.adjustments)

    def _as_floats(self, logits: torch.Tensor) -> torch.Tensor:
        if logits.dtype == torch.float32 or logits.device.type != "cpu":
            return logits.float()
        # New memory of this size comes from the system page by page, which takes longer than the step of a small model.
        if self._widened.numel() < logits.numel():
            self._widened = large_page_bytes(4 * logits.numel()).view(torch.float32)
        return self._widened[: logits.numel()].view(logits.shape).copy_(logits)

    def _draw(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        uniforms = [uniform(state.seed, state.prompt_tokens + length) for state, length in rows]
        return draw(logits, [row.state.params for row in rows], uniforms, self._find_thresholds)

    def _limits(self, rows: Sequence[SampleRow]) -> _Limits:
        states = [(i, row.state.limit) for i, row in enumerate(rows) if row.state.limit is not None]
        active = [(i, state) for i, state in states if state.is_active(rows[i].length)]
        if self._limit is None or not active:
            return _NO_LIMITS
        masks, must_end = self._limit.masks([state for _, state in active])
        numbers = [i for i, _ in active]
        return _Limits(numbers, masks, frozenset(itertools.compress(numbers, must_end)))

    def _adjusted(self, logits: torch.Tensor, rows: Sequence[SampleRow], *, has_removals: bool) -> torch.Tensor:
        active: dict[int, list[tuple[int, ProcessorState]]] = {}
        for i, (state, length) in enumerate(rows):
            for number, adjustment in state.adjustments:
                if adjustment.is_active(length):
                    active.setdefault(number, []).append((i, adjustment))
        has_report = any(row.state.params.logprobs is not None for row in rows)
        if has_report and (active or has_removals):
            logits = logits.clone()
        for number in sorted(active):
            self._processors[number].apply(logits, active[number])
        return logits


@torch.inference_mode()
def prompt_logprobs(
    rows: torch.Tensor,
    targets: Sequence[int],
    k: int,
    logits_of: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits,
) -> CpuCopy[list[PromptLogprob]]:
    """Compute the logprobs of `targets` and `k` alternatives; `logits_of` maps `_SCORED_ROWS` rows at most."""
    if not len(targets):
        return CpuCopy([], lambda _: [])
    index = send(targets, rows.device, torch.int64)[:, None]
    parts = zip(rows.split(_SCORED_ROWS), index.split(_SCORED_ROWS), strict=True)
    scored = [_scored(logits_of(part), wanted, k) for part, wanted in parts]

    def build(tensors: list[torch.Tensor]) -> list[PromptLogprob]:
        chosen, ranks, ids, values = tensors
        rows = zip(chosen.tolist(), _alternatives(ids, values), ranks.tolist(), strict=True)
        return [PromptLogprob(logprob, top, rank) for logprob, top, rank in rows]

    return CpuCopy([torch.cat(parts) for parts in zip(*scored, strict=True)], build)


def _scored(logits: torch.Tensor, index: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    logits = logits.float()
    ids, ranks = _likeliest(logits, k), (logits > logits.gather(1, index)).sum(-1) + 1
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(1, index)[:, 0], ranks, ids, logprobs.gather(1, ids)


def _likeliest(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Return the ids of the `k` largest logits, best first, then by id: int64 [n, min(k, vocab)].

    `topk` alone orders equal values depending on `k`. In log-probabilities, rounding can make different logits equal.
    """
    n, vocab = logits.shape
    groups = vocab // _GROUP
    grouped, device = groups * _GROUP, logits.device
    # Each of the k first tokens is in one of the k first groups, or behind the last whole group.
    maxima = logits[:, :grouped].reshape(n, groups, _GROUP).amax(-1)
    first = _first(maxima, torch.arange(groups, device=device), min(k, groups))
    ids = (first[:, :, None] * _GROUP + torch.arange(_GROUP, device=device)).flatten(1)
    ids = torch.cat([ids, torch.arange(grouped, vocab, device=device).expand(n, -1)], 1)
    return _first(logits.gather(1, ids), ids, min(k, vocab))


def _first(values: torch.Tensor, ids: torch.Tensor, count: int) -> torch.Tensor:
    bits = (values + 0.0).view(torch.int32)  # makes 0 and -0 equal
    ordered = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()  # sorts like the values
    return ~(ordered << 32 | _MAX_ID - ids).topk(count).values & _MAX_ID


def _likeliest_of(logits: torch.Tensor, limits: _Limits) -> torch.Tensor:
    if not limits.rows:
        return mask_ops(logits.device).best(logits)
    best = mask_ops(logits.device).best_allowed(logits, limits.rows, limits.masks)
    if len(limits.rows) == len(logits):
        return best
    tokens = mask_ops(logits.device).best(logits)
    tokens[send(limits.rows, logits.device)] = best
    return tokens


def _report(logits: torch.Tensor, tokens: torch.Tensor, params: Sequence[SamplingParams]) -> CpuCopy[list[Sampled]]:
    wanted = [i for i, param in enumerate(params) if param.logprobs is not None]
    if not wanted:
        return CpuCopy([tokens], lambda host: [Sampled(token) for token in host[0].tolist()])
    if len(wanted) == len(params):
        scored, reported = logits, tokens
    else:
        index = send(wanted, logits.device)
        scored, reported = logits[index], tokens[index]
    logprobs = scored.log_softmax(-1)
    chosen = logprobs.gather(1, reported[:, None])[:, 0]
    best = _likeliest(scored, max(params[i].logprobs or 0 for i in wanted))
    counts = [params[i].logprobs for i in wanted]

    def build(host: list[torch.Tensor]) -> list[Sampled]:
        sampled = [Sampled(token) for token in host[0].tolist()]
        each = zip(wanted, host[1].tolist(), _alternatives(host[2], host[3]), counts, strict=True)
        for i, logprob, top, count in each:
            sampled[i] = Sampled(sampled[i].token, logprob, top[:count])
        return sampled

    return CpuCopy([tokens, chosen, best, logprobs.gather(1, best)], build)


def _alternatives(ids: torch.Tensor, values: torch.Tensor) -> list[Alternatives]:
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return [tuple(zip(ids, values, strict=True)) for ids, values in pairs]
