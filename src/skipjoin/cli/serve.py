"""`skipjoin serve`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import typer

from skipjoin.cli.options import Section, Values, engine_values, takes
from skipjoin.config import ConfigError, EngineConfig, ForecastConfig, ServerConfig

if TYPE_CHECKING:
    from skipjoin.server.launch import MakeEngines


@takes(
    engine=Section(EngineConfig, finish=engine_values), forecasts=Section(ForecastConfig), server=Section(ServerConfig)
)
def serve(*, engine: Values, forecasts: Values, server: Values) -> None:
    """Serve MODEL over the OpenAI API."""
    from skipjoin.server.engines.replicas import ReplicaSet  # noqa: PLC0415
    from skipjoin.server.launch import one_engine, run_server  # noqa: PLC0415

    http = ServerConfig(**server)
    make_engines: MakeEngines = one_engine
    if http.replicas > 1:
        if engine["timeline"] is not None:
            raise ConfigError(f"timeline is written by one engine: replicas must be 1 with it, got {http.replicas}")
        # Replicas are placed by it, and an engine's ranks where its replica is.
        make_engines = partial(ReplicaSet, address=engine["ray_address"])
        engine["ray_address"] = None
    raise typer.Exit(run_server(EngineConfig(**engine), http, ForecastConfig(**forecasts), make_engines=make_engines))
