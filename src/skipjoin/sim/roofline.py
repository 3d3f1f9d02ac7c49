from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from skipjoin.config import ConfigError
from skipjoin.core.step import StepShape
from skipjoin.sim.hardware import (
    DEVICES,
    GIB,
    GPUS_PER_SERVER,
    NETWORK_BYTES_PER_S,
    NETWORK_LATENCY_S,
    Device,
    DeviceGroup,
)
from skipjoin.sim.models import ModelShape

# Number of tokens for whose activations memory is reserved.
_ACTIVATION_TOKENS = 2048
# Deepest pipeline that is suggested for a model that does not fit.
_MAX_STAGES = 16


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Achieved shares of data sheet figures, and overheads in seconds."""

    memory: float = 0.8
    arithmetic: float = 0.6
    attention: float = 0.4
    link: float = 0.8
    layer_s: float = 50e-6
    step_s: float = 2e-3
    transfer_s: float = 20e-6


DEFAULT_EFFICIENCY = Efficiency()


class RooflineCost:
    """Roofline cost model of simulated hardware.

    A step of T tokens (prefill and decodes) takes, summed over the stages:

        max(T x layer matrices + decodes x output head, reading the weights once, of experts those in use)
        + prefill's query-key pairs x arithmetic + decodes' context x reading its KV
        + two all-reduces per layer, if tp > 1 + sending T activations between stages
        + a constant per layer and per step.

    The cached context of a prefill chunk is charged as arithmetic, which underestimates chunks of less than about 100
    tokens over a long context.

    Args:
        block_size, swap_dtype: Format of blocks in CPU memory. Quantization is faster than the link and costs nothing.
        link_bytes_per_s: Limit of each GPU's link to CPU memory; None for none.
    """

    # Costs are constant during a simulation, and exact.
    revision: int = 0
    margin: float = 1.0

    def __init__(
        self,
        model: ModelShape,
        group: DeviceGroup,
        efficiency: Efficiency = DEFAULT_EFFICIENCY,
        block_size: int = 16,
        swap_dtype: str = "auto",
        *,
        link_bytes_per_s: float | None = None,
    ) -> None:
        check_split(model, group)
        if block_size < 1:
            raise ConfigError(f"block_size must be at least 1, got {block_size}")
        device, tp, share = group.device, group.tp, efficiency
        self.stages = group.pp

        flops_per_s = device.flops_per_s * share.arithmetic * tp
        memory_bytes_per_s = device.memory_bytes_per_s * share.memory * tp
        self._weights_s = model.read_bytes(math.inf) / memory_bytes_per_s
        self._experts_s = self._weights_s - model.read_bytes(0) / memory_bytes_per_s
        self._unused = 0.0 if model.experts is None else 1 - model.experts.per_token / model.experts.count
        self._layers_token_s = model.flops_per_token / flops_per_s
        self._head_token_s = 2 * model.head_parameters / flops_per_s
        # QK and PV: two dot products of head_dim multiply-adds per pair, head and layer.
        pair_flops = 4 * model.kv_layers * model.heads * model.head_dim
        self._pair_s = pair_flops / (device.flops_per_s * share.attention * tp)
        self._context_token_s = model.kv_bytes_per_token / memory_bytes_per_s
        self._head_token_s += 2 * model.state_bytes / memory_bytes_per_s  # states of decodes are read and written

        self._floor_s, self._link_token_s = _links(model, group, share)
        self._floor_s += share.step_s + share.layer_s * model.layers

        # Each GPU copies its shard of a block over its own link.
        link = device.host_bytes_per_s * share.link
        link = link if link_bytes_per_s is None else min(link, link_bytes_per_s)
        self._block_s = model.cpu_block_bytes(block_size, swap_dtype) / (link * group.gpus)
        self._transfer_s = share.transfer_s

    def step(self, shape: StepShape) -> float:
        prefill, attention, decodes, context = shape
        tokens = prefill + decodes
        matrices_s = tokens * self._layers_token_s + decodes * self._head_token_s
        weights_s = self._weights_s - self._experts_s * self._unused**tokens if self._experts_s else self._weights_s
        return (
            self._floor_s
            + max(matrices_s, weights_s)
            + attention * self._pair_s
            + context * self._context_token_s
            + tokens * self._link_token_s
        )

    def transfer(self, blocks: float) -> float:
        return self._transfer_s + blocks * self._block_s


def _links(model: ModelShape, group: DeviceGroup, share: Efficiency) -> tuple[float, float]:
    device, tp, hops = group.device, group.tp, group.pp - 1
    token_bytes = model.hidden * model.parameter_bytes
    reduces = 2 * model.layers if tp > 1 else 0
    # A ring all-reduce sends each byte 2 (n - 1) / n times; its latency is modeled by the depth of a tree.
    reduce_token_s = token_bytes * 2 * (tp - 1) / tp / (device.peer_bytes_per_s * share.link)
    reduce_s = device.peer_latency_s * (tp - 1).bit_length()
    if group.gpus > GPUS_PER_SERVER:
        hop_token_s, hop_s = token_bytes / (NETWORK_BYTES_PER_S * share.link), NETWORK_LATENCY_S
    else:
        hop_token_s, hop_s = token_bytes / (device.peer_bytes_per_s * share.link), device.peer_latency_s
    return reduces * reduce_s + hops * hop_s, reduces * reduce_token_s + hops * hop_token_s


def check_split(model: ModelShape, group: DeviceGroup) -> None:
    """Raise `ConfigError`, with the nearest valid value, if the model cannot be split over the group."""
    if model.kv_heads % group.tp:
        nearest = min(_splits(model), key=lambda tp: (abs(tp - group.tp), -tp))
        raise ConfigError(
            f"hardware: tp must divide the {model.kv_heads} key-value heads of {model.name}, got {group.tp}; "
            f"the nearest valid value is {nearest}"
        )
    if group.pp > model.layers:
        raise ConfigError(f"hardware: pp must be at most {model.layers}, the layers of {model.name}, got {group.pp}")


def _splits(model: ModelShape) -> list[int]:
    return [tp for tp in range(1, GPUS_PER_SERVER + 1) if model.kv_heads % tp == 0]


def kv_blocks(
    model: ModelShape, group: DeviceGroup, block_size: int, kv_gib: float | None = None, utilization: float = 0.9
) -> int:
    """Return the number of KV blocks that fit into `kv_gib` over all GPUs, or into the memory besides the model."""
    check_split(model, group)
    if block_size < 1:
        raise ConfigError(f"block_size must be at least 1, got {block_size}")
    if not 0 < utilization <= 1:
        raise ConfigError(f"utilization must be in (0, 1], got {utilization}")
    if kv_gib is not None and not 0 < kv_gib <= 1e6:
        raise ConfigError(f"kv_gib must be in (0, 1e+06], got {kv_gib}")
    block_bytes = block_size * model.kv_bytes_per_token
    usable = utilization if kv_gib is None else 1.0
    available = _max_kv_bytes(model, group, usable)
    if available < block_bytes:
        raise _too_small(model, group, usable, block_bytes)
    pool = available if kv_gib is None else int(kv_gib * GIB)
    if not block_bytes <= pool <= available:
        raise ConfigError(
            f"kv_gib must be in [{block_bytes / GIB:.3g}, {available / GIB:.4g}], from one block to what "
            f"{model.name} leaves of the memory of {group.name}, got {kv_gib}"
        )
    return pool // block_bytes


def _max_layers(model: ModelShape, group: DeviceGroup) -> int:
    return -(-model.layers // group.pp)


def _fixed_bytes(model: ModelShape, group: DeviceGroup) -> int:
    if group.pp == 1:
        weights = model.weight_bytes
    else:
        # The embedding table is on the first stage, the output head on the last.
        layers = _max_layers(model, group)
        weights = model.bytes_of(layers * model.layer_parameters + model.head_parameters, layers / model.layers)
    # Residual, norm, queries and output are replicated at full width; MLP activations are split.
    widths = 4 * model.hidden + 2 * _mlp_columns(model) // group.tp
    return weights // group.tp + _ACTIVATION_TOKENS * widths * model.parameter_bytes


def _mlp_columns(model: ModelShape) -> int:
    of = model.experts
    return model.intermediate if of is None else max(model.intermediate, of.per_token * of.width)


def _max_kv_bytes(model: ModelShape, group: DeviceGroup, usable: float) -> int:
    left = int(group.device.memory_bytes * usable) - _fixed_bytes(model, group)
    return left * group.tp * model.layers // _max_layers(model, group)


def _too_small(model: ModelShape, group: DeviceGroup, usable: float, block_bytes: int) -> ConfigError:
    need, have = _fixed_bytes(model, group), int(group.device.memory_bytes * usable)
    fits = " or ".join(_fitting(model, group.device, usable, block_bytes))
    return ConfigError(
        f"hardware: {model.name} has {model.weight_bytes / GIB:.1f} GiB of weights; with activations each GPU of "
        f"{group.name} needs {need / GIB:.1f} GiB and more for KV, and {have / GIB:.1f} GiB of it may be used; "
        + (f"{fits} would do" if fits else "no GPU of the catalog would do")
    )


def _fitting(model: ModelShape, device: Device, usable: float, block_bytes: int) -> Iterator[str]:
    def holds(group: DeviceGroup) -> bool:
        return _max_kv_bytes(model, group, usable) >= block_bytes

    stages = range(1, min(_MAX_STAGES, model.layers) + 1)
    groups = [group for tp in _splits(model) for pp in stages if holds(group := DeviceGroup(device, tp, pp))]
    if groups:
        yield min(groups, key=lambda group: (group.gpus, group.pp)).name
    single = [other for other in DEVICES.values() if other is not device and holds(DeviceGroup(other))]
    if single:
        yield min(single, key=lambda other: other.memory_bytes).name
