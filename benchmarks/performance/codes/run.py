"""Measure products of quantized weights on a model in a GGUF file.

    python benchmarks/performance/codes/run.py FILE.gguf --out result.json [--parts quality,steps,served]
    python benchmarks/performance/codes/run.py FILE.gguf --parts steps,served    # of random_gguf.py
    python benchmarks/performance/codes/run.py FILE.gguf --parts served --peers llamacpp,openvino
    python benchmarks/performance/codes/run.py FOLDER --parts served    # of random_model.py, also with experts

- `quality`: logits on the repository's documents, 400 tokens at a time, against float32 of the widened weights by
  torch: relative error, share of equal most likely tokens, KL divergence and perplexity. `widened` is bfloat16.
- `steps`: milliseconds of a model's step, the weights in codes and widened to bfloat16 in turn, and the GB per
  second at which a step with one stream reads weights.
- `served`: tokens per second over HTTP, in turn with the peers on the same file, after a few short requests to each.
  OpenVINO has no server, so it runs without HTTP. The engine that does not run is stopped by a signal, because
  llama.cpp's threads spin. `--out` is written after each run, so that a command that is ended early leaves its turns so
  far. `to_PEER` are medians of our rate over a peer's.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "engine_throughput"))
from peers import Engine, OverHttp, Program, limits, program

import harness
from peer_venvs import available
from servers import Server, Skipjoin, llamacpp, running, stop_in_turn
from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model
from skipjoin.model.ops.cpp_ops import CppOps
from skipjoin.model.tokenizer import load_tokenizer
from workload import SETS, SLOTS, WARM_UP, Job

PIECE, BLOCK, MAX_PIECES = 400, 16, 6
# Streams and tokens before them of a decode step; then tokens of a prompt.
DECODES = {"1": (1, 64), "16": (16, 64), "64": (64, 64)}
PROMPT = 900
STEP_RUNS = 15
SERVED = ("one", "even", "wide", "prefill")
ENGINES = ("llamacpp", "openvino")
KV_GIB = 1


def load(file: Path, *, in_codes: bool = True, **spec: str) -> CausalLM:
    before = CppOps.reads_codes
    CppOps.reads_codes = in_codes
    try:
        return load_model(file, LoadSpec(**spec))
    finally:
        CppOps.reads_codes = before


def logits(model: CausalLM, pieces: list[list[int]]) -> torch.Tensor:
    found = []
    for piece in pieces:
        blocks = -(-len(piece) // BLOCK)
        kv = PagedKV(blocks, BLOCK, model.config, model.dtype, "cpu")
        batch = PackedBatch.build([Segment(piece, 0, list(range(blocks)), True, True)], BLOCK, "cpu")
        found.append(model.forward(batch, kv).float())
    return torch.stack(found)


def quality(file: Path) -> dict[str, Any]:
    text = "\n".join((harness.ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/concepts.md"))
    ids = load_tokenizer(file).encode(text, add_special_tokens=False)
    pieces = [ids[at : at + PIECE] for at in range(0, len(ids) - PIECE + 1, PIECE)][:MAX_PIECES]
    expected = torch.tensor(pieces)[:, 1:].flatten()
    reference = logits(load_model(file, LoadSpec(dtype="float32", attention="torch")), pieces)
    centered = reference - reference.mean(-1, keepdim=True)

    def figures(found: torch.Tensor) -> dict[str, float]:
        loss = F.cross_entropy(found[:, :-1].flatten(0, 1), expected)
        logs, known = (x.flatten(0, 1).log_softmax(-1) for x in (found, reference))
        return {
            "logit_error": round(float((found - reference).norm() / centered.norm()), 4),
            "equal_most_likely": round(float((found.argmax(-1) == reference.argmax(-1)).float().mean()), 4),
            "kl_divergence": round(float(F.kl_div(logs, known, log_target=True, reduction="batchmean")), 5),
            "perplexity": round(math.exp(loss), 3),
        }

    cases = {
        "codes": load(file),
        "codes, float32": load(file, dtype="float32"),
        "widened": load(file, in_codes=False),
        "int8 of float32": load(file, dtype="float32", quantization="int8"),
    }
    found = {name: figures(logits(model, pieces)) for name, model in cases.items()}
    return {"tokens": expected.numel(), "float32": figures(reference), **found}


def step_ms(model: CausalLM, segments: list[Segment], kv: PagedKV) -> float:
    batch = PackedBatch.build(segments, BLOCK, "cpu")
    with model.ops.step():
        return 1e3 * harness.seconds_of(lambda: model.forward(batch, kv))


def steps(file: Path, threads: int) -> dict[str, Any]:
    begin = time.perf_counter()
    in_codes = load(file)
    load_s = time.perf_counter() - begin
    models = {"codes": in_codes, "widened": load(file, in_codes=False)}
    cases: dict[str, list[Segment]] = {}
    for name, (streams, before) in DECODES.items():
        width = before // BLOCK + 1
        tables = [list(range(at * width, (at + 1) * width)) for at in range(streams)]
        cases[name] = [Segment([5], before, table) for table in tables]
    cases["prompt"] = [Segment([7] * PROMPT, 0, list(range(-(-PROMPT // BLOCK))))]
    caches = {name: PagedKV(400, BLOCK, model.config, model.dtype, "cpu") for name, model in models.items()}
    for model in models.values():
        model.ops.use_threads(threads)
    found: dict[str, Any] = {}
    for case, segments in cases.items():
        times: dict[str, list[float]] = {name: [] for name in models}
        for turn in range(STEP_RUNS):
            for name in harness.in_turn(models, turn):
                times[name].append(step_ms(models[name], segments, caches[name]))
        ratio = harness.median_ratio(times["codes"], times["widened"])
        found[case] = {**{name: harness.spread(values) for name, values in times.items()}, "codes_to_widened": ratio}
    sizes = {name: model.weight_bytes for name, model in models.items()}
    read = sizes["codes"] / found["1"]["codes"]["median"] / 1e6
    return {
        "threads": threads, "load_s": round(load_s, 2), "file_bytes": file.stat().st_size, "weight_bytes": sizes,
        "gb_per_s": round(read, 2), "ms": found,
    }  # fmt: skip


def served(
    file: Path, repeats: int, sets: list[str], peers: list[str], save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    rates: dict[str, dict[str, list[float]]] = {name: {} for name in sets}
    with contextlib.ExitStack() as stack:
        groups: dict[str, subprocess.Popen[str]] = {}
        engines: dict[str, Engine] = {}

        def add(name: str, group: subprocess.Popen[str], engine: Engine) -> None:
            groups[name], engines[name] = group, engine
            stop_in_turn(stack, group)

        found = available(peers)
        server: Server = stack.enter_context(Skipjoin(file, *limits(KV_GIB), "--max-model-len", 1024))
        add("skipjoin", server.process, OverHttp(server))
        if "llamacpp" in found:
            server = stack.enter_context(llamacpp(found["llamacpp"], file, seqs=SLOTS))
            add("llamacpp", server.process, OverHttp(server))
        if "openvino" in found:
            process = stack.enter_context(program("openvino", file, "--parallel", SLOTS, "--kv-gib", KV_GIB))
            add("openvino", process, Program(process))

        def seconds_of(name: str, jobs: list[Job]) -> float:
            with running(groups[name]):
                time.sleep(0.5)
                return engines[name].run(jobs)

        for name in engines:
            harness.show("warm-up", name, round(seconds_of(name, WARM_UP(0)), 1))
        for turn in range(repeats):
            for label in sets:
                for name in harness.in_turn(engines, turn):
                    rate = SETS[label].tokens / seconds_of(name, SETS[label].jobs(turn + 1))
                    rates[label].setdefault(name, []).append(rate)
                    harness.show(f"turn {turn + 1} of {repeats}", label, name, round(rate, 1))
                    save(_compared(rates))
    return _compared(rates)


def _compared(rates: Mapping[str, Mapping[str, list[float]]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, of in rates.items():
        turns = min(map(len, of.values()), default=0)
        found[name] = {"turns": turns, **{engine: harness.spread(values, 1) for engine, values in of.items()}}
        for peer in of if turns else ():
            if peer != "skipjoin":
                found[name][f"to_{peer}"] = harness.median_ratio(of["skipjoin"], of[peer])
    return found


def main() -> None:
    parser = harness.parser(__doc__, repeats=3, threads=len(os.sched_getaffinity(0)))
    parser.add_argument("file", type=Path)
    parser.add_argument("--parts", type=harness.some_of("parts", PARTS), default=list(PARTS))
    parser.add_argument("--sets", type=harness.some_of("sets", SERVED), default=list(SERVED))
    parser.add_argument("--peers", type=harness.some_of("peers", ENGINES), default=["llamacpp"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    record = harness.new_record(file=args.file.name)
    for part in args.parts:

        def save(found: dict[str, Any], part: str = part) -> None:
            record[part] = found
            harness.write_record(record, args.out)

        save(PARTS[part](args, save))
        harness.report(record, args.out)


PARTS = {
    "quality": lambda args, _: quality(args.file),
    "steps": lambda args, _: steps(args.file, args.threads),
    "served": lambda args, save: served(args.file, args.repeats, args.sets, args.peers, save),
}

if __name__ == "__main__":
    main()
