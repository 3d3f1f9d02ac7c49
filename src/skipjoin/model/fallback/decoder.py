from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from skipjoin.model.attention.base import LayerInputs
from skipjoin.model.batch import PackedBatch, chunked
from skipjoin.model.builder import Builder
from skipjoin.model.cuda import is_out_of_memory
from skipjoin.model.errors import ModelError
from skipjoin.model.fallback.even import EvenRows
from skipjoin.model.fallback.interfaces import QueryKeyValue, hook
from skipjoin.model.fallback.loading import Packer, load
from skipjoin.model.fallback.mixers import SlotMixing, mix
from skipjoin.model.fallback.older import with_biases, with_positions
from skipjoin.model.fallback.probe import compare, reference_of
from skipjoin.model.fallback.settings import Settings, fields, refusal, settings_of
from skipjoin.model.fallback.trace import Attention, base_name
from skipjoin.model.family import Family
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.modules import Embedding
from skipjoin.model.ops.base import Norm


class TransformersDecoder:
    EMBEDDING = OUTPUT = ""
    embedding: Embedding | None = None

    def __init__(self, builder: Builder, device: torch.device | str) -> None:
        settings = settings_of(builder.config.source)
        try:
            self._make(settings, builder, device)
        except Exception as error:
            if isinstance(error, ModelError) or is_out_of_memory(error):
                raise
            raise refusal(builder.config.architecture, error) from error

    def _make(self, settings: Settings, builder: Builder, device: torch.device | str) -> None:
        model = load(settings, builder, device)
        reference = reference_of(model) if model.device.type != "meta" else None
        self._step: LayerInputs | None = None
        self._chunks: dict[int, PackedBatch] = {}
        self._is_uneven = settings.traced.is_uneven and model.device.type == "cpu"
        self._dim, self._kv_heads = builder.config.head_dim, builder.config.num_kv_heads
        modules = dict(model.named_modules())
        calls: dict[str, list[tuple[int, Attention]]] = {}
        for layer, (name, call) in enumerate(settings.traced.attentions):
            calls.setdefault(name, []).append((layer, call))
        self._attentions = [_PagedAttention(self, found) for found in calls.values()]
        for name, attend in zip(calls, self._attentions, strict=True):
            hook(modules[name], attend=attend)
        for layer, name in enumerate(settings.traced.mixers):
            mix(modules[name], SlotMixing(builder.ops.recurrent, layer, self._inputs))
        packer = Packer(model, settings, builder)
        self._base = getattr(model, base_name(model))
        self.output = _Output(model)
        if reference is not None:
            compare(partial(self._logits, builder), reference, packer, builder)

    def embed(self, batch: PackedBatch) -> torch.Tensor:
        return batch.token_ids

    def advance(self, x: torch.Tensor, step: LayerInputs) -> torch.Tensor:
        self._step, self._chunks = step, {}
        for attend in self._attentions:
            attend.calls = 0
        try:
            with EvenRows() if self._is_uneven else nullcontext():
                found = self._base(input_ids=x[None], position_ids=step.batch.positions[None], use_cache=False)
        finally:
            self._step = None
        hidden: torch.Tensor = found.last_hidden_state[0]
        return hidden

    def _logits(self, builder: Builder, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        return self.output(self.advance(self.embed(batch), LayerInputs(batch, kv, builder.attention)))

    def _chunked(self, chunk: int) -> PackedBatch:
        step = self._inputs()
        if chunk not in self._chunks:
            self._chunks[chunk] = chunked(step.batch, chunk) if chunk else step.batch
        return self._chunks[chunk]

    def _inputs(self) -> LayerInputs:
        assert self._step is not None
        return self._step

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def attend(
        self, layer: int, call: Attention, query_key_value: QueryKeyValue, given: Mapping[str, Any], **options: Any
    ) -> torch.Tensor:
        """Attend in a layer; return [1, T, heads, value_dim].

        Args:
            given: What a module asks for besides: `growth`, the tokens and rate by which queries grow with their
                position; `slopes` of linear biases (ALiBi), [heads], rounded to bfloat16 as Falcon's if `is_rounded`;
                or `biases` of keys, [kv_heads, T].
        """
        step = self._inputs()
        query, key, value = (x[0] for x in query_key_value)
        positions, slopes, biases = step.batch.positions, given.get("slopes"), given.get("biases")
        if (growth := given.get("growth")) is not None:
            turns = torch.floor((positions.float() + 1) / growth[0])
            query = (query * (torch.log1p(turns) * growth[1] + 1)[:, None]).to(query.dtype)
        if slopes is not None and "is_rounded" in given:
            biases = slopes.bfloat16()[:, None] * positions * options["scale"]
        if biases is not None:
            query, key = with_biases(query, key, biases, options["scale"])
        elif slopes is not None:
            query, key = with_positions(query, key, positions, slopes / options["scale"])
        repeats = self._kv_heads // call.kv_heads
        key, value = (x.repeat_interleave(repeats, 0) if repeats > 1 else x for x in (key, value))
        # Zeros change no product, and the cache has rows of one length.
        query, key, value = (_padded(x, self._dim).transpose(0, 1) for x in (query, key, value))
        batch = self._chunked(call.chunk)
        out = step.attention.attend(query, key, value, step.kv, batch, layer=layer, window=call.window, **options)
        return out.view(1, *query.shape)[..., : call.value_dim]


class _PagedAttention:
    """What a module of attention calls. If several layers use the module, each has its KV."""

    def __init__(self, decoder: TransformersDecoder, layers: list[tuple[int, Attention]]) -> None:
        self._decoder, self._layers, self.calls = decoder, layers, 0
        self._sinks: torch.Tensor | None = None

    def __call__(
        self,
        module: torch.nn.Module,
        query_key_value: QueryKeyValue,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        scale, dim = options.get("scaling"), query_key_value[0].shape[-1]
        layer, call = self._layers[self.calls]
        self.calls += 1
        if (sinks := options.get("s_aux")) is not None and self._sinks is None:
            self._sinks = sinks.detach().float().contiguous()
        return self._decoder.attend(
            layer, call, query_key_value, options, scale=dim**-0.5 if scale is None else float(scale),
            cap=float(options.get("softcap") or 0.0), sinks=self._sinks,
        )  # fmt: skip


class _Output:
    weight_bytes = 0  # counted with the model

    def __init__(self, model: Any) -> None:
        name = base_name(model)
        self._model, self._rows = copy.copy(model), _Rows(getattr(model, name))
        self._model._modules = {**model._modules, name: self._rows}
        self._ids = torch.zeros((1, 1), dtype=torch.int64, device=model.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._rows.hidden = x[None]
        logits: torch.Tensor = self._model(input_ids=self._ids, use_cache=False).logits[0]
        return logits

    def add_to(self, x: torch.Tensor, total: torch.Tensor, then: Norm | None = None) -> torch.Tensor:
        raise NotImplementedError


class _Rows(torch.nn.Module):
    hidden: torch.Tensor

    def __init__(self, layers: torch.nn.Module) -> None:
        super().__init__()
        self.__dict__["_layers"] = layers  # not as a module of this one

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__dict__["_layers"], name)
        if isinstance(found, torch.nn.Module):
            raise AttributeError(f"'_Rows' object has no module {name!r}")
        return found

    def forward(self, *ignored: Any, **also: Any) -> _Outputs:
        return _Outputs(self.hidden)


class _Outputs:
    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, at: int) -> torch.Tensor:
        return (self.last_hidden_state,)[at]

    def __getattr__(self, name: str) -> None:
        return None


def _padded(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x if x.shape[-1] == dim else torch.nn.functional.pad(x, (0, dim - x.shape[-1]))


FAMILY = Family("transformers", TransformersDecoder, {}, fields, "", is_native=False)
