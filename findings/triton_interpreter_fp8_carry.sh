#!/usr/bin/env bash
# Finding: Triton's interpreter converts some float32 numbers to 8-bit floats (e4m3) of half their size.
# Version: triton 3.8.0, torch 2.13.0
# Guess: A conversion in a kernel rounds to the nearest, as torch and the instruction of a card do.
# What happens: Where rounding up leads to the next power of two, every second power is missed: 62.7 becomes 64, but
# 125.4 becomes 64 as well, and 31.4 becomes 16. Ties are rounded up instead of to even, and numbers below the smallest
# normal one become zero.
# Why it matters: A test on a CPU of a kernel that quantizes finds errors of half a number, or allows them everywhere.
# Skipjoin's test compares a kernel's codes with the interpreter's own conversion of the numbers that torch computes.
source "$(dirname "$0")/support.bash"
packages torch==2.13.0 triton==3.8.0 numpy==2.4.6
cat > "$work/convert.py" <<'PY'
import torch
import triton
import triton.language as tl


@triton.jit
def convert(x, out, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(out + at, tl.load(x + at).to(tl.float8e4nv))


x = torch.tensor([31.36, 62.72, 125.44, 250.88, 120.0, 100.0, 272.0, 0.001])
out = torch.empty(8, dtype=torch.float8_e4m3fn)
convert[(1,)](x, out, 8)
for number, ours, theirs in zip(x.tolist(), out.float().tolist(), x.to(torch.float8_e4m3fn).float().tolist()):
    print(f"{number:g}: {ours:g}, torch {theirs:g}")
PY
TRITON_INTERPRET=1 "$PYTHON" "$work/convert.py" | expect '31.36: 16, torch 32
62.72: 64, torch 64
125.44: 64, torch 128
250.88: 256, torch 256
120: 120, torch 120
100: 104, torch 96
272: 288, torch 256
0.001: 0, torch 0.00195312'
