"""Run a server in its own process, for tests.

python serve.py simulated TOKENIZER_FOLDER STEP_SECONDS BLOCKS CONTEXT [SETTING=VALUE ...]
python serve.py model FOLDER [SETTING=VALUE ...]
python serve.py command ARGUMENT ...                  # of the command `skipjoin`

`descriptors` is not a setting: it limits the number of open files. Plus signs separate several values of a setting.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_origin

from skipjoin.cli import app
from skipjoin.config import EngineConfig, ForecastConfig, ServerConfig
from skipjoin.options import settings_of
from skipjoin.server.engines.engine_handle import EngineHandle
from skipjoin.server.engines.engine_program import ENGINE_COMMAND
from skipjoin.server.engines.replicas import ReplicaSet
from skipjoin.server.lifecycle import MakeEngines, run_server

NO_FORECASTS = ForecastConfig()
_SETTINGS = {**settings_of(EngineConfig), **settings_of(ForecastConfig), **settings_of(ServerConfig)}


def _settings(words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"port": 0}
    for name, _, text in (word.partition("=") for word in words):
        setting = _SETTINGS.get(name)
        if setting is None:
            found[name] = int(text)
        else:
            found[name] = tuple(text.split("+")) if get_origin(setting.kind) is tuple else setting.read(text)
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
    make_engines: MakeEngines = ReplicaSet if config.replicas > 1 else EngineHandle
    return run_server(engine, config, forecasts, engine_command=command, make_engines=make_engines)


if __name__ == "__main__":
    sys.exit(main())
