"""Layers of transformers with a state of constant size instead of KV: their functions, by `RecurrentOps`.

Modeling code projects, gates and normalizes rows, and calls functions of its module for what reads other tokens. Those
functions are replaced while a model of ours runs, so that the state is in the slots of the requests.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial, wraps
from inspect import signature
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from skipjoin.model.batch import PackedBatch
from skipjoin.model.errors import ModelError
from skipjoin.model.layer_inputs import LayerInputs
from skipjoin.model.ops.recurrent import (
    Convolution,
    ConvolutionInputs,
    Recurrence,
    RecurrenceInputs,
    RecurrentOps,
    Scan,
    ScanInputs,
)
from skipjoin.model.state_cache import StateCache

# Names by which modules of such layers are given a cache.
_CACHES = ("cache_params", "past_key_values")
# Functions that activate the sums of a convolution.
_GATED = ("silu", "swish")
_here = threading.local()


class StateShape(NamedTuple):
    """State of a layer, as in `StateSettings`."""

    kernel: int = 1
    channels: int = 0
    heads: int = 0
    key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0


class Mixing(Protocol):
    """What functions of modeling code do in a layer, given rows of a packed batch and what makes its parameters."""

    def begin(self) -> None: ...

    def convolve(self, inputs: ConvolutionInputs, make: Callable[[], Convolution]) -> torch.Tensor: ...

    def recur(self, inputs: RecurrenceInputs, make: Callable[[], Recurrence]) -> torch.Tensor: ...

    def scan(self, inputs: ScanInputs, make: Callable[[], Scan]) -> torch.Tensor: ...


def mixers(model: Any) -> dict[str, Any]:
    """Return the modules with a state that take a cache, by name."""
    found = {}
    for name, module in model.named_modules():
        has_state = has_convolution(module) or type(module).__name__ in _FORWARDS
        if has_state and not signature(type(module).forward).parameters.keys().isdisjoint(_CACHES):
            found[name] = module
    return found


def has_convolution(module: torch.nn.Module) -> bool:
    return any(isinstance(child, torch.nn.Conv1d) for child in module.children())


def mix(module: Any, by: Mixing) -> None:
    """Let the functions that a module calls run `by`."""
    code = sys.modules[type(module).__module__]
    for name, ours in _FUNCTIONS.items():
        original = getattr(code, name, None)
        if original is not None and not hasattr(original, "skipjoin"):
            setattr(code, name, _either(original, ours))
    # That of the class, since a module may be given to a recorder first, and to a decoder then.
    forward = _FORWARDS.get(type(module).__name__, type(module).forward)
    module.forward = partial(_without_cache, partial(forward, module), by)


def _either(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        by = getattr(_here, "by", None)
        return original(*args, **options) if by is None else ours(by, *args, **options)

    call.skipjoin = True  # type: ignore[attr-defined]
    return call


def _without_cache(forward: Callable[..., Any], by: Mixing, *args: Any, **options: Any) -> Any:
    by.begin()
    _here.by = by
    try:
        return forward(*args, **{name: value for name, value in options.items() if name not in _CACHES})
    finally:
        _here.by = None


def _convolve(
    by: Mixing,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **ignored: Any,
) -> torch.Tensor:
    """Replace causal_conv1d_fn: [1, channels, T] and [channels, kernel]."""
    if activation is not None and activation not in _GATED:
        raise ModelError(f"its convolutions have the activation {activation!r}, and ours have silu or none")

    def make() -> Convolution:
        return Convolution(weight.detach().float().t().contiguous(), _float(bias), activation is not None)

    return by.convolve(ConvolutionInputs(_rows(x[0].t())), make).t()[None]


def _recur(by: Mixing, x: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
    """Replace mamba_chunk_scan_combined: [1, T, heads, dim], [1, T, heads], [heads], and [1, T, groups, keys] twice."""
    step, a, key, query = others[:4]
    _check(options, dt_softplus=True, z=None, return_final_states=False)
    least, most = options.get("dt_limit", (0.0, math.inf))

    def make() -> Recurrence:
        bias = _float(options.get("dt_bias"))
        bias = a.new_zeros(len(a)) if bias is None else bias
        return Recurrence(key.shape[2], (-a).log(), bias, _float(options.get("D")), float(least), float(most))

    inputs = RecurrenceInputs(_heads(query), _heads(key), _heads(x), _rows(step[0]))
    return by.recur(inputs, make).view(x.shape)


def _learn(by: Mixing, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> tuple[Any, None]:
    """Replace chunk_gated_delta_rule and chunk_kda: [1, T, heads, dim] thrice, and [1, T, heads] of shares.

    Decays have the shape of shares, or that of keys.
    """
    _check(options, use_qk_l2norm_in_kernel=True, initial_state=None, output_final_state=False)
    decay, share = (options[name][0].float().flatten(1).contiguous() for name in ("g", "beta"))
    inputs = RecurrenceInputs(_heads(query), _heads(key), _heads(value), decay, share)
    return by.recur(inputs, lambda: Recurrence(key.shape[2], None, None)).view(value.shape), None


def _scan(by: Mixing, x: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
    """Replace selective_scan_fn: [1, channels, T] twice, [channels, keys], and [1, keys, T] twice."""
    step, a, key, query = others[:4]
    _check(options, delta_softplus=True, return_last_state=False)

    def make() -> Scan:
        bias = _float(options.get("delta_bias"))
        return Scan(a.t().contiguous(), a.new_zeros(len(a)) if bias is None else bias, _float(options.get("D")))

    inputs = ScanInputs(*(_rows(rows[0].t().to(x.dtype)) for rows in (query, key, x, step)))
    out, gate = by.scan(inputs, make).t()[None], options.get("z")
    return out if gate is None else out * F.silu(gate)


def _lightning(module: Any, hidden_states: torch.Tensor, *ignored: Any, **also: Any) -> tuple[torch.Tensor, None]:
    """Replace the linear attention of MiniMax: the recurrence of Mamba-2 with steps of 1, and no convolution."""
    heads, dim = module.num_attention_heads, module.head_dim
    joined = module.act_fn(module.qkv_proj(hidden_states))[0].view(-1, heads, 3 * dim)
    query, key, value = (part.flatten(1) for part in joined.split(dim, dim=-1))

    def make() -> Recurrence:
        slopes = module.slope_rate.detach().float().flatten()
        return Recurrence(heads, slopes.log(), torch.zeros_like(slopes), least=1.0, most=1.0)

    decay = value.new_zeros((len(value), heads))
    out = _here.by.recur(RecurrenceInputs(query, key, value, decay), make)[None]
    return module.out_proj(module.output_gate(hidden_states).sigmoid() * module.norm(out)), None


def _check(options: Mapping[str, Any], **known: Any) -> None:
    for name, value in known.items():
        if options.get(name, value) != value:
            raise ModelError(f"its layers with a state have {name} {options[name]!r:.80}, and ours {value!r}")


def _heads(x: torch.Tensor) -> torch.Tensor:
    return _rows(x[0].flatten(1))


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 or x.is_meta else x.contiguous()


def _float(weights: torch.Tensor | None) -> torch.Tensor | None:
    return None if weights is None else weights.detach().float()


# By their names in modeling code.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "mamba2_chunk_scan": _recur,
    "torch_chunk_gated_delta_rule": _learn,
    "chunk_kimi_delta_attention": _learn,
    "mamba_selective_scan": _scan,
}
# Of modules that call no such function, by the names of their classes.
_FORWARDS: dict[str, Callable[..., Any]] = {"MiniMaxLightningAttention": _lightning}


class MixingRecorder:
    """`Mixing` that records the shape of the state."""

    def __init__(self) -> None:
        self.shape = StateShape()

    def begin(self) -> None:
        if self.shape != StateShape():
            raise ModelError("a module with a state is used more than once in a step")

    def convolve(self, inputs: ConvolutionInputs, make: Callable[[], Convolution]) -> torch.Tensor:
        kernel, channels = make().weights.shape
        self._record(self.shape.channels, kernel=kernel, channels=channels)
        return torch.empty_like(inputs.x)

    def recur(self, inputs: RecurrenceInputs, make: Callable[[], Recurrence]) -> torch.Tensor:
        key_heads = make().key_heads
        heads = (inputs.decay if inputs.rate is None else inputs.rate).shape[1]
        keys, values = inputs.key.shape[1] // key_heads, inputs.value.shape[1] // heads
        self._record(self.shape.heads, heads=heads, key_heads=key_heads, key_dim=keys, value_dim=values)
        return torch.empty_like(inputs.value)

    def scan(self, inputs: ScanInputs, make: Callable[[], Scan]) -> torch.Tensor:
        keys, channels = make().a.shape
        heads = self.shape.heads + 1  # each scan is one
        if heads > 1 and self.shape[-2:] != (keys, channels):
            raise ModelError("scans of a layer differ")
        self.shape = self.shape._replace(heads=heads, key_heads=1, key_dim=keys, value_dim=channels)
        return torch.empty_like(inputs.value)

    def _record(self, known: int, **sizes: int) -> None:
        if known:
            raise ModelError("a layer has several states of a kind")
        self.shape = self.shape._replace(**sizes)


class SlotMixing:
    """`Mixing` of a layer in the states of a step."""

    def __init__(self, ops: RecurrentOps, layer: int, step: Callable[[], LayerInputs]) -> None:
        self._ops, self._layer, self._step = ops, layer, step
        self._convolution: Convolution | None = None
        self._recurrence: Recurrence | None = None
        self._scans: list[Scan] = []
        self._done = 0

    def begin(self) -> None:
        self._done = 0

    def convolve(self, inputs: ConvolutionInputs, make: Callable[[], Convolution]) -> torch.Tensor:
        if self._convolution is None:
            self._convolution = make()
        states, batch = self._of_step()
        return self._ops.convolve(inputs, self._convolution, states.inputs(self._layer), batch)

    def recur(self, inputs: RecurrenceInputs, make: Callable[[], Recurrence]) -> torch.Tensor:
        if self._recurrence is None:
            self._recurrence = make()
        states, batch = self._of_step()
        return self._ops.recur(inputs, self._recurrence, states.matrices(self._layer), batch)

    def scan(self, inputs: ScanInputs, make: Callable[[], Scan]) -> torch.Tensor:
        head = self._done
        self._done += 1
        if head == len(self._scans):
            self._scans.append(make())
        states, batch = self._of_step()
        return self._ops.scan(inputs, self._scans[head], states.matrices(self._layer)[:, head], batch)

    def _of_step(self) -> tuple[StateCache, PackedBatch]:
        step = self._step()
        assert step.kv.states is not None
        return step.kv.states, step.batch
