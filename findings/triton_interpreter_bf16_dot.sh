#!/usr/bin/env bash
# Finding: Triton's interpreter computes other numbers than a GPU for the product of two bfloat16 matrices.
# Version: triton 3.8.0, torch 2.13.0
# Guess: With TRITON_INTERPRET=1 a kernel computes what it would on a GPU, or raises an error for types that NumPy lacks.
# What happens: tl.dot of float32 and float16 is right. That of bfloat16 is wrong in all elements, by many times their
# size, without an error or a warning: NumPy has no bfloat16, so the interpreter keeps such values as integers of their
# bits, and tl.dot multiplies these.
# Why it matters: A test on a CPU of a kernel for bfloat16 fails, or is tuned to pass, where the kernel is right.
# Skipjoin's tests let kernels convert to float32 before tl.dot where they are interpreted.
source "$(dirname "$0")/support.bash"
packages torch==2.13.0 triton==3.8.0 numpy==2.4.6
cat > "$work/product.py" <<'PY'
import torch
import triton
import triton.language as tl


@triton.jit
def multiply(first, second, out, size: tl.constexpr):
    rows, columns = tl.arange(0, size)[:, None], tl.arange(0, size)[None, :]
    at = rows * size + columns
    tl.store(out + at, tl.dot(tl.load(first + at), tl.load(second + at)))


for dtype in (torch.float32, torch.float16, torch.bfloat16):
    torch.manual_seed(0)
    first, second = torch.randn(2, 16, 16).to(dtype)
    out = torch.zeros(16, 16)
    multiply[(1,)](first, second, out, 16)
    error = (out - first.float() @ second.float()).abs()
    print(str(dtype).removeprefix("torch."), (error < 1e-4).sum().item(), "of 256 elements are right")
PY
TRITON_INTERPRET=1 "$PYTHON" "$work/product.py" | expect 'float32 256 of 256 elements are right
float16 256 of 256 elements are right
bfloat16 0 of 256 elements are right'
