"""Generate from a GGUF file with OpenVINO GenAI's continuous batching, in the environment of the peer `openvino`.

The process reads one JSON object per line: `{"jobs": [[prompt, output], ...]}`, and answers with the seconds of the
jobs. Its first line says that the model is loaded. Apart from the size of the KV pool, the number of requests and the
tokens of a step, settings are OpenVINO's own: its KV is int8, for example.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

import numpy as np
import openvino
import openvino_genai

# Tokens of a step, of which prompts take what decodes leave.
STEP_TOKENS = 2048


def generate(pipeline: openvino_genai.ContinuousBatchingPipeline, jobs: list[tuple[list[int], int]]) -> float:
    begin = time.perf_counter()
    handles = []
    for number, (prompt, output) in enumerate(jobs):
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = output
        config.ignore_eos, config.do_sample = True, False
        handles.append(pipeline.add_request(number, openvino.Tensor(np.array([prompt])), config))
    while pipeline.has_non_finished_requests():
        pipeline.step()
    tokens = sum(len(output.generated_ids) for handle in handles for output in handle.read_all())
    seconds = time.perf_counter() - begin
    if tokens != sum(output for _, output in jobs):
        raise RuntimeError(f"{tokens} tokens were generated")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--parallel", type=int, required=True, help="requests in a step")
    parser.add_argument("--kv-gib", type=int, required=True)
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries goes to standard error
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs = args.kv_gib, args.parallel
    scheduler.max_num_batched_tokens = STEP_TOKENS
    pipeline = openvino_genai.ContinuousBatchingPipeline(args.file, scheduler, "CPU", {})
    print(json.dumps("loaded"), file=answers)
    for line in sys.stdin:
        print(json.dumps(generate(pipeline, json.loads(line)["jobs"])), file=answers)


if __name__ == "__main__":
    main()
