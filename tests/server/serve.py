"""Run a server in its own process, for tests.

python serve.py simulated TOKENIZER_FOLDER STEP_SECONDS BLOCKS CONTEXT [SETTING=VALUE ...]
python serve.py model FOLDER [SETTING=VALUE ...]
python serve.py command ARGUMENT ...                  # of the command `skipjoin`

`descriptors` is not a setting: it limits the number of open files.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skipjoin.cli import app
from skipjoin.config import EngineConfig, ForecastConfig, ServerConfig
from skipjoin.options import settings_of
from skipjoin.server.engines.engine_program import ENGINE_COMMAND
from skipjoin.server.engines.replicas import ReplicaSet
from skipjoin.server.lifecycle import MakeEngines, one_engine, run_server

NO_FORECASTS = ForecastConfig()
_READ = {
    "port": int,
    "descriptors": int,
    **dict.fromkeys(("max_connections", "max_connections_per_address", "max_connections_per_key"), int),
    "forwarded_allow_ips": lambda value: tuple(value.split("+")),
    "max_prompt_scores": int,
    "max_queued_requests": int,
    "max_queued_tokens": int,
    "max_body_bytes": int,
    "metrics_compat": str,
    "priority_range": str,
    "fair_by": str,
    "served_model_name": str,
    "priority_tier": str,
    "timeline": str,
    **dict.fromkeys(("otlp_traces_endpoint", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs"), str),
    "replicas": int,
    "forecaster": str,
    "forecast_dir": str,
    "forecast_encoder": str,
    "forecast_url": str,
    "chat_template": str,
    "log_format": str,
    "console": lambda value: value == "True",
    **dict.fromkeys(("api_keys", "metrics_keys"), lambda value: tuple(value.split("+"))),
    "metrics_port": int,
    "batch_dir": str,
    "batch_db": str,
    **dict.fromkeys(("batch_inflight", "batch_max_lines", "batch_max_file_bytes", "batch_max_active_per_key"), int),
}


def _settings(words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"port": 0}
    for name, _, value in (word.partition("=") for word in words):
        found[name] = _READ.get(name, float)(value)
    return found


def main() -> int:
    kind, folder, *rest = sys.argv[1:]
    if kind == "command":
        app([folder, *rest])
    if kind == "model":
        engine = EngineConfig(model=folder, kv_cache_gib=0.01, threads=1, profile="off")
        return _run(engine, ServerConfig(**_settings(rest)), ENGINE_COMMAND)
    settings = _settings(rest[3:])
    if (descriptors := settings.pop("descriptors", None)) is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    simulated = str(Path(__file__).parent / "simulated_engine.py")
    command = (sys.executable, simulated, folder, *rest[:3])
    engine = EngineConfig(timeline=settings.pop("timeline", None))
    forecasts = ForecastConfig(**{name: settings.pop(name) for name in settings_of(ForecastConfig) if name in settings})
    return _run(engine, ServerConfig(**settings), command, forecasts)


def _run(
    engine: EngineConfig, config: ServerConfig, command: Sequence[str], forecasts: ForecastConfig = NO_FORECASTS
) -> int:
    make_engines: MakeEngines = ReplicaSet if config.replicas > 1 else one_engine
    return run_server(engine, config, forecasts, engine_command=command, make_engines=make_engines)


if __name__ == "__main__":
    sys.exit(main())
