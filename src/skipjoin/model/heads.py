from __future__ import annotations

import torch

from skipjoin.model.config import PoolingSettings
from skipjoin.model.layers import Builder
from skipjoin.model.ops.base import Linear

# Names of the layers between a hidden state and its score: a dense layer with tanh, if there is one, and the last.
HEADS = {
    "bert": ("bert.pooler.dense", "classifier"),
    "roberta": ("classifier.dense", "classifier.out_proj"),
    "decoder": (None, "score"),
}


class Head:
    """Maps a hidden state, [1, hidden], to a score."""

    def __init__(self, dense: Linear | None, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._dense, self._weight, self._bias = dense, weight.double(), bias

    def __call__(self, row: torch.Tensor) -> torch.Tensor:
        if self._dense is not None:
            row = self._dense(row).tanh()
        # In float64, because the order of torch's additions may depend on the rows' number.
        found = (row.double() * self._weight).sum(-1)
        return found if self._bias is None else found + self._bias.double()


def make_head(builder: Builder, settings: PoolingSettings, output: str) -> Head:
    """Make the head of a model of scores, whose output projection is the tensor `output`."""
    hidden, vocab = builder.config.hidden_size, builder.config.vocab_size
    if settings.answers:
        yes, no = (builder.tensor(output, vocab, hidden, rows=range(one, one + 1)) for one in settings.answers)
        # The softmax of two logits is the sigmoid of their difference.
        return Head(None, yes.double() - no.double(), None)
    dense, out = HEADS[settings.head or ""]
    if dense is None:
        return Head(None, builder.tensor(f"{out}.weight", 1, hidden), None)
    product = builder.linear(dense, (hidden,), hidden, True, takes_adapters=False)
    return Head(product, builder.tensor(f"{out}.weight", 1, hidden), builder.tensor(f"{out}.bias", 1))
