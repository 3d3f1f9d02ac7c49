#!/usr/bin/env bash
# Finding: with rotary scaling of type "dynamic", transformers computes other logits of a prompt after it has computed
#   a longer one for somebody else.
# Version: transformers 5.23.0, torch 2.13.0
# Guess: the frequencies depend on the length of the prompt at hand, so that a prompt always has the same logits.
# What happens: the frequencies of the longest prompt so far stay, until a prompt comes that is shorter than the
#   original length. After a prompt of 60 tokens, one of 24 (with an original length of 16) has other logits; after
#   one of 8, those of the beginning are back.
# Why it matters: one module serves many requests, so an answer depends on who asked before. A comparison of servers
#   depends on the order of its prompts. Skipjoin refuses this type for its own models, and ends the context of those
#   that it runs through transformers at the original length.
source "$(dirname "$0")/support.bash"
packages transformers==5.23.0 torch==2.13.0
"$PYTHON" - 2>/dev/null <<'PY' | expect "after 60 tokens: different logits
after 8 tokens: the same logits"
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
config = LlamaConfig(**shape, max_position_embeddings=16, rope_parameters=rope, initializer_range=0.5)
model = LlamaForCausalLM(config).eval()


@torch.no_grad()
def logits(length):
    return model(input_ids=torch.arange(length)[None]).logits


first = logits(24)
for other in (60, 8):
    logits(other)
    is_same = torch.allclose(logits(24), first, atol=1e-3)
    print(f"after {other} tokens:", "the same logits" if is_same else "different logits")
PY
