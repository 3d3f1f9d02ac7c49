from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from skipjoin.forecast import ForecastConfig, make_forecaster, words
from skipjoin.forecast.embeddings import MeanEmbeddings
from skipjoin.forecast.encode import FEATURES, SEEN, HashedTokens, hashed
from skipjoin.forecast.index import VectorIndex
from skipjoin.forecast.sentences import SentenceEncoder
from skipjoin.forecast.vectors import EXACT_ENTRIES, GraphVectors, vectors_of
from skipjoin.options import ConfigError

PROMPTS = [[], [5], words("Write a poem about the sea."), list(range(5000))]


def encode(encoder, prompt) -> np.ndarray:
    return encoder.encode([prompt], [hashed(prompt)])[0]


def test_hashed_tokens_are_bounded_and_the_same_in_every_process() -> None:
    for prompt in PROMPTS:
        features = hashed(prompt)
        assert len(features.ids) == len(features.weights) <= 2 * SEEN + 6
        assert 0 <= features.ids.min() <= features.ids.max() < FEATURES
        assert np.linalg.norm(features.weights[: features.hashes]) <= 1.0001
    vector = encode(HashedTokens(), PROMPTS[2])
    program = (
        "from skipjoin.forecast.encode import *\n"
        f"print(HashedTokens().encode([{PROMPTS[2]}], [hashed({PROMPTS[2]})])[0].tolist())"
    )
    other = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert vector.tolist() == eval(other)


def test_words_are_stable_and_ignore_case() -> None:
    assert words("Hello, World") == words("hello , world") == [907060870, 3772416878, 980881731]


def test_similar_prompts_have_similar_vectors() -> None:
    one, near, far = (words(text) for text in ("write a poem about rain", "write a poem about snow", "what is 5 + 7 ?"))
    vector = encode(HashedTokens(), one)
    assert vector @ encode(HashedTokens(), near) > 0.5
    assert vector @ encode(HashedTokens(), far) < 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [16, 300])
def test_mean_embeddings_match_the_file(tmp_path: Path, dtype: torch.dtype, width: int) -> None:
    matrix = torch.randn(40, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    save_file({"model.embed_tokens.weight": matrix, "other": torch.zeros(3)}, tmp_path / "model.safetensors")
    encoder = MeanEmbeddings(tmp_path)
    assert encoder.width == min(width, 256)
    centered = (matrix.float() - matrix.float().mean(0)).numpy()
    expected = {name: centered[tokens].mean(0) for name, tokens in (("one", [1, 2, 3]), ("other", [1, 2, 9]))}
    found = {"one": encode(encoder, [1, 2, 3]), "other": encode(encoder, [1, 2, 9, 10_000])}
    cosine = expected["one"] @ expected["other"] / np.linalg.norm(expected["one"]) / np.linalg.norm(expected["other"])
    # A projection preserves angles to about one part in sqrt(256).
    assert found["one"] @ found["other"] == pytest.approx(cosine, abs=0.01 if width == 16 else 0.15)
    assert not encode(encoder, [40, -1]).any()


def test_folders_without_an_encoder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    save_file({"lm_head.weight": torch.zeros(3, 3)}, tmp_path / "model.safetensors")
    embeddings = ForecastConfig(forecast_encoder="embeddings")
    for config, folder, text in (
        (embeddings, None, "needs the folder"),
        (embeddings, tmp_path / "missing", "no such folder"),
        (embeddings, tmp_path / "none", "no embedding matrix"),
        (embeddings, tmp_path, "no embedding matrix"),
        (ForecastConfig(forecast_encoder=str(tmp_path)), None, "needs the texts"),
    ):
        with pytest.raises(ConfigError, match=text):
            make_forecaster(config, folder=folder)
    with pytest.raises(ConfigError, match="nor a folder"):
        SentenceEncoder(str(tmp_path / "missing"), str)
    with pytest.raises(ConfigError, match="cannot be read"):
        SentenceEncoder(str(tmp_path / "none"), str)
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoTokenizer": ["own.Tokens", None]}}
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / "none" / name).write_text(json.dumps(own))
    with pytest.raises(ConfigError, match=r"needs code of the encoder's own \(auto_map\), which Skipjoin never runs"):
        SentenceEncoder(str(tmp_path / "none"), str)
    (tmp_path / "model.safetensors").write_bytes(b"garbage" * 9)
    with pytest.raises(ConfigError, match="cannot be read"):
        MeanEmbeddings(tmp_path)


def test_a_sentence_encoder_returns_unit_vectors_that_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel, BertTokenizerFast  # noqa: PLC0415

    letters = [chr(code) for code in range(97, 123)]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(vocab_file=str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(tmp_path)
    texts = {1: "abc", 2: "abc " * 200, **{number: "abc xyz " * number for number in range(3, 40)}}
    encoder = SentenceEncoder(tmp_path, lambda prompt: texts[prompt[0]])
    assert encoder.width == 32
    for prompt in ([1], [2]):
        assert np.linalg.norm(encode(encoder, prompt)) == pytest.approx(1.0, abs=1e-4)
    prompts = [[number] for number in texts]
    together = encoder.encode(prompts, [hashed(prompt) for prompt in prompts])
    again = SentenceEncoder(str(tmp_path), lambda prompt: texts[prompt[0]], remembered=5)
    for _ in range(2):
        assert np.allclose(
            again.encode(prompts[:9], [hashed(prompt) for prompt in prompts[:9]]), together[:9], atol=1e-4
        )
    assert np.allclose(together, [encode(encoder, prompt) for prompt in prompts], atol=1e-4)


@pytest.mark.parametrize("entries", [64, EXACT_ENTRIES + 1])
def test_a_search_finds_the_nearest_entry_and_not_replaced_ones(entries: int) -> None:
    if entries > EXACT_ENTRIES:
        pytest.importorskip("usearch")
    drawn = np.random.default_rng(0)
    vectors = vectors_of(entries, 32)
    made = drawn.standard_normal((200, 32)).astype(np.float32)
    made /= np.linalg.norm(made, axis=1, keepdims=True)
    for number, vector in enumerate(made):
        vectors.put(number % 60, vector)
    vectors.drop(59)
    for number in (180, 150, 199):
        slots, similarity = vectors.search(made[number], 5)
        assert slots[np.argmax(similarity)] == number % 60
        assert similarity.max() == pytest.approx(1.0, abs=1e-2)
    slots, similarity = vectors.search(made[100], 60)
    assert similarity.max() < 0.99
    assert 59 not in slots[similarity != 0]


def index(entries: int) -> VectorIndex:
    return VectorIndex(16, entries, 1e9, lambda: 0.0)


@pytest.mark.parametrize(("before", "after"), [(50, 20), (50, 200), (20_000, 20_000), (20_000, 30), (30, 20_000)])
def test_an_index_of_another_size_restores_the_latest_entries(before: int, after: int) -> None:
    pytest.importorskip("usearch")
    stored, restored = index(before), index(after)
    drawn = np.random.default_rng(0).standard_normal((120, 16)).astype(np.float32)
    drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
    for number, vector in enumerate(drawn, 1):
        stored.add(vector, number, exact=True)
    restored.restore(stored.state())
    assert len(restored) == min(120, before, after)
    found = restored.search(drawn[-1], 3)
    assert found.tokens[np.argmax(found.similarity)] == 120
    for number, vector in enumerate(drawn, 121):
        restored.add(vector, number, exact=True)
    assert len(restored) == min(after, min(120, before) + 120)


def test_more_entries_than_the_exact_search_allows_need_usearch(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "usearch.index", None)
    with pytest.raises(ConfigError, match="forecast_entries above 10000 needs usearch"):
        GraphVectors(8)
    assert vectors_of(EXACT_ENTRIES, 8)
