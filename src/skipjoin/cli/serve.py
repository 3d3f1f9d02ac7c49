from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from skipjoin.cli.options import Section, Values, engine_values, takes, typed_flags, variables_of, with_flags
from skipjoin.cli.settings_file import unknown_variables
from skipjoin.config import ConfigError, EngineConfig, ForecastConfig, ServerConfig
from skipjoin.extras import require
from skipjoin.server import logs
from skipjoin.system.garbage import without_garbage_collection

if TYPE_CHECKING:
    from skipjoin.server.lifecycle import MakeEngines


SECTIONS = {
    "engine": Section(EngineConfig, finish=engine_values, from_environment=True),
    "forecasts": Section(ForecastConfig, from_environment=True),
    "server": Section(ServerConfig, from_environment=True),
}


@takes(**SECTIONS)
def serve(
    *,
    check: Annotated[
        bool, typer.Option("--check", help="Check the settings, files, ports and the model's configuration, and exit.")
    ] = False,
    engine: Values,
    forecasts: Values,
    server: Values,
) -> None:
    """Serve MODEL over the OpenAI API."""
    require("skipjoin serve", "serve")
    with without_garbage_collection():
        from skipjoin.server.engines.engine_handle import EngineHandle  # noqa: PLC0415
        from skipjoin.server.engines.replicas import ReplicaSet  # noqa: PLC0415
        from skipjoin.server.lifecycle import check_server, run_server  # noqa: PLC0415

    if server["log_format"] == "json":
        logs.configure("info", "json")
    for warning in unknown_variables(variables_of(SECTIONS.values())):
        logs.warn(warning)
    flags = typed_flags(section.settings() for section in SECTIONS.values())
    http = ServerConfig(**server)
    make_engines: MakeEngines = EngineHandle
    if http.replicas > 1:
        if engine["timeline"] is not None:
            raise ConfigError(f"timeline is written by one engine: replicas must be 1 with it, got {http.replicas}")
        # Ray places the replicas, and an engine's ranks run where its replica is.
        make_engines = partial(ReplicaSet, address=engine["ray_address"])
        engine["ray_address"] = None
    if check:
        raise typer.Exit(check_server(EngineConfig(**engine), http, ForecastConfig(**forecasts), _check_engine))
    code = run_server(
        EngineConfig(**engine),
        http,
        ForecastConfig(**forecasts),
        make_engines=make_engines,
        spell=partial(with_flags, flags=flags),
    )
    raise typer.Exit(code)


def _check_engine(config: EngineConfig) -> None:
    with without_garbage_collection():
        from skipjoin.engine.load import check_load  # noqa: PLC0415

    check_load(config)
