"""Random adapters in the format of PEFT, and the weights that they change."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

PREFIX = "base_model.model."


def write_adapter(
    folder: Path, shapes: Mapping[str, tuple[int, int]], *, seed: int, rank: int = 4, size: float = 0.2, **config: Any
) -> dict[str, torch.Tensor]:
    """Write an adapter of layers with these shapes [out, in]; return what it adds to the weights of each.

    Args:
        size: Spread of its numbers.
        config: Further entries of adapter_config.json, with patterns that are ends of names.
    """
    draw, tensors, deltas = torch.Generator().manual_seed(seed), {}, {}
    alpha = config.setdefault("lora_alpha", 2 * rank)
    for name, (outputs, inputs) in shapes.items():
        own = _of(config.get("rank_pattern"), name, rank)
        down, up = (torch.randn(shape, generator=draw) * size for shape in ((own, inputs), (outputs, own)))
        tensors |= {f"{PREFIX}{name}.lora_A.weight": down, f"{PREFIX}{name}.lora_B.weight": up}
        scale = _of(config.get("alpha_pattern"), name, alpha) / (own**0.5 if config.get("use_rslora") else own)
        deltas[name] = scale * (up @ down)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = sorted({name.rpartition(".")[2] for name in shapes})
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "bias": "none", "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    return deltas


def _of(pattern: Mapping[str, int] | None, name: str, default: int) -> int:
    return next((value for end, value in (pattern or {}).items() if re.search(rf"(^|\.){end}$", name)), default)


def merge(model: torch.nn.Module, deltas: Mapping[str, torch.Tensor]) -> None:
    for name, delta in deltas.items():
        model.get_submodule(name).weight.data += delta
