#!/usr/bin/env bash
# Finding: transformers 5 splits and normalizes text by Qwen2's rules in every folder whose config.json says qwen2,
#   whatever its tokenizer.json and its tokenizer_class say.
# Version: transformers 5.23.0, tokenizers 0.23.3
# Guess: AutoTokenizer runs the pipeline of tokenizer.json, at the latest if tokenizer_class is
#   PreTrainedTokenizerFast.
# What happens: with model_type qwen2, the class is Qwen2Tokenizer, which keeps vocabulary and merges, and replaces
#   the normalizer and the pre-tokenizer. Digits that the file joins stand alone, and a lowercase normalizer is lost.
#   With model_type qwen3 or llama, the same folder gives the file's tokens.
# Why it matters: a model of this architecture with a vocabulary of its own gets tokens that it was not trained on,
#   and nothing says so. Servers that read tokenizer.json themselves, as Skipjoin does, count other tokens for the
#   same folder.
source "$(dirname "$0")/support.bash"
packages transformers==5.23.0 tokenizers==0.23.3
cd "$work"
"$PYTHON" - 2>/dev/null <<'PY' | expect "tokenizer.json: abc 123
llama: abc 123
qwen3: abc 123
qwen2: A B C 1 2 3"
import json
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

own = Tokenizer(models.BPE())
own.normalizer = normalizers.Lowercase()
own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, initial_alphabet=alphabet)
own.train_from_iterator(["abc 123 abc123"], trainer)
folder = Path("model")
folder.mkdir()
own.save("model/tokenizer.json")
(folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
print("tokenizer.json:", *own.encode("ABC123").tokens)
for kind in ("llama", "qwen3", "qwen2"):
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    print(f"{kind}:", *AutoTokenizer.from_pretrained("model").tokenize("ABC123"))
PY
