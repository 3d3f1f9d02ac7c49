from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from skipjoin.model.errors import ModelError
from skipjoin.model.fallback import older
from skipjoin.model.fallback.even import is_uneven
from skipjoin.model.fallback.interfaces import OTHER_MASK, PAGED, SAMPLED, QueryKeyValue, hook, register
from skipjoin.model.fallback.mixers import MixingRecorder, StateShape, has_convolution, is_replaced, mix, mixers
from skipjoin.model.fallback.products import CASTS

# Options of attention that change nothing here, or that `_Recorder` reads.
_IGNORED = frozenset({"dropout", "position_ids", "use_cache", "output_attentions", "deterministic", "logits_to_keep"})
_READ = frozenset({"scaling", "sliding_window", "softcap", "s_aux", "is_causal", "growth"})
# Those of biases of keys.
_BIASES = frozenset({"slopes", "biases", "is_rounded"})


_TOKENS = 8
_FIXED = "its attention cannot be replaced"
# Layers of transformers' cache that hold keys and values, or nothing: they attend to KV of others, which ours copies.
_KV_LAYERS = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"})
# Those that may also hold a state, of which nothing is used if all functions that read it are ours.
_STATE_LAYERS = frozenset(
    {"LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"}
)
# Caches of a class of their own, by the type of the model.
_OWN_CACHE: dict[str, type[Any]] = {"minimax": MiniMaxCache}
_STATE = "its layers keep a state that is no KV"


class Attention(NamedTuple):
    """One call of attention; `dim` has that of linear biases, and tokens see their `chunk` only, or all with 0."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    window: int
    has_slopes: bool = False
    chunk: int = 0


class Traced(NamedTuple):
    """Operations of a model of transformers, recorded while it ran without data.

    Attributes:
        products: Names of matrices that are used in matrix products only, except those of embeddings.
        transposed: Products whose matrix has the shape [in, out].
        widened: Products that the model computes in float32.
        left: Products whose matrix is the left operand, and which do not add the bias of their module.
        is_uneven: Whether torch's bits of a row would depend on the others; see `EvenRows`.
        unused: Names of the modules that texts do not use, such as those that see or hear.
    """

    attentions: list[tuple[str, Attention]]
    mixers: list[str]
    state: StateShape
    products: frozenset[str]
    transposed: frozenset[str]
    widened: frozenset[str]
    left: frozenset[str]
    is_uneven: bool
    unused: tuple[str, ...]


def prepare(kind: type[Any], config: Any) -> None:
    register()
    older.register(config)
    config._experts_implementation = PAGED if kind._can_set_experts_implementation() else None


def build(kind: type[Any], config: Any, device: str, *, masks: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    prepare(kind, config)
    with torch.device(device):
        model = kind._from_config(config, attn_implementation=SAMPLED if masks else PAGED, dtype=dtype).eval()
    model.to(device)  # parameters that code draws with torch.normal, which has its own default device
    adapt(model)
    return model


def adapt(model: Any) -> None:
    older.adapt(model)
    model.set_experts_implementation(PAGED)


def base_name(model: Any) -> str:
    prefix: str = model.base_model_prefix
    return prefix if hasattr(model, prefix) else "model"  # Llama 4 has its place in a model that also sees


def without(kind: type[Any], parts: tuple[str, ...]) -> type[Any]:
    if not parts:
        return kind

    def init(self: Any, config: Any, *args: Any, **options: Any) -> None:
        kind.__init__(self, config, *args, **options)
        for part in parts:
            parent, _, name = part.rpartition(".")
            setattr(self.get_submodule(parent), name, None)

    # Of the same name, by which transformers finds how weights are converted.
    return type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})


def settle(model: Any) -> None:
    """Keep the rotary frequencies of short contexts, which would otherwise depend on the longest one of a batch.

    Also remove the padding token, for which models would look, with a warning.
    """
    with suppress(Exception):  # types of some configurations require one, of models that do not look
        model.config.pad_token_id = None
    for module in model.modules():
        if isinstance(kind := getattr(module, "rope_type", None), str):
            module.rope_type = "default"
        elif isinstance(kind, dict):
            module.rope_type = dict.fromkeys(kind, "default")


def trace(kind: type[Any], config: Any) -> Traced:
    cache = DynamicCache(config=config)
    _check_state(cache)
    try:
        model = build(kind, config, "meta", masks=True)
    except KeyError as error:
        if error.args != (SAMPLED,):
            raise
        raise ModelError(_FIXED) from error
    if not hasattr(model, base_name(model)):
        raise ModelError("its layers are no part of it that can run alone")
    settle(model)
    recorder, uses = _Recorder(), _Uses()
    for module in model.modules():
        hook(module, attend=recorder, experts=_no_experts)
    states, with_state = {}, mixers(model)
    for name, module in with_state.items():
        states[name] = MixingRecorder()
        mix(module, states[name])
    kept = sum(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
    if kept > len(states):
        raise ModelError(f"{_STATE}, by functions of its own")
    try:
        with torch.inference_mode(), torch.device("meta"), uses:
            ids, positions = torch.zeros((1, _TOKENS), dtype=torch.int64), torch.arange(_TOKENS)[None]
            # A cache of states only has no length, for which some ask.
            has_kv = any(isinstance(layer, CacheLayerMixin) for layer in cache.layers) or not cache.layers
            taken = _OWN_CACHE[config.model_type]() if config.model_type in _OWN_CACHE else cache
            given = {"past_key_values": taken, "use_cache": True} if has_kv else {"use_cache": False}
            model(input_ids=ids, position_ids=positions, **given)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{_FIXED}, or it cannot run without data: {type(error).__name__}: {error}") from error
    _check_state(cache)
    used = {name: state.shape for name, state in states.items() if state.shape != StateShape()}
    is_partial = any(has_convolution(with_state[name]) and not shape.channels for name, shape in used.items())
    if len(set(used.values())) > 1 or is_partial:
        raise ModelError(f"{_STATE}, and differs between them")
    has_all = kept == len(used) or all(is_replaced(with_state[name]) for name in used)
    if not has_all or (kind._is_stateful and not used):
        raise ModelError(f"{_STATE}, by functions of its own")
    if not recorder.calls and not used:
        raise ModelError(_FIXED)
    names = {id(module): name for name, module in model.named_modules()}
    attentions = [(names[id(module)], attention) for module, attention in recorder.calls]
    slots = list(_slots(model))
    products = {name for name, parameter, is_table in slots if not is_table and uses.are_only(parameter, _PRODUCTS)}
    left = {name for name, parameter, _ in slots if uses.are_only(parameter, _LEFT)}
    widened = {name for name, parameter, _ in slots if uses.of(parameter) & _CASTS}
    transposed = {name for name, parameter, _ in slots if uses.are_only(parameter, _ADDMM)}
    state = next(iter(used.values()), StateShape())
    return Traced(
        attentions,
        [*used],
        state,
        frozenset(products | transposed | left),
        frozenset(transposed),
        frozenset(widened & products),
        frozenset(left),
        uses.is_uneven,
        tuple(_unused(model, {*used, *(name for name, _ in attentions)}, uses)),
    )


def _unused(model: Any, inner: set[str], uses: _Uses) -> Iterator[str]:
    prefix, module = "", model
    while module is not None:
        within = None
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if all(layer.startswith(f"{path}.") for layer in inner):
                within = f"{path}.", child
            elif any(True for _ in child.parameters()) and not any(
                part in uses.called or any(map(uses.of, part.parameters(recurse=False))) for part in child.modules()
            ):
                yield path
        prefix, module = within or ("", None)


def _check_state(cache: DynamicCache) -> None:
    for layer in cache.layers:
        name = type(layer).__name__
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            used = (*layer.is_conv_states_initialized.values(), *layer.is_recurrent_states_initialized.values())
            is_known = name in _STATE_LAYERS and not any(used)
        else:
            is_known = name in _KV_LAYERS
        if not is_known:
            raise ModelError(f"{_STATE} ({name})")


def _slots(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter, bool]]:
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 2:
                yield f"{prefix}.{name}", parameter, isinstance(module, torch.nn.Embedding)


def _no_experts(
    module: torch.nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    return torch.empty_like(hidden)


class _Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[torch.nn.Module, Attention]] = []

    def __call__(
        self,
        module: torch.nn.Module,
        query_key_value: QueryKeyValue,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        query, key, value = query_key_value
        given = {name for name, value in options.items() if value is not None and value is not False} - _IGNORED
        if other := sorted(given - _READ - _BIASES):
            raise ModelError(f"its attention has {', '.join(other)}")
        if key.shape[2] != query.shape[2]:
            raise ModelError(f"{query.shape[2]} tokens attend to {key.shape[2]} keys")
        has_slopes = not given.isdisjoint(_BIASES)
        dim = query.shape[3] + (older.BIAS_DIMS if has_slopes else 0)
        window = _window(mask)
        chunk = max(0, OTHER_MASK - window)
        shape = query.shape[1], key.shape[1], dim, value.shape[3]
        self.calls.append((module, Attention(*shape, max(0, window), has_slopes, chunk)))
        return query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))


def _window(mask: torch.Tensor | None) -> int:
    window = OTHER_MASK if mask is None or mask.dtype != torch.int64 else int(mask[0, 0, 0, 0])
    if window == OTHER_MASK:
        raise ModelError("its tokens attend to others than all earlier ones, or a window of them")
    return window


# Functions of torch that read a parameter, and the position at which it is given.
_CASTS = frozenset((name, 0) for name in CASTS)
_PRODUCTS = frozenset({("linear", 1), ("embedding", 1)}) | _CASTS
_ADDMM = frozenset({("addmm", 2)})
_LEFT = frozenset({("matmul", 0), ("__matmul__", 0)})


class _Uses(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.called: set[torch.nn.Module] = set()
        self._of: dict[int, set[tuple[str, int | str]]] = defaultdict(set)
        self.is_uneven = False

    def __enter__(self) -> Any:
        self._watch = register_module_forward_pre_hook(lambda module, _: self.called.add(module))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._watch.remove()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.is_uneven |= is_uneven(function, args)
        for at, value in (*enumerate(args), *(kwargs or {}).items()):
            for argument in value if isinstance(value, list | tuple) else (value,):
                if isinstance(argument, torch.nn.Parameter) and function.__name__ != "__get__":
                    self._of[id(argument)].add((function.__name__, at))
        return function(*args, **(kwargs or {}))

    def of(self, parameter: torch.nn.Parameter) -> set[tuple[str, int | str]]:
        return self._of[id(parameter)]

    def are_only(self, parameter: torch.nn.Parameter, allowed: frozenset[tuple[str, int]]) -> bool:
        return bool(found := self.of(parameter)) and found <= allowed
