from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from server_worlds import READY

from skipjoin.config import ConfigError, EngineConfig, ForecastConfig, ServerConfig
from skipjoin.model.errors import ModelError
from skipjoin.server.api.service import _names
from skipjoin.server.lifecycle import Server
from skipjoin.server.settings import check_files, check_settings

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


@pytest.mark.parametrize(
    ("keys", "fair_by", "params", "is_shared"),
    [
        (("a", "b"), "auto", {}, True),
        (("a", "a"), "auto", {}, False),
        (("a", "b"), "none", {}, False),
        (("a", "b"), "auto", {"starvation_bound_s": 60.0}, False),
    ],
)
def test_several_keys_share_the_service_unless_the_operator_or_a_bound_forbids_it(
    caplog: pytest.LogCaptureFixture, keys: tuple[str, ...], fair_by: str, params: dict[str, float], is_shared: bool
) -> None:
    caplog.set_level("INFO")
    engine = EngineConfig(recipe="fastserve", recipe_params=params)
    found = check_settings(engine, ServerConfig(api_keys=keys, fair_by=fair_by), NO_FORECASTS)
    assert found.engine.fair_output_weight == (2.0 if is_shared else None)
    assert (found.server.sharing == "key") == is_shared
    assert ("starvation_bound_s must not be set together with fair_by" in caplog.text) == bool(params)


def test_missing_model_is_refused_before_the_engine_starts(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="typo is not a folder"):
        check_files(EngineConfig(model=str(tmp_path / "typo")), ServerConfig())


def test_model_goes_by_its_name_and_also_answers_to_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given in (f"{tmp_path}/Some-1B", f"{tmp_path}/Some-1B/", "./Some-1B", "Some-1B"):
        info = msgspec.structs.replace(READY, model=given, folder=str(Path(given)))
        name, *others = _names(ServerConfig(), info)
        assert name == "Some-1B"
        assert others == [] or str(tmp_path / "Some-1B") in others
        assert _names(ServerConfig(served_model_name="mine"), info) == ("mine",)
    assert _names(ServerConfig(), msgspec.structs.replace(READY, model="org/some", folder="/cache/1")) == ("org/some",)


@pytest.mark.parametrize("has_template", [False, True])
@pytest.mark.parametrize("settings", [{}, {"api_keys": ("secret",)}, {"ssl_certfile": "a", "ssl_ca_certs": "b"}])
def test_printed_command_names_the_model_streams_and_ends(settings: dict[str, object], has_template: bool) -> None:
    service = SimpleNamespace(
        name="it's ünique",
        info=msgspec.structs.replace(READY, max_model_len=64),
        tokenizer=SimpleNamespace(chat_template=object() if has_template else None),
    )
    server = SimpleNamespace(_service=service, _config=ServerConfig(**settings))
    words = shlex.split(Server._example(server, "https://host:1"))  # type: ignore[arg-type]
    assert words[:3] == ["curl", "-N", f"https://host:1/v1/{'chat/' * has_template}completions"]
    body = json.loads(words[-1])
    assert (body["model"], body["stream"], body["max_tokens"]) == ("it's ünique", True, 32)
    assert ("messages" in body) is has_template
    assert ("Authorization: Bearer KEY" in words, "secret" in str(words)) == ("api_keys" in settings, False)
    assert ("--cert" in words) == ("ssl_ca_certs" in settings)
