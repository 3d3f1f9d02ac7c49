#!/usr/bin/env bash
# Finding: a model whose generation_config.json names no end-of-sequence token never stops in transformers, although
#   config.json names one.
# Version: transformers 5.23.0, torch 2.13.0
# Guess: what generation_config.json leaves out comes from config.json, as it does for a model without that file.
# What happens: without the file, config.json's eos_token_id ends the output. With a file that has a temperature only,
#   there is no such token, and generate() runs to the maximum.
# Why it matters: outputs go on after the answer, and lengths and throughput measured with such a folder are those of
#   the maximum. Skipjoin ends at the tokens of both files, and at the tokenizer's.
source "$(dirname "$0")/support.bash"
packages transformers==5.23.0 torch==2.13.0
cd "$work"
"$PYTHON" - 2>/dev/null <<'PY' | expect "without generation_config.json: ends after 1 token
with a temperature in it: ends after 20 tokens"
import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
prompt = torch.arange(5)[None]
model = LlamaForCausalLM(LlamaConfig(**shape, eos_token_id=None)).eval()
first = int(model(input_ids=prompt).logits[0, -1].argmax())
model.save_pretrained("model")
config = json.loads(Path("model/config.json").read_text())
Path("model/config.json").write_text(json.dumps(config | {"eos_token_id": first}))
own = Path("model/generation_config.json")
for name in ("without generation_config.json", "with a temperature in it"):
    own.unlink(missing_ok=True)
    if name != "without generation_config.json":
        own.write_text(json.dumps({"temperature": 0.7}))
    loaded = LlamaForCausalLM.from_pretrained("model")
    length = loaded.generate(prompt, max_new_tokens=20, do_sample=False).shape[1] - 5
    print(f"{name}: ends after {length} token{'' if length == 1 else 's'}")
PY
