"""Compile the attention and product kernels for a GPU that need not be present, with a backend's arguments.

    python compile_kernels.py [--every] 90:bfloat16:llama-8b,opt-13b ...

Arguments are compute capability, type and model shapes; bfloat16+int8 is bfloat16 with KV of int8. A kernel name after
the shapes selects kernels, as in 90:bfloat16:opt-13b:decode. Prints a line per kernel, with --every one per config.
Fails if a kernel spills or a decode kernel is not pipelined, except with int8. Must run without TRITON_INTERPRET.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from attention_cases import shape as config_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from skipjoin.kv_format import CACHE_FORMATS
from skipjoin.model.attention.base import HeadWeights, Softmax
from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.kernels import decode_attention, experts, kv_write, prefill_attention, products
from skipjoin.model.kernels.decode_attention import decode_configs
from skipjoin.model.kernels.prefill_attention import prefill_configs
from skipjoin.model.kv_cache import PagedKV

# heads, kv_heads, head_dim, rotary_dim
SHAPES = {
    "llama-8b": (32, 8, 128, 128),
    "opt-13b": (40, 40, 128, 0),
    "neox": (12, 12, 64, 16),
    "odd": (6, 2, 80, 80),
    "wide": (16, 8, 256, 256),
}
_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
}
BLOCK_SIZE = 16
# Pipelines with at per_loop this many stages have copies in flight during waits.
_PIPELINED = 3
# Minimum number of 16-byte loads in flight per thread of a pipelined decode kernel: with 128 threads and the programs
# resident on a multiprocessor, this exceeds what memory returns within its latency.
_MIN_IN_FLIGHT = 8


class Recorder:
    def __init__(self, kernel: Any) -> None:
        self.kernel, self.calls = kernel, []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.calls.append((args, kwargs))

    def compile(self, capability: int) -> Any:
        (args, kwargs), self.calls = self.calls[0], []
        names = self.kernel.arg_names
        values = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
        options = {k: v for k, v in kwargs.items() if k not in names}
        signature, constants, attributes = {}, {}, {}
        for i, (parameter, name) in enumerate(zip(self.kernel.params, names, strict=True)):
            value = values[name]
            if parameter.is_constexpr:
                signature[name], constants[name] = "constexpr", value
                continue
            tensor = isinstance(value, torch.Tensor)
            signature[name] = _TYPES[value.dtype] if tensor else "fp32" if isinstance(value, float) else "i32"
            aligned = tensor or (isinstance(value, int) and value % 16 == 0)
            if aligned and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
                attributes[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def recorded() -> dict[str, Recorder]:
    found = {}
    for module, name in (
        (kv_write, "_kv_write"),
        (decode_attention, "_share_out"),
        (decode_attention, "_decode"),
        (decode_attention, "_reduce"),
        (prefill_attention, "_prefill"),
        (products, "product_kernel"),
        (experts, "expert_product_kernel"),
        (experts, "weighted_sum_kernel"),
    ):
        kernel = getattr(module, name)
        found[name] = Recorder(kernel.kernel if isinstance(kernel, Recorder) else kernel)
        setattr(module, name, found[name])
    return found


def compiled(
    capability: int, types: tuple[torch.dtype, torch.dtype], shape: str, every: bool, only: str = ""
) -> Iterator[tuple[str, dict, Any]]:
    """Yield name, config and result for the first or every config of kernels whose names start with `only`."""
    for name, config, kernel in _calls(*types, shape, every, wgmma=capability // 10 == 9):
        if name.startswith(only):
            yield name, config, kernel.compile(capability)
        kernel.calls.clear()


def _calls(
    dtype: torch.dtype, cache: str, shape: str, every: bool, wgmma: bool
) -> Iterator[tuple[str, dict, Recorder]]:
    heads, kv_heads, dim, rotary = SHAPES[shape]
    kernels, group, itemsize = recorded(), heads // kv_heads, dtype.itemsize
    segments = [Segment([0] * 16, 0, list(range(16))), Segment([0], 40, list(range(32)))]
    batch = PackedBatch.build(segments, BLOCK_SIZE)
    kv = PagedKV(32, BLOCK_SIZE, config_of(heads, kv_heads, dim), dtype, "cpu", of=CACHE_FORMATS[cache])
    parts = (*kv.layer(0), kv.scales(0))
    qkv = torch.empty((17, heads + 2 * kv_heads, dim), dtype=dtype)
    query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
    out, options = torch.empty((17, heads, dim), dtype=dtype), {"softmax": Softmax(0.1), "window": 0}
    cos_sin = torch.empty((32, rotary)) if rotary else None
    kv_write.kv_write(query, key, value, *parts, batch.slots, batch.positions, cos_sin)
    yield "kv_write", {}, kernels["_kv_write"]
    if every:
        norms = HeadWeights(*torch.empty((2, dim), dtype=dtype), 1e-6, 0.0)
        kv_write.kv_write(query, key, value, *parts, batch.slots, batch.positions, cos_sin, norms)
        yield "kv_write-norms", {}, kernels["_kv_write"]
    for segments in (None, torch.ones(1, dtype=torch.int64)):
        work = decode_attention.share_out(batch, segments, window=0)
    yield "share_out", {}, kernels["_share_out"]
    for config in decode_configs(group, dim, itemsize)[: None if every else 1]:
        decode_attention.decode_attention(
            out, query, *parts, batch.block_tables, work, softmax=options["softmax"], processors=132, config=config
        )
        yield "decode", config, kernels["_decode"]
    yield "reduce", {}, kernels["_reduce"]
    tiles = torch.zeros((4, 2), dtype=torch.int64)
    for config in prefill_configs(group, dim, itemsize, 4096, wgmma=wgmma)[: None if every else 1]:
        prefill_attention.prefill_attention(out, query, *parts, batch, tiles, config=config, **options)
        yield "prefill", config, kernels["_prefill"]
    if every:
        config = prefill_configs(group, dim, itemsize, 4096, wgmma=wgmma)[0]
        prefill_attention.prefill_attention(
            out, query, *parts, batch, tiles, config=config, softmax=options["softmax"], window=1000
        )
        yield "prefill-window", config, kernels["_prefill"]
    weight = torch.empty((1024, heads * dim), dtype=dtype)
    products.product(out.flatten(1), weight, None)
    yield "product", {"STAGES": _PIPELINED}, kernels["product_kernel"]
    blocks = experts.Blocks.of(torch.zeros((17, 2), dtype=torch.int64), 8)
    found = experts.expert_product(out.flatten(1), weight.expand(8, -1, -1), None, blocks, 34, 2)
    yield "experts", {"STAGES": _PIPELINED}, kernels["expert_product_kernel"]
    experts.weighted_sum(found, torch.ones((17, 2)))
    yield "weighted_sum", {}, kernels["weighted_sum_kernel"]


def dumped(kernel: Any) -> tuple[str, str]:
    dump = str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([dump, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    return usage, sass


def loops(sass: str) -> Iterator[list[str]]:
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)]
    branches = [(re.search(r"\bBRA(?:\.U)? .*?0x([0-9a-f]+)", text), end) for end, text in code]
    found = [(int(to[1], 16), end) for to, end in branches if to and int(to[1], 16) < end]
    for begin, end in found:
        if not any(begin <= first and last <= end and (first, last) != (begin, end) for first, last in found):
            yield [text for at, text in code if begin <= at <= end]


def in_flight(sass: str) -> int:
    """Return the number of 16-byte copies to shared memory per thread in flight during waits of the main loop."""
    per_loop = []
    for body in loops(sass):
        copies = sum("LDGSTS" in text and ".128" in text for text in body)
        groups = sum("LDGDEPBAR" in text for text in body)
        waits = [int(n, 16) for n in re.findall(r"DEPBAR.LE SB0, 0x([0-9a-f]+)", "\n".join(body))]
        if copies and groups and waits:
            per_loop.append(copies * min(waits) // groups)
    return min(per_loop, default=0)


def check(name: str, config: dict[str, int], kernel: Any, usage: str, sass: str) -> None:
    """Raise AssertionError if the kernel spills, or if a decode or product kernel waits for each copy in turn.

    See `dumped` for `usage` and `sass`.
    """
    stack = re.search(r"STACK:(\d+)", usage)[1]
    spills = stack != "0" or re.search(r"\b(LDL|STL)\b", sass)
    assert not spills, f"{name} {config} has {stack} bytes on its stack"
    if name.startswith(("decode", "product", "experts")) and config["STAGES"] >= _PIPELINED:
        loop = kernel.asm["ttgir"].rsplit("scf.for", 1)[1].split("scf.yield", 1)[0]
        waits = [int(n) for n in re.findall(r"async_wait .*?num = (\d+)", loop)]
        assert min(waits, default=0) >= 1, f"{name} {config} waits for all copies but {waits} in its loop"
        assert in_flight(sass) >= _MIN_IN_FLIGHT, f"{name} {config} has {in_flight(sass)} copies in flight"


def describe(kernel: Any, usage: str, sass: str) -> str:
    """Return registers, stack bytes (spills), shared memory, copies in flight and counts of instructions of interest.

    See `dumped` for `usage` and `sass`.
    """
    count = Counter(re.findall(r"\b((?:LDG|STG|LDL|STL|LDGSTS|HMMA|HGMMA|LDSM|LDS|STS|BAR|SHFL|FFMA|MUFU)\S*)", sass))
    loads = {}
    for name, n in count.items():
        width = next((w for w in ("128", "64") if w in name.split(".")), "")
        family = name.split(".")[0] + ("." + width if width else "")
        loads[family] = loads.get(family, 0) + n
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    shared = kernel.metadata.shared
    return f"registers {registers} stack {stack} shared {shared} in flight {in_flight(sass)} " + " ".join(
        f"{k}:{v}" for k, v in sorted(loads.items())
    )


def main() -> None:
    every = False
    for wanted in sys.argv[1:]:
        if wanted == "--every":
            every = True
            continue
        capability, dtype, shapes, only = f"{wanted}:".split(":")[:4]
        dtype, _, cache = dtype.partition("+")
        types = getattr(torch, dtype), cache or "auto"
        for shape in shapes.split(","):
            for name, config, kernel in compiled(int(capability), types, shape, every, only):
                sizes = " ".join(f"{k}={v}" for k, v in config.items())
                usage, sass = dumped(kernel)
                print(f"{shape} {name} {sizes}: {describe(kernel, usage, sass)}", flush=True)
                if not cache:
                    check(name, config, kernel, usage, sass)


if __name__ == "__main__":
    main()
