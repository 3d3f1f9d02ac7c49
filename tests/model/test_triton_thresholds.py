from __future__ import annotations

import pytest
import torch

from skipjoin.model.draws import largest_first

pytest.importorskip("triton")

from skipjoin.model.kernels import thresholds
from skipjoin.model.kernels.thresholds import bisected_thresholds
from support.worlds import exhaustive

VOCAB = 5003
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rows(count: int, kind: str) -> torch.Tensor:
    """Return scaled logits that are smooth, contain many ties, are peaked, or have forbidden tokens."""
    torch.manual_seed(count)
    logits = torch.randn(count, VOCAB) * 3
    if kind == "equals":
        logits = logits.round()
    if kind == "peaked":
        logits[:, 7] += 60
    if kind == "forbidden":
        logits[:, 100:] = -torch.inf
    return logits - logits.amax(-1, keepdim=True)


@pytest.mark.parametrize("kind", ["smooth", *map(exhaustive, ("equals", "peaked", "forbidden"))])
def test_thresholds_keep_the_tokens_of_the_sorted_row(kind):
    ks = [1, 2, 50, 300, VOCAB, VOCAB, VOCAB, 20]
    ps = [1.0, 0.5, 0.9, 0.3, 0.9, 1.0, 0.999, 1.0]
    scaled, top_k, top_p = rows(len(ks), kind), torch.tensor(ks), torch.tensor(ps, dtype=torch.float64)
    expected = largest_first(scaled, top_k, top_p)
    found = bisected_thresholds(scaled.to(DEVICE), top_k.to(DEVICE), top_p.to(DEVICE)).cpu()
    for row, ours, theirs in zip(scaled, found, expected, strict=True):
        # If the next value is within rounding of the share, either threshold is right.
        kept, wanted = (int((row >= limit).sum()) for limit in (ours, theirs))
        assert abs(kept - wanted) <= (1 if kind != "equals" else 0), (ours, theirs)
    assert (found == expected).float().mean() > 0.8


def test_zero_top_p_keeps_the_most_likely_token():
    scaled = rows(2, "smooth")
    tiny = torch.full((2,), 1e-12, dtype=torch.float64)
    found = bisected_thresholds(scaled.to(DEVICE), torch.full((2,), VOCAB, device=DEVICE), tiny.to(DEVICE))
    assert found.cpu().tolist() == [[0.0], [0.0]]


@pytest.mark.skipif(DEVICE == "cuda", reason="counts calls of the interpreter")
def test_every_pass_quarters_the_range(monkeypatch):
    """Sixteen passes determine 31 bits; halving the range would take 31."""
    passes, totals = [], thresholds._totals
    monkeypatch.setattr(thresholds, "_totals", lambda *args: passes.append(1) or totals(*args))
    everything = torch.ones(1, dtype=torch.float64)
    bisected_thresholds(rows(1, "smooth"), torch.tensor([40]), everything)
    assert 8 <= len(passes) <= 16
