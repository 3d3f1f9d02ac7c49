"""Checks of a server's settings before it starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from skipjoin.config import ConfigError, EngineConfig, ForecastConfig, ServerConfig, check_not_one_card
from skipjoin.config.access import check_certificates, with_keys_of_files
from skipjoin.engine.forecasting import chosen_forecasts


@dataclass(frozen=True, slots=True)
class Settings:
    """Checked settings. `forecasts` is None if the recipe reads none, or another server makes them."""

    engine: EngineConfig
    server: ServerConfig
    forecasts: ForecastConfig | None


def check_settings(engine: EngineConfig, server: ServerConfig, forecasts: ForecastConfig) -> Settings:
    """Check settings across configurations, and add the keys from files."""
    if server.chat_template is not None and not Path(server.chat_template).is_file():
        raise ConfigError(f"chat_template {server.chat_template} is not a file")
    server = with_keys_of_files(server)
    check_certificates(server)
    if server.replicas > 1:
        check_not_one_card(engine.device)
    if engine.slo_jct_scale is not None and server.slo_jct_ms is not None:
        raise ConfigError("slo_jct_scale and slo_jct_ms exclude each other: both are for requests without an objective")
    if server.fair_by != "none":
        engine = replace(engine, fair_output_weight=server.fair_output_weight)
    engine = replace(engine, otlp_traces_endpoint=server.otlp_traces_endpoint)
    chosen = chosen_forecasts(forecasts, engine, url=server.forecast_url)
    if engine.timeline is not None:
        try:
            Path(engine.timeline).open("a").close()
        except OSError as error:
            raise ConfigError(f"timeline {engine.timeline} cannot be written: {error.strerror}") from error
    return Settings(engine, server, chosen)
