"""The part `peers`: output tokens per second, against transformers' continuous batching on the same GPU in turns."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import (
    BLOCK_SIZE,
    Figures,
    Task,
    backends,
    drive,
    folder_of,
    loaded_model,
    settings_for,
    shape_of,
    significant,
    spread,
    synchronize,
    tokens,
)
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from skipjoin.config import EngineConfig
from skipjoin.engine.build import engine_around
from skipjoin.engine.load import Loaded
from skipjoin.workload.request import WorkloadRequest

MODEL, DTYPE = "llama-3-8b", "bfloat16"
# Target: multiple of the peer's tokens per second.
TARGET = 3.0
TURNS = 2
_BATCH_TOKENS = 8192
_PEERS_BLOCK = 256


class _Load(NamedTuple):
    """Requests that are all present at the start."""

    requests: int
    prompt: int
    output: int

    @property
    def generated(self) -> int:
        return self.requests * self.output


_CARD, _REHEARSAL = _Load(256, 256, 128), _Load(4, 24, 6)


def measure(task: Task) -> Figures:
    """Measure both engines in turn, each after a warm-up run."""
    load = _REHEARSAL if task.is_rehearsal else _CARD
    shape = shape_of(task, MODEL)
    rates: dict[str, list[float]] = {"skipjoin": [], "transformers": []}
    figures: Figures = {"model": MODEL, **load._asdict(), "target": TARGET}
    with folder_of(shape, DTYPE) as folder:
        config = settings_for(
            task,
            folder,
            DTYPE,
            max_model_len=load.prompt + load.output,
            max_num_seqs=load.requests,
            max_num_batched_tokens=_BATCH_TOKENS,
            kv_cache_gib=(load.requests + 1)
            * (load.prompt + load.output + BLOCK_SIZE)
            * shape.kv_bytes_per_token
            / 2**30,
            pipeline_depth=2,
        )
        with loaded_model(config) as loaded:
            figures |= backends(loaded)
            _ours(loaded, config, load)
            rates["skipjoin"].append(_ours(loaded, config, load))
            figures["tokens_per_s"] = {"skipjoin": spread(rates["skipjoin"])}
            task.keep(figures)
            if task.device == "cuda":
                torch.cuda.empty_cache()  # the memory fits both, but not the other's cached memory
            theirs = _Theirs(task, folder, shape.vocab)
            theirs.run(load)
            for turn in range(TURNS):
                if turn and task.left_s < 0:
                    break
                if turn:
                    rates["skipjoin"].append(_ours(loaded, config, load))
                rates["transformers"].append(theirs.run(load))
                figures["tokens_per_s"] = {name: spread(found) for name, found in rates.items()}
                figures["ratio"] = significant(
                    statistics.median(
                        ours / other for ours, other in zip(rates["skipjoin"], rates["transformers"], strict=True)
                    )
                )
                figures["theirs"] = theirs.settings
                task.keep(figures)
    return figures


def _ours(loaded: Loaded, config: EngineConfig, load: _Load) -> float:
    """Tokens per second of the engine's loop."""
    engine = engine_around(loaded, config)
    jobs = [WorkloadRequest(0.0, load.prompt, load.output, "default", 0)] * load.requests
    record = drive(engine, jobs, 300.0)
    assert record["requests"]["finished"] == load.requests, record["requests"]
    return load.generated / float(record["duration_s"])


class _Theirs:
    """transformers' continuous batching with its own settings, except for a cache that all requests fit in and our
    tokens of a step."""

    def __init__(self, task: Task, folder: Path, vocab: int) -> None:
        self._device, self._vocab = task.device, vocab
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device(task.device):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, DTYPE))
        self._model = model.eval()
        self.settings: Figures = {}

    def run(self, load: _Load) -> float:
        """Return tokens per second from the first request to the last token, after graphs are captured."""
        blocks = load.requests * -(-(load.prompt + load.output) // _PEERS_BLOCK) + 8
        batching = ContinuousBatchingConfig(
            num_blocks=blocks, max_batch_tokens=_BATCH_TOKENS, **_block_size(_PEERS_BLOCK)
        )
        generation = GenerationConfig(max_new_tokens=load.output, do_sample=False, eos_token_id=-1, pad_token_id=0)
        manager = self._model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=batching
        )
        warm_up = getattr(manager, "warmup", None)
        if warm_up is not None and self._device == "cuda":
            warm_up()
        attention = self._model.config._attn_implementation
        manager.start()
        try:
            synchronize(self._device)
            start = time.perf_counter()
            manager.add_requests(
                [tokens(number, load.prompt, self._vocab) for number in range(load.requests)],
                max_new_tokens=load.output,
            )
            done = made = 0
            while done < load.requests:
                result = manager.get_result(timeout=5)
                if result is None:
                    if not manager.is_running():
                        raise RuntimeError("transformers' continuous batching stopped")
                elif result.is_finished():
                    done, made = done + 1, made + len(result.generated_tokens)
            seconds = time.perf_counter() - start
        finally:
            manager.stop(block=True, timeout=30)
        if made != load.generated:
            raise RuntimeError(f"transformers generated {made} of {load.generated} tokens")
        self.settings = json.loads(json.dumps(vars(manager.continuous_batching_config), default=str))
        self.settings["attention"] = attention
        return load.generated / seconds


def _block_size(size: int) -> dict[str, int]:
    """Return the block size under the field name of this version."""
    fields = ContinuousBatchingConfig.__dataclass_fields__
    return {"block_size" if "block_size" in fields else "page_size": size}
