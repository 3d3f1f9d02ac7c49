"""Generate with transformers in a separate process, in the environment of the peer `transformers`.

The process reads one JSON object per line: `{"engine": "generate" or "continuous", "jobs": [[prompt, output], ...]}`,
and answers with the seconds of the jobs. Its first line says that the model is loaded. `generate` runs requests of one
length in one batch, and others in batches of 16 in the given order, padded on the left.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

Jobs = list[tuple[list[int], int]]
BATCH, MAX_OUTPUT = 16, 256


@torch.inference_mode()
def generate(model: torch.nn.Module, jobs: Jobs) -> float:
    begin = time.perf_counter()
    is_uniform = len({(len(prompt), output) for prompt, output in jobs}) == 1
    size = len(jobs) if is_uniform else BATCH
    for first in range(0, len(jobs), size):
        batch = jobs[first : first + size]
        width = max(len(prompt) for prompt, _ in batch)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
        longest = max(output for _, output in batch)
        model.generate(ids, attention_mask=mask, max_new_tokens=longest, min_new_tokens=longest, do_sample=False)
    return time.perf_counter() - begin


def continuous(model: torch.nn.Module, jobs: Jobs) -> float:
    config = GenerationConfig(max_new_tokens=MAX_OUTPUT, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(page_size=32, num_blocks=1024, max_batch_tokens=1024)
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=batching)
    manager.start()
    begin = time.perf_counter()
    for prompt, output in jobs:
        manager.add_request(prompt, max_new_tokens=output)
    done, tokens = 0, 0
    while done < len(jobs):
        result = manager.get_result(timeout=60)
        if result is not None and result.is_finished():
            done += 1
            tokens += len(result.generated_tokens)
    seconds = time.perf_counter() - begin
    manager.stop(block=True)
    if tokens != sum(output for _, output in jobs):
        raise RuntimeError(f"{tokens} tokens were generated")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries goes to standard error
    model = AutoModelForCausalLM.from_pretrained(
        args.folder, dtype=getattr(torch, args.dtype), trust_remote_code=False
    ).eval()
    print(json.dumps("loaded"), file=answers)
    for line in sys.stdin:
        task = json.loads(line)
        run = {"generate": generate, "continuous": continuous}[task["engine"]]
        print(json.dumps(run(model, task["jobs"])), file=answers)


if __name__ == "__main__":
    main()
