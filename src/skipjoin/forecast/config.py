from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from skipjoin.config import ForecastConfig
from skipjoin.forecast.alise import Alise
from skipjoin.forecast.embeddings import MeanEmbeddings
from skipjoin.forecast.encode import Encoder, HashedTokens, words
from skipjoin.forecast.forecaster import Forecaster
from skipjoin.forecast.head import REPLAYED
from skipjoin.forecast.index import VectorIndex
from skipjoin.forecast.mass import Array
from skipjoin.forecast.models import Learned, Model, PriorOnly
from skipjoin.forecast.owners import MAX_OWNERS, OwnerForecasters
from skipjoin.forecast.sentences import SentenceEncoder, TextOf
from skipjoin.forecast.trained import Trained
from skipjoin.options import ConfigError

FORECASTERS = (Learned.name, Alise.name, PriorOnly.name)
HASHED, EMBEDDINGS = "hashed", "embeddings"
Clock = Callable[[], float]
Read = Callable[[Sequence[int]], Sequence[int]]


def make_forecaster(
    config: ForecastConfig,
    served: str = "",
    clock: Clock = time.time,
    *,
    folder: Path | None = None,
    text_of: TextOf | None = None,
    threads: int | None = None,
    remembered: int = 0,
    read: Read | None = None,
) -> Forecaster:
    """Return a forecaster; `read` returns the tokens that are hashed, unless `forecast_state` decides it."""
    trained = None if config.forecast_state is None else Trained.open(config.forecast_state)
    if trained is not None:
        config = trained.configure(config)
    if config.forecast_encoder in (HASHED, EMBEDDINGS):
        encoder: Encoder = _encoder_of_tokens(config.forecast_encoder, folder)
    elif text_of is None:
        raise ConfigError(
            f"forecast_encoder: {config.forecast_encoder!r} needs the texts of prompts, and here are their tokens only"
        )
    else:
        encoder = SentenceEncoder(config.forecast_encoder, text_of, threads=threads, remembered=remembered)
    read = read if trained is None else _words_of(text_of)
    return _started(Forecaster(encoder, _model(config, encoder, clock), served, read=read), trained)


def make_owner_forecasters(
    config: ForecastConfig,
    served: str,
    encoder: Encoder,
    owners: int,
    kept_in: Path | None,
    *,
    text_of: TextOf | None = None,
) -> OwnerForecasters:
    trained = None if config.forecast_state is None else Trained.open(config.forecast_state)
    parts = min(owners, MAX_OWNERS)

    def make(owner: str, first: Array) -> Forecaster:
        model = _model(config, encoder, time.time, parts)
        read = None if trained is None else _words_of(text_of)
        return _started(Forecaster(encoder, model, served, owner=owner, first=first, read=read), trained)

    return OwnerForecasters(make, kept_in)


def _started(forecaster: Forecaster, trained: Trained | None) -> Forecaster:
    if trained is not None:
        trained.start(forecaster)
    return forecaster


def _words_of(text_of: TextOf | None) -> Read:
    if text_of is None:
        raise ConfigError("forecast_state needs the texts of prompts, and here are their tokens only")
    return lambda prompt: words(text_of(prompt))


def _model(config: ForecastConfig, encoder: Encoder, clock: Clock, parts: int = 1) -> Model:
    if config.forecaster == PriorOnly.name:
        return PriorOnly()
    entries = max(1, config.forecast_entries // parts)
    index = VectorIndex(encoder.width, entries, config.forecast_max_age_s, clock)
    return Alise(index, encoder.width) if config.forecaster == Alise.name else Learned(index, max(1, REPLAYED // parts))


def _encoder_of_tokens(name: str, folder: Path | None) -> Encoder:
    if name == HASHED:
        return HashedTokens()
    if folder is None:
        raise ConfigError(f"forecast_encoder: {EMBEDDINGS} needs the folder of the model that is served")
    return MeanEmbeddings(folder)
