"""Embeddings and scores of `LLM`, against transformers."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pooled_models import CONTEXT, MODELS, VOCAB, WIDTH, write

from skipjoin import LLM, AsyncLLM
from skipjoin.core.events import Token
from skipjoin.model.errors import ModelError
from skipjoin.sampling import ContextLengthError, ParameterError
from support.worlds import halved

SETTINGS: dict[str, Any] = {"progress": False, "threads": 1, "profile": "off"}
EMBEDDING = [name for name in MODELS if "-score" not in name and "yes" not in name]


def _ids(*lengths: int) -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(VOCAB) for _ in range(length)] for length in lengths]


def _expected(name: str, model: Any, ids: list[int], dimensions: int | None = None) -> torch.Tensor:
    kind, _, pooling, normalizes = MODELS[name]
    base = model.base_model if "For" in kind else model
    with torch.no_grad():
        states = base(torch.tensor([ids])).last_hidden_state[0].double()
    if pooling is not None and pooling.get("pooling_mode_cls_token"):
        row = states[0]
    else:
        row = states[-1] if pooling is not None and pooling.get("pooling_mode_lasttoken") else states.mean(0)
    if hasattr(model, "dense"):
        row = model.dense(row.float()).detach().double()
    row = row[:dimensions]
    return row / row.norm() if normalizes else row


async def _check_async(folder: Path, prompts: list[list[int]], expected: np.ndarray, context: int) -> None:
    async with AsyncLLM(str(folder), max_num_batched_tokens=24, max_num_seqs=4, **SETTINGS) as llm:
        first, second = await asyncio.gather(llm.embed(prompts), llm.embed(prompts[4]))
        np.testing.assert_array_equal(first, expected)
        np.testing.assert_array_equal(second[0], expected[4])
        with pytest.raises(ContextLengthError, match=f"prompt must have at most {context} tokens"):
            await llm.embed([*prompts, *_ids(context + 1)])
        assert (await llm.embed(prompts[0], dimensions=9)).shape == (1, 9)


@pytest.mark.parametrize("name", EMBEDDING)
def test_embeddings_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, has_files = write(name, tmp_path), MODELS[name][2] is not None
    context = CONTEXT // 2 if has_files else CONTEXT
    prompts = _ids(1, 2, 3, 5, 33, context, 20, 7)
    # The steps cut decoders' prompts, and a prompt of an encoder is longer than any of them.
    with LLM(str(tmp_path), max_num_batched_tokens=24, max_num_seqs=4, **SETTINGS) as llm:
        found = llm.embed(prompts)
        expected = torch.stack([_expected(name, model, ids) for ids in prompts])
        np.testing.assert_allclose(found, expected, atol=2e-6 * float(expected.abs().max()))
        assert all((llm.embed(ids)[0] == vector).all() for ids, vector in zip(prompts, found, strict=True))
        short = llm.embed(prompts[4], dimensions=9)
        np.testing.assert_allclose(short, _expected(name, model, prompts[4], 9)[None], rtol=1e-4, atol=1e-6)
        with pytest.raises(ContextLengthError, match=f"prompt must have at most {context} tokens"):
            llm.embed(_ids(context + 1))
        for wrong in (0, WIDTH + 1):
            with pytest.raises(ParameterError, match=rf"dimensions must be in \[1, {WIDTH}\], got {wrong}"):
                llm.embed("text", dimensions=wrong)
        with pytest.raises(ParameterError, match=r"embeds texts, and does nothing else here: .* LLM\.embed"):
            llm.generate("text")
        first, second = llm.embed(["cat", "dog"])
        prompt = llm.tokenizer.prompt
        assert prompt == ("query: " if hasattr(model, "dense") else "")
        llm.tokenizer.prompt += "c"
        np.testing.assert_array_equal(llm.embed("at")[0], first)
        llm.tokenizer.prompt = prompt
        cosine = float(first @ second / np.linalg.norm(first) / np.linalg.norm(second))
        assert llm.score("cat", ["dog", "cat"]) == pytest.approx([cosine, 1.0], abs=1e-6)
    if name == EMBEDDING[0]:
        asyncio.run(_check_async(tmp_path, prompts, found, context))


@pytest.mark.parametrize("name", halved(name for name in MODELS if name.endswith("score")))
def test_scores_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, documents = write(name, tmp_path), ["a river", "c", "the river bank is far away"]
    with LLM(str(tmp_path), max_num_batched_tokens=24, **SETTINGS) as llm:
        found = llm.score("where is it?", documents)
        with pytest.raises(ParameterError, match="scores pairs of texts"):
            llm.embed("text")
        with pytest.raises(ContextLengthError, match=f"documents must have at most {CONTEXT} tokens"):
            llm.score("a", ["b" * CONTEXT])
        pairs = [llm.tokenizer.backend.encode("where is it?", document) for document in documents]
    for pair, score in zip(pairs, found, strict=True):
        types = (
            {"token_type_ids": torch.tensor([pair.type_ids])}
            if name in ("bert-score", "electra-score", "nomic-score")
            else {}
        )
        with torch.no_grad():
            logit = model(torch.tensor([pair.ids]), **types).logits[0, 0]
        assert score == pytest.approx(float(logit.sigmoid()), abs=1e-5)


def test_a_decoder_that_judges_scores_by_its_yes_and_no(tmp_path: Path) -> None:
    model = write("qwen3-yes-no", tmp_path)
    with LLM(str(tmp_path), task="score", max_num_batched_tokens=64, **SETTINGS) as llm:
        (score,) = llm.score("where?", ["here"])
        answers = [llm.tokenizer.backend.token_to_id(word) for word in ("yes", "no")]
        ids, _ = llm.tokenizer.encode_pair("where?", "here", 512, asks=True)
        text = llm.tokenizer.decode(ids)
    assert text.endswith("answer the query\n\n<Query>: where?\n\n<Document>: hereFalse")
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1, answers]
    assert score == pytest.approx(float(logits.softmax(-1)[0]), abs=1e-5)


@pytest.mark.parametrize(("recipe", "is_sorted"), [("srpt[oracle=max-tokens]", True), ("fcfs", False)])
def test_srpt_knows_the_work_of_every_request(
    recipe: str, is_sorted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("bert", tmp_path)
    prompts, order = _ids(90, 30, 120, 10, 60, 20), []
    with LLM(str(tmp_path), max_num_seqs=1, recipe=recipe, **SETTINGS) as llm:
        take = llm._loop.core.take_events

        def noted() -> list[Any]:
            events = take()
            order.extend(len(event.request.prompt) for event in events if isinstance(event, Token))
            return events

        monkeypatch.setattr(llm._loop.core, "take_events", noted)
        llm.embed(prompts)
    lengths = list(map(len, prompts))
    assert order == (sorted(lengths) if is_sorted else lengths)


def _write_text(text: str, folder: Path) -> None:
    (folder / "modules.json").write_text(text)


def test_models_and_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def refused(name: str, why: str, change: Any, **settings: Any) -> None:
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / name, folder)
        change(folder)
        with pytest.raises(ModelError, match=why):
            LLM(str(folder), **SETTINGS, **settings)

    def edit(file: str, **values: Any) -> Any:
        def change(folder: Path) -> None:
            path = folder / file
            path.write_text(json.dumps(json.loads(path.read_text()) | values))

        return change

    for name in ("bert", "qwen3-last"):
        (tmp_path / name).mkdir()
        write(name, tmp_path / name)
    refused("bert", "BertModel is an encoder: leave task auto, or set embed", lambda _: None, task="generate")
    refused("bert", "task score needs a model with a head", lambda _: None, task="score")
    refused("bert", "positions must be absolute", edit("config.json", position_embedding_type="relative_key"))
    labels = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}
    refused("bert", "must have 1 label .* got 2", edit("config.json", **labels))
    mode = "1_Pooling/config.json"
    refused("qwen3-last", "one pooling mode of .* got last, max", edit(mode, pooling_mode_max_tokens=True))
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0, "layer_types": None}
    refused("qwen3-last", "sliding_window must be null", edit("config.json", is_causal=False, **windows))
    parts = [{"type": f"sentence_transformers.models.{kind}", "path": f"1_{kind}"} for kind in ("Dense", "Pooling")]
    for listed, why in ([{"type": "a.Asym"}], "has a part Asym"), (parts, "parts in the order"), (parts[:1], "1_Dense"):
        refused("qwen3-last", why, partial(_write_text, json.dumps(listed)))
    outside = json.dumps([{"type": "a.Pooling", "path": "../.."}])
    refused("qwen3-last", "folders inside", lambda folder: (folder / "modules.json").write_text(outside))
