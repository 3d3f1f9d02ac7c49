from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from skipjoin.options import ConfigError, Option, check, settings_of, unknown

NAME, MODULE = "CpuTier", "skipjoin.vllm"
_KEY = "--kv-transfer-config: kv_connector_extra_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    cpu_gb: Annotated[float, Option("Gigabytes of memory for KV, for each rank.", above=0, high=1e6)] = 4.0
    # What PCIe 4.0 with 16 lanes moves in practice.
    link_gb_s: Annotated[float, Option("Gigabytes that the link moves in a second.", above=0, high=1e6)] = 20.0

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def read(cls, config: Any) -> TierOptions:
        given = config.kv_transfer_config.kv_connector_extra_config or {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"{_KEY} must be an object, got {given!r}")
        known = tuple(settings_of(cls))
        for name in given:
            if name not in known:
                raise unknown(_KEY, name, known)
        try:
            return cls(**given)
        except ConfigError as error:
            raise ConfigError(f"{_KEY}: {error}") from error

    def blocks(self, block_bytes: int) -> int:
        found = int(self.cpu_gb * 1e9 / block_bytes)
        if found < 1:
            raise ConfigError(f"{_KEY}: cpu_gb must hold a block of {block_bytes / 1e9:g} GB, got {self.cpu_gb:g}")
        return found

    def block_s(self, block_bytes: int) -> float:
        return block_bytes / (self.link_gb_s * 1e9)


def is_chosen(config: Any) -> bool:
    transfer = config.kv_transfer_config
    return transfer is not None and (transfer.kv_connector, transfer.kv_connector_module_path) == (NAME, MODULE)
