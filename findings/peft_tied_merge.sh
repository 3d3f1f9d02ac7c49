#!/usr/bin/env bash
# Finding: merge_and_unload of peft changes what a model computes, if its output is tied to the embedding and the
#   adapter adapts one of them.
# Version: peft 0.21.2, transformers 5.23.0, torch 2.13.0
# Guess: merging adds the adapter to the weights of the layer that it adapts, so that logits stay the same; that is
#   what it is for.
# What happens: both layers share one matrix, so the addition to the output also changes the embedding, and the other
#   way round. A saved copy has the changed matrix for both. Without tying, logits stay the same.
# Why it matters: adapters of lm_head or embed_tokens are usual where tokens were added, and small models are mostly
#   tied. Servers take merged models of them, as they do not run such adapters. Skipjoin's error for an adapter in
#   place of a model said to merge it, and now excepts those.
source "$(dirname "$0")/support.bash"
packages peft==0.21.2 transformers==5.23.0 torch==2.13.0
"$PYTHON" - 2>/dev/null <<'PY' | expect "lm_head, not tied: the same logits
lm_head, tied: different logits
embed_tokens, not tied: the same logits
embed_tokens, tied: different logits"
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
ids = torch.arange(10)[None]
for layer in ("lm_head", "embed_tokens"):
    for tied in (False, True):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=tied)).eval()
        adapted = get_peft_model(model, LoraConfig(target_modules=[layer]))
        for name, parameter in adapted.named_parameters():
            if "lora" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        with torch.no_grad():
            before = adapted(input_ids=ids).logits
            after = adapted.merge_and_unload()(input_ids=ids).logits
        is_same = torch.allclose(before, after, atol=1e-3)
        print(f"{layer}, {'tied' if tied else 'not tied'}:", "the same logits" if is_same else "different logits")
PY
