#!/usr/bin/env bash
# Finding: torch's float8_e8m0fnu, the type of scales of MXFP4 and other microscaling formats, drops the sign of a
#   number, rounds half way up in its exponent, and has no zero.
# Version: torch 2.13.0, on a CPU
# Guess: a negative number, which the type cannot hold, becomes NaN, as infinity does; a zero stays 0, or becomes NaN.
# What happens: -3 becomes 4, as 3 does, and -1 becomes 1. A zero becomes 2 ** -127 (5.9e-39), the least number. From 1.5
#   on, a number is rounded up to the next power of two; the OCP specification of the formats takes the power below.
# Why it matters: a checkpoint's scales that a program converts to this type after a mistake, such as a wrong sign, give
#   weights that look right. Skipjoin reads such scales as exponents from their bytes, and converts no numbers to them.
source "$(dirname "$0")/support.bash"
packages torch==2.13.0
"$PYTHON" - 2>/dev/null <<'PY' | expect "-3.0 to 4.0, -1.0 to 1.0, 0.0 to 5.877471754111438e-39, 1.49 to 1.0, 1.5 to 2.0, 2.9 to 2.0, 3.0 to 4.0, inf to nan, nan to nan"
import torch

values = (-3.0, -1.0, 0.0, 1.49, 1.5, 2.9, 3.0, float("inf"), float("nan"))
print(", ".join(f"{value} to {torch.tensor(value).to(torch.float8_e8m0fnu).float().item()}" for value in values))
PY
