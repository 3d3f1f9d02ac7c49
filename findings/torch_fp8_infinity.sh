#!/usr/bin/env bash
# Finding: on a CPU, torch 2.13 converts infinity to 448 in float8_e4m3fn, but to infinity in float8_e5m2, and only the
#   first saturates.
# Version: torch 2.13.0, on a CPU
# Guess: what is too large becomes NaN in float8_e4m3fn, which has no infinity, as in ml_dtypes; or both
#   types saturate, as NVIDIA's conversion does when it is asked to.
# What happens: 465, 1e5 and infinity become 448, the largest number of float8_e4m3fn; NaN stays NaN. In float8_e5m2 1e5
#   becomes infinity, and 60,000 the largest number, 57,344.
# Why it matters: an infinite weight or KV entry is invisible after the conversion, so that a check for overflow must
#   come before it. In Skipjoin a row's scale comes from its largest magnitude, so that one with an infinity gives NaN.
source "$(dirname "$0")/support.bash"
packages torch==2.13.0 ml_dtypes==0.5.4 numpy==2.3.5
"$PYTHON" - 2>/dev/null <<'PY' | expect "torch float8_e4m3fn: 448.0 448.0 448.0 nan
torch float8_e5m2: 57344.0 inf inf nan
ml_dtypes float8_e4m3fn: nan nan nan nan"
import ml_dtypes
import numpy as np
import torch

VALUES = [60_000.0, 1e5, float("inf"), float("nan")]
for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
    print(f"{str(kind).replace('.', ' ')}:", *torch.tensor(VALUES).to(kind).float().tolist())
with np.errstate(all="ignore"):
    found = np.array(VALUES, np.float32).astype(ml_dtypes.float8_e4m3fn)
    print("ml_dtypes float8_e4m3fn:", *found.astype(np.float32).tolist())
PY
