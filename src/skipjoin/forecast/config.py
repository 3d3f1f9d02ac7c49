from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from skipjoin.config import ForecastConfig
from skipjoin.forecast.alise import Alise
from skipjoin.forecast.embeddings import HuggingFaceEncoder, MeanEmbeddings, TextOf
from skipjoin.forecast.encode import Encoder, HashedTokens
from skipjoin.forecast.forecaster import Forecaster
from skipjoin.forecast.head import REPLAYED
from skipjoin.forecast.index import VectorIndex
from skipjoin.forecast.mass import Array
from skipjoin.forecast.models import Learned, Model, PriorOnly
from skipjoin.forecast.owners import MAX_OWNERS, OwnerForecasters
from skipjoin.options import ConfigError

FORECASTERS = (Learned.name, Alise.name, PriorOnly.name)
HASHED, EMBEDDINGS = "hashed", "embeddings"


def make_forecaster(
    config: ForecastConfig,
    served: str = "",
    clock: Callable[[], float] = time.time,
    *,
    folder: Path | None = None,
    text_of: TextOf | None = None,
) -> Forecaster:
    """Return an untrained forecaster; `learned` if the configuration names none.

    Args:
        served: Name of the model whose requests are forecast.
        folder: Folder of that model, for its embeddings.
        text_of: Returns the text of a prompt's tokens, for an encoder with its own tokenizer.
    """
    encoder = _encoder(config.forecast_encoder, folder, text_of)
    return Forecaster(encoder, _model(config, encoder, clock), served)


def make_owner_forecasters(
    config: ForecastConfig, served: str, encoder: Encoder, owners: int, kept_in: Path | None
) -> OwnerForecasters:
    parts = min(owners, MAX_OWNERS)

    def make(owner: str, first: Array) -> Forecaster:
        return Forecaster(encoder, _model(config, encoder, time.time, parts), served, owner=owner, first=first)

    return OwnerForecasters(make, kept_in)


def _model(config: ForecastConfig, encoder: Encoder, clock: Callable[[], float], parts: int = 1) -> Model:
    if config.forecaster == PriorOnly.name:
        return PriorOnly()
    entries = max(1, config.forecast_entries // parts)
    index = VectorIndex(encoder.width, entries, config.forecast_max_age_s, clock)
    return Alise(index, encoder.width) if config.forecaster == Alise.name else Learned(index, max(1, REPLAYED // parts))


def _encoder(name: str, folder: Path | None, text_of: TextOf | None) -> Encoder:
    if name == HASHED:
        return HashedTokens()
    if name == EMBEDDINGS:
        if folder is None:
            raise ConfigError(f"forecast_encoder: {EMBEDDINGS} needs the folder of the model that is served")
        return MeanEmbeddings(folder)
    if text_of is None:
        raise ConfigError(f"forecast_encoder: {name!r} needs the texts of prompts, and here are their tokens only")
    return HuggingFaceEncoder(name, text_of)
