#!/usr/bin/env bash
# Finding: transformers computes the rotary positions of DBRX with a base of 10,000, whatever its config.json says.
# Version: transformers 5.23.0
# Guess: the base is attn_config.rope_theta, where DBRX has it (500,000), and which the module of attention stores.
# What happens: rope_parameters, from which the frequencies are made, has the default; attn_config.rope_theta is not read.
# Why it matters: the published model computes other numbers, with no error and no warning. Skipjoin sets the base of
#   attn_config before it runs transformers' code.
source "$(dirname "$0")/support.bash"
packages transformers==5.23.0
"$PYTHON" - 2>/dev/null <<'PY' | expect "attn_config 500000.0, rope_parameters 10000.0"
from transformers import DbrxConfig

config = DbrxConfig(attn_config={"rope_theta": 500000.0, "kv_n_heads": 8, "clip_qkv": 8.0})
print(f"attn_config {config.attn_config.rope_theta}, rope_parameters {config.rope_parameters['rope_theta']}")
PY
