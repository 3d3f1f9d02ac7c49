"""Validation of a server's settings before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from skipjoin.config import ConfigError, EngineConfig, ForecastConfig, ServerConfig
from skipjoin.server.settings import check_settings

NO_FORECASTS = ForecastConfig()


@pytest.mark.parametrize(
    ("engine", "server", "message"),
    [
        ({}, {"chat_template": "FOLDER/no.jinja"}, "chat_template FOLDER/no.jinja is not a file"),
        ({}, {"api_key_file": "FOLDER/no.keys"}, "api_key_file FOLDER/no.keys cannot be read"),
        ({"device": "cuda:1"}, {"replicas": 2}, "device must be auto, cpu or cuda where Ray places"),
        ({"slo_jct_scale": 2.0}, {"slo_jct_ms": 500.0}, "slo_jct_scale and slo_jct_ms exclude each other"),
        ({"timeline": "FOLDER/no/timeline"}, {}, "timeline FOLDER/no/timeline cannot be written: No such file"),
    ],
)
def test_unusable_settings_are_refused(
    tmp_path: Path, engine: dict[str, object], server: dict[str, object], message: str
) -> None:
    def filled(settings: dict[str, object]) -> dict[str, object]:
        return {
            name: value.replace("FOLDER", str(tmp_path)) if isinstance(value, str) else value
            for name, value in settings.items()
        }

    with pytest.raises(ConfigError) as refused:
        check_settings(EngineConfig(**filled(engine)), ServerConfig(**filled(server)), NO_FORECASTS)
    assert str(refused.value).startswith(message.replace("FOLDER", str(tmp_path)))


def test_key_files_and_output_weight_are_applied(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a\nb\n")
    server = ServerConfig(api_key_file=str(keys), fair_by="key", fair_output_weight=3.0)
    settings = check_settings(EngineConfig(recipe="fcfs"), server, NO_FORECASTS)
    assert settings.server.api_keys == ("a", "b")
    assert settings.engine.fair_output_weight == 3.0
    assert settings.forecasts is None
