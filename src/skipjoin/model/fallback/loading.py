"""Modules of transformers with a checkpoint's weights, whose products are packed for `LayerOps`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.initialization import no_init_weights
from transformers.utils import logging

from skipjoin.model.builder import Builder
from skipjoin.model.errors import ModelError
from skipjoin.model.fallback.interfaces import PAGED, hook
from skipjoin.model.fallback.mixers import BLOCK_PRODUCTS, BLOCKS
from skipjoin.model.fallback.older import cut_experts
from skipjoin.model.fallback.products import Experts, PackedWeight
from skipjoin.model.fallback.settings import Settings, wholes
from skipjoin.model.fallback.trace import adapt, build, prepare, settle
from skipjoin.model.ops.base import LayerOps, Linear
from skipjoin.model.ops.cpp_ops import CppOps

# Names of tensors in a model that also sees or hears, and in the decoder that is its language model.
_OF_PARTS = {r"^model\.(language|text)_model\.": "model.", r"^language_model\.": ""}


def load(settings: Settings, builder: Builder, device: torch.device | str) -> Any:
    kind, config = settings.kind, copy.deepcopy(settings.config)
    if builder.weights.checkpoint is not None:
        model = _pretrained(kind, config, builder).to(device)
    else:
        named = build(kind, copy.deepcopy(config), "meta").named_parameters()
        tensors = {name: builder.weights.take(name, *parameter.shape) for name, parameter in named}
        where = "meta" if any(tensor.is_meta for tensor in tensors.values()) else str(device)
        with no_init_weights():
            model = build(kind, config, where, dtype=builder.dtype)
        model.tie_weights()
        for name, parameter in model.named_parameters():
            parameter.data = tensors[name]
    settle(model)
    return model.requires_grad_(False)


def _pretrained(kind: type[Any], config: Any, builder: Builder) -> Any:
    folder = builder.weights.checkpoint
    prepare(kind, config)
    names = None if kind.__name__ in wholes().values() else _OF_PARTS
    with _quiet():
        try:
            model, found = kind.from_pretrained(
                folder, config=config, dtype=builder.dtype, attn_implementation=PAGED, local_files_only=True,
                use_safetensors=True, trust_remote_code=False, output_loading_info=True, key_mapping=names,
            )  # fmt: skip
        except Exception as error:  # of safetensors, or of a conversion in transformers
            raise ModelError(
                f"{folder} cannot be loaded by transformers: {' '.join(str(error).split()):.300}"
            ) from error
    if missing := sorted(found["missing_keys"]):
        raise ModelError(f"{folder} has no tensor {missing[0]!r}")
    adapt(model)
    return model.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


class Packer:
    def __init__(self, model: Any, settings: Settings, builder: Builder) -> None:
        self._builder, self._traced = builder, settings.traced
        self.products: list[tuple[Linear, int, torch.dtype]] = []
        for prefix, module in model.named_modules():
            if getattr(module, "has_gate", None) is not None and hasattr(module, "_apply_gate"):
                cut_experts(module)
                hook(module, experts=self._experts(module))
            if (gates := BLOCKS.get(type(module).__name__)) is not None:
                setattr(module, BLOCK_PRODUCTS, {gate: self._blocks(module, gate) for gate in gates})
            for name, parameter in list(module.named_parameters(recurse=False)):
                if f"{prefix}.{name}" in self._traced.products:
                    module._parameters[name] = self._packed(module, f"{prefix}.{name}", parameter)
        for tensor in model.parameters():  # a shared one once
            if not isinstance(tensor, PackedWeight):
                builder.counted(tensor)
        builder.weight_bytes += sum(buffer.nbytes for buffer in model.buffers())

    def _packed(self, module: Any, name: str, weight: torch.Tensor) -> PackedWeight:
        # Also of weights that transformers keeps in float32 in any case, such as those of routers.
        is_wide = self._builder.dtype != torch.float32 and (
            name in self._traced.widened or weight.dtype == torch.float32
        )
        bias = getattr(module, "bias", None) if name.endswith(".weight") else None
        if is_wide or name in self._traced.left or not isinstance(bias, torch.Tensor) or bias.dim() != 1:
            bias = None
        matrix = weight.t().contiguous() if name in self._traced.transposed else weight.detach()
        if is_wide:
            matrix = matrix.float()
            product: Linear = _float32_ops(self._builder.ops).linear(matrix, None)
            self._builder.weight_bytes += product.weight_bytes
            self._builder.parameters += matrix.numel()
        else:
            product = self._builder.finish_linear(matrix, None if bias is None else bias.detach())
        self.products.append((product, matrix.shape[1], matrix.dtype))
        return PackedWeight.of(weight, product, bias, matrix.dtype)

    def _blocks(self, module: Any, name: str) -> list[Linear]:
        weights, biases = (module._parameters.pop(f"{name}_{part}").detach() for part in ("weight", "bias"))
        return [
            self._builder.finish_linear(weight.t().contiguous(), bias.contiguous())
            for weight, bias in zip(weights, biases, strict=True)
        ]

    def _experts(self, module: Any) -> Experts:
        both = []
        for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
            weights, biases = module._parameters.pop(name), module._parameters.get(f"{name}_bias")
            linears = []
            for at, weight in enumerate(weights.detach()):
                matrix = weight.t().contiguous() if module.is_transposed else weight.contiguous()
                bias = None if biases is None else biases[at].detach()
                linears.append(self._builder.finish_linear(matrix, bias))
            both.append(linears)
        return Experts(*both)


def _float32_ops(ops: LayerOps) -> LayerOps:
    return CppOps(ops.library, torch.float32) if isinstance(ops, CppOps) else ops
