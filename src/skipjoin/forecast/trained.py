from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skipjoin.config import ForecastConfig
from skipjoin.forecast.forecaster import Forecaster
from skipjoin.forecast.store import StateError, check_description, is_own, read_arrays, read_description, write_state
from skipjoin.options import ConfigError

# Field of the description with what training found.
_TRAINED = "trained"
# Field of it with the value of `forecast_encoder`.
_ENCODER = "forecast_encoder"


def write_trained(folder: Path, forecaster: Forecaster, encoder: str, about: dict[str, Any]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_state(folder, forecaster.identity, forecaster.arrays(), **{_TRAINED: {_ENCODER: encoder} | about})
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from None


@dataclass(frozen=True)
class Trained:
    folder: Path
    described: dict[str, Any]

    @classmethod
    def open(cls, folder: str | Path) -> Trained:
        folder = Path(folder)
        if not folder.is_dir():
            raise ConfigError(f"forecast_state: there is no folder {folder}; `skipjoin predict train` writes one")
        try:
            described = read_description(folder)
            check_description(described, {})
            if not isinstance(described.get(_TRAINED), dict):
                raise StateError("it was not trained; `skipjoin predict train` writes such states")
        except (StateError, OSError) as error:
            raise ConfigError(f"forecast_state: {folder} cannot be used: {_reason(error)}") from None
        if not is_own(folder):
            raise ConfigError(f"forecast_state: {folder} cannot be used: other users can change it")
        return cls(folder, described)

    @property
    def about(self) -> dict[str, Any]:
        return dict(self.described[_TRAINED])

    def configure(self, config: ForecastConfig) -> ForecastConfig:
        forecaster, encoder = str(self.described.get("forecaster")), str(self.about.get(_ENCODER))
        for name, own, given in (
            ("forecaster", forecaster, config.forecaster),
            ("forecast_encoder", encoder, None if config.forecast_encoder == "hashed" else config.forecast_encoder),
        ):
            if given not in (None, own):
                raise ConfigError(f"{name} must be {own}, as the forecast_state {self.folder} has it, got {given}")
        return replace(config, forecaster=forecaster, forecast_encoder=encoder)

    def start(self, forecaster: Forecaster) -> None:
        own = forecaster.identity
        try:
            check_description(
                self.described, {"forecaster": own.forecaster, "encoder": own.encoder, "width": own.width}
            )
            forecaster.start_from(read_arrays(self.folder, self.described), str(self.described["sha256"])[:16])
        except (StateError, OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
            raise ConfigError(f"forecast_state: {self.folder} cannot be used: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
