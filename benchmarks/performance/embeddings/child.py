"""Embeds texts each time a line arrives, and prints seconds: started by `run.py`, in the engine's environment.

python child.py sentence-transformers|skipjoin MODEL DTYPE TEXTS.json VECTORS.npy
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

WARM_UP = 16


def embedder(engine: str, model: str, dtype: str) -> Callable[[list[str]], np.ndarray]:
    if engine == "skipjoin":
        from skipjoin import LLM  # noqa: PLC0415 - only in its own environment

        return LLM(model, dtype=dtype, profile="off", progress=False).embed
    import torch  # noqa: PLC0415
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    found = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": dtype})
    # 32 texts at a time, longest first, are its defaults.
    return lambda texts: np.asarray(found.encode(texts, show_progress_bar=False), np.float32)


def main() -> None:
    engine, model, dtype, texts_file, vectors_file = sys.argv[1:]
    texts = json.loads(Path(texts_file).read_text(encoding="utf-8"))
    embed = embedder(engine, model, dtype)
    embed(texts[:WARM_UP])
    print("ready", flush=True)
    for _ in sys.stdin:
        begin, used = time.perf_counter(), time.process_time()
        vectors = embed(texts)
        seconds = [time.perf_counter() - begin, time.process_time() - used]
        np.save(vectors_file, vectors)  # before run.py goes on, which reads it
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
