from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from skipjoin.config import ConfigError, EngineConfig, ForecastConfig
from skipjoin.core.forecast import Forecast
from skipjoin.core.request import FinishReason
from skipjoin.recipes import Forecasts, find

if TYPE_CHECKING:
    from skipjoin.forecast.forecaster import Forecaster
    from skipjoin.forecast.owners import OwnerForecasters

_log = logging.getLogger(__name__)

# Maximum seconds from a change until it is saved, which is what a killed process loses.
SAVE_EVERY_S = 5.0
# Maximum fraction of the time spent on saving, however large the state is.
_SAVE_SHARE = 0.02
# Named encoders; others are folders.
_SENTENCES = "minilm"
_ENCODERS = ("hashed", "embeddings", _SENTENCES)
# Value of `forecast_dir` that disables persistence.
_NOWHERE = "none"


class Predicted(Protocol):
    @property
    def forecast(self) -> Forecast: ...
    @property
    def most(self) -> int: ...
    @property
    def interval(self) -> tuple[float, float]: ...


def is_exact(reason: FinishReason) -> bool:
    return reason is FinishReason.STOP


class ForecastKeeper:
    """Forecaster with persistent state, or one for each owner. One thread owns it and calls `save_if_due`."""

    def __init__(
        self,
        forecaster: Forecaster,
        save: Callable[..., bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
        owners: OwnerForecasters | None = None,
    ) -> None:
        self.forecaster = forecaster
        self._owners = owners
        self._save = save
        self._clock = clock
        self._due = math.inf  # time of the next save; inf if nothing has changed
        self._earliest = -math.inf
        self._is_failing = False

    @property
    def batch(self) -> int:
        return self.forecaster.batch

    def encode(self, prompts: Sequence[Sequence[int]]) -> Sequence[Any]:
        """Return what `predict` needs of each prompt, the same for all owners."""
        return self.forecaster.encode(prompts)

    def predict(self, prompt: Any, max_tokens: int, owner: str = "") -> Predicted:
        if self._owners is None:
            return self.forecaster.predict(prompt, max_tokens)
        return self._owners.predict(owner, prompt, max_tokens)

    def forecast(self, prompt: Sequence[int], max_tokens: int, owner: str = "") -> Predicted:
        return self.predict(self.encode([prompt])[0], max_tokens, owner)

    def prior(self, max_tokens: int, owner: str = "") -> Forecast:
        """Return the forecast without a prompt. May be called from any thread."""
        return self.forecaster.prior(max_tokens) if self._owners is None else self._owners.prior(owner, max_tokens)

    def __len__(self) -> int:
        return len(self.forecaster if self._owners is None else self._owners)

    def learn(self, predicted: Any, tokens: int, *, exact: bool, owner: str = "") -> None:
        if self._owners is None:
            self.forecaster.learn(predicted, tokens, exact=exact)
        else:
            self._owners.learn(owner, predicted, tokens, exact=exact)
        if self._save is not None and self._due == math.inf:
            self._due = max(self._clock() + SAVE_EVERY_S, self._earliest)

    @property
    def save_in_s(self) -> float | None:
        return None if self._due == math.inf else max(0.0, self._due - self._clock())

    def save_if_due(self) -> None:
        if self._clock() >= self._due:
            self._write()

    def close(self) -> None:
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
    """Resolve the default forecaster, or None if nothing is forecast, and validate the settings."""
    if config.forecast_state is not None:
        if url is not None:
            raise ConfigError("forecast_state must not be given with forecast_url, which forecasts instead")
        if config.forecaster != "none":
            config = _started_from(config, config.forecast_state)
    is_needed = find(engine.recipe).forecasts is Forecasts.LEARNED or engine.slo_jct_scale is not None
    if url is not None:
        if config.forecaster not in (None, "prior"):
            raise ConfigError(f"forecaster must be prior, or not be given, with forecast_url, got {config.forecaster}")
        forecaster = "prior"
    else:
        forecaster = config.forecaster or ("learned" if is_needed else "none")
    if forecaster == "none" and engine.slo_jct_scale is not None:
        raise ConfigError("slo_jct_scale needs forecasts: forecaster must be another one than none")
    if config.forecaster != "none":
        _check_folders(config)
    return None if forecaster == "none" else replace(config, forecaster=forecaster)


def _started_from(config: ForecastConfig, folder: str) -> ForecastConfig:
    from skipjoin.forecast.trained import Trained  # noqa: PLC0415 (imports numpy)

    return Trained.open(folder).configure(config)


def _check_folders(config: ForecastConfig) -> None:
    encoder, kept_in = config.forecast_encoder, config.forecast_dir
    if encoder not in _ENCODERS and not Path(encoder).is_dir():
        raise ConfigError(
            f"forecast_encoder must be one of {', '.join(_ENCODERS)} or the folder of an encoder, got {encoder!r}"
        )
    if encoder == _SENTENCES:
        from skipjoin.forecast.sentences import folder_of  # noqa: PLC0415 (imports numpy)

        folder_of(encoder)
    if kept_in not in (None, _NOWHERE):
        try:
            Path(kept_in).mkdir(mode=0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=kept_in).close()
        except OSError as error:
            raise ConfigError(f"forecast_dir {kept_in} cannot be written: {error.strerror}") from error


def state_folder(config: ForecastConfig | None) -> str | None:
    if config is None or config.forecast_dir == _NOWHERE:
        return None
    if config.forecast_dir is not None:
        return str(Path(config.forecast_dir).absolute())
    from skipjoin.forecast import default_folder  # noqa: PLC0415 (imports numpy)

    return str(default_folder())


def open_keeper(
    config: ForecastConfig,
    *,
    model: str,
    folder: str,
    text_of: Callable[[Sequence[int]], str],
    owners: int = 0,
    threads: int | None = None,
) -> ForecastKeeper:
    """Open the forecaster with its saved state; `owners` is 0 if all share one forecaster."""
    # Imported lazily: it imports numpy, which an API process does not need.
    from skipjoin.forecast import make_forecaster, make_owner_forecasters  # noqa: PLC0415

    forecaster = make_forecaster(config, model, folder=Path(folder), text_of=text_of, threads=threads)
    kept_in = None if (parent := state_folder(config)) is None else Path(parent)
    if owners:
        if kept_in is not None and (common := forecaster.identity.folder(kept_in)).exists():
            _log.info("forecasts are learned for each API key: the state of all requests in %s is not used", common)
        for_owners = make_owner_forecasters(config, model, forecaster.encoder, owners, kept_in, text_of=text_of)
        return ForecastKeeper(forecaster, None if kept_in is None else for_owners.save, owners=for_owners)
    if kept_in is None:
        return ForecastKeeper(forecaster)
    forecaster.load(kept_in)
    return ForecastKeeper(forecaster, partial(forecaster.save, kept_in))
