#!/usr/bin/env bash
# Finding: in transformers, texts packed into one row by position_ids that restart see each other, unless the cache is
#   switched off and no mask is given.
# Version: transformers 5.23.0, torch 2.13.0
# Guess: either position_ids that restart never keep texts apart without FlashAttention, or they always do; a mask of
#   ones and a cache that nobody reads change no logits.
# What happens: with use_cache=False and no mask, texts are kept apart. With the cache, which is on unless one says
#   otherwise, or with a mask of ones, as tokenizers return it, each text attends to those before it. There is no
#   warning.
# Why it matters: prefill of several prompts at once, and scores of packed texts, come out for other contexts. What
#   checks a packed implementation, such as Skipjoin's, against transformers must run its texts one by one, as
#   Skipjoin's tests do.
source "$(dirname "$0")/support.bash"
packages transformers==5.23.0 torch==2.13.0
"$PYTHON" - 2>/dev/null <<'PY' | expect "no cache, no mask: apart
cache, no mask: joined
no cache, mask of ones: joined
cache, mask of ones: joined"
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**shape, initializer_range=0.5)).eval()
ids = torch.arange(3, 13)[None]
positions = torch.arange(5).repeat(2)[None]
with torch.no_grad():
    alone = model(input_ids=ids[:, 5:]).logits
    for mask in (None, torch.ones_like(ids)):
        for use_cache in (False, True):
            options = {"position_ids": positions, "attention_mask": mask, "use_cache": use_cache}
            found = model(input_ids=ids, **options).logits[:, 5:]
            name = f"{'cache' if use_cache else 'no cache'}, {'no mask' if mask is None else 'mask of ones'}"
            print(f"{name}:", "apart" if torch.allclose(found, alone, atol=1e-3) else "joined")
PY
