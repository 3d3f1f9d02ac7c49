from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

from skipjoin.config import ConfigError, EngineConfig, ForecastConfig, ServerConfig, check_not_one_card
from skipjoin.config.access import check_certificates, with_keys_of_files
from skipjoin.engine.forecasting import chosen_forecasts
from skipjoin.extras import require
from skipjoin.model.folder import check_model
from skipjoin.model.generation_config import sampling_defaults
from skipjoin.server.batches.disk import FolderLock, batch_folder, is_named
from skipjoin.server.batches.records import NoSpace, StoreError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """`forecasts` is None if the recipe reads none, or another server makes them."""

    engine: EngineConfig
    server: ServerConfig
    forecasts: ForecastConfig | None


def check_settings(engine: EngineConfig, server: ServerConfig, forecasts: ForecastConfig) -> Settings:
    if server.chat_template is not None and not Path(server.chat_template).is_file():
        raise ConfigError(f"chat_template {server.chat_template} is not a file")
    server = with_keys_of_files(server)
    check_certificates(server)
    if server.replicas > 1:
        check_not_one_card(engine.device)
        if engine.distributed_executor_backend == "mp":
            raise ConfigError("distributed_executor_backend must be auto or ray with replicas, which Ray places")
    if engine.slo_jct_scale is not None and server.slo_jct_ms is not None:
        raise ConfigError("slo_jct_scale and slo_jct_ms exclude each other: both are for requests without an objective")
    engine, server = _shared(engine, server)
    engine = replace(engine, otlp_traces_endpoint=server.otlp_traces_endpoint)
    chosen = chosen_forecasts(forecasts, engine, url=server.forecast_url)
    if engine.timeline is not None:
        try:
            Path(engine.timeline).open("a").close()
        except OSError as error:
            raise ConfigError(f"timeline {engine.timeline} cannot be written: {error.strerror}") from error
    return Settings(engine, server, chosen)


def _shared(engine: EngineConfig, server: ServerConfig) -> tuple[EngineConfig, ServerConfig]:
    """Return the settings with the engine's part of fairness, or without fairness that only `auto` asks for."""
    if server.sharing == "none":
        return engine, server
    try:
        return replace(engine, fair_output_weight=server.fair_output_weight), server
    except ConfigError as error:
        if server.fair_by != "auto":
            raise
        logger.info("API keys do not share the service fairly, because %s", error)
        return engine, replace(server, fair_by="none")


def check_files(engine: EngineConfig, server: ServerConfig) -> None:
    """Check files and optional packages, before torch is imported, which takes seconds."""
    _check_batches(server)
    if server.forecast_url is not None:
        require("forecast_url", "predict")
    if server.otlp_traces_endpoint is not None:
        require("otlp_traces_endpoint", "otel")
    if server.replicas > 1 or engine.is_on_ray:
        require("more than one machine or replica", "distributed")
    folder = check_model(engine.model, engine.load_format)
    sampling_defaults(folder, engine.generation_config)


def _check_batches(config: ServerConfig) -> None:
    if config.batch_db is not None:
        require("batch_db", "batches", "postgres")
    folder = batch_folder(config)
    if folder is None:
        return
    if is_named(config):
        require("batch_dir", "batches")
    if config.batch_dir is None and config.batch_db is None:
        return  # a server waits for a default folder that another one has
    try:
        FolderLock(folder, shared=config.batch_db is not None).close()
    except NoSpace:
        pass  # a running server waits for space
    except StoreError as error:
        raise ConfigError(f"files and batches cannot be kept: {error}") from error


async def check_forecast_server(config: ServerConfig) -> None:
    # Imported only when needed, because it imports aiohttp.
    from skipjoin.server.api.length_server import KEY_VARIABLE, LengthServer  # noqa: PLC0415

    server = LengthServer(config, os.environ.get(KEY_VARIABLE))
    try:
        await server.check()
    finally:
        await server.close()
