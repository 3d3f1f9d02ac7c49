#!/usr/bin/env bash
# Finding: torch's activations on a CPU give one number different bits by its place in a tensor, and exact GELU by
#   whether its input is contiguous.
# Version: torch 2.13.0, on an x86 CPU with AVX2
# Guess: a function of single numbers gives a row the same bits whether it stands alone or among others, since nothing
#   is summed.
# What happens: silu, sigmoid, softplus and GELU compute whole vectors by vector instructions, and what is left at the
#   end of a tensor by others, so that rows whose length is no multiple of a vector have other bits in a batch than
#   alone; exp and tanh do not. F.gelu calls oneDNN for contiguous float32 tensors and torch's own loop for others,
#   which differs even in rows of 96 numbers, such as the gates in a half of a joined projection.
# Why it matters: a server that recomputes the tokens of a preempted request in other batches may sample others.
#   Skipjoin pads such rows to whole vectors, and copies inputs of GELU, for models that run through transformers.
source "$(dirname "$0")/support.bash"
packages torch==2.13.0
"$PYTHON" - 2>/dev/null <<'PY' | expect "rows of 50: silu differs, sigmoid differs, softplus differs, gelu with tanh differs, exp equal, tanh equal
rows of 64: silu equal, sigmoid equal, softplus equal, gelu with tanh equal, exp equal, tanh equal
gelu of 64 columns of 128: contiguous differs
silu of 64 columns of 128: contiguous equal"
from functools import partial

import torch
import torch.nn.functional as F

torch.set_num_threads(1)
torch.manual_seed(0)
FUNCTIONS = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "gelu with tanh": partial(F.gelu, approximate="tanh"),
    "exp": torch.exp,
    "tanh": torch.tanh,
}


def told(one, other):
    return "equal" if torch.equal(one, other) else "differs"


for width in (50, 64):
    x = torch.randn(300, width)
    alone = {name: torch.cat([function(row[None]) for row in x]) for name, function in FUNCTIONS.items()}
    found = (f"{name} {told(function(x), alone[name])}" for name, function in FUNCTIONS.items())
    print(f"rows of {width}:", ", ".join(found))
half = torch.randn(300, 128)[:, :64]
for name, function in (("gelu", F.gelu), ("silu", F.silu)):
    print(f"{name} of 64 columns of 128: contiguous", told(function(half), function(half.contiguous())))
PY
