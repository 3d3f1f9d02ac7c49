"""Writes sentencepiece_models.json: small models of SentencePiece, and the ids that it and transformers give texts.

pip install sentencepiece==0.2.3 && python tests/model/sentencepiece_models.py
"""

from __future__ import annotations

import base64
import io
import json
import re
import tempfile
import zlib
from pathlib import Path
from typing import Any

import sentencepiece
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
TEXTS = (
    *(
        "Hello world",
        "  two  spaces\n\nand é ü 漢字 🙂",
        "don't 12345 ",
        "",
        "\ta\tb",
        "\ufb01ne \uff21",
        "a" * 40,
        " leading",
    ),
    "the scheduler of the requests, <td>x</td>\n\n\nend",
)
# Texts with special tokens, which SentencePiece does not look for.
SPECIAL = ("<s> hi</s>x", "a<bos>b")
RULES = "FB01\t66 69\nFF21\t41\n9\t20\nA\t20\nA0\t20\n"
PLAIN = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
LLAMA = {"model_type": "bpe", **PLAIN}
GEMMA = {
    **LLAMA,
    **{"add_dummy_prefix": False, "user_defined_symbols": ["\n\n", "<td>"]},
    **{"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "bos_piece": "<bos>", "eos_piece": "<eos>"},
}


def main() -> None:
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        (folder / "rules.tsv").write_text(RULES)
        unigram = {"model_type": "unigram", "normalization_rule_tsv": str(folder / "rules.tsv")}
        found = {
            "LlamaTokenizer": made(LLAMA, folder, "LlamaTokenizer"),
            "GemmaTokenizer": made(GEMMA, folder, "GemmaTokenizer"),
            "unigram": made(unigram, folder),
            "unigram with bytes": made({"model_type": "unigram", **PLAIN}, folder),
        }
    text = json.dumps({"texts": TEXTS, "special": SPECIAL, "models": found}, indent=1)
    # A list of ids in one line.
    text = re.sub(r"\[[\d,\s]+\]", lambda ids: re.sub(r"\s+", " ", ids[0]), text)
    (ROOT / "tests/model/sentencepiece_models.json").write_text(text + "\n")


def made(options: dict[str, Any], folder: Path, name: str = "") -> dict[str, Any]:
    words = re.findall(r"[A-Za-z']+", (ROOT / "docs/concepts.md").read_text())
    lines = [" ".join(words[at : at + 9]) for at in range(0, len(words), 9)] + ["\ufb01ne \uff21 café naïve"] * 5
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=file, vocab_size=460, character_coverage=1.0, minloglevel=2,
        hard_vocab_limit=False, **options,
    )  # fmt: skip
    own = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
    found: dict[str, Any] = {"model": base64.b64encode(zlib.compress(file.getvalue(), 9)).decode()}
    if name:
        (folder / "tokenizer.model").write_bytes(file.getvalue())
        (folder / "config.json").write_text(json.dumps({"model_type": name.removesuffix("Tokenizer").lower()}))
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, "add_bos_token": True}))
        theirs = AutoTokenizer.from_pretrained(folder)
        found["ids"] = [theirs.encode(text) for text in TEXTS + SPECIAL]
        found["decoded"] = [theirs.decode(ids, skip_special_tokens=True) for ids in found["ids"]]
    else:
        found["ids"] = [[own.bos_id(), *own.encode(text)] for text in TEXTS]
        found["decoded"] = [own.decode(ids[1:]).replace(" \u2047 ", "<unk>") for ids in found["ids"]]
    return found


if __name__ == "__main__":
    main()
