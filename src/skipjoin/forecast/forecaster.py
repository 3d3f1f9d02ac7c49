from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence, Sized
from pathlib import Path
from typing import NamedTuple

import numpy as np

from skipjoin.core.forecast import Forecast, length_bin, length_quantile
from skipjoin.forecast.calibrate import Calibrator
from skipjoin.forecast.encode import Encoder, hashed
from skipjoin.forecast.mass import Array, capped, position
from skipjoin.forecast.models import Guess, Model, Prompt, part_of, prefixed
from skipjoin.forecast.prior import Prior
from skipjoin.forecast.store import Identity, load_state, save_state

# Quantiles that bound the 80 % interval of a forecast.
LOW, HIGH = 0.1, 0.9


class Predicted(NamedTuple):
    """Forecast, with what `Forecaster.learn` needs later."""

    forecast: Forecast
    interval: tuple[float, float]  # bounds 80 %, capped at max_tokens
    most: int
    prompt: Prompt
    guess: Guess


class Forecaster:
    """Length model with its encoder, prior and calibration (ALISE section 3.1 has one such model). Thread-safe.

    Args:
        owner: Hash of the API key whose requests are learned; empty for all.
        first: Initial hazards; see `Prior`.
        read: Returns the tokens of a prompt that are hashed; None hashes the prompt's own.
    """

    def __init__(
        self,
        encoder: Encoder,
        model: Model,
        served: str = "",
        *,
        owner: str = "",
        first: Array | None = None,
        read: Callable[[Sequence[int]], Sequence[int]] | None = None,
    ) -> None:
        self.encoder, self.model = encoder, model
        self._requests = 0
        self._served, self._owner, self._base = served, owner, ""
        self._read = read
        self._prior, self._calibrator = Prior(first), Calibrator()
        self._lock = threading.Lock()
        self._brief_lock = threading.Lock()  # guards prior and counts, so that `prior` does not wait for a search

    @property
    def identity(self) -> Identity:
        return Identity(self._served, self.model.name, self.encoder.name, self.encoder.width, self._owner, self._base)

    @property
    def batch(self) -> int:
        return self.encoder.batch

    def forecast(self, prompt: Sequence[int], max_tokens: int) -> Predicted:
        (encoded,) = self.encode([prompt])
        return self.predict(encoded, max_tokens)

    def encode(self, prompts: Sequence[Sequence[int]]) -> list[Prompt]:
        read = prompts if self._read is None else [self._read(prompt) for prompt in prompts]
        features = [hashed(prompt) for prompt in read]
        vectors = self.encoder.encode(prompts, features).astype(np.float16)
        return [
            Prompt(feature, vector, len(prompt))
            for feature, vector, prompt in zip(features, vectors, read, strict=True)
        ]

    def predict(self, prompt: Prompt, max_tokens: int) -> Predicted:
        with self._lock:
            guess = self.model.guess(prompt, self._prior)
            mass = self._calibrator.apply(guess.mass, prompt.tokens)
            forecast = capped(mass, max_tokens, guess.source, guess.tokens)
        return Predicted(forecast, _interval(mass, max_tokens), max_tokens, prompt, guess)

    def prior(self, max_tokens: int) -> Forecast:
        """Return the forecast without the prompt. Takes microseconds, even while another thread learns."""
        with self._brief_lock:
            mass = self._prior.mass()
        return capped(mass, max_tokens, "prior")

    def lengths(self) -> tuple[Array, float]:
        with self._brief_lock:
            return self._prior.mass(), self._prior.requests

    def learn(self, predicted: Predicted, tokens: int, *, exact: bool) -> None:
        """Learn from a request that finished after `tokens` >= 1 output tokens; not `exact` if it was cut off."""
        end = length_bin(tokens)
        with self._lock:
            self._requests += 1
            self._calibrator.learn(predicted.prompt.tokens, position(predicted.guess.mass, tokens), exact)
            self.model.learn(predicted.prompt, predicted.guess, tokens, end, exact)
            with self._brief_lock:
                self._prior.learn(end, exact)

    def count(self, lengths: Iterable[int]) -> None:
        """Learn lengths of outputs that were not predicted and ended by themselves."""
        with self._lock, self._brief_lock:
            for tokens in lengths:
                self._prior.learn(length_bin(tokens), True)

    def __len__(self) -> int:
        return len(self.model) if isinstance(self.model, Sized) else 0

    def save(self, folder: str | Path, *, quiet: bool = False) -> bool:
        with self._lock:
            arrays = self._state()
        return save_state(Path(folder), self.identity, arrays, {"requests": self._requests}, quiet=quiet)

    def load(self, folder: str | Path) -> bool:
        with self._lock:
            return load_state(Path(folder), self.identity, self._restore)

    def arrays(self) -> dict[str, Array]:
        with self._lock:
            return self._state()

    def start_from(self, arrays: dict[str, Array], base: str) -> None:
        """Restore a trained state; `base` identifies it, so that what is learned from there is kept apart."""
        with self._lock:
            self._restore(arrays)
        self._base = base

    def _state(self) -> dict[str, Array]:
        return (
            prefixed("prior", self._prior.state())
            | prefixed("calibrator", self._calibrator.state())
            | prefixed("model", self.model.state())
        )

    def _restore(self, state: dict[str, Array]) -> None:
        before = self._state()
        _check_alike(state, before)
        try:
            self._take(state)
        except Exception:
            self._take(before)
            raise

    def _take(self, state: dict[str, Array]) -> None:
        self._prior.restore(part_of(state, "prior"))
        self._calibrator.restore(part_of(state, "calibrator"))
        self.model.restore(part_of(state, "model"))


def _check_alike(state: dict[str, Array], own: dict[str, Array]) -> None:
    for name, array in state.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"{name} has numbers that are none")
    for name, array in own.items():
        if not name.startswith("model.index.") and (state[name].shape, state[name].dtype) != (array.shape, array.dtype):
            raise ValueError(f"{name} is {state[name].dtype}{list(state[name].shape)}, not {list(array.shape)}")


def _interval(mass: Array, most: int) -> tuple[float, float]:
    shares = mass.tolist()
    low, high = (min(float(most), float(int(length_quantile(shares, level)))) for level in (LOW, HIGH))
    return low, high
