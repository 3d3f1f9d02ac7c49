#!/usr/bin/env bash
# Finding: transformers 5 does not tie the output to the embedding, although config.json says tie_word_embeddings, if
#   the files hold an lm_head.weight with other values.
# Version: transformers 5.23.0, torch 2.13.0
# Guess: the setting decides, as in transformers 4: the output is the embedding, and a stray lm_head.weight is
#   ignored.
# What happens: one number that differs is enough. The output is that of the file, with a warning. A copy that
#   save_pretrained writes has both tensors, and tie_word_embeddings is still true. Equal values are tied.
# Why it matters: a program that goes by config.json alone, as Skipjoin did, answers with another output matrix than
#   the one that was evaluated. Skipjoin compares both tensors now, and uses the file's if they differ.
source "$(dirname "$0")/support.bash"
packages transformers==5.23.0 torch==2.13.0
cd "$work"
"$PYTHON" - 2>/dev/null <<'PY' | expect "equal values: tied
one value differs: the file's output, and tie_word_embeddings is True
saved again: the file's output, and tie_word_embeddings is True"
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True)).save_pretrained("model")
tensors = load_file("model/model.safetensors")
output = tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
for name in ("equal values", "one value differs", "saved again"):
    save_file(tensors, "model/model.safetensors", {"format": "pt"})
    model = LlamaForCausalLM.from_pretrained("model" if name != "saved again" else "copy")
    if model.lm_head.weight is model.model.embed_tokens.weight:
        print(f"{name}: tied")
    elif torch.equal(model.lm_head.weight, output):
        print(f"{name}: the file's output, and tie_word_embeddings is {model.config.tie_word_embeddings}")
    model.save_pretrained("copy")
    output[0, 0] = 1.0
PY
