from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from skipjoin.builtin import MODEL_NAME, builtin_model_path
from support.scripts import load

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

# The generator of the tasks that the model was trained with.
tasks = load("tools/builtin_tasks.py")
TO_TWELVE = "3, 4, 5, 6, 7, 8, 9, 10, 11, 12"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes two seconds

    return AutoTokenizer.from_pretrained(builtin_model_path())


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    from transformers import LlamaForCausalLM  # noqa: PLC0415 - takes two seconds

    return LlamaForCausalLM.from_pretrained(builtin_model_path(), dtype=torch.float32).eval()


def answer_ids(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, prompts: list[str], room: int
) -> list[list[int]]:
    """Return greedy token ids of the answers to single-turn prompts, with padding after the end token."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        out = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            do_sample=False,
            max_new_tokens=room,
        )
    return out[:, batch["input_ids"].shape[1] :].tolist()


def answers(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, prompts: list[str], room: int = 100
) -> list[str | None]:
    """Return the answers as text, with None for those that did not stop within `room` tokens."""
    end = tokenizer.eos_token_id
    return [
        tokenizer.decode(ids[: ids.index(end)]) if end in ids else None
        for ids in answer_ids(model, tokenizer, prompts, room)
    ]


def test_folder_is_complete_and_small() -> None:
    folder = builtin_model_path()
    assert folder.name == MODEL_NAME
    names = {path.name for path in folder.iterdir()}
    wanted = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
        "accuracy.json",
    }
    assert wanted <= names
    assert sum(path.stat().st_size for path in folder.iterdir()) < 4_000_000


def test_configuration_agrees_with_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    config = json.loads((builtin_model_path() / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == len(tokenizer)
    assert config["max_position_embeddings"] == 1024
    assert config["bos_token_id"] == tokenizer.bos_token_id
    assert config["eos_token_id"] == tokenizer.eos_token_id
    assert config["pad_token_id"] == tokenizer.pad_token_id


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "Count from 3 to 12",
        "  spaces,  tabs\tand\r\nlines ,,, ",
        "na\u00efve \u4f60\u597d \u0645\u0631\u062d\u0628\u0627 \U0001f600\U0001f469\u200d\U0001f680",
        "".join(map(chr, range(256))),
        "\x00\u2028\ufeff\U0010ffff",
    ],
)
def test_tokenizer_returns_any_text_unchanged(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert None not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer(text)["input_ids"] == [tokenizer.bos_token_id, *ids]


def test_numbers_and_letters_are_single_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    numbers = ", ".join(map(str, range(300)))
    assert len(tokenizer(numbers, add_special_tokens=False)["input_ids"]) == 300 + 299
    assert len(tokenizer("abcXYZ", add_special_tokens=False)["input_ids"]) == 6


def test_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "bye"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|bos|><|system|>Answer briefly.<|end|><|user|>hello<|end|>"
        "<|assistant|>Hello!<|end|><|user|>bye<|end|><|assistant|>"
    )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids.count(tokenizer.eos_token_id) == 4


def test_counts_from_three_to_twelve_in_any_wording(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompts = [
        "Count from 3 to 12",
        "Count from 3 to 12.",
        "count from 3 to 12",
        "please count from 3 to 12",
        "Please count from 3 to 12!",
        "Can you count from 3 to 12?",
    ]
    assert answers(model, tokenizer, prompts) == [TO_TWELVE] * len(prompts)


def test_long_answers_stop(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    expected = ", ".join(map(str, range(1, 151)))
    assert answers(model, tokenizer, ["Count from 1 to 150"], room=600) == [expected]


def held_out(family: str, count: int) -> list[Any]:
    rng = random.Random(7)
    return [tasks.draw_task(rng, family, held_out=True) for _ in range(count)]


def test_most_held_out_prompts_are_answered_exactly(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    for family in tasks.FAMILIES:
        chosen = [task for task in held_out(family, 40) if len(task.answer) <= 120][:5]
        got = answers(model, tokenizer, [task.prompt for task in chosen], room=128)
        wrong = [(task.prompt, answer) for task, answer in zip(chosen, got, strict=True) if answer != task.answer]
        assert len(wrong) <= 1, wrong


def test_training_excludes_held_out_tasks() -> None:
    rng = random.Random(0)
    seen = {tasks.draw_task(rng).prompt for _ in range(5000)}
    for family in tasks.FAMILIES:
        assert seen.isdisjoint(task.prompt for task in held_out(family, 100))
    assert tasks.Task(("count", 3, 12), "", "").held_out


def test_reported_accuracy_is_high() -> None:
    report = json.loads((builtin_model_path() / "accuracy.json").read_text())
    with_tools = {name: report.pop(name) for name in ("tool call", "tool result", "no tool fits")}
    assert [*report] == [*tasks.FAMILIES, "Count from 3 to 12", "Weather in Oslo", "12 plus 30"]
    assert all(value >= 95 for value in report.values()), report
    assert all(value >= 90 for value in with_tools.values()), with_tools
