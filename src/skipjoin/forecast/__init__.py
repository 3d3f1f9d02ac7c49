"""Output length forecasts from prompts, learned online (ALISE section 3.1)."""

import skipjoin.forecast.blas  # noqa: F401 - before any other module of this package loads numpy
from skipjoin.config import ForecastConfig
from skipjoin.forecast.config import make_forecaster, make_owner_forecasters
from skipjoin.forecast.encode import words
from skipjoin.forecast.forecaster import Forecaster, Predicted
from skipjoin.forecast.store import default_folder

__all__ = [
    "ForecastConfig",
    "Forecaster",
    "Predicted",
    "default_folder",
    "make_forecaster",
    "make_owner_forecasters",
    "words",
]
