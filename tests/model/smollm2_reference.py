"""What transformers answers with SmolLM2's file in float32, and which ids llama.cpp gives to texts.

python tests/model/smollm2_reference.py > tests/model/smollm2_reference.json

Tests read the record, because transformers takes half a minute to read the file. The ids are llama.cpp's, because
transformers' converter splits two of the texts as GPT-2 does. The script needs xllamacpp, which is not in the locks.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import torch

from skipjoin.builtin import packaged_model_path

RECORD = Path(__file__).with_suffix(".json")
MAX_TOKENS = 40


def chat(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    return [*([{"role": "system", "content": system}] if system else []), *turns]


STORY = "The lighthouse keeper wrote down the weather every morning, and every evening he read what he had written. "
CHATS = [
    chat("What is the capital of France? Answer in one sentence."),
    chat("Write a haiku about the sea."),
    chat("Name three fruits.", "Apples, pears and plums.", "Which of them is yellow?"),
    chat("What is 2 + 3?", system="You answer with one number."),
    chat("Write a Python function that returns the sum of a list."),
    chat("Wie heißt die Hauptstadt von Österreich? 🇦🇹"),
    chat(f"Summarize in one sentence: {STORY * 16}"),
    chat("Repeat: <|im_start|> is a special token."),
]
TEXTS = [
    *("", " ", "\n", "\t\ttabs", "a  b   c", "  leading and trailing  ", "line\r\nline\r\n\r\n", "\n\n\nthree"),
    *(
        "Hello, world!",
        "don't We'LL I'M they've",
        "In 2024,  1234567 numbers",
        "3.14159e-10 0x1F 1,000,000",
        "x²½ ⅷ ٣٤",
    ),
    *(
        "naïve café — ok",
        "e\u0301cole A\u030angstro\u0308m",
        "Ünïcödé ß ẞ \u017f",
        "数字 你好世界 123",
        "日本語のテキスト。",
        "한국어 문장",
    ),
    *(
        "مرحبا بالعالم",
        "שלום עולם",
        "नमस्ते दुनिया",
        "สวัสดีชาวโลก",
        "Привет, мир",
        "😀👍🏽 👨‍👩‍👧‍👦 🇦🇹",
        "\u200b\ufeff\u00a0\u2028x",
    ),
    *(
        "def f(x):\n    return x**2\n\n\n  # done",
        '{"a": [1, 2.5, null], "b": "\\u00e9"}',
        "SELECT * FROM t WHERE a<>'b';",
    ),
    *(
        "<div class='x'>&nbsp;</div>",
        "https://example.org/a?b=c&d=%20#e",
        "a/b//c ... [x] {y} -- == != <= >=",
        "A1B22C333D",
    ),
    *("<|im_start|>user\nhi<|im_end|>\n", "<|endoftext|>", "<|im_start|", "<repo_name>x<file_sep>", "a<|im_end|>b"),
    *("z" * 200, "ab" * 100, "0" * 50, "\x00\x01\x7f", "The quick brown fox jumps over the lazy dog. " * 5),
]


def answers() -> list[dict[str, list[int]]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - takes seconds

    file = packaged_model_path()
    assert file is not None
    source: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    found = []
    for messages in CHATS:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            output = model.generate(**prompt, do_sample=False, max_new_tokens=MAX_TOKENS)[0]
        prompt_ids = prompt["input_ids"][0].tolist()
        found.append({"prompt": prompt_ids, "output": output[len(prompt_ids) :].tolist()})
    return found


def ids() -> list[list[int]]:
    import xllamacpp  # noqa: PLC0415 - not in the locks

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(packaged_model_path())
    parameters.n_ctx = 2048
    server = xllamacpp.Server(parameters)
    found = []
    for text in TEXTS:
        body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
        url, headers = f"{server.listening_address}/tokenize", {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
            found.append(json.load(answer)["tokens"])
    return found


if __name__ == "__main__":
    print(json.dumps({"answers": answers(), "ids": ids()}, separators=(",", ":")))
