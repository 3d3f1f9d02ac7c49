"""GGUF files of small models give llama.cpp's logits here. The package `xllamacpp` is not in the locks.

PYTHONPATH=FOLDER_WITH_XLLAMACPP python -m pytest tests/model/test_gguf_llamacpp.py
"""

from __future__ import annotations

import json
import math
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import VOCAB, PagedRunner
from test_gguf import FAMILIES, reference_of

from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model
from support.gguf_files import Kind, write_model

xllamacpp = pytest.importorskip("xllamacpp")
PROMPT, OUTPUT, EOS = 30, 20, 2
# llama.cpp looks up gelu in a table of float16. Gemma 4 has two of them in a layer, and no scale of attention.
TOLERANCE, OF_TWO_MLPS = 5e-3, 3e-2
# With 8 pairs, the ramp of YaRN ends at pair 2: llama.cpp rounds what is in between, and gpt-oss does not.
_WHOLE_RAMP = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False}
_WHOLE_RAMP |= {"rope_theta": (32 / 2 / math.pi) ** 4 * 1.000001}
# llama.cpp reads norms of queries and keys of Command R, and windows of EXAONE 4, with 64 layers only.
_CHANGES: dict[str, dict[str, Any]] = {
    "gpt-oss": {"rope_parameters": _WHOLE_RAMP},
    "cohere": {"num_hidden_layers": 64},
    # Windows of Phi-3 are ignored, and long factors are used if the context may be long, which is at least 256.
    "phi3": {"sliding_window": None},
    "phi3-longrope": {"original_max_position_embeddings": 256, "max_position_embeddings": 512},
    "exaone4": {"num_hidden_layers": 64, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16},
}
_F32 = 0  # ggml's number of the type


def answered(file: Path, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Return the tokens that llama.cpp chooses, and the logarithms of the probabilities of all before each choice."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(file)
    parameters.n_ctx, parameters.n_parallel, parameters.n_gpu_layers = 128, 1, 0
    parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type(_F32)
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    parameters.warmup = False
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(parameters)
    body: dict[str, Any] = {"prompt": prompt, "n_predict": OUTPUT, "temperature": 0, "n_probs": VOCAB}
    body["ignore_eos"] = True
    data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{server.listening_address}/completion", data, headers), timeout=60
    ) as answer:
        steps = json.load(answer)["completion_probabilities"]
    found = torch.full((len(steps), VOCAB), -torch.inf)
    for row, step in zip(found, steps, strict=True):
        for token in step["top_logprobs"]:
            row[token["id"]] = token["logprob"]
    return [step["id"] for step in steps], found


@pytest.mark.parametrize("kind", [Kind.F32], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_llama_cpp(name: str, kind: Kind, tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", reference_of(name, **_CHANGES.get(name, {})), kind)
    prompt = torch.randint(3, VOCAB, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    tokens, expected = answered(tmp_path / "m.gguf", prompt)
    model = load_model(tmp_path / "m.gguf", LoadSpec(dtype="float32", attention="torch"))
    (logits,) = PagedRunner(model, [[*prompt, *tokens[:-1]]], 4, 1).run()
    found = logits[PROMPT - 1 :].log_softmax(-1)
    torch.testing.assert_close(found, expected, atol=OF_TWO_MLPS if name == "gemma4-experts" else TOLERANCE, rtol=0)
    found[:, EOS] = -torch.inf
    assert found.argmax(-1).tolist() == tokens
