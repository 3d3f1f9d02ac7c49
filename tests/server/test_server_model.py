from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import tiny_model as tiny
import torch
from server_worlds import ServerProcess


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model whose default sampling is greedy."""
    folder = tiny.write_model(tmp_path_factory.mktemp("model"))
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"top_k": 1}))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    found = ServerProcess(["model", str(folder)])
    yield found
    found.stop()


PROMPTS = [[7, 11, 13], list(range(40)), [200] * 17]


def complete(server: ServerProcess, **body: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def test_greedy_tokens_and_logprobs_match_transformers(server: ServerProcess, folder: Path) -> None:
    from transformers import LlamaForCausalLM  # noqa: PLC0415 - takes two seconds

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt in PROMPTS:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "echo": True, "logprobs": 1, "ignore_eos": True}
        logprobs = complete(server, **body).json()["choices"][0]["logprobs"]
        with torch.no_grad():
            ids = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)[0]
            scores = model(ids[None]).logits[0].log_softmax(-1)
        expected = [scores[position, token].item() for position, token in enumerate(ids[1:])]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
        chosen = logprobs["token_logprobs"][len(prompt) :]
        assert chosen == [max(top.values()) for top in logprobs["top_logprobs"][len(prompt) :]]


def test_seeded_output_does_not_depend_on_concurrent_requests(server: ServerProcess) -> None:
    def seeded(seed: int) -> str:
        body = {"prompt": [7, 11, 13], "max_tokens": 24, "seed": seed, "ignore_eos": True, "logprobs": 0, "top_k": -1}
        return str(complete(server, **body).json()["choices"][0]["logprobs"]["tokens"])

    alone = [seeded(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(seeded, range(6))) == alone
    assert len(set(alone)) == 6
    server.wait_idle()


def test_requests_have_the_sampling_defaults_of_the_model(server: ServerProcess) -> None:
    def text(**body: object) -> str:
        return str(complete(server, prompt=[7, 11, 13], max_tokens=24, ignore_eos=True, **body).json()["choices"])

    greedy = text(temperature=0)
    assert text(seed=1) == text(seed=2) == greedy
    assert text(seed=1, top_k=0) != greedy
    assert any("sampling defaults of the model's generation_config.json: top_k 1" in line for line in server.errors)


def test_refused_requests_run_no_step(server: ServerProcess) -> None:
    steps = server.metric("engine_steps_total")
    for body in ({"prompt": [tiny.VOCAB]}, {"prompt": [1], "max_tokens": tiny.CONTEXT}, {"prompt": [1], "top_p": 0}):
        assert complete(server, **body).status_code == 400
    assert server.metric("engine_steps_total") == steps
