from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from skipjoin.builtin import MODEL_NAME, PACKAGED_NAME
from skipjoin.config.profile import Profile, read_profile
from skipjoin.config.shared import (
    MAX_NUM_SEQS,
    KVType,
    SwapBandwidth,
    SwapType,
    bytes_per_s,
    check_swap_bandwidth,
    check_swap_type,
)
from skipjoin.core.step import STATE_SHARE, StateSizes
from skipjoin.kv_format import SWAP_FORMATS
from skipjoin.model.config import ModelConfig
from skipjoin.model.errors import ModelError
from skipjoin.model.folder import check_model, model_id
from skipjoin.options import ConfigError, Option, check
from skipjoin.policies.cost import LinearCost, with_link_limit
from skipjoin.recipes import find, names_in
from skipjoin.recipes.registry import check_names
from skipjoin.sim.experiments.system import ProfileBasis, System
from skipjoin.sim.hardware import parse_hardware
from skipjoin.sim.models import ExpertShape, ModelShape, StateShape, model_shape
from skipjoin.sim.roofline import RooflineCost, kv_blocks

_GIB = 1 << 30
# Default share of a server's RAM for KV blocks.
_SWAP_SHARE = 0.5
# Snapshots of states, as many as a server keeps by default.
_SNAPSHOTS = 64
_machine = partial(Option, group="System")
# Families whose MLP has two matrices.
_UNGATED = ("opt", "gpt_neox", "starcoder2")
# Fields of a system that concern the cluster, not a replica.
_OF_THE_CLUSTER = ("replicas", "dispatch", "prefill_replicas", "network_gbps")


def shape_of(name: str) -> ModelShape:
    """Return the shape of a model of the catalog or of one that a server can run, with weights of 16 or 32 bits."""
    is_path = "/" in name or Path(name).exists()
    if name not in (MODEL_NAME, PACKAGED_NAME) and not is_path:
        return model_shape(name)
    try:
        folder = check_model(name, "dummy", has_tokenizer=False)
        config = ModelConfig.from_folder(folder)
    except ModelError as error:
        raise ConfigError(f"--model: {error}") from error
    of, bytes_each = config.experts, 4 if config.dtype_name == "float32" else 2
    inputs, layers = config.layer_inputs, range(config.num_layers)
    owners = [layer for layer in layers if config.kv_source(layer) == layer] if config.layer_heads else []
    return ModelShape(
        model_id(name, folder),
        config.num_layers,
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.intermediate_size,
        config.family not in _UNGATED,
        config.vocab_size,
        config.tie_embeddings,
        config.max_positions,
        bytes_each,
        experts=None if of is None else ExpertShape(of.count, of.per_token, of.width, len(of.layers), bytes_each),
        states=_states_of(config, bytes_each),
        layer_heads=tuple(map(config.heads_of, owners)),
        kv_rows=config.kv_rows,
        attention_parameters=_attention_of(config),
        looked_up=0 if inputs is None else inputs.vocab_size * inputs.width * config.num_layers,
    )


def _attention_of(config: ModelConfig) -> int | None:
    hidden, heads = config.hidden_size, config.num_heads
    if (of := config.latent) is not None:
        dim, rank = of.plain_dim + of.rotary_dim, of.query_rank
        query = rank * (hidden + heads * dim) if rank else hidden * heads * dim
        latent = hidden * (of.rank + of.rotary_dim) + of.rank * heads * (of.plain_dim + of.value_dim)
        return query + latent + heads * of.value_dim * hidden
    if not config.layer_heads:
        return None
    owns = [config.kv_source(layer) == layer for layer in range(config.num_layers)]
    counts = [
        2 * hidden * dim * (heads + kv_heads * has_kv)
        for (kv_heads, dim), has_kv in zip(config.layer_heads, owns, strict=True)
    ]
    return sum(counts) // config.num_layers


def _states_of(config: ModelConfig, bytes_each: int) -> StateShape | None:
    if (of := config.states) is None:
        return None
    # Projections to what is convolved, to a gate of each output and, of recurrences, to two numbers for each head.
    width = of.heads * of.value_dim or 2 * config.hidden_size
    leaving = of.heads * of.value_dim or config.hidden_size
    parameters = config.hidden_size * (of.channels + width + 2 * of.heads + leaving)
    return StateShape(len(of.layers), sum(of.layer_bytes(bytes_each)), parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    hardware: Annotated[
        str,
        _machine(
            "GPUs of the catalog, such as a100-40gb or a100-40gb:tp8pp2, or the JSON file of `skipjoin profile`.",
            metavar="NAME",
            is_common=True,
        ),
    ] = "a100-40gb"
    prefill_hardware: Annotated[
        str | None, _machine("Hardware of the replicas of --prefill-replicas (default: --hardware).", metavar="NAME")
    ] = None
    model: Annotated[
        str | None,
        _machine(
            "Model of the catalog, such as opt-13b, folder, GGUF file or hub id (default: the profile's).",
            metavar="NAME",
            is_common=True,
        ),
    ] = None
    kv_gib: Annotated[
        float | None,
        _machine(
            "Size of the KV cache over all GPUs (default: the memory that the weights leave; required for a profile).",
            above=0,
            high=1e6,
            flags=("--kv-gib", "--kv-cache-gib"),
            is_common=True,
        ),
    ] = None
    swap_gib: Annotated[
        float | None,
        _machine(
            "Size of the KV cache's CPU tier; 0 disables swapping (default: half of the GPUs' share of RAM, or for a "
            "profile as the KV cache).",
            low=0,
            high=1e6,
            flags=("--swap-space", "--kv-offloading-size"),
            is_common=True,
        ),
    ] = None
    kv_cache_dtype: KVType = "auto"
    swap_dtype: SwapType = "auto"
    swap_bandwidth_gbps: SwapBandwidth = None
    block_size: Annotated[int | None, _machine("Tokens per KV block (default: 16, or the profile's).", low=1)] = None
    max_model_len: Annotated[
        int | None, _machine("Maximum tokens of prompt and output together (default: the model's).")
    ] = None

    def __post_init__(self) -> None:
        check(self)
        check_swap_type(self.swap_dtype, self.kv_cache_dtype, "swap_gib", self.swap_gib)
        check_swap_bandwidth(self.swap_bandwidth_gbps, "swap_gib", self.swap_gib)

    def systems(self, recipes: str, **settings: Any) -> list[System]:
        """Return one system per recipe of a list such as "fcfs,fastserve[eviction=recompute],./mine.py:edf"."""
        names = names_in(recipes)
        found = [find(name) for name in names]
        shown = [recipe.name for recipe in found]
        if twice := next((name for name in shown if shown.count(name) > 1), None):
            raise ConfigError(f"recipes must differ in results, but two are called {twice}: drop or rename one of them")
        check_names(found, settings.get("recipe_params", {}))
        return [System(recipe=name, **self._values(name, settings)) for name in names]

    def _values(self, recipe: str, settings: dict[str, Any]) -> dict[str, Any]:
        values = self._parts() | settings
        if self.prefill_hardware is not None:
            prefill = replace(self, hardware=self.prefill_hardware, prefill_hardware=None)
            alone = {name: value for name, value in settings.items() if name not in _OF_THE_CLUSTER}
            values["prefill"] = System(recipe=recipe, **(prefill._parts() | alone))
        return values

    def _parts(self) -> dict[str, Any]:
        return self._from_profile() if self.hardware.endswith(".json") else self._from_catalog()

    def _from_catalog(self) -> dict[str, Any]:
        group = parse_hardware(self.hardware)
        if self.model is None:
            raise ConfigError(f"model must be given for hardware {group.name}, such as opt-13b")
        shape = replace(shape_of(self.model), kv_cache_dtype=self.kv_cache_dtype)
        if not shape.has_plain_kv and not SWAP_FORMATS[self.swap_dtype].is_exact:
            raise ConfigError(
                f"--swap-dtype {self.swap_dtype} needs keys and values of equal heads, unlike {shape.name}"
            )
        size = 16 if self.block_size is None else self.block_size
        blocks = kv_blocks(shape, group, size, self.kv_gib)
        cpu_block_bytes = shape.cpu_block_bytes(size, self.swap_dtype)
        swap_bytes = self._swap_bytes(group.device.host_memory_bytes * group.gpus * _SWAP_SHARE)
        states = self._states(shape.state_bytes, blocks * size * shape.kv_bytes_per_token, swap_bytes, cpu_block_bytes)
        if states is not None:
            taken = (states.device + states.snapshots) * shape.state_bytes
            blocks -= -(-taken // (size * shape.kv_bytes_per_token))
            swap_bytes -= states.cpu * shape.state_bytes
        return {
            "states": states,
            "model": shape.name,
            "hardware": group.name,
            "cost": RooflineCost(
                shape, group, block_size=size, swap_dtype=self.swap_dtype, link_bytes_per_s=self._link
            ),
            "kv_blocks": blocks,
            "cpu_blocks": int(swap_bytes) // cpu_block_bytes,
            "block_bytes": size * shape.kv_bytes_per_token,
            "cpu_block_bytes": cpu_block_bytes,
            "kv_cache_dtype": self.kv_cache_dtype,
            "swap_dtype": self.swap_dtype,
            "block_size": size,
            "max_model_len": self._context(shape.max_positions),
            "stages": group.pp,
        }

    def _from_profile(self) -> dict[str, Any]:
        profile = read_profile(Path(self.hardware))
        if self.model not in (None, profile.key.model):
            raise ConfigError(f"{self.hardware} is the profile of {profile.key.model}, not of model {self.model}")
        if self.block_size not in (None, profile.block_size):
            raise ConfigError(
                f"{self.hardware} was measured with block_size {profile.block_size}, not {self.block_size}"
            )
        for name in ("swap_dtype", "kv_cache_dtype"):
            if (asked := getattr(self, name)) != (measured := getattr(profile.key, name)):
                raise ConfigError(f"{self.hardware} was measured with {name} {measured}, not {asked}")
        if self.kv_gib is None:
            raise ConfigError("kv_gib must be given with a profile, which does not contain the size of the KV pool")
        pool = self.kv_gib * _GIB
        swap = self._swap_bytes(pool)
        states = self._states(profile.state_bytes, pool, swap, profile.cpu_bytes_per_block)
        if states is not None:
            pool -= (states.device + states.snapshots) * profile.state_bytes
            swap -= states.cpu * profile.state_bytes
        return {
            "states": states,
            "model": profile.key.model,
            "hardware": profile.key.device,
            "cost": self._limited(profile),
            "kv_blocks": int(pool) // profile.kv_bytes_per_block,
            "cpu_blocks": int(swap) // profile.cpu_bytes_per_block,
            "block_bytes": profile.kv_bytes_per_block,
            "cpu_block_bytes": profile.cpu_bytes_per_block,
            "kv_cache_dtype": self.kv_cache_dtype,
            "swap_dtype": self.swap_dtype,
            "block_size": profile.block_size,
            "max_model_len": self._context(profile.max_positions),
            "stages": profile.key.pp,
            "stage_shares": profile.stage_shares if profile.key.pp > 1 else (),
            "decision_s": profile.host_s,
            "basis": ProfileBasis(Path(self.hardware).name, profile.date, profile.errors.median, profile.errors.p95),
        }

    @property
    def _link(self) -> float | None:
        return bytes_per_s(self.swap_bandwidth_gbps)

    def _limited(self, profile: Profile) -> LinearCost:
        if self._link is None:
            return profile.cost
        # The ranks of a stage move their shares at the same time, and the costs of stages add up.
        return with_link_limit(profile.cost, profile.cpu_bytes_per_block / profile.key.tp / self._link)

    def _swap_bytes(self, usual: float) -> float:
        return usual if self.swap_gib is None else self.swap_gib * _GIB

    def _states(self, state_bytes: int, pool: float, swap: float, block_bytes: int) -> StateSizes | None:
        if not state_bytes:
            return None
        found = StateSizes.fitting(
            state_bytes,
            pool_bytes=pool,
            swap_bytes=swap,
            block_bytes=block_bytes,
            seqs=MAX_NUM_SEQS,
            snapshots=_SNAPSHOTS,
        )
        if not found.device:
            raise ConfigError(
                f"kv_gib must be at least {state_bytes / STATE_SHARE / _GIB:.3g}, because a request's state takes "
                f"{state_bytes / _GIB:.3g} GiB"
            )
        return found

    def _context(self, most: int) -> int:
        if self.max_model_len is None:
            return most
        if not 2 <= self.max_model_len <= most:
            raise ConfigError(f"max_model_len must be in [2, {most}], the model's positions, got {self.max_model_len}")
        return self.max_model_len
