#!/usr/bin/env bash
# Finding: the type "fp4" of bitsandbytes is not the four-bit float of MXFP4 and NVFP4 (E2M1), and the first weight of a
#   byte is in its high bits.
# Version: bitsandbytes 0.50.2, torch 2.13.0, on a CPU
# Guess: sixteen numbers of E2M1, whose ratios are 0, 0.5, 1, 1.5, 2, 3, 4, 6 in the order of their codes; and the first
#   weight in the low bits, as in GPTQ, compressed-tensors, MXFP4 and OpenVINO.
# What happens: twelve times the numbers of codes 0 to 7 are 0, 0.0625, 8, 12, 4, 6, 2, 3, where E2M1 has 0, 1, 2, 3, 4, 6,
#   8, 12: another order, and 0.0625 for 1. A row whose first weight alone is not zero has its code in the high bits of
#   the first byte.
# Why it matters: a reader that takes the tensor of codes for MXFP4's or NVFP4's gets other weights without an error. The
#   table that each matrix has in the file (quant_map) is right. Skipjoin reads that one (model/bitsandbytes.py).
source "$(dirname "$0")/support.bash"
packages bitsandbytes==0.50.2 torch==2.13.0 numpy==2.3.5
"$PYTHON" - 2>/dev/null <<'PY' | expect "0.0 0.0625 8.0 12.0 4.0 6.0 2.0 3.0
first byte of a row [1, 0, 0, ...]: 0x30
first byte of a row [0, 1, 0, ...]: 0x03"
import torch
from bitsandbytes.functional import get_4bit_type, quantize_4bit

print(*(round(12 * number, 4) for number in get_4bit_type("fp4", device="cpu").tolist()[:8]))
for row, at in (("[1, 0, 0, ...]", 0), ("[0, 1, 0, ...]", 1)):
    weights = torch.zeros(1, 64)
    weights[0, at] = 1.0
    codes, _ = quantize_4bit(weights, quant_type="fp4", blocksize=64)
    print(f"first byte of a row {row}: {int(codes.flatten()[0]):#04x}")
PY
