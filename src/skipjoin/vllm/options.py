from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

from skipjoin.forecast import ForecastConfig
from skipjoin.options import ConfigError, Option, Value, check, settings_of, unknown
from skipjoin.recipes import BEST_EFFORT_WAIT_S, DEFAULT, Forecasts, Recipe, check_recipe, find

KEY = "skipjoin"
_FORECASTER = {field.name for field in fields(ForecastConfig)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginOptions:
    recipe: Annotated[str, Option("Scheduler, such as fastserve or fastserve[eviction=recompute].")] = DEFAULT
    slo_s: Annotated[
        float | None,
        Option("Acceptable seconds per output token (default: derived from step times).", above=0, high=1e6),
    ] = None
    best_effort_wait_s: Annotated[
        float, Option("Age from which a best-effort request is served as real-time.", above=0, high=1e9)
    ] = BEST_EFFORT_WAIT_S
    fair_output_weight: Annotated[
        float | None,
        Option(
            "Weight of a generated token relative to a prompt token in fair shares of programs.", above=0, high=1000
        ),
    ] = None
    max_requests: Annotated[
        int | None,
        Option("Maximum number of requests at once, which recipes with a starvation bound need.", low=1, high=1 << 20),
    ] = None
    metrics_port: Annotated[
        int | None,
        Option("Port of Prometheus metrics; data-parallel engines use the next ones.", low=1, high=65_535),
    ] = None
    metrics_host: Annotated[str, Option("Address on which the metrics are served.")] = "127.0.0.1"
    params: Mapping[str, Value] = field(default_factory=dict)
    forecasts: ForecastConfig | None = None

    def __post_init__(self) -> None:
        check(self)

    @property
    def found(self) -> Recipe:
        return find(self.recipe)


def read_options(additional_config: object) -> PluginOptions:
    given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"--additional-config: {KEY} must be an object, got {given!r}")
    own = settings_of(PluginOptions)
    known = (*own, "params", *_FORECASTER)
    for name in given:
        if name not in known:
            raise unknown(f"--additional-config: {KEY}", name, known)
    params = given.get("params", {})
    if not isinstance(params, Mapping):
        raise ConfigError(f"--additional-config: {KEY}.params must be an object, got {params!r}")
    try:
        options = PluginOptions(**{name: given[name] for name in own if name in given}, params=dict(params))
        check_recipe(options.recipe, options.params)
        return _with_forecasts(options, {name: given[name] for name in _FORECASTER if name in given})
    except ConfigError as error:
        raise ConfigError(f"--additional-config: {KEY}: {error}") from error


def _with_forecasts(options: PluginOptions, given: Mapping[str, Any]) -> PluginOptions:
    config = ForecastConfig(**given)
    if config.forecast_encoder != "hashed":
        raise ConfigError(f"forecast_encoder must be hashed inside vLLM, got {config.forecast_encoder!r}")
    if config.forecast_state is not None:
        raise ConfigError("forecast_state cannot be used inside vLLM, whose scheduler has no texts of prompts")
    is_needed = options.found.forecasts is Forecasts.LEARNED
    if config.forecaster == "none" or (config.forecaster is None and not is_needed):
        return options
    return replace(options, forecasts=config)
