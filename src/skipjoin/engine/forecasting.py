"""A forecaster in use: it learns from requests that end, and what it learnt is kept in a folder."""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from skipjoin.config import ConfigError, EngineConfig, ForecastConfig
from skipjoin.core.forecast import Forecast
from skipjoin.core.request import FinishReason
from skipjoin.recipes import Forecasts, find

_log = logging.getLogger(__name__)

# Seconds from a change until it is saved at the latest: what a process that is killed loses.
SAVE_EVERY_S = 5.0
# Saving takes at most this share of the time, however large the state is.
_SAVE_SHARE = 0.02
# Encoders with a name; others are folders.
_ENCODERS = ("hashed", "embeddings")
# The `forecast_dir` of what is not kept.
_NOWHERE = "none"


class Predicted(Protocol):
    """A forecast, and what its forecaster needs to learn from how it came out.

    most: tokens at which the output ends at the latest. interval: the lengths in tokens, at most these, between which
    it lies with a probability of 80 %.
    """

    @property
    def forecast(self) -> Forecast: ...
    @property
    def most(self) -> int: ...
    @property
    def interval(self) -> tuple[float, float]: ...


class Forecaster(Protocol):
    """What is used of `skipjoin.forecast.Forecaster`."""

    def forecast(self, prompt: Sequence[int], max_tokens: int) -> Predicted: ...
    def prior(self, max_tokens: int) -> Forecast: ...
    def learn(self, predicted: Any, tokens: int, *, exact: bool) -> None: ...  # of its own forecasts
    def __len__(self) -> int: ...


class OwnerForecasters(Protocol):
    """What is used of `skipjoin.forecast.owners.OwnerForecasters`."""

    def forecast(self, owner: str, prompt: Sequence[int], max_tokens: int) -> Predicted: ...
    def prior(self, owner: str, max_tokens: int) -> Forecast: ...
    def learn(self, owner: str, predicted: Any, tokens: int, *, exact: bool) -> None: ...
    def __len__(self) -> int: ...


class Save(Protocol):
    """See `ForecastKeeper`."""

    def __call__(self, *, quiet: bool) -> bool: ...


def is_exact(reason: FinishReason) -> bool:
    """Whether a request that ended so got all of its output. Of others it is known only that their outputs are at least
    as long as what they got."""
    return reason is FinishReason.STOP


class ForecastKeeper:
    """A forecaster and where its state is kept. One thread owns it, and calls `save_if_due` now and then.

    save: writes the state; False if that fails, after a warning unless it is called with quiet=True. None: nothing is
    kept. clock: seconds, monotonic. owners: forecasters for requests that have an owner; None: all learn from all.
    """

    def __init__(
        self,
        forecaster: Forecaster,
        save: Save | None = None,
        clock: Callable[[], float] = time.monotonic,
        owners: OwnerForecasters | None = None,
    ) -> None:
        self.forecaster = forecaster
        self._owners = owners
        self._save = save
        self._clock = clock
        self._due = math.inf  # when to save next; inf: nothing has changed
        self._earliest = -math.inf
        self._is_failing = False

    def forecast(self, prompt: Sequence[int], max_tokens: int, owner: str = "") -> Predicted:
        """The forecast for a prompt whose output has at most max_tokens tokens. owner: a hash of the client's key."""
        if self._owners is None:
            return self.forecaster.forecast(prompt, max_tokens)
        return self._owners.forecast(owner, prompt, max_tokens)

    def prior(self, max_tokens: int, owner: str = "") -> Forecast:
        """The forecast without a prompt, in some microseconds; any thread may ask."""
        return self.forecaster.prior(max_tokens) if self._owners is None else self._owners.prior(owner, max_tokens)

    def __len__(self) -> int:
        """Past requests that are searched."""
        return len(self.forecaster if self._owners is None else self._owners)

    def learn(self, predicted: Predicted, tokens: int, *, exact: bool, owner: str = "") -> None:
        """Learn from a request that got `tokens` tokens, at least 1. exact: see `is_exact`."""
        if self._owners is None:
            self.forecaster.learn(predicted, tokens, exact=exact)
        else:
            self._owners.learn(owner, predicted, tokens, exact=exact)
        if self._save is not None and self._due == math.inf:
            self._due = max(self._clock() + SAVE_EVERY_S, self._earliest)

    @property
    def save_in_s(self) -> float | None:
        """Seconds until `save_if_due` has something to do; None: it has not before something is learnt."""
        return None if self._due == math.inf else max(0.0, self._due - self._clock())

    def save_if_due(self) -> None:
        """Save what was learnt, if that has waited for long enough. A failure is one warning until saving works."""
        if self._clock() >= self._due:
            self._write()

    def close(self) -> None:
        """Save what is not saved."""
        if self._due < math.inf:
            self._write()

    def _write(self) -> None:
        assert self._save is not None
        begin = self._clock()
        self._is_failing = not self._save(quiet=self._is_failing)
        end = self._clock()
        self._earliest = end + (end - begin) / _SAVE_SHARE
        self._due = max(end + SAVE_EVERY_S, self._earliest) if self._is_failing else math.inf


def chosen_forecasts(config: ForecastConfig, engine: EngineConfig, *, url: str | None = None) -> ForecastConfig | None:
    """The settings with the forecaster that is meant where none is named; None: nothing is forecast. engine: which may
    need forecasts. url: of another server that forecasts, beside which the prior is all that is needed.

    Raises `ConfigError`, before anything slow begins, for what excludes each other, an encoder that is not there and a
    folder that cannot be written.
    """
    is_needed = find(engine.recipe).forecasts is Forecasts.LEARNT or engine.slo_jct_scale is not None
    if url is not None:
        if config.forecaster not in (None, "prior"):
            raise ConfigError(f"forecaster must be prior, or not be given, with forecast_url, got {config.forecaster}")
        forecaster = "prior"
    else:
        forecaster = config.forecaster or ("learnt" if is_needed else "none")
    if forecaster == "none" and engine.slo_jct_scale is not None:
        raise ConfigError("slo_jct_scale needs forecasts: forecaster must be another one than none")
    if config.forecaster != "none":
        _check_folders(config)
    return None if forecaster == "none" else replace(config, forecaster=forecaster)


def _check_folders(config: ForecastConfig) -> None:
    encoder, kept_in = config.forecast_encoder, config.forecast_dir
    if encoder not in _ENCODERS and not Path(encoder).is_dir():
        raise ConfigError(
            f"forecast_encoder must be one of {', '.join(_ENCODERS)} or the folder of an encoder, got {encoder!r}"
        )
    if kept_in not in (None, _NOWHERE):
        try:
            Path(kept_in).mkdir(mode=0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=kept_in).close()
        except OSError as error:
            raise ConfigError(f"forecast_dir {kept_in} cannot be written: {error.strerror}") from error


def open_keeper(
    config: ForecastConfig, *, model: str, folder: str, text_of: Callable[[Sequence[int]], str], owners: int = 0
) -> ForecastKeeper:
    """The forecaster of settings as `chosen_forecasts` returns them, and what it learnt before.

    model, folder: name and files of the model that is served. text_of: the text of its tokens. owners: the number of
    keys, each of which learns for itself; 0: all requests are learned from together.
    Raises `ConfigError` for an encoder that cannot be used, and for more entries than can be searched.
    """
    # Not before it is needed: it imports numpy, which an API process does without.
    from skipjoin.forecast import default_folder, make_forecaster, make_owner_forecasters  # noqa: PLC0415

    forecaster = make_forecaster(config, model, folder=Path(folder), text_of=text_of)
    kept_in: Path | None = default_folder() if config.forecast_dir is None else Path(config.forecast_dir)
    if config.forecast_dir == _NOWHERE:
        kept_in = None
    if owners:
        if kept_in is not None and (common := forecaster.identity.folder(kept_in)).exists():
            _log.info("forecasts are learned for each API key: the state of all requests in %s is not used", common)
        for_owners = make_owner_forecasters(config, model, forecaster.encoder, owners, kept_in)
        return ForecastKeeper(forecaster, None if kept_in is None else for_owners.save, owners=for_owners)
    if kept_in is None:
        return ForecastKeeper(forecaster)
    forecaster.load(kept_in)
    return ForecastKeeper(forecaster, partial(forecaster.save, kept_in))
