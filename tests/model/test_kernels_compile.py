"""Triton kernels compile for GPUs that are not present, into fast code.

Compilation needs a process of its own, because this one interprets kernels. No GPU is needed, because Triton's wheel
contains the compiler and its tools.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("triton")

from skipjoin.model.kernels import block_copy

FOLDER = Path(__file__).parent
# Runs programs with their arguments, and prints their outputs.
PROGRAM = f"""
import contextlib, io, json, runpy, sys
sys.path.insert(0, {str(FOLDER)!r})
outputs = []
for path, *arguments in json.loads(sys.argv[1]):
    sys.argv = [path, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(path, run_name="__main__")
    outputs.append(out.getvalue())
print(json.dumps(outputs))
"""
ATTENTION = ["kv_write", "share_out", "decode", "reduce", "prefill", "product", "experts", "weighted_sum"]


class Outputs(NamedTuple):
    attention: str
    thresholds: str
    copies: str


def compiled(cache: Path, *programs: tuple[str, ...]) -> list[str]:
    """Return the outputs of programs of this folder, which one process runs."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    commands = json.dumps([[str(FOLDER / name), *arguments] for name, *arguments in programs])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, commands],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    programs = (
        ("compile_kernels.py", "90:bfloat16:llama-8b:decode"),
        ("compile_ops.py", "90-thresholds"),
        ("compile_copies.py", "90"),
    )
    return Outputs(*compiled(tmp_path_factory.mktemp("triton"), *programs))


def kernels_of(output: str) -> list[str]:
    """Return the names of the kernels that compile_kernels.py describes, one per line."""
    return [line.split()[1].rstrip(":") for line in output.splitlines()]


def check_attention(output: str) -> list[str]:
    """Return the lines of kernels, which the program itself has checked for spills and copies in flight."""
    lines = output.splitlines()
    assert all(" stack 0 " in line for line in lines)
    assert all("share_out" in line or re.search(r"LDG(STS)?\.128", line) for line in lines)
    return lines


def test_decode_keeps_copies_in_flight_and_nothing_on_the_stack(outputs: Outputs) -> None:
    (line,) = check_attention(outputs.attention)
    assert kernels_of(outputs.attention) == ["decode"]
    assert "HMMA" in line


@pytest.mark.exhaustive  # eight kernels take 15 s, and decode has copies, products and scales like the others
def test_attention_kernels_keep_copies_in_flight_and_nothing_on_the_stack(tmp_path: Path) -> None:
    (output,) = compiled(tmp_path, ("compile_kernels.py", "90:bfloat16:llama-8b"))
    lines = check_attention(output)
    assert kernels_of(output) == ATTENTION
    assert "HMMA" in lines[2]
    assert "HGMMA" in lines[4]


@pytest.mark.exhaustive
def test_every_config_of_the_attention_kernels_compiles(tmp_path: Path) -> None:
    others = ("80:float32:neox", "80:float16:wide:reduce")
    more = ("--every", "90:bfloat16:opt-13b:decode", "80:bfloat16:llama-8b:prefill", "90:bfloat16:llama-8b:kv_write-")
    int8 = ("80:bfloat16+int8:neox", "90:bfloat16+int8:llama-8b")
    (found,) = compiled(tmp_path, ("compile_kernels.py", *others, *more))
    (quantized,) = compiled(tmp_path, ("compile_kernels.py", *int8))
    assert kernels_of(quantized) == 2 * ATTENTION
    assert kernels_of(found) == [
        *ATTENTION,
        "reduce",
        *["decode"] * 6,
        *["prefill"] * 3,
        "prefill-window",
        "kv_write-norms",
    ]


def test_thresholds_need_no_stack_and_one_exchange_per_pass(outputs: Outputs) -> None:
    # Each thread adds up a row's values alone, and threads exchange their sums once per pass. Row offsets need 64 bits,
    # because rows times vocabulary may exceed 2**31.
    assert outputs.thresholds == "90 thresholds in 4 loops: 0 0 True\n"


@pytest.mark.exhaustive  # 9 kernels take 10 s; attention, products, thresholds and copies are compiled by the others
@pytest.mark.parametrize("target", ["90-bf16", "80-fp32"])
def test_norms_and_activations_move_16_bytes_and_do_not_spill(tmp_path: Path, target: str) -> None:
    (found,) = compiled(tmp_path, ("compile_ops.py", target))
    lines = found.splitlines()
    assert len(lines) == (10 if target.startswith("90") else 9)
    for line in lines:
        label, _, facts = line.partition(": ")
        spilled, narrow = (int(part) for part in facts.split())
        assert spilled == 0, f"{label} keeps values on the stack"
        # The few weights of short rows, and a row's scale, move one by one.
        assert narrow <= (1 if "heads" in label or "scale" in label else 0), (
            f"{label} moves less than 16 bytes at a time"
        )


def test_copies_and_quantization_load_and_store_16_bytes(outputs: Outputs) -> None:
    copy, *quantizers = outputs.copies.split(".visible .entry ")[1:]
    # A thread moves its part of a chunk 4 words at a time; the only other loads are the two ids.
    wanted = block_copy._CHUNK // (32 * block_copy._WARPS) // 4
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", copy)) == wanted
    assert len(re.findall(r"st\.global\S*\.v4\.b32", copy)) == wanted
    assert len(re.findall(r"ld\.global", copy)) == wanted + 2
    assert "ld.local" not in copy
    assert len(quantizers) == 2
    for kernel in quantizers:
        assert re.search(r"ld\.global\S*\.v4\.b32", kernel)
        assert re.search(r"st\.global\S*\.v4\.b32", kernel)
        assert not re.search(r"(ld|st)\.(local|global\S*\.b8)", kernel)
        assert "fma.rn.f32" not in kernel  # it rounds unlike torch
