"""Checks of a loaded model: paged KV computes what transformers does, and cuts and neighbors change no bit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.builder import Builder
from skipjoin.model.errors import ModelError
from skipjoin.model.fallback.interfaces import PAGED
from skipjoin.model.fallback.loading import Packer
from skipjoin.model.kv_cache import PagedKV

_log = logging.getLogger(__name__)
_TOKENS, _FIRST, _BLOCK = 24, 10, 4
# Maximum distance of a token's logits from transformers', relative to their spread, by type and for rounded weights.
# Experts are chosen by scores, so that rounding may exchange some: then, the median counts, and may be larger by what
# rounding of embeddings and norms changes in transformers' own logits. One exchange changes all later tokens, and is
# chance, so that several roundings are tried.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_ROUNDED_TOLERANCE = 0.1
_LARGEST_TOLERANCE = 0.25
_RUNS = 3
# transformers' attention that logits are compared with. Falcon's eager one adds linear biases twice.
_ATTENTION = {"falcon": "sdpa"}


class Reference(NamedTuple):
    """Logits of tokens, and `others` with numbers that differ by rounding, none in float32."""

    ids: list[int]
    logits: torch.Tensor
    others: list[torch.Tensor]


@torch.inference_mode()
def reference_of(model: Any) -> Reference:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary // 4, max(vocabulary // 2, 2), (1, _TOKENS), generator=generator)
    try:
        _use(model, _ATTENTION.get(model.config.model_type, "eager"))
        model.set_experts_implementation("eager")
        logits = model(input_ids=ids.to(model.device), use_cache=False).logits[0].float()
        others = []
        for part in _roundings(model):
            hooks = [
                module.register_forward_hook(partial(_round_otherwise, part)) for module in _rounded_modules(model)
            ]
            others.append(model(input_ids=ids.to(model.device), use_cache=False).logits[0].float())
            for hook in hooks:
                hook.remove()
    finally:
        _use(model, PAGED)
        model.set_experts_implementation(PAGED)
    return Reference(ids[0].tolist(), logits, others)


def _roundings(model: Any) -> tuple[slice, ...]:
    if model.dtype == torch.float32:
        return ()
    if not _has_experts(model):
        return (slice(0, None, 2),)
    return slice(0, None, 2), slice(1, None, 2), slice(0, None, 3)


def _has_experts(model: Any) -> bool:
    return any(hasattr(module, "_apply_gate") for module in model.modules())


def _rounded_modules(model: Any) -> list[torch.nn.Module]:
    norms = [module for module in model.modules() if type(module).__name__.endswith("Norm")]
    return [model.get_input_embeddings(), *(norms if _has_experts(model) else ())]


def _round_otherwise(part: slice, module: Any, given: Any, found: Any) -> Any:
    step = torch.zeros(found.shape[-1], device=found.device)
    step[part] = torch.finfo(found.dtype).eps
    return (found.float() * (1 + step)).to(found.dtype)


def _use(model: Any, attention: str) -> None:
    if model._can_set_attn_implementation():
        model.set_attn_implementation(attention)
    model.config._attn_implementation = attention  # which older modeling code ignores


@torch.inference_mode()
def compare(
    logits_of: Callable[[PackedBatch, PagedKV], torch.Tensor], reference: Reference, packer: Packer, builder: Builder
) -> None:
    """Log how slow the model is, and what is not promised.

    Raises:
        ModelError: If its logits differ from transformers', or from themselves where that is promised.
    """
    config, ids = builder.config, reference.ids
    width = -(-len(ids) // _BLOCK)
    kv = PagedKV(2 * width, _BLOCK, config, builder.dtype, reference.logits.device, state_slots=2)
    cut, whole = range(width), range(width, 2 * width)

    def run(*segments: Segment) -> torch.Tensor:
        return logits_of(PackedBatch.build(segments, _BLOCK, reference.logits.device), kv)

    def of(first: int, end: int, blocks: range) -> Segment:
        return Segment(ids[first:end], first, blocks, True, True, state=int(blocks is whole))

    both = run(of(0, _FIRST, cut), of(0, len(ids), whole))
    last = len(ids) - 1
    ours = torch.cat([both[:_FIRST], run(of(_FIRST, last, cut)), run(of(last, len(ids), cut))])
    spread = (reference.logits - reference.logits.mean(-1, keepdim=True)).norm(dim=-1)
    distances = (ours.float() - reference.logits).norm(dim=-1) / spread
    is_exact = builder.dtype == torch.float32 and not builder.weights.label
    distance = float(distances.max() if is_exact else distances[_FIRST:].median())
    tolerance = _ROUNDED_TOLERANCE if builder.weights.label else _TOLERANCES[builder.dtype]
    noises = [(other - reference.logits).norm(dim=-1) / spread for other in reference.others]
    noise = max((float(found[_FIRST:].median()) for found in noises), default=0.0)
    tolerance = max(tolerance, min(2 * noise, _LARGEST_TOLERANCE))
    if not distance <= tolerance:
        raise ModelError(
            f"{config.architecture} has no family of Skipjoin's own, and through transformers its logits differ by "
            f"{distance:.2g} of their spread from those without paged KV, more than {tolerance:g}"
        )
    is_stable = torch.equal(ours, both[_FIRST:])
    must_be_stable = builder.attention.name.endswith("-invariant")
    promises = must_be_stable or builder.ops.name == "cpp"
    if must_be_stable and not is_stable:
        raise ModelError(f"batch_invariant: logits of {config.architecture} through transformers depend on the batch")
    step = _seconds(lambda: run(of(last, len(ids), cut)))
    products = _seconds(lambda: _multiply(packer, reference.logits.device))
    _log.warning(
        "%s has no family of Skipjoin's own: transformers' modeling code runs it, which is slower. A decode takes "
        "%.1f ms, %.1f times as long as its products alone%s",
        config.architecture,
        step * 1e3,
        step / products if products else float("nan"),
        "" if is_stable or not promises else ". Its logits depend on the batch, so preemption may change tokens",
    )


def _multiply(packer: Packer, device: torch.device) -> None:
    for product, inputs, dtype in packer.products:
        product(torch.ones((1, inputs), dtype=dtype, device=device))


def _seconds(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(_RUNS):
        begin = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)
