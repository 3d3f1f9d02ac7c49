"""Triton's interpreter on a machine without a CUDA device. Import this module before triton."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> None:
    """Let Triton's interpreter do only what affects results, which saves a third of the time.

    At each launch of a kernel it would look for the functions that it replaces. For each sum and product it would
    compute whether the result overflows, which it reports only with its option `debug`.

    Products of float32 are summed in float64, because BLAS sums a row in an order that depends on its place in the tile
    (OpenBLAS on AVX2), and a card does not.
    """
    if (interpreter := sys.modules.get("triton.runtime.interpreter")) is None:
        return

    @cache
    def builtins_of(place: Any) -> list[tuple[str, Any]]:
        return [member for member in inspect.getmembers(place) if interpreter.tl.core.is_builtin(member[1])]

    def patch(place: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins_of(place):
            if getattr(place, name) is member:  # a kernel that another one calls finds them replaced
                interpreter._patch_attr(place, name, member, builder, scope)

    interpreter._patch_builtin = patch
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)

    numpy_type, cached = interpreter._get_np_dtype, cache(interpreter._get_np_dtype)

    def numpy_type_of(type_: Any) -> Any:
        is_pointer = isinstance(type_.scalar, interpreter.tl.pointer_type)
        return numpy_type(type_) if is_pointer else cached(type_.scalar)

    interpreter._get_np_dtype = numpy_type_of

    dot = builder.create_dot

    def summed_wide(a: Any, b: Any, d: Any, *options: Any) -> Any:
        if a.data.dtype != np.float32 or d.data.dtype != np.float32:
            return dot(a, b, d, *options)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    builder.create_dot = summed_wide
