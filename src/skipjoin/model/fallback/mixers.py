"""Layers of transformers with a state instead of KV.

Modeling code projects, gates and normalizes rows. The functions by which it reads other tokens are replaced by
`RecurrentOps` while a model of ours runs, so that the state is in the slots of the requests.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import partial, wraps
from inspect import signature
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F

from skipjoin.model.attention.base import LayerInputs
from skipjoin.model.batch import PackedBatch
from skipjoin.model.errors import ModelError
from skipjoin.model.ops.recurrent import (
    Average,
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
T = TypeVar("T")


class StateShape(NamedTuple):
    kernel: int = 1
    channels: int = 0
    heads: int = 0
    key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0


def mixers(model: Any) -> dict[str, Any]:
    found = {}
    for name, module in model.named_modules():
        takes_cache = not signature(type(module).forward).parameters.keys().isdisjoint(_CACHES)
        if is_replaced(module) or (has_convolution(module) and takes_cache):
            found[name] = module
    return found


def is_replaced(module: torch.nn.Module) -> bool:
    return type(module).__name__ in _FORWARDS


def has_convolution(module: torch.nn.Module) -> bool:
    return any(isinstance(child, torch.nn.Conv1d) for child in module.children())


def mix(module: Any, by: Mixing) -> None:
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
    """Replace chunk_gated_delta_rule and chunk_kda: [1, T, heads, dim] thrice, and [1, T, heads] of shares."""
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
    """Replace MiniMax's linear attention: the recurrence of Mamba-2 with steps of 1, and no convolution."""
    heads, dim = module.num_attention_heads, module.head_dim
    joined = module.act_fn(module.qkv_proj(hidden_states))[0].view(-1, heads, 3 * dim)
    query, key, value = (part.flatten(1) for part in joined.split(dim, dim=-1))

    def make() -> Recurrence:
        slopes = module.slope_rate.detach().float().flatten()
        return Recurrence(heads, slopes.log(), torch.zeros_like(slopes), least=1.0, most=1.0)

    decay = value.new_zeros((len(value), heads))
    out = _here.by.recur(RecurrenceInputs(query, key, value, decay), make)[None]
    return module.out_proj(module.output_gate(hidden_states).sigmoid() * module.norm(out)), None


def _griffin(
    module: Any, input_states: torch.Tensor, position_ids: torch.Tensor, *ignored: Any, **also: Any
) -> tuple[torch.Tensor, None]:
    """Replace the recurrent block of RecurrentGemma, whose state has a decay of each channel and token."""
    conv, unit = module.conv_1d, module.rg_lru

    def make() -> Convolution:
        return Convolution(conv.weight.detach().float().squeeze(1).t().contiguous(), _float(conv.bias))

    gate = module.act_fn(module.linear_y(input_states))
    x = _here.by.convolve(ConvolutionInputs(_rows(module.linear_x(input_states)[0])), make)
    entering, leaving = (_block_gate(unit, name, x) for name in BLOCKS[type(unit).__name__])
    # Rounded as transformers rounds them.
    log = -8.0 * leaving * F.softplus(unit.recurrent_param)
    decay, share = torch.exp(log), torch.sqrt(1 - torch.exp(2 * log))
    share = torch.where(position_ids[0, :, None] == 0, 1, share).to(x.dtype)
    one = x.new_ones((len(x), 1))
    inputs = ScanInputs(one, one, x * entering * share, decay.float().log())
    out = _here.by.scan(inputs, lambda: Scan(None, None))
    return module.linear_out(out[None] * gate), None


def _block_gate(unit: Any, name: str, x: torch.Tensor) -> torch.Tensor:
    if (products := getattr(unit, BLOCK_PRODUCTS, None)) is None:
        return torch.empty_like(x)
    heads = x.view(len(x), len(products[name]), -1).unbind(1)
    rows = [product(head.contiguous()) for product, head in zip(products[name], heads, strict=True)]
    return torch.cat(rows, dim=1).sigmoid()


def _rwkv(module: Any, hidden: torch.Tensor, state: Any = None, *ignored: Any, **also: Any) -> tuple[Any, Any, None]:
    """Replace a block of RWKV, whose two parts mix each token with the one before."""
    by, mixing, inner = _here.by, module.attention, module.feed_forward
    if module.layer_id == 0:
        hidden = module.pre_ln(hidden)
    rows = module.ln1(hidden)
    key, value, gate = _mixed(by, mixing, rows, ("key", "value", "receptance"))

    def make() -> Average:
        return Average(-mixing.time_decay.detach().float().exp(), mixing.time_first.detach().float())

    averaged = by.average(_rows(key[0]), _rows(value[0]), make)[None]
    hidden = hidden + mixing.output(gate.sigmoid() * averaged)
    rows = module.ln2(hidden)
    key, gate = _mixed(by, inner, rows, ("key", "receptance"))
    return hidden + gate.sigmoid() * inner.value(F.relu(key).square()), state, None


def _mixed(by: Mixing, module: Any, rows: torch.Tensor, names: tuple[str, ...]) -> list[torch.Tensor]:
    def make() -> Convolution:
        return Convolution(torch.tensor([[1.0], [0.0]], device=rows.device).repeat(1, rows.shape[-1]))

    shifted = by.convolve(ConvolutionInputs(rows[0].contiguous()), make)[None]
    found = []
    for name in names:
        share = getattr(module, f"time_mix_{name}")
        found.append(getattr(module, name)(rows * share + shifted * (1 - share)))
    return found


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
_FORWARDS: dict[str, Callable[..., Any]] = {
    "MiniMaxLightningAttention": _lightning,
    "RecurrentGemmaRecurrentBlock": _griffin,
    "RwkvBlock": _rwkv,
}
# Gates of modules that are products with a matrix for each head, [heads, in, out], and the attribute that has them.
BLOCKS = {"RecurrentGemmaRglru": ("input_gate", "recurrent_gate")}
BLOCK_PRODUCTS = "skipjoin_products"


class MixingRecorder:
    def __init__(self) -> None:
        self.shape = StateShape()

    def begin(self) -> None:
        if self.shape != StateShape():
            raise ModelError("a module with a state is used more than once in a step")

    def convolve(self, inputs: ConvolutionInputs, make: Callable[[], Convolution]) -> torch.Tensor:
        kernel, channels = make().weights.shape
        # With a kernel of 2, each convolution keeps one input, so that several states can be concatenated.
        if self.shape.channels and (kernel, self.shape.kernel) != (2, 2):
            raise ModelError("a layer has several states of a kind")
        self.shape = self.shape._replace(kernel=kernel, channels=self.shape.channels + channels)
        return torch.empty_like(inputs.x)

    def recur(self, inputs: RecurrenceInputs, make: Callable[[], Recurrence]) -> torch.Tensor:
        key_heads = make().key_heads
        heads = (inputs.decay if inputs.rate is None else inputs.rate).shape[1]
        keys, values = inputs.key.shape[1] // key_heads, inputs.value.shape[1] // heads
        self._record(self.shape.heads, heads=heads, key_heads=key_heads, key_dim=keys, value_dim=values)
        return torch.empty_like(inputs.value)

    def scan(self, inputs: ScanInputs, make: Callable[[], Scan]) -> torch.Tensor:
        keys, channels = inputs.key.shape[1], inputs.value.shape[1]
        heads = self.shape.heads + 1  # each scan is one
        if heads > 1 and self.shape[-2:] != (keys, channels):
            raise ModelError("scans of a layer differ")
        self.shape = self.shape._replace(heads=heads, key_heads=1, key_dim=keys, value_dim=channels)
        return torch.empty_like(inputs.value)

    def average(self, key: torch.Tensor, value: torch.Tensor, make: Callable[[], Average]) -> torch.Tensor:
        self._record(self.shape.heads, heads=1, key_heads=1, key_dim=3, value_dim=value.shape[1])
        return torch.empty_like(value)

    def _record(self, known: int, **sizes: int) -> None:
        if known:
            raise ModelError("a layer has several states of a kind")
        self.shape = self.shape._replace(**sizes)


class SlotMixing:
    """What functions of modeling code do in a layer, given rows of a packed batch and what makes their parameters."""

    def __init__(self, ops: RecurrentOps, layer: int, step: Callable[[], LayerInputs]) -> None:
        self._ops, self._layer, self._step = ops, layer, step
        # Parameters of each function, in the order of its calls in a step.
        self._made: dict[str, list[Any]] = defaultdict(list)
        self.begin()

    def begin(self) -> None:
        self._calls: Counter[str] = Counter()
        self._channels = 0

    def convolve(self, inputs: ConvolutionInputs, make: Callable[[], Convolution]) -> torch.Tensor:
        _, of = self._parameters("convolve", make)
        first, self._channels = self._channels, self._channels + inputs.x.shape[1]
        states, batch = self._of_step()
        return self._ops.convolve(inputs, of, states.inputs(self._layer)[..., first : self._channels], batch)

    def recur(self, inputs: RecurrenceInputs, make: Callable[[], Recurrence]) -> torch.Tensor:
        _, of = self._parameters("recur", make)
        states, batch = self._of_step()
        return self._ops.recur(inputs, of, states.matrices(self._layer), batch)

    def scan(self, inputs: ScanInputs, make: Callable[[], Scan]) -> torch.Tensor:
        head, of = self._parameters("scan", make)
        states, batch = self._of_step()
        return self._ops.scan(inputs, of, states.matrices(self._layer)[:, head], batch)

    def average(self, key: torch.Tensor, value: torch.Tensor, make: Callable[[], Average]) -> torch.Tensor:
        _, of = self._parameters("average", make)
        states, batch = self._of_step()
        return self._ops.average(key, value, of, states.matrices(self._layer)[:, 0], batch)

    def _parameters(self, function: str, make: Callable[[], T]) -> tuple[int, T]:
        number, made = self._calls[function], self._made[function]
        self._calls[function] += 1
        if number == len(made):
            made.append(make())
        return number, made[number]

    def _of_step(self) -> tuple[StateCache, PackedBatch]:
        step = self._step()
        assert step.kv.states is not None
        return step.kv.states, step.batch


Mixing = MixingRecorder | SlotMixing
