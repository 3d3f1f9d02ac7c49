from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skipjoin.config import unknown
from skipjoin.kv_format import CACHE_FORMATS, SWAP_FORMATS


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Gated MLPs of `width` columns, of which a token uses `per_token` in each of `layers` layers."""

    count: int
    per_token: int
    width: int
    layers: int
    parameter_bytes: float = 2


@dataclass(frozen=True, slots=True)
class StateShape:
    """Layers with a state of constant size instead of KV, and bytes and parameters of each."""

    layers: int
    layer_bytes: int
    layer_parameters: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Shape of a decoder-only transformer, for its size and work.

    Norms, biases and learned positions are ignored: together less than 0.5 % of any model here.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # columns of the MLP, of layers without experts
    gated: bool  # the MLP has three matrices (SwiGLU) instead of two
    vocab: int
    tied: bool  # the output head is the embedding table
    max_positions: int
    parameter_bytes: int = 2  # of a weight, an activation and a KV element
    kv_cache_dtype: str = "auto"
    experts: ExpertShape | None = None
    states: StateShape | None = None
    # Number and width of the KV heads of each layer that has KV, where these differ.
    layer_heads: tuple[tuple[int, int], ...] = ()
    kv_rows: int = 2  # rows of a token in each head of KV
    # Parameters of attention in a layer, on average, where they do not follow from its heads.
    attention_parameters: int | None = None
    looked_up: int = 0  # numbers of tables beside the embedding, of which a token reads a row

    @property
    def kv_layers(self) -> int:
        return self.layers if self.states is None else self.layers - self.states.layers

    @property
    def state_bytes(self) -> int:
        return 0 if self.states is None else self.states.layers * self.states.layer_bytes

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer, on average over the layers."""
        return self._layer_parameters(0 if self.experts is None else self.experts.count)

    @property
    def active_layer_parameters(self) -> int:
        """Those of them that a token uses."""
        return self._layer_parameters(0 if self.experts is None else self.experts.per_token)

    def _layer_parameters(self, experts: int) -> int:
        attention = self.attention_parameters
        if attention is None:
            attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        if self.states is not None:
            mixers = self.kv_layers * attention + self.states.layers * self.states.layer_parameters
            attention = mixers // self.layers
        column = (3 if self.gated else 2) * self.hidden
        if self.experts is None:
            return attention + column * self.intermediate
        of = self.experts
        dense = (self.layers - of.layers) * column * self.intermediate
        sparse = of.layers * (of.count * self.hidden + experts * column * of.width)
        return attention + (dense + sparse) // self.layers

    @property
    def expert_parameters(self) -> int:
        of = self.experts
        return 0 if of is None else of.layers * of.count * 3 * self.hidden * of.width

    def bytes_of(self, parameters: int, share: float = 1.0) -> int:
        """Return the bytes of that many parameters, which include this share of the experts'."""
        narrower = 0.0 if self.experts is None else self.parameter_bytes - self.experts.parameter_bytes
        return parameters * self.parameter_bytes - round(self.expert_parameters * share * narrower)

    @property
    def head_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + (1 if self.tied else 2) * self.head_parameters + self.looked_up

    @property
    def weight_bytes(self) -> int:
        return self.bytes_of(self.parameters)

    def read_bytes(self, tokens: float) -> float:
        """Return the expected bytes of matrices that a step of `tokens` reads, without the embedding table.

        n tokens that choose independently use count * (1 - (1 - per_token / count) ** n) experts.
        """
        matrices = self.bytes_of(self.layers * self.layer_parameters + self.head_parameters)
        of = self.experts
        if of is None:
            return matrices
        unused: float = (1 - of.per_token / of.count) ** tokens
        return matrices - self.expert_parameters * of.parameter_bytes * unused

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's KV in all layers (FastServe section 4.2)."""
        return self.kv_rows * sum(count * self._row_bytes(width) for count, width in self._heads())

    def cpu_block_bytes(self, block_size: int, swap_dtype: str = "auto") -> int:
        if not self.has_plain_kv:
            return block_size * self.kv_bytes_per_token
        shape = 2 * self.kv_layers * self.kv_heads, block_size, self.head_dim
        return SWAP_FORMATS[swap_dtype].block_bytes(shape, self._row_bytes(self.head_dim))

    @property
    def has_plain_kv(self) -> bool:
        return not self.layer_heads and self.kv_rows == 2

    def _heads(self) -> Sequence[tuple[int, int]]:
        return self.layer_heads or [(self.kv_heads, self.head_dim)] * self.kv_layers

    def _row_bytes(self, width: int) -> int:
        return CACHE_FORMATS[self.kv_cache_dtype].row_bytes(width, self.parameter_bytes)

    @property
    def flops_per_token(self) -> int:
        """Operations of the layers' matrices for one token, without attention and output head."""
        return 2 * self.layers * self.active_layer_parameters


def _opt(size: str, layers: int, hidden: int, heads: int) -> ModelShape:
    """OPT (Zhang et al. 2022, table 1)."""
    return ModelShape(
        f"opt-{size}", layers, hidden, heads, heads, hidden // heads, 4 * hidden, False, 50272, True, 2048
    )


def _llama(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    intermediate: int,
    *,
    kv_heads: int | None = None,
    vocab: int = 32000,
    max_positions: int = 2048,
) -> ModelShape:
    """Llama 1, 2 and 3 (Touvron et al. 2023; the Llama 3 herd of models, table 3)."""
    return ModelShape(
        f"llama-{name}",
        layers,
        hidden,
        heads,
        kv_heads or heads,
        hidden // heads,
        intermediate,
        True,
        vocab,
        False,
        max_positions,
    )


def _qwen3(size: str, layers: int, hidden: int, heads: int, intermediate: int, *, tied: bool) -> ModelShape:
    """Qwen3 (technical report, table 1; widths from the published configurations)."""
    return ModelShape(f"qwen3-{size}", layers, hidden, heads, 8, 128, intermediate, True, 151936, tied, 40960)


_SHAPES = (
    _opt("1.3b", 24, 2048, 32),
    _opt("2.7b", 32, 2560, 32),
    _opt("6.7b", 32, 4096, 32),
    _opt("13b", 40, 5120, 40),
    _opt("30b", 48, 7168, 56),
    _opt("66b", 64, 9216, 72),
    _opt("175b", 96, 12288, 96),
    _llama("7b", 32, 4096, 32, 11008),
    _llama("13b", 40, 5120, 40, 13824),
    _llama("33b", 60, 6656, 52, 17920),
    _llama("65b", 80, 8192, 64, 22016),
    _llama("2-7b", 32, 4096, 32, 11008, max_positions=4096),
    _llama("2-13b", 40, 5120, 40, 13824, max_positions=4096),
    _llama("2-70b", 80, 8192, 64, 28672, kv_heads=8, max_positions=4096),
    _llama("3-8b", 32, 4096, 32, 14336, kv_heads=8, vocab=128256, max_positions=8192),
    _llama("3-70b", 80, 8192, 64, 28672, kv_heads=8, vocab=128256, max_positions=8192),
    ModelShape("pythia-12b", 36, 5120, 40, 40, 128, 20480, False, 50688, False, 2048),
    _qwen3("0.6b", 28, 1024, 16, 3072, tied=True),
    _qwen3("1.7b", 28, 2048, 16, 6144, tied=True),
    _qwen3("4b", 36, 2560, 32, 9728, tied=True),
    _qwen3("8b", 36, 4096, 32, 12288, tied=False),
    _qwen3("14b", 40, 5120, 40, 17408, tied=False),
    _qwen3("32b", 64, 5120, 64, 25600, tied=False),
    # The published configurations; gpt-oss has a byte of scale per 32 experts' parameters of 4 bits.
    ModelShape(
        "qwen3-30b-a3b", 48, 2048, 32, 4, 128, 6144, True, 151936, False, 40960, experts=ExpertShape(128, 8, 768, 48)
    ),
    ModelShape(
        "mixtral-8x7b", 32, 4096, 32, 8, 128, 14336, True, 32000, False, 32768, experts=ExpertShape(8, 2, 14336, 32)
    ),
    ModelShape(
        "gpt-oss-20b",
        24,
        2880,
        64,
        8,
        64,
        2880,
        True,
        201088,
        False,
        131072,
        experts=ExpertShape(32, 4, 2880, 24, 17 / 32),
    ),
    # Published configurations. A state has the last inputs of a convolution in 16 bits, and matrices in 32.
    ModelShape(
        "lfm2-1.2b",
        16,
        2048,
        32,
        8,
        64,
        8192,
        True,
        65536,
        True,
        128000,
        states=StateShape(10, 2 * 2048 * 2, 4 * 2048 * 2048),
    ),
    ModelShape(
        "qwen3-next-80b-a3b",
        48,
        2048,
        16,
        2,
        256,
        5632,
        True,
        151936,
        False,
        262144,
        experts=ExpertShape(512, 10, 512, 48),
        states=StateShape(36, 3 * 8192 * 2 + 32 * 128 * 128 * 4, 2048 * (12288 + 64 + 4096)),
    ),
    ModelShape(
        "granite-4.0-h-micro",
        40,
        2048,
        32,
        8,
        64,
        8192,
        True,
        100352,
        True,
        131072,
        states=StateShape(36, 3 * 4352 * 2 + 64 * 64 * 128 * 4, 2048 * (8576 + 4096)),
    ),
)
MODELS: dict[str, ModelShape] = {shape.name: shape for shape in _SHAPES}
# Published checkpoints use both names for the 33-billion model.
_OTHER_NAMES = {"llama-30b": "llama-33b"}


def model_shape(name: str) -> ModelShape:
    key = name.strip().lower()
    key = _OTHER_NAMES.get(key, key)
    if key not in MODELS:
        raise unknown("model", name, MODELS)
    return MODELS[key]
