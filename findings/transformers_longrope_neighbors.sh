#!/usr/bin/env bash
# Finding: in transformers, a short prompt to a model with LongRoPE (Phi-3, Phi-4-mini) has other logits if a long
#   prompt is in its batch.
# Version: transformers 5.23.0, torch 2.13.0
# Guess: each row uses the factors of its own length, the short ones up to the original length; a mask keeps rows of a
#   padded batch apart.
# What happens: the largest position in the batch chooses the factors of all rows. In the same way, a request that
#   grows past the original length gets the long factors for new tokens, while its cache has keys with the short ones,
#   so that generating gives other logits than computing the same text at once.
# Why it matters: outputs depend on neighbors and on preemption, and no server can be compared with transformers on
#   such lengths. Skipjoin ends the context at the original length, or uses the long factors for all tokens if a
#   config.json without the short ones says so.
source "$(dirname "$0")/support.bash"
packages transformers==5.23.0 torch==2.13.0
"$PYTHON" - 2>/dev/null <<'PY' | expect "beside a short prompt: the same logits
beside a long prompt: different logits
generated past the original length: different logits"
import torch
from transformers import Phi3Config, Phi3ForCausalLM

torch.manual_seed(0)
shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}
config = Phi3Config(
    **shape,
    max_position_embeddings=128,
    original_max_position_embeddings=16,
    pad_token_id=0,
    initializer_range=0.5,
    rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **factors},
)
model = Phi3ForCausalLM(config).eval()
short = torch.arange(3, 11)


def compare(name, found, expected):
    print(f"{name}:", "the same logits" if torch.allclose(found, expected, atol=1e-3) else "different logits")


with torch.no_grad():
    alone = model(input_ids=short[None]).logits[0]
    for name, length in (("short", 12), ("long", 40)):
        rows = torch.zeros(2, length, dtype=torch.long)
        rows[0], rows[1, :8] = torch.arange(length), short
        mask = (torch.arange(length) < torch.tensor([[length], [8]])).long()
        compare(f"beside a {name} prompt", model(input_ids=rows, attention_mask=mask).logits[1, :8], alone)
    text = torch.arange(20)[None]
    cache = model(input_ids=text[:, :12], use_cache=True).past_key_values
    for at in range(12, 20):
        step = model(input_ids=text[:, at : at + 1], past_key_values=cache, use_cache=True)
    compare("generated past the original length", step.logits[0, -1], model(input_ids=text).logits[0, -1])
PY
