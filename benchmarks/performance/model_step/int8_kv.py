"""Compare a KV cache of 8 bits (`--kv-cache-dtype int8`) with that of the model's type, on this machine's CPU.

- `memory`: KV blocks of 16 tokens per GiB, for cataloged models in bfloat16.
- `steps`: a decode step of the random Llama of `model_step` in bfloat16. Steps with both caches alternate. `ratio` is
  the median of the times with the model's type relative to int8, `attention_ratio` that of attention with rotation.
- `quality`: the built-in model on held-out tasks, whose answers are given. `logit_error` is the relative error of the
  logits in the norm, compared with float32 and a cache of its type. `perplexity` is that of prompts and answers;
  `of_answers`, that of the answers, is close to 1, because each prompt has one answer.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from skipjoin.builtin import builtin_model_path
from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model, random_model
from skipjoin.sim.models import model_shape

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))
from run import BLOCK, SHAPES, segments

import harness
from builtin_tasks import draw_task

TYPES = ("auto", "int8")
MODELS = ("opt-13b", "llama-3-8b", "qwen3-0.6b")
# Number of sequences and the context of each.
DECODES = ((16, 96), (1, 764), (16, 764), (16, 1500), (4, 1900))
SHAPE = SHAPES["small"] | {"max_position_embeddings": 2048}


def measure_memory() -> list[dict[str, Any]]:
    found = []
    for name in MODELS:
        shapes = [dataclasses.replace(model_shape(name), kv_cache_dtype=kind) for kind in TYPES]
        plain, small = ((1 << 30) // (BLOCK * shape.kv_bytes_per_token) for shape in shapes)
        found.append({"model": name, "auto": plain, "int8": small, "ratio": round(small / plain, 3)})
    return found


class Step:
    """A decode step with one type of cache, whose content is normal."""

    def __init__(self, model: CausalLM, decodes: int, context: int) -> None:
        work = segments(decodes, context, 0)
        blocks = max(max(one.blocks) for one in work) + 1
        self.model, self.batch = model, PackedBatch.build(work, BLOCK)
        self.kv = PagedKV(blocks, BLOCK, model.config, model.dtype, "cpu", of=model.kv_format)
        for layer in range(model.config.num_layers):
            rows = torch.randn(blocks, BLOCK, model.config.num_kv_heads, model.config.head_dim)
            self.kv.write(layer, (slice(None), slice(None)), (rows, rows))
        config = model.config
        shape = decodes, config.num_heads + 2 * config.num_kv_heads, config.head_dim
        self._qkv = torch.randn(shape).to(model.dtype)
        self._cos_sin = torch.rand(config.max_positions, config.head_dim)

    def attention(self) -> None:
        config = self.model.config
        parts = self._qkv.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        for layer in range(config.num_layers):
            self.model.attention.attend(*parts, self.kv, self.batch, layer=layer, scale=0.125, cos_sin=self._cos_sin)

    def forward(self) -> None:
        self.model.forward(self.batch, self.kv)


def measure_steps(repeats: int) -> list[dict[str, Any]]:
    models = [random_model(SHAPE, 0, "bfloat16", kv_cache_dtype=kind) for kind in TYPES]
    found = []
    for decodes, context in DECODES:
        steps = [Step(model, decodes, context) for model in models]
        times: dict[str, list[list[float]]] = {"forward": [[], []], "attention": [[], []]}
        for turn in range(repeats + 2):
            for side in harness.in_turn((0, 1), turn):
                for name, kept in times.items():
                    kept[side].append(1e3 * harness.seconds_of(getattr(steps[side], name)))
        plain, small = [values[2:] for values in times["forward"]]
        attention = [values[2:] for values in times["attention"]]
        found.append(
            {
                "decodes": decodes,
                "context": context,
                "auto_ms": harness.spread(plain),
                "int8_ms": harness.spread(small),
                "ratio": harness.median_ratio(plain, small),
                "attention_ratio": harness.median_ratio(*attention),
            }
        )
        harness.show(found[-1])
    return found


def examples(count: int) -> list[tuple[list[int], int]]:
    """Return the tokens of held-out tasks with their answers, and where the answers begin."""
    tokenizer, draw = (
        AutoTokenizer.from_pretrained(str(builtin_model_path()), trust_remote_code=False),
        random.Random(0),
    )
    found = []
    for _ in range(count):
        task = draw_task(draw, held_out=True)
        chat = [{"role": "user", "content": task.prompt}]
        before = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        texts = (before, task.answer + tokenizer.eos_token)
        prompt, answer = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
        found.append((prompt + answer, len(prompt)))
    return found


def logits_of(model: CausalLM, tokens: list[int]) -> torch.Tensor:
    blocks = list(range(-(-len(tokens) // BLOCK)))
    kv = PagedKV(len(blocks), BLOCK, model.config, model.dtype, "cpu", of=model.kv_format)
    return model.forward(PackedBatch.build([Segment(tokens, 0, blocks, all_logits=True)], BLOCK), kv)


def _losses(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="none")


def _perplexity(losses: list[torch.Tensor]) -> float:
    return round(torch.cat(losses).double().mean().exp().item(), 5)


def measure_quality(count: int) -> list[dict[str, Any]]:
    texts, found = examples(count), []
    exact: list[torch.Tensor] = []
    for dtype in ("float32", "bfloat16"):
        for kind in TYPES:
            model = load_model(builtin_model_path(), LoadSpec(dtype=dtype, kv_cache_dtype=kind))
            logits = [logits_of(model, tokens) for tokens, _ in texts]
            exact = exact or logits
            lost = [_losses(rows, tokens) for rows, (tokens, _) in zip(logits, texts, strict=True)]
            of_answers = [losses[begin - 1 :] for losses, (_, begin) in zip(lost, texts, strict=True)]
            error = (torch.cat(logits) - torch.cat(exact)).norm() / torch.cat(exact).norm()
            found.append(
                {
                    "dtype": dtype,
                    "kv_cache_dtype": kind,
                    "tokens": sum(map(len, lost)),
                    "logit_error": round(error.item(), 6),
                    "perplexity": _perplexity(lost),
                    "of_answers": _perplexity(of_answers),
                }
            )
            harness.show(found[-1])
    return found


@torch.inference_mode()
def main() -> None:
    parser = harness.parser(__doc__, repeats=30, tasks=400)
    arguments = parser.parse_args()
    record = harness.new_record(threads=torch.get_num_threads(), model=SHAPE, block_size=BLOCK)
    record["memory"] = measure_memory()
    harness.show(record["memory"])
    record["quality"] = measure_quality(arguments.tasks)
    record["steps"] = measure_steps(arguments.repeats)
    harness.write_record(record, arguments.out)


if __name__ == "__main__":
    main()
