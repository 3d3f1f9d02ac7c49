"""Shared code of the parts of the GPU benchmark: tasks, models, engines, plans, and a driver of requests."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "src"))
from skipjoin.config import EngineConfig
from skipjoin.core.request import Request
from skipjoin.core.step import Slice, StepPlan
from skipjoin.engine.build import Engine
from skipjoin.engine.load import Loaded, load
from skipjoin.engine.loop import EngineLoop
from skipjoin.exec.sampling import Sampling
from skipjoin.observe.record import Record, add_usage, summarize
from skipjoin.observe.requests import RequestFacts, RequestLog
from skipjoin.observe.usage import EngineUsage
from skipjoin.sampling import SamplingParams
from skipjoin.sim.models import ModelShape, model_shape
from skipjoin.workload.request import WorkloadRequest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
Figures = dict[str, Any]
BLOCK_SIZE = 16
# Shapes of a rehearsal, which runs every kind of step quickly.
_TINY = {"layers": 2, "hidden": 64, "heads": 4, "head_dim": 16, "intermediate": 128, "vocab": 512}


@dataclass(frozen=True)
class Task:
    """Task of a part.

    Attributes:
        seconds: Approximate time limit.
        ceilings: Limits of the machine as the part `machine` measured them; empty in that part.
        into: File for the figures.
    """

    device: str
    seconds: float
    ceilings: Mapping[str, float]
    into: Path
    began: float

    @property
    def is_rehearsal(self) -> bool:
        return self.device == "cpu"

    @property
    def left_s(self) -> float:
        return self.seconds - (time.monotonic() - self.began)

    def keep(self, figures: Figures) -> None:
        """Write the figures so far, which survive a later failure."""
        partial = self.into.with_suffix(".tmp")
        partial.write_text(json.dumps(figures))
        partial.replace(self.into)


def spread(values: Sequence[float], scale: float = 1.0) -> Figures:
    found = statistics.median(values), min(values), max(values)
    return dict(zip(("median", "min", "max"), (significant(value * scale) for value in found), strict=True)) | {
        "runs": len(values)
    }


def significant(value: float) -> float:
    return float(f"{value:.5g}")


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(device: str, work: Callable[[], object], *, warmup: int = 3, runs: int = 20) -> list[float]:
    """Return the seconds of each of `runs` calls in succession, on CUDA by the device's clock.

    The calls are queued without a wait between them, so that their launches overlap with the calls before. A call that
    launches kernels from Python must be `recorded` first, or it may take the time of its launches.
    """
    for _ in range(warmup):
        work()
    if device != "cuda":
        found = []
        for _ in range(runs):
            start = time.perf_counter()
            work()
            found.append(time.perf_counter() - start)
        return found
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    synchronize(device)
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    synchronize(device)
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(marks)]


def recorded(device: str, *calls: Callable[[], object]) -> Callable[[], object]:
    """Return a function that makes the calls one after the other: on CUDA the replay of a graph of them."""

    def run() -> None:
        for call in calls:
            call()

    if device != "cuda":
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:1] * 2 + calls:  # compiles, and allocates workspaces
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # the engine has other threads
        run()
    return graph.replay


def shape_of(task: Task, name: str, *, max_positions: int | None = None) -> ModelShape:
    """Return a model of the simulator's catalog, or in a rehearsal a tiny one of the same family."""
    shape = model_shape(name)
    if task.is_rehearsal:
        heads = {"kv_heads": _TINY["heads"] // (2 if shape.kv_heads < shape.heads else 1)}
        shape = dataclasses.replace(shape, **_TINY, **heads)
    return shape if max_positions is None else dataclasses.replace(shape, max_positions=max_positions)


def config_of(shape: ModelShape, dtype: str) -> dict[str, Any]:
    common = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "dtype": dtype,
    }
    if shape.name.startswith("opt"):
        own = {
            "model_type": "opt",
            "architectures": ["OPTForCausalLM"],
            "ffn_dim": shape.intermediate,
            "word_embed_proj_dim": shape.hidden,
            "activation_function": "relu",
            "do_layer_norm_before": True,
        }
    else:
        family = "Qwen3" if shape.name.startswith("qwen3") else "Llama"
        own = {
            "model_type": family.lower(),
            "architectures": [f"{family}ForCausalLM"],
            "intermediate_size": shape.intermediate,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
        }
    return common | own


@contextlib.contextmanager
def folder_of(shape: ModelShape, dtype: str) -> Iterator[Path]:
    """Yield a folder with only a config.json, named after the model as profiles expect."""
    with tempfile.TemporaryDirectory(prefix="skipjoin-bench-") as scratch:
        folder = Path(scratch) / shape.name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config_of(shape, dtype)))
        yield folder


def settings_for(task: Task, folder: Path, dtype: str, **settings: Any) -> EngineConfig:
    common: dict[str, Any] = {
        "model": str(folder),
        "dtype": dtype,
        "device": task.device,
        "load_format": "dummy",
        "profile": "off",
        "recipe": "fcfs",
        "block_size": BLOCK_SIZE,
        "swap_space_gib": 0.0,
    }
    return EngineConfig(**(common | settings))


@contextlib.contextmanager
def loaded_model(config: EngineConfig) -> Iterator[Loaded]:
    """Load a model and its pools, with random KV, because zeros would be faster."""
    loaded = load(config)
    try:
        loaded.executor.store.device.tensor.normal_(0.0, 0.5)
        synchronize(loaded.executor.rank_specs[0].device_kind)  # the model may run on another stream
        yield loaded
    finally:
        loaded.executor.close()


def backends(loaded: Loaded) -> Figures:
    model = loaded.executor.model
    return {
        "attention": model.attention.name,
        "ops": type(model.ops).__name__,
        "dtype": loaded.executor.rank_specs[0].dtype,
    }


def tokens(number: int, count: int, vocab: int) -> list[int]:
    """Return a prompt with ids from the whole vocabulary that differs between requests."""
    return [3 + (number * 7919 + place * 104729) % (vocab - 3) for place in range(count)]


def plan_of(pieces: Sequence[tuple[int, int]], vocab: int) -> StepPlan:
    """Return a step with slices of (start, tokens), each in its own blocks, that samples one token of each."""
    slices, next_block = [], 0
    for number, (start, count) in enumerate(pieces):
        blocks = -(-(start + count) // BLOCK_SIZE)
        request = Request(number, 0.0, tokens(number, start + count, vocab), 1, sampling=Sampling(GREEDY, 0, ()))
        table = tuple(range(next_block, next_block + blocks))
        slices.append(Slice(request, start, count, samples=True, awaits=False, blocks=table))
        next_block += blocks
    return StepPlan(0, tuple(slices))


GREEDY = SamplingParams(temperature=0.0)


def forced(output: int, **params: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0} | params), max_tokens=output, ignore_eos=True)


def drive(engine: Engine, jobs: Sequence[WorkloadRequest], until_s: float) -> Record:
    """Add jobs at their due times, between steps as the server does, and return their record.

    Latencies count from the due time. Jobs that have not finished `until_s` seconds after the start count with their
    age and are aborted. The engine is idle afterwards.
    """
    loop, info = EngineLoop(engine), engine.info
    ended: list[RequestFacts] = []
    log = RequestLog(ended.append)
    limit = min(info.max_model_len, engine.core.largest_request)
    taken = [(number, job) for number, job in enumerate(jobs) if job.prompt_tokens + job.output_tokens <= limit]
    prompts = {number: tokens(number, job.prompt_tokens, info.vocab_size) for number, job in taken}
    rejected = [job.kind for number, job in enumerate(jobs) if number not in prompts]
    left, late, begin = deque(taken), 0.0, loop.clock()
    usage = EngineUsage(
        device_blocks=info.device_blocks, block_size=info.block_size, block_bytes=info.cpu_block_bytes, start=begin
    )
    while (left or not loop.idle) and (now := loop.clock() - begin) < until_s:
        while left and left[0][1].at <= now:
            number, job = left.popleft()
            loop.add(number, prompts[number], forced(job.output_tokens))
            late = max(late, now - job.at)
        if loop.idle and left:
            time.sleep(max(0.0, left[0][1].at - (loop.clock() - begin)))
            continue
        events = loop.step()
        log.observe(events)
        usage.observe(events)
    end = loop.clock() - begin
    facts = ended + list(log.live(begin + end))
    for one in facts:
        one.arrival, one.ended = jobs[one.id].at, None if one.ended is None else one.ended - begin
        for name in ("started", "first_token", "last_token"):
            if getattr(one, name) is not None:
                setattr(one, name, getattr(one, name) - begin)
    record = summarize(facts, now=end, rejected=rejected)
    add_usage(record, [usage])
    drain(loop)
    kept = {name: value for name, value in record.items() if name not in ("series", "quantiles", "slo")}
    return kept | {
        "latest_add_s": significant(late),
        "reasons": dict(Counter(one.reason or "unfinished" for one in facts)),
    }


def drain(loop: EngineLoop) -> None:
    for number in list(loop.core.requests):
        loop.abort(number)
    while not loop.idle:
        loop.step()
