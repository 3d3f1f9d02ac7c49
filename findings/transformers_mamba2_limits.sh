#!/usr/bin/env bash
# Finding: transformers applies Mamba-2's limits of time steps to prompts and not to tokens decoded with a cache, so that a model generates by other logits than it computes for the same text.
# Version: transformers 5.23.0, torch 2.13.0
# Guess: time_step_limit is a part of the model, and a token's logits are the same whether its text is a prompt or was generated.
# What happens: mamba2_chunk_scan clamps the steps, and mamba2_selective_state_update does not. With a least step of 1, the logits of the last token differ between a prompt and a decode by 0.3; without limits they are equal.
# Why it matters: Nemotron-H and Zamba 2 always have a least step. A preempted request that computes its tokens again as a prompt would get another state. Skipjoin applies the limits to all tokens, so its greedy tokens may differ from generate() of transformers, and do not depend on preemption.
source "$(dirname "$0")/support.bash"
packages transformers==5.23.0 torch==2.13.0
"$PYTHON" - 2>/dev/null <<'PY' | expect "no limit: equal
least step of 1: different"
import math

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM


def compare(name, **settings):
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 1}
    model = Mamba2ForCausalLM(Mamba2Config(num_hidden_layers=1, **shape, **settings)).eval()
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        prompt = model(input_ids=ids).logits[0, -1]
        past = model(input_ids=ids[:, :-1], use_cache=True).cache_params
        decoded = model(input_ids=ids[:, -1:], cache_params=past, use_cache=True).logits[0, -1]
    print(f"{name}:", "equal" if torch.allclose(prompt, decoded, atol=1e-4) else "different")


compare("no limit")
compare("least step of 1", time_step_limit=(1.0, math.inf))
PY
