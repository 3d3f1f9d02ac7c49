from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_worlds import ServerProcess, StartServer, outcome_of
from tiny_model import EOS

from support.waiting import wait_until

# The engine repeats the prompt and stops at its EOS.
KINDS = ([65, 66, 67, EOS], [*range(97, 123), EOS])
BLOCK = 12


def learn(server: ServerProcess, requests: int = BLOCK) -> float:
    """Send requests of both kinds and return the mean error of their forecasts in octaves once all are learned."""

    def count_and_sum() -> tuple[float, float]:
        text = httpx.get(f"{server.url}/metrics").text
        found = {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if "le" not in sample.labels
        }
        name = "skipjoin:forecast_error_octaves"
        return found[f"{name}_count"], found[f"{name}_sum"]

    def ask(number: int) -> None:
        body = {"prompt": KINDS[number % 2], "max_tokens": 300}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).raise_for_status()

    known, before = count_and_sum()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(requests)))
    wait_until(lambda: count_and_sum()[0] >= known + requests)
    return (count_and_sum()[1] - before) / requests


def test_learned_forecasts_survive_restarts_and_crashes(start_server: StartServer, tmp_path: Path) -> None:
    def start() -> ServerProcess:
        return start_server(forecaster="learned", forecast_dir=tmp_path)

    server = start()
    first = learn(server)
    learn(server, 2 * BLOCK)
    last = learn(server)
    assert last < first / 2
    server.stop()

    server = start()
    assert learn(server) < first / 2
    server.engine.send_signal(signal.SIGKILL)  # the server exits, too
    server.stop()

    server = start()
    assert learn(server) < first / 2
    server.stop()
    assert not any("forecast" in line for line in server.errors)

    (state,) = tmp_path.iterdir()
    (arrays,) = state.glob("*.safetensors")
    arrays.write_bytes(arrays.read_bytes()[:-1])
    server = start()
    assert learn(server) > first / 2
    server.stop()
    assert sum("begin again" in line for line in server.errors) == 1
    assert len(list(tmp_path.glob("*.bad-*"))) == 1
    assert state.is_dir()  # the new state


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("forecast_encoder=/no/such/folder", "must be one of hashed, embeddings, minilm or the folder"),
        ("forecast_dir=/dev/null/x", "forecast_dir /dev/null/x cannot be written: Not a directory"),
    ],
)
def test_unusable_forecast_folder_is_reported_before_loading(
    tokenizer_folder: Path, setting: str, message: str
) -> None:
    code, errors = outcome_of("simulated", str(tokenizer_folder), "0", "9", "9", setting)
    assert code == 2
    assert message in errors
    assert "pretending to load" not in errors
