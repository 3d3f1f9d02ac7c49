#!/usr/bin/env bash
# Finding: In transformers 5, special_tokens_map.json overrides tokenizer_config.json, or has no effect at all, depending on an unrelated key.
# Version: transformers 5.23.0
# Guess: One of the two files has precedence, whatever else they hold.
# What happens: Without added_tokens_decoder in tokenizer_config.json, the map's eos_token replaces that of tokenizer_config.json, also by null. With the key, even as {}, the map is ignored.
# Why it matters: The end-of-sequence token ends outputs and is written by chat templates. Skipjoin reads the files by the same rule.
source "$(dirname "$0")/support.bash"
packages transformers==5.23.0
"$PYTHON" - 2>/dev/null <<'PY' | expect "no added_tokens_decoder: <b>
null in the map: None
empty added_tokens_decoder: <a>"
import json
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import AutoTokenizer


def eos_token(settings, tokens):
    folder = Path(tempfile.mkdtemp())
    backend = Tokenizer(models.WordLevel({"<a>": 0, "<b>": 1, "x": 2}, unk_token="x"))
    backend.add_special_tokens(["<a>", "<b>"])
    backend.save(str(folder / "tokenizer.json"))
    given = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<a>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(given))
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens))
    return AutoTokenizer.from_pretrained(folder).eos_token


print("no added_tokens_decoder:", eos_token({}, {"eos_token": "<b>"}))
print("null in the map:", eos_token({}, {"eos_token": None}))
print("empty added_tokens_decoder:", eos_token({"added_tokens_decoder": {}}, {"eos_token": "<b>"}))
PY
