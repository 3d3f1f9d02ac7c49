from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from skipjoin.model.transfer import send
from skipjoin.sampling import SamplingParams

_MASK = (1 << 64) - 1
# Number of candidates before a full sort: top-p rarely keeps more.
_CANDIDATES = 256
# Groups of a row per wanted largest value: more give a tighter bound, but take longer themselves.
_GROUPS = 4
# Minimum temperature that logits are divided by, so that the quotients fit float32. At larger ones already, a token has
# all of the probability, or an equal share with tokens of the same logit.
_COLDEST = 1e-30
# Probabilities are first summed in runs of this length, because a prefix sum over a whole vocabulary is slow.
_RUN = 128


# Returns, per row, the smallest value that top_k, then top_p, keep: [n, 1]. Arguments: float32 [n, vocab], nonpositive,
# with a row maximum of 0; top_k, int64 [n], vocab for no limit; top_p, float64 [n], 1 for no limit.
FindThresholds = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def uniform(seed: int, position: int) -> float:
    """Return the random number in [0, 1) of one token: SplitMix64's finalizer, 53 bits."""
    z = _mix(_mix(seed & _MASK) + position * 0x9E3779B97F4A7C15)
    return (z >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return send(values, like.device, like.dtype)[:, None]


def draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float], find_thresholds: FindThresholds
) -> torch.Tensor:
    """Sample each row at its temperature (> 0). Filters keep or drop tokens of equal logits together."""
    scaled = logits / _column([max(param.temperature, _COLDEST) for param in params], logits)
    scaled -= scaled.amax(-1, keepdim=True)  # the maximum becomes 0, so exp cannot overflow
    filtered = [i for i, param in enumerate(params) if param.top_k or param.top_p < 1 or param.min_p]
    weights = scaled.exp() if filtered else scaled.exp_()
    if filtered:
        filters = [params[i] for i in filtered]
        if len(filtered) == len(params):
            threshold = _thresholds(scaled, filters, find_thresholds)
        else:
            threshold = scaled.new_full((len(params), 1), -torch.inf)
            index = send(filtered, logits.device)
            threshold[index] = _thresholds(scaled[index], filters, find_thresholds)
        # In place, as 1 or 0 in the type of the logits: Booleans are many times slower on a CPU.
        weights *= scaled.ge_(threshold)
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
    n, vocab = weights.shape
    if missing := -vocab % _RUN:
        weights = torch.nn.functional.pad(weights, (0, missing))
    return weights.view(n, -1, _RUN)
