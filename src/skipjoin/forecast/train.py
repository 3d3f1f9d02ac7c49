from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

import numpy as np

from skipjoin.forecast.alise import Alise, Tuning
from skipjoin.forecast.evaluate import Progress, Sample
from skipjoin.forecast.forecaster import Forecaster
from skipjoin.forecast.mass import Array
from skipjoin.forecast.mlp import Mlp
from skipjoin.forecast.models import Prompt

# One in this many groups of rows is held out from training, to choose by.
_HELD_OUT = 5
# Candidates for k and s0. From 1 on, only equal prompts are similar, and the decoder answers for all others.
_NEIGHBORS = (4, 8, 16, 32, 64)
_THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(21))
# The decoder trains for at most this many epochs, and stops when the error has not fallen for some.
_MAX_EPOCHS, _PATIENCE = 60, 6
# Held-out prompts compared with the others at a time.
_AT_ONCE = 512
# Rows encoded between two messages of progress.
_CHUNK = 128
# No request of a trace is cut off.
_MOST = 1 << 20


class Choice(NamedTuple):
    """k and s0. Similar prompts are found for the share `retrieved`; `error` is that of log lengths."""

    neighbors: int
    threshold: float
    retrieved: float
    error: float


@dataclass(frozen=True)
class Training:
    rows: int
    held_out: int
    epochs: int
    chosen: Choice
    decoder_error: float


class _Rows(NamedTuple):
    prompts: list[Prompt]
    vectors: Array
    tokens: Array

    @property
    def logs(self) -> Array:
        return np.log(self.tokens)

    def at(self, indices: Array) -> _Rows:
        return _Rows([self.prompts[index] for index in indices], self.vectors[indices], self.tokens[indices])


def is_held_out(group: str) -> bool:
    return crc32(group.encode()) % _HELD_OUT == 0


def train_online(forecaster: Forecaster, samples: Sequence[Sample], progress: Progress) -> None:
    for index, sample in enumerate(samples, 1):
        forecaster.learn(forecaster.forecast(sample.prompt, _MOST), sample.tokens, exact=True)
        progress("rows", index / len(samples))


def train_alise(
    forecaster: Forecaster, model: Alise, samples: Sequence[Sample], held_out: Sequence[bool], progress: Progress
) -> Training:
    """Train `model`, the untrained one of `forecaster`. Held-out rows choose and calibrate, and are learned then."""
    rows = _encoded(forecaster, samples, progress)
    held = np.asarray(held_out, dtype=bool)
    known, unseen = rows.at(np.flatnonzero(~held)[-model.entries :]), rows.at(np.flatnonzero(held))
    decoder, epochs = _decoder(known, unseen, progress)
    decoded = decoder.logs(unseen.vectors)
    chosen = min(_choices(known, unseen, decoded, progress), key=lambda choice: choice.error)
    model.begin(decoder, Tuning(chosen.neighbors, chosen.threshold), known.vectors, known.tokens)
    forecaster.count(known.tokens)
    for index, (prompt, tokens) in enumerate(zip(unseen.prompts, unseen.tokens.tolist(), strict=True), 1):
        forecaster.learn(forecaster.predict(prompt, _MOST), tokens, exact=True)
        progress("calibration", index / len(unseen.prompts))
    return Training(len(samples), int(held.sum()), epochs, chosen, _error(decoded, unseen))


def _encoded(forecaster: Forecaster, samples: Sequence[Sample], progress: Progress) -> _Rows:
    prompts: list[Prompt] = []
    for start in range(0, len(samples), _CHUNK):
        prompts += forecaster.encode([sample.prompt for sample in samples[start : start + _CHUNK]])
        progress("encoder", len(prompts) / len(samples))
    vectors = np.array([prompt.vector for prompt in prompts], np.float32)
    return _Rows(prompts, vectors, np.array([sample.tokens for sample in samples]))


def _decoder(known: _Rows, unseen: _Rows, progress: Progress) -> tuple[Mlp, int]:
    decoder, drawn = Mlp(known.vectors.shape[1]), np.random.default_rng(0)
    best, state, found = np.inf, decoder.state(), 0
    for epoch in range(1, _MAX_EPOCHS + 1):
        decoder.epoch(known.vectors, known.logs, drawn)
        if (error := _error(decoder.logs(unseen.vectors), unseen)) < best:
            best, state, found = error, decoder.state(), epoch
        progress("decoder", epoch / _MAX_EPOCHS)
        if epoch >= found + _PATIENCE:
            break
    progress("decoder", 1.0)
    decoder.restore(state)
    decoder.expect_errors(decoder.logs(unseen.vectors) - unseen.logs)
    return decoder, found


def _choices(known: _Rows, unseen: _Rows, decoded: Array, progress: Progress) -> Iterator[Choice]:
    similarity, lengths = _nearest(known, unseen, progress)
    for neighbors in _NEIGHBORS:
        for threshold in _THRESHOLDS:
            weights = np.where(similarity[:, :neighbors] >= threshold, similarity[:, :neighbors], 0.0)
            total = weights.sum(axis=1)
            found = total > 0
            means = (weights * lengths[:, :neighbors]).sum(axis=1) / np.where(found, total, 1.0)
            logs = np.where(found, np.log(np.where(found, means, 1.0)), decoded)
            yield Choice(neighbors, threshold, float(found.mean()), _error(logs, unseen))


def _nearest(known: _Rows, unseen: _Rows, progress: Progress) -> tuple[Array, Array]:
    """Return the similarities and the lengths of the most similar known prompts, (unseen, k) each, best first."""
    count = min(max(_NEIGHBORS), len(known.prompts))
    similarities, lengths = [], []
    for start in range(0, len(unseen.prompts), _AT_ONCE):
        scores = unseen.vectors[start : start + _AT_ONCE] @ known.vectors.T
        best = np.argsort(-scores, axis=1)[:, :count]
        similarities.append(np.take_along_axis(scores, best, axis=1))
        lengths.append(known.tokens[best])
        progress("search", min(1.0, (start + _AT_ONCE) / len(unseen.prompts)))
    return np.concatenate(similarities), np.concatenate(lengths)


def _error(logs: Array, rows: _Rows) -> float:
    return float(np.abs(logs - rows.logs).mean())
