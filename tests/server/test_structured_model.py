from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
import tiny_model as tiny
from batch_client import CHAT, answers, line, submit, wait_for
from pydantic import BaseModel
from server_worlds import ServerProcess

SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green"]},
        "numbers": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "minItems": 60,
            "maxItems": 70,
        },
    },
    "required": ["color", "numbers"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "colors", "schema": SCHEMA, "strict": True}}
MESSAGES: Any = [{"role": "user", "content": "hello"}]


class Answer(BaseModel):
    color: Literal["red", "green"]
    level: Literal[1, 2, 3]


def asked(seed: int) -> dict[str, Any]:
    return {"model": None, "messages": MESSAGES, "seed": seed, "max_tokens": 260, "response_format": FORMAT}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("model"))


@contextmanager
def serving(folder: Path, batch_dir: Path) -> Iterator[tuple[ServerProcess, openai.OpenAI]]:
    server = ServerProcess(["model", str(folder), f"batch_dir={batch_dir}", "batch_inflight=2"])
    try:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            yield server, client
    finally:
        server.stop()


def test_outputs_are_valid_and_unchanged_by_kill(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path) as (server, client):
        parsed = client.chat.completions.parse(
            model=str(folder), messages=MESSAGES, response_format=Answer, n=4, seed=1, max_tokens=60
        )
        assert all(isinstance(choice.message.parsed, Answer) for choice in parsed.choices)
        assert len({choice.message.content for choice in parsed.choices}) > 1
        expected = {
            str(seed): client.chat.completions.create(**asked(seed)).choices[0].message.content for seed in range(4)
        }
        for text in expected.values():
            jsonschema.validate(json.loads(text or ""), SCHEMA)
        tokens = server.metric("generation_tokens_total")
        batch = submit(client, [line(name, CHAT, **asked(int(name))) for name in expected], CHAT)
        while server.metric("generation_tokens_total") < tokens + 300:
            time.sleep(0.01)
        os.kill(server.process.pid, signal.SIGKILL)
    with serving(folder, tmp_path) as (_, client):
        batch = wait_for(client, batch)
        found = answers(client, batch.output_file_id)
    assert {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in found
    } == expected
