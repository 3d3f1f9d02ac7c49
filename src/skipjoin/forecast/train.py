from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

import numpy as np

from skipjoin.forecast.alise import Alise, Tuning
from skipjoin.forecast.evaluate import Pairs, Progress, Sample
from skipjoin.forecast.forecaster import Forecaster
from skipjoin.forecast.mass import Array
from skipjoin.forecast.mlp import Mlp
from skipjoin.forecast.models import PriorOnly, Prompt

# One in this many groups of rows is held out from training, to choose and to judge by.
_HELD_OUT = 5
# Numbers of the parts of a trace: rows to train with, and the two halves of those held out.
TRAINING, HALVES = 0, (1, 2)
# Candidates for k, for s0 and for the share of retrieval beside the decoder. With share 0, the decoder answers alone.
_NEIGHBORS = (4, 8, 16, 32, 64)
_THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(21))
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
# The decoder trains for at most this many epochs, and stops when the order has not improved for some.
_MAX_EPOCHS, _PATIENCE = 60, 6
# Pairs of held-out rows by which candidates are compared.
_PAIRS = 50_000
# Held-out prompts compared with the others at a time.
_AT_ONCE = 512
# Rows encoded between two messages of progress.
_CHUNK = 128
# No request of a trace is cut off.
_MOST = 1 << 20


class Choice(NamedTuple):
    """What orders most held-out pairs. Figures are of the rows that chose."""

    epochs: int  # of the decoder
    neighbors: int  # k
    threshold: float  # s0
    share: float  # of retrieval in the log length
    retrieved: float  # share of rows for which similar prompts are found
    order: float  # share of pairs in order
    error: float  # mean absolute error of log lengths


@dataclass(frozen=True)
class Training:
    """Result of training."""

    rows: int
    held_out: int
    order: float  # share of held-out pairs in order, each half by what the other chose
    prior_order: float  # the same of forecasts without the prompt, which learned the same rows
    chosen: Choice | None = None  # what all held-out rows chose, for `alise`


class _Rows(NamedTuple):
    prompts: list[Prompt]
    vectors: Array
    tokens: Array

    @property
    def logs(self) -> Array:
        return np.log(self.tokens)

    def at(self, indices: Array) -> _Rows:
        return _Rows([self.prompts[index] for index in indices], self.vectors[indices], self.tokens[indices])


def part_of_group(group: str) -> int:
    drawn = crc32(group.encode())
    # `predict evaluate` splits traces by the parity, which must not decide the half.
    return TRAINING if drawn % _HELD_OUT else HALVES[drawn // (2 * _HELD_OUT) % 2]


def train_online(
    forecaster: Forecaster, samples: Sequence[Sample], parts: Sequence[int], progress: Progress
) -> Training:
    """Train a model that learns one request after the other. Held-out rows are predicted first, and learned last."""
    known, unseen, halves = _split(_encoded(forecaster, samples, progress), parts)
    _learn(forecaster, known, progress)
    logs = np.log([forecaster.predict(prompt, _MOST).forecast.tokens for prompt in unseen.prompts])
    prior_order = _prior_order(forecaster, known, unseen, halves)
    _learn(forecaster, unseen, progress)
    return Training(len(samples), len(halves), _order([logs, logs], unseen, halves), prior_order)


def train_alise(
    forecaster: Forecaster, model: Alise, samples: Sequence[Sample], parts: Sequence[int], progress: Progress
) -> Training:
    """Train the untrained `model` of `forecaster`. Held-out rows choose and calibrate, and are learned then."""
    known, unseen, halves = _split(_encoded(forecaster, samples, progress), parts)
    prior_order = _prior_order(forecaster, known, unseen, halves)
    known = known.at(np.arange(len(known.prompts))[-model.entries :])
    decoders = _decoders(known, unseen, progress)
    candidates = _Candidates(decoders, *_nearest(known, unseen, progress), unseen)
    # What chose a candidate cannot judge it as well.
    crossed = [candidates.logs(candidates.best(halves == other)) for other in reversed(HALVES)]
    chosen = candidates.best(np.ones(len(halves), dtype=bool))
    decoder = decoders[chosen.epochs - 1]
    decoder.expect_errors(decoder.logs(unseen.vectors) - unseen.logs)
    model.begin(decoder, Tuning(chosen.neighbors, chosen.threshold, chosen.share), known.vectors, known.tokens)
    forecaster.count(known.tokens)
    _learn(forecaster, unseen, progress)
    return Training(len(samples), len(halves), _order(crossed, unseen, halves), prior_order, chosen)


def _encoded(forecaster: Forecaster, samples: Sequence[Sample], progress: Progress) -> _Rows:
    prompts: list[Prompt] = []
    for start in range(0, len(samples), _CHUNK):
        prompts += forecaster.encode([sample.prompt for sample in samples[start : start + _CHUNK]])
        progress("encoder", len(prompts) / len(samples))
    vectors = np.array([prompt.vector for prompt in prompts], np.float32)
    return _Rows(prompts, vectors, np.array([sample.tokens for sample in samples]))


def _split(rows: _Rows, parts: Sequence[int]) -> tuple[_Rows, _Rows, Array]:
    part = np.asarray(parts)
    return rows.at(np.flatnonzero(part == TRAINING)), rows.at(np.flatnonzero(part)), part[part != TRAINING]


def _learn(forecaster: Forecaster, rows: _Rows, progress: Progress) -> None:
    for index, (prompt, tokens) in enumerate(zip(rows.prompts, rows.tokens.tolist(), strict=True), 1):
        forecaster.learn(forecaster.predict(prompt, _MOST), tokens, exact=True)
        progress("rows", index / len(rows.prompts))


def _prior_order(forecaster: Forecaster, known: _Rows, unseen: _Rows, halves: Array) -> float:
    prior = Forecaster(forecaster.encoder, PriorOnly())
    _learn(prior, known, lambda *_: None)
    logs = np.log([prior.predict(prompt, _MOST).forecast.tokens for prompt in unseen.prompts])
    return _order([logs, logs], unseen, halves)


def _order(logs: Sequence[Array], unseen: _Rows, halves: Array) -> float:
    return float(
        np.mean(
            [
                Pairs(unseen.tokens[halves == half], _PAIRS).in_order(made[halves == half])
                for half, made in zip(HALVES, logs, strict=True)
            ]
        )
    )


def _decoders(known: _Rows, unseen: _Rows, progress: Progress) -> list[Mlp]:
    """Return the decoder after each epoch, until it orders held-out rows no better."""
    decoder, drawn, pairs = Mlp(known.vectors.shape[1]), np.random.default_rng(0), Pairs(unseen.tokens, _PAIRS)
    orders: list[float] = []
    found: list[Mlp] = []
    while len(found) < _MAX_EPOCHS and len(found) <= _PATIENCE + int(np.argmax([0.0, *orders])):
        decoder.epoch(known.vectors, known.logs, drawn)
        found.append(decoder.copy())
        orders.append(pairs.in_order(decoder.logs(unseen.vectors)))
        progress("decoder", len(found) / _MAX_EPOCHS)
    progress("decoder", 1.0)
    return found


class _Candidates:
    """Forecasts of held-out rows by each choice of decoder, k, s0 and share.

    `similarity` and `lengths`, (unseen, k), are of the most similar known prompts, best first.
    """

    def __init__(self, decoders: Sequence[Mlp], similarity: Array, lengths: Array, unseen: _Rows) -> None:
        self._decoded = [decoder.logs(unseen.vectors) for decoder in decoders]
        self._similarity, self._lengths, self._unseen = similarity, lengths, unseen

    def best(self, rows: Array) -> Choice:
        """Return the choice that orders the rows of a mask (unseen,) best, with the lower error among equal ones."""
        pairs, true = Pairs(self._unseen.tokens[rows], _PAIRS), self._unseen.logs[rows]
        orders = [pairs.in_order(decoded[rows]) for decoded in self._decoded]
        epochs = int(np.argmax(orders)) + 1
        choices = (
            Choice(
                epochs, neighbors, threshold, share, float(retrieved[rows].mean()), pairs.in_order(logs[rows]),
                float(np.abs(logs[rows] - true).mean()),
            )
            for neighbors, threshold, share, retrieved, logs in self._all(epochs)
        )  # fmt: skip
        return max(choices, key=lambda choice: (choice.order, -choice.error))

    def logs(self, choice: Choice) -> Array:
        return self._blended(choice.epochs, *self._retrieved(choice.neighbors, choice.threshold), choice.share)

    def _all(self, epochs: int) -> Iterator[tuple[int, float, float, Array, Array]]:
        for neighbors in _NEIGHBORS:
            for threshold in _THRESHOLDS:
                found, means = self._retrieved(neighbors, threshold)
                for share in _SHARES:
                    yield neighbors, threshold, share, found, self._blended(epochs, found, means, share)

    def _retrieved(self, neighbors: int, threshold: float) -> tuple[Array, Array]:
        """Return for which rows similar prompts are found, and the logs of their mean lengths."""
        similarity, lengths = self._similarity[:, :neighbors], self._lengths[:, :neighbors]
        weights = np.where(similarity >= threshold, similarity, 0.0)
        total = weights.sum(axis=1)
        found = total > 0
        means = (weights * lengths).sum(axis=1) / np.where(found, total, 1.0)
        return found, np.log(np.where(found, means, 1.0))

    def _blended(self, epochs: int, found: Array, logs: Array, share: float) -> Array:
        decoded = self._decoded[epochs - 1]
        return np.where(found, share * logs + (1 - share) * decoded, decoded)


def _nearest(known: _Rows, unseen: _Rows, progress: Progress) -> tuple[Array, Array]:
    """Return the similarities and lengths of the most similar known prompts, (unseen, k) each, best first."""
    count = min(max(_NEIGHBORS), len(known.prompts))
    similarities, lengths = [], []
    for start in range(0, len(unseen.prompts), _AT_ONCE):
        scores = unseen.vectors[start : start + _AT_ONCE] @ known.vectors.T
        best = np.argsort(-scores, axis=1)[:, :count]
        similarities.append(np.take_along_axis(scores, best, axis=1))
        lengths.append(known.tokens[best])
        progress("search", min(1.0, (start + _AT_ONCE) / len(unseen.prompts)))
    return np.concatenate(similarities), np.concatenate(lengths)
