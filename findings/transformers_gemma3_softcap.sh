#!/usr/bin/env bash
# Finding: Gemma 3 of transformers accepts attn_logit_softcapping, saves it and does not apply it.
# Version: transformers 5.23.0, torch 2.13.0
# Guess: attention scores of Gemma 3 are capped where the configuration says so, as those of Gemma 2 are.
# What happens: the attention keeps the cap among its attributes and does not pass it on. final_logit_softcapping, the
#   other one, is applied by both.
# Why it matters: another engine that follows the configuration gives other tokens than transformers for the same
#   folder. Skipjoin applies the cap; Google's files have null there.
source "$(dirname "$0")/support.bash"
packages transformers==5.23.0 torch==2.13.0
"$PYTHON" - 2>/dev/null <<'PY' | expect 'Gemma 2: attn_logit_softcapping changes the logits, final_logit_softcapping changes the logits
Gemma 3: attn_logit_softcapping changes nothing, final_logit_softcapping changes the logits'
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig

SHAPE = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 16, "initializer_range": 0.5, "attn_implementation": "eager",
}


def logits(config, **caps):
    torch.manual_seed(0)
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None} | caps
    with torch.inference_mode():
        return AutoModelForCausalLM.from_config(config(**SHAPE, **caps)).eval()(torch.arange(1, 20)[None]).logits


for name, config in (("Gemma 2", Gemma2Config), ("Gemma 3", Gemma3TextConfig)):
    free, found = logits(config), []
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        is_same = torch.equal(free, logits(config, **{cap: 0.01}))
        found.append(f"{cap} {'changes nothing' if is_same else 'changes the logits'}")
    print(f"{name}: {', '.join(found)}")
PY
