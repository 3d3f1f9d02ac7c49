"""Which forecaster there is to be, and how to make it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from skipjoin.forecast.encode import Encoder, HashedTokens
from skipjoin.forecast.forecaster import Forecaster
from skipjoin.forecast.index import VectorIndex
from skipjoin.forecast.models import Learnt, Model, PriorOnly
from skipjoin.knobs import Knob, check

FORECASTERS = ("learnt", "prior")
GROUP = "Forecasts"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastConfig:
    """A forecaster's settings. Raises `ConfigError` on a value outside its bounds."""

    forecaster: Annotated[
        str, Knob("What foresees output lengths", choices=FORECASTERS, flags=("--forecaster",), group=GROUP)
    ] = "learnt"
    forecast_encoder: Annotated[
        str,
        Knob(
            "What makes vectors of prompts: 'hashed' tokens, 'embeddings' of the served model, or the folder of an "
            "encoder.",
            metavar="NAME",
            group=GROUP,
        ),
    ] = "hashed"
    forecast_entries: Annotated[
        int, Knob("Most past requests to find similar ones among.", low=1, high=1_000_000, group=GROUP)
    ] = 10_000
    forecast_max_age_s: Annotated[
        float, Knob("Oldest past request to find, in seconds.", above=0, high=1e12, metavar="SECONDS", group=GROUP)
    ] = 30 * 86400.0

    def __post_init__(self) -> None:
        check(self)


def make_forecaster(config: ForecastConfig, served: str = "", clock: Callable[[], float] = time.time) -> Forecaster:
    """The forecaster of these settings, which has learnt nothing. served: the folder or name of the model whose
    requests it is for. clock: seconds, for the age of what was learnt.

    Raises `ConfigError` for an encoder that cannot be read, and for entries that need usearch where it is missing.
    """
    encoder: Encoder = HashedTokens()
    index = VectorIndex(encoder.width, config.forecast_entries, config.forecast_max_age_s, clock)
    model: Model = PriorOnly() if config.forecaster == "prior" else Learnt(index)
    return Forecaster(encoder, model, served)
