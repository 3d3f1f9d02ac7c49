#!/usr/bin/env bash
# Finding: transformers adds Falcon's linear biases (ALiBi) twice with eager attention and once with sdpa, and rounds
#   them to bfloat16 in a float32 model.
# Version: transformers 5.23.0, torch 2.13.0
# Guess: attention implementations compute the same logits but for rounding, and biases of a float32 model are
#   float32.
# What happens: FalconModel joins the biases with the mask, which sdpa adds; the eager branch adds them to the scores
#   before it adds that mask. The logits of a model like falcon-rw-1b differ by about 1 % of their spread between
#   both, and without biases by less than 0.001 %. build_alibi_tensor multiplies in bfloat16, so that several
#   neighbors have one bias from position 257 on.
# Why it matters: "eager" is what people compare other implementations with. Skipjoin compares Falcon with sdpa, and
#   rounds its biases as transformers does.
source "$(dirname "$0")/support.bash"
packages transformers==5.23.0 torch==2.13.0
"$PYTHON" - 2>/dev/null <<'PY' | expect "without biases: equal
with biases: different
biases of the positions 256 to 261 by the slope of a head: 128 128 129 130 130 130"
import torch
from transformers import FalconConfig, FalconForCausalLM
from transformers.models.falcon.modeling_falcon import build_alibi_tensor


def compare(name, alibi):
    found = []
    for attention in ("eager", "sdpa"):
        torch.manual_seed(0)
        config = FalconConfig(
            vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, multi_query=False, alibi=alibi
        )
        model = FalconForCausalLM._from_config(config, attn_implementation=attention).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.12)
        with torch.no_grad():
            found.append(model(input_ids=torch.arange(3, 43)[None], use_cache=False).logits)
    eager, other = found
    distance = (eager - other).norm() / (other - other.mean(-1, keepdim=True)).norm()
    print(f"{name}:", "equal" if distance < 1e-5 else "different" if distance > 3e-3 else float(distance))


compare("without biases", False)
compare("with biases", True)
biases = build_alibi_tensor(torch.ones((1, 262), dtype=torch.int64), 8, torch.float32)[0, 0, 256:]
print("biases of the positions 256 to 261 by the slope of a head:", *(f"{one:g}" for one in biases.tolist()))
PY
