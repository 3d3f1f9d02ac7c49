#!/usr/bin/env bash
# Finding: the first of the five largest numbers of torch.topk is not the one that argmax finds, if two are equal.
# Version: torch 2.13.0, on a CPU
# Guess: of equal numbers, all functions return the first, or topk at least returns the same one for any k.
# What happens: of three equal maxima, argmax, max and topk(1) return the first, and topk of two or more has another
#   first. Which one it is depends on k and on the number of elements. A stable sort has the first.
# Why it matters: logits in bfloat16 have 8 bits, so ties at the top are usual. A server that takes the greedy token
#   by argmax and its alternatives by topk reports a likeliest token that it did not choose, and greedy outputs change
#   with the number of alternatives that are asked for. Skipjoin orders equal values by their token.
source "$(dirname "$0")/support.bash"
packages torch==2.13.0 numpy==2.4.6
"$PYTHON" - 2>/dev/null <<'PY' | expect "argmax: 10666
max: 10666
topk(1): 10666
topk(2): another
topk(5): another
topk(20): another
stable sort: 10666"
import torch

logits = torch.zeros(32000, dtype=torch.bfloat16)
logits[[10666, 16000, 31999]] = 1
first = {"argmax": logits.argmax(), "max": logits.max(0).indices}
first |= {f"topk({k})": logits.topk(k).indices[0] for k in (1, 2, 5, 20)}
first["stable sort"] = logits.sort(descending=True, stable=True).indices[0]
for name, token in first.items():
    print(f"{name}:", 10666 if token == 10666 else "another")
PY
