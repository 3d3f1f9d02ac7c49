"""Sampling: from logits to tokens.

A token's random number is a hash of the request's seed and the token's position. Neighbors in the batch, preemption and
restarts therefore cannot change a seeded output.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from skipjoin.model.logits_processors import LogitsProcessor, ProcessorState, default_processors
from skipjoin.model.transfer import CpuCopy, send
from skipjoin.sampling import SamplingParams

_MASK = (1 << 64) - 1
# Number of candidates before a full sort: top-p rarely keeps more.
_CANDIDATES = 256
# Groups of a row per wanted largest value: more give a tighter bound, but take longer themselves.
_GROUPS = 4
# Tokens per group in the search for the likeliest, which sorts the maxima of all groups and the tokens of the best
# groups. With 64, a large vocabulary has about as many groups as 20 groups have tokens.
_GROUP = 64
_MAX_ID = (1 << 32) - 1
# Rows of prompt scores at a time: each needs a copy of the vocabulary's logits.
_SCORED_ROWS = 256
# Minimum temperature that logits are divided by, so that the quotients fit float32. At larger ones already, a token has
# all of the probability, or an equal share with tokens of the same logit.
_COLDEST = 1e-30
# Probabilities are first summed in runs of this length, because a prefix sum over a whole vocabulary is slow.
_RUN = 128

Alternatives = tuple[tuple[int, float], ...]


class SamplingState:
    """Sampling state of one request, advanced once by each accepted output token.

    Attributes:
        length: Number of output tokens accepted so far; stays 0 without `reads_output`.
        reads_output: Whether the logits depend on the output tokens, and not on their number alone.
    """

    __slots__ = ("adjustments", "length", "params", "prompt_tokens", "reads_output", "seed")

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt_tokens: int,
        adjustments: tuple[tuple[int, ProcessorState], ...],
    ) -> None:
        self.params, self.seed, self.prompt_tokens = params, seed, prompt_tokens
        self.adjustments = adjustments  # by the processor's index
        self.reads_output = any(state.reads_output for _, state in adjustments)
        self.length = 0

    def accept(self, tokens: Sequence[int]) -> None:
        for _, state in self.adjustments:
            if state.reads_output:
                state.accept(tokens)
        self.length += len(tokens)

    @property
    def error(self) -> str:
        """Why the request cannot continue; empty if it can."""
        return next((state.error for _, state in self.adjustments if state.error), "")


class SampleRow(NamedTuple):
    """Request whose next token is sampled, after `length` output tokens."""

    state: SamplingState
    length: int


class Sampled(NamedTuple):
    """Sampled token, its natural log-probability, and the likeliest alternatives, best first."""

    token: int
    logprob: float | None = None
    top: Alternatives = ()


class SampledTokens(NamedTuple):
    """Tokens of all rows, int64 [rows] on the device, and their report in transit to the CPU."""

    tokens: torch.Tensor
    report: CpuCopy[list[Sampled]]


def joined(parts: Sequence[SampledTokens]) -> SampledTokens | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    tokens = torch.cat([part.tokens for part in parts])
    return SampledTokens(tokens, JoinedReports([part.report for part in parts]))


class JoinedReports(CpuCopy[list[Sampled]]):
    """Samples of several copies, concatenated."""

    def __init__(self, parts: Sequence[CpuCopy[list[Sampled]]]) -> None:
        self._parts = parts

    def read(self) -> list[Sampled]:
        return [sampled for part in self._parts for sampled in part.read()]


class PromptLogprob(NamedTuple):
    """Log-probability of a given token, the likeliest alternatives, and its rank (1 is likeliest)."""

    logprob: float
    top: Alternatives
    rank: int


class FindThresholds(Protocol):
    """Finds, per row, the smallest value that top_k, then top_p, keep."""

    def __call__(self, scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
        """Return the thresholds, [n, 1].

        Args:
            scaled: float32 [n, vocab], nonpositive, with a row maximum of 0.
            top_k: int64 [n]; vocab for no limit.
            top_p: float64 [n]; 1 for no limit.
        """
        ...


class Sampler:
    """Samples next tokens.

    Args:
        find_thresholds: Implements top_k and top_p; None searches the largest logits, which makes the CPU wait for a
            GPU.
        processors: Applied in this order; None for those of `SamplingParams` that need no grammar.
    """

    def __init__(
        self,
        vocab_size: int,
        find_thresholds: FindThresholds | None = None,
        processors: Sequence[LogitsProcessor] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self._find_thresholds = find_thresholds or largest_first
        self._processors = default_processors(vocab_size) if processors is None else tuple(processors)

    def start(
        self, params: SamplingParams, seed: int, prompt: Sequence[int], eos_token_ids: Collection[int] = ()
    ) -> SamplingState:
        made = enumerate(processor.start(params, prompt, eos_token_ids) for processor in self._processors)
        return SamplingState(
            params, seed, len(prompt), tuple((number, state) for number, state in made if state is not None)
        )

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> SampledTokens:
        """Sample one token per row.

        Reported logprobs are those of the unmodified logits. On CUDA the CPU does not wait for the device, unless
        `find_thresholds` does.

        Args:
            logits: float32 [len(rows), vocab_size]. May be changed.
        """
        if logits.shape != (len(rows), self.vocab_size):
            raise ValueError(f"logits are {tuple(logits.shape)}; the rows need {(len(rows), self.vocab_size)}")
        if not rows:
            return SampledTokens(logits.new_empty(0, dtype=torch.int64), CpuCopy([], lambda _: []))
        adjusted = self._adjusted(logits, rows)
        params = [row.state.params for row in rows]
        random = [i for i, one in enumerate(params) if one.temperature > 0]
        if len(random) < len(rows):
            tokens = _argmax(adjusted)
        if len(random) == len(rows):
            tokens = _draw(adjusted, rows, self._find_thresholds)
        elif random:
            index = send(random, logits.device)
            tokens[index] = _draw(adjusted[index], [rows[i] for i in random], self._find_thresholds)
        return SampledTokens(tokens, _report(logits, tokens, params))

    def _adjusted(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        active: dict[int, list[tuple[int, ProcessorState]]] = {}
        for i, (state, length) in enumerate(rows):
            for number, adjustment in state.adjustments:
                if adjustment.is_active(length):
                    active.setdefault(number, []).append((i, adjustment))
        if not active:
            return logits
        has_report = any(row.state.params.logprobs is not None for row in rows)
        logits = logits.clone(memory_format=torch.contiguous_format) if has_report else logits.contiguous()
        for number in sorted(active):
            self._processors[number].apply(logits, active[number])
        return logits


def uniform(seed: int, position: int) -> float:
    """Return the random number in [0, 1) of one token: SplitMix64's finalizer, 53 bits."""
    z = _mix(_mix(seed & _MASK) + position * 0x9E3779B97F4A7C15)
    return (z >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@torch.inference_mode()
def prompt_logprobs(
    rows: torch.Tensor,
    targets: Sequence[int],
    k: int,
    logits_of: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits,
) -> CpuCopy[list[PromptLogprob]]:
    """Compute the logprobs of `targets` and `k` alternatives, one target per row.

    Args:
        logits_of: Maps at most `_SCORED_ROWS` rows to logits [rows, vocab]; by default the rows are logits.
    """
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
    """Return `count` ids, below 2^32, of each row's largest values [n, m], best first, then by id."""
    bits = (values + 0.0).view(torch.int32)  # makes 0 and -0 equal
    ordered = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()  # sorts like the values
    return ~(ordered << 32 | _MAX_ID - ids).topk(count).values & _MAX_ID


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the index of each row's largest value. On a CPU, numpy is many times faster than torch."""
    return torch.from_numpy(logits.numpy().argmax(-1)) if logits.device.type == "cpu" else logits.argmax(-1)


def _report(logits: torch.Tensor, tokens: torch.Tensor, params: Sequence[SamplingParams]) -> CpuCopy[list[Sampled]]:
    wanted = [i for i, one in enumerate(params) if one.logprobs is not None]
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


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return send(values, like.device, like.dtype)[:, None]


def _draw(logits: torch.Tensor, rows: Sequence[SampleRow], find_thresholds: FindThresholds) -> torch.Tensor:
    """Sample each row at its temperature (> 0) among the tokens that its filters keep.

    Tokens of equal logits are kept or dropped together.
    """
    params = [row.state.params for row in rows]
    scaled = logits / _column([max(one.temperature, _COLDEST) for one in params], logits)
    scaled -= scaled.amax(-1, keepdim=True)  # the maximum becomes 0, so exp cannot overflow
    filtered = [i for i, one in enumerate(params) if one.top_k or one.top_p < 1 or one.min_p]
    weights = scaled.exp() if filtered else scaled.exp_()
    if filtered:
        filters = [params[i] for i in filtered]
        if len(filtered) == len(rows):
            threshold = _thresholds(scaled, filters, find_thresholds)
        else:
            threshold = scaled.new_full((len(rows), 1), -torch.inf)
            index = send(filtered, logits.device)
            threshold[index] = _thresholds(scaled[index], filters, find_thresholds)
        # In place, as 1 or 0 in the type of the logits: Booleans are many times slower on a CPU.
        weights *= scaled.ge_(threshold)
    uniforms = [uniform(state.seed, state.prompt_tokens + length) for state, length in rows]
    return _invert(weights, send(uniforms, logits.device, torch.float64))


def _thresholds(scaled: torch.Tensor, params: Sequence[SamplingParams], find: FindThresholds) -> torch.Tensor:
    vocab, device = scaled.shape[-1], scaled.device
    limits = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    min_p = _column([p.min_p for p in params], scaled).log()
    if all(k == vocab and p.top_p >= 1 for k, p in zip(limits, params, strict=True)):
        return min_p
    top_k, top_p = send(limits, device), send([p.top_p for p in params], device, torch.float64)
    return torch.maximum(find(scaled, top_k, top_p), min_p)


def largest_first(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    vocab = scaled.shape[-1]
    limits, shares = top_k.tolist(), top_p.tolist()
    wanted = max([k for k in limits if k < vocab], default=0)
    has_unlimited = any(k == vocab for k in limits)
    best = _largest(scaled, min(max(wanted, _CANDIDATES), vocab) if has_unlimited else wanted)
    if any(k == vocab and p < 1 for k, p in zip(limits, shares, strict=True)):
        # Summed in float64, because the sums are compared with probabilities near 1. Summed in runs, because torch's
        # threads split the sum of a row only if there is a single row, which rounds differently.
        totals = _in_runs(scaled.double().exp_()).sum(-1).cumsum(-1)[:, -1:]
    else:  # `_from_best` uses the sums of top_k
        totals = scaled.new_zeros((len(limits), 1), dtype=torch.float64)
    threshold, enough = _from_best(best, totals, top_k[:, None], top_p[:, None])
    if not enough.all():
        index = (~enough).nonzero()[:, 0]
        full = _largest(scaled[index], vocab)
        threshold[index], _ = _from_best(full, totals[index], top_k[index, None], top_p[index, None])
    return threshold


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    if values.device.type != "cpu":
        return values.topk(count).values
    rows = values.numpy()
    size = rows.shape[1] // (_GROUPS * count)
    if size < 2:
        return torch.from_numpy(np.sort(rows)[:, : -count - 1 : -1].copy())
    groups = rows.shape[1] // size
    maxima = rows[:, : groups * size].reshape(len(rows), size, groups).max(1)
    bounds = np.partition(maxima, groups - count)[:, groups - count]
    found = np.empty((len(rows), count), rows.dtype)
    for row, bound, best in zip(rows, bounds, found, strict=True):
        above = row[row >= bound]
        if len(above) < count:  # some are NaN
            above = row.copy()
        above.sort()
        best[:] = above[: -count - 1 : -1]
    return torch.from_numpy(found)


def _from_best(
    best: torch.Tensor, totals: torch.Tensor, k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return thresholds of top_k and top_p from the largest logits `best`, and whether those suffice, [n].

    Args:
        totals: Sums of exp over the whole rows, [n, 1].
    """
    width = best.shape[-1]
    order = torch.arange(width, device=best.device)
    sums = best.double().exp_().masked_fill_(order >= k, 0).cumsum(-1)
    limited = k <= width
    kept_total = torch.where(limited, sums[:, -1:], totals)
    # First position whose prefix sum reaches top_p of the sum that top_k keeps.
    reached = sums >= top_p * kept_total
    last_p = torch.where(reached.any(-1, keepdim=True), reached.int().argmax(-1, keepdim=True), width - 1)
    whole = top_p >= 1  # rounding must not cut anything off
    last = torch.where(whole, width - 1, last_p).minimum((k - 1).clamp(max=width - 1))
    threshold = best.gather(1, last)
    unlimited = whole & ~limited
    threshold = threshold.masked_fill(unlimited, -torch.inf)
    return threshold, (limited | reached[:, -1:] | unlimited)[:, 0]


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the index at which each row's running sum passes the fraction `uniforms`: int64 [n]."""
    padded = _in_runs(weights)
    runs = padded.shape[1]
    run_ends = padded.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniforms[:, None] * run_ends[:, -1:]
    run = torch.searchsorted(run_ends, target, right=True).clamp_(max=runs - 1)
    before = torch.where(run > 0, run_ends.gather(1, (run - 1).clamp(min=0)), 0.0)
    inside = padded.gather(1, run[:, :, None].expand(-1, -1, _RUN))[:, 0]
    ends = inside.cumsum(-1, dtype=torch.float64)
    offset = torch.searchsorted(ends, target - before, right=True)
    # Rounding can put the target past the run's end. Then take its last token with a positive weight.
    drawable = torch.where(inside > 0, torch.arange(_RUN, device=weights.device), 0).amax(-1, keepdim=True)
    return (run * _RUN + offset.minimum(drawable))[:, 0]


def _in_runs(weights: torch.Tensor) -> torch.Tensor:
    """Split rows into runs: [n, vocab] becomes [n, runs, _RUN], padded with zeros."""
    n, vocab = weights.shape
    if missing := -vocab % _RUN:
        weights = torch.nn.functional.pad(weights, (0, missing))
    return weights.view(n, -1, _RUN)
