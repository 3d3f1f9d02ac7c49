from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from skipjoin.config.shared import forecast_option
from skipjoin.options import ConfigError, check

FORECASTERS = ("learned", "alise", "prior", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastConfig:
    forecaster: Annotated[
        str | None,
        forecast_option(
            "Predictor of output lengths (default: learned if the recipe reads forecasts, else none)",
            choices=FORECASTERS,
        ),
    ] = None
    forecast_encoder: Annotated[
        str,
        forecast_option(
            "Representation by which prompts are compared: hashed tokens, the model's embeddings, the sentence encoder "
            "of the extra encoder, or a Hugging Face encoder in a folder.",
            metavar="hashed|embeddings|minilm|FOLDER",
        ),
    ] = "hashed"
    forecast_state: Annotated[
        str | None,
        forecast_option(
            "Folder of a state that `skipjoin predict train` wrote, from which forecasts start. It sets forecaster and "
            "encoder.",
            metavar="DIR",
        ),
    ] = None
    forecast_dir: Annotated[
        str | None,
        forecast_option("Folder of the learned state; none discards it on exit (default: in the user's cache folder)."),
    ] = None
    forecast_entries: Annotated[
        int, forecast_option("Maximum number of past requests to predict from.", low=1, high=10_000_000)
    ] = 10_000
    forecast_max_age_s: Annotated[
        float, forecast_option("Age from which a past request is forgotten.", above=0, high=1e12)
    ] = 30 * 86400.0

    def __post_init__(self) -> None:
        check(self)
        for name in ("forecast_encoder", "forecast_state", "forecast_dir"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} must not be empty")
        if self.forecaster in ("prior", "none") and self.forecast_encoder != "hashed":
            raise ConfigError(
                f"forecast_encoder must be hashed with forecaster {self.forecaster}, which compares no prompts, "
                f"got {self.forecast_encoder!r}"
            )
