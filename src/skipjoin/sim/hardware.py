from __future__ import annotations

import re
from dataclasses import dataclass

from skipjoin.config import ConfigError, unknown

GIB = 1 << 30
# The papers' servers have eight GPUs and a 400 Gb/s network (AWS p4d, DGX A100).
GPUS_PER_SERVER = 8
NETWORK_BYTES_PER_S = 50e9
# EconoServe ran DistServe with 100 Gb/s Ethernet between two machines (section 2.4).
SPLIT_NETWORK_GBPS = 100.0
# One small message between two servers.
NETWORK_LATENCY_S = 30e-6

# One direction of a x16 slot: transfers per second, 16 lanes, 128b/130b encoding, 8 bits a byte.
_PCIE3, _PCIE4, _PCIE5 = (transfers * 16 * 128 / 130 / 8 for transfers in (8e9, 16e9, 32e9))
# Latency of a small all-reduce per doubling of the group: about 8 us with two GPUs, 25 us with eight.
_ALL_REDUCE_LATENCY_S = 8e-6


@dataclass(frozen=True, slots=True)
class Device:
    """GPU data sheet, with bandwidths in one direction; `Efficiency` holds the shares reached in practice."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: float  # dense half-precision matrix operations with float32 accumulation
    host_bytes_per_s: float
    peer_bytes_per_s: float  # total bandwidth to the other GPUs of the server
    host_memory_bytes: int
    peer_latency_s: float = _ALL_REDUCE_LATENCY_S  # of a small all-reduce, per doubling of the group


# RAM of typical servers with eight of these GPUs: AWS p4d, DGX A100 80GB, DGX-1, DGX H100 and DGX H200.
_P4D, _DGX_1, _DGX = (gib * GIB // GPUS_PER_SERVER for gib in (1152, 512, 2048))
# NVIDIA's data sheets of the SXM modules. Memory is in GiB, although the sheets say GB. The sheets' NVLink figures
# count both directions, and their FLOP/s assume sparsity from the H100 on, so both are halved here.
_DEVICES = (
    Device("a100-40gb", 40 * GIB, 1555e9, 312e12, _PCIE4, 300e9, _P4D),
    Device("a100-80gb", 80 * GIB, 2039e9, 312e12, _PCIE4, 300e9, _DGX),
    Device("v100-32gb", 32 * GIB, 900e9, 125e12, _PCIE3, 150e9, _DGX_1),
    Device("h100-80gb", 80 * GIB, 3350e9, 989e12, _PCIE5, 450e9, _DGX),
    # The driver reports 143,771 MiB.
    Device("h200-141gb", 143_771 << 20, 4800e9, 989e12, _PCIE5, 450e9, _DGX),
)
DEVICES: dict[str, Device] = {device.name: device for device in _DEVICES}


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """GPUs that serve one copy of a model: `pp` pipeline stages of `tp` GPUs each, in one server."""

    device: Device
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.tp <= GPUS_PER_SERVER:
            raise ConfigError(f"hardware: tp must be in [1, {GPUS_PER_SERVER}], the GPUs of a server, got {self.tp}")
        if self.pp < 1:
            raise ConfigError(f"hardware: pp must be at least 1, got {self.pp}")

    @property
    def gpus(self) -> int:
        return self.tp * self.pp

    @property
    def name(self) -> str:
        split = (f"tp{self.tp}" if self.tp > 1 else "") + (f"pp{self.pp}" if self.pp > 1 else "")
        return f"{self.device.name}:{split}" if split else self.device.name


_SPLIT = re.compile(r"(?:tp(?P<tp>\d{1,4}))?(?:pp(?P<pp>\d{1,4}))?")


def parse_hardware(text: str) -> DeviceGroup:
    """Parse a text such as a100-40gb, A100-40 or a100-40gb:tp8pp2."""
    name, colon, split = text.strip().lower().partition(":")
    found = _SPLIT.fullmatch(split)
    if found is None or (colon and not split):
        raise ConfigError(f"hardware must be a GPU and how it is split, such as a100-40gb:tp8pp2, got {text!r}")
    return DeviceGroup(_device(name), int(found["tp"] or 1), int(found["pp"] or 1))


def _device(name: str) -> Device:
    key = re.sub(r"[ _]", "-", name)
    for spelling in (key, f"{key}gb"):
        if spelling in DEVICES:
            return DEVICES[spelling]
    raise unknown("hardware", name, DEVICES)
